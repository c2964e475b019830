//! A caller's boxed loader, its input, and its result as all waiters share it. Knows no Redis, no HTTP.
//!
//! [`LoadScope`] is the chain of loads inside which a task runs. It detects re-entrance: a load that requests its own key would wait for
//! itself.

use std::any::Any;
use std::future::Future;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;
use uuid::Uuid;

use crate::error::Failure;
use crate::flight::CallerOrder;
use crate::flight::waiter::Flight;
use crate::key::Key;
use crate::observe::{FlightId, panic_text};
use crate::store::load_limit::LoadEnd;
use crate::task::box_future;
use crate::value::FlightOutcome;
use crate::value::entry::{Encoding, Entry, Lifetimes, Packed, Unstored};

type Run = Box<dyn FnOnce(LoadInput) -> Pin<Box<dyn Future<Output = LoadOutput> + Send>> + Send>;

/// How a load reaches its waiters before it ends, and its own client after the commit. Without a flight there are no waiters.
#[derive(Default)]
pub(crate) struct Delivery {
    waiters: Option<Arc<Flight<Loader, FlightOutcome>>>,
    /// The id of the load, if spans are enabled.
    load_id: Option<FlightId>,
    release: Option<Box<dyn FnOnce() + Send>>,
}

impl Delivery {
    pub(crate) fn to_waiters(flight: Arc<Flight<Loader, FlightOutcome>>, load_id: Option<FlightId>) -> Self {
        Self { waiters: Some(flight), load_id, release: None }
    }

    /// Lets the waiters of this process read a value that is still incoming.
    pub(crate) fn read_along(&self, incoming: Arc<dyn Any + Send + Sync>) {
        self.announce(|waiters| waiters.announce(FlightOutcome::Incoming(incoming)));
    }

    /// Makes the waiters load for themselves.
    pub(crate) fn refuse_waiters(&self) {
        self.announce(|waiters| waiters.announce_to_all(FlightOutcome::Uncacheable));
    }

    fn announce(&self, announce: impl FnOnce(&Flight<Loader, FlightOutcome>)) {
        let Some(waiters) = &self.waiters else { return };
        if let Some(load_id) = self.load_id {
            waiters.each_loader(|loader| loader.waits_for(load_id));
        }
        announce(waiters);
    }

    /// Ends the load with this result. `release` completes the client's response, or its error. It is called once the result is published,
    /// or once the caller's budget for that is used up, and before the other waiters are answered.
    pub(crate) fn after_commit(
        self,
        result: LoadResult,
        release: impl FnOnce() + Send + 'static,
    ) -> LoadOutput {
        LoadOutput { delivery: Self { release: Some(Box::new(release)), ..self }, ..result.into() }
    }

    /// Called when the flight ends with this outcome, before its waiters are answered.
    pub(crate) fn settle(self, outcome: &FlightOutcome) {
        match self.release {
            // For `FlightOutcome::Stale`, the loader's own caller receives the older value too, instead of its own response.
            Some(release) if !matches!(outcome, FlightOutcome::Stale(_)) => release(),
            _ => {}
        }
    }
}

/// The loader's end of an [`OwnAnswer`]. Sending fails if the caller has left.
pub(crate) type OwnSender<A> = oneshot::Sender<A>;

/// The answer of a caller's own load, for that caller alone.
#[derive(Debug)]
pub(crate) struct OwnAnswer<A> {
    answer: oneshot::Receiver<A>,
    is_early: bool,
}

impl<A> OwnAnswer<A> {
    /// Makes both ends, for a caller that takes its answer at the end of the flight that has used its loader.
    pub(crate) fn at_the_end() -> (OwnSender<A>, Self) {
        let (sender, answer) = oneshot::channel();
        (sender, Self { answer, is_early: false })
    }

    /// Makes both ends, for a caller that takes its answer as soon as the answer is sent.
    pub(crate) fn early() -> (OwnSender<A>, Self) {
        let (sender, own) = Self::at_the_end();
        (sender, Self { is_early: true, ..own })
    }

