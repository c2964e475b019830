//! Waiting behind the holder of a lease until its load has ended or its lease has expired. Step 5.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::acquire::{AcquireOutcome, AcquireRequest, Acquisition};
use super::lease::{detach_unleased, release_later};
use crate::guard_state::turns::Turn;
use crate::observe::{Count, GuardCount};
use crate::store::wake::lease_waiters::Hints;
use crate::store::{StoreError, StoreErrorKind, Token};

/// The longest sleep between two acquires while hints may be lost.
pub(super) const UNSURE_WAIT: Duration = Duration::from_millis(500);
/// The shortest sleep on a lease that is about to expire, so that waiting is no busy loop.
pub(super) const SHORTEST_WAIT: Duration = Duration::from_millis(5);

impl Acquisition<'_> {
    /// Waits for the turn to send an ACQUIRE.
    pub(super) async fn turn(&mut self) -> Result<Option<Turn>, AcquireOutcome> {
        let AcquireRequest { state, key, .. } = self.request;
        let mut turn = pin!(state.turns.flight(&state.store, key, self.request.batch.is_some()));
        // What has ended in time is read, however late.
        let is_bounded = self.released.is_none();
        loop {
            tokio::select! {
                biased;
                () = state.leaving() => return Err(AcquireOutcome::Leaving),
                turn = &mut turn => return Ok(turn),
                () = sleep_until(self.request.deadline), if is_bounded => if !self.goes_on() {
                    return Err(AcquireOutcome::WaitedOut);
                },
            }
        }
    }

    /// At the deadline of the wait: whether it goes on, because later callers still wait.
    fn goes_on(&mut self) -> bool {
        let later = (self.request.goes_on)();
        self.request.deadline = later.unwrap_or(self.request.deadline);
        later.is_some()
    }

    /// Sleeps until a hint arrives, which may say that this holder's load has ended, or until its lease should have expired.
    pub(super) async fn wait(&mut self, remaining: Duration, holder: Token) -> Result<(), AcquireOutcome> {
        let AcquireRequest { state, policy, .. } = self.request;
        self.waits_behind(&holder);
        (self.behind, self.released) = (Some(holder), None);
        self.held_until = self.sent_at.at + remaining;
        let wakes = Instant::now() + sleep_for(remaining, policy.lease, state.store.hints_arrive());
        loop {
            tokio::select! {
                biased;
                hints = self.watch.hints() => {
                    self.maybe_granted |= hints.granted.is_some();
                    let now = Instant::now();
                    let in_time = hints.finished.is_some() && now < self.request.deadline;
                    self.released = in_time.then_some(now);
                    self.apply_hints(hints);
                    return Ok(());
                }
                () = sleep_until(wakes) => return Ok(()),
                () = sleep_until(self.request.deadline) => if !self.goes_on() {
                    return Err(AcquireOutcome::WaitedOut);
                },
                () = state.leaving() => return Err(AcquireOutcome::Leaving),
            }
        }
    }

    /// Begins the span of a wait for another process's load, which is the first caller's; the other callers of this process have
    /// their own.
    fn waits_behind(&mut self, holder: &Token) {
        let AcquireRequest { state, key, span, .. } = self.request;
        if self.behind.as_ref() == Some(holder) || !state.spans.are_wanted() {
            return;
        }
        let flight = holder.flight();
        *self.request.waits_for = Some(flight);
        self.wait_span = state.spans.wait(span, key);
        state.spans.waited(&self.wait_span, flight);
    }

    /// Handles a failed acquire. A flight that has waited for a live leader rides out a short disconnect on the rest of its
    /// budget, instead of repeating the load that is running.
    pub(super) async fn retry_after_disconnect(&mut self, error: StoreError) -> Result<(), AcquireOutcome> {
        let AcquireRequest { state, key, policy, budget, .. } = &mut self.request;
        state.count(GuardCount::store_errors);
        // The acquire was given the rest of the budget, which is less than `command_timeout`.
        if error.kind == StoreErrorKind::TimedOut && budget.left().is_zero() {
            policy.count(Count::budget_exceeded);
        }
        let rides_out = self.behind.is_some() && error.kind != StoreErrorKind::Refused;
        let mut is_back = false;
        if rides_out && !budget.left().is_zero() {
            let since = Instant::now();
            // A server that answered with an error is still connected; without a pause it would be asked in a busy loop.
            sleep(SHORTEST_WAIT.min(budget.left())).await;
            is_back = state.store.reach(key.name(), budget.left()).await.is_ok();
            budget.spend(since);
        }
        if !is_back {
            self.maybe_granted |= error.kind.is_ambiguous();
            return Err(AcquireOutcome::StoreDown(error));
        }
        if error.kind.is_ambiguous() {
            self.retry_with_new_token();
        }
        Ok(())
    }

    /// Continues with a new token. The acquire without an answer may still run at any time. Under the same token it would bring
    /// back a lease that an invalidation has ended, and the older load would be stored.
    fn retry_with_new_token(&mut self) {
        let AcquireRequest { state, key, policy, .. } = self.request;
        let token = Token::mint_for(state.store.node(), policy.lease);
        let before = std::mem::replace(&mut self.watch, state.store.watch(key, &token)).close();
        self.apply_hints(before);
        let old = std::mem::replace(&mut self.token, token);
        release_later(Arc::clone(state), key.clone(), old, policy.lease, state.possible_leases.enter());
    }

    /// Applies the hints that arrived.
    pub(super) fn apply_hints(&mut self, hints: Hints) {
        detach_unleased(self.request.state, self.request.key, &hints);
        self.handed_over |= hints.granted.is_some();
        self.takeovers = hints.granted.unwrap_or(self.takeovers);
        // A wake may name a later holder; then the next acquire asks for that holder's outcome.
        self.behind = hints.finished.or_else(|| self.behind.take());
        if hints.invalidated {
            // An invalidated entry must not stand in for a failed load.
            *self.request.rejected = None;
        }
    }
}

/// How long to sleep on a lease that has `remaining` left, in case no hint comes.
pub(super) fn sleep_for(remaining: Duration, lease: Duration, hints_arrive: bool) -> Duration {
    let longest = if hints_arrive { lease } else { lease.min(UNSURE_WAIT) };
    let remaining = remaining.clamp(SHORTEST_WAIT.min(longest), longest);
    // Jitter: the waiters of a dead leader should not all ask in the same millisecond, but the first should ask just
    // after the lease has expired.
    remaining + Duration::from_micros(fastrand::u64(1_000..10_000))
}
