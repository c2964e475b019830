//! One load of a flight: waits for a permit, runs the loader in a separate task, and renews the lease meanwhile. Step 6.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{Instrument as _, Span};

use super::batch::{Attempt, BatchShare};
use super::bulkhead;
use super::call::{Call, CallState};
use super::lease::{Lease, LeaseEvent};
use crate::error::Failure;
use crate::flight::order::SentAt;
use crate::guard_state::turns::Turn;
use crate::guard_state::{FlightWaiter, GuardState, Leader};
use crate::key::flight::FlightKey;
use crate::loader::nesting::{LoadPermitId, LoadScope};
use crate::loader::{AbortOnDrop, Announcer, LeaseState, LoadInput, LoadOutput, Loader, describe};
use crate::observe::{self, Count, FlightId};
use crate::policy::Policy;
use crate::policy::budget::Budget;
use crate::store::StoreError;
use crate::value::outcome::FlightOutcome;
use crate::value::stored::StoredEntry;
use crate::value::tags::TagId;

/// The task that runs steps 4 to 7 of one flight.
pub(crate) struct FlightTask {
    pub(crate) state: Arc<GuardState>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) flight: FlightKey,
    pub(crate) leader: Leader,
    /// The entry that the first caller read and will not serve as it is.
    pub(crate) rejected: Option<Arc<StoredEntry>>,
    /// The rest of the first caller's budget.
    pub(crate) budget: Budget,
    /// The chain of loads inside which the first caller waits for this one.
    pub(crate) within: Option<Arc<LoadScope>>,
    /// The span of the first caller.
    pub(crate) span: Span,
    /// The load that its callers wait for, if spans of waits are wanted.
    pub(crate) waits_for: Option<FlightId>,
    /// The first caller's attempt, if it loads several keys together.
    pub(crate) batch: Option<Attempt>,
    /// The slot of a caller that does not wait. Held here, because dropping a slot drops its loader.
    pub(crate) _unattended: Option<FlightWaiter>,
}

/// How one load ended.
pub(super) enum LoadEnd {
    /// The loader returned, after this duration.
    Loaded(Box<LoadOutput>, Duration),
    TimedOut,
    /// The loader panicked, or its runtime dropped it.
    Vanished(Failure),
}

/// When a load began, and the tags' ids at that moment.
pub(crate) struct LoadStart {
    pub(super) asked: SentAt,
    /// The flight had the lease when its first load began.
    pub(super) had_lease: bool,
    /// The policy's tags with their ids. If the store did not answer, nothing may be stored, because no process could tell whether
    /// it was invalidated.
    pub(super) tags: Result<Vec<TagId>, StoreError>,
}

impl LoadStart {
    /// For a load that does not begin.
    pub(crate) fn none() -> Self {
        Self { asked: SentAt::now(), had_lease: false, tags: Ok(Vec::new()) }
    }
}

impl FlightTask {
    /// The task of the flight that this caller leads.
    pub(super) fn new(caller: &CallState<'_>, flight: FlightKey, leader: Leader) -> Self {
        let Call { state, policy, .. } = caller.call;
        let (state, policy) = (Arc::clone(state), Arc::clone(policy));
        let (rejected, budget) = (caller.rejected.clone(), caller.budget);
        let (span, waits_for) = (Span::current(), None);
        let batch = caller.batch.as_deref().map(Attempt::of_flight);
        // Also without tags: a caller of another policy may have joined already.
        let tags = policy.tag_keys(&state.namespace, &flight.key);
        leader.checks(tags.iter().map(|tag| tag.name().into()).collect());
        Self {
            state,
            policy,
            flight,
            leader,
            rejected,
            budget,
            within: None,
            span,
            waits_for,
            batch,
            _unattended: None,
        }
    }

    /// Runs one loader in a separate task, so that neither its panic nor its blocking affects the lease, and renews the lease
    /// meanwhile. `lease` is `None` afterwards if it was lost or handed over.
    pub(super) async fn load(
        &mut self,
        loader: Loader,
        turn: Option<LoadPermitId>,
        lease: &mut Option<Lease>,
    ) -> LoadEnd {
        let Loader { run, span, within, .. } = loader;
        let end = Instant::now() + self.policy.load_timeout;
        self.policy.count(Count::loads);
        let mode = if lease.is_some() { LeaseState::Leased } else { LeaseState::Unleased };
        let previous = self.rejected.as_ref().and_then(|rejected| rejected.value()).cloned();
        let (losing, lost) = watch::channel(false);
        let mut flight = None;
        let mut identity =
            || *flight.get_or_insert_with(|| lease.as_ref().map_or_else(FlightId::random, Lease::flight));
        let load_span = self.state.spans.load(&span, &self.flight.key, &mut identity);
        self.waits_for = self.state.spans.are_wanted().then(identity);
        // Callers that give up before the load ends know what they waited for.
        self.note_waits();
        let announcer = Some(Announcer { waiters: self.leader.announcer(), flight: self.waits_for });
        let given = LoadInput { mode, previous, deadline: end, lost, announcer };
        let place = self.state.store.place();
        let load =
            LoadScope::scope_with(place, &self.flight.key, turn, within, async move { run(given).await });
        let mut load = AbortOnDrop(tokio::spawn(load.instrument(load_span)));
        let (loaded, took) =
            observe::timed(&self.policy.counters, self.renewing(lease, end, &losing, &mut load.0)).await;
        match loaded {
            Some(Ok(loaded)) => {
                if loaded.result.is_failure() {
                    self.policy.count(Count::load_errors);
                }
                LoadEnd::Loaded(Box::new(loaded), took)
            }
            Some(Err(error)) => {
                self.policy.count(Count::loads_vanished);
                LoadEnd::Vanished(describe(error))
            }
            None => {
                self.policy.count(Count::load_timeouts);
                LoadEnd::TimedOut
            }
        }
    }

