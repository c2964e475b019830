//! Checks for [`crate::fuzzed`]: invariants that hold for any bytes that a server sends.

use redis::{RedisError, Value};
use uuid::Uuid;

use super::commands::lock_steps;
use super::contract::{AcquireReply, read_acquire, read_change, read_renew_member};
use super::errors::{classify, reason, store_error};
use super::{contract, doctor, endpoint, inbox, keyspace};
use crate::store::Taken;
use crate::store::{Acquired, Token};

pub(crate) const READERS: &crate::fuzzed::Readers =
    &[("message", message), ("token", token), ("reply", reply), ("refusal", refusal), ("flags", flags)];

fn message(payload: &[u8]) {
    let _ = inbox::parse(payload);
}

fn token(text: &[u8]) {
    if let Some(token) = Token::parse(text) {
        assert_eq!(token.as_str().as_bytes(), text, "a token is compared as it stands");
        assert!(token.as_str().starts_with(token.node()));
    }
}

/// Parses the bytes as the reply to each command of the guard.
fn reply(bytes: &[u8]) {
    let Ok(reply) = redis::parse_redis_value(bytes) else { return };
    if let Some(AcquireReply::Acquired(Acquired::Held { holder, .. })) = read_acquire(reply.clone()) {
        assert_eq!(holder.as_str().len(), Token::LEN);
    }
    let _ = lock_steps::to_go_on(reply.clone());
    let _ = lock_steps::yes(reply.clone());
    if let Some(Taken::Granted { fence }) = lock_steps::taken(reply.clone()).map(|(answer, _)| answer.taken) {
        assert!(fence > 0, "0 is no fence");
    }
    let _ = lock_steps::mutex_holder(reply.clone());
    let _ = lock_steps::permit_taken(reply.clone());
    let _ = lock_steps::permit_freed(reply.clone());
    if let Some(Some(state)) = lock_steps::semaphore_state(reply.clone()) {
        assert!(state.available <= state.capacity);
    }
    let _ = contract::tag_state(reply.clone());
    let _ = read_change(reply.clone(), Uuid::nil());
    let _ = read_renew_member(reply.clone());
    let _ = endpoint::is_primary(reply.clone());
    if let Value::Array(answers) = &reply {
        let _ = endpoint::reading(answers.clone(), (tokio::time::Instant::now(), std::time::Duration::ZERO));
    }
    for finding in doctor::read_any(&reply) {
        assert!(!finding.to_string().is_empty());
    }
    #[cfg(feature = "cluster")]
    super::cluster::slots::read_slots(reply);
}

/// Parses the text behind the `-` of an error reply.
fn refusal(line: &[u8]) {
    let reply = [b"-", line, b"\r\n"].concat();
    let Ok(Value::ServerError(refused)) = redis::parse_redis_value(&reply) else { return };
    #[cfg(feature = "cluster")]
    super::cluster::slots::read_redirect(refused.code(), refused.details());
    let error = RedisError::from(refused);
    let (kind, _) = classify(&error);
    let logged = reason(&store_error(kind, error));
    assert!(!logged.contains("sg1:"), "a key is logged: {logged}");
}

/// Merges the flags that the crate needs into the server's setting of keyspace events.
fn flags(text: &[u8]) {
    let flags = String::from_utf8_lossy(text);
    if let Some(merged) = keyspace::merged(&flags) {
        assert!(merged.starts_with(&*flags), "what others have set stays");
        assert_eq!(keyspace::merged(&merged), None);
    }
}
