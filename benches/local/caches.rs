//! Caches that keep values in the memory of one process, behind one trait.
//!
//! All use the same hasher, the default of quick_cache, so that the maps are compared, and not their hashers.

use std::sync::Arc;

use foldhash::fast::RandomState;

/// A map from texts to values, with a bounded number of values.
pub(crate) trait Map<V>: Clone + Send + Sync + 'static {
    /// What a reader holds while it uses a value that was found.
    type Held: Send;

    fn with_capacity(values: usize) -> Self;

    fn get(&self, key: &str) -> Option<Self::Held>;

    fn insert(&self, key: String, value: Arc<V>);
}

pub(crate) type Quick<V> =
    Arc<quick_cache::sync::Cache<String, Arc<V>, quick_cache::UnitWeighter, RandomState>>;

impl<V: Send + Sync + 'static> Map<V> for Quick<V> {
    type Held = Arc<V>;

    fn with_capacity(values: usize) -> Self {
        let (weight, lifecycle) = (values as u64, quick_cache::sync::DefaultLifecycle::default());
        let hasher = RandomState::default();
        let weighter = quick_cache::UnitWeighter;
        Self::new(quick_cache::sync::Cache::with(values, weight, weighter, hasher, lifecycle))
    }

    fn get(&self, key: &str) -> Option<Arc<V>> {
        quick_cache::sync::Cache::get(self, key)
    }

    fn insert(&self, key: String, value: Arc<V>) {
        quick_cache::sync::Cache::insert(self, key, value);
    }
}

pub(crate) type Moka<V> = moka::sync::Cache<String, Arc<V>, RandomState>;

impl<V: Send + Sync + 'static> Map<V> for Moka<V> {
    type Held = Arc<V>;

    fn with_capacity(values: usize) -> Self {
        moka::sync::Cache::builder().max_capacity(values as u64).build_with_hasher(RandomState::default())
    }

    fn get(&self, key: &str) -> Option<Arc<V>> {
        Self::get(self, key)
    }

    fn insert(&self, key: String, value: Arc<V>) {
        Self::insert(self, key, value);
    }
}

pub(crate) type Foyer<V> = foyer_memory::Cache<String, Arc<V>, RandomState>;

impl<V: Send + Sync + 'static> Map<V> for Foyer<V> {
    /// The map's entry, which is what users of foyer hold.
    type Held = foyer_memory::CacheEntry<String, Arc<V>, RandomState>;

    fn with_capacity(values: usize) -> Self {
        foyer_memory::CacheBuilder::new(values).with_hash_builder(RandomState::default()).build()
    }

    fn get(&self, key: &str) -> Option<Self::Held> {
        Self::get(self, key)
    }

    fn insert(&self, key: String, value: Arc<V>) {
        drop(Self::insert(self, key, value));
    }
}

/// foyer with a policy that retains values that are often requested, like the policies of the other two caches.
#[derive(Debug)]
pub(crate) struct TinyLfu<V: Send + Sync + 'static>(Foyer<V>);

impl<V: Send + Sync + 'static> Clone for TinyLfu<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V: Send + Sync + 'static> Map<V> for TinyLfu<V> {
    type Held = <Foyer<V> as Map<V>>::Held;

    fn with_capacity(values: usize) -> Self {
        let builder = foyer_memory::CacheBuilder::new(values).with_hash_builder(RandomState::default());
        Self(builder.with_eviction_config(foyer_memory::LfuConfig::default()).build())
    }

    fn get(&self, key: &str) -> Option<Self::Held> {
        self.0.get(key)
    }

    fn insert(&self, key: String, value: Arc<V>) {
        drop(self.0.insert(key, value));
    }
}
