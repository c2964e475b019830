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
use super::exchange::{BoxFuture, Exchange};
use crate::guard::StampedeGuard;

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
        GuardedFuture { inner: exchange.run(self.guard.latest()) }
    }
}

/// The future response of a [`Guarded`] service.
pub struct GuardedFuture<B, E> {
    inner: BoxFuture<Result<Response<GuardedBody<B>>, E>>,
}

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
