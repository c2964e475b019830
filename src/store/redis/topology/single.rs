//! One server, or one name that stands for it.

use std::future::ready;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::{Client, RedisError, RedisResult};

use super::endpoint::{Endpoint, Located};
use super::server::{Reading, Server};
use crate::store::redis::errors::advice::on_connecting;

pub(crate) struct Single(Arc<Server>);

impl Single {
    pub(crate) fn new(client: &Client) -> Self {
        Self(Arc::new(Server::new(client)))
    }
}

impl Endpoint for Single {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        ready(Ok(Arc::clone(&self.0).into())).boxed()
    }

    fn known(&self) -> Option<Arc<Server>> {
        Some(Arc::clone(&self.0))
    }

    fn look<'a>(
        &'a self,
        connection: &'a mut MultiplexedConnection,
    ) -> BoxFuture<'a, RedisResult<Option<Reading>>> {
        self.0.look(connection).boxed()
    }

    fn may_want_tls(&self) -> bool {
        self.0.is_by_tls()
    }

    fn advice(&self, error: &RedisError) -> Option<&'static str> {
        on_connecting(self.0.info().addr(), error)
    }
}
