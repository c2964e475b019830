//! Redis servers, and the connections to them that all clones of one backend share.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::{Backend, IntoStore};
use crate::store::StoreHandle;
use crate::store::credentials::CredentialsProvider;
use crate::store::redis::{Connections, Login, RedisStore};
use crate::sync::lock;

/// A client of one kind of servers.
pub(super) trait ServerSource: Clone + fmt::Debug + Send + Sync + 'static {
    /// New connections, none of which is open yet.
    fn connections(&self, command_timeout: Duration, login: Login) -> Connections;
}

/// Servers as a backend.
#[derive(Debug)]
struct Shared<S> {
    servers: S,
    provider: Option<CredentialsProvider>,
    /// The connections of the nodes so far. Weak: they are closed with the last node.
    latest: Mutex<Weak<Connections>>,
}

impl<S: ServerSource> IntoStore for Shared<S> {
    fn node(&self, command_timeout: Duration) -> StoreHandle {
        let mut latest = lock(&self.latest);
        let shared = latest.upgrade().filter(|connections| connections.join());
        let connections = shared.unwrap_or_else(|| {
            let login = Login::by(self.provider.clone());
            Arc::new(self.servers.connections(command_timeout, login))
        });
        *latest = Arc::downgrade(&connections);
        StoreHandle::redis(RedisStore::on(connections))
    }

    fn logging_in(&self, provider: CredentialsProvider) -> Option<Backend> {
        Some(Backend::on(self.servers.clone(), Some(provider)))
    }
}

impl Backend {
    pub(super) fn on(servers: impl ServerSource, provider: Option<CredentialsProvider>) -> Self {
        Self::of(Shared { servers, provider, latest: Mutex::default() })
    }
}
