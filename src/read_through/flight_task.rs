//! The task of one flight, steps 4 to 6: it contends for the lease, waits for a permit, runs the loader in a separate task, and renews
//! the lease meanwhile. `commit` is step 7.
//!
//! The task belongs to no caller. When a caller is dropped, even the one that started the flight, only its slot
//! becomes free. The task goes on, because the origin does the work anyway and the next request needs the value.
//!
//! Where the policy limits concurrent loads, the flight waits for a permit ([`permits`](super::permits)) under its lease.

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/leader_tests.rs"]
mod tests;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{Instrument as _, Span};
use uuid::Uuid;

use super::batch::{Attempt, BatchShare};
use super::call::{Call, CallState};
use super::lease::{AcquireOutcome, AcquireRequest, Lease, LeaseEvent, contend};
use super::permits::{Admitted, admit, log_uncapped};
use crate::error::{Error, Failure};
use crate::flight::SentAt;
use crate::guard_state::turns::Turn;
use crate::guard_state::turns::{Callers, GrantedPermit};
use crate::guard_state::{FlightWaiter, GuardState, Leader};
use crate::key::{FlightKey, LoadMode};
use crate::loader::{
    AbortOnDrop, Delivery, LeaseState, LoadInput, LoadOutput, LoadPermitId, LoadResult, LoadScope, Loader,
    describe,
};
use crate::observe;
use crate::observe::{Count, FlightId};
use crate::policy::{Budget, LoadLimitSettings, OnStoreDown, Policy};
use crate::store::load_limit::LoadEnd;
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::task::box_future;
use crate::value::entry::{TagId, Unstored};
use crate::value::{FlightOutcome, StoredEntry};

/// How many times vanished loads are taken over under one lease, in all processes that it is handed to. If one more vanishes, all
/// waiters receive its failure.
const MOST_HOPS: u8 = 3;

impl FlightTask {
    /// Spawns the flight's task. All waiters are answered when it ends, even if its runtime drops it.
    pub(crate) fn start(self) {
        // Boxed before it is given to the runtime, which moves it several times: the future of a flight has some 14 KB.
        tokio::spawn(box_future(|| self.task()));
    }

    /// The flight's task. It is counted as running from this call on.
    fn task(self) -> impl Future<Output = ()> + Send {
        // A shutdown does not wait for flights that begin after it; only their callers do.
        let running = (!self.state.is_closed()).then(|| self.state.tasks.enter());
        async move {
            let stands_for = self.run().await;
            // The flight only stays in the map from here on, so a shutdown need not wait for it.
            drop(running);
            if let Some((leader, pause)) = stands_for {
                sleep(pause).await;
                leader.finish(FlightOutcome::NoLoader);
            }
        }
    }

    /// Runs the flight. If another process is refreshing, returns how long to keep this flight in the map, so that local callers
    /// do not each try the lease.
    async fn run(mut self) -> Option<(Leader, Duration)> {
        if self.flight.mode == LoadMode::Unleased {
            self.load_in_turn(None).await;
        } else if !self.state.is_closed() {
            let outcome = self.contend().await;
            return self.after_contention(outcome).await;
        } else if self.is_refresh() {
            // The shutdown does not wait for this flight, so it must not take a lease.
            return self.finish(FlightOutcome::NoLoader);
        } else {
            self.load_for_a_process_that_ends().await;
        }
        None
    }

