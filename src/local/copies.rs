//! The map of copies: bounded by bytes, read by many threads at once.

use std::sync::Arc;

use quick_cache::sync::Cache;
use quick_cache::{Equivalent, Lifecycle, OptionsBuilder, Weighter};

use super::tickets::LocalCopy;
use crate::key::KeyProbe;
use crate::key::{Hashed, Key};

/// The memory that a copy takes besides its bytes: map entries, the flag of its ticket, allocations around it and in the decoded value.
const AROUND: u64 = 400;
/// The bytes of a usual copy. Only the length of the cache's list of evicted keys depends on it.
const USUAL: u64 = 1_300;
/// A shard refuses a copy that is larger than itself.
const MOST_SHARDS: u64 = 8;
const LEAST_SHARD: u64 = 1024 * 1024;

type Map = Cache<Key, Arc<LocalCopy>, CopyWeight, Hashed, DropsOutside>;

#[derive(Debug)]
pub(super) struct Copies {
    map: Map,
}

#[derive(Clone, Debug)]
struct CopyWeight;

impl Weighter<Key, Arc<LocalCopy>> for CopyWeight {
    fn weight(&self, key: &Key, copy: &Arc<LocalCopy>) -> u64 {
        let around = AROUND + (size_of::<LocalCopy>() + size_of::<crate::value::StoredEntry>()) as u64;
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
struct DropsOutside;

impl Lifecycle<Key, Arc<LocalCopy>> for DropsOutside {
    type RequestState = Vec<Arc<LocalCopy>>;

    fn on_evict(&self, state: &mut Self::RequestState, _key: Key, copy: Arc<LocalCopy>) {
        state.push(copy);
    }
}

/// A probe, as a query of the map.
#[derive(Hash)]
struct ProbeQuery<'a>(KeyProbe<'a>);

impl Equivalent<Key> for ProbeQuery<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        self.0.is_of(key)
    }
}

impl Copies {
    pub(super) fn new(capacity: u64) -> Self {
        let shards = (capacity / LEAST_SHARD).clamp(1, MOST_SHARDS).next_power_of_two();
        let options = OptionsBuilder::new()
            .estimated_items_capacity(usize::try_from(capacity / USUAL).unwrap_or(usize::MAX).max(16))
            .weight_capacity(capacity)
            .shards(shards as usize)
            .build();
        let map = match options {
            Ok(options) => Cache::with_options(options, CopyWeight, Hashed::default(), DropsOutside),
            // Only without one of the two capacities.
            Err(_) => Cache::with(16, capacity, CopyWeight, Hashed::default(), DropsOutside),
        };
        Self { map }
    }

    #[inline]
    pub(super) fn get(&self, key: &Key) -> Option<Arc<LocalCopy>> {
        self.map.get(key)
    }

    /// As [`get`](Self::get), by a probe instead of a key.
    #[inline]
    pub(super) fn find(&self, probe: KeyProbe<'_>) -> Option<Arc<LocalCopy>> {
        self.map.get(&ProbeQuery(probe))
    }

    pub(super) fn insert(&self, key: &Key, copy: LocalCopy) {
        self.map.insert(key.clone(), Arc::new(copy));
    }

    pub(super) fn remove(&self, key: &Key) -> Option<Arc<LocalCopy>> {
        self.map.remove(key).map(|(_, copy)| copy)
    }

    pub(super) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.map.weight()
    }

    pub(super) fn capacity(&self) -> u64 {
        self.map.capacity()
    }
}
