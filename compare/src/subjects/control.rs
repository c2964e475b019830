//! The controls: no guard at all, and a plain GET.

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;

use super::{Loader, Subject};
use crate::wire::Setup;

/// Every call is a load.
pub(super) struct Unguarded(Loader);

impl Unguarded {
    pub(super) fn new(setup: &Setup) -> Self {
        Self(Loader { port: setup.origin })
    }
}

impl Subject for Unguarded {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        self.0.value(key.to_owned()).boxed()
    }

    fn invalidate<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<(), String>> {
        async { Ok(()) }.boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        const NO_CACHE: &str = "no cache";
        &[("hits", NO_CACHE), ("memory", NO_CACHE), ("redis", "no Redis")]
    }
}

/// A GET, and a load and SET without any coordination if there is nothing: the measure of hits.
pub(super) struct PlainGet {
    connection: MultiplexedConnection,
    loader: Loader,
}

impl PlainGet {
    pub(super) async fn new(setup: &Setup) -> Self {
        let client = redis::Client::open(setup.redis.as_str()).expect("an address");
        let connection = client.get_multiplexed_async_connection().await.expect("the server");
        Self { connection, loader: Loader { port: setup.origin } }
    }
}

impl Subject for PlainGet {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        let mut connection = self.connection.clone();
        async move {
            let found: redis::RedisResult<Option<Bytes>> =
                redis::cmd("GET").arg(key).query_async(&mut connection).await;
            if let Ok(Some(value)) = found {
                return Ok(value);
            }
            let value = self.loader.value(key.to_owned()).await?;
            let set = redis::cmd("SET").arg(key).arg(&value[..]).exec_async(&mut connection).await;
            set.map_err(|error| error.to_string())?;
            Ok(value)
        }
        .boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        let mut connection = self.connection.clone();
        async move {
            let deleted = redis::cmd("DEL").arg(key).exec_async(&mut connection).await;
            deleted.map_err(|error| error.to_string())
        }
        .boxed()
    }
}
