//! Steps 3 to 8 from a caller's point of view. The caller joins the flight of its key or starts one (step 3) and waits for its end, again
//! if need be, until it has an answer.
//!
//! [`CallState::refresh`] starts a load in the background, for a value that was served although it is stale or soon will be.

use std::ops::ControlFlow;
use std::sync::OnceLock;

use tokio::time::{Instant, sleep_until};
use tracing::{Instrument as _, Span};

use super::call::{Call, CallState, LookUpState};
use super::flight_task::FlightTask;
use super::look_up::{Lookup, look};
use crate::error::{Error, ErrorKind, Failure};
use crate::guard_state::{FlightWaiter, Joined};
use crate::key::{Key, LoadMode};
use crate::loader::{Loader, OwnAnswer};
use crate::observe::{Count, log, warn_if};
use crate::policy::{OnOverload, OnWaitTimeout, Policy};
use crate::value::entry::{Entry, Freshness, Storage};
use crate::value::{EntryReader, FlightOutcome};

/// How many flights a caller joins before it loads for itself. It joins again each time that another caller's value has another
/// type or that a flight's runtime was dropped. For all other reasons it joins five flights at most: it joins again once after a failed
/// look-up, once after a change that it may know of, and once, outside the lease, after `wait_timeout`.
const ROUNDS: usize = 6;

/// The answer to a caller with a loader; `A` is the answer of its own load.
pub(crate) enum MissOutcome<V, A> {
    /// Another caller's load has the value: step 8 follows. With this caller's own unused loader.
    Coalesced(V, Loader),
    /// An older value is served, because the load failed or takes long. With this caller's own loader if it was not used.
    Stale(V, Option<Loader>),
    /// This caller's own loader was used: the answer of that load, and the value that the flight ended with, if it has ended with one.
    Led(A, Option<Entry>),
    /// There is no value, for this reason.
    Failed(Failure),
    /// No flight has a value for this caller. It must now run its loader alone: without the lease, and for itself only.
    Alone(Loader),
}

impl<V, A> MissOutcome<V, A> {
    /// The same outcome for a caller that accepts only the value of its own load.
    pub(crate) fn by_own_load(self) -> Self {
        match self {
            Self::Coalesced(_, loader) | Self::Stale(_, Some(loader)) => Self::Alone(loader),
            other => other,
        }
    }
}

/// The end of a flight for one caller.
struct FlightEnd {
    outcome: FlightOutcome,
    /// Whether the caller is allowed to take the flight's outcome; if not, it goes on by itself.
    accepts: bool,
    /// The caller's own loader, if the flight has not used it.
    own: Option<Loader>,
}

/// The caller's answer. `Err`: the flight has used the caller's loader, so the answer comes from there; with the flight's outcome.
type Answered<V, A> = Result<MissOutcome<V, A>, FlightOutcome>;

/// The caller's answer, or how it goes on.
type Step<V, A, C> = ControlFlow<Answered<V, A>, C>;

fn done<V, A, C>(answer: MissOutcome<V, A>) -> Step<V, A, C> {
    ControlFlow::Break(Ok(answer))
}

