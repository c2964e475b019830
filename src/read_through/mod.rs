//! The read-through algorithm, from one caller's point of view. Knows no Redis and no HTTP.
//!
//! ```text
//! 1 key       request or caller -> CacheKey, or bypass straight to the loader
//! 2 look up   GET entry: fresh -> 8 | stale but servable -> 8 now, 3 to 7 in the background | else 3
//! 3 join      flight, this process: waiter awaits its leader -> 8 | leader -> 4
//! 4 lease     all processes, one script: entry meanwhile there -> 8 | granted -> 6 | held -> 5
//! 5 wait      sleep until wake, lease timer, disconnect or deadline; then 4 again
//! 6 load      the loader in a spawned task; the lease is renewed at a third of its time
//! 7 commit    one script: if the token is mine -> SET entry, DEL lease, wake every waiting process
//!             failed -> the failure goes to the waiting wave; vanished -> the lease goes to one waiter
//! 8 response  the value
//! ```
//!
//! Each step is the file of its name; step 4 is `acquire`, and step 8 is here. Steps 4 to 7 run in the flight's own task, `leader`;
//! `contend` is the loop of steps 4 and 5, `lease` the held lease. A look-up that finds a stale value begins the load in the
//! background by `refresh`. A caller whose process has a flight for the key joins it without a look-up (3 before 2): the flight
//! began with a look-up that found nothing, and it exists to save one read per request.

pub(crate) mod acquire;
pub(crate) mod bulkhead;
pub(crate) mod commit;
pub(crate) mod contend;
mod join;
pub(crate) mod leader;
pub(crate) mod lease;
mod load;
pub(crate) mod look_up;
mod queued_read;
pub(crate) mod refresh;
pub(crate) mod tag_check;
mod wait;

use tokio::time::Instant;

use join::Overload;
use look_up::{Call, CallState, Judged, Unread};
use queued_read::FirstRead;
use refresh::BackgroundLoad;

use crate::error::{Error, Failure};
use crate::guard_state::RejectedEntry;
use crate::key::flight::LoadMode;
use crate::loader::Loader;
use crate::loader::nesting::LoadScope;
use crate::observe::{self, Count};
use crate::policy::{OnStoreDown, OnWaitTimeout};
use crate::store::StoreError;
use crate::value::entry::Entry;
use crate::value::outcome::FlightOutcome;
use crate::value::reader::{Boxed, EntryReader};

/// How many flights a caller joins before it loads for itself. It joins again each time that another caller's value has another
/// type or that a flight's runtime was dropped. For all other reasons it joins five flights at most: after a failed look-up, after
/// a change that it may know of, and after `wait_timeout` a load outside the lease, once each.
const ROUNDS: usize = 6;

/// The result of step 2.
pub(crate) enum Looked<'a, V> {
    /// Step 8 from the store.
    Hit(V),
    /// Step 8 from the store, and a background load is due: the caller brings a loader for it.
    Aging { value: V, stale: bool, refresh: Box<BackgroundLoad<'a>> },
    /// Step 8 with a stale value that must not be loaded again yet.
    Stale(V),
    /// There is no value, and the caller may not load one.
    Failed(Failure),
    /// There is nothing to serve: the caller brings a loader.
    Missing(Miss<'a>),
}

/// The answer to a caller that brought its loader.
pub(crate) enum MissOutcome<V> {
    /// Step 8 from another caller's load, with this caller's own loader, which was not needed.
    Coalesced(V, #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "for HTTP variants"))] Loader),
    /// Step 8 with an older value, because the load failed or takes long; with the loader if it was not used.
    Stale(
        V,
        #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "for HTTP variants"))] Option<Loader>,
    ),
    /// This caller's own loader was used, and has delivered its result by its own means. If it has not, the outcome
    /// says why.
    Led(FlightOutcome),
    /// No value.
    Failed(Failure),
    /// This caller loads for itself, outside the protocol.
    Alone(Loader),
}

/// Step 2: is there something to serve? Skips the look-up if the key has a flight to join.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look<'a, O: EntryReader>(ask: Call<'a>, open: &O) -> Looked<'a, O::Value> {
    let Call { state, key, .. } = ask;
    let mut missing = Miss::new(CallState::new(ask));
    if LoadScope::current().is_some_and(|loading| loading.includes(state.store.place(), key)) {
        return Looked::Failed(Failure::Guard(Error::reentrant(key)));
    }
    // A guard that is shut down sends the store no more look-ups.
    if state.is_closed()
        || state.flights.any() && state.flights.has_connected(&missing.caller.flight(LoadMode::Leased))
    {
        return Looked::Missing(missing);
    }
    let (read, first) = missing.caller.look_up::<O::Room>().await;
    missing.first = first;
    match missing.caller.judge(read, open) {
        Judged::Hit { value, stale, refresh: true } => {
            let refresh = Box::new(BackgroundLoad { caller: missing.caller });
            return Looked::Aging { value, stale, refresh };
        }
        Judged::Hit { value, stale: true, .. } => return Looked::Stale(value),
        Judged::Hit { value, .. } => return Looked::Hit(value),
        Judged::Down(error) => return Looked::Failed(Failure::Guard(error)),
        Judged::Marked => missing.mode = LoadMode::Probe,
        Judged::Unread => missing.unread = Unread::Unjudged,
        Judged::Miss => missing.mode = missing.caller.mode(|entry| open.leads_others(entry)),
    }
    Looked::Missing(missing)
}

/// Step 2 for a caller that wants a load whatever is stored.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look_past(ask: Call<'_>) -> Result<Miss<'_>, Failure> {
    let Call { state, policy, key } = ask;
    let mut caller = CallState::new(ask);
    if LoadScope::current().is_some_and(|loading| loading.includes(state.store.place(), key)) {
        return Err(Failure::Guard(Error::reentrant(key)));
    }
    if state.is_closed() {
        return Ok(Miss::new(caller));
    }
    let (read, first) = caller.look_up::<Boxed>().await;
    let unread = match read.error() {
        Some(error) if policy.on_store_down == OnStoreDown::FailClosed => {
            return Err(Failure::Guard(Error::store("looking up the entry", key, error.clone())));
        }
        Some(_) => Unread::Unwanted,
        None => Unread::No,
    };
    caller.looked = read.is_answered();
    caller.rejected = read.into_seen(key).map(Box::new);
    caller.budget.spend(caller.started);
    let mode = caller.mode(|_| false);
    Ok(Miss { caller, first, mode, unread })
}

