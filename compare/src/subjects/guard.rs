//! This crate: around a loader, as a layer, and with hits from memory.

use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::Request;
use http_body_util::Empty;
use stampede_guard::{LoadContext, Policy, StampedeGuard};
use tower::{Layer as _, Service};

use super::layered::{Handler, Layered};
use super::{Loader, Subject};
use crate::wire::Setup;

async fn guard(setup: &Setup, local: bool) -> StampedeGuard {
    let mut policy = Policy::builder()
        .fresh_for(Duration::from_millis(setup.ttl_ms))
        .stale_while_revalidate(Duration::from_millis(setup.stale_ms));
    if local {
        policy = policy.local_for(Duration::MAX);
    }
    let client = redis::Client::open(setup.redis.as_str()).expect("an address");
    let guard = StampedeGuard::builder(client).namespace("compare").policy(policy.build().expect("a policy"));
    let guard = guard.build().expect("a guard");
    guard.connect().await.expect("the server");
    guard
}

async fn invalidate(guard: &StampedeGuard, key: &str) -> Result<(), String> {
    guard.invalidate(key).await.map_err(|error| error.to_string())
}

/// With the loader's word on whether its value may be stored.
async fn get_with_context(guard: &StampedeGuard, loader: Loader, key: &str) -> Result<Bytes, String> {
    let requested = key.to_owned();
    let load = move |mut cx: LoadContext<Bytes>| async move {
        let loaded = loader.load(requested).await?;
        if loaded.private {
            cx.do_not_store();
        }
        Ok::<_, String>(loaded.value)
    };
    guard.load(key).get(load).await.map(|loaded| loaded.value).map_err(|error| error.to_string())
}

pub(super) struct AroundLoader {
    guard: StampedeGuard,
    loader: Loader,
    uncacheable: bool,
}

impl AroundLoader {
    pub(super) async fn new(setup: &Setup) -> Self {
        let loader = Loader { port: setup.origin };
        Self { guard: guard(setup, false).await, loader, uncacheable: setup.uncacheable }
    }
}

impl Subject for AroundLoader {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        if self.uncacheable {
            return get_with_context(&self.guard, self.loader, key).boxed();
        }
        let (loader, requested) = (self.loader, key.to_owned());
        let value = self.guard.get_or_load(key, move || loader.value(requested));
        value.map(|value| value.map_err(|error| error.to_string())).boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        invalidate(&self.guard, key).boxed()
    }
}

/// `load(..).get_shared` with a policy that keeps copies in memory.
pub(super) struct LocalTier {
    guard: StampedeGuard,
    loader: Loader,
    uncacheable: bool,
}

impl LocalTier {
    pub(super) async fn new(setup: &Setup) -> Self {
        let loader = Loader { port: setup.origin };
        Self { guard: guard(setup, true).await, loader, uncacheable: setup.uncacheable }
    }
}

impl Subject for LocalTier {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        if self.uncacheable {
            return get_with_context(&self.guard, self.loader, key).boxed();
        }
        let (loader, requested) = (self.loader, key.to_owned());
        let value = self.guard.load(key).get_shared(move |_| loader.value(requested));
        value.map(|loaded| loaded.map(|loaded| (*loaded.value).clone()).map_err(|error| error.to_string())).boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        invalidate(&self.guard, key).boxed()
    }
}

/// The layer; any unsafe method that succeeds invalidates its URI.
pub(super) async fn layer(setup: &Setup) -> Layered<impl GuardedService> {
    let service = guard(setup, false).await.layer(Handler(Loader { port: setup.origin }));
    Layered { service, remove: None, lacks: &[] }
}

/// The layer around the handler.
pub(super) trait GuardedService:
    Service<
        Request<Empty<Bytes>>,
        Response = http::Response<Self::Body>,
        Error: std::fmt::Display,
        Future: Send,
    > + Clone
    + Send
    + Sync
    + 'static
{
    type Body: http_body::Body<Data = Bytes, Error: std::fmt::Display> + Send + 'static;
}

impl<S, B> GuardedService for S
where
    S: Service<Request<Empty<Bytes>>, Response = http::Response<B>, Error: std::fmt::Display, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    B: http_body::Body<Data = Bytes, Error: std::fmt::Display> + Send + 'static,
{
    type Body = B;
}
