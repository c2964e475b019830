//! [`MemoryStore`], a store in this process. It implements the whole protocol without a server: for a single process,
//! for tests, and for several guards that act as replicas.
//!
//! [`MemoryNode`] has the methods of [`Store`](super::Store) that send a command. Each step runs under one lock, like a
//! script on a server, and wakes the waiters that it has notified after the lock is released. An attempt at a change
//! is refused if a later attempt of the same node has voided it.

#[cfg(feature = "testing")]
pub(crate) mod faults;
mod locks;
pub(crate) mod records;
#[cfg(test)]
#[path = "../../../tests/unit/store/memory_tests.rs"]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use self::locks::{LockStep, LockTable};
use self::records::{AROUND, KeyRecords, later};
use self::records::{Volume, Volumes};
use super::channels::{ChannelListener, MemoryChannels};
use super::load_limit::{EndedLoad, LimitState};
use super::protocol::*;
use super::protocol::{Announced, Announcement, ChangedName, Member, Renewal, Renewed, VolumeListener};
use super::wake_leases::{Hint, LeaseWaiters, LeaseWatch};
use super::wake_locks::{LockHint, LockWaiter, LockWaiters, Notification};
use crate::health::{Breaker, Finding, Health, LinkState, Topology};
use crate::key::Key;
use crate::sync::lock;

/// An in-process store: bounded, and shared by its clones.
///
/// Guards made from clones of one `MemoryStore` coordinate like replicas on one Redis. Time is
/// Tokio's, so a test can pause and advance it.
///
/// When the store is full, the entries that expire soonest are dropped first.
///
/// # Examples
///
/// ```
/// use stampede_guard::{MemoryStore, StampedeGuard};
///
/// let store = MemoryStore::new();
/// let (one, other) = (StampedeGuard::new(store.clone()), StampedeGuard::new(store));
/// # let _ = (one, other);
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<MemoryShared>,
}

struct MemoryShared {
    started: Instant,
    started_ms: u64,
    records: Mutex<KeyRecords>,
    watches: Arc<LeaseWaiters>,
    locks: Mutex<LockTable>,
    grants: Arc<LockWaiters>,
    volumes: Volumes,
    channels: MemoryChannels,
    #[cfg(feature = "testing")]
    faults: Faults,
}

/// The faults that a test injects into a memory store.
#[cfg(feature = "testing")]
#[derive(Default)]
struct Faults {
    /// How far the store's clock is ahead of Tokio's.
    ahead_ms: std::sync::atomic::AtomicI64,
    /// Weak, because the notifier's owner holds the store.
    notifier: std::sync::OnceLock<Weak<dyn Notifier>>,
}

/// Sends a memory store's messages to its waiters, and may lose them.
#[cfg(feature = "testing")]
pub(crate) trait Notifier: Send + Sync {
    /// Notifies the waiters of a key that are not in the store's own registry, as [`LeaseWaiters::notify`] does.
    fn notify(&self, name: &str, hint: &Hint) -> bool;

    /// Delivers a message to the waiter for a lock or the holder with this token by calling `notify`, now or later, or loses it.
    fn notify_lock(
        &self,
        token: &Token,
        hint: LockHint,
        notify: &dyn Fn() -> Option<super::wake_locks::Wake>,
    ) -> Notification;
}

impl MemoryStore {
    const DEFAULT_CAPACITY: usize = 64 * 1024 * 1024;

    /// A store of up to 64 MiB.
    pub fn new() -> Self {
        Self::with_capacity(Self::DEFAULT_CAPACITY)
    }

    /// A store of up to `bytes` bytes. The limit applies to entries, the outcomes that failed loads leave for
    /// their waiters, the ids of tags, and the lists of HTTP variants, each with its name and the maps' overhead of
    /// about half a KiB. A value that is larger than the whole store is not stored.
    ///
    /// Tags use at most a quarter of the store, and so do the lists of HTTP variants. The least recently used
    /// tags and lists are dropped first; a value whose tag was dropped is a miss. The limit does not apply to leases,
    /// queues and locks in use.
    pub fn with_capacity(bytes: usize) -> Self {
        let started_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        Self {
            shared: Arc::new(MemoryShared {
                started: Instant::now(),
                started_ms,
                records: Mutex::new(KeyRecords::new(bytes)),
                watches: Arc::default(),
                locks: Mutex::default(),
                grants: Arc::default(),
                volumes: Volumes::default(),
                channels: MemoryChannels::default(),
                #[cfg(feature = "testing")]
                faults: Faults::default(),
            }),
        }
    }

