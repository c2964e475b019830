//! ACQUIRE: answers an entry, an outcome, the lease, or a place in the queue. It must not run late.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::Instant;

use super::Commands;
use super::call::{refused, run_repeatable};
use super::deadline::{Executed, with_deadline};
use crate::key::Key;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, get_entry, millis, push_moment, push_seen};
use crate::store::{Acquire, Acquired, StoreError, Token};

pub(crate) async fn acquire(
    commands: &Commands,
    key: &Key,
    ask: Acquire<'_>,
    within: Duration,
) -> Result<Acquired, StoreError> {
    let until = Instant::now() + within;
    let left = || until.saturating_duration_since(Instant::now());
    loop {
        let acquire = with_deadline(commands, left(), |last, left| attempt(commands, key, ask, last, left));
        match acquire.await? {
            AcquireReply::Acquired(acquired) => return Ok(acquired),
            AcquireReply::EntryIsThere => {}
        }
        match commands.read(key.name(), &get_entry(key.name()), left()).await? {
            Value::BulkString(entry) => return Ok(Acquired::Found(Bytes::from(entry))),
            // The entry was removed or replaced by foreign data; neither is an entry, so the lease is requested
            // again.
            Value::Nil => {}
            Value::ServerError(error) if error.code() == "WRONGTYPE" => {}
            Value::ServerError(error) => return Err(refused(error.into())),
            _ => return Err(refused(unexpected())),
        }
    }
}

/// The answer of `acquire.lua`.
pub(crate) enum AcquireReply {
    Acquired(Acquired),
    /// There is an entry that was not seen, too large to be returned by a script without blocking the server.
    EntryIsThere,
}

async fn attempt(
    commands: &Commands,
    key: &Key,
    ask: Acquire<'_>,
    last: Option<u64>,
    within: Duration,
) -> Result<Executed<AcquireReply>, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
        push_seen(cmd, ask.seen);
        cmd.arg(ask.behind.map_or("", Token::as_str)).arg(u8::from(ask.queue));
        push_moment(cmd, last);
    };
    // The lease that the first run has granted, or the place in the queue, is found by its token.
    let answer = run_repeatable(commands, &scripts::ACQUIRE, key.name(), 288, args, within).await?;
    read(answer).ok_or_else(|| refused(unexpected()))
}

/// Parses the answer of `acquire.lua`.
pub(crate) fn read(answer: Value) -> Option<Executed<AcquireReply>> {
    let Value::Array(parts) = answer else { return None };
    let mut parts = parts.into_iter();
    let acquired = match (parts.next()?, parts.next(), parts.next()) {
        (Value::Int(1), Some(Value::BulkString(entry)), None) => Acquired::Found(Bytes::from(entry)),
        (Value::Int(2), Some(Value::BulkString(outcome)), None) => Acquired::Ended(Bytes::from(outcome)),
        (Value::Int(3), None, None) => Acquired::Granted,
        (Value::Int(4), Some(Value::Int(remaining)), Some(Value::BulkString(holder))) => {
            let remaining = Duration::from_millis(u64::try_from(remaining).unwrap_or(0));
            Acquired::Held { remaining, holder: Token::parse(&holder)? }
        }
        (Value::Int(5), Some(Value::Int(shown)), None) => {
            return Some(Executed::TooLate(u64::try_from(shown).unwrap_or(0)));
        }
        (Value::Int(6), None, None) => return Some(Executed::InTime(AcquireReply::EntryIsThere)),
        _ => return None,
    };
    Some(Executed::InTime(AcquireReply::Acquired(acquired)))
}
