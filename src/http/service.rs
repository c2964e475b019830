//! The layer and its service: the one place that knows tower, HTTP and the guard.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body;
use tokio::time::timeout;
use tower_layer::Layer;
use tower_service::Service;

use super::body::{BoxError, GuardedBody};
use super::load::{call, loader};
use super::request::{Admission, admit};
use super::status::{CacheStatus, age_and_status, own_answer, write_status};
use super::tee::has_no_content;
use super::wire::StoredResponse;
use crate::caller::Ask;
use crate::entry::{Encoding, Entry};
use crate::error::{Error, ErrorKind, Failure};
use crate::guard::StampedeGuard;
use crate::key::{CacheKey, Key};
use crate::loading::Loading;
use crate::node::{Given, Open, Opened};
use crate::observe::{Count, Outcome};
use crate::policy::OnStoreDown;
use crate::read_through::{Answer, Looked, Missing, look, peek};

impl<S> Layer<S> for StampedeGuard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { guard: self.clone(), inner }
    }
}

/// An HTTP service behind the guard; see the [module](crate::http).
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    guard: StampedeGuard,
    inner: S,
}

impl<S, Q, B> Service<Request<Q>> for Guarded<S>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Body + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    type Response = Response<GuardedBody<B>>;
    type Error = S::Error;
    type Future = GuardedFuture<B, S::Error>;

    /// Always ready: the inner service is made ready where it is called.
    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let exchange = Exchange { inner: self.inner.clone(), request };
        GuardedFuture { inner: exchange.run(self.guard.clone()) }
    }
}

/// The response of a [`Guarded`] service, on its way.
pub struct GuardedFuture<B, E> {
    inner: Boxed<Result<Response<GuardedBody<B>>, E>>,
}

/// Boxed, because an `async` block has no name; the type around it is opaque so that this can change.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<B, E> fmt::Debug for GuardedFuture<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardedFuture").finish_non_exhaustive()
    }
}

impl<B, E> Future for GuardedFuture<B, E> {
    type Output = Result<Response<GuardedBody<B>>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx)
    }
}

/// A stored response, ready to be sent.
#[derive(Clone)]
struct Replay {
    response: Response<Bytes>,
    trailers: Option<Box<HeaderMap>>,
}

/// An entry as a response to this request.
struct AsResponse {
    /// What `Cache-Status` says, of an entry that is fresh for so many seconds more.
    status: fn(u64) -> CacheStatus,
}

impl Open for AsResponse {
    type Value = Replay;

    fn open(&self, entry: &mut Entry, now: u64) -> Option<Replay> {
        self.replay(entry, now)
    }

    /// Decoded and dated once for all who share the read: it is not a second old.
    fn open_shared(&self, entry: &Entry, now: u64, opened: &Opened) -> Option<Replay> {
        let replay = opened.get_or_init(|| Box::new(self.replay(entry, now)));
        replay.downcast_ref::<Option<Replay>>()?.clone()
    }
}

impl AsResponse {
    fn replay(&self, entry: &Entry, now: u64) -> Option<Replay> {
        if entry.encoding != Encoding::HTTP {
            return None;
        }
        let stored = StoredResponse::decode(&entry.payload)?;
        let age = u64::from(stored.age) + now.saturating_sub(entry.stored_at) / 1000;
        let mut response = Response::new(stored.body);
        *response.status_mut() = stored.status;
        *response.version_mut() = stored.version;
        *response.headers_mut() = stored.headers;
        let fresh_until = entry.times.fresh_until;
        // One that was never fresh was made for those who waited for it.
        let status = if fresh_until <= now && fresh_until > entry.stored_at {
            CacheStatus::Stale { beyond: (now - fresh_until) / 1000 }
        } else {
            (self.status)(fresh_until.saturating_sub(now) / 1000)
        };
        age_and_status(response.headers_mut(), age, status);
        Some(Replay { response, trailers: stored.trailers })
    }
}

const HIT: fn(u64) -> CacheStatus = |ttl| CacheStatus::Hit { ttl };
/// One that is shared with its wave only has no time left to tell.
const COLLAPSED: fn(u64) -> CacheStatus = |ttl| CacheStatus::Collapsed { ttl: (ttl > 0).then_some(ttl) };

