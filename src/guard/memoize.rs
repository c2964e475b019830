//! The guard around any tower service, with a function from request to key.
//!
//! `poll_ready` is always ready: a hit never touches the inner service, and capacity reserved for a request
//! that only waits for the store would be lost to other requests. A clone of the inner service is made ready
//! just before it is called. So there is no back-pressure through `poll_ready`; put a load limit inside.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tower_layer::Layer;
use tower_service::Service;

use crate::error::LoadError;
use crate::guard::StampedeGuard;
use crate::key::CacheKey;

impl StampedeGuard {
    /// Memoizes any tower service: `key` returns the [`CacheKey`](crate::CacheKey) under which a request's response is cached.
    /// It is a closure that names the type of its argument, as in the example.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{CacheKey, StampedeGuard};
    /// use tower::{ServiceBuilder, ServiceExt as _};
    ///
    /// let square = tower::service_fn(|n: u64| async move { Ok::<u64, std::io::Error>(n * n) });
    /// let service = ServiceBuilder::new()
    ///     .layer(StampedeGuard::in_memory().memoize(|n: &u64| CacheKey::from(("square", n))))
    ///     .service(square);
    /// assert_eq!(service.oneshot(12).await?, 144);
    /// # Ok(()) }
    /// ```
    pub fn memoize<K>(&self, key: K) -> MemoizeLayer<K> {
        MemoizeLayer::new(self.clone(), key)
    }
}

/// Makes [`Memoize`] services; see [`StampedeGuard::memoize`].
#[derive(Clone)]
pub struct MemoizeLayer<K> {
    guard: StampedeGuard,
    key: K,
}

impl<K> MemoizeLayer<K> {
    pub(crate) fn new(guard: StampedeGuard, key: K) -> Self {
        Self { guard, key }
    }
}

impl<K> fmt::Debug for MemoizeLayer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoizeLayer").field("guard", &self.guard).finish_non_exhaustive()
    }
}

impl<K: Clone, S> Layer<S> for MemoizeLayer<K> {
    type Service = Memoize<K, S>;

    fn layer(&self, inner: S) -> Self::Service {
        Memoize { guard: self.guard.clone(), key: self.key.clone(), inner }
    }
}

/// Wraps any tower service: the fleet loads the response of each key once. HTTP is not required.
#[derive(Clone)]
pub struct Memoize<K, S> {
    guard: StampedeGuard,
    key: K,
    inner: S,
}

impl<K, S: fmt::Debug> fmt::Debug for Memoize<K, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guard, key: _, inner } = self;
        f.debug_struct("Memoize").field("guard", guard).field("inner", inner).finish_non_exhaustive()
    }
}

impl<K, S, R> Service<R> for Memoize<K, S>
where
    K: Fn(&R) -> CacheKey,
    R: Send + 'static,
    S: Service<R> + Clone + Send + 'static,
    S::Response: Serialize + DeserializeOwned + Send + 'static,
    S::Error: fmt::Display + fmt::Debug + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = LoadError<S::Error>;
    type Future = MemoizeFuture<S::Response, S::Error>;

    /// Always ready.
    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        let key = (self.key)(&request);
        let guard = self.guard.clone();
        let mut inner = self.inner.clone();
        MemoizeFuture {
            inner: Box::pin(async move {
                let load = move || async move {
                    poll_fn(|cx| inner.poll_ready(cx)).await?;
                    inner.call(request).await
                };
                guard.get_or_load(key, load).await
            }),
        }
    }
}

/// The future of a [`Memoize`] service's response.
pub struct MemoizeFuture<T, E> {
    inner: Pin<Box<dyn Future<Output = Result<T, LoadError<E>>> + Send>>,
}

impl<T, E> fmt::Debug for MemoizeFuture<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoizeFuture").finish_non_exhaustive()
    }
}

impl<T, E> Future for MemoizeFuture<T, E> {
    type Output = Result<T, LoadError<E>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx)
    }
}