    /// Loads under the lease, or does what the outcome demands instead. Returns what [`run`](Self::run) returns.
    async fn after_contention(self, outcome: AcquireOutcome) -> Option<(Leader, Duration)> {
        let is_refresh = self.is_refresh();
        match outcome {
            AcquireOutcome::Leased(lease) => self.load_in_turn(Some(lease)).await,
            AcquireOutcome::Ended { outcome, sent_at } => {
                if outcome.has_value() {
                    // A caller that came after `sent_at` may know of a change that is newer than the value.
                    self.leader.detach();
                    let_go_since(&self.leader, sent_at);
                }
                return self.finish(outcome);
            }
            AcquireOutcome::WaitedOut => return self.finish(FlightOutcome::WaitedOut),
            AcquireOutcome::Busy(remaining) if is_refresh => {
                return Some((self.leader, remaining.min(self.policy.lease)));
            }
            AcquireOutcome::Busy(_) => return self.finish(FlightOutcome::NoLoader),
            // No caller waits for a refresh, and failing open would make every process refresh for itself.
            AcquireOutcome::Leaving | AcquireOutcome::StoreDown(_) if is_refresh => {
                return self.finish(FlightOutcome::NoLoader);
            }
            AcquireOutcome::Leaving => self.load_for_a_process_that_ends().await,
            AcquireOutcome::StoreDown(error) => match self.policy.on_store_down {
                OnStoreDown::FailOpen => {
                    // From here on this flight learns of no invalidation. If the server answers and refuses, it would refuse a
                    // replacement flight too, so later callers join this one.
                    let refused = [StoreErrorKind::Refused, StoreErrorKind::Transient].contains(&error.kind);
                    self.leader.lose_store(!refused);
                    self.load_without_the_store(error).await;
                }
                OnStoreDown::FailClosed => {
                    let error = Error::store("acquiring the lease", &self.flight.key, error);
                    return self.finish(FlightOutcome::Failed(Failure::Guard(error)));
                }
            },
        }
        None
    }

    /// Whether no caller waits for this flight: each was served the value that is stored.
    pub(super) fn is_refresh(&self) -> bool {
        self.flight.mode == LoadMode::BackgroundRefresh
    }

    /// Loads for this process alone, if it has a slot for a further load without the store. Takes no permit: the store, which
    /// counts the permits, cannot be reached.
    async fn load_without_the_store(self, error: StoreError) {
        let slot = match self.enter_slot() {
            Ok(slot) => slot,
            Err(failure) => return self.shed(failure, None).await,
        };
        self.policy.count(Count::fail_open_loads);
        self.state.store.went_without();
        if self.policy.load_limit().is_some() {
            log_uncapped(&self.state, &self.flight.key, &error);
        }
        self.load_and_end(None, slot).await;
    }

    /// A slot among the loads without the store; `None` inside a load that has a slot already.
    fn enter_slot(&self) -> Result<Option<LoadPermit>, Failure> {
        let (most, id) = (self.most_without_the_store(), self.state.store_permit_id());
        if self.holds(&id) {
            return Ok(None);
        }
        let share = self.share();
        if share.slot.get_or_init(|| self.state.fail_open.try_enter(most)).is_some() {
            return Ok(Some(LoadPermit { share, id }));
        }
        self.policy.count(Count::overloaded);
        Err(Failure::Guard(Error::too_many_fail_open_loads(&self.flight.key, most)))
    }

    /// How many loads may run at once without the store: `max_fail_open_loads`, or this process's share of an adaptive limit if that is
    /// less.
    fn most_without_the_store(&self) -> usize {
        let most = self.policy.max_fail_open_loads;
        let limit = self.policy.load_limit().filter(|limit| limit.bounds.is_some());
        limit.map_or(most, |limit| self.state.load_queues.of(&limit.name).share(limit.start).min(most))
    }

    /// Takes a slot or permit for this flight alone, instead of the one that it shares with its batch.
    async fn admit_alone(
        &mut self,
        LoadPermit { share, .. }: LoadPermit,
        lease: &mut Option<Lease>,
    ) -> Result<Option<LoadPermit>, Failure> {
        let had_slot = share.slot.get().is_some();
        drop(share);
        if had_slot { self.enter_slot() } else { self.admit(lease, true).await }
    }