/// Step 8.
fn respond<B>(replay: Replay) -> Response<GuardedBody<B>> {
    let Replay { response, trailers } = replay;
    response.map(|body| GuardedBody::stored(body, trailers.map(|trailers| *trailers)))
}

/// One request and what is needed to answer it.
struct Exchange<S, Q> {
    inner: S,
    request: Request<Q>,
}

impl<S, Q, B> Exchange<S, Q>
where
    S: Service<Request<Q>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Body + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    /// Step 1. Each way is boxed by itself, so that a hit moves and allocates only what a hit needs.
    fn run(self, guard: StampedeGuard) -> Boxed<Result<Response<GuardedBody<B>>, S::Error>> {
        let (_, policy) = guard.parts();
        match admit(&self.request, &policy.http.requests) {
            Admission::Cached(key) => Box::pin(self.cached(guard, key)),
            Admission::LookUpOnly(key) => Box::pin(self.look_up_only(guard, key)),
            // Another method, another protocol: nothing about it is ours to remark on.
            Admission::Bypass("method" | "upgrade") => Box::pin(self.pass(guard, None)),
            Admission::Bypass(detail) => Box::pin(self.pass(guard, Some(CacheStatus::Bypass { detail }))),
        }
    }

    /// Straight to the inner service.
    async fn pass(
        self,
        guard: StampedeGuard,
        status: Option<CacheStatus>,
    ) -> Result<Response<GuardedBody<B>>, S::Error> {
        let (node, _) = guard.parts();
        node.counters.request(Outcome::Bypassed);
        let mut response = call(self.inner, self.request).await?.map(GuardedBody::passed);
        if let Some(status) = status {
            write_status(response.headers_mut(), status);
        }
        Ok(response)
    }

    /// Steps 2 to 8 for a GET.
    async fn cached(self, guard: StampedeGuard, key: CacheKey) -> Result<Response<GuardedBody<B>>, S::Error> {
        let (node, policy) = guard.parts();
        let Ok(key) = guard.key(key) else {
            return Box::pin(self.pass(guard, None)).await;
        };
        let ask = Ask { node, policy, key: &key };
        match look(ask, &AsResponse { status: HIT }).await {
            Looked::Hit(replay) => {
                node.answered(&key, Outcome::Hit);
                Ok(respond(replay))
            }
            Looked::Stale(replay) => {
                node.answered(&key, Outcome::Stale);
                Ok(respond(replay))
            }
            Looked::Aging { value, stale, refresh } => {
                node.answered(&key, if stale { Outcome::Stale } else { Outcome::Hit });
                // The triggering request asks the inner service; nobody waits for the answer.
                let (loader, _head) = loader(self.inner, self.request, policy);
                refresh.start(loader, !stale);
                Ok(respond(value))
            }
            // The layer was put on twice, or the handler asks its own URL: the outer one does the work.
            Looked::Failed(Failure::Guard(error)) if error.kind() == ErrorKind::Reentrant => {
                let nested = CacheStatus::Bypass { detail: "nested" };
                Box::pin(self.pass(guard.clone(), Some(nested))).await
            }
            Looked::Failed(failure) => Ok(failed(&guard, &key, failure)),
            // Boxed, as all ways but the hit's: what they need would make the future of every hit larger.
            Looked::Missing(missing) => Box::pin(self.load(&guard, &key, missing)).await,
        }
    }

    /// Steps 3 to 8 for a GET that is not in the store.
    async fn load(
        self,
        guard: &StampedeGuard,
        key: &Key,
        missing: Missing<'_>,
    ) -> Result<Response<GuardedBody<B>>, S::Error> {
        let (node, policy) = guard.parts();
        let (loader, mut head) = loader(self.inner, self.request, policy);
        let open = AsResponse { status: COLLAPSED };
        let answer = tokio::select! {
            biased;
            // Ahead of the load's end: a client has its first byte when the inner service sends it.
            Ok(head) = &mut head => {
                node.answered(key, Outcome::Led);
                return head;
            }
            answer = missing.load(&open, loader) => answer,
        };
        match answer {
            Answer::Coalesced(replay) => {
                node.answered(key, Outcome::Coalesced);
                Ok(respond(replay))
            }
            Answer::Stale(replay) => {
                node.answered(key, Outcome::Stale);
                Ok(respond(replay))
            }
            Answer::Failed(failure) => Ok(failed(guard, key, failure)),
            Answer::Led(ending) => match head.try_recv() {
                Ok(head) => {
                    node.answered(key, Outcome::Led);
                    head
                }
                Err(_) => Ok(failed(guard, key, ending.into_failure())),
            },
            Answer::Alone(loader) => {
                node.count(Count::loads);
                let load = Loading::scope(
                    node,
                    key,
                    loader.within,
                    (loader.run)(Given::alone(node, policy.load_timeout)),
                );
                // Bounded as any load, and so is only the head: the body is the client's own. A panic in it is
                // this task's own too.
                let failure = match timeout(policy.load_timeout, load).await {
                    Ok(loaded) => {
                        loaded.settle();
                        Failure::vanished()
                    }
                    Err(_) => Failure::Guard(Error::load_timeout(key, policy.load_timeout)),
                };
                match head.try_recv() {
                    Ok(head) => {
                        node.answered(key, Outcome::Bypassed);
                        head
                    }
                    Err(_) => Ok(failed(guard, key, failure)),
                }
            }
        }
    }

    /// Step 2 for a HEAD: answered from a stored GET, else by the inner service.
    async fn look_up_only(
        self,
        guard: StampedeGuard,
        key: CacheKey,
    ) -> Result<Response<GuardedBody<B>>, S::Error> {
        let (node, policy) = guard.parts();
        let Ok(key) = guard.key(key) else {
            return self.pass(guard, None).await;
        };
        let ask = Ask { node, policy, key: &key };
        let open = AsResponse { status: HIT };
        let found = if node.is_closed() { Ok(None) } else { peek(ask, &open).await };
        match found {
            Ok(Some(mut replay)) => {
                node.answered(&key, Outcome::Hit);
                // RFC 9110, 9.3.2: the headers that a GET would have had. One without content has no
                // length either (8.6).
                if !has_no_content(replay.response.status()) {
                    let length = HeaderValue::from(replay.response.body().len());
                    replay.response.headers_mut().entry(CONTENT_LENGTH).or_insert(length);
                }
                replay.trailers = None;
                replay.response.body_mut().clear();
                Ok(respond(replay))
            }
            Err(error) if policy.on_store_down == OnStoreDown::FailClosed => {
                let error = Error::store("looking up the entry", &key, error);
                Ok(failed(&guard, &key, Failure::Guard(error)))
            }
            Ok(None) | Err(_) => self.pass(guard.clone(), Some(CacheStatus::Miss { detail: "head" })).await,
        }
    }
}

