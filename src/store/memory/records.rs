//! The data of a memory store, and when it is dropped. Plain data under one lock.
//!
//! [`KeyRecords`] has the entries, leases, queues and outcomes of all keys. An [`ExpiringMap`] has small values, each
//! with a lifetime, and is bounded in bytes: the least recently used go first.
//!
//! Expired entries and outcomes are dropped at each step that reads a key. A map is swept for other expired data each time it has
//! doubled ([`Sweep`]), so that the sweeps cost a constant share of each step.
//!
//! [`Volumes`] has the registries and logs of a memory store's volumes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use crate::key::Key;
use crate::store::protocol::{
    Announcement, Audience, ChangedName, Fail, ListMember, LogPosition, LogRecord, Mark, Member,
    ReceivedAnnouncement, RegistryState, Renewal, Renewed, TagState, Token, VolumeListener,
};

/// The maps' overhead per entry or outcome, beside its bytes and its two copies of the name: a slot of the map of records when that
/// is least filled, and one of the expiry index. Measured:
/// `memory::a_store_full_of_small_values_takes_no_more_than_its_capacity`.
const AROUND_RECORD: usize = 480;

/// The bytes of an entry or an outcome with its overhead.
fn cost(name: &str, bytes: &Bytes) -> usize {
    bytes.len() + 2 * name.len() + AROUND_RECORD
}

/// When a value expires. The number distinguishes values that expire at the same instant.
type ExpiryIndex = (Instant, u64);

#[derive(Default)]
pub(super) struct KeyRecords {
    pub(super) by_name: HashMap<Box<str>, KeyRecord>,
    /// Entries by expiry, for eviction and for dropping expired ones.
    pub(super) by_expiry: BTreeMap<ExpiryIndex, Box<str>>,
    /// Outcomes of failed loads by expiry.
    pub(super) left_by_expiry: BTreeMap<ExpiryIndex, Box<str>>,
    /// The bytes of entries and outcomes, with their overhead.
    pub(super) bytes: usize,
    serial: u64,
    /// How many bytes may be in use.
    pub(super) capacity: usize,
    /// When `by_name` is next swept, for expired leases and queues of keys that are not used again.
    next_sweep: Sweep,
    /// The ids of tags.
    pub(super) tags: ExpiringMap<TagState>,
    pub(super) lists: ExpiringMap<Vec<ListMember>>,
    /// By name and node, the number of the latest attempt that voids earlier ones.
    pub(super) voided: ExpiringMap<u64>,
}

#[derive(Clone, Default)]
pub(super) struct KeyRecord {
    pub(super) entry: Option<(Bytes, ExpiryIndex)>,
    pub(super) lease: Option<(Token, Instant)>,
    pub(super) queue: VecDeque<Token>,
    pub(super) queue_until: Option<Instant>,
    /// Boxed, because few records have one.
    pub(super) ending: Option<Box<FailedLoad>>,
}

/// The outcome that a failed load left for its waiters.
#[derive(Clone)]
pub(super) struct FailedLoad {
    pub(super) by: Token,
    pub(super) outcome: Bytes,
    pub(super) at: ExpiryIndex,
    pub(super) replay_until: Instant,
}

impl KeyRecords {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Drops the entries and outcomes that have expired.
    pub(super) fn sweep(&mut self, now: Instant) {
        while let Some(name) = expired(&mut self.by_expiry, now) {
            self.forget_entry(&name);
        }
        while let Some(name) = expired(&mut self.left_by_expiry, now) {
            self.forget_left(&name);
        }
    }

    pub(super) fn forget_entry(&mut self, name: &str) {
        let Some(record) = self.by_name.get_mut(name) else { return };
        if let Some((entry, at)) = record.entry.take() {
            self.bytes -= cost(name, &entry);
            self.by_expiry.remove(&at);
        }
        self.tidy(name);
    }

    pub(super) fn forget_left(&mut self, name: &str) {
        let Some(record) = self.by_name.get_mut(name) else { return };
        if let Some(left) = record.ending.take() {
            self.bytes -= cost(name, &left.outcome);
            self.left_by_expiry.remove(&left.at);
        }
        self.tidy(name);
    }

    /// Drops the key's record, if it is empty.
    pub(super) fn tidy(&mut self, name: &str) {
        if self.by_name.get(name).is_some_and(KeyRecord::is_empty) {
            self.by_name.remove(name);
        }
    }

