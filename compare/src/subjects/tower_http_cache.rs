//! tower-http-cache: its layer over `RedisBackend`, with the connection settings of its README.

use std::sync::Arc;
use std::time::Duration;

use ::tower_http_cache::backend::CacheBackend as _;
use ::tower_http_cache::prelude::{CacheLayer, RedisBackend};
use futures_util::FutureExt as _;
use redis::aio::ConnectionManagerConfig;
use tower::Layer as _;

use super::layered::{Handler, Layered, Remove};
use super::{Loader, Subject};
use crate::wire::Setup;

pub(super) async fn subject(setup: &Setup) -> Arc<dyn Subject> {
    let client = redis::Client::open(setup.redis.as_str()).expect("an address");
    let config = ConnectionManagerConfig::new()
        .set_response_timeout(Some(Duration::from_secs(10)))
        .set_connection_timeout(Some(Duration::from_secs(5)));
    let manager = client.get_connection_manager_with_config(config).await.expect("the server");
    let backend = RedisBackend::new(manager);
    let layer = CacheLayer::builder(backend.clone())
        .ttl(Duration::from_millis(setup.ttl_ms))
        .stale_while_revalidate(Duration::from_millis(setup.stale_ms))
        .build();
    let remove: Remove = Box::new(move |key| {
        let backend = backend.clone();
        async move { backend.invalidate(&format!("/{key}")).await.map_err(|error| error.to_string()) }.boxed()
    });
    let service = layer.layer(Handler(Loader { port: setup.origin }));
    Arc::new(Layered { service, remove: Some(remove), lacks: &[] })
}
