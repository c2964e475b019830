//! The inputs of one examination, and its findings so far. Also sends the doctor's commands, and parses the answers.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};

use crate::health::Finding;
use crate::store::redis::RedisStore;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::errors::{bounded, reason, store_error};
use crate::store::{Examine, StoreErrorKind};

pub(super) struct Examination<'a> {
    pub(super) store: &'a RedisStore,
    pub(super) ask: Examine,
    pub(super) findings: Vec<Finding>,
}

/// The server to examine further.
pub(super) struct ExaminedServer {
    pub(super) connector: Connector,
    /// For the subscription.
    pub(super) inbox: Connector,
    /// A name whose keys are on this server.
    pub(super) name: String,
    /// The masters of a cluster that can be reached.
    pub(super) reached: Vec<String>,
}

impl Examination<'_> {
    /// The user name of the guard's connections.
    pub(super) fn user(&self) -> String {
        self.store.commands.user().unwrap_or_else(|| "default".to_owned())
    }
}

/// How long one answer may take.
pub(super) const ANSWER: Duration = Duration::from_secs(1);

/// The cost of missing notifications.
pub(super) const WITHOUT_NOTIFICATIONS: &str =
    "no process is told that a load has ended: waits in other processes end by their timers, later";

/// The cost of an unreachable server.
pub(super) const ALONE: &str =
    "each process loads for itself, once per key (with OnStoreDown::FailClosed it answers with an error)";

/// Sends one command; a refusal counts as an answer.
pub(super) async fn one(
    commands: &mut MultiplexedConnection,
    cmd: impl std::borrow::Borrow<Cmd>,
) -> RedisResult<Value> {
    let mut alone = redis::pipe();
    alone.add_command(cmd.borrow().clone());
    Ok(all(commands, &alone).await?.into_iter().next().unwrap_or(Value::Nil))
}

/// Sends several commands; a refusal counts as the answer to its command.
pub(super) async fn all(
    commands: &mut MultiplexedConnection,
    pipeline: &Pipeline,
) -> RedisResult<Vec<Value>> {
    let count = pipeline.len();
    bounded(ANSWER, commands.send_packed_commands(pipeline, 0, count)).await
}

/// Parses pairs, from a map or a list.
pub(super) fn pairs(answer: Value) -> Option<HashMap<String, Value>> {
    redis::from_redis_value(answer).ok()
}

pub(super) fn text(value: &Value) -> Option<String> {
    redis::from_redis_value_ref(value).ok()
}

/// The error's text, without the command that it may quote.
pub(super) fn words(error: RedisError) -> String {
    reason(&store_error(StoreErrorKind::Unavailable, error))
}
