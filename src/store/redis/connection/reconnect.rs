//! The reconnect task, which keeps the connection up: it connects, reads the server's clock, and connects again when the
//! connection is lost.
//!
//! Also sends commands: a command waits for the first connection, and starts the reconnect task if there is none.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::connector::{Connector, Opened};
use super::{ConnectionState, LiveConnection, Loss, OnBreak, SESSIONS, Supervisor};
use crate::observe::{log, warn_if};
use crate::store::redis::endpoint::TimedReading;
use crate::store::redis::errors::{bounded, store_error};
use crate::store::redis::login::OWN;
use crate::store::{StoreError, StoreErrorKind};
use crate::task::{Backoff, EndedTask, OwnedTask, STABLE, TaskOwner, TaskRef};

/// How often the guard checks whether the driver of the connection has ended. redis-rs notifies its users of that in RESP3
/// only.
const CUT_PERIOD: Duration = Duration::from_millis(100);

/// Returns the error with which the connection has ended, if it has. The driver reads all the time and ends with the
/// connection. The PING is not sent: the driver skips a command whose future was dropped.
fn end_of(connection: &mut MultiplexedConnection) -> Option<RedisError> {
    connection.send_packed_command(&redis::cmd("PING")).now_or_never()?.err()
}

impl TaskOwner for Supervisor {
    fn owned_task(&self) -> &OwnedTask {
        &self.task
    }

    /// The connection's driver has ended with the task.
    fn task_ended(&self, ended: EndedTask<'_>) {
        let before = {
            let mut slot = self.slot();
            if matches!(slot.state, ConnectionState::Closed) {
                return;
            }
            std::mem::replace(&mut slot.state, ConnectionState::Idle)
        };
        drop((before, ended));
        self.changed();
    }
}

/// Keeps a connection up while there is a supervisor.
pub(super) async fn keep(reconnect_task: TaskRef<Supervisor>, connector: Connector, look: Arc<Notify>) {
    let mut backoff = Backoff::new();
    loop {
        let opened = connector.anew().await;
        let mut login = opened.as_ref().map_or(OWN, |opened| opened.login);
        let Some(generation) = reconnect_task.settle(opened) else { return };
        if let Some(generation) = generation {
            let opened_at = Instant::now();
            let (mut again, mut checked_at) = (false, opened_at);
            let mut recovers = reconnect_task.recovers();
            reconnect_task.read_limit(generation, connector.answer).await;
            loop {
                let period = if recovers { STABLE } else { connector.look_period() };
                let has_news = again
                    || tokio::select! {
                        has_news = timeout(period, look.notified()) => has_news.is_ok(),
                        issue = connector.login.later_than(login) => {
                            let Some(mut connection) = reconnect_task.connection(generation) else { break };
                            let auth = issue.auth();
                            let taken = connector.log_in(issue.number, connection.send_packed_command(&auth)).await;
                            if let Ok(true) = taken {
                                login = issue.number;
                            }
                            // An AUTH without an answer counts like any other command without one.
                            reconnect_task.note(generation, taken.map(|_| None));
                            false
                        }
                        () = reconnect_task.until_cut(generation) => break,
                    };
                let Some(mut connection) = reconnect_task.connection(generation) else { break };
                if recovers && opened_at.elapsed() >= STABLE {
                    reconnect_task.is_back(opened_at);
                    recovers = false;
                }
                if !has_news && checked_at.elapsed() < connector.clock && !reconnect_task.has_to_look() {
                    continue;
                }
                checked_at = Instant::now();
                let reading = bounded(connector.answer, connector.look(&mut connection)).await;
                // A single missing answer may mean a slow server. If the next check, which follows at once, is not answered
                // either, the connection is silent.
                again = reconnect_task.note(generation, reading) && !again;
                tokio::select! {
                    has_new_primary = connector.has_been_replaced() => if has_new_primary {
                        reconnect_task.leave(generation);
                    },
                    // The sentinels may be slow, and the connection may break meanwhile.
                    () = look.notified() => look.notify_one(),
                }
            }
            backoff.connected_for(opened_at.elapsed());
        }
        backoff.pause().await;
    }
}

