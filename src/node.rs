//! What all clones of one guard share: the store, the flights, the counters. Knows no Redis, no HTTP.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

use crate::ending::Ending;
use crate::entry::{Encoding, Entry};
use crate::error::Failure;
use crate::flight::{self, Flights};
use crate::key::{Hashed, Key};
use crate::look_up::LookUps;
use crate::observe::{Count, Counters, Outcome};
use crate::store::{NodeStore, StoreError};

/// One guard core: everything behind a [`StampedeGuard`](crate::StampedeGuard) and its clones.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) store: NodeStore,
    /// Escaped, as it stands in key names.
    pub(crate) namespace: Box<str>,
    pub(crate) flights: Arc<Flights<FlightKey, Loader, Ending, Hashed>>,
    pub(crate) look_ups: Arc<LookUps<Key, LookedUp, Hashed>>,
    pub(crate) counters: Counters,
    /// Tasks of flights that run.
    pub(crate) tasks: Arc<Gauge>,
    /// Leases that are held.
    pub(crate) leases: Arc<Gauge>,
    /// Set by `shutdown`: calls load for themselves from now on.
    closed: AtomicBool,
    /// Set when a shutdown's deadline has passed: leases are handed over.
    pub(crate) leaving: watch::Sender<bool>,
}

/// What a flight is about: a key may have one of each lane at a time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlightKey {
    pub(crate) key: Key,
    pub(crate) lane: Lane,
}

/// How a flight goes about its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// Under the fleet's lease. The normal one.
    Lease,
    /// Outside it, for those who have waited too long.
    Beside,
    /// Under the lease only if it is free, with nobody following: to find out whether a resource
    /// that was uncacheable still is.
    Heal,
}

pub(crate) type Leader = flight::Leader<FlightKey, Loader, Ending, Hashed>;
pub(crate) type Joined = flight::Joined<FlightKey, Loader, Ending, Hashed>;
pub(crate) type Follower = flight::Follower<Loader, Ending>;

/// What one read of a key came to, for all who asked at that moment.
pub(crate) type LookedUp = Result<Option<Arc<SharedRead>>, StoreError>;

/// Stored bytes, decoded.
#[derive(Debug)]
pub(crate) enum Stored {
    Entry(Entry),
    Unreadable(Bytes),
}

/// What many callers were given by one read.
#[derive(Debug)]
pub(crate) struct SharedRead {
    pub(crate) stored: Stored,
    /// What the first of them has made of it, for the others.
    pub(crate) opened: Opened,
}

pub(crate) type Opened = OnceLock<Box<dyn Any + Send + Sync>>;

/// What a caller wants of an entry.
pub(crate) trait Open {
    type Value;

    /// Makes it of an entry that nobody else has, for a caller that came when the store's clock showed `now`.
    /// `None`, and the entry as it was, where it is not that.
    fn open(&self, entry: &mut Entry, now: u64) -> Option<Self::Value>;

    /// Makes it of an entry that other callers are given at the same moment.
    fn open_shared(&self, entry: &Entry, now: u64, _opened: &Opened) -> Option<Self::Value> {
        self.open(&mut entry.clone(), now)
    }
}

type Run = Box<dyn FnOnce(Mode) -> Pin<Box<dyn Future<Output = Loaded> + Send>> + Send>;

/// A caller's work, boxed at the door so that everything behind it is compiled once.
pub(crate) struct Loader {
    pub(crate) run: Run,
    /// The caller's span: the load belongs to the request that began it.
    pub(crate) span: tracing::Span,
    /// The loads inside which the caller runs.
    pub(crate) within: Option<Arc<Loading>>,
}

/// For whom a loader runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// For everyone on the flight, which holds the lease: what may be stored will be.
    Leased,
    /// For everyone on the flight, which goes without the lease: nothing will be stored.
    Unleased,
    /// For its own caller only.
    Alone,
}

/// What a loader came to.
pub(crate) struct Loaded {
    pub(crate) result: LoadResult,
    /// What waits until the others were told, or until the caller's budget for that is used up: the end of
    /// the client's response, or its error.
    pub(crate) settled: Option<Box<dyn FnOnce() + Send>>,
}

impl Loaded {
    /// For a load that nobody shares: there is nobody to wait for.
    pub(crate) fn settle(self) {
        if let Some(settled) = self.settled {
            settled();
        }
    }
}

/// What a loader's result means to those who share it.
pub(crate) enum LoadResult {
    /// A value, to be stored for `fresh_for`; zero shares it with the waiting wave only. Other
    /// processes are then given `brief` instead, if there is one.
    Value { encoding: Encoding, payload: Bytes, fresh_for: Duration, brief: Option<Bytes> },
    /// One caller's own: nobody else may have it. With `mark`, nobody queues for it for a while.
    Uncacheable { mark: bool },
    /// Nothing.
    Failed(Failure),
}

impl From<LoadResult> for Loaded {
    fn from(result: LoadResult) -> Self {
        Self { result, settled: None }
    }
}

/// The loads inside which a task runs, innermost first.
#[derive(Debug)]
pub(crate) struct Loading {
    /// Where the key's lease is: another guard on the same store would wait for it too.
    place: u64,
    key: Key,
    outer: Option<Arc<Self>>,
}