    /// Ends the flight with this failure, without a load.
    async fn shed(self, failure: Failure, lease: Option<Lease>) {
        let shed = LoadOutput::from(LoadResult::failed(failure));
        self.end(shed, Duration::ZERO, LoadStart::none(), lease).await;
    }

    /// Loads once for all waiters of this process while it shuts down. Takes no lease and no permit, because the process may end
    /// before it gives them back.
    async fn load_for_a_process_that_ends(self) {
        if !self.leader.is_joinable() {
            // An invalidation has detached this flight, so several flights of the key may wait. Their callers join again and share
            // the flight that is in the map, or a new one.
            return self.leader.finish(FlightOutcome::Invalidated);
        }
        self.leader.lose_store(false);
        self.load_and_end(None, None).await;
    }

    fn finish<T>(self, outcome: FlightOutcome) -> Option<T> {
        // No caller joins after this, so the next line reaches all waiters.
        self.leader.detach();
        self.note_waits();
        self.leader.finish(outcome);
        None
    }

    async fn contend(&mut self) -> AcquireOutcome {
        let (leader, wait_timeout) = (&self.leader, self.policy.wait_timeout);
        // The first caller's `wait_timeout` has passed. Continue only while later callers wait; they leave by their own timers.
        // Detach before the second check, so that no caller joins between that check and the end of the flight.
        let goes_on = || {
            leader.leave_first(FlightOutcome::WaitedOut);
            let is_awaited = leader.is_awaited() || {
                leader.detach();
                leader.is_awaited()
            };
            is_awaited.then(|| Instant::now() + wait_timeout)
        };
        contend(AcquireRequest {
            state: &self.state,
            key: &self.flight.key,
            policy: &self.policy,
            queue: matches!(self.flight.mode, LoadMode::Leased | LoadMode::ForcedReload),
            rejected: &mut self.rejected,
            budget: &mut self.budget,
            tags: &self.policy.tag_keys(&self.state.namespace, &self.flight.key),
            span: &self.span,
            waits_for: &mut self.waits_for,
            batch: self.batch.as_mut(),
            since: self.state.store.now(),
            deadline: Instant::now() + wait_timeout,
            goes_on: &goes_on,
        })
        .await
    }

    /// Takes the permit after the lease, and loads.
    async fn load_in_turn(self, mut lease: Option<Lease>) {
        match self.admit(&mut lease, false).await {
            Ok(permit) => self.load_and_end(lease, permit).await,
            Err(failure) => self.shed(failure, lease).await,
        }
    }

    /// Step 6. When a load vanishes (its loader panics, or its runtime drops it), loads again with another caller's loader under the same
    /// lease.
    async fn load_and_end(mut self, mut lease: Option<Lease>, mut permit: Option<LoadPermit>) {
        let had_lease = lease.is_some();
        if let Some(lease) = &lease {
            self.leader.leased(lease.ends());
        }
        let mut hops = lease.as_ref().map_or(0, |lease| lease.takeovers);
        // When the flight stopped waiting for another load, if it had to wait for one.
        let mut waited_until = lease.as_ref().and_then(|lease| lease.waited_until);
        let mut vanished = false;
        loop {
            let Some((loader, slot)) = self.leader.next_loader() else {
                // Release the permit first, so that loads of other keys need not wait for the hand-over.
                drop(permit);
                return self.end_without_loader(lease, hops, vanished).await;
            };
            if vanished {
                self.policy.count(Count::takeovers);
            }
            if self.batch.take_if(|attempt| !attempt.calls(&loader)).is_some()
                && let Some(of_batch) = permit.take()
            {
                match self.admit_alone(of_batch, &mut lease).await {
                    Ok(own) => permit = own,
                    Err(failure) => return self.shed(failure, lease).await,
                }
            }
            if let (Some(since), Some(until)) = (loader.since, waited_until)
                && until > since
            {
                self.policy.waited(until - since);
            }
            let start = self.load_start(had_lease, loader.may_tag && lease.is_some()).await;
            let (loaded, took) = match self.load(loader, permit.as_ref(), &mut lease).await {
                Ok(ended) => ended,
                Err(failure) if hops >= MOST_HOPS => (LoadResult::failed(failure).into(), Duration::ZERO),
                Err(failure) => {
                    (hops, vanished) = (hops + 1, true);
                    waited_until = Some(Instant::now());
                    slot.notify(self.outcome_if_vanished(failure));
                    continue;
                }
            };
            if let Some(permit) = permit {
                permit.end(loaded.end);
            }
            return self.end(loaded, took, start, lease).await;
        }
    }

