//! cached: `#[concurrent_cached]` over `AsyncRedisCache`, with a `create` block as in its example for Tokio.

use std::sync::OnceLock;
use std::time::Duration;

use ::cached::macros::concurrent_cached;
use ::cached::{AsyncRedisCache, ConcurrentCachedAsync as _};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::{Loader, NO_MARK, NO_STALE, Subject};
use crate::wire::Setup;

/// The macro makes a static of the cache, so its settings are one, too.
static SETUP: OnceLock<Setup> = OnceLock::new();

fn setup() -> &'static Setup {
    SETUP.get().expect("it is set before the first call")
}

#[concurrent_cached(
    map_error = r##"|error| format!("{error:?}")"##,
    ty = "AsyncRedisCache<String, String>",
    create = r##"{
        AsyncRedisCache::builder("compare")
            .ttl(Duration::from_millis(setup().ttl_ms))
            .connection_string(&setup().redis)
            .build()
            .await
            .expect("a cache")
    }"##
)]
async fn value_of(key: String) -> Result<String, String> {
    let value = Loader { port: setup().origin }.value(key).await?;
    String::from_utf8(value.into()).map_err(|error| error.to_string())
}

pub(super) struct Cached;

impl Cached {
    pub(super) fn new(setup: &Setup) -> Self {
        SETUP.set(setup.clone()).expect("one subject per process");
        Self
    }
}

impl Subject for Cached {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        async move { value_of(key.to_owned()).await.map(Bytes::from) }.boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        async move {
            let Some(cache) = VALUE_OF.get() else { return Ok(()) };
            cache.async_cache_remove(&key.to_owned()).await.map(|_| ()).map_err(|error| error.to_string())
        }
        .boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        &[("stale", NO_STALE), ("uncacheable", NO_MARK)]
    }
}
