//! The supervisor of the connections that carry commands to one server. It has their circuit breakers, and reports their state and the
//! server's clock.
//!
//! There may be several [connections](crate::StampedeGuardBuilder::connections), because one is driven by one task. They are opened
//! together, to one address, and if one is lost all are: so a process never uses two primaries at once. The commands of one key share
//! a connection, and the server runs them in the order in which they were sent: the release of a lease does not overtake an ACQUIRE
//! that was not answered in time, while these connections last.
//!
//! While there is no connection, a command fails in microseconds, and one background task, the reconnect task, reconnects.
//! Callers wait for it only before an attempt has failed: for the first connection, and after a connection was cut, unless
//! that connection was opened during an outage and broke before it was stable. They wait within their deadlines, and for no
//! longer than a connection may be silent.
//!
//! The reconnect task runs in the runtime of the first caller. When that runtime is shut down, the next caller starts
//! another reconnect task in its own runtime.

mod breaker;
pub(crate) mod connector;
mod reconnect;
pub(crate) mod send;
#[cfg(test)]
#[path = "../../../../tests/unit/store/redis/connection_tests.rs"]
mod tests;

use std::future::poll_fn;
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use self::breaker::BulkLimit;
use self::breaker::{CircuitBreaker, silence_limit, silent};
use self::connector::{Connector, Driver, OpenedConnection, Outage};
use super::endpoint::{TimedReading, host_ms};
use super::errors::OutageLog;
use super::errors::RefusalLog;
use crate::health::{ClockReading, LinkState};
use crate::observe::{LogEveryMinute, log, warn_if};
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;
use crate::task::{OwnedTask, STABLE};

/// How many connections this process has opened.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// The offset of a clock that was never read.
const UNKNOWN: i64 = i64::MIN;

pub(super) struct Supervisor {
    pub(super) connector: Connector,
    slot: Mutex<ConnectionSlot>,
    /// The reconnect task.
    task: OwnedTask,
    /// The generation of the latest connection. Sent at every change of the state, so that every waiting task checks again.
    changes: watch::Sender<u64>,
    /// Wakes the reconnect task to check the connection.
    look: Arc<Notify>,
    bulk_limit: BulkLimit,
    created_at: Instant,
    /// What the server's clock showed at `created_at`, in milliseconds.
    offset: AtomicI64,
    /// When the clock was last read, since `created_at`, and the largest change of `offset` by a reading; in milliseconds.
    read_at: AtomicU64,
    largest_jump: AtomicU64,
    /// How long the latest reading took, in microseconds.
    round_trip: AtomicU64,
    refusals: RefusalLog,
    /// Rate limit of the warning about commands that were not answered in time.
    late: LogEveryMinute,
}

struct ConnectionSlot {
    state: ConnectionState,
    /// The logged reasons for the present outage. A connection that breaks before it is stable does not end an outage.
    outage_log: OutageLog,
    /// The present outage, until a connection is stable.
    outage: Option<Outage>,
}

enum ConnectionState {
    /// There was no attempt to connect, or the runtime of the reconnect task has ended.
    Idle,
    /// The first attempt to connect, or the first after a connection was cut, started at this moment. Callers wait for it
    /// until the limit of silence has passed: an attempt whose packets are lost lasts for several budgets, and each request
    /// would spend its whole budget.
    Connecting(Instant),
    Up(LiveConnections),
    /// Callers fail at once, for this reason.
    Down(Option<StoreError>),
    Closed,
}

/// How a connection was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// The connection has ended. The server may be healthy: servers and proxies close idle connections.
    Cut,
    /// The server is silent, or is not the primary.
    Doubtful,
}

impl Loss {
    /// Classifies the loss after an error; `answered` says whether the error is the server's answer.
    fn of(answered: bool) -> Self {
        if answered { Self::Doubtful } else { Self::Cut }
    }
}

/// The connections of one generation, all to the same server.
struct LiveConnections {
    generation: u64,
    opened_at: Instant,
    /// At least one.
    all: Vec<LiveConnection>,
}

