//! [`ReqwestService`]: a reqwest client as a tower service, for the layer to wrap.

use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Extensions, Request, Response};
use reqwest::{Body, ResponseBuilderExt as _, Url};
use tower_service::Service;

use super::unseen::refuse_unseen;
use crate::error::Error;
use crate::http_rules::response::DoNotStore;

/// A reqwest client as a tower service with requests and responses of the `http` crate, for the guard's layer to wrap.
///
/// `C` is a [`reqwest::Client`](::reqwest::Client), or a [`ClientWithMiddleware`](reqwest_middleware::ClientWithMiddleware) with
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
    /// The client as a service.
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
        let asked = request.url().clone();
        let answering = self.client.call(request);
        ReqwestFuture { inner: Box::pin(async move { Ok(into_http(answering.await?, asked)) }) }
    }
}

/// The response of `http`, from which `reqwest::Response::from` makes one with the same URL again.
fn into_http(response: reqwest::Response, mut asked: Url) -> Response<Body> {
    let mut url = response.url().clone();
    let mut response = Response::from(response);
    response.extensions_mut().extend(extension(url.clone()));
    // reqwest drops the fragment, which is no part of the request.
    asked.set_fragment(None);
    url.set_fragment(None);
    if url != asked {
        // The client has followed a redirect. RFC 9111, 2: the primary key of a stored response is its target URI.
        response.extensions_mut().insert(DoNotStore);
        response.extensions_mut().insert(Redirected);
    }
    response
}

/// Marks a response whose URL is not that of its request.
#[derive(Clone, Copy)]
pub(super) struct Redirected;

/// The extension in which reqwest looks for the URL of a response.
pub(super) fn extension(url: Url) -> Extensions {
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
