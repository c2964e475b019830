//! A held lease: its renewal during a load, and the commands that end it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until};

use crate::flight::SentAt;
use crate::guard_state::GuardState;
use crate::key::{FlightKey, Key, LoadMode};
use crate::observe::{Count, FlightId, GuardCount, PolicyCounters, log, warn_if};
use crate::store::wake_leases::Hints;
use crate::store::{
    Fail, HandOver, HandedOver, LATEST, LeaseWatch, OlderEntry, StoreResult, Token, TokenCheck,
};
use crate::sync::lock;
use crate::task::Tracked;
use crate::value::FlightOutcome;

/// A held lease. The owner ends it with one of the consuming methods; a dropped lease expires by itself.
pub(crate) struct Lease {
    pub(super) state: Arc<GuardState>,
    pub(super) key: Key,
    pub(super) token: Token,
    pub(super) watch: LeaseWatch,
    pub(super) ttl: Duration,
    /// How many loads have vanished under this lease, in all processes that it was handed to.
    pub(super) takeovers: u8,
    /// The counters of the policy, for a refused commit.
    pub(super) counters: Arc<PolicyCounters>,
    /// When the lease was granted, if this flight waited for another holder before.
    pub(super) waited_until: Option<Instant>,
    /// When the last successful acquire or renewal was sent. An invalidation that ended the lease came after that moment, so a
    /// caller that arrived after it may know of the invalidation.
    pub(super) confirmed: Mutex<SentAt>,
    pub(super) _held: Tracked,
}

/// Why [`Lease::keep`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseEvent {
    /// The key was invalidated. The message may be late and concern an earlier lease; the next renewal shows whether this lease is held.
    Invalidated,
    /// The token no longer holds the lease.
    Lost,
    /// The process is about to end: another process should load the key.
    Leaving,
}

impl Lease {
    /// The id of the load in traces.
    pub(crate) fn flight(&self) -> FlightId {
        self.token.flight()
    }

    /// The last moment at which the lease was certainly held.
    pub(crate) fn confirmed(&self) -> SentAt {
        *lock(&self.confirmed)
    }

    /// Renews the lease at each third of its TTL, until one of the [`LeaseEvent`]s occurs. A renewal extends the lease at most to
    /// the load's `end` plus the time for a commit. With `now`, begins with a renewal.
    pub(crate) async fn keep(&self, end: Instant, now: bool) -> LeaseEvent {
        tokio::select! {
            biased;
            event = self.renew(end, now) => event,
            () = self.state.leaving() => LeaseEvent::Leaving,
        }
    }

    async fn renew(&self, end: Instant, mut now: bool) -> LeaseEvent {
        let period = self.ttl / 3;
        let mut due = Instant::now() + period;
        loop {
            if !now {
                // The timer is polled first, and hints do not restart it: a stream of irrelevant hints must not delay the renewal.
                let hints = tokio::select! {
                    biased;
                    () = sleep_until(due) => None,
                    hints = self.watch.hints() => Some(hints),
                };
                match hints {
                    Some(hints) if hints.invalidated => {
                        detach_unleased(&self.state, &self.key, &hints);
                        return LeaseEvent::Invalidated;
                    }
                    // A missed hint may have been an invalidation: renew at once to find out.
                    Some(hints) if hints.missed => {}
                    Some(_) => continue,
                    None => {}
                }
            }
            now = false;
            due = Instant::now() + period;
            let ttl = self.ttl.min(end.saturating_duration_since(Instant::now()) + period);
            let sent_at = SentAt::now();
            match self.state.store.renew(&self.key, &self.token, ttl, period).await {
                Ok(TokenCheck::Held | TokenCheck::ForeignData) => *lock(&self.confirmed) = sent_at,
                Ok(TokenCheck::Lost) => return LeaseEvent::Lost,
                // The lease may still be held: the next renewal shows whether it is, and in the end the commit.
                Err(_) => self.state.count(GuardCount::store_errors),
            }
        }
    }

    /// Step 7: stores the entry and wakes all waiting processes. `None` if the store did not answer.
    pub(crate) async fn commit(self, entry: Bytes, keep: Duration) -> Option<TokenCheck> {
        // The time limit is the lease's TTL, because a large value on a slow connection may take longer than a look-up. The
        // flight has another bound on its wait for the commit.
        let done = self.state.store.commit(&self.key, &self.token, entry, keep, self.ttl).await;
        if matches!(done, Ok(TokenCheck::Lost | TokenCheck::ForeignData)) {
            self.counters.add(Count::commits_refused);
            // If the lease did not run out, the key was invalidated or the lease evicted, which is normal: no warning.
            let ran_out = lock(&self.confirmed).at.elapsed() > self.ttl;
            warn_if!(
                log::GUARD,
                ran_out && self.state.logs.unrenewed.is_due(),
                key = ?self.key,
                ?done,
                ran_out,
                "what was loaded is not stored: commit refused. If its lease ran out, its thread was blocked (use spawn_blocking), or \
                 the process stood still"
            );
        }
        self.ended(done)
    }

    /// Step 7 without a value to store: publishes the outcome to the waiting processes and wakes them. `None` if the
    /// store did not answer.
    pub(crate) async fn fail(
        self,
        outcome: &FlightOutcome,
        replay: Duration,
        older: OlderEntry,
        seen: Option<&Bytes>,
    ) -> Option<TokenCheck> {
        let fail = Fail {
            token: &self.token,
            outcome: outcome.encode(&self.key),
            keep: (self.ttl * 2).max(replay),
            replay,
            older,
            seen,
        };
        let done = self.state.store.fail(&self.key, fail, self.ttl).await;
        self.ended(done)
    }

    /// Hands the lease to a waiting process, or frees it. Returns whether a waiting process certainly got it.
    pub(crate) async fn hand_over(self, hops: u8) -> bool {
        let how = HandOver { lease: self.ttl, hops, is_leaving: self.state.is_leaving() };
        let done = self.state.store.hand_over(&self.key, &self.token, how, self.ttl).await;
        matches!(self.ended(done), Some(HandedOver::ToWaiter))
    }

    /// Releases the lease later if the command that ends it got no answer: the command may not have run, and the lease must not stay.
    fn ended<T>(self, done: StoreResult<T>) -> Option<T> {
        let error = match done {
            Ok(done) => return Some(done),
            Err(error) => error,
        };
        self.state.count(GuardCount::store_errors);
        tracing::debug!(target: log::GUARD, key = %self.key.digest(), %error, "the end of a lease was not confirmed");
        release_later(self.state, self.key, self.token, self.ttl, self._held);
        None
    }
}

/// If the key was invalidated, detaches the flight that loads outside the lease. That flight does not receive the invalidation itself, and
/// later callers must not join a load that is older than an invalidation.
pub(super) fn detach_unleased(state: &GuardState, key: &Key, hints: &Hints) {
    if hints.invalidated {
        state.flights.detach(&FlightKey { key: key.clone(), mode: LoadMode::Unleased });
    }
}

/// Releases a lease that this node may hold without knowing it. Retries until the store has confirmed the release, at most until the
/// lease must have expired by itself, however late it was granted. Until then `held` counts it as held or as possibly held.
pub(super) fn release_later(state: Arc<GuardState>, key: Key, token: Token, lease: Duration, held: Tracked) {
    tokio::spawn(async move {
        let _held = held;
        let expired = Instant::now() + LATEST + lease;
        while state.store.release(&key, &token, lease).await.is_err() && Instant::now() < expired {
            sleep(Duration::from_millis(fastrand::u64(20..100))).await;
        }
    });
}