#[derive(Clone)]
struct LiveConnection {
    generation: u64,
    /// Unique among all connections of this process, to any server.
    session: u64,
    connection: MultiplexedConnection,
    traffic: Arc<Traffic>,
}

/// What the callers of one connection share.
struct Traffic {
    breaker: CircuitBreaker,
    /// On a runtime of one thread.
    pacing: Option<Pacing>,
    /// Ends with the last caller.
    _driver: Option<Driver>,
}

impl LiveConnections {
    /// For the runtime of the caller.
    fn new(generation: u64, opened: Vec<OpenedConnection>, answer: Duration) -> Self {
        let has_one_thread = Handle::current().metrics().num_workers() == 1;
        let live = |OpenedConnection { connection, driver, .. }| LiveConnection {
            generation,
            session: SESSIONS.fetch_add(1, Ordering::Relaxed) + 1,
            connection,
            traffic: Arc::new(Traffic {
                breaker: CircuitBreaker::new(answer),
                pacing: has_one_thread.then(Pacing::default),
                _driver: driver,
            }),
        };
        Self { generation, opened_at: Instant::now(), all: opened.into_iter().map(live).collect() }
    }

    /// The connection of `key`, the same one for all names of a resource: only the part in braces counts, as in a cluster. On the hit
    /// path.
    fn of(&self, key: &str) -> Option<&LiveConnection> {
        if self.all.len() < 2 {
            return self.all.first();
        }
        let tag = key.split_once('{').and_then(|(_, rest)| Some(rest.split_once('}')?.0)).unwrap_or(key);
        let mut hasher = DefaultHasher::new();
        hasher.write(tag.as_bytes());
        self.all.get(hasher.finish() as usize % self.all.len())
    }
}

impl Supervisor {
    pub(super) fn new(connector: Connector) -> Arc<Self> {
        Arc::new(Self {
            bulk_limit: BulkLimit::default(),
            connector,
            slot: Mutex::new(ConnectionSlot {
                state: ConnectionState::Idle,
                outage_log: OutageLog::default(),
                outage: None,
            }),
            task: OwnedTask::default(),
            changes: watch::Sender::new(0),
            look: Arc::new(Notify::new()),
            created_at: Instant::now(),
            offset: AtomicI64::new(UNKNOWN),
            read_at: AtomicU64::new(0),
            largest_jump: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
            refusals: RefusalLog::default(),
            late: LogEveryMinute::default(),
        })
    }

    /// The longest argument that the server takes; `usize::MAX` while no limit is known.
    pub(super) fn longest_argument(&self) -> usize {
        self.bulk_limit.most()
    }

    /// The reason why commands fail at present, if they do.
    pub(super) fn down(&self) -> Option<StoreError> {
        self.current("").err()
    }

    /// Requests a check of the connection, because it may have broken. Without this check, the next command would fail if the
    /// connection broke while it was unused.
    pub(super) fn suspect(&self) {
        self.look.notify_one();
    }

    /// Whether an established connection was cut, and the first attempt to replace it has not ended.
    pub(super) fn is_reconnecting(&self) -> bool {
        matches!(self.slot().state, ConnectionState::Connecting(_)) && *self.changes.borrow() > 0
    }