    pub(super) fn set_entry(&mut self, name: &str, entry: Bytes, keep: Duration) {
        self.forget_entry(name);
        if self.make_room(cost(name, &entry)) {
            let at = self.next(Instant::now() + keep);
            self.put_entry(name, entry, at);
        }
    }

    pub(super) fn put_entry(&mut self, name: &str, entry: Bytes, at: ExpiryIndex) {
        self.bytes += cost(name, &entry);
        self.by_expiry.insert(at, name.into());
        self.by_name.entry(name.into()).or_default().entry = Some((entry, at));
    }

    /// Stores the outcome of a failed load for its waiters.
    pub(super) fn set_left(&mut self, name: &str, fail: &Fail<'_>) {
        self.forget_left(name);
        let (by, outcome) = (fail.token.clone(), fail.outcome.clone());
        if self.make_room(cost(name, &outcome)) {
            let now = Instant::now();
            let at = self.next(now + fail.keep);
            self.put_left(name, FailedLoad { by, outcome, at, replay_until: now + fail.replay });
        }
    }

    pub(super) fn put_left(&mut self, name: &str, left: FailedLoad) {
        self.bytes += cost(name, &left.outcome);
        self.left_by_expiry.insert(left.at, name.into());
        self.by_name.entry(name.into()).or_default().ending = Some(Box::new(left));
    }

    /// Makes room for `size` bytes; false if they exceed the capacity. Entries are dropped before outcomes: waiters whose outcome was
    /// dropped would all load at once. Ids, lists and numbers of attempts have their own bounds, and are dropped only for a value that
    /// is larger than the rest of the store.
    pub(super) fn make_room(&mut self, size: usize) -> bool {
        if size > self.capacity {
            return false;
        }
        while self.used() + size > self.capacity {
            if let Some((_, name)) = self.by_expiry.pop_first() {
                self.forget_entry(&name);
            } else if let Some((_, name)) = self.left_by_expiry.pop_first() {
                self.forget_left(&name);
            } else if !self.tags.drop_one() && !self.lists.drop_one() && !self.voided.drop_one() {
                break;
            }
        }
        true
    }

    pub(super) fn used(&self) -> usize {
        self.bytes + self.tags.bytes() + self.lists.bytes() + self.voided.bytes()
    }

    pub(super) fn next(&mut self, moment: Instant) -> ExpiryIndex {
        self.serial += 1;
        (moment, self.serial)
    }

    /// The key's record without its expired parts, created if there is none.
    pub(super) fn record(&mut self, name: &str) -> &mut KeyRecord {
        let now = Instant::now();
        self.sweep(now);
        if self.next_sweep.is_due(self.by_name.len()) {
            self.by_name.retain(|_, record| {
                record.expire(now);
                !record.is_empty()
            });
            self.next_sweep.done(self.by_name.len());
        }
        let record = self.by_name.entry(name.into()).or_default();
        record.expire(now);
        record
    }

    /// Ends the lease if it is `token`'s; returns whether it was.
    pub(super) fn end_lease(&mut self, name: &str, token: &Token) -> bool {
        self.record(name).lease.take_if(|(holder, _)| holder == token).is_some()
    }
}

/// Removes and returns the first name that has expired.
fn expired(by_expiry: &mut BTreeMap<ExpiryIndex, Box<str>>, now: Instant) -> Option<Box<str>> {
    let first = by_expiry.first_entry()?;
    (first.key().0 <= now).then(|| first.remove())
}

impl KeyRecord {
    /// Adds the token to the queue, unless it is there, and keeps the queue for twice `longest`, the time that a waiter may sleep.
    pub(super) fn queue(&mut self, token: &Token, now: Instant, longest: Duration) {
        if !self.queue.contains(token) {
            self.queue.push_back(token.clone());
        }
        let keep = longest.saturating_mul(2).saturating_add(Duration::from_secs(1));
        self.queue_until = Some(later(now, keep));
    }

    /// Drops an expired lease or queue. Entry and outcome are dropped by [`KeyRecords::sweep`].
    fn expire(&mut self, now: Instant) {
        self.lease.take_if(|(_, until)| *until <= now);
        if self.queue_until.take_if(|until| *until <= now).is_some() {
            self.queue.clear();
        }
    }

    fn is_empty(&self) -> bool {
        let Self { entry, lease, queue, queue_until: _, ending } = self;
        entry.is_none() && lease.is_none() && queue.is_empty() && ending.is_none()
    }