    /// Called when no remaining waiter has a loader. Hands the lease over to a process that waits for it, or frees it.
    async fn end_without_loader(self, lease: Option<Lease>, hops: u8, vanished: bool) {
        if let Some(lease) = lease
            && lease.hand_over(hops).await
            && vanished
        {
            self.policy.count(Count::takeovers);
        }
        self.leader.finish(FlightOutcome::NoLoader);
    }

    /// The outcome for the caller whose loader has vanished.
    fn outcome_if_vanished(&self, failure: Failure) -> FlightOutcome {
        let Some((older, _)) = self.stand_in(Unstored::NO_ANSWER, self.state.store.now()) else {
            return FlightOutcome::Failed(failure);
        };
        self.policy.count(Count::stand_ins);
        FlightOutcome::Stale(older)
    }
}

/// The task that runs steps 4 to 7 of one flight.
pub(crate) struct FlightTask {
    pub(crate) state: Arc<GuardState>,
    pub(crate) policy: Arc<Policy>,
    pub(crate) flight: FlightKey,
    pub(crate) leader: Leader,
    /// The entry that the first caller read and does not serve as it is.
    pub(crate) rejected: Option<Arc<StoredEntry>>,
    /// The rest of the first caller's budget.
    pub(crate) budget: Budget,
    /// The chain of loads inside which the first caller waits for this flight's load.
    pub(crate) within: Option<Arc<LoadScope>>,
    /// The span of the first caller.
    pub(crate) span: Span,
    /// The load that the flight's callers wait for, if spans are enabled.
    pub(crate) waits_for: Option<FlightId>,
    /// This flight's attempt in the call for several keys, if its first caller made one.
    pub(crate) batch: Option<Attempt>,
    /// For how long the origin, in its answer to the load, asked to be left alone.
    pub(super) rest: Duration,
    /// For a refresh: the slot of its caller, which does not wait. Held here, because dropping a slot drops its loader.
    pub(crate) _unattended: Option<FlightWaiter>,
}

/// A load's permit, or its slot among the loads without the store, held until this is dropped. Shared with the other flights of the round.
struct LoadPermit {
    share: Arc<BatchShare>,
    id: LoadPermitId,
}

impl LoadPermit {
    /// Called when a load has ended with this result. The last load of a round gives the permit back, with its own result.
    fn end(self, end: LoadEnd) {
        let share = Arc::into_inner(self.share);
        if let Some(Ok(Some(permit))) = share.and_then(|share| share.permit.into_inner()) {
            permit.end(end);
        }
    }
}

/// When a load began, and the tags' ids at that moment.
pub(crate) struct LoadStart {
    pub(super) sent_at: SentAt,
    /// Whether the flight had the lease when its first load began.
    pub(super) had_lease: bool,
    /// The policy's tags with their ids. If the store did not answer, nothing may be stored, because no process could detect an
    /// invalidation of it.
    pub(super) tags: StoreResult<Vec<TagId>>,
    /// The load's id in the journal of tags, if it has entered it.
    pub(super) journal_entry: Option<Uuid>,
}

impl LoadStart {
    /// The start time and tags of a flight that ends without a load.
    fn none() -> Self {
        Self { sent_at: SentAt::now(), had_lease: false, tags: Ok(Vec::new()), journal_entry: None }
    }
}

