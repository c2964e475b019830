//! How a script is called, whatever it does.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::time::Instant;

use super::Commands;
use crate::store::redis::errors::classify::{judge, store_error};
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, By, Script, millis};
use crate::store::{HandedOver, StoreError, Token};

/// What the script of an ended lease adds to its answer where it has told some of the waiters, and [`wake_rest`] is to go on.
pub(crate) const REST: i64 = 10;

/// Goes on with telling the waiters of a lease that has ended, a bounded number in each call. `ended` is in the fence behind
/// the last of them; the message begins with `says`. What is not told in that time, or fails, is left: a waiter asks again by
/// itself when the lease would have ended.
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

/// HAND OVER, also of a token whose waiter has left; then the lease keeps what time it has: `None`. Each call passes a
/// bounded number of places.
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

/// Runs a script by its digest, or by its text where the server does not know it, in one budget.
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

/// The same for a call about `key` that is built by `call`.
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

/// An answer that nothing can be done about.
pub(crate) fn refused(error: RedisError) -> StoreError {
    store_error(judge(&error).0, error)
}
