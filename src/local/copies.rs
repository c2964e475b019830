//! The copies in memory, and their tickets: an answer becomes a [`LocalCopy`] only with a ticket that was taken before the command
//! was sent.
//!
//! A ticket has a flag for the key and one for each tag, shared by all tickets of that name. A drop of the name sets the flag and
//! removes it from the map, so later tickets have a new flag. A copy keeps its ticket and is served only while no flag is set: one
//! flag drops the copies that are there, and those that are still on their way.
//!
//! The map of copies is bounded by bytes, and read by many threads at once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use quick_cache::sync::Cache;
use quick_cache::{Equivalent, Lifecycle, OptionsBuilder, Weighter};

use crate::key::{Hashed, Key, KeyProbe};
use crate::store::protocol::ChangedName;
use crate::sync::lock;
use crate::value::StoredEntry;

/// Microseconds since this node's local tier was made.
pub(super) type Moment = u64;

/// Set when the copies of its name are dropped.
type Flag = Arc<AtomicBool>;

/// Distinguishes the flag of a tag from the flag of a key with the same name.
const TAG: u64 = 0x9E37_79B9_7F4A_7C15;

/// The number of shards of [`Tickets`]. A miss takes a shard's lock, a hit takes none.
const SHARDS: usize = 32;

/// The flags of all names that have a ticket.
#[derive(Debug)]
pub(super) struct Tickets {
    /// How many times all copies were dropped since the start.
    epoch: AtomicU64,
    shards: [Mutex<Shard>; SHARDS],
}

/// The flags by the hash of their names. Two names with one hash share a flag, and a drop of one drops the copies of both.
#[derive(Debug, Default)]
struct Shard {
    flags: HashMap<u64, Flag, Hashed>,
    /// The size at which flags without a ticket are removed.
    sweep_at: usize,
}

/// The permission to keep an answer as a copy. Void as soon as a name that the answer depends on is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    epoch: u64,
    key: Flag,
    tags: Vec<Flag>,
}

impl Tickets {
    pub(super) fn new() -> Self {
        Self { epoch: AtomicU64::new(0), shards: std::array::from_fn(|_| Mutex::default()) }
    }

    /// A ticket for a key and some of its tags. Must be taken before the command is sent.
    pub(super) fn take(&self, key: &Key, tags: &[Key]) -> Ticket {
        // The epoch is read before the flags, so that a drop of everything in between voids the ticket.
        let epoch = self.epoch.load(Ordering::SeqCst);
        let tags = tags.iter().map(|tag| self.flag(tag.hash_of_name() ^ TAG)).collect();
        Ticket { epoch, key: self.flag(key.hash_of_name()), tags }
    }

    /// Adds further tags to a ticket, before their ids are read.
    pub(super) fn add(&self, ticket: &mut Ticket, tags: &[Key]) {
        ticket.tags.extend(tags.iter().map(|tag| self.flag(tag.hash_of_name() ^ TAG)));
    }

    /// Replaces a ticket that is not void by a new one, and voids all other tickets of the key.
    pub(super) fn succeed(&self, key: &Key, ticket: Ticket) -> Option<Ticket> {
        let hash = key.hash_of_name();
        // Flags are set under this lock.
        let mut shard = lock(self.shard(hash));
        if self.is_void(&ticket) {
            return None;
        }
        let flag = Flag::default();
        if let Some(before) = shard.flags.insert(hash, Arc::clone(&flag)) {
            before.store(true, Ordering::SeqCst);
        }
        Some(Ticket { key: flag, ..ticket })
    }

    pub(super) fn is_void(&self, ticket: &Ticket) -> bool {
        let is_set = |flag: &Flag| flag.load(Ordering::SeqCst);
        ticket.epoch != self.epoch.load(Ordering::SeqCst)
            || is_set(&ticket.key)
            || ticket.tags.iter().any(is_set)
    }

    /// Voids all tickets that depend on the name.
    pub(super) fn void(&self, name: &ChangedName) {
        let hash = match name {
            ChangedName::Value(name) => Key::hash_of(name),
            ChangedName::Tag(name) => Key::hash_of(name) ^ TAG,
        };
        if let Some(flag) = lock(self.shard(hash)).flags.remove(&hash) {
            flag.store(true, Ordering::SeqCst);
        }
    }

