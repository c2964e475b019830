//! foyer: `get_or_fetch` of its in-memory cache.

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::{IN_PROCESS, Loader, NO_MARK, Subject};
use crate::wire::Setup;

pub(super) struct Foyer {
    cache: foyer::Cache<String, Bytes>,
    loader: Loader,
}

impl Foyer {
    pub(super) fn new(setup: &Setup) -> Self {
        Self { cache: foyer::CacheBuilder::new(100_000).build(), loader: Loader { port: setup.origin } }
    }
}

impl Subject for Foyer {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        async move {
            let loader = self.loader;
            let fetch = || {
                let key = key.to_owned();
                async move { loader.value(key).await.map_err(anyhow::Error::msg) }
            };
            let entry = self.cache.get_or_fetch(key, fetch).await.map_err(|error| error.to_string())?;
            Ok(entry.value().clone())
        }
        .boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        self.cache.remove(key);
        async { Ok(()) }.boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        const NO_LIFETIME: &str = "entries have no lifetime";
        &[("expiry", NO_LIFETIME), ("stale", NO_LIFETIME), ("uncacheable", NO_MARK), ("redis", IN_PROCESS)]
    }
}
