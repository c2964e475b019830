//! The reconnect task, which keeps the connection up: it connects, reads the server's clock, and connects again when the
//! connection is lost.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::{RedisError, RedisResult};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::connector::{Connector, OpenedConnection};
use super::{ConnectionState, LiveConnection, LiveConnections, Loss, Supervisor};
use crate::observe::{log, warn_if};
use crate::store::StoreErrorKind;
use crate::store::redis::endpoint::TimedReading;
use crate::store::redis::errors::{bounded, store_error};
use crate::store::redis::login::{Issue, OWN};
use crate::task::{Backoff, EndedTask, OwnedTask, STABLE, TaskOwner, TaskRef};

/// How often the guard checks whether the driver of the connection has ended. redis-rs notifies its users of that in RESP3
/// only.
const CUT_PERIOD: Duration = Duration::from_millis(100);

/// Returns the error with which the connection has ended, if it has. The driver of the connection reads all the time, so it notices
/// the end. The PING is not sent: the driver skips a command whose future was dropped.
fn end_of(connection: &mut MultiplexedConnection) -> Option<RedisError> {
    connection.send_packed_command(&redis::cmd("PING")).now_or_never()?.err()
}

impl TaskOwner for Supervisor {
    fn owned_task(&self) -> &OwnedTask {
        &self.task
    }

    /// The connection is dropped: its driver has ended with the task, because both run in the same runtime.
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
async fn keep(reconnect_task: TaskRef<Supervisor>, connector: Connector, look: Arc<Notify>) {
    let mut backoff = Backoff::new();
    loop {
        let opened = connector.anew().await;
        // Later credentials are due as soon as they are for one of the connections.
        let logins = opened.iter().flatten().map(|opened| opened.login);
        let login = logins.min().unwrap_or(OWN);
        let Some(generation) = reconnect_task.settle(opened) else { return };
        if let Some(generation) = generation {
            let opened_at = Instant::now();
            reconnect_task.check_until_lost(&connector, &look, generation, login).await;
            backoff.connected_for(opened_at.elapsed());
        }
        backoff.pause().await;
    }
}

impl TaskRef<Supervisor> {
    /// Checks the connection of `generation` again and again, and logs it in with later credentials, until it is lost.
    async fn check_until_lost(&self, connector: &Connector, look: &Notify, generation: u64, mut login: u64) {
        let opened_at = Instant::now();
        let (mut again, mut checked_at) = (false, opened_at);
        let mut recovers = self.recovers();
        self.read_limit(generation, connector.answer).await;
        loop {
            let period = if recovers { STABLE } else { connector.look_period() };
            let has_news = again
                || tokio::select! {
                    has_news = timeout(period, look.notified()) => has_news.is_ok(),
                    issue = connector.login.later_than(login) => {
                        if self.log_in(connector, generation, &issue).await {
                            login = issue.number;
                        }
                        false
                    }
                    () = self.until_cut(generation) => return,
                };
            let connections = self.connections(generation);
            if connections.is_empty() {
                return;
            }
            if recovers && opened_at.elapsed() >= STABLE {
                self.is_back(opened_at);
                recovers = false;
            }
            if !has_news && checked_at.elapsed() < connector.clock && !self.has_to_look(&connections) {
                continue;
            }
            checked_at = Instant::now();
            let late = join_all(connections.into_iter().map(async |mut live| {
                let reading = bounded(connector.answer, connector.endpoint.look(&mut live.connection)).await;
                self.note(&live, reading)
            }));
            // A single missing answer may mean a slow server. If the next check, which follows at once, is not answered
            // either, the connection is silent.
            again = late.await.contains(&true) && !again;
            tokio::select! {
                has_new_primary = connector.endpoint.has_been_replaced() => if has_new_primary {
                    self.leave(generation);
                },
                // The sentinels may be slow, and the connection may break meanwhile.
                () = look.notified() => look.notify_one(),
            }
        }
    }

    /// Logs the connections of `generation` in with these credentials. Returns whether all have taken them: if not, all receive them again.
    async fn log_in(&self, connector: &Connector, generation: u64, issue: &Issue) -> bool {
        let auth = issue.auth();
        let taken = join_all(self.connections(generation).into_iter().map(async |mut live| {
            let sent = live.connection.send_packed_command(&auth);
            let taken = connector.log_in(issue.number, sent).await;
            let is_taken = matches!(taken, Ok(true));
            // An AUTH without an answer counts like any other command without one.
            self.note(&live, taken.map(|_| None));
            is_taken
        }));
        !taken.await.contains(&false)
    }