impl CallState<'_> {
    /// Steps 3 to 8: joins or starts a flight and awaits its end, or the answer of the caller's own load.
    ///
    /// # Cancel safety
    ///
    /// Dropping it frees this caller's slot; a flight that it has started goes on.
    pub(crate) async fn load<R: EntryReader, A>(
        self: Box<Self>,
        reader: &R,
        loader: Loader,
        own: &mut OwnAnswer<A>,
    ) -> MissOutcome<R::Value, A> {
        let answered = tokio::select! {
            biased;
            answer = own.before_the_end() => return MissOutcome::Led(answer, None),
            answered = self.until_answered(reader, loader) => answered,
        };
        match answered {
            Ok(answer) => answer,
            Err(outcome) => match own.take() {
                Some(answer) => MissOutcome::Led(answer, outcome.into_value()),
                None => MissOutcome::Failed(outcome.into_failure()),
            },
        }
    }

    async fn until_answered<R: EntryReader, A>(
        mut self: Box<Self>,
        reader: &R,
        mut loader: Loader,
    ) -> Answered<R::Value, A> {
        for _ in 0..ROUNDS {
            let end = match self.follow_flight(reader, loader).await {
                ControlFlow::Continue(end) => end,
                ControlFlow::Break(answer) => return answer,
            };
            loader = match self.after_flight(reader, end).await {
                ControlFlow::Continue(loader) => loader,
                ControlFlow::Break(answer) => return answer,
            };
        }
        Ok(MissOutcome::Alone(loader))
    }

    /// Joins or starts the flight, and waits for its end.
    async fn follow_flight<R: EntryReader, A>(
        &mut self,
        reader: &R,
        loader: Loader,
    ) -> Step<R::Value, A, FlightEnd> {
        let joined_at = Instant::now();
        // 3 join
        let (mut waiter, leads) = match self.join_in_batch(loader) {
            Ok(joined) => joined,
            Err(no_capacity) => return done(self.overloaded(reader, no_capacity).await),
        };
        if self.mode == LoadMode::Probe
            && !leads
            && let Some(own) = waiter.take_loader()
        {
            // Callers do not queue for a resource that was uncacheable; one flight at a time finds out whether the
            // resource still is.
            return done(MissOutcome::Alone(own));
        }
        // The caller that began the flight needs no span here: the flight makes one for it once it has to wait.
        let spans = &self.call.state.spans;
        let span = if leads { Span::none() } else { spans.wait(&Span::current(), self.call.key) };
        let ending = self.await_ending(&mut waiter, leads || self.mode == LoadMode::Unleased);
        let (mut outcome, own) = tokio::select! {
            biased;
            ended = ending.instrument(span.clone()) => ended,
            stand_in = self.soft_timeout(reader) => {
                // The flight may still use this caller's loader, but the caller no longer waits.
                if waiter.amend_loader(|loader| loader.since = None) {
                    self.call.policy.waited(joined_at.elapsed());
                }
                waiter.stop_waiting();
                self.call.policy.count(Count::soft_timeouts);
                return done(MissOutcome::Stale(stand_in, None));
            }
        };
        let accepts = self.accepts(&waiter, &outcome);
        // If the loader was used, the caller has the result of its own load and accepts that.
        if !accepts && own.is_some() {
            // The flight's later waiters receive the incoming body too, so joining again is useless.
            let arrives = matches!(outcome, FlightOutcome::Incoming(_));
            outcome = if arrives { FlightOutcome::NoLoader } else { FlightOutcome::Invalidated };
        }
        // Frees the slot for another caller.
        drop(waiter);
        if let Some(flight) = own.as_ref().and_then(|own| own.waits_for.get()) {
            spans.waited(&span, *flight);
        }
        drop(span);
        if own.is_some() {
            waited(self.call.policy, joined_at, leads, &outcome);
        }
        ControlFlow::Continue(FlightEnd { outcome, accepts, own })
    }

    /// The caller's answer from a flight's outcome; `Continue` with the caller's loader if the caller must join again.
    async fn after_flight<R: EntryReader, A>(
        &mut self,
        reader: &R,
        FlightEnd { outcome, accepts, mut own }: FlightEnd,
    ) -> Step<R::Value, A, Loader> {
        if let FlightOutcome::Value(entry) | FlightOutcome::Stale(entry) = &outcome
            && self.would_have_passed(reader, entry)
            && let Some(own) = own.take()
        {
            self.look_up = LookUpState::NotMade;
            self.reject(entry);
            self.mode = self.mode_to_join(|entry| reader.leads_others(entry));
            return ControlFlow::Continue(own);
        }
        if let FlightOutcome::Stale(entry) = &outcome
            && accepts
            && self.takes(reader, entry)
            && let Some(value) = reader.open(entry, self.now(), None)
        {
            return done(MissOutcome::Stale(value, own));
        }
        let Some(loader) = own else { return ControlFlow::Break(Err(outcome)) };
        // 8 response
        match outcome {
            FlightOutcome::Value(entry) => match reader.open(&entry, self.now(), None) {
                Some(value) => return done(MissOutcome::Coalesced(value, loader)),
                // The entry cannot be decoded as this caller's type: join again to load it.
                None => self.reject(&entry),
            },
            FlightOutcome::Incoming(value) => {
                return done(match reader.open_incoming(&value) {
                    Some(value) => MissOutcome::Coalesced(value, loader),
                    None => MissOutcome::Alone(loader),
                });
            }
            FlightOutcome::Failed(failure) => return done(failed(failure, self.stand_in(reader), loader)),
            // The flight's value may be older than an invalidation that this caller knows of. The store has no older entry: look again.
            FlightOutcome::Invalidated if self.mode == LoadMode::Leased => {
                return self.look_again(reader, loader).await;
            }
            FlightOutcome::Invalidated | FlightOutcome::Abandoned => {}
            FlightOutcome::WaitedOut => return self.after_wait_timeout(reader, loader).await,
            // This caller does not accept the older value that stands in for other callers.
            FlightOutcome::Stale(_) if !reader.goes_on_alone() => {
                return done(MissOutcome::Failed(outcome.into_failure()));
            }
            FlightOutcome::Stale(_) | FlightOutcome::Uncacheable | FlightOutcome::NoLoader => {
                return done(MissOutcome::Alone(loader));
            }
        }
        ControlFlow::Continue(loader)
    }

    async fn after_wait_timeout<R: EntryReader, A>(
        &mut self,
        reader: &R,
        loader: Loader,
    ) -> Step<R::Value, A, Loader> {
        // A caller that joined without a look-up has not read a value that may stand in: read it now.
        Box::pin(self.see()).await;
        match self.call.policy.on_wait_timeout {
            // One load per process, outside the lease.
            OnWaitTimeout::Load => {
                self.mode = LoadMode::Unleased;
                ControlFlow::Continue(loader)
            }
            OnWaitTimeout::Fail => done(failed(self.waited_out(), self.stand_in(reader), loader)),
        }
    }

    /// Makes the look-up of step 2 again.
    async fn look_again<R: EntryReader, A>(
        &mut self,
        reader: &R,
        loader: Loader,
    ) -> Step<R::Value, A, Loader> {
        let sent_at = Instant::now();
        let again = Box::pin(look(self.call, reader)).await;
        self.budget.spend(sent_at);
        done(match again {
            Lookup::Hit { value, stale: true, .. } => MissOutcome::Stale(value, Some(loader)),
            Lookup::Hit { value, .. } | Lookup::LocalHit(value) => MissOutcome::Coalesced(value, loader),
            Lookup::Failed(failure) => MissOutcome::Failed(failure),
            Lookup::Miss(again) => {
                let (started, came, budget, batch) =
                    (self.started, self.came, self.budget, self.batch.take());
                *self = CallState { started, came, budget, batch, ..*again };
                return ControlFlow::Continue(loader);
            }
        })
    }
}