    /// The answer, if it was sent.
    pub(crate) fn take(&mut self) -> Option<A> {
        self.answer.try_recv().ok()
    }

    /// Waits for the answer, if the caller takes it as soon as it is sent; otherwise, or if none comes, stays pending.
    pub(crate) async fn before_the_end(&mut self) -> A {
        if self.is_early
            && let Ok(answer) = (&mut self.answer).await
        {
            return answer;
        }
        std::future::pending().await
    }
}

/// A caller's loader, boxed at the API so that the code behind it is compiled once.
pub(crate) struct Loader {
    pub(crate) run: Run,
    /// The caller's span: the load belongs to the request that began it.
    pub(crate) span: tracing::Span,
    /// The chain of loads inside which the caller runs.
    pub(crate) within: Option<Arc<LoadScope>>,
    /// When the caller came. It stays the same if the caller joins again.
    pub(crate) came: CallerOrder,
    /// When the caller began to wait on a flight.
    pub(crate) since: Option<Instant>,
    /// The load that the caller waits for, if that is known.
    pub(crate) waits_for: OnceLock<FlightId>,
    /// The batch that the loader belongs to, if any.
    pub(crate) batch: Option<BatchId>,
    /// Whether the load may add tags to its value.
    pub(crate) may_tag: bool,
}

/// Identifies a batch within its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchId(NonZeroU64);

impl BatchId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NonZeroU64::MIN.saturating_add(NEXT.fetch_add(1, Ordering::Relaxed)))
    }
}

/// For which callers a loader runs, and whether its result may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseState {
    /// The loader runs for all waiters of a flight that holds the lease: the result is stored if it may be.
    Leased,
    /// The loader runs for all waiters of a flight without the lease: nothing is stored.
    Unleased,
    /// The loader runs for its own caller only: nothing is stored.
    Alone,
}

/// The input of a loader.
pub(crate) struct LoadInput {
    pub(crate) mode: LeaseState,
    /// The older value that the load replaces, if the store still has it.
    pub(crate) previous: Option<Entry>,
    /// When the load is aborted.
    pub(crate) deadline: Instant,
    /// Becomes true when the lease is lost.
    pub(crate) lost: watch::Receiver<bool>,
    pub(crate) delivery: Delivery,
}

impl LoadInput {
    /// The input of a load outside the flights.
    pub(crate) fn outside_flight(mode: LeaseState, load_timeout: Duration) -> Self {
        // There is no lease to lose.
        let lost = watch::channel(false).1;
        let deadline = Instant::now() + load_timeout;
        Self { mode, previous: None, deadline, lost, delivery: Delivery::default() }
    }
}

/// The output of a loader.
pub(crate) struct LoadOutput {
    pub(crate) result: LoadResult,
    pub(crate) delivery: Delivery,
    /// What the origin did, for an adaptive limit.
    pub(crate) end: LoadEnd,
    /// For how long the origin asks to be left alone.
    pub(crate) rest: Duration,
}

impl LoadOutput {
    /// Completes the client's response at once: for a load without other waiters, or one whose caller need not wait for them.
    pub(crate) fn settle(self) -> LoadResult {
        self.delivery.settle(&FlightOutcome::NoLoader);
        self.result
    }
}