    /// The number of entries that have not expired.
    pub fn len(&self) -> usize {
        let mut records = self.records();
        records.sweep(Instant::now());
        records.by_expiry.len()
    }

    /// Whether every entry has expired, or there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This store as one node sees it.
    pub(crate) fn into_node(self) -> MemoryNode {
        MemoryNode { store: self, node: Uuid::new_v4(), closed: AtomicBool::new(false) }
    }

    fn records(&self) -> MutexGuard<'_, KeyRecords> {
        lock(&self.shared.records)
    }
}

impl MemoryShared {
    fn clock_at(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.started);
        // This runs on every hit, and `as_millis` would divide a number of 128 bits.
        let now = self.started_ms + since.as_secs() * 1000 + u64::from(since.subsec_millis());
        #[cfg(feature = "testing")]
        let now = now.saturating_add_signed(self.faults.ahead_ms.load(Ordering::Relaxed));
        now
    }

    /// Notifies the waiters of a key, as [`LeaseWaiters::notify`] does.
    fn notify(&self, name: &str, hint: &Hint) -> bool {
        let is_received = self.watches.notify(name, hint);
        #[cfg(feature = "testing")]
        let is_received = self.notifier().is_some_and(|to| to.notify(name, hint)) || is_received;
        is_received
    }

    /// Notifies a waiter for a lock, or a holder.
    fn notify_lock(&self, token: &Token, hint: LockHint) -> Notification {
        #[cfg(feature = "testing")]
        if self.grants.is_registered(token)
            && let Some(to) = self.notifier()
        {
            return to.notify_lock(token, hint, &|| self.grants.notify(token, hint));
        }
        let wake = self.grants.notify(token, hint);
        (wake.is_some(), wake)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

debug_as!(self: MemoryStore { capacity: self.records().capacity });

/// A [`MemoryStore`] with the identity of one node.
pub(crate) struct MemoryNode {
    store: MemoryStore,
    node: Uuid,
    /// Once closed, lock commands fail. A closed guard sends no other commands.
    closed: AtomicBool,
}

impl MemoryNode {
    /// Empties the key's queue and wakes all its waiters, as the last part of a step.
    fn wake(&self, mut records: MutexGuard<'_, KeyRecords>, key: &Key, hint: &Hint) {
        if let Some(record) = records.by_name.get_mut(key.name()) {
            record.queue.clear();
        }
        records.tidy(key.name());
        drop(records);
        self.store.shared.notify(key.name(), hint);
    }

    /// Ends the lease if it is the token's: then also changes the records by `end`, and wakes all waiters of the key.
    fn end_lease(
        &self,
        key: &Key,
        token: &Token,
        end: impl FnOnce(&mut KeyRecords),
    ) -> StoreResult<TokenCheck> {
        let mut records = self.store.records();
        if !records.end_lease(key.name(), token) {
            records.tidy(key.name());
            return Ok(TokenCheck::Lost);
        }
        end(&mut records);
        self.wake(records, key, &Hint::Finished(Some(token.clone())));
        Ok(TokenCheck::Held)
    }

    pub(super) fn node(&self) -> Uuid {
        self.node
    }

    pub(super) fn store_id(&self) -> u64 {
        Arc::as_ptr(&self.store.shared).addr() as u64
    }

    pub(super) fn clock_at(&self, moment: Instant) -> u64 {
        self.store.shared.clock_at(moment)
    }

    pub(super) fn look_up(&self, key: &Key) -> StoreResult<Option<Bytes>> {
        let mut records = self.store.records();
        records.sweep(Instant::now());
        let entry = records.by_name.get(key.name()).and_then(|record| record.entry.as_ref());
        Ok(entry.map(|(entry, _)| entry.clone()))
    }

    pub(super) fn acquire(&self, key: &Key, ask: Acquire<'_>) -> StoreResult<Acquired> {
        let now = Instant::now();
        let mut records = self.store.records();
        let record = records.record(key.name());
        if let Some((entry, _)) = &record.entry
            && ask.seen != Some(entry)
        {
            return Ok(Acquired::Found(entry.clone()));
        }
        if let Some(left) = &record.ending
            && (ask.behind == Some(&left.by) || now < left.replay_until)
        {
            return Ok(Acquired::Ended(left.outcome.clone()));
        }
        match &mut record.lease {
            Some((holder, until)) if holder != ask.token => {
                let (remaining, holder) = (*until - now, holder.clone());
                if ask.queue {
                    record.queue(ask.token, now, remaining.max(ask.lease));
                }
                Ok(Acquired::Held { remaining, holder })
            }
            lease => {
                *lease = Some((ask.token.clone(), now + ask.lease));
                Ok(Acquired::Granted)
            }
        }
    }

    pub(super) fn look_at_lease(&self, key: &Key) -> Option<MutexHolder> {
        let records = self.store.records();
        let (holder, until) = records.by_name.get(key.name())?.lease.as_ref()?;
        let remaining = until.checked_duration_since(Instant::now())?;
        let token = Bytes::copy_from_slice(holder.as_str().as_bytes());
        Some(MutexHolder { token, remaining: Some(remaining) })
    }

    pub(super) fn renew(&self, key: &Key, token: &Token, lease: Duration) -> StoreResult<TokenCheck> {
        let mut records = self.store.records();
        let check = match &mut records.record(key.name()).lease {
            Some((holder, until)) if holder == token => {
                *until = Instant::now() + lease;
                TokenCheck::Held
            }
            _ => TokenCheck::Lost,
        };
        records.tidy(key.name());
        Ok(check)
    }

    pub(super) fn commit(
        &self,
        key: &Key,
        token: &Token,
        entry: Bytes,
        keep: Duration,
    ) -> StoreResult<TokenCheck> {
        self.end_lease(key, token, |records| {
            records.forget_left(key.name());
            records.set_entry(key.name(), entry, keep);
        })
    }

    pub(super) fn fail(&self, key: &Key, fail: Fail<'_>) -> StoreResult<TokenCheck> {
        self.end_lease(key, fail.token, |records| {
            records.set_left(key.name(), &fail);
            let record = records.record(key.name());
            let stored = record.entry.as_ref().map(|(entry, _)| entry);
            let (is_seen, is_empty) = (stored.is_some() && fail.seen == stored, stored.is_none());
            match fail.older {
                OlderEntry::Marked(marker, keep) if is_seen || is_empty => {
                    records.set_entry(key.name(), marker, keep);
                }
                OlderEntry::Ends if is_seen => records.forget_entry(key.name()),
                OlderEntry::Stays | OlderEntry::Ends | OlderEntry::Marked(..) => {}
            }
        })
    }

    pub(super) fn hand_over(&self, key: &Key, token: &Token, how: HandOver) -> StoreResult<HandedOver> {
        let HandOver { lease, hops, is_leaving } = how;
        let mut records = self.store.records();
        if !records.end_lease(key.name(), token) {
            records.tidy(key.name());
            return Ok(HandedOver::NotMine);
        }
        loop {
            let record = records.record(key.name());
            let Some(next) = record.queue.pop_front() else {
                records.tidy(key.name());
                return Ok(HandedOver::Freed);
            };
            if next == *token || is_leaving && next.node() == token.node() {
                continue;
            }
            record.lease = Some((next.clone(), Instant::now() + lease));
            drop(records);
            // The waiter is notified outside the lock. If it has left, the next one gets the grant.
            if self.store.shared.notify(key.name(), &Hint::Granted { token: next.clone(), hops }) {
                return Ok(HandedOver::ToWaiter);
            }
            records = self.store.records();
            if !records.end_lease(key.name(), &next) {
                return Ok(HandedOver::Freed);
            }
        }
    }

    pub(super) fn release(&self, key: &Key, token: &Token) -> StoreResult<TokenCheck> {
        let mut records = self.store.records();
        if records.end_lease(key.name(), token) {
            self.wake(records, key, &Hint::Finished(None));
            return Ok(TokenCheck::Held);
        }
        records.record(key.name()).queue.retain(|queued| queued != token);
        records.tidy(key.name());
        Ok(TokenCheck::Lost)
    }

    pub(super) fn invalidate(
        &self,
        key: &Key,
        insert: Option<Insert>,
        announcement: &Announcement,
    ) -> StoreResult<Announced> {
        let mut records = self.store.records();
        records.attempts(key.name(), self.node, announcement.attempt)?;
        let record = records.record(key.name());
        record.lease = None;
        let stored =
            record.entry.as_ref().filter(|(_, at)| at.0 > Instant::now()).map(|(entry, _)| entry.clone());
        records.forget_entry(key.name());
        records.forget_left(key.name());
        if let Some(Insert { entry, keep, over }) = insert
            && over.is_none_or(|over| stored.is_some_and(|stored| stored == over || stored == entry))
        {
            records.set_entry(key.name(), entry, keep);
        }
        self.wake(records, key, &Hint::Invalidated);
        self.announce(announcement, &ChangedName::value(key))
    }

    pub(super) fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        self.store.shared.watches.register(key.name(), token)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.store.shared.grants.close(self.node);
    }

    pub(super) fn health(&self) -> Health {
        let (link, breaker) = match self.closed.load(Ordering::Acquire) {
            false => (LinkState::Up, Breaker::Closed),
            true => (LinkState::Closed, Breaker::Open),
        };
        Health {
            topology: Topology::Memory,
            commands: link,
            open_connections: 0,
            inbox: link,
            breaker,
            reason: None,
            clock: None,
            silent_for: None,
            inbox_lag: None,
            outages: 0,
            credential_failures: 0,
            local: None,
        }
    }

    pub(super) fn examine() -> Vec<Finding> {
        let memory = Finding::note("topology", "in this process's memory: there is no fleet")
            .cost("each process loads once per key, and its values go with it")
            .advice("a guard on a Redis client where several processes share an origin");
        vec![memory]
    }

    /// Runs a step on the locks and returns its answer. The waiters that it has notified are woken after the lock is released.
    fn step<T>(
        &self,
        key: &Arc<str>,
        act: impl FnOnce(&mut LockTable, &mut LockStep<'_>) -> T,
    ) -> StoreResult<T> {
        if self.closed.load(Ordering::Acquire) {
            return Err(StoreError::new(StoreErrorKind::Closed));
        }
        let shared = &self.store.shared;
        let now = Instant::now();
        let now_us = self.clock_at(now) * 1_000;
        let notify = |token: &Token, hint| shared.notify_lock(token, hint);
        let (grants, wakes) = (&*shared.grants, Vec::new());
        let mut step = LockStep { key, now, now_us, grants, notify: &notify, wakes };
        Ok(act(&mut lock(&shared.locks), &mut step))
    }
}

/// The commands of locks: each is a step on the table of the mutexes or of the semaphores, under the lock's key.
macro_rules! lock_commands {
    ($($method:ident($($arg:ident: $type:ty),*) -> $answer:ty = $table:ident.$step:ident($($given:expr),*)$(.$part:tt)?;)*) => {
        impl MemoryNode {$(
            pub(super) fn $method(&self, name: &LockName, $($arg: $type),*) -> StoreResult<$answer> {
                self.step(&name.key, |locks, step| locks.$table.$step(step, $($given),*)$(.$part)?)
            }
        )*}
    };
}

lock_commands! {
    take_mutex(ask: Take<'_>) -> MutexTaken = mutexes.take(&ask);
    free_mutex(token: &Token, ttl: Option<Duration>) -> bool = mutexes.free(token, ttl);
    extend_mutex(token: &Token, ttl: Option<Duration>) -> bool = mutexes.extend(token, ttl);
    look_at_mutex() -> Option<MutexHolder> = mutexes.look();
    break_mutex() -> bool = mutexes.force();
    take_permit(ask: TakePermit<'_>) -> PermitTaken = semaphores.take(&ask);
    free_permit(token: &Token, lease: Duration) -> PermitFreed = semaphores.free(token, lease, None).0;
    end_load(token: &Token, load: (Duration, EndedLoad)) -> (PermitFreed, Option<LimitState>) = semaphores.free(token, load.0, Some(load.1));
    refresh_permit(token: &Token, lease: Duration) -> bool = semaphores.refresh(token, lease);
    look_at_semaphore() -> Option<SemaphoreState> = semaphores.look();
    change_semaphore(change: SemaphoreChange) -> Option<SemaphoreState> = semaphores.change(change);
}

impl MemoryNode {
    pub(super) fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        self.store.shared.grants.register(name, token)
    }

    /// Always `Yes`: a mutex of a memory store changes only by the commands of this crate, which notify its waiters.
    pub(super) fn announce_key_changes(&self, _name: &LockName) -> StoreResult<KeyspaceAnswer> {
        Ok(KeyspaceAnswer::Yes)
    }
}

/// The ids of tags may use at most this fraction (`1 / PART`) of the store; so may lists, and the numbers of attempts. Beyond it
/// the least recently used are dropped, whatever their lifetime: without the id of its tag a value is a miss, and without its list
/// a resource may have more variants than its policy allows.
const PART: usize = 4;

impl KeyRecords {
    fn tag(&mut self, tag: &Key) -> Option<TagState> {
        self.tags.get(tag.name()).copied()
    }

    fn make_id(&mut self, tag: &Key, life: Duration) -> u64 {
        let until = later(Instant::now(), life);
        if let Some(state) = self.tags.get_until(tag.name(), until) {
            return state.id();
        }
        let (id, bytes) = (fastrand::u64(..), 2 * tag.name().len() + size_of::<TagState>() + AROUND);
        if self.tags.make_room(bytes, self.capacity / PART) && self.make_room(bytes) {
            self.tags.put(tag.name(), TagState::new(id), bytes, until);
        }
        id
    }

    fn enlist(&mut self, list: &Key, member: ListMember, most: usize, life: Duration) -> bool {
        let name = list.name();
        let members = self.lists.get(name);
        let (is_new, length) = (members.is_none(), members.as_ref().map_or(0, |members| members.len()));
        if members.is_some_and(|members| members.contains(&member)) {
            return true;
        }
        let bytes = size_of::<ListMember>() + if is_new { 2 * name.len() + AROUND } else { 0 };
        let has_room =
            length < most && self.lists.make_room(bytes, self.capacity / PART) && self.make_room(bytes);
        if !has_room {
            return false;
        }
        // `make_room` may have dropped this very list; then a new one begins with this member.
        match self.lists.get(name) {
            Some(members) => {
                members.push(member);
                self.lists.grown(name, bytes);
            }
            None => {
                let bytes = size_of::<ListMember>() + 2 * name.len() + AROUND;
                self.lists.put(name, vec![member], bytes, later(Instant::now(), life));
            }
        }
        true
    }
}

impl MemoryNode {
    pub(super) fn look_up_tagged(&self, keys: &[Key], tags: &[Key]) -> StoreResult<TaggedLookUp> {
        let mut records = self.store.records();
        records.sweep(Instant::now());
        let entry = |key: &Key| records.by_name.get(key.name()).and_then(|record| record.entry.as_ref());
        let entries = keys.iter().map(|key| entry(key).map(|(entry, _)| entry.clone())).collect();
        Ok((entries, tags.iter().map(|tag| records.tag(tag)).collect()))
    }

    pub(super) fn present_tags(&self, tags: &[Key]) -> StoreResult<Vec<Option<TagState>>> {
        let mut records = self.store.records();
        Ok(tags.iter().map(|tag| records.tag(tag)).collect())
    }

    pub(super) fn tag_ids(&self, tags: &[Key], life: Duration) -> StoreResult<Vec<u64>> {
        let mut records = self.store.records();
        Ok(tags.iter().map(|tag| records.make_id(tag, life)).collect())
    }

    pub(super) fn forget_tag(
        &self,
        tag: &Key,
        expired_at: Option<u64>,
        announcement: &Announcement,
    ) -> StoreResult<Announced> {
        let mut records = self.store.records();
        records.attempts(tag.name(), self.node, announcement.attempt)?;
        // Before the id is removed: a load that reads the next id must find this note.
        if let Some(volume) = self.volumes().get_mut(announcement.volume.name()) {
            volume.note_tag(tag.name());
        }
        match expired_at {
            Some(at) => {
                records.tags.get(tag.name()).into_iter().for_each(|state| *state = state.expired(at));
            }
            None => records.tags.remove(tag.name()),
        }
        drop(records);
        self.announce(announcement, &ChangedName::tag(tag))
    }

    pub(super) fn enlist(
        &self,
        list: &Key,
        member: ListMember,
        most: usize,
        life: Duration,
    ) -> StoreResult<bool> {
        Ok(self.store.records().enlist(list, member, most, life))
    }

    /// A memory store has no replicas to wait for.
    pub(super) fn replicated(&self, _key: &Key, replicas: u32) -> StoreResult<u32> {
        Ok(replicas)
    }

    pub(super) fn enter_load(&self, journal: &Key, load: Uuid, life: Duration) -> StoreResult<()> {
        self.volumes().entry(journal.name().into()).or_default().enter_load(load, life);
        Ok(())
    }

    pub(super) fn no_tag_since(&self, journal: &Key, load: Uuid, tags: &[Key]) -> StoreResult<bool> {
        Ok(self.volumes().get(journal.name()).is_some_and(|volume| volume.no_tag_since(load, tags)))
    }

    fn volumes(&self) -> MutexGuard<'_, HashMap<Box<str>, Volume>> {
        lock(&self.store.shared.volumes.by_name)
    }

    pub(super) fn renew_membership(&self, volume: &Key, renewal: Renewal) -> StoreResult<Renewed> {
        Ok(self.volumes().entry(volume.name().into()).or_default().renew(self.node, renewal))
    }

    pub(super) fn remove_member(&self, volume: &Key, member: Member) -> StoreResult<()> {
        let mut volumes = self.volumes();
        if let Some(registry) = volumes.get_mut(volume.name()).and_then(|volume| volume.registry.as_mut()) {
            registry.members.retain(|known| *known != member);
        }
        Ok(())
    }

    pub(super) fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        if let Some(listener) = self.listener(announcer) {
            listener.acknowledged(id, self.node);
        }
    }

    pub(super) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        let mut listeners = lock(&self.store.shared.volumes.listeners);
        listeners.retain(|_, listener| listener.strong_count() > 0);
        listeners.entry(self.node).or_insert(listener);
    }

    pub(super) fn listen_to(&self, channel: Uuid, listener: Weak<dyn ChannelListener>) {
        self.store.shared.channels.listen(channel, listener);
    }

    pub(super) fn send_to(&self, channel: Uuid, message: &[u8]) -> u64 {
        self.store.shared.channels.send(channel, message)
    }

    fn listener(&self, node: Uuid) -> Option<Arc<dyn VolumeListener>> {
        lock(&self.store.shared.volumes.listeners).get(&node).and_then(Weak::upgrade)
    }

    /// ANNOUNCE. The members are notified after the step, when its lock is released.
    pub(super) fn announce(&self, announcement: &Announcement, name: &ChangedName) -> StoreResult<Announced> {
        let volume = announcement.volume.name();
        let announced = {
            let mut volumes = self.volumes();
            if announcement.creates && !volumes.contains_key(volume) {
                volumes.insert(volume.into(), Volume::default());
            }
            volumes.get_mut(volume).and_then(|volume| volume.announce(self.node, announcement, name))
        };
        let Some((audience, message)) = announced else { return Ok(Announced::NoRegistry) };
        for member in &audience.members {
            if let Some(listener) = self.listener(member.node) {
                listener.announced(&message);
            }
        }
        Ok(Announced::To(audience))
    }
}

impl KeyRecords {
    /// Begins an attempt at a change of this name: refuses it if a later one has voided it, else records that it voids
    /// earlier ones.
    fn attempts(&mut self, name: &str, node: Uuid, attempt: AttemptNumber) -> StoreResult<()> {
        let key = format!("{}:{name}", node.simple());
        if self.voided.get(&key).is_some_and(|latest| *latest > attempt.number) {
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        if attempt.voids_earlier {
            let bytes = 2 * key.len() + size_of::<u64>() + AROUND;
            self.voided.remove(&key);
            if self.voided.make_room(bytes, self.capacity / PART) && self.make_room(bytes) {
                self.voided.put(&key, attempt.number, bytes, later(Instant::now(), VOIDED_FOR));
            }
        }
        Ok(())
    }
}