/// Records how long a caller has waited for another caller's load, whatever the outcome of the load is. (If the waiter's own loader is
/// used in the end, the wait is recorded when its own load begins.)
fn waited(policy: &Policy, joined_at: Instant, leads: bool, outcome: &FlightOutcome) {
    if !(leads && outcome.is_refusal()) {
        policy.waited(joined_at.elapsed());
    }
}

/// Returns the older value if there is one, else the failure.
fn failed<V, A>(failure: Failure, stand_in: Option<V>, loader: Loader) -> MissOutcome<V, A> {
    match stand_in {
        Some(value) => MissOutcome::Stale(value, Some(loader)),
        None => MissOutcome::Failed(failure),
    }
}

impl CallState<'_> {
    /// Step 3, with this caller's attempt in its batch: the attempt rests if the caller waits for another caller's flight.
    fn join_in_batch(&mut self, loader: Loader) -> Result<(FlightWaiter, bool), NoCapacity> {
        if let Some(attempt) = &mut self.batch {
            attempt.again();
        }
        let joined = self.join(self.mode, loader);
        // Also without a slot: the caller may read again, and would queue behind its own read.
        drop(self.solo_read.take());
        let (waiter, leads) = joined?;
        if let Some(attempt) = self.batch.as_ref().filter(|_| !leads) {
            attempt.rest();
        }
        Ok((waiter, leads))
    }

    /// Step 3: joins or starts the flight. The flag says whether this caller started it.
    fn join(&self, mode: LoadMode, mut loader: Loader) -> Result<(FlightWaiter, bool), NoCapacity> {
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
        let has_looked_up = self.look_up == LookUpState::Answered;
        match state.flights.join_after_look_up(&flight, loader, if_dropped, most, has_looked_up) {
            Joined::Leader(leader, waiter) => {
                FlightTask { within, ..FlightTask::new(self, flight, leader) }.start();
                Ok((waiter, true))
            }
            Joined::Waiter(waiter) => Ok((waiter, false)),
            Joined::Full(loader) => Err(NoCapacity::TooManyFlights(loader)),
            Joined::TooManyWaiters(loader) => Err(NoCapacity::TooManyWaiters(loader)),
        }
    }

    /// Whether this caller may accept the outcome of a flight that it has joined. The flight checked the tags of the policy that the flight
    /// began under, and the entry's. A caller whose policy has another tag may know of an invalidation of that tag, but the flight did not
    /// check it. And a flight may have waited so long for a stored value that the value's stale windows ended before this caller came.
    fn accepts(&self, waiter: &FlightWaiter, outcome: &FlightOutcome) -> bool {
        let entry = match outcome {
            FlightOutcome::Value(entry) | FlightOutcome::Stale(entry) => Some(entry),
            FlightOutcome::Incoming(_) => None,
            // Only a value must not be older than a change.
            _ => return true,
        };
        let came = self.now();
        let had_ended = |entry: &Entry| {
            entry.expiry.storage() == Storage::Stored
                && entry.stored_at < came
                && entry.serves(came) == Freshness::Expired
        };
        if entry.is_some_and(had_ended) {
            return false;
        }
        let has_tag = |tag: &Key| entry.is_some_and(|entry| entry.tags.id_of(tag).is_some());
        self.call.tag_keys().iter().all(|tag| waiter.is_checked(tag.name()) || has_tag(tag))
    }

    /// Waits for the flight's end, and for `wait_timeout` at most unless `to_the_end`. Also returns the caller's own loader if the
    /// flight has not used it.
    async fn await_ending(
        &self,
        waiter: &mut FlightWaiter,
        to_the_end: bool,
    ) -> (FlightOutcome, Option<Loader>) {
        tokio::select! {
            biased;
            outcome = &mut *waiter => return (outcome, waiter.take_loader()),
            // With `to_the_end` the wait is bounded by the flight: by its wait for the lease and by its load.
            () = sleep_until(self.started + self.call.policy.wait_timeout), if !to_the_end => {}
        }
        // A caller whose loader is used waits for its own load, which `wait_timeout` does not bound. (Taking the loader decides this
        // atomically: the flight may take it at the same moment.)
        match waiter.take_loader() {
            Some(own) => (FlightOutcome::WaitedOut, Some(own)),
            None => (waiter.await, None),
        }
    }

    fn waited_out(&self) -> Failure {
        let Call { policy, key, .. } = self.call;
        let after = format!("took longer than wait_timeout ({:?})", policy.wait_timeout);
        Failure::Guard(Error::of_key(ErrorKind::Timeout, "another caller's load of", key, after))
    }
}

