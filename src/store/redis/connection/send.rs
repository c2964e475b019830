//! Sends commands and judges their replies. A command waits for the first connection, and starts the reconnect task if there is
//! none.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout, timeout_at};

use super::breaker::{CircuitBreaker, silent};
use super::{LiveConnection, Loss, Pacing, Supervisor};
use crate::observe::{log, warn_if};
use crate::store::redis::errors::{ConnectionFate, classify, code, is_protocol, store_error};
use crate::store::{StoreError, StoreErrorKind, StoreResult};

/// The longest time that a command may take, whatever its caller says: a bound for the arithmetic of times.
const LONGEST: Duration = Duration::from_secs(86_400);

/// How a command is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// Once. If the connection breaks under the command, the caller receives the error: the command may have run.
    Once,
    /// A read: if the connection breaks under it, it is sent once more, on the next connection.
    Repeat,
    /// Once, after ASKING, which lets a node of a cluster answer for a slot that is migrating to it.
    #[cfg(feature = "cluster")]
    Asking,
}

impl Supervisor {
    /// Sends a command about `key` and waits for its reply, at most `within` in all. Also returns the session of the connection on which
    /// the reply came: all replies of one session are from one server, in the order of their commands.
    ///
    /// Some of the server's errors are returned as replies, because they belong to the protocol: NOSCRIPT,
    /// WRONGTYPE, and a cluster node's redirections.
    pub(crate) async fn send(
        self: &Arc<Self>,
        key: &str,
        cmd: &Cmd,
        within: Duration,
        mut mode: SendMode,
    ) -> StoreResult<(Value, u64)> {
        let within = within.min(LONGEST);
        let (began, mut left) = (Instant::now(), within);
        let deadline = began + within;
        loop {
            self.bulk_limit.check(cmd)?;
            let live = match self.current(key)? {
                Some(live) => live,
                // Boxed, so that every command's future is smaller.
                None => Box::pin(self.first(key, &mut left)).await?,
            };
            let LiveConnection { generation, session, mut connection, traffic } = live;
            let sent = traffic.breaker.begin(left);
            let waits = traffic.pacing.as_ref().map(Pacing::wait);
            let reply = match mode {
                #[cfg(feature = "cluster")]
                SendMode::Asking => timeout_at(deadline, Box::pin(ask(&mut connection, cmd))).await,
                _ => timeout_at(deadline, connection.send_packed_command(cmd)).await,
            };
            if let Some(waits) = waits {
                waits.continue_in_turn().await;
            }
            match self.handle_reply(cmd, (generation, &traffic.breaker), left, sent, reply) {
                // Repeated only once: the command itself may break connections, for example a read whose reply exceeds an output limit.
                Err(error) if error.kind == StoreErrorKind::Broken && mode == SendMode::Repeat => {
                    (mode, left) = (SendMode::Once, within.saturating_sub(began.elapsed()));
                }
                reply => return Ok((reply?, session)),
            }
        }
    }

    /// Waits for the first connection, at most `left`, and subtracts the time that it has waited from `left`.
    async fn first(self: &Arc<Self>, key: &str, left: &mut Duration) -> StoreResult<LiveConnection> {
        let started = Instant::now();
        let opened = timeout(*left, self.opened(key)).await;
        *left = left.saturating_sub(started.elapsed());
        // Not `TimedOut`: the command was not sent.
        opened.map_err(|_| StoreError::new(StoreErrorKind::Unavailable))?
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(crate) async fn until_up(self: &Arc<Self>) -> StoreResult<()> {
        let mut changes = self.changes.subscribe();
        loop {
            match self.opened("").await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind == StoreErrorKind::Closed => return Err(error),
                Err(_) => {
                    let _ = changes.changed().await;
                }
            }
        }
    }

    /// Waits for the first connection. Starts the reconnect task if there is none.
    async fn opened(self: &Arc<Self>, key: &str) -> StoreResult<LiveConnection> {
        let mut changes = self.changes.subscribe();
        let mut started = false;
        loop {
            changes.mark_unchanged();
            if let Some(live) = self.current(key)? {
                return Ok(live);
            }
            if self.start() {
                if started {
                    // This caller's runtime is being shut down, so it has dropped the reconnect task.
                    return Err(StoreError::new(StoreErrorKind::Unavailable));
                }
                started = true;
            }
            let _ = changes.changed().await;
        }
    }

