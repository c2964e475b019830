//! The nodes of a cluster: a certain one for commands, any of them for messages.

use std::future::ready;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::{Client, RedisError, RedisResult};

use super::nodes::ClusterNodes;
use crate::store::redis::errors::advice::{on_connecting, on_refusal};
use crate::store::redis::topology::endpoint::{Endpoint, Located};
use crate::store::redis::topology::server::{ServerAddress, is_by_tls};

/// A certain node. It is not asked whether it is a primary: a replica sends a command for a key to its master.
pub(crate) struct ClusterEndpoint(Arc<ServerAddress>);

impl ClusterEndpoint {
    pub(crate) fn new(client: &Client) -> Self {
        Self(Arc::new(ServerAddress::new(client)))
    }
}

impl Endpoint for ClusterEndpoint {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        ready(Ok(Arc::clone(&self.0).into())).boxed()
    }

    fn known(&self) -> Option<Arc<ServerAddress>> {
        Some(Arc::clone(&self.0))
    }

    fn is_node(&self) -> bool {
        true
    }
}

/// Any node, another at each connection.
impl Endpoint for ClusterNodes {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        let next = self.next();
        let located = next
            .map(|(client, at)| Located { server: Arc::new(ServerAddress::new(&client)), node: Some(at) });
        ready(located).boxed()
    }

    fn known(&self) -> Option<Arc<ServerAddress>> {
        None
    }

    fn is_node(&self) -> bool {
        true
    }

    fn has_lost(&self, address: &str) -> bool {
        self.has_lost(address)
    }

    fn may_want_tls(&self) -> bool {
        self.example().is_some_and(|info| is_by_tls(&info))
    }

    fn advice(&self, error: &RedisError) -> Option<&'static str> {
        self.example().map_or_else(|| on_refusal(error), |info| on_connecting(info.addr(), error))
    }
}
