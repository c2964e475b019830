//! The task of one flight: contend for the lease, load, end. Steps 4 to 6; `commit` is step 7.
//!
//! The task belongs to no caller. When a caller is dropped, even the one that started the flight, only its slot
//! becomes free. The task goes on, because the origin does the work anyway and the next request wants the value.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::acquire::{AcquireOutcome, AcquireRequest};
use super::batch::BatchShare;
use super::bulkhead;
use super::contend::contend;
use super::lease::Lease;
use super::load::{FlightTask, LoadEnd, LoadStart, let_go_since};
use crate::error::{Error, Failure};
use crate::guard_state::Leader;
use crate::key::flight::LoadMode;
use crate::loader::nesting::LoadPermitId;
use crate::loader::{LoadOutput, LoadResult};
use crate::observe::Count;
use crate::policy::OnStoreDown;
use crate::store::{StoreError, StoreErrorKind};
use crate::value::freshness::Unstored;
use crate::value::outcome::FlightOutcome;

/// How often a vanished load is taken over in one wave before its failure is given to all waiters.
const MOST_HOPS: u8 = 3;

impl FlightTask {
    /// Spawns the flight's task. All waiters are answered when it ends, also if its runtime drops it.
    pub(crate) fn start(self) {
        tokio::spawn(self.task());
    }

    /// The flight's task, which is counted from this call on.
    fn task(self) -> impl Future<Output = ()> + Send {
        // A shutdown does not wait for flights that begin after it; only their callers do.
        let running = (!self.state.is_closed()).then(|| self.state.tasks.enter());
        async move {
            let stands_for = self.run().await;
            // The flight only stays in the map from here on, so a shutdown need not wait for it.
            drop(running);
            if let Some((leader, pause)) = stands_for {
                sleep(pause).await;
                leader.finish(FlightOutcome::Gone);
            }
        }
    }

    /// Runs the flight. If another process is refreshing, returns how long to keep this flight in the map, so that local callers
    /// do not each try the lease.
    async fn run(mut self) -> Option<(Leader, Duration)> {
        let lease = match self.flight.mode {
            LoadMode::Unleased => None,
            LoadMode::Leased | LoadMode::Probe | LoadMode::ForcedReload if self.state.is_closed() => {
                self.load_for_a_process_that_ends().await;
                return None;
            }
            // The shutdown does not wait for this flight, so it must not take a lease.
            LoadMode::BackgroundRefresh if self.state.is_closed() => return self.finish(FlightOutcome::Gone),
            LoadMode::Leased | LoadMode::Probe | LoadMode::BackgroundRefresh | LoadMode::ForcedReload => {
                match self.contend().await {
                    AcquireOutcome::Leased(lease) => Some(lease),
                    AcquireOutcome::Ended { outcome, asked } => {
                        if outcome.has_value() {
                            // A caller that came after `asked` may know of a change that the found value does not have.
                            self.leader.detach();
                            let_go_since(&self.leader, asked);
                        }
                        return self.finish(outcome);
                    }
                    AcquireOutcome::WaitedOut => return self.finish(FlightOutcome::WaitedOut),
                    AcquireOutcome::Busy(remaining) if self.flight.mode == LoadMode::BackgroundRefresh => {
                        return Some((self.leader, remaining.min(self.policy.lease)));
                    }
                    AcquireOutcome::Busy(_) => return self.finish(FlightOutcome::Gone),
                    AcquireOutcome::Leaving if self.flight.mode != LoadMode::BackgroundRefresh => {
                        self.load_for_a_process_that_ends().await;
                        return None;
                    }
                    AcquireOutcome::Leaving => return self.finish(FlightOutcome::Gone),
                    // No caller waits for a refresh, and failing open would make every process refresh for itself.
                    AcquireOutcome::StoreDown(_) if self.flight.mode == LoadMode::BackgroundRefresh => {
                        return self.finish(FlightOutcome::Gone);
                    }
                    AcquireOutcome::StoreDown(error) => match self.policy.on_store_down {
                        OnStoreDown::FailOpen => {
                            // From here on this flight learns of no invalidation. If the server answers and refuses, it would refuse a
                            // replacement flight too, so later callers join this one.
                            let refused =
                                [StoreErrorKind::Refused, StoreErrorKind::Transient].contains(&error.kind);
                            self.leader.lose_store(!refused);
                            self.load_without_the_store(error).await;
                            return None;
                        }
                        OnStoreDown::FailClosed => {
                            let error = Error::store("acquiring the lease", &self.flight.key, error);
                            return self.finish(FlightOutcome::Failed(Failure::Guard(error)));
                        }
                    },
                }
            }
        };
        self.load_in_turn(lease).await;
        None
    }

    /// Loads for this process alone, if fewer than `max_fail_open_loads` such loads run. Takes no permit: the store, which
    /// counts them, cannot be asked.
    async fn load_without_the_store(self, error: StoreError) {
        let (place, turn) = match self.enter_place() {
            Ok(place) => place.unzip(),
            Err(failure) => return self.shed(failure, None).await,
        };
        self.policy.count(Count::fail_open_loads);
        self.state.store.went_without();
        if self.policy.max_concurrent_loads.is_some() {
            bulkhead::tell_uncapped(&self.state, &self.flight.key, &error);
        }
        self.load_and_end(None, place, turn).await;
    }

