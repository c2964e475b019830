//! The local tier: copies of values in this process's memory, under a volume lease.
//!
//! A node serves a copy only under its *right*, a moment of its own monotonic clock that RENEW alone moves. A change is announced to all
//! nodes that may have a right, and is acknowledged to its caller when each of them has dropped its copies or must have lost its
//! right. No step needs a message to arrive; messages only make the steps fast. Every guard announces its changes, also a guard that
//! keeps no copies. docs/decisions/401-local-tier.md has the steps and the proof.
//!
//! This file has one guard's membership in its volume ([`LocalTier`]), and the state that the steps share: the registries that this
//! process knows and since when ([`KnownRegistries`]), the acknowledgements of its announcements ([`PendingAnnouncements`]), and its
//! right to serve from memory ([`Right`]).

mod announcing;
mod copies;
mod renewal;
#[cfg(feature = "http")]
pub(crate) mod room;

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use quick_cache::Equivalent;
use tokio::sync::{Notify, RwLock};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

pub(crate) use self::announcing::AnnouncedChange;
use self::copies::{Copies, Moment, Tickets, copies};
pub(crate) use self::copies::{LocalCopy, Ticket};
use crate::health::LocalTierHealth;
use crate::key::Key;
use crate::observe::{Counters, GuardCount, LogEveryMinute};
use crate::store::protocol::{
    Audience, ChangedName, LogPosition, Mark, Member, ReceivedAnnouncement, RegistryState, VolumeListener,
};
use crate::store::{Attempts, Store};
use crate::sync::lock;
use crate::value::StoredEntry;

/// How long a volume lease lasts unless the builder says otherwise.
pub(crate) const DEFAULT_TERM: Duration = Duration::from_secs(2);
/// How many bytes of copies a process keeps unless the builder says otherwise.
pub(crate) const DEFAULT_CAPACITY: u64 = 64 * 1024 * 1024;

/// One guard's membership in its volume, and its copies.
pub(crate) struct LocalTier {
    /// The key of the volume.
    volume: Key,
    store: Store,
    counters: Arc<Counters>,
    term: Duration,
    clock: NodeClock,
    right: Right,
    tickets: Tickets,
    copies: Copies,
    /// Has the responses that threads serve often (`http/answer.rs`).
    #[cfg(feature = "http")]
    room: room::RoomBesideCopies,
    known_registries: KnownRegistries,
    pending: PendingAnnouncements,
    /// The attempts at this node's changes.
    attempts: Attempts,
    /// Until when a task waits for silent members instead of a caller that has left.
    finishes_until: AtomicU64,
    /// Up to where this node has applied the log of announcements. Locked while the answer to a RENEW or a message is applied.
    applied: Mutex<Applied>,
    /// Whether a policy of this guard keeps copies.
    in_use: AtomicBool,
    /// Whether a caller has requested a copy since the last RENEW.
    is_requested: AtomicBool,
    /// Until when the renewal task counts as running; zero if there is none.
    renews_until: AtomicU64,
    /// The number of the latest renewal task.
    renewer: AtomicU64,
    /// Makes the renewal task renew at once.
    renews: Arc<Notify>,
    stamps: AtomicU64,
    /// Read-locked by each RENEW that is on its way.
    renewing: RwLock<()>,
    lapse_log: LogEveryMinute,
}

/// What this node has applied of the log of announcements.
#[derive(Debug, Default)]
struct Applied {
    mark: Option<Mark>,
    /// The highest stamp of a RENEW that was answered.
    stamp: u64,
    /// Whether the guard was shut down, after which no RENEW extends the right.
    has_left: bool,
}

impl LocalTier {
    /// The key of the volume, which is also that of the journal of tags.
    pub(crate) fn volume(&self) -> &Key {
        &self.volume
    }