impl FlightTask {
    /// The task of the flight that this caller leads.
    pub(super) fn new(caller: &CallState<'_>, flight: FlightKey, leader: Leader) -> Self {
        let Call { state, policy, .. } = caller.call;
        // Recorded even if there are no tags: a caller with another policy may have joined already.
        let tags = policy.tag_keys(&state.namespace, &flight.key);
        leader.checks(tags.iter().map(|tag| tag.name().into()).collect());
        Self {
            state: Arc::clone(state),
            policy: Arc::clone(policy),
            flight,
            leader,
            rejected: caller.rejected.clone(),
            budget: caller.budget,
            within: None,
            span: Span::current(),
            waits_for: None,
            batch: caller.batch.as_deref().map(Attempt::of_flight),
            rest: Duration::ZERO,
            _unattended: None,
        }
    }

    /// Runs one loader in a separate task, so that neither its panic nor its blocking affects the lease, and renews the lease
    /// meanwhile. `lease` is `None` afterwards if it was lost or handed over. Returns the result, and how long the load took; `Err` with
    /// the failure if the loader panicked or its runtime dropped it.
    async fn load(
        &mut self,
        loader: Loader,
        permit: Option<&LoadPermit>,
        lease: &mut Option<Lease>,
    ) -> Result<(LoadOutput, Duration), Failure> {
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
        self.waits_for = self.state.spans.are_enabled().then(identity);
        // Recorded now, so that callers that give up before the load ends know what they waited for.
        self.note_waits();
        let delivery = Delivery::to_waiters(self.leader.flight(), self.waits_for);
        let input = LoadInput { mode, previous, deadline: end, lost, delivery };
        let (slot, permit) = (self.state.store.store_id(), permit.map(|permit| permit.id.clone()));
        let load = box_future(|| {
            let load = async move { run(input).await };
            LoadScope::scope(slot, &self.flight.key, permit, within, load).instrument(load_span)
        });
        let mut load = AbortOnDrop(tokio::spawn(load));
        let (loaded, took) =
            observe::timed(&self.policy.counters, self.renewing(lease, end, &losing, &mut load.0)).await;
        match loaded {
            Some(Ok(loaded)) => {
                if loaded.result.is_failure() {
                    self.policy.count(Count::load_errors);
                }
                Ok((loaded, took))
            }
            Some(Err(error)) => {
                self.policy.count(Count::loads_vanished);
                Err(describe(error))
            }
            None => {
                self.policy.count(Count::load_timeouts);
                let error = Error::load_timeout(&self.flight.key, self.policy.load_timeout);
                Ok((LoadResult::failed(Failure::Guard(error)).into(), self.policy.load_timeout))
            }
        }
    }

    /// Records in each waiter's loader which load the waiter waits for.
    pub(crate) fn note_waits(&self) {
        if let Some(flight) = self.waits_for {
            self.leader.each_loader(|loader| loader.waits_for(flight));
        }
    }

    /// Waits for a permit, if the policy bounds concurrent loads.
    async fn admit(
        &self,
        lease: &mut Option<Lease>,
        has_loader: bool,
    ) -> Result<Option<LoadPermit>, Failure> {
        let Self { state, policy, .. } = self;
        let Some(limit) = policy.load_limit() else { return Ok(None) };
        let id = state.permit_id(Arc::clone(&limit.name));
        if self.holds(&id) {
            return Ok(None);
        }
        let share = self.share();
        // `admit` has its own timeout; the margin is for its last command.
        let end = Instant::now() + policy.permit_timeout + policy.command_timeout * 4;
        // The other keys of the batch do not wait for this permit.
        if let Some(attempt) = &self.batch {
            attempt.queue();
        }
        let admit = share.permit.get_or_init(|| async {
            let admitted = self.admit_when_due(&limit, has_loader).await;
            if let Some(attempt) = &self.batch {
                attempt.admitted();
            }
            admitted
        });
        let admitted = self.renewing(lease, end, &watch::Sender::new(false), admit).await;
        match admitted {
            Some(Err(failure)) => Err(failure.clone()),
            Some(Ok(Some(_))) => Ok(Some(LoadPermit { share, id })),
            Some(Ok(None)) | None if share.slot.get().is_some() => {
                Ok(Some(LoadPermit { share, id: state.store_permit_id() }))
            }
            Some(Ok(None)) | None => Ok(None),
        }
    }

