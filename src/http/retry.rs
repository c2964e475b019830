//! [`RetryableRequest`], a request that can be sent a second time.

use http::Request;
use tower_service::Service;

use super::load_request::call;

/// A copy of a request without a body, made before it is sent for the first time. Only the head can be copied, so
/// the body's type must have a known empty value: that of axum's requests, with the feature `axum`.
pub(crate) struct RetryableRequest<S, Q> {
    pub(crate) inner: S,
    pub(crate) request: Request<Q>,
}

impl<S, Q> RetryableRequest<S, Q>
where
    S: Service<Request<Q>> + Clone,
    Q: 'static,
{
    pub(crate) fn of(inner: &S, request: &Request<Q>) -> Option<Self> {
        let mut again = Request::new(empty::<Q>()?);
        *again.method_mut() = request.method().clone();
        *again.uri_mut() = request.uri().clone();
        *again.version_mut() = request.version();
        *again.headers_mut() = request.headers().clone();
        *again.extensions_mut() = request.extensions().clone();
        Some(Self { inner: inner.clone(), request: again })
    }

    pub(crate) async fn send(self) -> Result<S::Response, S::Error> {
        call(self.inner, self.request).await
    }
}

#[cfg(feature = "axum")]
fn empty<Q: 'static>() -> Option<Q> {
    let body: Box<dyn std::any::Any> = Box::new(axum::body::Body::empty());
    body.downcast().ok().map(|body| *body)
}

#[cfg(not(feature = "axum"))]
fn empty<Q: 'static>() -> Option<Q> {
    None
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
        let request = request.body(Body::empty()).unwrap();
        let again =
            RetryableRequest::<axum::Router, Body>::of(&axum::Router::new(), &request).unwrap().request;
        let line =
            |request: &Request<Body>| (request.method().clone(), request.uri().clone(), request.version());
        assert_eq!(line(&again), line(&request), "RFC 9111, 4.3.4: the same request");
        assert_eq!((again.headers(), again.extensions().get()), (request.headers(), Some(&7_u8)));
    }
}
