//! Announces a change to the nodes that keep copies, and waits until each has dropped its copies or has lost its right.
//!
//! The task that renews a node's right, while callers ask for copies.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use uuid::Uuid;

use super::{Acknowledgements, LocalTier, Moment, announcer_waits, micros, right_lasts, try_claim};
use crate::observe::{GuardCount, log, warn_if};
use crate::store::protocol::{Announced, Announcement, Audience, ChangedName, Member, Renewal, Renewed};
use crate::store::{SentAttempt, StoreError, StoreErrorKind};
use crate::sync::lock;

/// How long an announcer waits until its own inbox is open, in which the acknowledgements arrive.
const INBOX_OPENS: Duration = Duration::from_millis(500);

/// How long one ANNOUNCE may take, and the FORGET of a silent member.
const WITHIN: Duration = Duration::from_millis(500);

/// A change and its announcement, which is repeated under new ids until one has an answer. It belongs to one task, so the attempt that has
/// the answer is the latest one.
#[derive(Debug)]
pub(crate) struct AnnouncedChange<'a> {
    tier: &'a Arc<LocalTier>,
    name: ChangedName,
    /// Whether other processes keep copies although none is known.
    expected: bool,
    /// The ids of all attempts, whose acknowledgements are collected until the change is dropped.
    attempts: Vec<Uuid>,
    /// The wait for members, while it goes on.
    unfinished: Option<MemberWait>,
}

impl Drop for AnnouncedChange<'_> {
    /// If the caller leaves during the wait for a silent member, the wait goes on in a task: no other caller may ever wait to the end.
    fn drop(&mut self) {
        let attempts = std::mem::take(&mut self.attempts);
        match (self.unfinished.take(), Handle::try_current()) {
            (Some(wait), Ok(runtime)) if self.tier.finishes_alone(&wait) => {
                let finishing = Finishing { tier: Arc::downgrade(self.tier), attempts };
                runtime.spawn(async move {
                    wait.ended().await;
                    if let Some(tier) = finishing.tier.upgrade() {
                        tier.remove_silent(&wait).await;
                    }
                });
            }
            _ => self.tier.pending.forget(&attempts),
        }
    }
}

/// A wait that goes on without its caller.
struct Finishing {
    tier: Weak<LocalTier>,
    attempts: Vec<Uuid>,
}

impl Drop for Finishing {
    fn drop(&mut self) {
        if let Some(tier) = self.tier.upgrade() {
            tier.pending.forget(&self.attempts);
        }
    }
}

/// The wait for the members that an announcement was sent to.
#[derive(Clone, Debug)]
struct MemberWait {
    members: Arc<[Member]>,
    acknowledgements: Arc<Acknowledgements>,
    /// When all rights have ended that were set before the change.
    until: Instant,
}

impl MemberWait {
    fn silent(&self) -> Vec<Member> {
        self.acknowledgements.silent(&self.members)
    }

    /// Waits for each member until it has acknowledged or its right has ended.
    async fn ended(&self) {
        loop {
            let more = self.acknowledgements.more();
            if self.silent().is_empty() || timeout_at(self.until, more).await.is_err() {
                return;
            }
        }
    }
}

impl LocalTier {
    /// A change of this name. With `expected`, other processes keep copies although none is known.
    pub(crate) fn change(self: &Arc<Self>, name: ChangedName, expected: bool) -> AnnouncedChange<'_> {
        AnnouncedChange { tier: self, name, expected, attempts: Vec::new(), unfinished: None }
    }

    /// Records an attempt at a change as in flight, until the reply to it is known.
    pub(crate) fn attempt_sent(&self) -> SentAttempt<'_> {
        self.attempts.sent()
    }

    /// Whether some process of the volume keeps copies, or may have done so: this one, or a member of a registry that it has seen.
    pub(crate) fn knows_of_copies(&self) -> bool {
        self.is_in_use() || self.known_registries.any()
    }

    /// Announces a change that no caller waits for, if other processes may have copies.
    pub(crate) fn announce_later(self: &Arc<Self>, name: ChangedName) {
        if !self.knows_of_copies() {
            return;
        }
        let tier = Arc::clone(self);
        tokio::spawn(async move {
            let mut change = tier.change(name, false);
            let announcement = change.attempt();
            match tier.store.announce(&announcement, &change.name, WITHIN).await {
                Ok(Announced::To(audience)) => drop(tier.note(&audience)),
                Ok(Announced::NoRegistry | Announced::Separately) => {}
                Err(_) => tier.count(GuardCount::store_errors),
            }
        });
    }

    /// Whether this wait goes on without its caller. Only one wait does at a time, because another would remove the same members.
    fn finishes_alone(&self, wait: &MemberWait) -> bool {
        let [now, until] = [Instant::now(), wait.until + WITHIN].map(|at| self.clock.at(at));
        try_claim(&self.finishes_until, now, until)
    }

    /// Removes the members that stayed silent, so that no later announcement waits for them: not even one that is sent as soon as the
    /// change has returned.
    async fn remove_silent(&self, wait: &MemberWait) {
        let silent = wait.silent();
        if silent.is_empty() {
            return;
        }
        self.count(GuardCount::local_waits);
        let removed = silent.into_iter().map(|member| self.store.remove_member(&self.volume, member, WITHIN));
        let _ = timeout(WITHIN, join_all(removed)).await;
    }

    /// Records the reply to an announcement. Returns since when the registry is known, and the longest term.
    fn note(&self, audience: &Audience) -> (Instant, Duration) {
        self.follow(audience);
        self.known_registries.learn(&audience.registry)
    }
}