/// Why a caller cannot join or start a flight, with its loader.
enum NoCapacity {
    TooManyFlights(Loader),
    TooManyWaiters(Loader),
}

impl CallState<'_> {
    /// Called when the limit on waiters or flights is reached. Returns a stale value if there is one; otherwise the caller loads alone or
    /// fails, as the policy says.
    async fn overloaded<R: EntryReader, A>(
        &self,
        reader: &R,
        no_capacity: NoCapacity,
    ) -> MissOutcome<R::Value, A> {
        let Call { state, policy, key } = self.call;
        policy.count(Count::overloaded);
        let (loader, then, text) = match (no_capacity, policy.load_limit()) {
            (NoCapacity::TooManyWaiters(loader), _) => (
                loader,
                policy.when_full,
                format!("{} callers (max_waiters) wait for it", policy.max_waiters),
            ),
            // Loading alone would bypass `max_concurrent_loads`, unless this runs inside a load that holds a permit.
            (NoCapacity::TooManyFlights(loader), Some(limit))
                if policy.on_overload == OnOverload::Shed
                    && !loader.is_within(&state.permit_id(limit.name.clone())) =>
            {
                (loader, policy.on_overload, format!("under {} max_flights others wait", limit.text()))
            }
            (NoCapacity::TooManyFlights(loader), _) => {
                warn_if!(
                    log::GUARD,
                    state.logs.overload.is_due(),
                    ?key,
                    "max_flights keys are being loaded: callers of others load for themselves"
                );
                return MissOutcome::Alone(loader);
            }
        };
        match (Box::pin(self.find_stand_in(reader)).await, then) {
            (Some(value), _) => MissOutcome::Stale(value, Some(loader)),
            (None, OnOverload::LoadAnyway) => MissOutcome::Alone(loader),
            // Since this caller's look-up, a load of the key may have ended and stored a value or a marker: read again.
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

fn turned_away<V, A>(key: &Key, text: &str) -> MissOutcome<V, A> {
    let text = format!("no room for key #{}: {text}", key.digest());
    MissOutcome::Failed(Failure::Guard(Error::new(ErrorKind::Overloaded, text)))
}

impl CallState<'_> {
    /// Steps 3 to 7 for a refresh that no caller waits for: one load in the fleet, or none if another process is refreshing.
    /// `early`: the value that was served is still fresh.
    pub(crate) fn refresh(self, loader: Loader, early: bool) {
        let Call { state, policy, .. } = self.call;
        let flight = self.flight(LoadMode::BackgroundRefresh);
        // A flight whose runtime is alive but not driven never ends.
        state.flights.detach_older(&flight, policy.longest_load());
        // If a refresh of the key already runs in this process, the loader is dropped.
        if let Joined::Leader(leader, slot) = state.flights.join(&flight, loader, FlightOutcome::Abandoned, 1)
        {
            policy.count(Count::refreshes);
            if early {
                policy.count(Count::early_refreshes);
            }
            // The caller does not wait for the refresh, so the refresh takes its own permit.
            FlightTask { _unattended: Some(slot), ..FlightTask::new(&self, flight, leader) }.start();
        }
    }
}