    /// Changes with each new connection.
    pub(super) fn generations(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What the server's clock showed at `moment`, in milliseconds; this machine's clock before the first reading.
    fn clock_at(&self, moment: Instant) -> u64 {
        self.known_clock_at(moment).unwrap_or_else(host_ms)
    }

    /// As [`clock_at`](Self::clock_at), but `None` before the first reading.
    pub(super) fn known_clock_at(&self, moment: Instant) -> Option<u64> {
        let offset = Some(self.offset.load(Ordering::Relaxed)).filter(|offset| *offset != UNKNOWN)?;
        Some((self.ms_since_creation(moment) as i64).saturating_add(offset).max(0) as u64)
    }

    pub(super) fn close(&self) {
        self.task.close();
        let before = std::mem::replace(&mut self.slot().state, ConnectionState::Closed);
        drop(before);
        self.changed();
    }

    /// The connection for `key`; `None` if the caller has to wait for the present attempt to connect, or start one. On the hit path.
    fn current(&self, key: &str) -> StoreResult<Option<LiveConnection>> {
        match &self.slot().state {
            ConnectionState::Up(up) => Ok(up.of(key).cloned()),
            ConnectionState::Connecting(since) if self.is_silent(*since) => Err(silent()),
            ConnectionState::Idle | ConnectionState::Connecting(_) => Ok(None),
            ConnectionState::Down(why) => {
                Err(why.clone().unwrap_or_else(|| StoreError::new(StoreErrorKind::Unavailable)))
            }
            ConnectionState::Closed => Err(StoreError::new(StoreErrorKind::Closed)),
        }
    }

    /// Whether the server has been silent for too long since then.
    fn is_silent(&self, since: Instant) -> bool {
        since.elapsed() >= silence_limit(self.connector.answer)
    }

    /// How many connections for commands are open.
    pub(super) fn open(&self) -> usize {
        if let ConnectionState::Up(up) = &self.slot().state { up.all.len() } else { 0 }
    }

    /// Drops the connections of `generation`, if they are still the current ones.
    fn lose(&self, generation: u64, why: &StoreError, loss: Loss) {
        let (lost, is_news) = {
            let slot = &mut *self.slot();
            let is_stable = match &slot.state {
                ConnectionState::Up(up) if up.generation == generation => up.opened_at.elapsed() >= STABLE,
                _ => return,
            };
            if is_stable {
                slot.outage_log.forget();
            }
            // If the connection was opened during an outage and broke before it was stable, callers do not wait for the next
            // one: each would spend its budget on a server that accepts connections and breaks them.
            let waits = loss == Loss::Cut && (is_stable || slot.outage.is_none());
            // A caller that gets this error from now on has not sent its command, so that command cannot have run.
            let why = StoreError { kind: StoreErrorKind::Unavailable, ..why.clone() };
            let is_news = slot.outage_log.is_news(&why);
            self.connector.outages.begin(&mut slot.outage);
            let next = match waits {
                true => ConnectionState::Connecting(Instant::now()),
                false => ConnectionState::Down(Some(why)),
            };
            (std::mem::replace(&mut slot.state, next), is_news)
        };
        drop(lost);
        warn_if!(log::REDIS, is_news, reason = %self.connector.text_of(why), "lost the connection to redis");
        self.suspect();
        self.changed();
    }

    fn read(&self, reading: &TimedReading) {
        let server_ms = i64::try_from(reading.server_ms).unwrap_or(i64::MAX);
        let offset = server_ms - self.ms_since_creation(reading.at) as i64;
        let before = self.offset.swap(offset, Ordering::Relaxed);
        self.read_at.store(self.ms_since_creation(reading.at), Ordering::Relaxed);
        self.round_trip
            .store(u64::try_from(reading.round_trip.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if before != UNKNOWN {
            self.largest_jump.fetch_max(offset.abs_diff(before), Ordering::Relaxed);
        }
    }

    fn ms_since_creation(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.created_at);
        // Called on every hit, and `as_millis` divides 128 bits.
        since.as_secs() * 1000 + u64::from(since.subsec_millis())
    }

    fn changed(&self) {
        self.changes.send_modify(|_| ());
    }

    fn slot(&self) -> MutexGuard<'_, ConnectionSlot> {
        lock(&self.slot)
    }

    /// The state of the connection and, while commands fail without being sent, the reason.
    pub(crate) fn link(&self) -> (LinkState, Option<StoreError>) {
        match &self.slot().state {
            ConnectionState::Idle => (LinkState::Idle, None),
            ConnectionState::Connecting(since) if self.is_silent(*since) => (LinkState::Down, Some(silent())),
            ConnectionState::Connecting(_) => (LinkState::Connecting, None),
            ConnectionState::Up(_) => (LinkState::Up, None),
            ConnectionState::Down(why) => (LinkState::Down, why.clone()),
            ConnectionState::Closed => (LinkState::Closed, None),
        }
    }

    /// How long the latest reading of the server's clock took; zero before the first.
    pub(crate) fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip.load(Ordering::Relaxed))
    }

    /// The latest reading of the server's clock; `None` before the first.
    pub(crate) fn clock(&self) -> Option<ClockReading> {
        if self.offset.load(Ordering::Relaxed) == UNKNOWN {
            return None;
        }
        let now = Instant::now();
        let (server, host) = (self.clock_at(now), host_ms());
        let age = self.ms_since_creation(now).saturating_sub(self.read_at.load(Ordering::Relaxed));
        Some(ClockReading {
            ahead_ms: i64::try_from(server).unwrap_or(i64::MAX).saturating_sub_unsigned(host),
            age: Duration::from_millis(age),
            largest_jump: Duration::from_millis(self.largest_jump.load(Ordering::Relaxed)),
        })
    }
}

