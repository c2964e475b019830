//! The wall around an inner service: behind it the guard sees no type of the application, so its code is compiled once, in this crate.
//!
//! [`ServiceCall`] has the service and a request's body. Everything else sees it as an [`Upstream`], responses with an
//! [`UpstreamBody`], and errors as an [`UpstreamError`], from which the wall takes the service's own error again.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::inner_body::{BoxError, RequestBody, UpstreamBody, empty, make_body, read_as_upstream};
use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::groups::TagHeaders;
use crate::task::box_future;

/// Boxed, because an `async` block has no name; the type around it is opaque so that this can change.
pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A request without its body, which stays with the inner service.
pub(super) type RequestHead = Request<()>;

/// What the inner service returns: a response, or its error.
pub(super) type UpstreamResponse = Result<Response<UpstreamBody>, UpstreamError>;

/// An inner service, and the body of one request to it.
pub(super) trait Upstream: Send {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UpstreamError>>;

    /// Calls the service, which must be ready.
    fn call(self: Box<Self>, head: RequestHead) -> BoxFuture<UpstreamResponse>;

    /// The same service for a request with this content, else with an empty body. `None` unless the guard can make a body of this type: an
    /// empty one only with the feature `axum` for axum's bodies.
    fn copy(&self, content: Option<Bytes>) -> Option<Box<dyn Upstream>>;

    /// Takes the request's body. `None` if the guard can make no body of its type.
    fn take_body(&mut self) -> Option<UpstreamBody>;

    /// Gives the request a body in place of one that was taken.
    fn put_body(&mut self, body: RequestBody);
}

/// A request for the inner service.
pub(super) struct UpstreamRequest {
    pub(super) upstream: Box<dyn Upstream>,
    pub(super) head: RequestHead,
}

impl UpstreamRequest {
    /// Calls the service once it is ready: the guard's own `poll_ready` does not wait for it.
    pub(super) async fn send(mut self) -> UpstreamResponse {
        self.ready().await?;
        self.call().await
    }

    pub(super) async fn ready(&mut self) -> Result<(), UpstreamError> {
        poll_fn(|cx| self.upstream.poll_ready(cx)).await
    }

    /// Calls the service, which must be [`ready`](Self::ready).
    pub(super) fn call(self) -> BoxFuture<UpstreamResponse> {
        self.upstream.call(self.head)
    }

    /// A copy with the content of a QUERY, or of another request without a body, to be made before the request is sent. `None` if only the
    /// head can be copied.
    pub(super) fn copy(&self) -> Option<Self> {
        Some(Self { upstream: self.upstream.copy(None)?, head: self.head.clone() })
    }
}

/// An [`Upstream`] with the application's types: those of its service and of its request's body.
pub(super) struct ServiceCall<S, Q> {
    pub(super) service: S,
    pub(super) body: Q,
    pub(super) tag_headers: Option<Arc<TagHeaders>>,
}

impl<S, Q, B> Upstream for ServiceCall<S, Q>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: fmt::Display + Send + 'static,
    Q: Send + 'static,
    B: Body + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UpstreamError>> {
        self.service.poll_ready(cx).map_err(UpstreamError::new)
    }

    fn call(self: Box<Self>, head: RequestHead) -> BoxFuture<UpstreamResponse> {
        let Self { mut service, body, tag_headers } = *self;
        let response = service.call(head.map(|()| body));
        box_future(|| async move {
            let response = response.await;
            // Keep this handle until the response is there: dropping the last handle of a service may end its worker.
            drop(service);
            match response {
                Ok(response) => {
                    let (mut head, body) = response.into_parts();
                    CacheTerms::announce(&mut head);
                    if let Some(tag_headers) = tag_headers {
                        tag_headers.take(&mut head);
                    }
                    Ok(Response::from_parts(head, Box::pin(body) as UpstreamBody))
                }
                Err(error) => Err(UpstreamError::new(error)),
            }
        })
    }

    fn copy(&self, content: Option<Bytes>) -> Option<Box<dyn Upstream>> {
        let (service, tag_headers) = (self.service.clone(), self.tag_headers.clone());
        let body = match content {
            Some(content) => make_body(RequestBody::Whole(content))?,
            None => empty()?,
        };
        Some(Box::new(Self { service, body, tag_headers }))
    }

    fn take_body(&mut self) -> Option<UpstreamBody> {
        let body = mem::replace(&mut self.body, make_body(RequestBody::Whole(Bytes::new()))?);
        read_as_upstream(body)
    }

    fn put_body(&mut self, body: RequestBody) {
        // This cannot fail after `take_body`, which has made a body of this type.
        if let Some(body) = make_body(body) {
            self.body = body;
        }
    }
}

/// The error of an inner service.
pub(super) struct UpstreamError(Box<dyn ServiceFailure>);

trait ServiceFailure: fmt::Display + Any + Send {}

impl<E: fmt::Display + Any + Send> ServiceFailure for E {}

impl UpstreamError {
    fn new(error: impl fmt::Display + Send + 'static) -> Self {
        Self(Box::new(error))
    }

    /// The service's own error; `None` if it has another type.
    pub(super) fn of_type<E: 'static>(self) -> Option<E> {
        let error: Box<dyn Any> = self.0;
        error.downcast().ok().map(|error| *error)
    }
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(all(test, feature = "axum"))]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use axum::body::Body;
    use http::Version;

    use super::*;

    #[test]
    fn a_retry_repeats_the_whole_head() {
        let request = Request::head("/a?b").version(Version::HTTP_2).header("x-mine", "1").extension(7_u8);
        let upstream =
            Box::new(ServiceCall { service: axum::Router::new(), body: Body::empty(), tag_headers: None });
        let request = UpstreamRequest { upstream, head: request.body(()).unwrap() };
        let (request, again) = (&request.head, &request.copy().unwrap().head);
        let line =
            |request: &RequestHead| (request.method().clone(), request.uri().clone(), request.version());
        assert_eq!(line(again), line(request), "RFC 9111, 4.3.4: the same request");
        assert_eq!((again.headers(), again.extensions().get()), (request.headers(), Some(&7_u8)));
    }
}