    #[cfg(test)]
    pub(super) fn bytes(&self, name: &str) -> usize {
        let entry = self.entry.as_ref().map(|(entry, _)| cost(name, entry));
        let left = self.ending.as_ref().map(|left| cost(name, &left.outcome));
        entry.unwrap_or_default() + left.unwrap_or_default()
    }
}

/// The overhead of each value in an [`ExpiringMap`], beside the value's bytes and the two copies of the value's name.
pub(super) const AROUND: usize = 320;

pub(super) struct ExpiringMap<V> {
    by_name: HashMap<Box<str>, ExpiringValue<V>>,
    /// The order in which values are dropped when there is no room.
    by_turn: BTreeMap<u64, Box<str>>,
    turns: u64,
    /// The bytes of all values, of both copies of their names, and of the overhead per value.
    bytes: usize,
    next_sweep: Sweep,
}

struct ExpiringValue<V> {
    value: V,
    bytes: usize,
    until: Instant,
    turn: u64,
    /// Whether the value was used since it got this turn. If so, it gets a new turn instead of being dropped. A new turn at
    /// each use would make every reader pay for a change of the map.
    was_used: bool,
}

impl<V> Default for ExpiringMap<V> {
    fn default() -> Self {
        let next_sweep = Sweep::default();
        Self { by_name: HashMap::new(), by_turn: BTreeMap::new(), turns: 0, bytes: 0, next_sweep }
    }
}

impl<V> ExpiringMap<V> {
    fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn get(&mut self, name: &str) -> Option<&mut V> {
        let entry = self.live(name, Instant::now())?;
        entry.was_used = true;
        Some(&mut entry.value)
    }

    /// As [`get`](Self::get), and extends the value's lifetime to at least this moment.
    pub(super) fn get_until(&mut self, name: &str, until: Instant) -> Option<&mut V> {
        let entry = self.live(name, Instant::now())?;
        (entry.was_used, entry.until) = (true, entry.until.max(until));
        Some(&mut entry.value)
    }

    fn live(&mut self, name: &str, now: Instant) -> Option<&mut ExpiringValue<V>> {
        self.by_name.get_mut(name).filter(|entry| entry.until > now)
    }

    /// Drops values until `bytes` more fit into `most`; false if they do not even fit into an empty map.
    pub(super) fn make_room(&mut self, bytes: usize, most: usize) -> bool {
        if self.next_sweep.is_due(self.by_name.len()) {
            self.forget_expired();
        }
        while self.bytes + bytes > most && self.drop_one() {}
        self.bytes + bytes <= most
    }

    fn forget_expired(&mut self) {
        let now = Instant::now();
        let Self { by_name, by_turn, bytes, next_sweep, .. } = self;
        by_name.retain(|_, entry| {
            let stays = entry.until > now;
            if !stays {
                by_turn.remove(&entry.turn);
                *bytes -= entry.bytes;
            }
            stays
        });
        next_sweep.done(by_name.len());
    }

    pub(super) fn put(&mut self, name: &str, value: V, bytes: usize, until: Instant) {
        self.remove(name);
        self.turns += 1;
        let turn = self.turns;
        self.bytes += bytes;
        self.by_turn.insert(turn, name.into());
        self.by_name.insert(name.into(), ExpiringValue { value, bytes, until, turn, was_used: false });
    }

    /// Counts bytes that were added to a value.
    pub(super) fn grown(&mut self, name: &str, bytes: usize) {
        if let Some(entry) = self.by_name.get_mut(name) {
            entry.bytes += bytes;
            self.bytes += bytes;
        }
    }

    pub(super) fn remove(&mut self, name: &str) {
        if let Some(entry) = self.by_name.remove(name) {
            self.by_turn.remove(&entry.turn);
            self.bytes -= entry.bytes;
        }
    }

    /// Drops the value with the earliest turn among those that were not used since, or have expired; false if the map is empty.
    fn drop_one(&mut self) -> bool {
        let now = Instant::now();
        while let Some((_, name)) = self.by_turn.pop_first() {
            match self.by_name.get_mut(&name) {
                Some(entry) if entry.was_used && entry.until > now => {
                    self.turns += 1;
                    (entry.was_used, entry.turn) = (false, self.turns);
                    self.by_turn.insert(entry.turn, name);
                }
                _ => {
                    self.remove(&name);
                    return true;
                }
            }
        }
        false
    }
}

/// The moment `duration` after `now`, or one so late that it stands for never.
pub(super) fn later(now: Instant, duration: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(1 << 40);
    now + duration.min(NEVER)
}

