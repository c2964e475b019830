//! ACQUIRE: an entry, an ending, the lease, or a place in the queue. It must not run late.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};

use super::call::{refused, run};
use super::client::unexpected;
use super::in_time::{Ran, in_time};
use super::scripts::{self, millis, push_moment, push_seen};
use super::topology::Commands;
use crate::key::Key;
use crate::store::{Acquire, Acquired, StoreError, Token};

pub(super) async fn acquire(
    commands: &Commands,
    key: &Key,
    ask: Acquire<'_>,
    within: Duration,
) -> Result<Acquired, StoreError> {
    in_time(commands, within, |last, left| attempt(commands, key, ask, last, left)).await
}

async fn attempt(
    commands: &Commands,
    key: &Key,
    ask: Acquire<'_>,
    last: Option<u64>,
    within: Duration,
) -> Result<Ran<Acquired>, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
        push_seen(cmd, ask.seen);
        cmd.arg(ask.behind.map_or("", Token::as_str)).arg(u8::from(ask.queue));
        push_moment(cmd, last);
    };
    let answer = run(commands, &scripts::ACQUIRE, key.name(), 288, args, within).await?;
    read(answer).ok_or_else(|| refused(unexpected()))
}

/// Reads what `acquire.lua` returns.
pub(super) fn read(answer: Value) -> Option<Ran<Acquired>> {
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
            return Some(Ran::TooLate(u64::try_from(shown).unwrap_or(0)));
        }
        _ => return None,
    };
    Some(Ran::InTime(acquired))
}
