//! Steps 3 to 8 from a caller's point of view: it joins or starts flights until it has an answer.

use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use super::call::{CallState, LookUpState};
use super::look_up::{Lookup, look};
use crate::error::Failure;
use crate::key::flight::LoadMode;
use crate::loader::Loader;
use crate::observe::Count;
use crate::policy::{OnWaitTimeout, Policy};
use crate::value::outcome::FlightOutcome;
use crate::value::reader::EntryReader;

/// How many flights a caller joins before it loads for itself. It joins again each time that another caller's value has another
/// type or that a flight's runtime was dropped. For all other reasons it joins five flights at most: after a failed look-up, after
/// a change that it may know of, and after `wait_timeout` a load outside the lease, once each.
const ROUNDS: usize = 6;

/// The answer to a caller that brought its loader.
pub(crate) enum MissOutcome<V> {
    /// Step 8 from another caller's load, with this caller's own loader, which was not needed.
    Coalesced(V, Loader),
    /// Step 8 with an older value, because the load failed or takes long; with the loader if it was not used.
    Stale(V, Option<Loader>),
    /// This caller's own loader was used, and has delivered its result by its own means. If it has not, the outcome
    /// says why.
    Led(FlightOutcome),
    /// No value.
    Failed(Failure),
    /// No flight gives this caller a value. It must now run its loader alone: without the lease, and for itself only.
    Alone(Loader),
}

impl<V> MissOutcome<V> {
    /// The same for a caller that takes no value but its own.
    pub(crate) fn by_own_load(self) -> Self {
        match self {
            Self::Coalesced(_, loader) | Self::Stale(_, Some(loader)) => Self::Alone(loader),
            other => other,
        }
    }
}

