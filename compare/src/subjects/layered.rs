//! HTTP layers: a subject whose calls are requests through a layer to a handler that asks the origin.

use std::convert::Infallible;
use std::fmt;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt as _, Empty, Full};
use tower::{Service, ServiceExt as _};

use super::{Loader, Subject};

/// The handler behind a layer: JSON of 1 KiB, a 500 if the origin fails, `no-store` if its answer is private.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handler(pub(super) Loader);

impl<B> Service<Request<B>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let loader = self.0;
        let (is_get, key) = (request.method() == Method::GET, request.uri().path()[1..].to_owned());
        async move {
            let mut response = Response::new(Full::default());
            if !is_get {
                *response.status_mut() = StatusCode::NO_CONTENT;
                return Ok(response);
            }
            match loader.load(key).await {
                Ok(loaded) => {
                    let json = header::HeaderValue::from_static("application/json");
                    response.headers_mut().insert(header::CONTENT_TYPE, json);
                    if loaded.private {
                        let private = header::HeaderValue::from_static("private, no-store");
                        response.headers_mut().insert(header::CACHE_CONTROL, private);
                    }
                    *response.body_mut() = Full::new(loaded.value);
                }
                Err(_) => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
            }
            Ok(response)
        }
        .boxed()
    }
}

/// How a layer's library removes an entry.
pub(super) type Remove = Box<dyn Fn(String) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// The handler inside a layer.
pub(super) struct Layered<S> {
    pub(super) service: S,
    /// `None`: by a `DELETE` through the layer.
    pub(super) remove: Option<Remove>,
    pub(super) lacks: &'static [(&'static str, &'static str)],
}

impl<S, B> Layered<S>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: fmt::Display, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes, Error: fmt::Display> + Send + 'static,
{
    async fn request(&self, method: Method, key: &str) -> Result<Bytes, String> {
        let mut request = Request::new(Empty::new());
        *request.method_mut() = method;
        *request.uri_mut() = format!("/{key}").parse().map_err(|_| "a key that is no path")?;
        request.headers_mut().insert(header::HOST, header::HeaderValue::from_static("shop.example"));
        let response = self.service.clone().oneshot(request).await.map_err(|error| error.to_string())?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        if status.is_success() { Ok(body) } else { Err(status.to_string()) }
    }
}

impl<S, B> Subject for Layered<S>
where
    S: Service<Request<Empty<Bytes>>, Response = Response<B>, Error: fmt::Display, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes, Error: fmt::Display> + Send + 'static,
{
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>> {
        self.request(Method::GET, key).boxed()
    }

    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>> {
        match &self.remove {
            Some(remove) => remove(key.to_owned()),
            None => async move { self.request(Method::DELETE, key).await.map(|_| ()) }.boxed(),
        }
    }

    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        self.lacks
    }
}