/// The guard's own answer where there is no value. The text says what happened, never to which key.
fn failed<B>(guard: &StampedeGuard, key: &Key, failure: Failure) -> Response<GuardedBody<B>> {
    let (node, _) = guard.parts();
    node.answered(key, Outcome::Failed);
    const FAILED: &str = "the load of this resource failed\n";
    const TOO_LONG: &str = "the load of this resource took too long\n";
    const OVERLOADED: &str = "too many other resources are being loaded\n";
    const DOWN: &str = "the cache in front of this resource is unavailable\n";
    match failure {
        Failure::Loader { .. } => own_answer(StatusCode::BAD_GATEWAY, "load-failed", FAILED),
        Failure::Panicked(_) => own_answer(StatusCode::BAD_GATEWAY, "load-panicked", FAILED),
        Failure::Guard(error) if error.is_timeout() => {
            own_answer(StatusCode::GATEWAY_TIMEOUT, "timeout", TOO_LONG)
        }
        Failure::Guard(error) if error.kind() == ErrorKind::Overloaded => {
            own_answer(StatusCode::SERVICE_UNAVAILABLE, "overloaded", OVERLOADED)
        }
        Failure::Guard(_) => own_answer(StatusCode::SERVICE_UNAVAILABLE, "store-down", DOWN),
    }
}
