//! What a guard is made from: one type that every kind of store converts into.

use std::fmt;
use std::time::Duration;

use crate::store::NodeStore;
use crate::store::memory::MemoryStore;
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;

/// Where the fleet meets: made from a `redis::Client` or a [`MemoryStore`] by `into()`, and with the features of that name
/// from a `redis::sentinel::SentinelClient` or a `redis::cluster::ClusterClient`.
#[derive(Debug)]
pub struct Backend {
    kind: BackendKind,
}

enum BackendKind {
    Memory(MemoryStore),
    // Boxed, because with TLS they hold certificates.
    #[cfg(feature = "redis")]
    Redis(Box<redis::Client>),
    #[cfg(feature = "sentinel")]
    Sentinel(Box<redis::sentinel::SentinelClient>),
    #[cfg(feature = "cluster")]
    Cluster(Box<redis::cluster::ClusterClient>),
    #[cfg(feature = "testing")]
    Other(Box<dyn IntoStore>),
}

/// A store that is made above this room: the one of users' tests.
#[cfg(feature = "testing")]
pub(crate) trait IntoStore: fmt::Debug + Send + Sync {
    fn into_store(self: Box<Self>, command_timeout: Duration) -> NodeStore;
}

impl fmt::Debug for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(store) => f.debug_tuple("Memory").field(store).finish(),
            #[cfg(feature = "redis")]
            Self::Redis(client) => f.debug_tuple("Redis").field(client).finish(),
            #[cfg(feature = "sentinel")]
            Self::Sentinel(_) => f.debug_tuple("Sentinel").finish_non_exhaustive(),
            #[cfg(feature = "cluster")]
            Self::Cluster(client) => f.debug_tuple("Cluster").field(client).finish(),
            #[cfg(feature = "testing")]
            Self::Other(store) => f.debug_tuple("Other").field(store).finish(),
        }
    }
}

impl Backend {
    #[cfg(feature = "testing")]
    pub(crate) fn other(store: impl IntoStore + 'static) -> Self {
        Self { kind: BackendKind::Other(Box::new(store)) }
    }

    /// The store, where it is one in memory.
    #[cfg(feature = "testing")]
    pub(crate) fn memory(&self) -> Option<&MemoryStore> {
        match &self.kind {
            BackendKind::Memory(store) => Some(store),
            _ => None,
        }
    }

    pub(crate) fn into_store(self, command_timeout: Duration) -> NodeStore {
        match self.kind {
            BackendKind::Memory(store) => {
                // There is no wire to wait for.
                let _ = command_timeout;
                NodeStore::memory(store)
            }
            #[cfg(feature = "redis")]
            BackendKind::Redis(client) => NodeStore::redis(RedisStore::new(*client, command_timeout)),
            #[cfg(feature = "testing")]
            BackendKind::Other(store) => store.into_store(command_timeout),
            #[cfg(feature = "sentinel")]
            BackendKind::Sentinel(client) => NodeStore::redis(RedisStore::watched(*client, command_timeout)),
            #[cfg(feature = "cluster")]
            BackendKind::Cluster(client) => NodeStore::redis(RedisStore::spread(*client, command_timeout)),
        }
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self { kind: BackendKind::Memory(store) }
    }
}

#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
impl From<redis::Client> for Backend {
    fn from(client: redis::Client) -> Self {
        Self { kind: BackendKind::Redis(Box::new(client)) }
    }
}

/// The server that these sentinels call the primary, whichever that is: they are asked at each connect, and again when it
/// turns out to be one no longer. Credentials, TLS and database are the client's own. Its replicas are never asked.
///
/// ```no_run
/// use redis::ConnectionAddr;
/// use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
/// use stampede_guard::StampedeGuard;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let sentinels = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|host| ConnectionAddr::Tcp(host.into(), 26379));
/// let client = SentinelClientBuilder::new(sentinels, "mymaster", SentinelServerType::Master)?
///     .set_client_to_redis_username("guard")
///     .set_client_to_redis_password("secret")
///     .build()?;
/// let guard = StampedeGuard::new(client);
/// # let _ = guard;
/// # Ok(()) }
/// ```
#[cfg(feature = "sentinel")]
#[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
impl From<redis::sentinel::SentinelClient> for Backend {
    fn from(client: redis::sentinel::SentinelClient) -> Self {
        Self { kind: BackendKind::Sentinel(Box::new(client)) }
    }
}

/// A Redis Cluster. Credentials, TLS, database, settings of the sockets and the map of addresses are the client's own. Its
/// time-outs, retries, push sender, resolver of names and whether it reads from replicas are not used: the guard goes by its
/// policy, and asks masters only. [`connect`](crate::StampedeGuard::connect) returns as soon as one master takes commands;
/// [`health`](crate::StampedeGuard::health) says which one does not.
///
/// ```no_run
/// use redis::cluster::ClusterClient;
/// use stampede_guard::StampedeGuard;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let nodes = ["redis://guard:secret@10.0.0.1/", "redis://guard:secret@10.0.0.2/"];
/// let guard = StampedeGuard::new(ClusterClient::new(nodes)?);
/// # let _ = guard;
/// # Ok(()) }
/// ```
#[cfg(feature = "cluster")]
#[cfg_attr(docsrs, doc(cfg(feature = "cluster")))]
impl From<redis::cluster::ClusterClient> for Backend {
    fn from(client: redis::cluster::ClusterClient) -> Self {
        Self { kind: BackendKind::Cluster(Box::new(client)) }
    }
}
