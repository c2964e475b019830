//! One server, or one name that stands for it.

use std::future::ready;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::{Client, RedisResult};

use super::endpoint::{Endpoint, Located};
use super::server::{ServerAddress, TimedReading};

pub(crate) struct SingleEndpoint(Arc<ServerAddress>);

impl SingleEndpoint {
    pub(crate) fn new(client: &Client) -> Self {
        Self(Arc::new(ServerAddress::new(client)))
    }
}

impl Endpoint for SingleEndpoint {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        ready(Ok(Arc::clone(&self.0).into())).boxed()
    }

    fn known(&self) -> Option<Arc<ServerAddress>> {
        Some(Arc::clone(&self.0))
    }

    fn look<'a>(
        &'a self,
        connection: &'a mut MultiplexedConnection,
    ) -> BoxFuture<'a, RedisResult<Option<TimedReading>>> {
        self.0.look(connection).boxed()
    }
}