pub(super) struct Sweep {
    at: usize,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { at: Self::LEAST }
    }
}

impl Sweep {
    const LEAST: usize = 64;

    pub(super) fn is_due(&self, len: usize) -> bool {
        len >= self.at
    }

    pub(super) fn done(&mut self, left: usize) {
        self.at = (left * 2).max(Self::LEAST);
    }
}

/// How many announcements a log keeps.
const LOG_LENGTH: usize = 1_024;

/// All volumes of a memory store, and the listeners of its nodes.
#[derive(Default)]
pub(super) struct Volumes {
    pub(super) by_name: Mutex<HashMap<Box<str>, Volume>>,
    pub(super) listeners: Mutex<HashMap<Uuid, Weak<dyn VolumeListener>>>,
}

/// One volume: its registry and its log, each of which may be missing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Volume {
    pub(super) registry: Option<Registry>,
    pub(super) log: VecDeque<LogEntry>,
    journal: Option<Journal>,
}

/// The journal of a volume's tags, see `journal.lua`.
#[derive(Clone, Debug)]
struct Journal {
    until: Instant,
    numbers: HashMap<Event, u64>,
    /// The latest events, by their numbers.
    events: BTreeMap<u64, Event>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    LoadBegan(Uuid),
    TagInvalidated(Box<str>),
}

impl Journal {
    const MOST_EVENTS: usize = 16_384;

    fn new() -> Self {
        Self { until: Instant::now(), numbers: HashMap::new(), events: BTreeMap::new() }
    }