impl TaskRef<Supervisor> {
    /// Records the result of an attempt to connect. Returns the new generation, if the attempt has succeeded; `None` if the
    /// supervisor was dropped or closed, or has another reconnect task.
    fn settle(&self, opened: RedisResult<Opened>) -> Option<Option<u64>> {
        let supervisor = self.owner()?;
        match opened {
            Ok(Opened { connection, reading, login: _ }) => {
                let generation = *supervisor.changes.borrow() + 1;
                let session = SESSIONS.fetch_add(1, Ordering::Relaxed) + 1;
                let up = LiveConnection { generation, session, connection, opened_at: Instant::now() };
                self.with(|supervisor| {
                    if let Some(reading) = reading {
                        supervisor.read(&reading);
                    }
                    supervisor.silence.is_over();
                    supervisor.slot().state = ConnectionState::Up(up);
                })?;
                supervisor.changes.send_modify(|latest| *latest = generation);
                tracing::debug!(target: log::REDIS, generation, "connected to redis");
                Some(Some(generation))
            }
            Err(error) => {
                let why = supervisor.connector.failure(error);
                let is_news = self.with(|supervisor| {
                    let slot = &mut *supervisor.slot();
                    if slot.outage.is_none() {
                        supervisor.connector.outages.begin(&mut slot.outage);
                    }
                    slot.state = ConnectionState::Down(Some(why.clone()));
                    slot.outage_log.is_news(&why)
                })?;
                supervisor.changed();
                warn_if!(log::REDIS, is_news, reason = %supervisor.connector.text_of(&why), "can not connect to redis");
                Some(None)
            }
        }
    }

    /// The connection of `generation`, while it is the current one.
    fn connection(&self, generation: u64) -> Option<MultiplexedConnection> {
        let supervisor = self.owner()?;
        match &supervisor.slot().state {
            ConnectionState::Up(up) if up.generation == generation => Some(up.connection.clone()),
            _ => None,
        }
    }

    /// Queries the server's limit for arguments, after an argument may have broken a connection. Without the right to CONFIG,
    /// the known limit stays in effect.
    async fn read_limit(&self, generation: u64, within: Duration) {
        let is_due = || self.owner().is_some_and(|supervisor| supervisor.bulk_limit.take_unread());
        let Some(mut connection) = self.connection(generation).filter(|_| is_due()) else { return };
        let config = redis::cmd("CONFIG").arg("GET").arg("proto-max-bulk-len").to_owned();
        let answer = bounded(within, connection.send_packed_command(&config)).await;
        drop(connection);
        let settings = answer
            .and_then(|answer| redis::from_redis_value::<HashMap<String, usize>>(answer).map_err(Into::into));
        if let (Ok(settings), Some(supervisor)) = (settings, self.owner())
            && let Some(most) = settings.get("proto-max-bulk-len")
        {
            supervisor.bulk_limit.read(*most);
        }
    }

    /// Waits until the connection of `generation` has ended, and drops it then.
    async fn until_cut(&self, generation: u64) {
        loop {
            sleep(CUT_PERIOD).await;
            let Some(mut connection) = self.connection(generation) else { return };
            if let Some(error) = end_of(&mut connection) {
                self.note(generation, Err(error));
                return;
            }
        }
    }

    /// Whether there is an outage, which the connection ends if it is stable.
    fn recovers(&self) -> bool {
        self.owner().is_some_and(|supervisor| supervisor.slot().outage.is_some())
    }

    /// Ends the outage: the connection that was opened at this moment is stable.
    fn is_back(&self, opened_at: Instant) {
        let Some(supervisor) = self.owner() else { return };
        let outage = supervisor.slot().outage.take();
        if let Some(outage) = outage {
            let node = supervisor.connector.address().filter(|_| supervisor.connector.is_node());
            outage.log_end(&supervisor.connector.outages, opened_at, node);
        }
    }

    /// Whether the connection needs a check although no task suspects it: it has received no answer since the last check,
    /// or its server may have been demoted.
    fn has_to_look(&self) -> bool {
        let Some(supervisor) = self.owner() else { return false };
        let has_received = supervisor.silence.take_received();
        !has_received || supervisor.connector.may_be_demoted()
    }

    /// Drops a working connection whose server is not the primary any more.
    fn leave(&self, generation: u64) {
        let Some(supervisor) = self.owner() else { return };
        let why = (redis::ErrorKind::Client, "the sentinels name another primary");
        let why = store_error(StoreErrorKind::Unavailable, RedisError::from(why));
        supervisor.lose(generation, &why, Loss::Doubtful);
    }

    /// Records a reading of the clock; a failed reading counts as a failed command. Returns whether it was not answered.
    fn note(&self, generation: u64, reading: RedisResult<Option<TimedReading>>) -> bool {
        let Some(supervisor) = self.owner() else { return false };
        match reading {
            Ok(reading) => {
                supervisor.silence.answered(None);
                // The reconnect task's own check does not count as use of the connection.
                supervisor.silence.take_received();
                if let Some(reading) = reading {
                    supervisor.read(&reading);
                }
            }
            Err(error) if error.is_timeout() => {
                supervisor.timed_out(generation, supervisor.connector.answer);
                return true;
            }
            Err(error) => {
                let _ = supervisor.received(None, generation, None, Err(error));
            }
        }
        false
    }
}