    /// Waits until the present attempt to connect has ended, however long that takes.
    #[cfg(feature = "cluster")]
    pub(crate) async fn settled(self: &Arc<Self>) -> StoreResult<()> {
        let mut changes = self.changes.subscribe();
        while matches!(self.slot().state, super::ConnectionState::Connecting(_)) {
            let _ = changes.changed().await;
        }
        self.opened("").await.map(drop)
    }

    /// Handles a reply, or a time-out after `waited`.
    fn handle_reply(
        &self,
        cmd: &Cmd,
        (generation, breaker): (u64, &CircuitBreaker),
        waited: Duration,
        sent: Option<Instant>,
        reply: Result<RedisResult<Value>, Elapsed>,
    ) -> StoreResult<Value> {
        match reply {
            Ok(reply) => {
                if reply.is_ok() {
                    breaker.record_answer(sent);
                }
                let judged = self.judge(Some(cmd), generation, reply);
                if judged.is_ok() {
                    self.refusals.carried_out(cmd);
                }
                judged
            }
            Err(_) => {
                self.handle_timeout(generation, breaker, waited);
                Err(StoreError::new(StoreErrorKind::TimedOut))
            }
        }
    }

    /// Returns a reply that belongs to the protocol. Any other error is recorded, logged if it is news, and may drop the connection.
    pub(super) fn judge(
        &self,
        cmd: Option<&Cmd>,
        generation: u64,
        reply: RedisResult<Value>,
    ) -> StoreResult<Value> {
        let mut answered = false;
        let error = match reply {
            Ok(Value::ServerError(error)) => {
                answered = true;
                let redirects = || {
                    self.connector.endpoint.is_node() && matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN")
                };
                if matches!(error.code(), "NOSCRIPT" | "WRONGTYPE") || redirects() {
                    return Ok(Value::ServerError(error));
                }
                RedisError::from(error)
            }
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let (mut kind, fate) = classify(&error);
        let is_too_long = is_protocol(&error);
        if kind == StoreErrorKind::Unavailable && !answered {
            // The command was sent and its answer is lost, so it may have run.
            kind = StoreErrorKind::Broken;
        }
        if let Some(cmd) = cmd.filter(|_| is_too_long || kind == StoreErrorKind::Broken) {
            self.bulk_limit.broken_by(cmd, is_too_long);
        }
        if code(&error) == Some("NOREPLICAS") {
            self.connector.endpoint.doubt();
        }
        let is_news =
            fate == ConnectionFate::Keep && self.refusals.is_news(code(&error).unwrap_or_default(), cmd);
        let failure = store_error(kind, error);
        match fate {
            // The server will refuse the same command again, so it is logged once for all requests.
            ConnectionFate::Keep => {
                let reason = self.connector.text_of(&failure);
                warn_if!(log::REDIS, is_news, %reason, "redis refuses a command");
            }
            ConnectionFate::Drop => self.lose(generation, &failure, Loss::of(answered && !is_too_long)),
        }
        Err(failure)
    }

    /// Drops the connections if this one has been silent for two deadlines; otherwise requests a check, because with little traffic each
    /// command that is lost on a dead connection would count as a single slow one.
    pub(super) fn handle_timeout(&self, generation: u64, breaker: &CircuitBreaker, waited: Duration) {
        if *self.changes.borrow() != generation {
            return;
        }
        if !breaker.record_timeout(waited) {
            let reason = self.connector.text_of(&StoreError::new(StoreErrorKind::TimedOut));
            warn_if!(log::REDIS, self.late.is_due(), %reason, ?waited, "redis does not answer a command in time");
            self.suspect();
        } else {
            self.lose(generation, &silent(), Loss::Doubtful);
        }
    }
}

/// Sends a command after ASKING. Both are sent in one write, because no other command may come between them.
#[cfg(feature = "cluster")]
async fn ask(connection: &mut redis::aio::MultiplexedConnection, cmd: &Cmd) -> RedisResult<Value> {
    let mut pipeline = redis::pipe();
    pipeline.cmd("ASKING").add_command(cmd.clone());
    let replies = connection.send_packed_commands(&pipeline, 0, 2).await?;
    // Without the right to ASKING, the second answer is the same as without ASKING.
    replies.into_iter().nth(1).ok_or_else(crate::store::redis::errors::unexpected)
}