tokio::task_local! {
    static LOADING: Arc<Loading>;
}

impl Loading {
    /// The loads inside which the current task runs.
    pub(crate) fn current() -> Option<Arc<Self>> {
        LOADING.try_with(Arc::clone).ok()
    }

    /// Runs `load` as a load of `key`.
    pub(crate) fn scope<F: Future>(
        node: &Arc<Node>,
        key: &Key,
        outer: Option<Arc<Self>>,
        load: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let loading = Self { place: node.store.place(), key: key.clone(), outer };
        LOADING.scope(Arc::new(loading), load)
    }

    /// Whether one of these loads is the load of `key`: waiting for it would be waiting for oneself.
    pub(crate) fn includes(self: &Arc<Self>, node: &Arc<Node>, key: &Key) -> bool {
        let mut innermost = Some(self);
        while let Some(loading) = innermost {
            if loading.place == node.store.place() && loading.key == *key {
                return true;
            }
            innermost = loading.outer.as_ref();
        }
        false
    }
}

impl Node {
    pub(crate) fn new(store: NodeStore, namespace: Box<str>, max_flights: usize) -> Self {
        Self {
            store,
            namespace,
            flights: Arc::new(Flights::new(max_flights)),
            look_ups: Arc::new(LookUps::new()),
            counters: Counters::default(),
            tasks: Arc::default(),
            leases: Arc::default(),
            closed: AtomicBool::new(false),
            leaving: watch::Sender::new(false),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Waits until a shutdown's deadline has passed.
    pub(crate) async fn leaving(&self) {
        let mut leaving = self.leaving.subscribe();
        // The sender lives as long as the node.
        let _ = leaving.wait_for(|leaving| *leaving).await;
    }

    pub(crate) fn count(&self, count: Count) {
        self.counters.add(count);
    }

    /// Counts and reports how a request was answered.
    pub(crate) fn answered(&self, key: &Key, outcome: Outcome) {
        self.counters.request(outcome);
        // The digest is only computed where somebody listens.
        tracing::trace!(?key, outcome = outcome.as_str(), "stampede_guard.answered");
    }

    /// Takes the key's flights out of the map, so that later callers start anew.
    pub(crate) fn detach(&self, key: &Key) {
        for lane in [Lane::Lease, Lane::Beside, Lane::Heal] {
            self.flights.detach(&FlightKey { key: key.clone(), lane });
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.store.close();
    }
}

/// How many of something there are now, and when the last one has gone.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    count: AtomicUsize,
    fell: Notify,
}

impl Gauge {
    /// One more, until the answer is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Present {
        self.count.fetch_add(1, Ordering::Relaxed);
        Present { gauge: Arc::clone(self) }
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Waits until there is none, at most until `deadline`; whether there is none.
    pub(crate) async fn empty(&self, deadline: Instant) -> bool {
        loop {
            // Registered before the count is read, or the last fall could come between the two.
            let fell = self.fell.notified();
            tokio::pin!(fell);
            fell.as_mut().enable();
            if self.count() == 0 {
                return true;
            }
            if timeout_at(deadline, fell).await.is_err() {
                return self.count() == 0;
            }
        }
    }
}

/// One of what a [`Gauge`] counts.
#[derive(Debug)]
pub(crate) struct Present {
    gauge: Arc<Gauge>,
}

impl Drop for Present {
    fn drop(&mut self) {
        self.gauge.count.fetch_sub(1, Ordering::Release);
        self.gauge.fell.notify_waiters();
    }
}

/// The time that the store's round trips may still add to one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: Duration,
    command: Duration,
}

impl Budget {
    pub(crate) fn new(total: Duration, command: Duration) -> Self {
        Self { left: total, command }
    }

    /// What is left in all.
    pub(crate) fn left(&self) -> Duration {
        self.left
    }

    /// The deadline of the next command; `None` when nothing is left.
    pub(crate) fn next(&self) -> Option<Duration> {
        (!self.left.is_zero()).then(|| self.left.min(self.command))
    }

    pub(crate) fn spend(&mut self, since: Instant) {
        self.left = self.left.saturating_sub(since.elapsed());
    }
}

impl Stored {
    /// Decodes what the store returned for `key`; damage is counted, and logged as what it is.
    pub(crate) fn decode(node: &Node, raw: Bytes, key: &Key) -> Self {
        Entry::decode(raw, key).map_or_else(
            |(reason, raw)| {
                node.count(Count::unreadable);
                tracing::warn!(?key, ?reason, "a stored entry is unreadable; it is loaded anew");
                Self::Unreadable(raw)
            },
            Self::Entry,
        )
    }
}

impl Loader {
    /// Boxes a caller's work; it keeps the caller's span, and what the caller is a part of.
    pub(crate) fn new<F, Fut>(run: F) -> Self
    where
        F: FnOnce(Mode) -> Fut + Send + 'static,
        Fut: Future<Output = Loaded> + Send + 'static,
    {
        Self {
            run: Box::new(move |mode| Box::pin(run(mode))),
            span: tracing::Span::current(),
            within: Loading::current(),
        }
    }
}