    pub(crate) fn new(
        namespace: &str,
        store: Store,
        counters: Arc<Counters>,
        capacity: u64,
        term: Duration,
    ) -> Arc<Self> {
        let tier = Arc::new(Self {
            // No other key has this name, because an empty key is refused.
            volume: Key::of_name(&format!("{namespace}:")),
            store,
            counters,
            term,
            clock: NodeClock::new(),
            right: Right::default(),
            tickets: Tickets::new(),
            copies: copies(capacity),
            #[cfg(feature = "http")]
            room: room::RoomBesideCopies::of(capacity),
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

    /// Room for `bytes` beside the copies, if there is so much.
    #[cfg(feature = "http")]
    pub(crate) fn room(&self, bytes: u64) -> Option<room::Room> {
        self.room.take(bytes, &self.copies)
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
    /// `key` is the key or its probe. Sends nothing. The order of the three steps is part of the proof: the right, the copy, the clock.
    #[inline]
    pub(crate) fn copy(
        &self,
        key: &(impl Hash + Equivalent<Key>),
        local_for: Duration,
    ) -> Option<(Arc<LocalCopy>, Instant)> {
        let until = self.right.until();
        let copy = self.copies.get(key)?;
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

    /// Whether the copy of `key` may be served. Unlike [`copy`](Self::copy) this is no request, so it renews no lease.
    pub(crate) fn has_copy(&self, key: &Key) -> bool {
        let is_current = self.clock.at(Instant::now()) < self.right.until();
        is_current && self.copies.peek(key).is_some_and(|copy| !self.tickets.is_void(&copy.ticket))
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

    /// A ticket for an answer that may become a copy. Must be taken before the command is sent. Starts the renewal of the right.
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
        self.copies.insert(key.clone(), Arc::new(LocalCopy { entry: Arc::clone(entry), ticket, made_at }));
        self.count(GuardCount::local_fills);
    }

    /// Keeps a copy of a value that this node has stored, unless its ticket is void. A read that began before the commit may have an
    /// older value: from here on such a read leaves no copy.
    pub(crate) fn fill_stored(&self, key: &Key, entry: &Arc<StoredEntry>, ticket: Ticket) {
        match self.tickets.succeed(key, ticket) {
            Some(ticket) => self.fill(key, entry, ticket),
            // The present copy, or one that a read is about to make, may be older.
            None => self.forget(&ChangedName::value(key)),
        }
    }

    /// Takes the copies of a name out of use, also those that are still on their way. The caller drops what this returns after it has
    /// released its locks and sent its answer: the `drop` of a user's value may be slow.
    #[must_use]
    fn drop_name(&self, name: &ChangedName) -> Option<Arc<LocalCopy>> {
        self.tickets.void(name);
        self.count(GuardCount::local_drops);
        match name {
            // A copy of a long key is under another hash; it is void, and leaves when there is no room.
            ChangedName::Value(name) => self.copies.remove(&Key::of_name(name)).map(|(_, copy)| copy),
            ChangedName::Tag(_) => None,
        }
    }

    /// Drops this node's copies of a key or a tag. Announces nothing to other nodes.
    pub(crate) fn forget(&self, name: &ChangedName) {
        drop(self.drop_name(name));
    }

    /// Drops all of this node's copies, also those that reads on their way would make.
    pub(crate) fn forget_all(&self) {
        self.tickets.void_all();
    }

    /// Moves the mark to an announcement of this node, which has been applied here.
    fn follow(&self, audience: &Audience) {
        lock(&self.applied).follow(audience.before, audience.at);
    }

    /// Gives up the right for good, because the guard is shut down.
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
        // A RENEW that is on its way makes a further membership, which must end too. The wait is bounded: a RENEW of a runtime that is not
        // driven never ends.
        let _ = timeout(within / 2, self.renewing.write()).await;
        let (answered, sent) = (lock(&self.applied).stamp, self.stamps.load(Ordering::Relaxed));
        let left = || until.saturating_duration_since(Instant::now());
        self.end_membership(answered, left()).await;
        if sent > answered {
            self.end_membership(sent, left()).await;
        }
    }

    /// Removes only the membership that the RENEW with this stamp has made, because this may run late.
    async fn end_membership(&self, stamp: u64, within: Duration) {
        if stamp > 0 {
            let member = Member { node: self.store.node(), stamp };
            let removed = self.store.remove_member(&self.volume, member, within);
            // If this fails, the next announcement waits for the member in vain and then removes it.
            let _ = timeout(within, removed).await;
        }
    }

    /// The local tier's part of the guard's health, if this guard keeps copies.
    pub(crate) fn health(&self) -> Option<LocalTierHealth> {
        let now = self.clock.at(Instant::now());
        self.is_in_use().then(|| LocalTierHealth {
            copies: self.copies.len() as u64,
            bytes: self.copies.weight(),
            capacity: self.copies.capacity(),
            lease_remaining: Duration::from_micros(self.right.until().saturating_sub(now)),
        })
    }

    fn count(&self, count: GuardCount) {
        self.counters.guard.add(count);
    }
}

impl Applied {
    /// Moves the mark to an announcement, if the announcement directly follows the mark in the log.
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

/// How many registries are retained. More than one, because a server may come back with an older registry.
const MOST: usize = 4;

#[derive(Debug, Default)]
struct KnownRegistries {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The ids of the registries, each with the moment since which this process knows it.
    ids: Vec<(Uuid, Instant)>,
    /// The longest term that a registry of the volume has reported to this process so far.
    term: Duration,
}

impl KnownRegistries {
    /// Records the registry of a reply. Returns since when this process knows it, and the longest term.
    fn learn(&self, registry: &RegistryState) -> (Instant, Duration) {
        let mut known = lock(&self.known);
        known.term = known.term.max(registry.term);
        let term = known.term;
        if let Some((_, since)) = known.ids.iter().find(|(id, _)| *id == registry.registry_id) {
            return (*since, term);
        }
        if known.ids.len() == MOST {
            known.ids.remove(0);
        }
        let now = Instant::now();
        known.ids.push((registry.registry_id, now));
        (now, term)
    }

    /// The newest registry that this process already knew a term ago: rights that were set before it existed have ended.
    fn known_registry(&self, term: Duration) -> Option<Uuid> {
        let known = lock(&self.known);
        let term = known.term.max(term);
        known.ids.iter().rev().find(|(_, since)| since.elapsed() >= term).map(|(id, _)| *id)
    }

    /// Whether this process has seen a registry of the volume since its start.
    fn any(&self) -> bool {
        !lock(&self.known).ids.is_empty()
    }
}

/// The announcements that wait for acknowledgements.
#[derive(Debug, Default)]
struct PendingAnnouncements {
    by_id: Mutex<HashMap<Uuid, Arc<Acknowledgements>>>,
}

/// The nodes that have acknowledged an announcement, including those that did so before its reply arrived.
#[derive(Debug, Default)]
struct Acknowledgements {
    by: Mutex<HashSet<Uuid>>,
    more: Notify,
}

impl PendingAnnouncements {
    /// Collects the acknowledgements of this announcement. Must be called before it is sent.
    fn await_acknowledgements(&self, id: Uuid) {
        lock(&self.by_id).insert(id, Arc::default());
    }

    fn of(&self, id: Uuid) -> Arc<Acknowledgements> {
        lock(&self.by_id).get(&id).cloned().unwrap_or_default()
    }

    fn forget(&self, ids: &[Uuid]) {
        let mut by_id = lock(&self.by_id);
        for id in ids {
            by_id.remove(id);
        }
    }

    fn acknowledged(&self, id: Uuid, by: Uuid) {
        let acknowledgements = lock(&self.by_id).get(&id).cloned();
        if let Some(acknowledgements) = acknowledgements {
            lock(&acknowledgements.by).insert(by);
            acknowledgements.more.notify_one();
        }
    }
}

impl Acknowledgements {
    /// The members among these that have not acknowledged yet.
    fn silent(&self, members: &[Member]) -> Vec<Member> {
        let by = lock(&self.by);
        members.iter().copied().filter(|member| !by.contains(&member.node)).collect()
    }
}

/// How long a right lasts, as a part of the term. [`ANNOUNCER_WAITS`] is longer by 3 of 64 parts: the margin for clocks that run at
/// different speeds.
const RIGHT_LASTS: f64 = 60.0 / 64.0;
const ANNOUNCER_WAITS: f64 = 63.0 / 64.0;

/// For how long after the sending of a RENEW its node may serve from memory.
fn right_lasts(term: Duration) -> Duration {
    term.mul_f64(RIGHT_LASTS)
}

/// For how long after the store's answer an announcer waits for a member that stays silent: longer than any right lasts that was set
/// before that answer.
fn announcer_waits(term: Duration) -> Duration {
    term.mul_f64(ANNOUNCER_WAITS)
}

/// The moments of a node's clock as numbers, which threads share without a lock.
#[derive(Clone, Copy, Debug)]
struct NodeClock(Instant);

impl NodeClock {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn at(self, instant: Instant) -> Moment {
        let since = instant.saturating_duration_since(self.0);
        since.as_secs() * 1_000_000 + u64::from(since.subsec_micros())
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Claims a job of the process until a moment, if no claim is valid now. A claim ends by time and not with its task, because a task of
/// a runtime that is not driven never ends.
fn try_claim(claimed_until: &AtomicU64, now: Moment, until: Moment) -> bool {
    claimed_until
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |before| (before <= now).then_some(until))
        .is_ok()
}

/// Until when a node may serve from memory.
#[derive(Debug, Default)]
struct Right {
    until: AtomicU64,
    /// The latest end that the right has ever had.
    last: AtomicU64,
}

impl Right {
    /// Must be read before the copy is looked up. (The other order would serve a copy that was filled under a later right.)
    fn until(&self) -> Moment {
        self.until.load(Ordering::SeqCst)
    }

    /// When the last right ended or will end; zero if there never was one.
    fn last(&self) -> Moment {
        self.last.load(Ordering::SeqCst)
    }

    /// Must be called after the copies that the RENEW named were dropped.
    fn extend(&self, until: Moment) {
        self.last.fetch_max(until, Ordering::SeqCst);
        self.until.fetch_max(until, Ordering::SeqCst);
    }

    fn give_up(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Ends the right for good: no copy is served under it any more, not even while the store is down.
    fn end(&self) {
        self.give_up();
        self.last.store(0, Ordering::SeqCst);
    }
}