    /// A place among the loads without the store; `None` inside a load that has one.
    fn enter_place(&self) -> Result<Option<(Arc<BatchShare>, LoadPermitId)>, Failure> {
        let (most, turn) = (self.policy.max_fail_open_loads, self.state.place_turn());
        if self.holds(&turn) {
            return Ok(None);
        }
        let share = self.share();
        if share.place.get_or_init(|| self.state.fail_open.try_enter(most)).is_some() {
            return Ok(Some((share, turn)));
        }
        self.policy.count(Count::overloaded);
        Err(Failure::Guard(Error::crowded_out(&self.flight.key, most)))
    }

    /// What this flight takes for itself, in place of its share of a batch's call.
    async fn admit_alone(
        &mut self,
        share: Arc<BatchShare>,
        lease: &mut Option<Lease>,
    ) -> Result<Option<(Arc<BatchShare>, LoadPermitId)>, Failure> {
        let had_place = share.place.get().is_some();
        drop(share);
        if had_place { self.enter_place() } else { self.admit(lease).await }
    }

    /// Ends without a load.
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
        self.load_and_end(None, None, None).await;
    }

    fn finish<T>(self, outcome: FlightOutcome) -> Option<T> {
        // No caller joins from here on, so all that wait are told for whom.
        self.leader.detach();
        self.note_waits();
        self.leader.finish(outcome);
        None
    }

    async fn contend(&mut self) -> AcquireOutcome {
        let (leader, wait_timeout) = (&self.leader, self.policy.wait_timeout);
        // The first caller's `wait_timeout` has passed; continue only while later callers wait, which leave by their own timers.
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
        match self.admit(&mut lease).await.map(Option::unzip) {
            Ok((permit, turn)) => self.load_and_end(lease, permit, turn).await,
            Err(failure) => self.shed(failure, lease).await,
        }
    }

    /// Step 6. When a loader vanishes, repeats it with another caller's loader under the same lease.
    async fn load_and_end(
        mut self,
        mut lease: Option<Lease>,
        mut permit: Option<Arc<BatchShare>>,
        mut turn: Option<LoadPermitId>,
    ) {
        let had_lease = lease.is_some();
        let mut hops = lease.as_ref().map_or(0, Lease::hops);
        // When the flight stopped waiting for another load, if it had to wait for one.
        let mut waited_until = lease.as_ref().and_then(Lease::waited_until);
        let mut vanished = false;
        loop {
            let Some((loader, slot)) = self.leader.next_loader() else {
                // No waiter is left that has a loader: hand the lease over to another process. Release the permit first, so that
                // loads of other keys need not wait for the hand-over.
                drop(permit);
                if let Some(lease) = lease
                    && lease.hand_over(hops).await
                    && vanished
                {
                    self.policy.count(Count::takeovers);
                }
                return self.leader.finish(FlightOutcome::Gone);
            };
            if vanished {
                self.policy.count(Count::takeovers);
            }
            if self.batch.take_if(|attempt| !attempt.calls(&loader)).is_some()
                && let Some(share) = permit.take()
            {
                match self.admit_alone(share, &mut lease).await {
                    Ok(own) => (permit, turn) = own.unzip(),
                    Err(failure) => return self.shed(failure, lease).await,
                }
            }
            if let (Some(since), Some(until)) = (loader.since, waited_until)
                && until > since
            {
                self.policy.waited(until - since);
            }
            let start = self.load_start(had_lease).await;
            match self.load(loader, turn.clone(), &mut lease).await {
                LoadEnd::Loaded(loaded, took) => {
                    drop(permit);
                    return self.end(*loaded, took, start, lease).await;
                }
                LoadEnd::TimedOut => {
                    drop(permit);
                    let took = self.policy.load_timeout;
                    let error = Error::load_timeout(&self.flight.key, took);
                    let failure = LoadResult::failed(Failure::Guard(error));
                    return self.end(failure.into(), took, start, lease).await;
                }
                LoadEnd::Vanished(failure) => {
                    hops += 1;
                    if hops > MOST_HOPS {
                        drop(permit);
                        let failed = LoadOutput::from(LoadResult::failed(failure));
                        return self.end(failed, Duration::ZERO, start, lease).await;
                    }
                    vanished = true;
                    waited_until = Some(Instant::now());
                    let stand_in = self
                        .stand_in(Unstored::NO_ANSWER, self.state.store.now())
                        .map(|(older, _)| FlightOutcome::Stale(older));
                    if stand_in.is_some() {
                        self.policy.count(Count::stand_ins);
                    }
                    slot.tell(stand_in.unwrap_or(FlightOutcome::Failed(failure)));
                }
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "../../tests/unit/read_through/leader_tests.rs"]
mod tests;
