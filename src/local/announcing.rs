//! Announces a change to the nodes that keep copies, and waits until each has dropped its copies or has lost its right.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use uuid::Uuid;

use super::{Acknowledgements, LocalTier, announcer_waits, try_claim};
use crate::observe::GuardCount;
use crate::store::protocol::{Announced, Announcement, Audience, ChangedName, Member};
use crate::store::{SentAttempt, StoreResult};

/// How long an announcer waits at most for its own inbox to open, in which the acknowledgements arrive.
const INBOX_OPENS: Duration = Duration::from_millis(500);

/// How long one ANNOUNCE may take, and the FORGET of a silent member.
const WITHIN: Duration = Duration::from_millis(500);

/// A change and its announcement, which is repeated under new ids until an attempt has an answer. It belongs to one task, so the attempt
/// that has the answer is the latest one.
pub(crate) struct AnnouncedChange<'a> {
    tier: &'a Arc<LocalTier>,
    name: ChangedName,
    /// Whether other processes must be assumed to keep copies although this process knows of none.
    expected: bool,
    /// The ids of all attempts, whose acknowledgements are collected until the change is dropped.
    attempts: Vec<Uuid>,
    /// The wait for the members that must acknowledge, while it goes on.
    unfinished: Option<MemberWait>,
}

impl Drop for AnnouncedChange<'_> {
    /// If the caller leaves during the wait for a silent member, the wait goes on in a task and then removes the member. Otherwise each
    /// later caller might leave during the same wait, and the member would stay.
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
    /// When all rights will have ended that were set before the change.
    until: Instant,
}

impl MemberWait {
    fn silent(&self) -> Vec<Member> {
        self.acknowledgements.silent(&self.members)
    }

    /// Waits for each member until it has acknowledged or its right has ended.
    async fn ended(&self) {
        loop {
            let more = self.acknowledgements.more.notified();
            if self.silent().is_empty() || timeout_at(self.until, more).await.is_err() {
                return;
            }
        }
    }
}

impl LocalTier {
    /// A change of this name. With `expected`, other processes are assumed to keep copies although this process knows of none.
    pub(crate) fn change(self: &Arc<Self>, name: ChangedName, expected: bool) -> AnnouncedChange<'_> {
        AnnouncedChange { tier: self, name, expected, attempts: Vec::new(), unfinished: None }
    }

    /// Records an attempt at a change as in flight, until the reply to it is known.
    pub(crate) fn attempt_sent(&self) -> SentAttempt<'_> {
        self.attempts.sent()
    }

    /// Whether some process of the volume keeps copies, or may have kept some: this process, or a member of a registry that it has seen.
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

    /// Whether this wait goes on without its caller. Only one wait does so at a time, because another would remove the same members.
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
    pub(crate) async fn reaches_all(mut self, mut announced: Announced, until: Instant) -> StoreResult<()> {
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
            // Acknowledgements arrive in the inbox. If an announcement was made before the inbox was open, its acknowledgements are lost.
            if !is_receiving && self.tier.knows_of_copies() {
                let _ = self.tier.store.until_received(INBOX_OPENS).await;
                is_receiving = true;
            }
            announced = self.announce(until).await?;
        }
    }

    /// Sends ANNOUNCE until it has an answer or a final error, at most until `until`.
    async fn announce(&mut self, until: Instant) -> StoreResult<Announced> {
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

    /// Drops this node's copy and records the answer to an announcement. Returns when all rights will have ended that were set before the
    /// registry existed; `None` if they have certainly ended.
    fn apply_answer(&self, audience: &Audience) -> Option<Instant> {
        self.tier.forget(&self.name);
        let (since, term) = self.tier.note(audience);
        (!audience.registry.is_mature).then(|| since + announcer_waits(term))
    }

    /// Waits for each member until it has acknowledged or its right has ended, which is timed from the answer on by this process's clock.
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