/// The result of a load, and how it may be shared.
pub(crate) enum LoadResult {
    /// A value. Without any lifetime it is shared with the current waiters only; other processes then receive
    /// `status_only` instead, if there is one.
    Value {
        encoding: Encoding,
        payload: Bytes,
        /// The payload as it is stored, if that is compressed.
        packed: Packed,
        lifetimes: Lifetimes,
        /// The validator of the value, see `Entry::validator`.
        validator: Bytes,
        /// The value's tags besides the policy's.
        tags: Vec<Key>,
        status_only: Option<Bytes>,
        /// What it means for the older value if this value is not stored.
        unstored: Unstored,
    },
    /// A value that only the loading caller may have.
    Uncacheable {
        unstored: Unstored,
        /// Whether to store a marker for a while, which says that callers need not queue for the resource. The marker never replaces an
        /// older value that stays and is still served.
        mark: bool,
    },
    /// No value.
    Failed {
        failure: Failure,
        /// See [`Unstored::Failure`].
        before: u64,
    },
    /// A result for its own caller only, because it does not answer what the other waiters request, or may be older than a change; the next
    /// waiter loads.
    OnlyForCaller,
}

impl LoadResult {
    /// A few bytes that the guard stores for itself, under a key of a resource.
    #[cfg(feature = "http")]
    pub(crate) fn record(payload: Bytes, lifetimes: Lifetimes) -> Self {
        let (encoding, packed, unstored) = (Encoding::RAW, Packed::default(), Unstored::SaysNothing);
        let (validator, tags, status_only) = (Bytes::new(), Vec::new(), None);
        Self::Value { encoding, payload, packed, lifetimes, validator, tags, status_only, unstored }
    }

    /// A failure without an answer of the origin.
    pub(crate) fn failed(failure: Failure) -> Self {
        Self::Failed { failure, before: u64::MAX }
    }

    /// Only the load's own caller may have the value, and the value says nothing about the resource.
    pub(crate) fn says_nothing() -> Self {
        Self::Uncacheable { unstored: Unstored::SaysNothing, mark: false }
    }

    /// Only the load's own caller may have the value, and later callers need not queue for the resource.
    pub(crate) fn of_resource() -> Self {
        Self::Uncacheable { unstored: Unstored::OfResource, mark: true }
    }

    pub(crate) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }
}

impl From<LoadResult> for LoadOutput {
    fn from(result: LoadResult) -> Self {
        let end = if result.is_failure() { LoadEnd::Failed } else { LoadEnd::Done };
        Self { result, delivery: Delivery::default(), end, rest: Duration::ZERO }
    }
}

impl Loader {
    /// Whether the caller runs inside a load that holds this permit.
    pub(crate) fn is_within(&self, turn: &LoadPermitId) -> bool {
        self.within.as_ref().is_some_and(|outer| outer.holds(turn))
    }

    /// Records which load the caller waits for. Only the first call counts.
    pub(crate) fn waits_for(&self, flight: FlightId) {
        let _ = self.waits_for.set(flight);
    }

    /// Boxes a caller's loader, with the caller's span and the chain of loads it runs inside.
    pub(crate) fn new<F, Fut>(run: F) -> Self
    where
        F: FnOnce(LoadInput) -> Fut + Send + 'static,
        Fut: Future<Output = LoadOutput> + Send + 'static,
    {
        Self {
            run: Box::new(move |input| box_future(|| run(input))),
            span: tracing::Span::current(),
            within: LoadScope::current(),
            came: CallerOrder::now(),
            since: None,
            waits_for: OnceLock::new(),
            batch: None,
            may_tag: false,
        }
    }

    /// The same loader, for a load that may add tags to its value.
    pub(crate) fn that_may_tag(self) -> Self {
        Self { may_tag: true, ..self }
    }
}

/// The failure of a load whose task ended without a result.
pub(crate) fn describe(error: JoinError) -> Failure {
    match error.try_into_panic() {
        Ok(panic) => Failure::Panicked(panic_text(&*panic)),
        Err(_) => Failure::vanished(),
    }
}

