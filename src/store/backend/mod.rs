//! What a guard is made from: one type that every kind of store converts into.

#[cfg(feature = "cluster")]
mod cluster;
#[cfg(feature = "redis")]
mod credentials;
#[cfg(feature = "sentinel")]
mod sentinel;
#[cfg(feature = "redis")]
mod single;

use std::any::Any;
use std::fmt;
use std::time::Duration;

use crate::store::StoreHandle;
#[cfg(feature = "redis")]
use crate::store::credentials::CredentialsProvider;
use crate::store::memory::MemoryStore;

/// Where the fleet meets: made from a `redis::Client` or a [`MemoryStore`] by `into()`, and with the features of that name
/// from a `redis::sentinel::SentinelClient` or a `redis::cluster::ClusterClient`.
#[derive(Debug)]
pub struct Backend {
    pub(crate) kind: Box<dyn IntoStore>,
}

/// What a guard or locks are made from: every type that converts into a [`Backend`]; there is nothing to implement.
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

/// What a store can be made from. Its type can be asked for.
pub(crate) trait IntoStore: Any + fmt::Debug + Send + Sync {
    fn into_store(self: Box<Self>, command_timeout: Duration) -> StoreHandle;

    /// Has all connections log in with the provider's credentials. A store without connections asks for none.
    #[cfg(feature = "redis")]
    fn log_in_with(&mut self, _provider: CredentialsProvider) {}
}

impl Backend {
    pub(crate) fn of(kind: impl IntoStore) -> Self {
        Self { kind: Box::new(kind) }
    }

    pub(crate) fn into_store(self, command_timeout: Duration) -> StoreHandle {
        self.kind.into_store(command_timeout)
    }
}

impl IntoStore for MemoryStore {
    /// There is no wire to wait for.
    fn into_store(self: Box<Self>, _command_timeout: Duration) -> StoreHandle {
        StoreHandle::memory(*self)
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Self {
        Self::of(store)
    }
}
