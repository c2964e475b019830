//! [`KnownTags`]: a guess which tags of its own a value has, so that their ids are read together with the entry.

use std::sync::{Arc, OnceLock};

use quick_cache::UnitWeighter;
use quick_cache::sync::{Cache, DefaultLifecycle};

use crate::key::{Hashed, Key};

/// The tags that the values of some keys had when they were last read. A wrong guess costs a round trip, and nothing else.
#[derive(Default)]
pub(crate) struct KnownTags(OnceLock<Cache<Key, Arc<[Key]>, UnitWeighter, Hashed>>);

impl KnownTags {
    /// Of how many keys the tags are known at the most.
    const MOST_KEYS: usize = 4_096;

    /// The tags of the key's value, if it had some. Without any tags in this process this is one load of an atomic.
    #[inline]
    pub(crate) fn of(&self, key: &Key) -> Option<Arc<[Key]>> {
        self.0.get()?.get(key)
    }

    pub(crate) fn note(&self, key: &Key, tags: &[Key]) {
        let most = Self::MOST_KEYS;
        let map =
            || Cache::with(most, most as u64, UnitWeighter, Hashed::default(), DefaultLifecycle::default());
        self.0.get_or_init(map).insert(key.clone(), tags.into());
    }
}
