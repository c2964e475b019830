//! multi-tier-cache: moka and Redis behind `CacheManager`, with invalidation over Pub/Sub, as its documentation shows it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use multi_tier_cache::error::CacheError;
use multi_tier_cache::{CacheManager, CacheStrategy, InvalidationConfig, L1Cache, L2Cache};

use super::{Loader, NO_MARK, NO_STALE, Subject};
use crate::wire::Setup;

pub(super) struct MultiTier {
    cache: CacheManager,
    loader: Loader,
    ttl: Duration,
}

impl MultiTier {
    pub(super) async fn new(setup: &Setup) -> Self {
        let l1 = Arc::new(L1Cache::new(Default::default()).expect("the first tier"));
        let l2 = Arc::new(L2Cache::with_url(&setup.redis).await.expect("the server"));
        let config = InvalidationConfig::default();
        let cache = CacheManager::new_with_invalidation(l1, l2, &setup.redis, config).await.expect("a cache");
        Self { cache, loader: Loader { port: setup.origin }, ttl: Duration::from_millis(setup.ttl_ms) }
    }
}

impl Subject for MultiTier {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        let load = || async { self.loader.value(key.to_owned()).await.map_err(CacheError::BackendError) };
        let value = self.cache.get_or_compute_with(key, CacheStrategy::Custom(self.ttl), load);
        value.map(|value| value.map_err(|error| error.to_string())).boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        self.cache.invalidate(key).map(|deleted| deleted.map_err(|error| error.to_string())).boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        &[("stale", NO_STALE), ("uncacheable", NO_MARK)]
    }
}
