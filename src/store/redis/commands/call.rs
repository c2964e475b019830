//! Calls scripts.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::time::Instant;

use super::Commands;
use crate::store::StoreError;
use crate::store::redis::connection::OnBreak;
use crate::store::redis::errors::classify::{judge, store_error};
use crate::store::redis::scripts::{CallForm, Script};

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

/// As [`run`], for a script whose second run with the same arguments changes nothing.
pub(crate) async fn run_repeatable(
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
    call_noting(commands, name, call, within, OnBreak::Repeat).await.map(|(answer, _)| answer)
}

/// The same for a call about `key` that `call` builds.
pub(crate) async fn run_call(
    commands: &Commands,
    key: &str,
    call: impl Fn(CallForm) -> Cmd + Sync,
    within: Duration,
) -> Result<Value, StoreError> {
    run_noting(commands, key, call, within).await.map(|(answer, _)| answer)
}

/// The same. Also returns the session of the answer, as [`Commands::send_noting`].
pub(crate) async fn run_noting(
    commands: &Commands,
    key: &str,
    call: impl Fn(CallForm) -> Cmd + Sync,
    within: Duration,
) -> Result<(Value, u64), StoreError> {
    call_noting(commands, key, call, within, OnBreak::Fail).await
}

async fn call_noting(
    commands: &Commands,
    key: &str,
    call: impl Fn(CallForm) -> Cmd + Sync,
    within: Duration,
    on_break: OnBreak,
) -> Result<(Value, u64), StoreError> {
    let sent = Instant::now();
    let spread = commands.is_spread();
    let mut cmd = call(CallForm { sha1: true, spread });
    let mut answer = commands.send_noting(key, &cmd, within, on_break).await?;
    if matches!(&answer, (Value::ServerError(error), _) if error.code() == "NOSCRIPT") {
        cmd = call(CallForm { sha1: false, spread });
        let left = within.saturating_sub(sent.elapsed());
        answer = commands.send_noting(key, &cmd, left, on_break).await?;
    }
    match answer {
        (Value::ServerError(error), _) => Err(refused(RedisError::from(error))),
        answer => Ok(answer),
    }
}

/// The error for a reply that the guard cannot use.
pub(crate) fn refused(error: RedisError) -> StoreError {
    store_error(judge(&error).0, error)
}