    fn note(&mut self, event: Event) {
        let number = self.events.last_key_value().map_or(1, |(latest, _)| latest + 1);
        if let Some(earlier) = self.numbers.insert(event.clone(), number) {
            self.events.remove(&earlier);
        }
        self.events.insert(number, event);
        // As in the script: by numbers, so that a tag that is invalidated again and again removes the loads before it as well.
        while let Some(first) = self.events.first_entry()
            && *first.key() + Self::MOST_EVENTS as u64 <= number
        {
            self.numbers.remove(&first.remove());
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Registry {
    state: RegistryState,
    number: u64,
    /// In the order in which they joined, so that equal runs of a simulation notify them in equal orders.
    pub(super) members: Vec<Member>,
}

#[derive(Clone, Debug)]
pub(super) struct LogEntry {
    at: LogPosition,
    /// `None` for the base entry of a log that was made anew.
    record: Option<LogRecord>,
}

/// A random id, which a simulation with the same seed gets again.
fn random_id() -> Uuid {
    Uuid::from_u128(fastrand::u128(..))
}

impl Volume {
    fn journal(&mut self) -> Option<&mut Journal> {
        let now = Instant::now();
        self.journal.take_if(|journal| journal.until < now);
        self.journal.as_mut()
    }

    pub(super) fn enter_load(&mut self, load: Uuid, life: Duration) {
        self.journal();
        let journal = self.journal.get_or_insert_with(Journal::new);
        journal.note(Event::LoadBegan(load));
        journal.until = journal.until.max(later(Instant::now(), life));
    }

    pub(super) fn note_tag(&mut self, tag: &str) {
        if let Some(journal) = self.journal() {
            journal.note(Event::TagInvalidated(tag.into()));
        }
    }

    pub(super) fn no_tag_since(&self, load: Uuid, tags: &[Key]) -> bool {
        let Some(journal) = self.journal.as_ref().filter(|journal| journal.until >= Instant::now()) else {
            return false;
        };
        let number = |event| journal.numbers.get(&event).copied();
        let invalidated = |tag: &Key| number(Event::TagInvalidated(tag.name().into()));
        number(Event::LoadBegan(load))
            .is_some_and(|began| tags.iter().all(|tag| invalidated(tag) < Some(began)))
    }

    /// The registry and the log, each created if it is missing. A new log has a base entry.
    fn ensure(
        &mut self,
        known_registry: Option<Uuid>,
        term: Duration,
    ) -> (&mut Registry, &mut VecDeque<LogEntry>) {
        if self.registry.is_none() {
            self.log.clear();
        }
        let new_registry = || {
            let state = RegistryState { registry_id: random_id(), is_mature: false, term };
            Registry { state, number: 0, members: Vec::new() }
        };
        let registry = self.registry.get_or_insert_with(new_registry);
        registry.state.is_mature |= known_registry == Some(registry.state.registry_id);
        if self.log.is_empty() {
            let at = LogPosition { number: registry.number, id: random_id() };
            self.log.push_back(LogEntry { at, record: None });
        }
        (registry, &mut self.log)
    }

    pub(super) fn renew(&mut self, node: Uuid, renewal: Renewal) -> Renewed {
        let (registry, log) = self.ensure(renewal.known_registry, renewal.term);
        match registry.members.iter_mut().find(|member| member.node == node) {
            Some(member) => member.stamp = renewal.stamp,
            None => registry.members.push(Member { node, stamp: renewal.stamp }),
        }
        registry.state.term = registry.state.term.max(renewal.term);
        let marked = renewal.mark.and_then(|mark| log.iter().position(|entry| entry.at == mark.at));
        let announced =
            marked.map(|at| log.range(at + 1..).filter_map(|entry| entry.record.clone()).collect());
        let at = log.back().map_or(LogPosition { number: 0, id: Uuid::nil() }, |newest| newest.at);
        let session = renewal.mark.map_or(0, |mark| mark.session);
        Renewed { registry: registry.state, announced, newest: Mark { at, session } }
    }

    pub(super) fn announce(
        &mut self,
        announcer: Uuid,
        announcement: &Announcement,
        name: &ChangedName,
    ) -> Option<(Audience, ReceivedAnnouncement)> {
        if self.registry.is_none() && !announcement.creates {
            return None;
        }
        let (registry, log) = self.ensure(announcement.known_registry, announcement.term);
        registry.number += 1;
        let at = LogPosition { number: registry.number, id: announcement.id };
        let before = log.back().map_or(Uuid::nil(), |newest| newest.at.id);
        let record = LogRecord { id: announcement.id, announcer, name: name.clone() };
        log.push_back(LogEntry { at, record: Some(record.clone()) });
        if log.len() > LOG_LENGTH {
            log.pop_front();
        }
        let members = registry.members.iter().filter(|member| member.node != announcer).copied().collect();
        let audience = Audience { registry: registry.state, at, before, members };
        Some((audience, ReceivedAnnouncement { number: at.number, before, record }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn in_a_second() -> Instant {
        Instant::now() + SECOND
    }

    #[tokio::test(start_paused = true)]
    async fn the_sum_of_bytes_follows_every_change() {
        let mut map = ExpiringMap::default();
        map.put("a", 1, 10, in_a_second());
        map.put("b", 2, 20, in_a_second() + SECOND);
        map.grown("a", 5);
        map.grown("nothing", 5);
        assert_eq!(map.bytes(), 35);
        map.put("a", 3, 7, in_a_second());
        assert_eq!(map.bytes(), 27);
        assert!(map.drop_one());
        assert_eq!(map.get("b"), None, "it has been there for longer");
        assert_eq!(map.bytes(), 7);
        map.grown("a", 5);
        map.remove("a");
        assert_eq!(map.bytes(), 0);
        assert!(!map.drop_one());
    }

    #[tokio::test(start_paused = true)]
    async fn expired_values_are_removed_before_a_live_one_is_dropped() {
        let mut map = ExpiringMap::default();
        map.put("stays", 0, 10, in_a_second() + SECOND);
        for number in 0..100 {
            map.put(&number.to_string(), number, 10, in_a_second());
        }
        tokio::time::advance(SECOND).await;
        assert!(map.make_room(10, 1_010));
        assert_eq!((map.len(), map.bytes()), (1, 10));
        assert_eq!(map.get("stays"), Some(&mut 0));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_dropped_for_a_value_that_fits() {
        let mut map = ExpiringMap::default();
        map.put("a", 1, 10, in_a_second());
        assert!(map.make_room(10, 20));
        assert_eq!(map.len(), 1);
        assert!(map.make_room(11, 20));
        assert_eq!(map.len(), 0);
        assert!(!map.make_room(21, 20));
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_is_missing_from_the_moment_it_expires() {
        let mut map = ExpiringMap::default();
        map.put("a", 1, 10, in_a_second());
        map.put("b", 2, 10, in_a_second());
        assert!(map.get("a").is_some());
        assert!(map.get_until("b", in_a_second() + SECOND).is_some());
        map.put("c", 3, 10, in_a_second() + SECOND);
        tokio::time::advance(SECOND).await;
        assert_eq!(map.get("a"), None);
        assert_eq!(map.get("b"), Some(&mut 2), "its life was prolonged");
        // A use during its lifetime does not keep a value beyond it.
        assert!(map.drop_one());
        assert_eq!(map.get("c"), Some(&mut 3));
        assert_eq!(map.len(), 2);
    }
}