/// A spawned load that is aborted when the flight that waits for it is dropped.
pub(crate) struct AbortOnDrop(pub(crate) JoinHandle<LoadOutput>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The loads inside which a task runs, innermost first.
#[derive(Debug)]
pub(crate) struct LoadScope {
    /// One load, or all loads that one call for many keys makes.
    loads: Vec<ScopedLoad>,
    outer: Option<Arc<Self>>,
}

#[derive(Clone, Debug)]
struct ScopedLoad {
    /// The store that holds the key's lease: another guard on the same store would wait for the lease too.
    store_id: u64,
    key: Key,
    turn: Option<LoadPermitId>,
}

/// The limited permit that a load holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadPermitId {
    /// One of the permits of the limit with this name in this namespace of this store, shared by all guards.
    Permit { store_id: u64, namespace: Box<str>, limit: Arc<str> },
    /// One of a guard's slots for loads without the store.
    Store(Uuid),
}

tokio::task_local! {
    static LOADING: Arc<LoadScope>;
}

impl LoadScope {
    /// The loads inside which the current task runs.
    pub(crate) fn current() -> Option<Arc<Self>> {
        LOADING.try_with(Arc::clone).ok()
    }

    /// Whether the current task runs inside a load.
    pub(crate) fn is_inside() -> bool {
        LOADING.try_with(|_| ()).is_ok()
    }

    /// Runs `load` as a load of `key` that may hold a permit.
    pub(crate) fn scope<F: Future>(
        store_id: u64,
        key: &Key,
        turn: Option<LoadPermitId>,
        outer: Option<Arc<Self>>,
        load: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let loads = vec![ScopedLoad { store_id, key: key.clone(), turn }];
        LOADING.scope(Arc::new(Self { loads, outer }), load)
    }

    /// The chain of a call that loads several keys: the innermost loads of all chains, inside the outer loads of the first chain. (All
    /// loads of one call run inside the same outer loads.) It is a flat list, because dropping a chain with a link for each key would
    /// nest as many calls.
    pub(crate) fn joined(chains: impl IntoIterator<Item = Arc<Self>>) -> Option<Arc<Self>> {
        let mut chains = chains.into_iter();
        let first = chains.next()?;
        let mut loads = first.loads.clone();
        loads.extend(chains.flat_map(|chain| chain.loads.clone()));
        Some(Arc::new(Self { loads, outer: first.outer.clone() }))
    }

    /// Runs `load` inside these loads.
    pub(crate) fn run<F: Future>(self: Arc<Self>, load: F) -> impl Future<Output = F::Output> + use<F> {
        LOADING.scope(self, load)
    }

    /// Whether one of these loads is a load of `key`: a caller inside that load that waited for it would wait for itself.
    pub(crate) fn includes(&self, store_id: u64, key: &Key) -> bool {
        self.any(|loading| loading.store_id == store_id && loading.key == *key)
    }

    /// Whether one of these loads holds such a permit. Each load waits for the loads inside it, so an inner load that waited for a
    /// further permit might wait for the permit of its outer load: a deadlock.
    pub(crate) fn holds(&self, turn: &LoadPermitId) -> bool {
        self.any(|loading| loading.turn.as_ref() == Some(turn))
    }

    fn any(&self, is: impl Fn(&ScopedLoad) -> bool) -> bool {
        std::iter::successors(Some(self), |scope| scope.outer.as_deref())
            .flat_map(|scope| &scope.loads)
            .any(is)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::CacheKey;

    /// A chain with a link for each key would be dropped by as many nested calls, and overflow the two megabytes of a worker's stack.
    #[test]
    fn a_call_for_very_many_keys_is_dropped_on_a_small_stack() {
        let scope = |n: u32| {
            let load = ScopedLoad { store_id: 1, key: Key::new("ns", &CacheKey::from(n)), turn: None };
            Arc::new(LoadScope { loads: vec![load], outer: None })
        };
        let small = std::thread::Builder::new().stack_size(128 * 1024);
        let ended = small.spawn(move || {
            let joined = LoadScope::joined((0..100_000).map(scope)).expect("loads");
            joined.includes(1, &Key::new("ns", &CacheKey::from(99_999_u32)))
        });
        assert!(ended.expect("a thread").join().expect("no overflow"));
    }
}
