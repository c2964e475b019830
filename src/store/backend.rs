//! [`Backend`]: the type from which a guard is made, and into which every kind of store converts.

use std::sync::Arc;

use super::memory::MemoryStore;
use super::{ConnectionSettings, Store};

/// The store that a fleet shares: made by `into()` from a `redis::Client`, from a [`MemoryStore`], with the feature `sentinel` from a
/// `redis::sentinel::SentinelClient`, and with `cluster` from a `redis::cluster::ClusterClient`.
///
/// **Clones share their connections.** All guards and locks that are made from clones of one backend, of any namespaces and policies,
/// share the [connections](crate::StampedeGuardBuilder::connections) for commands (in a cluster those to each master) and one for
/// messages; a guard that is made from a clone of a client has connections of its own. Guards and locks open further ones only while a
/// lock with `Waiting::Keyspace` waits, or an invalidation [waits for replicas](crate::PolicyBuilder::invalidate_replicas). The first
/// guard or `Locks` of a backend decides how many there are, and how long a server may take before its connection counts as lost: a
/// guard by its policy's `command_timeout`, `Locks` by one second. The connections are closed with the last guard or lock that uses
/// them; a guard that is made after that opens others.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "redis")] {
/// use stampede_guard::lock::Locks;
/// use stampede_guard::{Backend, StampedeGuard};
///
/// let redis = Backend::try_from("redis://127.0.0.1/")?;
/// let prices = StampedeGuard::builder(redis.clone()).namespace("prices").build()?;
/// let users = StampedeGuard::builder(redis.clone()).namespace("users").build()?;
/// let locks = Locks::new(redis);
/// # let _ = (prices, users, locks);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Backend {
    pub(crate) kind: StoreSource,
}

/// What nodes are made from.
#[derive(Clone)]
pub(crate) enum StoreSource {
    Memory(MemoryStore),
    #[cfg(feature = "redis")]
    Redis(Arc<super::redis::RedisServers>),
    /// A store behind a wire: makes one node's end.
    #[cfg(feature = "testing")]
    Command(Arc<dyn Fn(std::time::Duration) -> Store + Send + Sync>),
}

debug_as!(self: Backend {});

/// A type from which guards and locks can be made: every type that converts into a [`Backend`]. There is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "a guard can not be made from `{Self}`",
    label = "no client of the version of `redis` that this crate uses, and no other store",
    note = "a client must come from that version: make it by `stampede_guard::redis::Client::open(..)`, or ask for it in Cargo.toml",
    note = "with the feature `sentinel` a `SentinelClient` is a store, with `cluster` a `ClusterClient`; without `redis` none is",
    note = "for a URL there is `StampedeGuard::open`; docs/compile-errors.md: a client of another `redis`"
)]
pub trait IntoBackend: Into<Backend> {}

#[diagnostic::do_not_recommend]
impl<T: Into<Backend>> IntoBackend for T {}

impl Backend {
    /// A new node: the store of one guard or one `Locks`. It shares the connections of the backend's earlier nodes. A memory store ignores
    /// the settings: its commands cannot time out.
    #[cfg_attr(not(feature = "redis"), allow(unused_variables, reason = "a memory store answers at once"))]
    pub(crate) fn node(&self, settings: impl Into<ConnectionSettings>) -> Store {
        match &self.kind {
            StoreSource::Memory(store) => Store::Memory(Arc::new(store.clone().into_node())),
            #[cfg(feature = "redis")]
            StoreSource::Redis(servers) => Store::Redis(Arc::new(servers.node(settings.into()))),
            #[cfg(feature = "testing")]
            StoreSource::Command(node) => node(settings.into().command_timeout),
        }
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self { kind: StoreSource::Memory(store) }
    }
}

/// Clients of Redis servers as a [`Backend`]: of one server, of a primary that is found through sentinels, of a cluster.
#[cfg(feature = "redis")]
mod clients {
    use std::error::Error;
    use std::sync::Arc;

    use redis::{Client, ConnectionInfo, RedisError};

    use super::{Backend, ConnectionSettings, StoreSource};
    #[cfg(feature = "sentinel")]
    use crate::store::redis::SentinelClients;
    use crate::store::redis::login::{Credentials, CredentialsProvider};
    use crate::store::redis::{Connections, Login, RedisServers};

    impl Backend {
        /// The servers to which `connect` makes connections.
        fn on(
            connect: impl Fn(ConnectionSettings, Login) -> Connections + Send + Sync + 'static,
            provider: Option<CredentialsProvider>,
        ) -> Self {
            Self { kind: StoreSource::Redis(Arc::new(RedisServers::new(Arc::new(connect), provider))) }
        }

