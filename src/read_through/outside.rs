//! Loads outside the protocol: a load for one caller alone, trials and audits. Knows no Redis and no HTTP.
//!
//! *Trial* ([`shadow`]): each caller receives the result of its own load, and a parallel task runs the guard's steps with that result. The
//! guard's loader does not take the result of a load that has begun already: it starts the caller's load. So the load began after the
//! flight had its lease and the ids of its tags, as every load of a flight does. The caller's load waits for this start for no longer
//! than [`LONGEST_DELAY`]; if it begins without it, its result is for its caller only.
//!
//! *Audit* of a hit ([`Audit`]): the value is loaded again in the background, and compared with the value that the guard serves. Before
//! its load, the audit itself looks up the value that a caller would be served. If that differs from the loaded value, the audit looks it
//! up again after the policy's grace: only a value that is still served then counts as different. An invalidation that is on its way is
//! no difference.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::call::Call;
use super::look_up::{Lookup, look, read_entry};
use super::miss::MissOutcome;
use super::permits::{Admitted, admit};
use crate::error::{Error, Failure};
use crate::guard_state::GuardState;
use crate::key::{FlightKey, Key};
use crate::loader::{LeaseState, LoadInput, LoadOutput, LoadResult, LoadScope, Loader, OwnAnswer, OwnSender};
use crate::observe;
use crate::observe::{Count, Outcome, log, panic_text, warn_if};
use crate::policy::{Encoded, Policy};
use crate::store::load_limit::LoadEnd;
use crate::task::Tracked;
use crate::value::SharedValue;
use crate::value::entry::{Encoding, Entry};

/// A loader's load outside the flights, for `mode`: no lease is renewed, and its caller is answered at its end.
fn run_outside_flight(
    Call { state, policy, key }: Call<'_>,
    loader: Loader,
    mode: LeaseState,
) -> impl Future<Output = LoadResult> + Send + use<> {
    let Loader { run, within, .. } = loader;
    let input = LoadInput::outside_flight(mode, policy.load_timeout);
    LoadScope::scope(state.store.store_id(), key, None, within, async move { run(input).await.settle() })
}

/// How a load outside the flights ended: with a result or a panic; `None` if not within `load_timeout`.
type OutsideEnd<T> = Option<Result<T, Box<dyn Any + Send>>>;

async fn within_load_timeout<T>(policy: &Policy, load: impl Future<Output = T>) -> OutsideEnd<T> {
    timeout(policy.load_timeout, AssertUnwindSafe(load).catch_unwind()).await.ok()
}

/// Runs a caller's own load, whose result is for this caller only, for at most `load_timeout`. Returns a panic of the loader as an
/// error: the caller of this function decides whether to unwind.
pub(crate) async fn run_alone<A>(
    call: Call<'_>,
    loader: Loader,
    own: &mut OwnAnswer<A>,
) -> Result<Result<A, Failure>, Box<dyn Any + Send>> {
    let Call { policy, key, .. } = call;
    policy.count(Count::loads);
    let load = within_load_timeout(policy, run_outside_flight(call, loader, LeaseState::Alone));
    let failure = match observe::timed(&policy.counters, load).await.0 {
        Some(Ok(result)) => {
            if result.is_failure() {
                policy.count(Count::load_errors);
            }
            Failure::vanished()
        }
        Some(Err(panic)) => {
            policy.count(Count::loads_vanished);
            return Err(panic);
        }
        None => {
            policy.count(Count::load_timeouts);
            Failure::Guard(Error::load_timeout(key, policy.load_timeout))
        }
    };
    Ok(own.take().ok_or(failure))
}

/// How long a caller's load waits at most for the guard's look-up and lease: some round trips to a store nearby.
const LONGEST_DELAY: Duration = Duration::from_millis(20);

/// Runs the caller's own load in the caller's task. Returns the failure for the case that the loader has left no result.
pub(crate) async fn shadow(call: Call<'_>, loader: Loader) -> Failure {
    let Call { state, policy, key } = call;
    let (start, started) = oneshot::channel();
    {
        let (state, policy, key) = (state.clone(), policy.clone(), key.clone());
        tokio::spawn(async move {
            guard_beside(Call { state: &state, policy: &policy, key: &key }, OwnLoad(start)).await;
        });
    }
    let result_request = timeout(LONGEST_DELAY, started).await;
    // The result is encoded for the guard, which may store it.
    let load = run_outside_flight(call, loader, LeaseState::Leased);
    match within_load_timeout(policy, load).await {
        Some(Ok(result)) => {
            if let Ok(Ok(sender)) = result_request {
                // A flight that has timed out has dropped the receiver.
                let _ = sender.send(result);
            }
            Failure::vanished()
        }
        Some(Err(panic)) => Failure::Panicked(panic_text(&*panic)),
        None => Failure::Guard(Error::load_timeout(key, policy.load_timeout)),
    }
}

