//! [`GuardMiddleware`]: the guard as a middleware of `reqwest-middleware`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use http::header::HeaderMap;
use http::{Extensions, Request, Response};
use reqwest::Body;
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use tokio::time::timeout;
use tower_layer::Layer as _;
use tower_service::Service as _;

use super::service::{Redirected, ReqwestService, extension};
use crate::error::Error;
use crate::guard::StampedeGuard;
use crate::http::Guarded;

impl StampedeGuard {
    /// The guard as a middleware for reqwest: hits are answered here, and loads go through `origin`, which is a
    /// [`reqwest::Client`](::reqwest::Client), or a [`ClientWithMiddleware`] with the middleware that shall run for loads only
    /// (retries, for example).
    ///
    /// **It is the last middleware of its chain**: it calls `origin` and not the next one, because a load outlives the request
    /// that began it, and a chain does not. Middleware that puts credentials on requests belongs before it.
    ///
    /// # Errors
    ///
    /// [`InvalidPolicy`](crate::ErrorKind::InvalidPolicy), with the header's name, if `origin` adds headers to requests that the
    /// guard would have to see: it has a cookie store, or default headers other than `Accept: */*` and `User-Agent`.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use reqwest_middleware::ClientBuilder;
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::in_memory();
    /// let reqwest = reqwest::Client::new();
    /// let client = ClientBuilder::new(reqwest.clone()).with(guard.reqwest(reqwest)?).build();
    ///
    /// let price = client.get("https://api.example/price/ant").send().await?.text().await?;
    /// # let _ = price;
    /// # Ok(()) }
    /// ```
    pub fn reqwest(&self, origin: impl Into<ClientWithMiddleware>) -> Result<GuardMiddleware, Error> {
        let service = self.layer(ReqwestService::new(origin.into())?);
        Ok(GuardMiddleware { service, default_headers: HeaderMap::new() })
    }
}

/// The guard as a middleware of `reqwest-middleware`; made by [`StampedeGuard::reqwest`].
///
/// A request with a time-out ([`RequestBuilder::timeout`](reqwest_middleware::RequestBuilder::timeout)) also waits no longer than
/// that, and a twentieth more, for a load that another request began.
///
/// # Errors
///
/// The request that led a failed load gets the client's own error. A request that waited for it gets the guard's 502, and one
/// that waited for too long 504: see the [failures](crate::http#failures) of the layer.
///
/// # Cancel safety
///
/// A request that is dropped ends no load.
#[derive(Clone)]
pub struct GuardMiddleware {
    service: Guarded<ReqwestService<ClientWithMiddleware>>,
    default_headers: HeaderMap,
}

impl GuardMiddleware {
    /// Headers for each request that does not have them, as
    /// [`reqwest::ClientBuilder::default_headers`](::reqwest::ClientBuilder::default_headers), but before the guard, which so
    /// sees credentials and the headers that responses vary by.
    ///
    /// # Examples
    ///
    /// A service with one account at an API. Its responses are stored for this account only:
    ///
    /// ```
    /// use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
    /// use reqwest_middleware::ClientBuilder;
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// let policy = Policy::builder().http(HttpPolicy::private()).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// let account = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static("Bearer 1234"))]);
    /// let reqwest = reqwest::Client::new();
    /// let client = ClientBuilder::new(reqwest.clone())
    ///     .with(guard.reqwest(reqwest)?.default_headers(account))
    ///     .build();
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    #[must_use]
    pub fn default_headers(mut self, headers: HeaderMap) -> Self {
        self.default_headers = headers;
        self
    }

    async fn answer(
        &self,
        mut request: reqwest::Request,
    ) -> Result<reqwest::Response, reqwest_middleware::Error> {
        let headers = request.headers_mut();
        for name in self.default_headers.keys() {
            if headers.contains_key(name) {
                continue;
            }
            for value in self.default_headers.get_all(name) {
                headers.append(name, value.clone());
            }
        }
        let (url, limit) = (request.url().clone(), request.timeout().copied());
        let answering = self.service.clone().call(Request::try_from(request)?);
        let response = match limit {
            None => answering.await?,
            // A little later than the client's own timer, so that the request that leads a load gets the client's own error.
            Some(limit) => timeout(limit.saturating_add(limit / 20), answering)
                .await
                .map_err(|_| reqwest_middleware::Error::middleware(WaitedTooLong(limit)))??,
        };
        let (mut head, body) = response.into_parts();
        if head.extensions.remove::<Redirected>().is_none() {
            // The request's URL with its fragment, which the load did not see and a hit has not stored.
            head.extensions.extend(extension(url));
        }
        Ok(Response::from_parts(head, Body::wrap(body)).into())
    }
}

impl fmt::Debug for GuardMiddleware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardMiddleware").field("service", &self.service).finish_non_exhaustive()
    }
}

/// Written out, because a macro would be one more dependency.
impl Middleware for GuardMiddleware {
    fn handle<'life0, 'life1, 'life2, 'future>(
        &'life0 self,
        request: reqwest::Request,
        _extensions: &'life1 mut Extensions,
        _next: Next<'life2>,
    ) -> Pin<Box<dyn Future<Output = Result<reqwest::Response, reqwest_middleware::Error>> + Send + 'future>>
    where
        'life0: 'future,
        'life1: 'future,
        'life2: 'future,
        Self: 'future,
    {
        Box::pin(self.answer(request))
    }
}

/// The request's own time-out has passed while it waited for a load that another request began.
#[derive(Debug)]
struct WaitedTooLong(Duration);

impl fmt::Display for WaitedTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the response was not there within the request's time-out ({:?})", self.0)
    }
}

impl std::error::Error for WaitedTooLong {}
