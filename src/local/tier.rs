//! One guard's membership in its volume: the copies that it serves from memory, and the announcements that it receives.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{Notify, RwLock};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::KnownRegistries;
use super::PendingAnnouncements;
use super::copies::Copies;
use super::tickets::LocalCopy;
use super::tickets::{Ticket, Tickets};
use super::{NodeClock, Right, micros};
use crate::health::LocalTierHealth;
use crate::key::Key;
use crate::key::KeyProbe;
use crate::observe::{Counters, GuardCount, LogEveryMinute};
use crate::store::volume::VolumeListener;
use crate::store::volume::{Audience, ChangedName, LogPosition, Mark, Member, ReceivedAnnouncement};
use crate::store::{Attempts, Store};
use crate::sync::lock;
use crate::value::StoredEntry;

/// How long a volume lease lasts unless the builder says otherwise.
pub(crate) const DEFAULT_TERM: Duration = Duration::from_secs(2);
/// How many bytes of copies a process keeps unless the builder says otherwise.
pub(crate) const DEFAULT_CAPACITY: u64 = 64 * 1024 * 1024;

/// One guard's membership in its volume, and its copies.
#[derive(Debug)]
pub(crate) struct LocalTier {
    /// The key of the volume.
    pub(super) volume: Key,
    pub(super) store: Store,
    pub(super) counters: Arc<Counters>,
    pub(super) term: Duration,
    pub(super) clock: NodeClock,
    pub(super) right: Right,
    pub(super) tickets: Tickets,
    pub(super) copies: Copies,
    pub(super) known_registries: KnownRegistries,
    pub(super) pending: PendingAnnouncements,
    /// The attempts at this node's changes.
    pub(super) attempts: Attempts,
    /// Until when a task waits for silent members instead of a caller that has left.
    pub(super) finishes_until: AtomicU64,
    /// Up to where the log was applied. Locked while a RENEW's answer or a message is applied.
    pub(super) applied: Mutex<Applied>,
    /// Whether a policy of this guard keeps copies.
    pub(super) in_use: AtomicBool,
    /// Whether a caller has requested a copy since the last RENEW.
    pub(super) is_requested: AtomicBool,
    /// Until when the renewal task counts as running; zero if there is none.
    pub(super) renews_until: AtomicU64,
    /// The number of the latest renewal task.
    pub(super) renewer: AtomicU64,
    /// Makes the renewal task renew at once.
    pub(super) renews: Arc<Notify>,
    pub(super) stamps: AtomicU64,
    /// Read-locked by each RENEW that is on its way.
    pub(super) renewing: RwLock<()>,
    pub(super) lapse_log: LogEveryMinute,
}

/// What a node has applied of the log.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) mark: Option<Mark>,
    /// The stamp of the last RENEW that was answered.
    pub(super) stamp: u64,
    /// Whether the guard was shut down, after which no RENEW extends the right.
    pub(super) has_left: bool,
}

impl LocalTier {
    pub(crate) fn new(
        namespace: &str,
        store: Store,
        counters: Arc<Counters>,
        capacity: u64,
        term: Duration,
    ) -> Arc<Self> {
        let tier = Arc::new(Self {
            // The name of no other key: an empty key is refused.
            volume: Key::of_name(&format!("{namespace}:")),
            store,
            counters,
            term,
            clock: NodeClock::new(),
            right: Right::default(),
            tickets: Tickets::new(),
            copies: Copies::new(capacity),
            known_registries: KnownRegistries::default(),
            pending: PendingAnnouncements::default(),
            attempts: Attempts::default(),
            finishes_until: AtomicU64::new(0),
            applied: Mutex::default(),
            in_use: AtomicBool::new(false),
            is_requested: AtomicBool::new(false),
            renews_until: AtomicU64::new(0),
            renewer: AtomicU64::new(0),
            renews: Arc::default(),
            stamps: AtomicU64::new(0),
            renewing: RwLock::new(()),
            lapse_log: LogEveryMinute::default(),
        });
        let listener: Weak<dyn VolumeListener> = Arc::<Self>::downgrade(&tier);
        tier.store.listen(listener);
        tier
    }

