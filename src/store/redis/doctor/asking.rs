//! How the checkup asks a server, and reads what it answers.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};

use crate::store::StoreErrorKind;
use crate::store::redis::errors::classify::{reason, store_error};
use crate::store::redis::errors::reply::bounded;

/// How long one answer may take here.
pub(super) const ANSWER: Duration = Duration::from_secs(1);

/// What it costs that nobody is told.
pub(super) const UNTOLD: &str =
    "nobody is told that a load has ended: waits in other processes end by their timers, later";

/// What it costs to be without the server.
pub(super) const ALONE: &str =
    "each process loads for itself, once per key (with OnStoreDown::FailClosed it answers with an error)";

/// Sends one command; a refusal is an answer.
pub(super) async fn one(
    commands: &mut MultiplexedConnection,
    cmd: impl std::borrow::Borrow<Cmd>,
) -> RedisResult<Value> {
    let mut alone = redis::pipe();
    alone.add_command(cmd.borrow().clone());
    Ok(all(commands, &alone).await?.into_iter().next().unwrap_or(Value::Nil))
}

/// The same for several: in a pipeline each refusal stands in its place.
pub(super) async fn all(
    commands: &mut MultiplexedConnection,
    pipeline: &Pipeline,
) -> RedisResult<Vec<Value>> {
    let count = pipeline.len();
    bounded(ANSWER, commands.send_packed_commands(pipeline, 0, count)).await
}

/// Reads pairs, from a map or a list.
pub(super) fn pairs(answer: Value) -> Option<HashMap<String, Value>> {
    redis::from_redis_value(answer).ok()
}

pub(super) fn text(value: &Value) -> Option<String> {
    redis::from_redis_value_ref(value).ok()
}

/// An error in its own words, without what it quotes of a command.
pub(super) fn words(error: RedisError) -> String {
    reason(&store_error(StoreErrorKind::Unavailable, error))
}
