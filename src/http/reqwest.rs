//! The guard around a reqwest client.
//!
//! Two forms, with the same rules and the same entries:
//!
//! - [`StampedeGuard::reqwest`](crate::StampedeGuard::reqwest) is a middleware of `reqwest-middleware`: requests are built and
//!   answered as by reqwest. Its type is [`GuardMiddleware`].
//! - [`ReqwestService`] is a tower service around a client, to put the layer around: `ServiceBuilder::new().layer(guard)`.
//!
//! # What the guard has to see
//!
//! **Headers that a client adds behind the guard are part of no key and of no variant.** With an `Authorization` or a cookie that
//! the guard does not see, one user's response goes to another; with such an `Accept-Language`, a reader gets a response in
//! another language. So both forms refuse a client with a cookie store, and one with
//! [`default_headers`](::reqwest::ClientBuilder::default_headers) other than reqwest's own `Accept: */*` and `User-Agent`.
//! [`GuardMiddleware::default_headers`] sets the same headers before the guard. A middleware or a connector behind the guard
//! that adds credentials cannot be detected.
//!
//! # Redirects
//!
//! A response that a client reached by following a redirect belongs to another URI, and the redirect's own `no-store` or `Vary`
//! is lost. It goes to its own caller only: it is neither stored nor shared. To have it stored, build the client with
//! [`redirect::Policy::none`](::reqwest::redirect::Policy::none), and follow redirects outside of the guard.
//!
//! # Compression
//!
//! A client that decompresses does so behind the guard: the stored response is the decoded one, without `Content-Encoding`.

use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::HeaderMap;
use http::{Extensions, Request, Response};
use reqwest::{Body, ResponseBuilderExt as _, Url};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use tokio::time::timeout;
use tower_layer::Layer as _;
use tower_service::Service;

use super::Guarded;
use crate::error::{Error, ErrorKind};
use crate::guard::StampedeGuard;
use crate::http_rules::response::DoNotStore;
use crate::observe::log;

impl StampedeGuard {
    /// The guard as a middleware for reqwest: hits are answered here, and loads go through `origin`, which is a
    /// [`reqwest::Client`](::reqwest::Client), or a [`ClientWithMiddleware`] with the middleware that shall run for loads only
    /// (retries, for example).
    ///
    /// **It is the last middleware of its chain**: it calls `origin` and not the next one, because a load outlives the request
    /// that began it, but a chain ends with its request. Middleware that puts credentials on requests belongs before it.
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
/// Dropping a request does not stop the load that it began or waits for.
#[derive(Clone)]
pub struct GuardMiddleware {
    service: Guarded<ReqwestService<ClientWithMiddleware>>,
    default_headers: HeaderMap,
}

impl GuardMiddleware {
    /// Headers for each request that does not have them, as by
    /// [`reqwest::ClientBuilder::default_headers`](::reqwest::ClientBuilder::default_headers). They are added before the guard, so
    /// the guard sees credentials and the headers that responses vary by.
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
            // Expire after the client's own timer, so that the request that leads a load gets the client's own error.
            Some(limit) => timeout(limit.saturating_add(limit / 20), answering)
                .await
                .map_err(|_| reqwest_middleware::Error::middleware(WaitedTooLong(limit)))??,
        };
        let (mut head, body) = response.into_parts();
        if head.extensions.remove::<Redirected>().is_none() {
            // Use this request's URL: it has the fragment, which neither the load nor a stored response has.
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

/// Written out as the macro `async_trait` would write it, because that macro would be one more dependency.
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

/// The request timed out while it waited for a load that another request began.
#[derive(Debug)]
struct WaitedTooLong(Duration);

impl fmt::Display for WaitedTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the response was not there within the request's time-out ({:?})", self.0)
    }
}

impl std::error::Error for WaitedTooLong {}