/// With fewer callers than this none lets others run first: half of their next commands is not worth a write of its own.
const FEW: usize = 16;

/// The callers of one connection on a runtime of one thread, and the order in which they continue after replies that arrived together.
///
/// All these callers run before their next commands are written, so the server is idle until then, and the thread is idle after that. If
/// half of them let the others run first, the server answers one half while the other half runs. On several threads server and callers are
/// busy at the same time anyway (docs/decisions/013-wake-all.md).
#[derive(Debug, Default)]
struct Pacing {
    /// How many callers wait for a reply, or have not continued yet.
    waiting: AtomicUsize,
    /// How many callers have continued since one of them let the others run first.
    continued: AtomicUsize,
}

/// A caller that waits for its reply.
struct PacedCaller<'a>(&'a Pacing);

impl Pacing {
    fn wait(&self) -> PacedCaller<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        PacedCaller(self)
    }
}

impl PacedCaller<'_> {
    /// Returns after the reply: at once, or after the tasks that are ready now.
    async fn continue_in_turn(self) {
        let Pacing { waiting, continued } = self.0;
        let waiting = waiting.load(Ordering::Relaxed);
        if waiting < FEW || continued.fetch_add(1, Ordering::Relaxed) < waiting / 2 {
            return;
        }
        // Tokio's `yield_now` would also let the driver look for further replies first.
        let mut is_behind = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut is_behind, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        continued.store(0, Ordering::Relaxed);
    }
}

impl Drop for PacedCaller<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod pacing_tests {
    use std::sync::Arc;

    use tokio::sync::{mpsc, watch};
    use tokio::task::JoinSet;

    use super::*;

    /// This many callers get their replies together: the sizes of the batches in which they send their next commands.
    async fn batches_of(callers: usize) -> Vec<usize> {
        let (pacing, replies) = (Arc::new(Pacing::default()), watch::Sender::new(()));
        let (sends, mut sent) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let (pacing, sends, mut reply) = (Arc::clone(&pacing), sends.clone(), replies.subscribe());
            tasks.spawn(async move {
                let waits = pacing.wait();
                reply.changed().await.expect("a reply");
                waits.continue_in_turn().await;
                let _waits_again = pacing.wait();
                sends.send(()).expect("the receiver lives");
                let _ = reply.changed().await;
            });
        }
        // A task, as the driver of a connection is.
        let writer = tokio::spawn(async move {
            let mut batches = Vec::new();
            while batches.iter().sum::<usize>() < callers {
                batches.push(sent.recv_many(&mut Vec::new(), callers).await);
            }
            batches
        });
        while pacing.waiting.load(Ordering::Relaxed) < callers {
            tokio::task::yield_now().await;
        }
        replies.send_replace(());
        let batches = writer.await.expect("no panic");
        drop(replies);
        tasks.join_all().await;
        assert_eq!(pacing.waiting.load(Ordering::Relaxed), 0, "a caller that has left does not count");
        batches
    }

    #[tokio::test]
    async fn on_one_thread_half_of_many_callers_send_before_the_others_run() {
        for half in [8, 9, 32, 500] {
            assert_eq!(batches_of(2 * half).await, [half, half]);
        }
        for few in [1, 2, FEW - 1] {
            assert_eq!(batches_of(few).await, [few]);
        }
    }
}
