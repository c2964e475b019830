//! Scripts of a lease that ends, where one call may not tell all waiters.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::Instant;

use super::Commands;
use super::call::{refused, run};
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis};
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