/// The guard's hold on the load of a caller on trial. That load starts when this is used or dropped.
struct OwnLoad(oneshot::Sender<oneshot::Sender<LoadResult>>);

impl OwnLoad {
    /// Starts the load, and waits for its result. `None` if the load had begun before, or if its caller has dropped it.
    async fn begin(self) -> Option<LoadResult> {
        let (result, loaded) = oneshot::channel();
        self.0.send(result).ok()?;
        loaded.await.ok()
    }

    /// The guard's loader. If this caller's load cannot be used, the next waiter loads. `led` is notified when the loader is used.
    fn into_loader(self, led: OwnSender<()>) -> Loader {
        loader_of(led, async { self.begin().await.unwrap_or(LoadResult::OnlyForCaller) }).that_may_tag()
    }
}

fn loader_of(led: OwnSender<()>, load: impl Future<Output = LoadResult> + Send + 'static) -> Loader {
    Loader::new(|_| async {
        let _ = led.send(());
        LoadOutput::from(load.await)
    })
}

/// Runs the guard's steps with the result of the caller's load: counts how the guard would have answered, and compares the value that it
/// would have served.
async fn guard_beside(call: Call<'_>, own: OwnLoad) {
    let (led, mut own_answer) = OwnAnswer::at_the_end();
    let outcome = match look(call, &read_whole).await {
        Lookup::LocalHit(entry) => hit(call, entry, own, Outcome::LocalHit).await,
        Lookup::Hit { value, stale: false, .. } => hit(call, value, own, Outcome::Hit).await,
        Lookup::Hit { stale: true, refresh, .. } => {
            if let Some(caller) = refresh {
                caller.refresh(own.into_loader(led), false);
            }
            Outcome::Stale
        }
        Lookup::Failed(_) => Outcome::Failed,
        Lookup::Miss(caller) => {
            let flight = FlightKey { key: call.key.clone(), mode: caller.mode };
            let waits = call.state.flights.has_connected(&flight);
            let loader = if waits {
                // The caller waits for another caller's load: its own load begins now.
                drop(own);
                loader_of(led, async { LoadResult::OnlyForCaller })
            } else {
                own.into_loader(led)
            };
            match caller.load(&read_whole, loader, &mut own_answer).await {
                MissOutcome::Led(..) => Outcome::Led,
                MissOutcome::Coalesced(..) => Outcome::Coalesced,
                MissOutcome::Stale(..) => Outcome::Stale,
                MissOutcome::Failed(_) => Outcome::Failed,
                MissOutcome::Alone(_) => Outcome::Bypassed,
            }
        }
    };
    call.count_answer(outcome);
}

/// Compares the value that the guard would have served with the value that its caller loads.
async fn hit(call: Call<'_>, served: Entry, own: OwnLoad, outcome: Outcome) -> Outcome {
    let Call { policy, .. } = call;
    if let Some(audit) = Audit::begin(call) {
        let same = match own.begin().await {
            Some(LoadResult::Value { encoding, payload, .. }) => is_same(policy, &served, encoding, &payload),
            _ => None,
        };
        audit.conclude_later(served, same);
    }
    outcome
}

fn is_same(policy: &Policy, served: &Entry, encoding: Encoding, payload: &Bytes) -> Option<bool> {
    let served = Encoded { encoding: served.encoding, payload: &served.payload };
    policy.audit.is_same([served, Encoded { encoding, payload }])
}

/// Reads the entry as it is.
fn read_whole(entry: &Entry, _now: u64, _shared: Option<&SharedValue>) -> Option<Entry> {
    Some(entry.clone())
}

/// A running audit.
pub(crate) struct Audit {
    state: Arc<GuardState>,
    policy: Arc<Policy>,
    key: Key,
    _turn: Tracked,
}

impl Audit {
    /// Begins the audit of a hit, unless an audit of its key began less than a second ago or too many audits run.
    pub(crate) fn begin(Call { state, policy, key }: Call<'_>) -> Option<Self> {
        let turn = state.audits.begin(key)?;
        Some(Self { state: Arc::clone(state), policy: Arc::clone(policy), key: key.clone(), _turn: turn })
    }

