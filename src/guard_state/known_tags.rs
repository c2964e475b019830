//! [`KnownTags`]: a guess which tags of its own a value has, so that their ids are read together with the entry.

use std::sync::{Arc, OnceLock};

use quick_cache::Weighter;
use quick_cache::sync::{Cache, DefaultLifecycle};

use crate::key::{Hashed, Key};

/// The tags that the values of some keys had when they were last read. A wrong guess costs a longer command, or a load where one of the
/// tags has an unconfirmed invalidation.
#[derive(Default)]
pub(crate) struct KnownTags(OnceLock<Cache<Key, Arc<[Key]>, TagCount, Hashed>>);

#[derive(Clone)]
struct TagCount;

impl Weighter<Key, Arc<[Key]>> for TagCount {
    fn weight(&self, _key: &Key, tags: &Arc<[Key]>) -> u64 {
        tags.len() as u64 + 1
    }
}

impl KnownTags {
    /// How many tags and keys there are at the most: some 4 MB.
    const MOST: u64 = 16_384;

    /// The tags of the key's value, if it had some. Without any tags in this process this is one load of an atomic.
    #[inline]
    pub(crate) fn of(&self, key: &Key) -> Option<Arc<[Key]>> {
        self.0.get()?.get(key)
    }

    pub(crate) fn note(&self, key: &Key, tags: &[Key]) {
        let (keys, most) = (4_096, Self::MOST);
        let map = || Cache::with(keys, most, TagCount, Hashed::default(), DefaultLifecycle::default());
        self.0.get_or_init(map).insert(key.clone(), tags.into());
    }
}
