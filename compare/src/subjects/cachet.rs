//! cachet: its in-memory cache with a lifetime and `stampede_protection`.
//!
//! It has no Redis tier: a user implements `CacheTier` for one.

use std::time::Duration;

use ::cachet::Cache;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tick::Clock;

use super::{IN_PROCESS, Loader, NO_MARK, Subject};
use crate::wire::Setup;

pub(super) struct Cachet {
    cache: Cache<String, Bytes>,
    loader: Loader,
}

impl Cachet {
    pub(super) fn new(setup: &Setup) -> Self {
        let builder = Cache::builder::<String, Bytes>(Clock::new_tokio()).memory();
        let builder = builder.ttl(Duration::from_millis(setup.ttl_ms)).stampede_protection();
        Self { cache: builder.build(), loader: Loader { port: setup.origin } }
    }
}

impl Subject for Cachet {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        async move {
            let load = || async { self.loader.value(key.to_owned()).await.map_err(std::io::Error::other) };
            let entry = self.cache.try_get_or_insert(key, load).await.map_err(|error| error.to_string())?;
            Ok(entry.into_value())
        }
        .boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        async move { self.cache.invalidate(key).await.map_err(|error| error.to_string()) }.boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        const FALLBACK: &str = "refreshes in the background from a second tier only, not from a loader";
        &[("stale", FALLBACK), ("uncacheable", NO_MARK), ("redis", IN_PROCESS)]
    }
}