    /// Voids all tickets.
    pub(super) fn void_all(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    fn flag(&self, hash: u64) -> Flag {
        let mut shard = lock(self.shard(hash));
        if shard.flags.len() >= shard.sweep_at {
            shard.flags.retain(|_, flag| Arc::strong_count(flag) > 1);
            shard.sweep_at = (2 * shard.flags.len()).max(64);
        }
        Arc::clone(shard.flags.entry(hash).or_default())
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        &self.shards[(hash >> 32) as usize % SHARDS]
    }
}

/// A value in this process's memory.
#[derive(Debug)]
pub(crate) struct LocalCopy {
    pub(crate) entry: Arc<StoredEntry>,
    /// The copy is served only while this ticket is not void.
    pub(super) ticket: Ticket,
    pub(super) made_at: Moment,
}

/// The memory that a copy takes besides its bytes: map entries, the flag of its ticket, allocations around it and in the decoded value.
const AROUND: u64 = 400;
/// The bytes of a usual copy. Only the length of the cache's list of evicted keys depends on it.
const USUAL: u64 = 1_300;
/// The most shards of the map, and the least bytes of a shard: a shard refuses a copy that is larger than the shard.
const MOST_SHARDS: u64 = 8;
const LEAST_SHARD: u64 = 1024 * 1024;

pub(super) type Copies = Cache<Key, Arc<LocalCopy>, CopyWeight, Hashed, DropsOutside>;

#[derive(Clone, Debug)]
pub(super) struct CopyWeight;

impl Weighter<Key, Arc<LocalCopy>> for CopyWeight {
    fn weight(&self, key: &Key, copy: &Arc<LocalCopy>) -> u64 {
        let around = AROUND + (size_of::<LocalCopy>() + size_of::<StoredEntry>()) as u64;
        let stored = &copy.entry;
        let checked = stored.checked.len() * size_of::<Key>();
        // The decoded value is made later, by the first caller that needs it: as large as its bytes, by estimate.
        let held = match &stored.content {
            Ok(entry) => {
                let packed = entry.packed.stored().map_or(0, |packed| packed.len());
                2 * entry.payload.len() + packed + entry.tags.as_bytes().len() + entry.validator.len()
            }
            Err(raw) => raw.len(),
        };
        around + (key.name().len() + checked + held) as u64
    }
}

/// Drops evicted copies after the shard's lock was released: a value's `drop` may be slow, or panic.
#[derive(Clone, Debug)]
pub(super) struct DropsOutside;

impl Lifecycle<Key, Arc<LocalCopy>> for DropsOutside {
    type RequestState = Vec<Arc<LocalCopy>>;

    fn on_evict(&self, state: &mut Self::RequestState, _key: Key, copy: Arc<LocalCopy>) {
        state.push(copy);
    }
}

impl Equivalent<Key> for KeyProbe<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        self.is_of(key)
    }
}

/// An empty map for copies that take `capacity` bytes.
pub(super) fn copies(capacity: u64) -> Copies {
    let shards = (capacity / LEAST_SHARD).clamp(1, MOST_SHARDS).next_power_of_two();
    let options = OptionsBuilder::new()
        .estimated_items_capacity(usize::try_from(capacity / USUAL).unwrap_or(usize::MAX).max(16))
        .weight_capacity(capacity)
        .shards(shards as usize)
        .build();
    match options {
        Ok(options) => Cache::with_options(options, CopyWeight, Hashed::default(), DropsOutside),
        // This fails only if one of the two capacities is not set.
        Err(_) => Cache::with(16, capacity, CopyWeight, Hashed::default(), DropsOutside),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::CacheKey;

    fn key(text: &str) -> Key {
        Key::new("ns", &CacheKey::from(text))
    }

    #[test]
    fn a_drop_voids_the_tickets_of_its_name_and_no_later_one() {
        let tickets = Tickets::new();
        let (before, other) = (tickets.take(&key("a"), &[]), tickets.take(&key("b"), &[key("a")]));
        tickets.void(&ChangedName::value(&key("a")));
        assert!(tickets.is_void(&before));
        assert!(!tickets.is_void(&other), "the tag with that name was not dropped");
        assert!(!tickets.is_void(&tickets.take(&key("a"), &[])));
        tickets.void(&ChangedName::tag(&key("a")));
        assert!(tickets.is_void(&other));
    }

    #[test]
    fn a_successor_voids_all_other_tickets_of_the_key_and_is_void_after_a_drop() {
        let (tickets, k) = (Tickets::new(), key("k"));
        let [read, stored] = [(), ()].map(|()| tickets.take(&k, &[]));
        let successor = tickets.succeed(&k, stored).expect("nothing was dropped");
        assert!(tickets.is_void(&read) && !tickets.is_void(&successor));
        let later = tickets.take(&k, &[]);
        tickets.void(&ChangedName::value(&k));
        assert!(tickets.is_void(&successor) && tickets.is_void(&later));
        assert!(tickets.succeed(&k, successor).is_none());
    }

    #[test]
    fn a_long_key_is_dropped_by_its_name() {
        let (tickets, long) = (Tickets::new(), key(&"x".repeat(4_000)));
        let ticket = tickets.take(&long, &[]);
        tickets.void(&ChangedName::Value(long.name().into()));
        assert!(tickets.is_void(&ticket));
    }

    #[test]
    fn flags_without_a_ticket_are_removed() {
        let tickets = Tickets::new();
        let held: Vec<_> = (0..100).map(|n| tickets.take(&key(&format!("held {n}")), &[])).collect();
        for n in 0..100_000 {
            drop(tickets.take(&key(&n.to_string()), &[]));
        }
        let flags: usize = tickets.shards.iter().map(|shard| lock(shard).flags.len()).sum();
        assert!(flags < 64 * SHARDS + 300, "{flags} flags");
        assert!(held.iter().all(|ticket| !tickets.is_void(ticket)));
        tickets.void_all();
        assert!(held.iter().all(|ticket| tickets.is_void(ticket)));
    }
}
