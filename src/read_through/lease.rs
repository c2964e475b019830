//! A held lease: how it is kept during a load, and how it ends.

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

/// A held lease. Whoever has it ends it by one of its methods; dropped, it runs out by itself.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(super) node: Arc<Node>,
    pub(super) key: Key,
    pub(super) token: Token,
    pub(super) watch: Watch,
    pub(super) ttl: Duration,
    /// How many loads of this wave have vanished.
    pub(super) hops: u8,
    /// When it was granted, if somebody else held it before and was waited for.
    pub(super) waited_until: Option<Instant>,
    /// When it was last asked for and had: what comes after that may be later than the invalidation that ends it.
    pub(super) confirmed: Mutex<Question>,
    pub(super) _held: Present,
}

/// What happened to a held lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Somebody invalidated the key. Which lease that ended, a renewal tells: the message may be
    /// late, and about the lease before this one.
    Invalidated,
    /// It is another's, or nobody's.
    Lost,
}

impl Lease {
    pub(crate) fn hops(&self) -> u8 {
        self.hops
    }

    pub(crate) fn waited_until(&self) -> Option<Instant> {
        self.waited_until
    }

    /// Until when it was held for sure.
    pub(crate) fn confirmed(&self) -> Question {
        *lock(&self.confirmed)
    }

    /// Renews the lease at each third of its time until something happens to it; returns only then.
    /// It is not renewed for longer than the load's `end` and the time to tell the others. With `now`,
    /// begins with a renewal.
    pub(crate) async fn keep(&self, end: Instant, mut now: bool) -> Event {
        let period = self.ttl / 3;
        let mut due = Instant::now() + period;
        loop {
            if !now {
                // The timer first, and one for all hints: whoever says things of no interest here must not put off
                // the renewal.
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
                    // What was missed may have been an invalidation: ask at once.
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
                // Not known to be lost: the next period tells, and the commit decides.
                Err(_) => self.node.count(Count::store_errors),
            }
        }
    }

    /// Step 7: stores the entry and wakes everyone. `None` if what came of it is not known.
    pub(crate) async fn commit(self, entry: Bytes, keep: Duration) -> Option<Kept> {
        // The caller has its own bound on waiting for this; a large value on a slow line
        // may take longer than a look-up.
        let done = self.node.store.commit(&self.key, &self.token, entry, keep, self.ttl).await;
        if matches!(done, Ok(Kept::No | Kept::Aside)) {
            self.node.count(Count::commits_refused);
            // Else somebody has invalidated it, or it was evicted.
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

    /// Step 7, without a value: leaves the ending to those who wait, and wakes them. As [`commit`](Self::commit).
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

    /// Gives the lease to a waiter of another process, or frees it. Whether it is known that a waiter was given it.
    pub(crate) async fn hand_over(self, hops: u8) -> bool {
        let how = HandOver { lease: self.ttl, hops, is_leaving: self.node.is_leaving() };
        let done = self.node.store.hand_over(&self.key, &self.token, how, self.ttl).await;
        matches!(self.ended(done), Some(HandedOver::ToWaiter))
    }

    /// A command without an answer may or may not have run; either way the lease must not stay.
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

/// Loads beside the lease hear of nothing: who comes later must not join one that is older than an invalidation.
pub(super) fn outdate(node: &Node, key: &Key, hints: &Hints) {
    if hints.invalidated {
        node.flights.detach(&FlightKey { key: key.clone(), lane: Lane::Beside });
    }
}

/// Releases a lease that this node may hold without knowing it. Gives up when it has expired by itself, however late it was
/// granted; until then it counts as what it was: held, or doubtful.
pub(super) fn release_later(node: Arc<Node>, key: Key, token: Token, lease: Duration, held: Present) {
    tokio::spawn(async move {
        let _held = held;
        let expired = Instant::now() + LATEST + lease;
        while node.store.release(&key, &token, lease).await.is_err() && Instant::now() < expired {
            sleep(Duration::from_millis(fastrand::u64(20..100))).await;
        }
    });
}
