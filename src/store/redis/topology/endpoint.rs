//! What all kinds of deployments say of where to connect to.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::{Client, RedisError, RedisResult};

use super::server::{ServerAddress, TimedReading, is_by_tls, read_clock};
use crate::store::redis::errors::advice::on_connecting;

/// Where the connections of one node lead to. Asked while connecting and between commands, never on a command's way.
pub(crate) trait Endpoint: Send + Sync {
    /// The server that the guard's commands are to go to from now on.
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>>;

    /// The server that has the guard's commands, for a connection beside them.
    fn current(&self) -> BoxFuture<'_, RedisResult<Located>> {
        self.locate()
    }

    /// How long [`locate`](Self::locate) may take, at the least.
    fn locating(&self) -> Duration {
        Duration::ZERO
    }

    /// The guard's commands go to `server` now.
    fn found(&self, _server: &Arc<ServerAddress>) {}

    /// The same of a connection that is not the guard's: nothing follows there.
    fn glimpsed(&self, _server: &Arc<ServerAddress>) {}

    /// The server, as far as it is known without asking.
    fn known(&self) -> Option<Arc<ServerAddress>>;

    /// Reads the server's clock, and sees to it that it is still a primary where that may change.
    fn look<'a>(
        &'a self,
        connection: &'a mut MultiplexedConnection,
    ) -> BoxFuture<'a, RedisResult<Option<TimedReading>>> {
        read_clock(connection, self.may_be_demoted()).boxed()
    }

    /// Whether another server may become the primary while this one answers.
    fn may_be_demoted(&self) -> bool {
        false
    }

    /// Whether another server is the primary now, by the word of those that would know; asked now and then, and soon after
    /// a [`doubt`](Self::doubt).
    fn has_been_replaced(&self) -> BoxFuture<'_, bool> {
        ready(false).boxed()
    }

    /// The server has lost its replicas: it may be cut off from the sentinels too.
    fn doubt(&self) {}

    /// Whether it is a node of a cluster.
    fn is_node(&self) -> bool {
        false
    }

    /// Whether the node at `address` is no more part of the cluster. Messages would not come to it.
    fn has_lost(&self, _address: &str) -> bool {
        false
    }

    /// Whether connections may be by TLS.
    fn may_want_tls(&self) -> bool {
        self.known().is_some_and(|server| is_by_tls(server.info()))
    }

    /// What to do about a failure to connect, if anything is known to help.
    fn advice(&self, error: &RedisError) -> Option<&'static str> {
        on_connecting(self.known()?.info().addr(), error)
    }

    /// A client of one of the sentinels that watch over the server, where there are some.
    fn sentinel(&self) -> Option<BoxFuture<'_, RedisResult<Client>>> {
        None
    }
}

/// A server to connect to.
pub(crate) struct Located {
    pub(crate) server: Arc<ServerAddress>,
    /// Its address, where it was chosen among the nodes of a cluster.
    pub(crate) node: Option<String>,
}

impl From<Arc<ServerAddress>> for Located {
    fn from(server: Arc<ServerAddress>) -> Self {
        Self { server, node: None }
    }
}
