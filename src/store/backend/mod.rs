//! [`Backend`]: the type from which a guard is made, and into which every kind of store converts.

#[cfg(feature = "cluster")]
mod cluster;
#[cfg(feature = "redis")]
mod credentials;
#[cfg(feature = "sentinel")]
mod sentinel;
#[cfg(feature = "redis")]
mod servers;
#[cfg(feature = "redis")]
mod single;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::store::StoreHandle;
#[cfg(feature = "redis")]
use crate::store::credentials::CredentialsProvider;
use crate::store::memory::MemoryStore;

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
#[derive(Clone, Debug)]
pub struct Backend {
    pub(crate) kind: Arc<dyn IntoStore>,
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

/// A type from which a store can be made. `Any` lets a caller find the concrete type.
pub(crate) trait IntoStore: Any + fmt::Debug + Send + Sync {
    /// A new node, on the connections of the nodes before it.
    fn node(&self, command_timeout: Duration) -> StoreHandle;

    /// The same servers, on connections of their own, which log in with the provider's credentials; `None` for a store without
    /// connections.
    #[cfg(feature = "redis")]
    fn logging_in(&self, _provider: CredentialsProvider) -> Option<Backend> {
        None
    }
}

impl Backend {
    pub(crate) fn of(kind: impl IntoStore) -> Self {
        Self { kind: Arc::new(kind) }
    }

    /// A new node.
    pub(crate) fn node(&self, command_timeout: Duration) -> StoreHandle {
        self.kind.node(command_timeout)
    }
}

impl IntoStore for MemoryStore {
    /// A memory store has no commands that could time out.
    fn node(&self, _command_timeout: Duration) -> StoreHandle {
        StoreHandle::memory(self.clone())
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self::of(store)
    }
}