/// Step 2 alone: the entry, even if it may not be served; `None` also if it is unreadable.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn read_entry(ask: Call<'_>) -> Result<Option<Entry>, StoreError> {
    let caller = CallState::new(ask);
    let read = caller.look_up_anyway::<Boxed>().await;
    match read.error() {
        Some(error) => Err(error.clone()),
        None => Ok(read.into_seen(ask.key).and_then(|seen| seen.value)),
    }
}

/// Step 2 alone: the value, if there is one to serve.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn peek<O: EntryReader>(ask: Call<'_>, open: &O) -> Result<Option<O::Value>, StoreError> {
    let mut caller = CallState::new(ask);
    let read = caller.look_up_anyway::<O::Room>().await;
    if let Some(error) = read.error() {
        return Err(error.clone());
    }
    match caller.judge(read, open) {
        Judged::Hit { value, .. } => Ok(Some(value)),
        Judged::Miss | Judged::Unread | Judged::Marked | Judged::Down(_) => Ok(None),
    }
}

/// A caller whose look-up found nothing to serve; it may join a flight.
pub(crate) struct Miss<'a> {
    caller: CallState<'a>,
    /// Held until this caller has a slot, so that the callers queued behind its read find the flight.
    first: Option<FirstRead<'a>>,
    /// The mode to join.
    mode: LoadMode,
    unread: Unread,
}

impl<'a> Miss<'a> {
    fn new(caller: CallState<'a>) -> Self {
        Self { caller, first: None, mode: LoadMode::Leased, unread: Unread::No }
    }

    /// Makes this caller neither wait for other callers nor be waited for.
    #[cfg(feature = "http")]
    pub(crate) fn unattended(mut self) -> Self {
        self.mode = LoadMode::Probe;
        self
    }

    /// Whether the store has answered this caller's look-up.
    #[cfg(feature = "http")]
    pub(crate) fn has_looked(&self) -> bool {
        self.caller.looked
    }

    /// Repeats step 2: a stored value is current as of now. Returns the answer, or `None` if the caller must join again.
    async fn look_again<O: EntryReader>(&mut self, open: &O) -> Option<Result<(O::Value, bool), Failure>> {
        let asked = Instant::now();
        let looked = Box::pin(look(self.caller.ask, open)).await;
        self.caller.budget.spend(asked);
        match looked {
            Looked::Hit(value) => Some(Ok((value, false))),
            Looked::Stale(value) => Some(Ok((value, true))),
            Looked::Aging { value, stale, .. } => Some(Ok((value, stale))),
            Looked::Failed(failure) => Some(Err(failure)),
            Looked::Missing(missing) => {
                (self.first, self.mode, self.unread) = (missing.first, missing.mode, missing.unread);
                (self.caller.rejected, self.caller.looked) = (missing.caller.rejected, missing.caller.looked);
                None
            }
        }
    }

