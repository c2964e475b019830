//! moka: `try_get_with` of `moka::future::Cache`, as its documentation shows it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::{IN_PROCESS, Loader, NO_MARK, NO_STALE, Subject};
use crate::wire::Setup;

pub(super) struct Moka {
    cache: moka::future::Cache<String, Bytes>,
    loader: Loader,
}

impl Moka {
    pub(super) fn new(setup: &Setup) -> Self {
        let cache = moka::future::Cache::builder().max_capacity(100_000);
        let cache = cache.time_to_live(Duration::from_millis(setup.ttl_ms)).build();
        Self { cache, loader: Loader { port: setup.origin } }
    }
}

impl Subject for Moka {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        async move {
            let value =
                self.cache.entry_by_ref(key).or_try_insert_with(self.loader.value(key.to_owned())).await;
            value.map(|entry| entry.into_value()).map_err(|error: Arc<String>| error.to_string())
        }
        .boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        async move {
            self.cache.invalidate(key).await;
            Ok(())
        }
        .boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        &[("stale", NO_STALE), ("uncacheable", NO_MARK), ("redis", IN_PROCESS)]
    }
}
