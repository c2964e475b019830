//! A held lease: its renewal during a load, and the commands that end it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until};

use crate::flight::order::Question;
use crate::guard_state::Node;
use crate::key::Key;
use crate::key::flight::{FlightKey, Lane};
use crate::observe::{Count, log, warn_if};
use crate::store::wake::lease_waiters::Hints;
use crate::store::{Fail, HandOver, HandedOver, Kept, LATEST, StoreError, Token, Watch};
use crate::sync::lock;
use crate::tracker::Present;
use crate::value::outcome::Ending;

/// A held lease. The owner ends it with one of the consuming methods; a dropped lease expires by itself.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(super) node: Arc<Node>,
    pub(super) key: Key,
    pub(super) token: Token,
    pub(super) watch: Watch,
    pub(super) ttl: Duration,
    /// How many loads of this wave have vanished.
    pub(super) hops: u8,
    /// When it was granted, if this flight waited for another holder before.
    pub(super) waited_until: Option<Instant>,
    /// When the last successful acquire or renewal was sent. An invalidation that ended the lease came after that, so a caller
    /// that arrived later may know of it.
    pub(super) confirmed: Mutex<Question>,
    pub(super) _held: Present,
}

/// An event that ends the undisturbed hold of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The key was invalidated. The message may be late and concern the lease before this one; a renewal tells.
    Invalidated,
    /// The token holds the lease no more.
    Lost,
}

impl Lease {
    pub(crate) fn hops(&self) -> u8 {
        self.hops
    }

    pub(crate) fn waited_until(&self) -> Option<Instant> {
        self.waited_until
    }

    /// Up to when the lease was certainly held.
    pub(crate) fn confirmed(&self) -> Question {
        *lock(&self.confirmed)
    }

    /// Renews the lease at each third of its TTL, and returns when it is invalidated or lost. A renewal reaches at most to the
    /// load's `end` plus the time for a commit. With `now`, begins with a renewal.
    pub(crate) async fn keep(&self, end: Instant, mut now: bool) -> Event {
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
                        outdate(&self.node, &self.key, &hints);
                        return Event::Invalidated;
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
            let asked = Question::now();
            match self.node.store.renew(&self.key, &self.token, ttl, period).await {
                Ok(Kept::Yes | Kept::Aside) => *lock(&self.confirmed) = asked,
                Ok(Kept::No) => return Event::Lost,
                // The lease may still be held: the next renewal tells, and the commit decides.
                Err(_) => self.node.count(Count::store_errors),
            }
        }
    }

    /// Step 7: stores the entry and wakes all waiting processes. `None` if the store's answer is not known.
    pub(crate) async fn commit(self, entry: Bytes, keep: Duration) -> Option<Kept> {
        // The deadline is the lease's TTL, because a large value on a slow connection may take longer than a look-up. The
        // caller has its own bound on waiting for this.
        let done = self.node.store.commit(&self.key, &self.token, entry, keep, self.ttl).await;
        if matches!(done, Ok(Kept::No | Kept::Aside)) {
            self.node.count(Count::commits_refused);
            // Otherwise the key was invalidated or the lease evicted, which is normal.
            let ran_out = lock(&self.confirmed).at.elapsed() > self.ttl;
            warn_if!(
                log::GUARD,
                ran_out && self.node.unrenewed.is_due(),
                key = ?self.key,
                ?done,
                ran_out,
                "what was loaded is not stored: commit refused. If its lease ran out, its thread was blocked (use spawn_blocking), or \
                 the process stood still"
            );
        }
        self.ended(done)
    }

    /// Step 7 without a value: publishes the ending to the waiting processes and wakes them. `None` as for [`commit`](Self::commit).
    pub(crate) async fn fail(
        self,
        ending: &Ending,
        replay: Duration,
        marker: Option<(Bytes, Duration)>,
        seen: Option<&Bytes>,
    ) -> Option<Kept> {
        let fail = Fail {
            token: &self.token,
            outcome: ending.encode(&self.key),
            keep: (self.ttl * 2).max(replay),
            replay,
            marker,
            seen,
        };
        let done = self.node.store.fail(&self.key, fail, self.ttl).await;
        self.ended(done)
    }

    /// Gives the lease to a waiting process, or frees it. Returns whether a waiting process certainly got it.
    pub(crate) async fn hand_over(self, hops: u8) -> bool {
        let how = HandOver { lease: self.ttl, hops, is_leaving: self.node.is_leaving() };
        let done = self.node.store.hand_over(&self.key, &self.token, how, self.ttl).await;
        matches!(self.ended(done), Some(HandedOver::ToWaiter))
    }

    /// Releases the lease later if the command that ends it got no answer: it may not have run, and the lease must not stay.
    fn ended<T>(self, done: Result<T, StoreError>) -> Option<T> {
        let error = match done {
            Ok(done) => return Some(done),
            Err(error) => error,
        };
        self.node.count(Count::store_errors);
        tracing::debug!(target: log::GUARD, key = %self.key.digest(), %error, "the end of a lease was not confirmed");
        release_later(self.node, self.key, self.token, self.ttl, self._held);
        None
    }
}

/// Detaches the flight that loads outside the lease if the key was invalidated. That flight does not learn of it, and later
/// callers must not join a load that is older than an invalidation.
pub(super) fn outdate(node: &Node, key: &Key, hints: &Hints) {
    if hints.invalidated {
        node.flights.detach(&FlightKey { key: key.clone(), lane: Lane::Beside });
    }
}

/// Releases a lease that this node may hold without knowing it. Retries until the lease must have expired by itself, however
/// late it was granted. `held` keeps it counted until then, as held or as doubtful.
pub(super) fn release_later(node: Arc<Node>, key: Key, token: Token, lease: Duration, held: Present) {
    tokio::spawn(async move {
        let _held = held;
        let expired = Instant::now() + LATEST + lease;
        while node.store.release(&key, &token, lease).await.is_err() && Instant::now() < expired {
            sleep(Duration::from_millis(fastrand::u64(20..100))).await;
        }
    });
}
