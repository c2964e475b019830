//! hitbox: its tower layer over `RedisBackend`, with the concurrency manager that its documentation names against stampedes.

use std::sync::Arc;
use std::time::Duration;

use ::hitbox::backend::Backend as _;
use ::hitbox::concurrency::BroadcastConcurrencyManager;
use ::hitbox::offload::OffloadManager;
use ::hitbox::policy::{ConcurrencyLimit, PolicyConfig, StalePolicy};
use ::hitbox::predicate::PredicateExt as _;
use ::hitbox::{Config, Extractor as _};
use bytes::Bytes;
use futures_util::FutureExt as _;
use hitbox_http::extractors::Method;
use hitbox_http::extractors::path::PathExtractor as _;
use hitbox_http::predicates::NeutralRequestPredicate;
use hitbox_http::predicates::response::header::Operation;
use hitbox_http::predicates::response::{Header, StatusCode};
use hitbox_http::{BufferedBody, CacheableHttpRequest};
use hitbox_redis::{ConnectionMode, RedisBackend};
use hitbox_tower::Cache;
use http::Request;
use http_body_util::Empty;
use tower::Layer as _;

use super::layered::{Handler, Layered, Remove};
use super::{Loader, Subject};
use crate::wire::Setup;

pub(super) fn subject(setup: &Setup) -> Arc<dyn Subject> {
    let backend = RedisBackend::builder().connection(ConnectionMode::single(setup.redis.as_str()));
    let backend = backend.build().expect("an address");
    // Its time to live includes the stale window.
    let mut policy = PolicyConfig::builder()
        .ttl(Duration::from_millis(setup.ttl_ms + setup.stale_ms))
        .concurrency(ConcurrencyLimit::new(1).expect("between 1 and 255"));
    if setup.stale_ms > 0 {
        let stale = Duration::from_millis(setup.ttl_ms);
        policy = policy.stale(stale).stale_policy(StalePolicy::OffloadRevalidate);
    }
    let extractor = || Method::new().path("/{key}");
    let uncacheable = Header::new(Operation::Contains(http::header::CACHE_CONTROL, "no-store".to_owned()));
    let config = Config::builder()
        .request_predicate(NeutralRequestPredicate::new())
        .response_predicate(StatusCode::new(http::StatusCode::OK).and(uncacheable.not()))
        .extractor(extractor())
        .policy(policy.build())
        .build();
    let layer = Cache::builder()
        .backend(backend.clone())
        .config(config)
        .concurrency_manager(BroadcastConcurrencyManager::new())
        .offload(OffloadManager::with_defaults())
        .build();
    let remove: Remove = Box::new(move |key| {
        let backend = backend.clone();
        let request = Request::get(format!("/{key}"))
            .body(BufferedBody::Passthrough(Empty::<Bytes>::new()))
            .expect("a path");
        async move {
            let (_, key) =
                extractor().get(CacheableHttpRequest::from_request(request)).await.into_cache_key();
            backend.remove(&key).await.map(|_| ()).map_err(|error| error.to_string())
        }
        .boxed()
    });
    let service = layer.layer(Handler(Loader { port: setup.origin }));
    Arc::new(Layered { service, remove: Some(remove), lacks: &[] })
}