impl AnnouncedChange<'_> {
    /// The announcement of the next attempt at the change.
    pub(crate) fn attempt(&mut self) -> Announcement {
        let tier = self.tier;
        let id = Uuid::from_u128(fastrand::u128(..));
        tier.pending.await_acknowledgements(id);
        self.attempts.push(id);
        let known_registry = tier.known_registries.known_registry(tier.term);
        // An earlier attempt may have found a registry that no longer exists.
        let creates = self.expected || tier.knows_of_copies();
        let attempt = tier.attempts.next();
        Announcement { volume: tier.volume.clone(), id, attempt, creates, known_registry, term: tier.term }
    }

    /// After the change was made: waits until no process serves an older copy. Takes the answer to the announcement of the latest attempt.
    ///
    /// # Errors
    ///
    /// The change was made, and the announcement has no answer by `until`.
    pub(crate) async fn reaches_all(
        mut self,
        mut announced: Announced,
        until: Instant,
    ) -> Result<(), StoreError> {
        let mut is_receiving = self.tier.store.hints_arrive();
        loop {
            match announced {
                Announced::NoRegistry => {
                    self.tier.forget(&self.name);
                    return Ok(());
                }
                Announced::To(audience) => {
                    let mature = self.apply_answer(&audience);
                    if is_receiving || audience.members.is_empty() {
                        self.wait(&audience, mature).await;
                        return Ok(());
                    }
                }
                Announced::Separately => {}
            }
            // Acknowledgements arrive in the inbox. Those of an announcement that was made before it was open are lost.
            if !is_receiving && self.tier.knows_of_copies() {
                let _ = self.tier.store.until_received(INBOX_OPENS).await;
                is_receiving = true;
            }
            announced = self.announce(until).await?;
        }
    }

    /// Sends ANNOUNCE until it is answered.
    async fn announce(&mut self, until: Instant) -> Result<Announced, StoreError> {
        let tier = self.tier;
        loop {
            let announcement = self.attempt();
            let left = until.saturating_duration_since(Instant::now());
            let announced = tier.store.announce(&announcement, &self.name, WITHIN.min(left)).await;
            let announced = announced.inspect_err(|_| tier.count(GuardCount::store_errors));
            if announced.as_ref().map_or_else(|error| error.is_final() || left.is_zero(), |_| true) {
                return announced;
            }
            tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50)).min(left)).await;
            let _ = tier.store.reach(announcement.volume.name(), left).await;
        }
    }

    /// Drops this node's copy and records an answer. Returns when all rights will have ended that were set before the registry existed,
    /// unless they have certainly ended.
    fn apply_answer(&self, audience: &Audience) -> Option<Instant> {
        self.tier.forget(&self.name);
        let (since, term) = self.tier.note(audience);
        (!audience.registry.is_mature).then(|| since + announcer_waits(term))
    }

    /// Waits, from the answer on and by this process's clock, for each member until it has acknowledged or its right has ended.
    async fn wait(&mut self, audience: &Audience, mature: Option<Instant>) {
        let id = self.attempts.last().copied().unwrap_or_default();
        let wait = MemberWait {
            members: audience.members[..].into(),
            acknowledgements: self.tier.pending.of(id),
            until: Instant::now() + announcer_waits(audience.registry.term),
        };
        self.unfinished = Some(wait.clone());
        wait.ended().await;
        self.tier.remove_silent(&wait).await;
        self.unfinished = None;
        if let Some(mature) = mature {
            sleep_until(mature).await;
        }
    }
}

/// The fraction of a term after which the right is renewed.
const RENEWALS: u32 = 3;
/// After how many terms without a caller the right is released.
const IDLE_TERMS: u32 = 15;
/// How often a refused RENEW is retried: a user's permissions change seldom.
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
    pub(crate) async fn connect(self: &Arc<Self>, within: Duration) -> Result<(), StoreError> {
        self.is_requested.store(true, Ordering::Relaxed);
        let renewed = timeout(within, self.send_renewal()).await;
        self.renew();
        renewed.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::TimedOut)))
    }

    async fn send_renewal(&self) -> Result<(), StoreError> {
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
        // The clock is read before RENEW is sent.
        let sent = self.clock.at(Instant::now());
        let within = self.term / RENEWALS;
        let answer = timeout(within, self.store.renew_membership(&self.volume, renewal, within)).await;
        let renewed = answer.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::TimedOut)))?;
        self.apply(&renewed, stamp, sent);
        Ok(())
    }

    /// Drops what the RENEW names, and only then extends the right.
    fn apply(&self, renewed: &Renewed, stamp: u64, sent: Moment) {
        let mut applied = lock(&self.applied);
        applied.stamp = applied.stamp.max(stamp);
        if applied.has_left {
            return;
        }
        // Dropped after the lock is released.
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

    /// Records that the next RENEW is due at this moment. If there is none for a term after it, a caller starts another task.
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
        // Whether there was a right since the last lapse. It may lapse during an attempt to renew it, or between two that fail at once.
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
            // Not sooner, or a stream of lost messages would be a stream of renewals.
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