    /// Records the result of an attempt to connect. Returns the new generation, or `Some(None)` if the attempt has failed; `None` if
    /// the supervisor was dropped or closed, or has another reconnect task.
    fn settle(&self, opened: RedisResult<Vec<OpenedConnection>>) -> Option<Option<u64>> {
        let supervisor = self.owner()?;
        match opened {
            Ok(mut connections) => {
                let reading = connections.first_mut().and_then(|first| first.reading.take());
                let generation = *supervisor.changes.borrow() + 1;
                let up = LiveConnections::new(generation, connections, supervisor.connector.answer);
                self.with(|supervisor| {
                    if let Some(reading) = reading {
                        supervisor.read(&reading);
                    }
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

    /// The connections of `generation`; none if these are no longer the current ones.
    fn connections(&self, generation: u64) -> Vec<LiveConnection> {
        let Some(supervisor) = self.owner() else { return Vec::new() };
        match &supervisor.slot().state {
            ConnectionState::Up(up) if up.generation == generation => up.all.clone(),
            _ => Vec::new(),
        }
    }

    /// Queries the server's limit for arguments, after an argument may have broken a connection. Without the right to CONFIG,
    /// the known limit stays in effect.
    async fn read_limit(&self, generation: u64, within: Duration) {
        let is_due = || self.owner().is_some_and(|supervisor| supervisor.bulk_limit.take_unread());
        let Some(mut live) = self.connections(generation).pop().filter(|_| is_due()) else { return };
        let config = redis::cmd("CONFIG").arg("GET").arg("proto-max-bulk-len").to_owned();
        let answer = bounded(within, live.connection.send_packed_command(&config)).await;
        drop(live);
        let settings = answer
            .and_then(|answer| redis::from_redis_value::<HashMap<String, usize>>(answer).map_err(Into::into));
        if let (Ok(settings), Some(supervisor)) = (settings, self.owner())
            && let Some(most) = settings.get("proto-max-bulk-len")
        {
            supervisor.bulk_limit.read(*most);
        }
    }

    /// Waits until the connection of `generation` has ended, and then drops it.
    async fn until_cut(&self, generation: u64) {
        loop {
            sleep(CUT_PERIOD).await;
            let mut connections = self.connections(generation);
            if connections.is_empty() {
                return;
            }
            let ended = connections.iter_mut().find_map(|live| Some((end_of(&mut live.connection)?, live)));
            if let Some((error, live)) = ended {
                self.note(live, Err(error));
                return;
            }
        }
    }

    /// Whether there is an outage, which the present connection ends as soon as it is stable.
    fn recovers(&self) -> bool {
        self.owner().is_some_and(|supervisor| supervisor.slot().outage.is_some())
    }

    /// Ends the outage, because the connection that was opened at `opened_at` is stable.
    fn is_back(&self, opened_at: Instant) {
        let Some(supervisor) = self.owner() else { return };
        let outage = supervisor.slot().outage.take();
        if let Some(outage) = outage {
            let node = supervisor.connector.address().filter(|_| supervisor.connector.endpoint.is_node());
            outage.log_end(&supervisor.connector.outages, opened_at, node);
        }
    }

    /// Whether the connections need a check although no task suspects them: one has received no answer since the last check,
    /// or their server may have been demoted.
    fn has_to_look(&self, connections: &[LiveConnection]) -> bool {
        let Some(supervisor) = self.owner() else { return false };
        // Counted, because each of them is asked.
        let silent = connections.iter().filter(|live| !live.traffic.breaker.take_received()).count();
        silent > 0 || supervisor.connector.endpoint.may_be_demoted()
    }

    /// Drops a working connection whose server is not the primary any more.
    fn leave(&self, generation: u64) {
        let Some(supervisor) = self.owner() else { return };
        let why = (redis::ErrorKind::Client, "the sentinels name another primary");
        let why = store_error(StoreErrorKind::Unavailable, RedisError::from(why));
        supervisor.lose(generation, &why, Loss::Doubtful);
    }

    /// Records a reading of the clock; a failed reading counts as a failed command. Returns true if it had no answer in time.
    fn note(&self, live: &LiveConnection, reading: RedisResult<Option<TimedReading>>) -> bool {
        let Some(supervisor) = self.owner() else { return false };
        let breaker = &live.traffic.breaker;
        match reading {
            Ok(reading) => {
                breaker.record_answer(None);
                // The reconnect task's own check does not count as use of the connection.
                breaker.take_received();
                if let Some(reading) = reading {
                    supervisor.read(&reading);
                }
            }
            Err(error) if error.is_timeout() => {
                supervisor.handle_timeout(live.generation, breaker, supervisor.connector.answer);
                return true;
            }
            Err(error) => {
                let _ = supervisor.judge(None, live.generation, Err(error));
            }
        }
        false
    }
}

impl Supervisor {
    /// Starts the reconnect task if there is none; returns whether it did.
    pub(super) fn start(self: &Arc<Self>) -> bool {
        self.task.start(self, |task| {
            self.slot().state = ConnectionState::Connecting(Instant::now());
            keep(task, self.connector.clone(), Arc::clone(&self.look))
        })
    }
}
