//! The guard as a `tower` layer, and its service [`Guarded`]; with the feature `axum`, its errors as responses of handlers.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::answer::load_failed;
use super::body::GuardedBody;
use super::commit::ClientAnswer;
use super::exchange::Exchange;
use super::inner_body::BoxError;
use super::upstream::{BoxFuture, ServiceCall};
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
    /// The body of the service's responses.
    type Body;
    /// The error of the service.
    type Failure;
    /// The future of the service's response.
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
    B::Error: Into<BoxError>,
{
    type Response = Response<GuardedBody>;
    type Error = E;
    type Future = GuardedFuture<E>;

    /// Always ready: the inner service is made ready where it is called.
    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), E>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let (head, body) = request.into_parts();
        let mut head = Request::from_parts(head, ());
        let guard = self.guard.current();
        let (_, policy) = guard.parts();
        let (shadow, tag_headers) = (policy.shadow, policy.http.tag_headers.clone());
        let answer = match Exchange::begin(&mut head, !body.is_end_stream(), None, guard, shadow) {
            Exchange::Hit(response) => PendingAnswer::Hit(Some(response)),
            exchange => {
                let call = ServiceCall { service: self.inner.clone(), body, tag_headers };
                PendingAnswer::Further(exchange.answer(head, move || Box::new(call)))
            }
        };
        GuardedFuture { answer, error: PhantomData }
    }
}

/// The future response of a [`Guarded`] service, whose error is `E`.
pub struct GuardedFuture<E> {
    answer: PendingAnswer,
    error: PhantomData<fn() -> E>,
}

/// The response to a request: ready, or still to be computed.
enum PendingAnswer {
    /// `None` once it was returned.
    Hit(Option<Response<GuardedBody>>),
    Further(BoxFuture<ClientAnswer>),
}

impl<E> fmt::Debug for GuardedFuture<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardedFuture").finish_non_exhaustive()
    }
}

impl<E: 'static> Future for GuardedFuture<E> {
    type Output = Result<Response<GuardedBody>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.answer {
            // A poll after the response was returned stays pending.
            PendingAnswer::Hit(response) => {
                return response.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response)));
            }
            PendingAnswer::Further(answer) => ready!(answer.as_mut().poll(cx)),
        };
        Poll::Ready(answer.or_else(|error| match error.of_type() {
            Some(error) => Err(error),
            // Does not happen: the inner service's only type of error is `E`.
            None => Ok(load_failed()),
        }))
    }
}

/// [`LoadError`] and [`Error`] as responses of axum handlers.
#[cfg(feature = "axum")]
mod error_response {
    use axum::response::{IntoResponse, Response};
    use http::header::{HeaderValue, RETRY_AFTER};
    use http::{HeaderName, StatusCode};

    use crate::error::{Error, ErrorKind, LoadError};

    /// A failed load as a response, so that a handler may end with `?`: 502 if the load failed, panicked or vanished; 503 if there are too
    /// many loads or waiters, the store is down or the guard is shut down; 504 after a time limit. These three have `Retry-After: 1`. An
    /// error that a retry cannot fix, such as an empty key, is 500.
    ///
    /// The text is fixed: it never contains the loader's error, which belongs in the log.
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Json, Router, extract::Path, routing::get};
    /// use stampede_guard::{LoadError, StampedeGuard};
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let user = |Path(id): Path<u64>| async move {
    ///     let load = move || async move { Err::<String, _>(std::io::Error::other("no route to the database")) };
    ///     Ok::<_, LoadError<_>>(Json(guard.get_or_load(("user", id), load).await?)) // 502
    /// };
    /// let app: Router = Router::new().route("/user/{id}", get(user));
    /// ```
    impl<E> IntoResponse for LoadError<E> {
        fn into_response(self) -> Response {
            match self {
                Self::Loader(_) | Self::Remote(_) | Self::Panicked(_) => response(BAD_GATEWAY),
                Self::Guard(error) => error.into_response(),
            }
        }
    }

    /// The guard's own failure as a response; see [`LoadError`].
    impl IntoResponse for Error {
        fn into_response(self) -> Response {
            response(match self.kind() {
                ErrorKind::Vanished | ErrorKind::Absent => BAD_GATEWAY,
                ErrorKind::Overloaded => (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "too many loads, or too many requests that wait for one\n",
                ),
                ErrorKind::Store => {
                    (StatusCode::SERVICE_UNAVAILABLE, "the cache in front of this resource is unavailable\n")
                }
                ErrorKind::Closed => (StatusCode::SERVICE_UNAVAILABLE, "this server is shutting down\n"),
                ErrorKind::Timeout => {
                    (StatusCode::GATEWAY_TIMEOUT, "the load of this resource took too long\n")
                }
                ErrorKind::InvalidKey
                | ErrorKind::InvalidPolicy
                | ErrorKind::InvalidAddress
                | ErrorKind::Encode
                | ErrorKind::Reentrant => {
                    (StatusCode::INTERNAL_SERVER_ERROR, "the request can not be answered\n")
                }
            })
        }
    }

    const BAD_GATEWAY: (StatusCode, &str) = (StatusCode::BAD_GATEWAY, "the load of this resource failed\n");

    /// The response has no `Cache-Control`: no cache stores such a status by default (RFC 9110, 15.1), and with `no-store` a guard around
    /// the handler would not share the failure with the waiters.
    fn response((status, text): (StatusCode, &'static str)) -> Response {
        const SOON: [(HeaderName, HeaderValue); 1] = [(RETRY_AFTER, HeaderValue::from_static("1"))];
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            return (status, text).into_response();
        }
        (status, SOON, text).into_response()
    }

    #[cfg(test)]
    #[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
    mod tests {
        use std::sync::Arc;

        use http_body_util::BodyExt as _;

        use super::*;

        const SECRET: &str = "password of db7";

        async fn text(response: Response) -> (u16, bool) {
            let (head, body) = response.into_parts();
            let text = String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap();
            assert!(text.ends_with('\n') && !text.contains(SECRET), "{text}");
            assert!(!head.headers.contains_key("cache-control"));
            (head.status.as_u16(), head.headers.get(RETRY_AFTER).is_some_and(|after| after == "1"))
        }

        #[tokio::test]
        async fn a_failed_load_is_a_502_that_does_not_contain_its_error() {
            let errors = [
                LoadError::Loader(Arc::new(SECRET)),
                LoadError::Remote(SECRET.to_owned()),
                LoadError::Panicked(SECRET.to_owned()),
            ];
            for error in errors {
                assert_eq!(text(error.into_response()).await, (502, true));
            }
        }

        #[tokio::test]
        async fn each_failure_of_the_guard_has_its_status() {
            let kinds = [
                (ErrorKind::Vanished, 502),
                (ErrorKind::Absent, 502),
                (ErrorKind::Overloaded, 503),
                (ErrorKind::Store, 503),
                (ErrorKind::Closed, 503),
                (ErrorKind::Timeout, 504),
                (ErrorKind::InvalidKey, 500),
                (ErrorKind::InvalidPolicy, 500),
                (ErrorKind::InvalidAddress, 500),
                (ErrorKind::Encode, 500),
                (ErrorKind::Reentrant, 500),
            ];
            for (kind, status) in kinds {
                let error = Error::new(kind, SECRET);
                assert_eq!(text(error.clone().into_response()).await, (status, status != 500), "{kind:?}");
                let error = LoadError::<String>::Guard(error);
                assert_eq!(text(error.into_response()).await, (status, status != 500), "{kind:?}");
            }
        }
    }
}
