//! The guard around any tower service, with a function from request to key; and the traits that name the guard's requirements on a
//! wrapped service, so that the compiler can say what is missing.
//!
//! `poll_ready` is always ready: a hit never touches the inner service, and capacity reserved for a request
//! that only waits for the store would be lost to other requests. A clone of the inner service is made ready
//! just before it is called. So there is no back-pressure through `poll_ready`; put a load limit inside.
//!
//! The traits are implemented for every suitable type. `do_not_recommend` makes the compiler report the trait and its text, instead of
//! the first bound of the blanket implementation that fails.

use std::fmt;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tower_layer::Layer;
use tower_service::Service;

use super::StampedeGuard;
use crate::error::LoadError;
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
    pub fn memoize<K, R>(&self, key: K) -> MemoizeLayer<K, R>
    where
        K: Fn(&R) -> CacheKey,
    {
        MemoizeLayer { guard: self.clone(), key, requests: PhantomData }
    }
}

/// Makes [`Memoize`] services for requests of type `R`; see [`StampedeGuard::memoize`].
pub struct MemoizeLayer<K, R> {
    guard: StampedeGuard,
    key: K,
    requests: PhantomData<fn(&R)>,
}

// Not derived: a derived implementation would require `R: Clone`.
impl<K: Clone, R> Clone for MemoizeLayer<K, R> {
    fn clone(&self) -> Self {
        Self { guard: self.guard.clone(), key: self.key.clone(), requests: PhantomData }
    }
}

debug_as!(self: MemoizeLayer<K, R> { guard: self.guard });

// The layer repeats the bounds of the service, so that the compiler reports an unsuitable type here. At `service.oneshot(..)` it would only
// report that there is no such method.
impl<K, S, R, T, E, F> Layer<S> for MemoizeLayer<K, R>
where
    K: Clone,
    S: MemoizedService<R, Value = T, Failure = E, Pending = F> + CloneService,
    T: CacheableResponse,
    E: SharedError,
{
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

/// A service for requests of type `R` that [`memoize`](StampedeGuard::memoize) can wrap: every [`Service`] is one, and there is nothing
/// to implement.
#[diagnostic::on_unimplemented(
    message = "`memoize` has a key for `{R}`, and `{Self}` is no service for such requests",
    label = "no `tower::Service<{R}>`",
    note = "the key's closure names the type of the inner service's requests: `|request: &TheRequest| CacheKey::from(..)`",
    note = "docs/compile-errors.md: a key for other requests"
)]
pub trait MemoizedService<R>:
    Service<
        R,
        Response = <Self as MemoizedService<R>>::Value,
        Error = <Self as MemoizedService<R>>::Failure,
        Future = <Self as MemoizedService<R>>::Pending,
    >
{
    /// The response of the service.
    type Value;
    /// The error of the service.
    type Failure;
    /// The future that the service returns.
    type Pending: Future<Output = Result<Self::Value, Self::Failure>>;
}

#[diagnostic::do_not_recommend]
impl<S: Service<R>, R> MemoizedService<R> for S {
    type Value = S::Response;
    type Failure = S::Error;
    type Pending = S::Future;
}

// The bounds are on type parameters, not on projections: an unsuitable service is then one error instead of one for each projection.
impl<K, S, R, T, E, F> Service<R> for Memoize<K, S>
where
    K: Fn(&R) -> CacheKey,
    R: Send + 'static,
    S: MemoizedService<R, Value = T, Failure = E, Pending = F> + CloneService + Send + 'static,
    T: CacheableResponse,
    E: SharedError,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    type Response = T;
    type Error = LoadError<E>;
    type Future = MemoizeFuture<T, E>;

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

debug_as!(self: MemoizeFuture<T, E> {});

impl<T, E> Future for MemoizeFuture<T, E> {
    type Output = Result<T, LoadError<E>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx)
    }
}

/// A service that is [`Clone`], as all suitable ones are; there is nothing to implement.
///
/// A load belongs to no caller, so it owns a clone of the service.
#[diagnostic::on_unimplemented(
    message = "a guard clones the service that it wraps, and `{Self}` is not `Clone`",
    label = "not `Clone`",
    note = "box it as a `tower::util::BoxCloneService` instead of a `BoxService`, keep what can not be cloned in an `Arc`, or put a \
            `tower::buffer::BufferLayer` inside the guard",
    note = "docs/compile-errors.md: a service that is not `Clone`"
)]
pub trait CloneService: Clone {}

#[diagnostic::do_not_recommend]
impl<S: Clone> CloneService for S {}

/// The error of an HTTP service that a guard wraps: any type that is [`Display`](fmt::Display), [`Send`] and `'static`; there is
/// nothing to implement.
#[diagnostic::on_unimplemented(
    message = "a guard tells waiters the text of the inner service's error, and `{Self}` is not `Display + Send + 'static`",
    label = "an error without a text, or of one thread",
    note = "implement `std::fmt::Display` for `{Self}`, or map the error inside the guard, with `tower::ServiceBuilder::map_err`",
    note = "docs/compile-errors.md: an error without a text"
)]
pub trait ServiceError: fmt::Display + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<E: fmt::Display + Send + 'static> ServiceError for E {}

/// The error of a service that is memoized: any type that is [`Display`](fmt::Display), [`Debug`], [`Send`], [`Sync`] and `'static`;
/// there is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "a guard shares the inner service's error among its waiters, and `{Self}` is not `Display + Debug + Send + Sync + 'static`",
    label = "an error that can not be shared",
    note = "implement `std::fmt::Display` and `Debug` for `{Self}`, or map the error inside the guard, with \
            `tower::ServiceBuilder::map_err`",
    note = "docs/compile-errors.md: an error without a text"
)]
pub trait SharedError: fmt::Display + fmt::Debug + Send + Sync + 'static {}

#[diagnostic::do_not_recommend]
impl<E: fmt::Display + fmt::Debug + Send + Sync + 'static> SharedError for E {}

/// The response of a service that is memoized: any type that serde encodes and decodes, and that is [`Send`] and `'static`; there
/// is nothing to implement.
#[diagnostic::on_unimplemented(
    message = "`memoize` stores what is returned, and `{Self}` is not `Serialize + DeserializeOwned + Send + 'static`",
    label = "a response that can not be stored",
    note = "derive `serde::Serialize` and `serde::Deserialize` for `{Self}`, or map the response to such a type inside `memoize`, with \
            `tower::ServiceBuilder::map_response` or `and_then`",
    note = "docs/compile-errors.md: a response that can not be stored"
)]
pub trait CacheableResponse: Serialize + DeserializeOwned + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<T: Serialize + DeserializeOwned + Send + 'static> CacheableResponse for T {}
