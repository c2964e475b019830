//! One guard's handle on its store, of any kind.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::lock_store::LockStore;
use super::memory::MemoryStore;
#[cfg(feature = "redis")]
use super::redis::RedisStore;
use super::tag_store::TagStore;
use super::volume_store::VolumeStore;
use super::{Store, StoreError};
use crate::key::Key;

/// A node's store.
///
/// All calls go through the trait, except a look-up on Redis, which is all that a hit does: boxing
/// its future, of some 1.6 KB, would cost a tenth of a hit.
#[derive(Clone, Debug)]
pub(crate) struct StoreHandle {
    pub(super) store: Arc<dyn Store>,
    locks: Arc<dyn LockStore>,
    tags: Arc<dyn TagStore>,
    volumes: Arc<dyn VolumeStore>,
    #[cfg(feature = "redis")]
    redis: Option<Arc<RedisStore>>,
}

impl StoreHandle {
    pub(crate) fn memory(store: MemoryStore) -> Self {
        Self::of(Arc::new(store.into_node()))
    }

    /// A handle on any store, through the traits alone.
    pub(crate) fn of<S: Store + LockStore + TagStore + VolumeStore + 'static>(store: Arc<S>) -> Self {
        Self {
            store: Arc::clone(&store) as _,
            locks: Arc::clone(&store) as _,
            tags: Arc::clone(&store) as _,
            volumes: store,
            #[cfg(feature = "redis")]
            redis: None,
        }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn redis(store: RedisStore) -> Self {
        let store = Arc::new(store);
        Self { redis: Some(Arc::clone(&store)), ..Self::of(store) }
    }

    /// The same store, through the contract of the locks.
    pub(crate) fn locks(&self) -> &Arc<dyn LockStore> {
        &self.locks
    }

    /// The same store, through the contract of the tags.
    pub(crate) fn tags(&self) -> &Arc<dyn TagStore> {
        &self.tags
    }

    /// The same store, through the contract of volume leases.
    pub(crate) fn volumes(&self) -> &Arc<dyn VolumeStore> {
        &self.volumes
    }

    /// As [`Store::look_up`].
    pub(crate) async fn look_up(&self, key: &Key, within: Duration) -> Result<Option<Bytes>, StoreError> {
        #[cfg(feature = "redis")]
        if let Some(redis) = &self.redis {
            return redis.get(key, within).await;
        }
        self.store.look_up(key, within).await
    }
}

impl Deref for StoreHandle {
    type Target = dyn Store;

    fn deref(&self) -> &Self::Target {
        &*self.store
    }
}
