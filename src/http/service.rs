//! The guard as a `tower` layer, and its service [`Guarded`].

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::body::{BoxError, GuardedBody};
use super::exchange::{AnswerFuture, Exchange};
use crate::guard::StampedeGuard;
use crate::guard::memoize::{CloneService, ServiceError};

impl<S: CloneService> Layer<S> for StampedeGuard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { guard: self.clone(), inner }
    }
}

/// An HTTP service behind the guard; see the [module](crate::http).
#[derive(Clone, Debug)]
// If `guarded.oneshot(..)` does not compile, the compiler prints the next line. No attribute adds a hint there, so a comment does.
pub struct Guarded<S /* no `Service`? docs/compile-errors.md says why */> {
    guard: StampedeGuard,
    inner: S,
}

/// An HTTP service that the layer can wrap, for requests with bodies of type `Q`. Every [`Service`] of `http::Request<Q>` that returns
/// `http::Response`s implements it.
#[diagnostic::on_unimplemented(
    message = "the guard's layer wraps services of `http::Request<{Q}>` with an `http::Response`, and `{Self}` is none",
    label = "no `tower::Service<http::Request<{Q}>>` with an `http::Response`",
    note = "a client with requests of its own needs a service that converts them: `ReqwestService` (feature `reqwest`) does that for a \
            `reqwest::Client`, and docs/rest-clients.md has others",
    note = "a service without HTTP is wrapped by `guard.memoize(|request: &TheRequest| CacheKey::from(..))`",
    note = "docs/compile-errors.md: a client with requests of its own"
)]
pub trait HttpService<Q>:
    Service<
        Request<Q>,
        Response = Response<<Self as HttpService<Q>>::Body>,
        Error = <Self as HttpService<Q>>::Failure,
        Future = <Self as HttpService<Q>>::Pending,
    >
{
    /// The body of its responses.
    type Body;
    /// Its error.
    type Failure;
    /// Its future.
    type Pending: Future<Output = Result<Response<Self::Body>, Self::Failure>>;
}

#[diagnostic::do_not_recommend]
impl<S, Q, B> HttpService<Q> for S
where
    S: Service<Request<Q>, Response = Response<B>>,
{
    type Body = B;
    type Failure = S::Error;
    type Pending = S::Future;
}

// Each bound is on a type parameter, not on a projection: a type that is no HTTP service then causes one error, not one for each
// projection.
impl<S, Q, B, E, F> Service<Request<Q>> for Guarded<S>
where
    S: HttpService<Q, Body = B, Failure = E, Pending = F> + CloneService + Send + 'static,
    E: ServiceError,
    F: Send + 'static,
    Q: Body + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    type Response = Response<GuardedBody<B>>;
    type Error = E;
    type Future = GuardedFuture<B, E>;

    /// Always ready: the inner service is made ready where it is called.
    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), E>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let guard = self.guard.current();
        let shadow = guard.parts().1.shadow;
        GuardedFuture { inner: Exchange::begin(&self.inner, request, guard, shadow) }
    }
}

/// The future response of a [`Guarded`] service.
pub struct GuardedFuture<B, E> {
    inner: AnswerFuture<B, E>,
}

impl<B, E> fmt::Debug for GuardedFuture<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardedFuture").finish_non_exhaustive()
    }
}

impl<B, E> Future for GuardedFuture<B, E> {
    type Output = Result<Response<GuardedBody<B>>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.inner).poll(cx)
    }
}