impl Supervisor {
    /// Sends a command and waits for its reply, at most `within` in all. Also returns the session of the connection on which
    /// the reply came.
    ///
    /// Some of the server's errors are returned as replies, because they belong to the protocol: NOSCRIPT,
    /// WRONGTYPE, and a cluster node's redirections.
    pub(crate) async fn send_noting(
        self: &Arc<Self>,
        cmd: &Cmd,
        within: Duration,
        on_break: OnBreak,
    ) -> Result<(Value, u64), StoreError> {
        let began = Instant::now();
        match self.attempt(cmd, within).await {
            // Once: the command itself may break connections, for example a read whose reply exceeds an output limit.
            Err(error) if error.kind == StoreErrorKind::Broken && on_break == OnBreak::Repeat => {
                Box::pin(self.attempt(cmd, within.saturating_sub(began.elapsed()))).await
            }
            done => done,
        }
    }

    async fn attempt(self: &Arc<Self>, cmd: &Cmd, within: Duration) -> Result<(Value, u64), StoreError> {
        self.bulk_limit.check(cmd)?;
        let (up, left) = match self.current()? {
            Some(up) => (up, within),
            // Boxed, so that every command's future is smaller.
            None => Box::pin(self.first(within)).await?,
        };
        let LiveConnection { generation, session, mut connection, .. } = up;
        let sent = self.silence.sends(left);
        let reply = timeout(left, connection.send_packed_command(cmd)).await;
        Ok((self.replied(cmd, generation, left, sent, reply)?, session))
    }

    /// Waits for the first connection; returns it and the rest of `within`.
    pub(super) async fn first(
        self: &Arc<Self>,
        within: Duration,
    ) -> Result<(LiveConnection, Duration), StoreError> {
        let started = Instant::now();
        let opened = timeout(within, self.opened()).await;
        // Not `TimedOut`: the command was not sent.
        let up = opened.map_err(|_| StoreError::new(StoreErrorKind::Unavailable))??;
        Ok((up, within.saturating_sub(started.elapsed())))
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(crate) async fn until_up(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        loop {
            match self.opened().await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind == StoreErrorKind::Closed => return Err(error),
                Err(_) => {
                    let _ = changes.changed().await;
                }
            }
        }
    }

    /// Waits for the first connection. Starts the reconnect task if there is none.
    pub(super) async fn opened(self: &Arc<Self>) -> Result<LiveConnection, StoreError> {
        let mut changes = self.changes.subscribe();
        let mut started = false;
        loop {
            changes.mark_unchanged();
            if let Some(up) = self.current()? {
                return Ok(up);
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

    /// Starts the reconnect task if there is none; returns whether it did.
    fn start(self: &Arc<Self>) -> bool {
        self.task.start(self, |task| {
            self.slot().state = ConnectionState::Connecting(Instant::now());
            keep(task, self.connector.clone(), Arc::clone(&self.look))
        })
    }
}

/// The additional methods for one node of a cluster.
#[cfg(feature = "cluster")]
impl Supervisor {
    /// Sends a command after ASKING, which lets a node answer for a slot that is migrating to it. Both are sent in one write,
    /// because no other command may come between them. Also returns the session.
    pub(crate) async fn send_asking(
        self: &Arc<Self>,
        cmd: &Cmd,
        within: Duration,
    ) -> Result<(Value, u64), StoreError> {
        self.bulk_limit.check(cmd)?;
        let (up, left) = match self.current()? {
            Some(up) => (up, within),
            None => Box::pin(self.first(within)).await?,
        };
        let LiveConnection { generation, session, mut connection, .. } = up;
        let mut pipeline = redis::pipe();
        pipeline.cmd("ASKING").add_command(cmd.clone());
        let sent = self.silence.sends(left);
        let replies = timeout(left, connection.send_packed_commands(&pipeline, 0, 2)).await;
        // Without the right to ASKING, the second answer is the same as without ASKING.
        let last = |replies: Vec<Value>| {
            replies.into_iter().nth(1).ok_or_else(crate::store::redis::errors::unexpected)
        };
        let replies = replies.map(|replies| replies.and_then(last));
        Ok((self.replied(cmd, generation, left, sent, replies)?, session))
    }

    /// Waits until the present attempt to connect has ended, however long that takes.
    pub(crate) async fn settled(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        while matches!(self.slot().state, ConnectionState::Connecting(_)) {
            let _ = changes.changed().await;
        }
        self.opened().await.map(drop)
    }
}