    /// Audits in the background: runs the loader, and compares its value with the value that the guard serves.
    pub(crate) fn of_loader(self, loader: Loader) {
        let call = Call { state: &self.state, policy: &self.policy, key: &self.key };
        // The result is encoded as for other callers, and not stored.
        let load = run_outside_flight(call, loader, LeaseState::Unleased).map(|result| match result {
            LoadResult::Value { encoding, payload, .. } => Some((encoding, payload)),
            LoadResult::Uncacheable { .. } | LoadResult::Failed { .. } | LoadResult::OnlyForCaller => None,
        });
        self.spawn(load, |policy, served, (encoding, payload)| is_same(policy, served, *encoding, payload));
    }

    /// Audits the value of `load` in the background. `load` returns `None` if it failed; `is_same` returns `None` if the values cannot be
    /// compared.
    pub(crate) fn spawn<L: Send + Sync + 'static>(
        self,
        load: impl Future<Output = Option<L>> + Send + 'static,
        is_same: impl Fn(&Policy, &Entry, &L) -> Option<bool> + Send + Sync + 'static,
    ) {
        in_background(Arc::clone(&self.state), self.run(load, is_same));
    }

    /// Concludes an audit whose two values are known, in the background.
    fn conclude_later(self, served: Entry, same: Option<bool>) {
        in_background(Arc::clone(&self.state), async move { self.conclude(&served, same).await });
    }

    async fn run<L: Send + Sync>(
        self,
        load: impl Future<Output = Option<L>> + Send,
        is_same: impl Fn(&Policy, &Entry, &L) -> Option<bool> + Send + Sync,
    ) {
        let Self { state, policy, key, .. } = &self;
        // The value has just expired, or the store does not answer: there is nothing to compare.
        let Some(served) = self.served().await else { return };
        let permit = match policy.load_limit() {
            Some(limit) => admit(state, policy, &limit, key, Box::new(|| None)).await,
            None => Admitted::Yes(None),
        };
        // The origin is overloaded, or no permit can be requested. The audit is skipped, because callers come first.
        let Admitted::Yes(permit) = permit else { return };
        policy.count(Count::loads);
        let (loaded, _) = observe::timed(&policy.counters, within_load_timeout(policy, load)).await;
        if let Some(permit) = permit {
            permit.end(if matches!(loaded, Some(Ok(Some(_)))) { LoadEnd::Done } else { LoadEnd::Failed });
        }
        let same = match loaded {
            Some(Ok(Some(loaded))) => is_same(policy, &served, &loaded),
            _ => None,
        };
        self.conclude(&served, same).await;
    }

    /// Counts an audit. `same` is `None` if the two values could not be compared.
    async fn conclude(&self, served: &Entry, mut same: Option<bool>) {
        let Self { state, policy, key, .. } = self;
        if same == Some(false) {
            sleep(policy.audit.grace).await;
            let is_unchanged =
                |now: &Entry| now.stored_at == served.stored_at && now.payload == served.payload;
            same = Some(!self.served().await.as_ref().is_some_and(is_unchanged));
        }
        policy.count(match same {
            Some(true) => Count::audits_matched,
            Some(false) => Count::audits_differed,
            None => Count::audits_failed,
        });
        if same == Some(false) {
            let age = Duration::from_millis(state.store.now().saturating_sub(served.stored_at));
            policy.counters.record("stampede_guard_audit_age_seconds", age);
            let is_news = state.audits.log.is_due();
            warn_if!(
                log::GUARD,
                is_news,
                ?key,
                ?age,
                "an audit found another value at the origin than the guard serves"
            );
        }
    }

    /// The value that a caller would be served now.
    async fn served(&self) -> Option<Entry> {
        let Self { state, policy, key, .. } = self;
        let copy = state.local.copy(key, policy.local_for).map(|(copy, _)| Arc::clone(&copy.entry));
        let stored = match copy {
            Some(copy) => Some(copy),
            None => read_entry(Call { state, policy, key }).await.ok().flatten(),
        };
        let now = state.store.now();
        stored?.value().filter(|value| value.is_fresh(now)).cloned()
    }
}

/// Runs an audit until the guard is shut down: an audit is not worth a shutdown that takes longer.
fn in_background(state: Arc<GuardState>, audit: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = state.waiters.sent_away() => {}
            () = audit => {}
        }
    });
}