/// A reqwest client as a tower service with requests and responses of the `http` crate, for the guard's layer to wrap.
///
/// `C` is a [`reqwest::Client`], or a [`ClientWithMiddleware`] with
/// the middleware that shall run for loads only. `http::Request::try_from` turns a request that reqwest has built into one of
/// `http`, with its time-out; `reqwest::Response::from` is the way back. See the [module](super) for redirects.
///
/// # Examples
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// use stampede_guard::{StampedeGuard, http::reqwest::ReqwestService};
/// use tower::{ServiceBuilder, ServiceExt as _};
///
/// let reqwest = reqwest::Client::new();
/// let guard = StampedeGuard::in_memory();
/// let client = ServiceBuilder::new().layer(guard).service(ReqwestService::new(reqwest.clone())?);
///
/// let request = reqwest.get("https://api.example/price/ant").build()?;
/// let response = client.oneshot(request.try_into()?).await?;
/// println!("{:?}", response.headers().get("cache-status"));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ReqwestService<C = reqwest::Client> {
    client: C,
}

impl<C> ReqwestService<C>
where
    C: Service<reqwest::Request, Response = reqwest::Response> + fmt::Debug,
{
    /// Makes a service of the client, unless the client adds headers that the guard would have to see.
    ///
    /// # Errors
    ///
    /// [`InvalidPolicy`](crate::ErrorKind::InvalidPolicy), with the header's name, if the client adds headers to requests that the
    /// guard would have to see: it has a cookie store, or default headers other than `Accept: */*` and `User-Agent`.
    pub fn new(client: C) -> Result<Self, Error> {
        refuse_unseen(&client)?;
        Ok(Self { client })
    }
}

impl<C> Service<Request<Body>> for ReqwestService<C>
where
    C: Service<reqwest::Request, Response = reqwest::Response>,
    C::Error: From<reqwest::Error> + Send + 'static,
    C::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = C::Error;
    type Future = ReqwestFuture<C::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.client.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let request = match reqwest::Request::try_from(request) {
            Ok(request) => request,
            Err(error) => return ReqwestFuture { inner: Box::pin(ready(Err(error.into()))) },
        };
        let request_url = request.url().clone();
        let answering = self.client.call(request);
        ReqwestFuture { inner: Box::pin(async move { Ok(into_http(answering.await?, request_url)) }) }
    }
}

/// Converts to a response of `http`. `reqwest::Response::from` converts it back, with the same URL.
fn into_http(response: reqwest::Response, mut request_url: Url) -> Response<Body> {
    let mut url = response.url().clone();
    let mut response = Response::from(response);
    response.extensions_mut().extend(extension(url.clone()));
    // reqwest drops the fragment, which is no part of the request.
    request_url.set_fragment(None);
    url.set_fragment(None);
    if url != request_url {
        // The client has followed a redirect. RFC 9111, 2: a response is stored under its own target URI.
        response.extensions_mut().insert(DoNotStore);
        response.extensions_mut().insert(Redirected);
    }
    response
}

/// Marks a response whose URL is not that of its request.
#[derive(Clone, Copy)]
struct Redirected;

/// The extension in which reqwest looks for the URL of a response.
fn extension(url: Url) -> Extensions {
    Response::builder()
        .url(url)
        .body(())
        .map(|response| response.into_parts().0.extensions)
        .unwrap_or_default()
}

/// The future response of a [`ReqwestService`].
pub struct ReqwestFuture<E> {
    inner: Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>,
}

impl<E> fmt::Debug for ReqwestFuture<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReqwestFuture").finish_non_exhaustive()
    }
}

impl<E> Future for ReqwestFuture<E> {
    type Output = Result<Response<Body>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx)
    }
}

/// Refuses a client that adds headers behind the guard.
///
/// reqwest has no method that returns the default headers, but `Debug` prints them. That text is not a stable interface: the tests
/// below check it for this version, and a client with another text is accepted with a warning.
fn refuse_unseen(client: &impl fmt::Debug) -> Result<(), Error> {
    let text = format!("{client:?}");
    let Some((head, headers)) = text.split_once("default_headers: {") else {
        tracing::warn!(
            target: log::HTTP,
            "this version of reqwest does not print the default headers of a client: make sure that it adds no credentials to \
             requests behind the guard"
        );
        return Ok(());
    };
    let added = if head.contains("cookie_store: true") {
        Some("cookies of its cookie store".to_owned())
    } else {
        all_but_harmless(headers)
    };
    let Some(added) = added else { return Ok(()) };
    let text = format!(
        "the reqwest client adds {added} to requests behind the guard, which then gives responses of one user to another: build \
         the client without, and put the header on requests before they reach the guard, by \
         GuardMiddleware::default_headers or by RequestBuilder::headers"
    );
    Err(Error::new(ErrorKind::InvalidPolicy, text))
}