    /// Records that a policy of this guard keeps copies.
    pub(crate) fn use_copies(&self) {
        self.in_use.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_in_use(&self) -> bool {
        self.in_use.load(Ordering::Relaxed)
    }

    /// The copy of `key`, if it was made less than `local_for` ago and this node may serve it now; with the moment of this check.
    ///
    /// Sends nothing. The order of the three steps is part of the proof: the right, the copy, the clock.
    #[inline]
    pub(crate) fn copy(&self, key: &Key, local_for: Duration) -> Option<(Arc<LocalCopy>, Instant)> {
        self.served(|copies| copies.get(key), local_for)
    }

    /// As [`copy`](Self::copy), by a probe instead of a key.
    #[inline]
    pub(crate) fn find(&self, probe: KeyProbe<'_>, local_for: Duration) -> Option<(Arc<LocalCopy>, Instant)> {
        self.served(|copies| copies.find(probe), local_for)
    }

    #[inline]
    fn served(
        &self,
        look_up: impl FnOnce(&Copies) -> Option<Arc<LocalCopy>>,
        local_for: Duration,
    ) -> Option<(Arc<LocalCopy>, Instant)> {
        let until = self.right.until();
        let copy = look_up(&self.copies)?;
        let instant = Instant::now();
        let now = self.clock.at(instant);
        if !self.is_requested.load(Ordering::Relaxed) {
            self.is_requested.store(true, Ordering::Relaxed);
        }
        let is_served = now < until
            && !self.tickets.is_void(&copy.ticket)
            && now.saturating_sub(copy.made_at) < micros(local_for);
        is_served.then_some((copy, instant))
    }

    /// The copy of `key` while the store does not answer: until `while_down` after the last right ended, and until the copy is
    /// `local_for + while_down` old.
    pub(crate) fn copy_while_down(
        &self,
        key: &Key,
        local_for: Duration,
        while_down: Duration,
    ) -> Option<Arc<LocalCopy>> {
        let last = self.right.last();
        let copy = self.copies.get(key)?;
        let now = self.clock.at(Instant::now());
        let is_served = last > 0
            && now < last.saturating_add(micros(while_down))
            && now.saturating_sub(copy.made_at) < micros(local_for.saturating_add(while_down))
            && !self.tickets.is_void(&copy.ticket);
        is_served.then_some(copy)
    }

    /// A ticket for an answer that may become a copy. Must be taken before the question is sent. Starts the renewal of the right.
    pub(crate) fn ticket(self: &Arc<Self>, key: &Key, tags: &[Key]) -> Ticket {
        self.is_requested.store(true, Ordering::Relaxed);
        self.renew();
        self.tickets.take(key, tags)
    }

    /// Adds further tags to a ticket, before their ids are read.
    pub(crate) fn add_tags(&self, ticket: &mut Ticket, tags: &[Key]) {
        self.tickets.add(ticket, tags);
    }

    /// Keeps a copy, unless its ticket is void.
    pub(crate) fn fill(&self, key: &Key, entry: &Arc<StoredEntry>, ticket: Ticket) {
        if self.tickets.is_void(&ticket) {
            return;
        }
        let made_at = self.clock.at(Instant::now());
        self.copies.insert(key, LocalCopy { entry: Arc::clone(entry), ticket, made_at });
        self.count(GuardCount::local_fills);
    }

    /// Keeps a copy of what this node has stored, unless its ticket is void. A read that began before may hold an older value: it
    /// leaves no copy from here on.
    pub(crate) fn fill_stored(&self, key: &Key, entry: &Arc<StoredEntry>, ticket: Ticket) {
        match self.tickets.succeed(key, ticket) {
            Some(ticket) => self.fill(key, entry, ticket),
            // The copy that is there, or on its way, may be older.
            None => self.forget(&ChangedName::value(key)),
        }
    }

    /// Takes the copies of a name out of use, also those that are still on their way. The caller drops what this returns after it has
    /// released its locks and sent its answer: the `drop` of a user's value may be slow.
    #[must_use]
    pub(super) fn drop_name(&self, name: &ChangedName) -> Option<Arc<LocalCopy>> {
        self.tickets.void(name);
        self.count(GuardCount::local_drops);
        match name {
            // A copy of a long key is under another hash; it is void, and leaves when there is no room.
            ChangedName::Value(name) => self.copies.remove(&Key::of_name(name)),
            ChangedName::Tag(_) => None,
        }
    }

    /// Drops this node's copies of a key or a tag, for a change that is not awaited.
    pub(crate) fn forget(&self, name: &ChangedName) {
        drop(self.drop_name(name));
    }

    /// Drops all of this node's copies, also those that are still on their way.
    pub(crate) fn forget_all(&self) {
        self.tickets.void_all();
    }

    /// Moves the mark over an announcement of this node, which has been applied.
    pub(super) fn follow(&self, audience: &Audience) {
        lock(&self.applied).follow(audience.before, audience.at);
    }

    /// Gives up the right for good.
    pub(crate) fn give_up(&self) {
        let mut applied = lock(&self.applied);
        applied.has_left = true;
        // No announcement is awaited from this node any more, so no copy may stand in for a look-up that fails.
        self.right.end();
        self.renews.notify_one();
    }

    /// Sends LEAVE, after the right has ended for good.
    pub(crate) async fn leave(&self, within: Duration) {
        let until = Instant::now() + within;
        // A RENEW that is on its way makes a membership that must end, too. The wait is bounded: a RENEW of a runtime that is not driven
        // never ends.
        let _ = timeout(within / 2, self.renewing.write()).await;
        let (answered, sent) = (lock(&self.applied).stamp, self.stamps.load(Ordering::Relaxed));
        let left = || until.saturating_duration_since(Instant::now());
        self.end_membership(answered, left()).await;
        if sent > answered {
            self.end_membership(sent, left()).await;
        }
    }

    /// Removes only the membership that the RENEW with this stamp has made, because this may run late.
    pub(super) async fn end_membership(&self, stamp: u64, within: Duration) {
        if stamp > 0 {
            let member = Member { node: self.store.node(), stamp };
            let removed = self.store.remove_member(&self.volume, member, within);
            // If it fails, the next announcement finds out and removes the member.
            let _ = timeout(within, removed).await;
        }
    }

    /// The local tier's part of the guard's health, if this guard keeps copies.
    pub(crate) fn health(&self) -> Option<LocalTierHealth> {
        let now = self.clock.at(Instant::now());
        self.is_in_use().then(|| LocalTierHealth {
            copies: self.copies.len(),
            bytes: self.copies.bytes(),
            capacity: self.copies.capacity(),
            lease_remaining: Duration::from_micros(self.right.until().saturating_sub(now)),
        })
    }

    pub(super) fn count(&self, count: GuardCount) {
        self.counters.add(count);
    }
}

impl Applied {
    /// An announcement moves the mark if it follows it.
    fn follow(&mut self, before: Uuid, at: LogPosition) {
        if let Some(mark) = self.mark.as_mut().filter(|mark| mark.at.id == before) {
            mark.at = at;
        }
    }
}

impl VolumeListener for LocalTier {
    fn announced(&self, announcement: &ReceivedAnnouncement) {
        let ReceivedAnnouncement { number, before, record } = announcement;
        let dropped = {
            let mut applied = lock(&self.applied);
            let dropped = self.drop_name(&record.name);
            applied.follow(*before, LogPosition { number: *number, id: record.id });
            dropped
        };
        // After the copy is out of use: the announcer may return to its caller as soon as this arrives.
        self.store.acknowledge(record.announcer, record.id);
        drop(dropped);
    }

    fn acknowledged(&self, id: Uuid, by: Uuid) {
        self.pending.acknowledged(id, by);
    }

    fn missed(&self) {
        self.renews.notify_one();
    }
}
