//! Step 3: a caller joins the flight of its key or starts one, and waits for its end.

use std::sync::OnceLock;

use tokio::time::{Instant, sleep_until};

use super::call::{Call, CallState, LookUpState};
use super::load::FlightTask;
use super::look_up::Lookup;
use super::miss::MissOutcome;
use crate::error::{Error, ErrorKind, Failure};
use crate::guard_state::{FlightWaiter, Joined};
use crate::key::Key;
use crate::key::flight::LoadMode;
use crate::loader::Loader;
use crate::observe::{Count, log, warn_if};
use crate::policy::OnOverload;
use crate::value::outcome::FlightOutcome;
use crate::value::reader::EntryReader;

impl CallState<'_> {
    /// Step 3: joins or starts the flight. The flag says whether this caller started it.
    pub(super) fn join(
        &self,
        mode: LoadMode,
        mut loader: Loader,
    ) -> Result<(FlightWaiter, bool), NoCapacity> {
        let Call { state, policy, .. } = self.call;
        (loader.came, loader.since) = (self.came, Some(Instant::now()));
        loader.waits_for = OnceLock::new();
        let flight = self.flight(mode);
        // A caller that may be served an older value at `soft_timeout` does not wait for the load, so the load must not use the
        // permit of the load that the caller runs inside.
        let may_leave = policy.soft_timeout.is_some()
            && self.rejected.as_ref().is_some_and(|rejected| rejected.value().is_some());
        let within = loader.within.clone().filter(|_| !may_leave);
        // In this mode callers do not wait for each other, so `max_waiters` does not apply.
        let most = if mode == LoadMode::Probe { usize::MAX } else { policy.max_waiters };
        let if_dropped = FlightOutcome::Abandoned;
        let has_looked = self.look_up == LookUpState::Answered;
        match state.flights.join_having_looked(&flight, loader, if_dropped, most, has_looked) {
            Joined::Leader(leader, waiter) => {
                FlightTask { within, ..FlightTask::new(self, flight, leader) }.start();
                Ok((waiter, true))
            }
            Joined::Waiter(waiter) => Ok((waiter, false)),
            Joined::Full(loader) => Err(NoCapacity::TooManyFlights(loader)),
            Joined::Crowded(loader) => Err(NoCapacity::TooManyWaiters(loader)),
        }
    }

    /// Whether this caller may accept the outcome of a flight that it has joined. The flight checked the tags of the policy that it
    /// began under, and the entry's. A caller whose policy has another tag may know of that tag's invalidation, and the flight does not.
    pub(super) fn accepts(&self, waiter: &FlightWaiter, outcome: &FlightOutcome) -> bool {
        let entry = match outcome {
            FlightOutcome::Value(entry) | FlightOutcome::Stale(entry) => Some(entry),
            FlightOutcome::Arriving(_) => None,
            // Only a value must not be older than a change.
            _ => return true,
        };
        let has_tag = |tag: &Key| entry.is_some_and(|entry| entry.tags.id_of(tag).is_some());
        let Call { state, policy, key } = self.call;
        policy.tag_keys(&state.namespace, key).iter().all(|tag| waiter.is_checked(tag.name()) || has_tag(tag))
    }

    /// Waits for the flight's end, or for `wait_timeout` unless `to_the_end`. Also returns the caller's own loader if the flight
    /// has not used it.
    pub(super) async fn await_ending(
        &self,
        waiter: &mut FlightWaiter,
        to_the_end: bool,
    ) -> (FlightOutcome, Option<Loader>) {
        tokio::select! {
            biased;
            outcome = &mut *waiter => return (outcome, waiter.take_loader()),
            // With `to_the_end`, the flight's own bounds on waiting for the lease and on the load end the wait.
            () = sleep_until(self.started + self.call.policy.wait_timeout), if !to_the_end => {}
        }
        // A caller whose loader is used waits for its own load, which `wait_timeout` does not bound. (Taking the loader decides this
        // atomically: the flight may take it at the same moment.)
        match waiter.take_loader() {
            Some(own) => (FlightOutcome::WaitedOut, Some(own)),
            None => (waiter.await, None),
        }
    }

    pub(super) fn waited_out(&self) -> Failure {
        let Call { policy, key, .. } = self.call;
        let text = format!(
            "another caller's load of key #{} took longer than wait_timeout ({:?})",
            key.digest(),
            policy.wait_timeout
        );
        Failure::Guard(Error::new(ErrorKind::Timeout, text))
    }
}

/// Why a caller cannot join or start a flight, with its loader.
pub(crate) enum NoCapacity {
    TooManyFlights(Loader),
    TooManyWaiters(Loader),
}

impl CallState<'_> {
    /// The limit on waiters or flights is reached: answers with a stale value if there is one, else as the policy says.
    pub(super) async fn overloaded<R: EntryReader>(
        &self,
        reader: &R,
        no_capacity: NoCapacity,
    ) -> MissOutcome<R::Value> {
        let Call { state, policy, key } = self.call;
        policy.count(Count::overloaded);
        let (loader, then, text) = match (no_capacity, policy.max_concurrent_loads) {
            (NoCapacity::TooManyWaiters(loader), _) => {
                (loader, policy.on_crowd, format!("{} callers (max_waiters) wait for it", policy.max_waiters))
            }
            // Loading alone would bypass `max_concurrent_loads`, unless this runs inside a load that holds a permit.
            (NoCapacity::TooManyFlights(loader), Some(cap))
                if policy.on_overload == OnOverload::Shed && !loader.is_within(&state.permit_turn(cap)) =>
            {
                (
                    loader,
                    policy.on_overload,
                    format!("under max_concurrent_loads ({cap}) max_flights others wait"),
                )
            }
            (NoCapacity::TooManyFlights(loader), _) => {
                warn_if!(
                    log::GUARD,
                    state.overload_log.is_due(),
                    ?key,
                    "max_flights keys are being loaded: callers of others load for themselves"
                );
                return MissOutcome::Alone(loader);
            }
        };
        match (Box::pin(self.find_stand_in(reader)).await, then) {
            (Some(value), _) => MissOutcome::Stale(value, Some(loader)),
            (None, OnOverload::LoadAnyway) => MissOutcome::Alone(loader),
            // A load of the key may have ended since this caller looked, or joined: it may have stored a value or a marker.
            (None, OnOverload::Shed) if self.look_up != LookUpState::Failed => {
                let mut again = CallState::new(self.call);
                let read = Box::pin(again.read_anyway()).await;
                match again.after_read(read, reader) {
                    Lookup::Hit { value, .. } | Lookup::LocalHit(value) => {
                        MissOutcome::Coalesced(value, loader)
                    }
                    Lookup::Miss(again) if again.mode == LoadMode::Probe => MissOutcome::Alone(loader),
                    Lookup::Miss(_) | Lookup::Failed(_) => turned_away(key, &text),
                }
            }
            (None, OnOverload::Shed) => turned_away(key, &text),
        }
    }
}

fn turned_away<V>(key: &Key, text: &str) -> MissOutcome<V> {
    let text = format!("no room for key #{}: {text}", key.digest());
    MissOutcome::Failed(Failure::Guard(Error::new(ErrorKind::Overloaded, text)))
}