/// The first header of a map, as `Debug` prints it, that responses may depend on: all but `User-Agent` and `Accept: */*`.
fn all_but_harmless(mut printed_map: &str) -> Option<String> {
    loop {
        if printed_map.starts_with('}') {
            return None;
        }
        let field = printed(printed_map)
            .and_then(|(name, rest)| Some((name.trim_matches('"'), printed(rest.strip_prefix(": ")?)?)));
        // The map cannot be read, so refuse the client: a backslash at the end of a value looks like one that escapes the quote.
        let Some((name, (value, rest))) = field else { return Some("default headers".to_owned()) };
        // `Accept: */*` means the same as none (RFC 9110, 12.5.1).
        if name != "user-agent" && (name, value) != ("accept", "\"*/*\"") {
            return Some(format!("the default header {name}"));
        }
        printed_map = rest.strip_prefix(", ").unwrap_or(rest);
    }
}

/// Splits off a quoted text, or a word such as `Sensitive`.
fn printed(text: &str) -> Option<(&str, &str)> {
    let mut is_escaped = false;
    let end = if let Some(quoted) = text.strip_prefix('"') {
        let closes = |character| {
            let closes = character == '"' && !is_escaped;
            is_escaped = character == '\\';
            closes
        };
        quoted.find(closes)? + 2
    } else {
        text.find([',', '}'])?
    };
    Some(text.split_at(end)).filter(|(printed, _)| !printed.is_empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::header::{ACCEPT, ACCEPT_LANGUAGE, AUTHORIZATION, COOKIE, HeaderMap, HeaderName, HeaderValue};
    use reqwest::Client;
    use reqwest_middleware::ClientWithMiddleware;

    use super::*;

    fn with(name: HeaderName, value: &'static str) -> Client {
        let mut value = HeaderValue::from_static(value);
        value.set_sensitive(name == AUTHORIZATION);
        Client::builder().default_headers(HeaderMap::from_iter([(name, value)])).build().unwrap()
    }

    #[test]
    fn a_client_with_harmless_default_headers_is_accepted() {
        let named = Client::builder().user_agent("shop \", \"cookie\": \"1").build().unwrap();
        for client in [Client::new(), named, with(ACCEPT, "*/*")] {
            assert!(format!("{client:?}").contains("default_headers: {"));
            refuse_unseen(&client).unwrap();
            refuse_unseen(&ClientWithMiddleware::from(client)).unwrap();
        }
    }

    #[test]
    fn a_client_with_default_headers_is_refused_by_their_names_and_without_their_values() {
        for name in [AUTHORIZATION, COOKIE, ACCEPT_LANGUAGE, ACCEPT, HeaderName::from_static("x-tenant")] {
            let client = with(name.clone(), "secret \\\", }");
            for refused in
                [refuse_unseen(&client), refuse_unseen(&ClientWithMiddleware::from(client.clone()))]
            {
                let error = refused.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
                let text = error.to_string();
                assert!(text.contains(&format!("the default header {name} ")), "{text}");
                assert!(
                    text.contains("GuardMiddleware::default_headers") && !text.contains("secret"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn each_default_header_is_read_whatever_precedes_it() {
        let mut headers = HeaderMap::new();
        headers.insert("user-agent", HeaderValue::from_static("a\\\"\", }"));
        headers.append("user-agent", HeaderValue::from_static("b"));
        headers.insert("x-api-key", HeaderValue::from_static("secret"));
        let client = Client::builder().default_headers(headers).build().unwrap();
        let text = refuse_unseen(&client).unwrap_err().to_string();
        assert!(text.contains("the default header x-api-key "), "{text}");
    }

    #[test]
    fn a_map_that_can_not_be_read_is_refused() {
        let named = Client::builder().user_agent("a backslash \\").build().unwrap();
        let text = refuse_unseen(&named).unwrap_err().to_string();
        assert!(text.starts_with("the reqwest client adds default headers "), "{text}");
    }
}
