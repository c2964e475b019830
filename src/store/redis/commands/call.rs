//! Calls scripts.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::time::Instant;

use super::Commands;
use crate::store::redis::errors::classify::{judge, store_error};
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, By, Script, millis};
use crate::store::{HandedOver, StoreError, Token};

/// What a script that ends a lease adds to its answer if it has told only some of the waiters, so that [`wake_rest`] must
/// continue.
pub(crate) const REST: i64 = 10;

/// Tells the remaining waiters of an ended lease, a bounded number per call. `ended` is the token in the fence behind the
/// last of them; the message begins with `says`. Gives up after `within` or at an error: a waiter that was not told asks
/// again when the lease would have ended.
pub(crate) async fn wake_rest(
    commands: &Commands,
    name: &str,
    ended: &Token,
    says: impl Fn(&mut Cmd) + Sync,
    within: Duration,
) {
    let until = Instant::now() + within;
    let args = |cmd: &mut Cmd| {
        cmd.arg(ended.as_str());
        says(cmd);
    };
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match run(commands, &scripts::WAKE_REST, name, 160, args, left).await {
            Ok(Value::Int(told)) if told > REST => {}
            _ => return,
        }
    }
}

/// HAND OVER, repeated while the script asks for it, because each call passes a bounded number of places. With `lease`
/// `None`, for the grant of a waiter that has left, the lease keeps its remaining time.
pub(crate) async fn hand_over(
    commands: &Commands,
    name: &str,
    token: &Token,
    lease: Option<Duration>,
    (hops, is_leaving): (u8, bool),
    within: Duration,
) -> Result<HandedOver, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str());
        match lease {
            Some(lease) => cmd.arg(millis(lease)),
            None => cmd.arg(""),
        };
        cmd.arg(hops).arg(u8::from(is_leaving));
    };
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match run(commands, &scripts::HAND_OVER, name, 96, args, left).await? {
            Value::Int(3) => {}
            Value::Int(2) => return Ok(HandedOver::ToWaiter),
            Value::Int(1) => return Ok(HandedOver::Freed),
            Value::Int(0) => return Ok(HandedOver::NotMine),
            _ => return Err(refused(unexpected())),
        }
    }
}

/// Runs a script by its digest, or by its text if the server does not know it, within one deadline.
pub(crate) async fn run(
    commands: &Commands,
    script: &Script,
    name: &str,
    size: usize,
    args: impl Fn(&mut Cmd) + Sync,
    within: Duration,
) -> Result<Value, StoreError> {
    let call = |by| {
        let mut cmd = script.call(by, name, size);
        args(&mut cmd);
        cmd
    };
    run_call(commands, name, call, within).await
}

/// The same for a call about `key` that `call` builds.
pub(crate) async fn run_call(
    commands: &Commands,
    key: &str,
    call: impl Fn(By) -> Cmd + Sync,
    within: Duration,
) -> Result<Value, StoreError> {
    let sent = Instant::now();
    let spread = commands.is_spread();
    let mut cmd = call(By { sha1: true, spread });
    let mut answer = commands.send(key, &cmd, within).await?;
    if matches!(&answer, Value::ServerError(error) if error.code() == "NOSCRIPT") {
        cmd = call(By { sha1: false, spread });
        answer = commands.send(key, &cmd, within.saturating_sub(sent.elapsed())).await?;
    }
    match answer {
        Value::ServerError(error) => Err(refused(RedisError::from(error))),
        answer => Ok(answer),
    }
}

/// The error for a reply that the guard cannot use.
pub(crate) fn refused(error: RedisError) -> StoreError {
    store_error(judge(&error).0, error)
}
