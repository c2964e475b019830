//! The cache that the guard is compared with: one that reads, and on a miss loads and writes, as most services have it.
//!
//! It is a careful one: a command has 250 ms, and after a failure Redis is left alone for a second, so that the comparison shows
//! the stampede and not a careless client.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex as Lock, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, FromRedisValue};
use tokio::sync::Mutex;

const COMMAND: Duration = Duration::from_millis(250);
const PAUSE: Duration = Duration::from_secs(1);

type Failure = Box<dyn Error + Send + Sync>;

/// The name of a report in the store.
pub(crate) fn name(version: &str, key: u64) -> String {
    format!("{version}/report/{key}")
}

#[derive(Clone)]
pub(crate) enum PlainCache {
    Redis(Arc<PlainRedis>),
    Memory(PlainMemory),
}

/// A map that replicas in one process share.
pub(crate) type PlainMemory = Arc<Lock<HashMap<String, (Instant, Bytes)>>>;

pub(crate) struct PlainRedis {
    client: Client,
    prefix: String,
    link: Mutex<Link>,
}

struct Link {
    connection: Option<MultiplexedConnection>,
    /// Until when Redis is left alone.
    rests_until: Instant,
}

impl PlainCache {
    pub(crate) fn redis(client: Client, namespace: &str) -> Self {
        let link = Mutex::new(Link { connection: None, rests_until: Instant::now() });
        Self::Redis(Arc::new(PlainRedis { client, prefix: format!("{namespace}:plain:"), link }))
    }

    pub(crate) async fn get(&self, name: &str) -> Result<Option<Bytes>, Failure> {
        match self {
            Self::Redis(redis) => {
                let stored: Option<Vec<u8>> = redis.run(redis::cmd("GET").arg(redis.key(name))).await?;
                Ok(stored.map(Bytes::from))
            }
            Self::Memory(map) => {
                let map = map.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(map.get(name).filter(|(until, _)| *until > Instant::now()).map(|(_, body)| body.clone()))
            }
        }
    }

    pub(crate) async fn set(&self, name: &str, body: Bytes, fresh_ms: u64) -> Result<(), Failure> {
        match self {
            Self::Redis(redis) => {
                let mut set = redis::cmd("SET");
                redis.run(set.arg(redis.key(name)).arg(&body[..]).arg("PX").arg(fresh_ms)).await
            }
            Self::Memory(map) => {
                let until = Instant::now() + Duration::from_millis(fresh_ms);
                let mut map = map.lock().unwrap_or_else(PoisonError::into_inner);
                map.retain(|_, (until, _)| *until > Instant::now());
                map.insert(name.to_owned(), (until, body));
                Ok(())
            }
        }
    }

    pub(crate) async fn remove(&self, name: &str) -> Result<(), Failure> {
        match self {
            Self::Redis(redis) => redis.run(redis::cmd("DEL").arg(redis.key(name))).await,
            Self::Memory(map) => {
                map.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
                Ok(())
            }
        }
    }
}

impl PlainRedis {
    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Sends one command.
    async fn run<T: FromRedisValue>(&self, command: &redis::Cmd) -> Result<T, Failure> {
        let mut connection = self.connection().await?;
        let result = command.query_async(&mut connection).await;
        if let Err(error) = &result
            && (error.is_io_error() || error.is_timeout() || error.is_connection_dropped())
        {
            self.rest(&mut *self.link.lock().await);
        }
        Ok(result?)
    }

    /// The one connection, made by the first caller that needs it.
    async fn connection(&self) -> Result<MultiplexedConnection, Failure> {
        let link = &mut *self.link.lock().await;
        if link.rests_until > Instant::now() {
            return Err("Redis did not answer a moment ago".into());
        }
        if let Some(connection) = &link.connection {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(COMMAND))
            .set_response_timeout(Some(COMMAND));
        match self.client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(connection) => {
                link.connection = Some(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                self.rest(link);
                Err(error.into())
            }
        }
    }

    fn rest(&self, link: &mut Link) {
        *link = Link { connection: None, rests_until: Instant::now() + PAUSE };
    }
}