impl CallState<'_> {
    /// Steps 3 to 8: joins or starts a flight and awaits its end.
    ///
    /// # Cancel safety
    ///
    /// Dropping it frees this caller's slot; a flight that it has started goes on.
    pub(crate) async fn load<R: EntryReader>(
        mut self,
        reader: &R,
        mut loader: Loader,
    ) -> MissOutcome<R::Value> {
        let spans = self.call.state.spans.clone();
        for _ in 0..ROUNDS {
            let joined_at = Instant::now();
            if let Some(attempt) = &mut self.batch {
                attempt.again();
            }
            // 3 join
            let (mut waiter, leads) = match self.join(self.mode, loader) {
                Ok(joined) => joined,
                Err(no_capacity) => return self.overloaded(reader, no_capacity).await,
            };
            drop(self.solo_read.take());
            if let Some(attempt) = self.batch.as_ref().filter(|_| !leads) {
                attempt.rest();
            }
            if self.mode == LoadMode::Probe
                && !leads
                && let Some(own) = waiter.take_loader()
            {
                // Callers do not queue for a resource that was uncacheable; one flight at a time finds out whether it
                // still is.
                return MissOutcome::Alone(own);
            }
            // The flight has a span for the wait of the caller that began it, if it has to wait.
            let span = if leads { Span::none() } else { spans.wait(&Span::current(), self.call.key) };
            let ending = self.await_ending(&mut waiter, leads || self.mode == LoadMode::Unleased);
            let (mut outcome, mut own) = tokio::select! {
                biased;
                ended = ending.instrument(span.clone()) => ended,
                stand_in = self.soft_timeout(reader) => {
                    // The flight may still use this caller's loader, but the caller no longer waits.
                    if waiter.amend_loader(|loader| loader.since = None) {
                        self.call.policy.waited(joined_at.elapsed());
                    }
                    waiter.stop_waiting();
                    self.call.policy.count(Count::soft_timeouts);
                    return MissOutcome::Stale(stand_in, None);
                }
            };
            let accepts = self.accepts(&waiter, &outcome);
            // Without its loader the caller has the result of its own load.
            if !accepts && own.is_some() {
                // The flight's later waiters are given the body that arrives, too, so joining again is useless.
                let arrives = matches!(outcome, FlightOutcome::Arriving(_));
                outcome = if arrives { FlightOutcome::Gone } else { FlightOutcome::Invalidated };
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
            if let FlightOutcome::Value(entry) | FlightOutcome::Stale(entry) = &outcome
                && self.would_have_passed(reader, entry)
                && let Some(own) = own.take()
            {
                (self.look_up, loader) = (LookUpState::NotMade, own);
                self.reject(entry);
                self.mode = self.mode_to_join(|entry| reader.leads_others(entry));
                continue;
            }
            if let FlightOutcome::Stale(entry) = &outcome
                && accepts
                && self.takes(reader, entry)
                && let Some(value) = reader.open(entry, self.now(), None)
            {
                return MissOutcome::Stale(value, own);
            }
            let Some(own) = own else {
                return MissOutcome::Led(outcome);
            };
            loader = own;
            // 8 response
            match outcome {
                FlightOutcome::Value(entry) => match reader.open(&entry, self.now(), None) {
                    Some(value) => return MissOutcome::Coalesced(value, loader),
                    // Not readable as this caller's type: join again and load it.
                    None => self.reject(&entry),
                },
                FlightOutcome::Arriving(value) => {
                    return match reader.open_arriving(&value.0) {
                        Some(value) => MissOutcome::Coalesced(value, loader),
                        None => MissOutcome::Alone(loader),
                    };
                }
                FlightOutcome::Failed(failure) => return failed(failure, self.stand_in(reader), loader),
                // The flight's outcome may be older than a change that this caller knows of. A stored entry is not.
                FlightOutcome::Invalidated if self.mode == LoadMode::Leased => {
                    let asked = Instant::now();
                    let again = Box::pin(look(self.call, reader)).await;
                    self.budget.spend(asked);
                    match again {
                        Lookup::Hit { value, stale: true, .. } => {
                            return MissOutcome::Stale(value, Some(loader));
                        }
                        Lookup::Hit { value, .. } | Lookup::LocalHit(value) => {
                            return MissOutcome::Coalesced(value, loader);
                        }
                        Lookup::Failed(failure) => return MissOutcome::Failed(failure),
                        Lookup::Miss(again) => {
                            let Self { started, came, budget, batch, .. } = self;
                            self = CallState { started, came, budget, batch, ..again };
                        }
                    }
                }
                FlightOutcome::Invalidated | FlightOutcome::Abandoned => {}
                // A caller that joined without a look-up has not read a value that may stand in, so it does now.
                FlightOutcome::WaitedOut => {
                    Box::pin(self.see()).await;
                    match self.call.policy.on_wait_timeout {
                        // One load per process, outside the lease.
                        OnWaitTimeout::Load => self.mode = LoadMode::Unleased,
                        OnWaitTimeout::Fail => {
                            return failed(self.waited_out(), self.stand_in(reader), loader);
                        }
                    }
                }
                // This caller does not accept the older value that stands in for other callers.
                FlightOutcome::Stale(_) if !reader.goes_on_alone() => {
                    return MissOutcome::Failed(outcome.into_failure());
                }
                FlightOutcome::Stale(_)
                | FlightOutcome::Uncacheable
                | FlightOutcome::Removed
                | FlightOutcome::Gone => {
                    return MissOutcome::Alone(loader);
                }
            }
        }
        MissOutcome::Alone(loader)
    }
}

/// Records the wait for another caller's load, however that ended. (If the waiter's own loader is used in the end, its wait
/// is recorded where that load begins.)
fn waited(policy: &Policy, joined_at: Instant, leads: bool, outcome: &FlightOutcome) {
    if !(leads && outcome.is_refusal()) {
        policy.waited(joined_at.elapsed());
    }
}

/// Answers with the older value if there is one, else with the failure.
fn failed<V>(failure: Failure, stand_in: Option<V>, loader: Loader) -> MissOutcome<V> {
    match stand_in {
        Some(value) => MissOutcome::Stale(value, Some(loader)),
        None => MissOutcome::Failed(failure),
    }
}