    /// Tells the callers that wait which load it is that they wait for.
    pub(crate) fn note_waits(&self) {
        if let Some(flight) = self.waits_for {
            self.leader.each_loader(|loader| loader.waits_for(flight));
        }
    }

    /// Waits for a permit, if the policy bounds concurrent loads.
    pub(super) async fn admit(
        &self,
        lease: &mut Option<Lease>,
    ) -> Result<Option<(Arc<BatchShare>, LoadPermitId)>, Failure> {
        let Self { state, policy, flight, .. } = self;
        let Some(limit) = policy.max_concurrent_loads else { return Ok(None) };
        let turn = state.permit_turn(limit);
        if self.holds(&turn) {
            return Ok(None);
        }
        let share = self.share();
        // `admit` has its own timeout; the margin is for its last command.
        let end = Instant::now() + policy.permit_timeout + policy.command_timeout * 4;
        // The keys that its caller loads together do not wait for this permit.
        if let Some(attempt) = &self.batch {
            attempt.queue();
        }
        let admit = share.permit.get_or_init(|| async {
            let admitted = bulkhead::admit(state, policy, limit, &flight.key).await;
            if let Some(attempt) = &self.batch {
                attempt.admitted();
            }
            admitted
        });
        let admitted = self.renewing(lease, end, &watch::Sender::new(false), admit).await;
        match admitted {
            Some(Err(failure)) => Err(failure.clone()),
            Some(Ok(Some(_))) => Ok(Some((share, turn))),
            Some(Ok(None)) | None => Ok(None),
        }
    }

    /// Waits for the turn of a flight of a call for many keys to send commands, if it sends any.
    pub(super) async fn batch_turn(&self, sends: bool) -> Option<Turn> {
        if !sends || self.batch.is_none() {
            return None;
        }
        // No renewal comes meanwhile.
        let turn = self.state.turns.flight(&self.state.store, &self.flight.key, true);
        timeout(self.policy.lease / 3, turn).await.ok()?
    }

    /// What this flight takes once for all flights of its round, or for itself.
    pub(super) fn share(&self) -> Arc<BatchShare> {
        self.batch.as_ref().map(Attempt::share).unwrap_or_default()
    }

    /// Renews the lease while `work` runs; returns `None` if `work` is not done at `end`. `lease` is `None` afterwards if it was
    /// lost or handed over; only a loss is sent on `losing`.
    async fn renewing<T>(
        &self,
        lease: &mut Option<Lease>,
        end: Instant,
        losing: &watch::Sender<bool>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::pin!(work);
        let mut in_doubt = false;
        loop {
            let kept = async {
                match &*lease {
                    Some(lease) => lease.keep(end, in_doubt).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = sleep_until(end) => return None,
                event = kept => {
                    // Callers that joined before still get the value. Later callers must not: it may be older than an
                    // invalidation.
                    self.leader.detach();
                    in_doubt = event == LeaseEvent::Invalidated;
                    let Some(ended) = lease.take_if(|_| !in_doubt) else { continue };
                    if event == LeaseEvent::Lost {
                        self.policy.count(Count::leases_lost);
                        let_go_since(&self.leader, ended.confirmed());
                        losing.send_replace(true);
                    } else {
                        // Spawned, because `work` goes on: it has its own time limit, and callers wait for it. The shutdown waits
                        // until the lease is gone.
                        tokio::spawn(ended.hand_over(0));
                    }
                }
            }
        }
    }

    /// Whether the first caller waits for this load inside another load that already holds this permit.
    pub(super) fn holds(&self, turn: &LoadPermitId) -> bool {
        let holds = |loading: &Arc<LoadScope>| loading.holds(turn);
        self.within.as_ref().is_some_and(holds) && self.leader.is_awaited_by_first()
    }
}

/// Makes the callers that came after `current` join again. The flight's outcome was current at that moment and may have changed
/// since, and such a caller may know of the change. It joins again only once: the next load begins after its arrival.
pub(crate) fn let_go_since(leader: &Leader, current: SentAt) {
    leader.leave_if(&FlightOutcome::Invalidated, |loader| loader.came.is_after(current));
}
