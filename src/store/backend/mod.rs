//! [`Backend`]: the type from which a guard is made, and into which every kind of store converts.

#[cfg(feature = "redis")]
mod clients;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::memory::MemoryStore;

/// The store that a fleet shares: made from a `redis::Client` or a [`MemoryStore`] by `into()`, and with the features of that
/// name from a `redis::sentinel::SentinelClient` or a `redis::cluster::ClusterClient`.
///
/// **Clones share their connections.** All guards and locks that are made from clones of one backend, of any namespaces and policies,
/// have one connection for commands and one for messages (in a cluster one for commands to each master); guards that are made from
/// clones of a client have their own. Guards and locks open further ones only while a lock with
/// `Waiting::Keyspace` waits, or an invalidation that [waits for replicas](crate::PolicyBuilder::invalidate_replicas). The
/// first of them decides when a connection counts as lost: a guard by its policy's `command_timeout`, `Locks` by one second. The
/// connections are closed with the last of them, and a later one opens others.
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
    Command(Arc<dyn Fn(Duration) -> Store + Send + Sync>),
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backend").finish_non_exhaustive()
    }
}

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
    /// A new node, which shares the connections of the nodes made earlier. A memory store ignores `command_timeout`: its commands cannot
    /// time out.
    #[cfg_attr(not(feature = "redis"), allow(unused_variables, reason = "a memory store answers at once"))]
    pub(crate) fn node(&self, command_timeout: Duration) -> Store {
        match &self.kind {
            StoreSource::Memory(store) => Store::Memory(Arc::new(store.clone().into_node())),
            #[cfg(feature = "redis")]
            StoreSource::Redis(servers) => Store::Redis(Arc::new(servers.node(command_timeout))),
            #[cfg(feature = "testing")]
            StoreSource::Command(node) => node(command_timeout),
        }
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self { kind: StoreSource::Memory(store) }
    }
}