    /// Waits for a permit as long as callers wait for the load.
    async fn admit_when_due(
        &self,
        limit: &LoadLimitSettings,
        has_loader: bool,
    ) -> Result<Option<GrantedPermit>, Failure> {
        let Self { state, policy, flight, .. } = self;
        loop {
            match admit(state, policy, limit, &flight.key, self.callers(has_loader)).await {
                Admitted::Yes(permit) => return Ok(permit),
                Admitted::No(failure) => return Err(failure),
                Admitted::WithoutStore => return self.enter_slot().map(|_| None),
                Admitted::Left => {
                    // Detach first, so that no caller joins between the check and the end of the flight.
                    self.leader.detach();
                    if !self.leader.is_awaited() {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Counts the callers that wait for this load. At least one is counted for a load of several keys, which goes on when the callers of
    /// one key have left, and for a load whose loader was already taken from its caller.
    fn callers(&self, has_loader: bool) -> Callers {
        let waiters = self.leader.flight();
        let (is_refresh, is_batch) = (self.flight.mode == LoadMode::BackgroundRefresh, self.batch.is_some());
        Box::new(move || match waiters.callers()? {
            // The caller that began a refresh does not wait for it.
            callers if is_refresh => callers.checked_sub(1).filter(|others| *others > 0),
            callers => Some(callers.max(usize::from(is_batch || has_loader))),
        })
    }

    /// If this flight belongs to a call for many keys and `sends` commands now, waits for its turn to send them.
    pub(super) async fn batch_turn(&self, sends: bool) -> Option<Turn> {
        if !sends || self.batch.is_none() {
            return None;
        }
        // Bounded, because the lease is not renewed during this wait.
        let turn = self.state.turns.flight(&self.state.store, &self.flight.key, true);
        timeout(self.policy.lease / 3, turn).await.ok()?
    }

    /// The slot and permit that all flights of this flight's round share; a new share for this flight alone if it is in no batch.
    fn share(&self) -> Arc<BatchShare> {
        self.batch.as_ref().map(Attempt::share).unwrap_or_default()
    }

    /// Renews the lease while `work` runs; returns `None` if `work` is not done at `end`. `lease` is `None` afterwards if it was
    /// lost or handed over; `losing` is set only if it was lost.
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
            let lease_event = async {
                match &*lease {
                    Some(lease) => lease.keep(end, in_doubt).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = sleep_until(end) => return None,
                event = lease_event => {
                    // Callers that joined before still get the value. Later callers must not get it: it may be older than an
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
                        // until the lease has ended.
                        tokio::spawn(ended.hand_over(0));
                    }
                }
            }
        }
    }

    /// Whether the first caller waits for this load inside another load that already holds this permit, so that no further one is needed.
    fn holds(&self, permit: &LoadPermitId) -> bool {
        let holds = |loading: &Arc<LoadScope>| loading.holds(permit);
        self.within.as_ref().is_some_and(holds) && self.leader.is_awaited_by_first()
    }
}

/// Makes the callers that came after `current` join again. The flight's outcome was current at that moment; the resource may have changed
/// since, and such a caller may know of the change. It joins again only once, because the next load begins after it came.
pub(crate) fn let_go_since(leader: &Leader, current: SentAt) {
    leader.leave_if(&FlightOutcome::Invalidated, |loader| loader.came.is_after(current));
}