    /// Steps 3 to 8: joins or starts a flight and awaits its end.
    ///
    /// # Cancel safety
    ///
    /// Dropping it frees this caller's slot; a flight that it has started goes on.
    pub(crate) async fn load<O: EntryReader>(
        mut self,
        open: &O,
        mut loader: Loader,
    ) -> MissOutcome<O::Value> {
        for _ in 0..ROUNDS {
            let joined_at = Instant::now();
            // 3 join
            let (mut waiter, leads) = match self.caller.join(self.mode, loader) {
                Ok(joined) => joined,
                Err(no_seat) => {
                    return match self.caller.crowded_out(open, no_seat).await {
                        Overload::Stale(value, own) => MissOutcome::Stale(value, Some(own)),
                        Overload::Alone(own) => MissOutcome::Alone(own),
                        Overload::Shed(failure) => MissOutcome::Failed(failure),
                    };
                }
            };
            drop(self.first.take());
            if self.mode == LoadMode::Probe
                && !leads
                && let Some(own) = waiter.take_loader()
            {
                // Callers do not queue for a resource that was uncacheable; one flight at a time finds out whether it
                // still is.
                return MissOutcome::Alone(own);
            }
            let (outcome, mut own) = tokio::select! {
                biased;
                ended = self.caller.await_ending(&mut waiter, leads || self.mode == LoadMode::Unleased) => ended,
                stand_in = self.caller.soft_timeout(open) => {
                    // The flight may still use this caller's loader, but the caller no longer waits.
                    if waiter.amend_loader(|loader| loader.since = None) {
                        observe::waited(joined_at.elapsed());
                    }
                    waiter.stop_waiting();
                    self.caller.ask.state.count(Count::soft_timeouts);
                    return MissOutcome::Stale(stand_in, None);
                }
            };
            // Frees the slot for another caller.
            drop(waiter);
            if own.is_some() {
                waited(joined_at, leads, &outcome);
            }
            if let FlightOutcome::Value(entry) | FlightOutcome::Stale(entry) = &outcome
                && self.caller.would_have_passed(open, entry, self.unread)
                && let Some(own) = own.take()
            {
                (self.unread, loader) = (Unread::No, own);
                self.caller.rejected =
                    Some(Box::new(RejectedEntry::entry(entry.clone(), self.caller.ask.key)));
                self.mode = self.caller.mode(|entry| open.leads_others(entry));
                continue;
            }
            if let FlightOutcome::Stale(entry) = &outcome
                && self.caller.takes(open, entry)
                && let Some(value) = open.open(&mut entry.clone(), self.caller.now())
            {
                return MissOutcome::Stale(value, own);
            }
            let Some(own) = own else {
                return MissOutcome::Led(outcome);
            };
            loader = own;
            // 8 response
            match outcome {
                FlightOutcome::Value(mut entry) => {
                    match open.open(&mut entry, self.caller.now()) {
                        Some(value) => return MissOutcome::Coalesced(value, loader),
                        // Not readable as this caller's type: join again and load it.
                        None => {
                            self.caller.rejected =
                                Some(Box::new(RejectedEntry::entry(entry, self.caller.ask.key)))
                        }
                    }
                }
                FlightOutcome::Arriving(value) => {
                    return match open.open_arriving(&value.0) {
                        Some(value) => MissOutcome::Coalesced(value, loader),
                        None => MissOutcome::Alone(loader),
                    };
                }
                FlightOutcome::Failed(failure) => return failed(failure, self.caller.stand_in(open), loader),
                // The flight's outcome may be older than a change that this caller knows of. A stored entry is not.
                FlightOutcome::Invalidated if self.mode == LoadMode::Leased => {
                    match self.look_again(open).await {
                        Some(Ok((value, true))) => return MissOutcome::Stale(value, Some(loader)),
                        Some(Ok((value, false))) => return MissOutcome::Coalesced(value, loader),
                        Some(Err(failure)) => return MissOutcome::Failed(failure),
                        None => {}
                    }
                }
                FlightOutcome::Invalidated | FlightOutcome::Abandoned => {}
                // A caller that joined without a look-up has not read a value that may stand in, so it does now.
                FlightOutcome::WaitedOut => {
                    Box::pin(self.caller.see()).await;
                    match self.caller.ask.policy.on_wait_timeout {
                        // One load per process, outside the lease.
                        OnWaitTimeout::Load => self.mode = LoadMode::Unleased,
                        OnWaitTimeout::Fail => {
                            return failed(self.caller.waited_out(), self.caller.stand_in(open), loader);
                        }
                    }
                }
                // This caller does not accept the older value that stands in for other callers.
                FlightOutcome::Stale(_) if !open.goes_on_alone() => {
                    return MissOutcome::Failed(outcome.into_failure());
                }
                FlightOutcome::Stale(_) | FlightOutcome::Uncacheable | FlightOutcome::Gone => {
                    return MissOutcome::Alone(loader);
                }
            }
        }
        MissOutcome::Alone(loader)
    }
}

/// Records the wait for another caller's load, however that ended. (If the waiter's own loader is used in the end, its wait
/// is recorded where that load begins.)
fn waited(joined_at: Instant, leads: bool, outcome: &FlightOutcome) {
    if !(leads && outcome.is_refusal()) {
        observe::waited(joined_at.elapsed());
    }
}

/// Answers with the older value if there is one, else with the failure.
fn failed<V>(failure: Failure, stand_in: Option<V>, loader: Loader) -> MissOutcome<V> {
    match stand_in {
        Some(value) => MissOutcome::Stale(value, Some(loader)),
        None => MissOutcome::Failed(failure),
    }
}
