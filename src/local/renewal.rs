//! The task that renews a node's right, while callers ask for copies.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout};

use super::{LocalTier, Moment, micros, right_lasts, try_claim};
use crate::observe::{GuardCount, log, warn_if};
use crate::store::protocol::{Renewal, Renewed};
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;

/// How many times a term the right is renewed.
const RENEWALS: u32 = 3;
/// After how many terms in which no caller has requested a copy the right is released.
const IDLE_TERMS: u32 = 15;
/// How long after a refused RENEW the next one is sent: a user's permissions change seldom.
const REFUSED: Duration = Duration::from_secs(30);

impl LocalTier {
    /// Starts the renewal task, unless one is running. The task of a runtime that is not driven does not count as running.
    pub(super) fn renew(self: &Arc<Self>) {
        let now = self.clock.at(Instant::now());
        if now < self.renews_until.load(Ordering::Acquire) {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        if lock(&self.applied).has_left || !try_claim(&self.renews_until, now, now + micros(self.term)) {
            return;
        }
        let number = self.renewer.fetch_add(1, Ordering::AcqRel) + 1;
        runtime.spawn(RenewalTask { tier: Arc::downgrade(self), number }.run());
    }

    /// Acquires the right now, and starts its renewal.
    ///
    /// # Errors
    ///
    /// The RENEW was not answered, or the user lacks the permission for a command that it uses.
    pub(crate) async fn connect(self: &Arc<Self>, within: Duration) -> StoreResult<()> {
        self.is_requested.store(true, Ordering::Relaxed);
        let renewed = timeout(within, self.send_renewal()).await;
        self.renew();
        renewed.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::TimedOut)))
    }

    async fn send_renewal(&self) -> StoreResult<()> {
        // LEAVE is sent when no RENEW is on its way, and none is sent after it.
        let _renewing = self.renewing.read().await;
        let mark = {
            let applied = lock(&self.applied);
            if applied.has_left {
                return Ok(());
            }
            applied.mark
        };
        let stamp = self.stamps.fetch_add(1, Ordering::Relaxed) + 1;
        let renewal = Renewal {
            stamp,
            mark,
            known_registry: self.known_registries.known_registry(self.term),
            term: self.term,
        };
        // The clock is read before RENEW is sent, because the right is counted from then on.
        let sent = self.clock.at(Instant::now());
        let within = self.term / RENEWALS;
        let answer = timeout(within, self.store.renew_membership(&self.volume, renewal, within)).await;
        let renewed = answer.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::TimedOut)))?;
        self.apply(&renewed, stamp, sent);
        Ok(())
    }

    /// Drops the copies that the answer to the RENEW names, and only then extends the right.
    fn apply(&self, renewed: &Renewed, stamp: u64, sent: Moment) {
        let mut applied = lock(&self.applied);
        applied.stamp = applied.stamp.max(stamp);
        if applied.has_left {
            return;
        }
        // These copies are dropped after the lock is released.
        let mut dropped = Vec::new();
        match &renewed.announced {
            Some(records) => {
                for record in records {
                    dropped.push(self.drop_name(&record.name));
                    if record.announcer != self.store.node() {
                        self.store.acknowledge(record.announcer, record.id);
                    }
                }
            }
            None => self.tickets.void_all(),
        }
        applied.mark = Some(renewed.newest);
        self.known_registries.learn(&renewed.registry);
        self.right.extend(sent + micros(right_lasts(self.term)));
        drop(applied);
        drop(dropped);
    }

    /// Records that the next RENEW is due at this moment. If none is sent within a term after it, the next caller starts another task.
    fn miss_renewals_after(&self, due: Instant) {
        self.renews_until.store(self.clock.at(due) + micros(self.term), Ordering::Release);
    }

    fn has_right(&self) -> bool {
        self.clock.at(Instant::now()) < self.right.until()
    }
}

/// The task's reference to the tier. Weak: dropping the guard ends its task.
struct RenewalTask {
    tier: Weak<LocalTier>,
    /// The latest task has the highest number.
    number: u64,
}

impl RenewalTask {
    fn is_latest(&self, tier: &LocalTier) -> bool {
        tier.renewer.load(Ordering::Acquire) == self.number
    }
}

impl Drop for RenewalTask {
    /// The task ended, with its runtime or by itself: the next caller starts another.
    fn drop(&mut self) {
        if let Some(tier) = self.tier.upgrade()
            && self.is_latest(&tier)
        {
            tier.renews_until.store(0, Ordering::Release);
        }
    }
}

impl RenewalTask {
    async fn run(self) {
        let mut idle = 0;
        // Whether there was a right since the last lapse. The right may lapse during an attempt to renew it, or between two attempts
        // that fail at once.
        let mut held = self.tier.upgrade().is_some_and(|tier| tier.has_right());
        loop {
            let Some(tier) = self.tier.upgrade() else { return };
            if !self.is_latest(&tier) {
                return;
            }
            let began = Instant::now();
            tier.miss_renewals_after(began);
            let _ = tier.store.until_received(Duration::ZERO).await;
            let period = tier.term / RENEWALS;
            let answer = tier.send_renewal().await;
            let mut next = began + period;
            held |= answer.is_ok();
            if let Err(error) = answer {
                tier.count(GuardCount::store_errors);
                if error.kind == StoreErrorKind::Refused {
                    next = began + period.max(REFUSED);
                }
                if !tier.has_right() {
                    tier.lapsed(std::mem::take(&mut held), &error);
                }
            }
            idle = if tier.is_requested.swap(false, Ordering::Relaxed) { 0 } else { idle + 1 };
            if idle >= IDLE_TERMS * RENEWALS {
                return tier.rest(self).await;
            }
            if lock(&tier.applied).has_left {
                return;
            }
            tier.miss_renewals_after(next);
            // Not sooner: otherwise a stream of lost messages would cause a stream of renewals.
            let least = began + period / 8;
            let renews = Arc::clone(&tier.renews);
            // A guard that is dropped must not live on until the next renewal.
            drop(tier);
            tokio::select! {
                biased;
                () = sleep_until(next) => {}
                () = renews.notified() => sleep_until(least).await,
            }
        }
    }
}

impl LocalTier {
    /// Releases the right, because no caller has requested a copy for long. A caller that comes now starts another task.
    async fn rest(self: Arc<Self>, task: RenewalTask) {
        let stamp = {
            let applied = lock(&self.applied);
            self.right.give_up();
            // Read here: another task may renew before LEAVE is sent, and that membership must stay.
            applied.stamp
        };
        drop(task);
        self.end_membership(stamp, self.term / RENEWALS).await;
    }

    /// Counts and logs that the right has lapsed because a RENEW has failed.
    fn lapsed(&self, is_news: bool, error: &StoreError) {
        if is_news {
            self.count(GuardCount::local_lapses);
        }
        warn_if!(
            log::GUARD,
            self.lapse_log.is_due(),
            %error,
            "the volume lease has lapsed: nothing is served from memory until it is renewed"
        );
    }
}
