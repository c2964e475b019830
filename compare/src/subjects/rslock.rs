//! A cache of GET and SET behind a mutex of rslock: the usual recipe for one load per fleet.

use std::time::Duration;

use ::rslock::LockManager;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::ConnectionManager;

use super::{Loader, Subject};
use crate::wire::Setup;

/// How long a lock lives if its holder does not free it.
const LOCK: Duration = Duration::from_secs(10);

pub(super) struct Rslock {
    connection: ConnectionManager,
    locks: LockManager,
    loader: Loader,
    ttl_ms: u64,
}

impl Rslock {
    pub(super) async fn new(setup: &Setup) -> Self {
        let client = redis::Client::open(setup.redis.as_str()).expect("an address");
        let connection = client.get_connection_manager().await.expect("the server");
        let locks = LockManager::new(vec![setup.redis.as_str()]);
        Self { connection, locks, loader: Loader { port: setup.origin }, ttl_ms: setup.ttl_ms }
    }

    async fn read(&self, key: &str) -> Result<Option<Bytes>, String> {
        let mut connection = self.connection.clone();
        redis::cmd("GET").arg(key).query_async(&mut connection).await.map_err(|error| error.to_string())
    }

    async fn load_and_store(&self, key: &str) -> Result<Bytes, String> {
        // Another process may have stored it while this one waited for the lock.
        if let Some(value) = self.read(key).await? {
            return Ok(value);
        }
        let loaded = self.loader.load(key.to_owned()).await?;
        if !loaded.private {
            let mut set = redis::cmd("SET");
            set.arg(key).arg(&loaded.value[..]).arg("PX").arg(self.ttl_ms);
            set.exec_async(&mut self.connection.clone()).await.map_err(|error| error.to_string())?;
        }
        Ok(loaded.value)
    }
}

impl Subject for Rslock {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        async move {
            if let Some(value) = self.read(key).await? {
                return Ok(value);
            }
            let lock = format!("lock:{key}");
            let guard = self.locks.acquire(lock.as_str(), LOCK).await.map_err(|error| error.to_string())?;
            let loaded = self.load_and_store(key).await;
            guard.release().await;
            loaded
        }
        .boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        async move {
            let deleted = redis::cmd("DEL").arg(key).exec_async(&mut self.connection.clone()).await;
            deleted.map_err(|error| error.to_string())
        }
        .boxed()
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        &[("stale", "a lock knows no values")]
    }
}