        /// The same servers, with credentials from a provider: tokens that live for minutes (IAM, Entra ID), or a password from a
        /// file. They replace the client's credentials on each connection, in a cluster on those to all nodes.
        ///
        /// The provider is called before the first connection, and again after about three quarters of the credentials'
        /// [life](Credentials::valid_for), once for all connections of this backend. Open connections then log in again by `AUTH`; none is
        /// closed, and no request waits. A call that takes longer than ten seconds counts as failed.
        ///
        /// While the provider fails, the present credentials are used until they end, and it is called again after a pause of up to five
        /// seconds. It is also called again if the server refuses new credentials: until then new connections log in with the previous
        /// ones. Both failures increment [`Health::credential_failures`](crate::health::Health::credential_failures) and are logged at
        /// most once a minute, with the provider's error and without the password. Once the credentials have ended, no connection is
        /// opened, and the guard behaves as while the store is [down](crate::PolicyBuilder::on_store_down); but a connection that is
        /// open is used until the server closes it.
        ///
        /// A store in memory needs no credentials: the provider is ignored. A `SentinelClient` still uses the credentials that it was built
        /// with for its own queries, to the sentinels and for the role of a server: with `Backend::sentinels` (feature `sentinel`) these
        /// rotate, too.
        ///
        /// # Examples
        ///
        /// ```
        /// use std::time::Duration;
        ///
        /// use stampede_guard::{Backend, Credentials, StampedeGuard};
        ///
        /// # async fn token() -> Result<String, std::io::Error> { Ok("..".to_owned()) }
        /// let redis = Backend::try_from("redis://redis.internal:6379/")?.credentials(|| async {
        ///     let token = token().await?;
        ///     Ok::<_, std::io::Error>(Credentials::new("guard", token).valid_for(Duration::from_secs(900)))
        /// });
        /// let guard = StampedeGuard::new(redis);
        /// # let _ = guard;
        /// # Ok::<(), redis::RedisError>(())
        /// ```
        #[must_use]
        pub fn credentials<F, Fut, E>(self, provider: F) -> Self
        where
            F: Fn() -> Fut + Send + Sync + 'static,
            Fut: Future<Output = Result<Credentials, E>> + Send + 'static,
            E: Into<Box<dyn Error + Send + Sync>>,
        {
            match self.kind {
                StoreSource::Redis(servers) => {
                    let servers = servers.logging_in(CredentialsProvider::new(provider));
                    Self { kind: StoreSource::Redis(Arc::new(servers)) }
                }
                kind => Self { kind },
            }
        }

        /// The primary that sentinels report, with credentials from a provider, as in [`credentials`](Self::credentials). The
        /// `SentinelClient` itself uses them, too: to query the sentinels, and to ask the server that they name for its role. Its
        /// credentials cannot change, so `build` is called for a new client each time the provider's credentials have changed.
        ///
        /// ```no_run
        /// use std::time::Duration;
        ///
        /// use redis::ConnectionAddr;
        /// use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
        /// use stampede_guard::{Backend, Credentials, StampedeGuard};
        ///
        /// # async fn token() -> Result<String, std::io::Error> { Ok("..".to_owned()) }
        /// let provider = || async {
        ///     let token = token().await?;
        ///     Ok::<_, std::io::Error>(Credentials::new("guard", token).valid_for(Duration::from_secs(900)))
        /// };
        /// let redis = Backend::sentinels(provider, |credentials| {
        ///     let sentinels = ["10.0.0.1", "10.0.0.2"].map(|host| ConnectionAddr::Tcp(host.into(), 26379));
        ///     SentinelClientBuilder::new(sentinels, "mymaster", SentinelServerType::Master)?
        ///         .set_client_to_redis_username(credentials.username())
        ///         .set_client_to_redis_password(credentials.password())
        ///         .build()
        /// });
        /// let guard = StampedeGuard::new(redis);
        /// # let _ = guard;
        /// ```
        #[cfg(feature = "sentinel")]
        pub fn sentinels<F, Fut, E, B>(provider: F, build: B) -> Self
        where
            F: Fn() -> Fut + Send + Sync + 'static,
            Fut: Future<Output = Result<Credentials, E>> + Send + 'static,
            E: Into<Box<dyn Error + Send + Sync>>,
            B: Fn(&Credentials) -> redis::RedisResult<redis::sentinel::SentinelClient>
                + Send
                + Sync
                + 'static,
        {
            Self::on(watched(SentinelClients::built(build)), Some(CredentialsProvider::new(provider)))
        }
    }

    impl From<Client> for Backend {
        fn from(client: Client) -> Self {
            let connect = move |settings, login| Connections::single(&client, settings, login);
            Self::on(connect, None)
        }
    }

    macro_rules! from_address {
        ($($address:ty),*) => {$(
            /// The server at this address. Does no I/O. A URL may name user, password and database.
            impl TryFrom<$address> for Backend {
                type Error = RedisError;

                fn try_from(address: $address) -> Result<Self, RedisError> {
                    Client::open(address).map(Self::from)
                }
            }
        )*};
    }
    from_address!(&str, String, ConnectionInfo);

    #[cfg(feature = "sentinel")]
    fn watched(clients: SentinelClients) -> impl Fn(ConnectionSettings, Login) -> Connections + Send + Sync {
        move |settings, login| Connections::watched(&clients, settings, login)
    }

    /// The server that the client's sentinels report as the primary. They are queried at each connect, and again when the server
    /// turns out not to be the primary any more. Credentials, TLS and database are the client's own. No command goes to replicas.
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
    impl From<redis::sentinel::SentinelClient> for Backend {
        fn from(client: redis::sentinel::SentinelClient) -> Self {
            Self::on(watched(SentinelClients::own(client)), None)
        }
    }

    /// A Redis Cluster. Credentials, TLS, database, settings of the sockets and the map of addresses are the client's own. The client's
    /// time-outs, retries, push sender, resolver of names and setting to read from replicas are not used: the guard follows its
    /// policy, and sends commands to masters only. [`connect`](crate::StampedeGuard::connect) returns as soon as one master takes
    /// commands; [`health`](crate::StampedeGuard::health) names a master that does not.
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
    impl From<redis::cluster::ClusterClient> for Backend {
        fn from(client: redis::cluster::ClusterClient) -> Self {
            let connect = move |settings, login| Connections::spread(client.clone(), settings, login);
            Self::on(connect, None)
        }
    }
}
