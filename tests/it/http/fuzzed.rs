//! Runs an exchange made of any bytes through the whole layer under each policy, and checks what must always hold.
//!
//! ```text
//! GET /path            the request: method, URI, header lines
//! name: value
//!                      an empty line
//! 200                  the response: status, header lines
//! name: value
//!                      an empty line
//! content
//! ```
//!
//! This file is self-contained, because the fuzz target in `fuzz/` compiles it, too.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_LENGTH, CONTENT_RANGE, DATE, HOST, HeaderMap, HeaderName, HeaderValue,
    IF_MODIFIED_SINCE, IF_NONE_MATCH, PRAGMA, RANGE, SET_COOKIE,
};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use stampede_guard::http::{HttpPolicy, explain};
use stampede_guard::{Policy, StampedeGuard};
use tower::{Layer as _, Service, ServiceExt as _};

/// A request, and the answer that the inner service gives to it and to all later requests.
struct Exchange {
    method: Method,
    uri: Uri,
    request: HeaderMap,
    status: StatusCode,
    response: HeaderMap,
    content: Bytes,
}

impl Exchange {
    fn parse(text: &[u8]) -> Option<Self> {
        let mut rest = text;
        let mut line = || {
            let end = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
            let (line, after) = rest.split_at(end);
            rest = after.get(1..).unwrap_or_default();
            line
        };
        let first = line();
        let at = first.iter().position(|&byte| byte == b' ')?;
        let (method, uri) = (Method::from_bytes(&first[..at]).ok()?, Uri::try_from(&first[at + 1..]).ok()?);
        let request = headers(&mut line);
        let status = std::str::from_utf8(line()).ok()?.trim().parse().ok()?;
        let response = headers(&mut line);
        // A service sends no interim responses.
        let status = StatusCode::from_u16(status).ok().filter(|status| !status.is_informational())?;
        // These statuses have no content (RFC 9110, 6.4.1), whatever follows.
        let rest = if matches!(status.as_u16(), 204 | 205 | 304) { &[] } else { rest };
        Some(Self { method, uri, request, status, response, content: Bytes::copy_from_slice(rest) })
    }

    fn request(&self) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::default());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.request.clone();
        request
    }

    /// A GET of the same resource by another client, without credentials.
    fn strangers(&self) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = self.uri.clone();
        for host in self.request.get_all(HOST) {
            request.headers_mut().append(HOST, host.clone());
        }
        request
    }

    fn response(&self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.content.clone()));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.response.clone();
        response
    }

    fn forbids(&self) -> bool {
        let controls = self.response.get_all(CACHE_CONTROL);
        let says = |word| {
            let mut controls = controls.iter();
            controls.any(|control| control.as_bytes().trim_ascii().eq_ignore_ascii_case(word))
        };
        self.response.contains_key(SET_COOKIE) || says(b"no-store") || says(b"private")
    }

    /// Whether `explain` judges exactly this answer, and nothing else decides what the guard does.
    fn is_plain(&self) -> bool {
        let asks_more = |name: &HeaderName| {
            [CACHE_CONTROL, PRAGMA, RANGE].contains(name) || name.as_str().starts_with("if-")
        };
        let length = self.response.get(CONTENT_LENGTH).map(HeaderValue::as_bytes);
        self.method == Method::GET
            && !self.request.keys().any(asks_more)
            && self.status == StatusCode::OK
            && !self.response.contains_key(DATE)
            && length.is_none_or(|length| length == self.content.len().to_string().as_bytes())
    }
}

fn headers<'t>(line: &mut impl FnMut() -> &'t [u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    loop {
        let line = line();
        let Some(at) = line.iter().position(|&byte| byte == b':') else { return headers };
        let (name, value) = (&line[..at], line[at + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
}

/// An inner service that always gives the same answer, and counts its calls.
#[derive(Clone)]
struct Inner(Arc<Exchange>, Arc<AtomicUsize>);

impl Service<Request<Full<Bytes>>> for Inner {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        self.1.fetch_add(1, Ordering::SeqCst);
        ready(Ok(self.0.response()))
    }
}

/// Runs the exchange that these bytes describe, if they describe one. Panics if a check fails.
pub(super) fn run(text: &[u8]) {
    let Some(exchange) = Exchange::parse(text) else { return };
    let exchange = Arc::new(exchange);
    let opened = HttpPolicy::default().share_authorized(true).share_cookies(true);
    for (name, http) in [
        ("default", HttpPolicy::default()),
        ("opened", opened),
        ("strict", HttpPolicy::strict()),
        ("private", HttpPolicy::private()),
    ] {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        let within = Duration::from_secs(600);
        let all =
            runtime.block_on(async { tokio::time::timeout(within, under(&exchange, name, http)).await });
        assert!(all.is_ok(), "{name}: it hangs");
    }
}

async fn under(exchange: &Arc<Exchange>, name: &str, http: HttpPolicy) {
    let inner = Inner(Arc::clone(exchange), Arc::default());
    let calls = || inner.1.load(Ordering::SeqCst);
    let decision = explain(&exchange.request(), &exchange.response(), &http);
    let policy = Policy::builder().ttl_jitter(0.0).http(http).build().expect("a policy");
    let service = StampedeGuard::in_memory().with_policy(policy).layer(inner.clone());
    for _ in 0..2 {
        ask(&service, exchange, exchange.request()).await;
    }
    let lasts = decision.fresh_for.is_none_or(|fresh_for| fresh_for > Duration::from_secs(1));
    if exchange.is_plain() && (lasts || !decision.stored) {
        let expected = if decision.stored && !decision.validated_always { 1 } else { 2 };
        assert_eq!(calls(), expected, "{name}: {decision}");
    }
    let before = calls();
    ask(&service, exchange, exchange.strangers()).await;
    if name == "default" && exchange.forbids() {
        assert_eq!(calls(), before + 1, "a stranger received what is not for strangers");
    }
}

/// Sends one request, and checks its answer.
async fn ask<S, B>(service: &S, exchange: &Exchange, request: Request<Full<Bytes>>)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body::Body<Data = Bytes>,
{
    let (method, fields) = (request.method().clone(), request.headers().clone());
    let Ok(answer) = service.clone().oneshot(request).await;
    let (head, body) = answer.into_parts();
    // If the body breaks, it is not whole, and its client receives the error.
    let Ok(body) = body.collect().await else { return };
    let body = body.to_bytes();
    let is_hit = head
        .headers
        .get_all("cache-status")
        .iter()
        .any(|line| line.as_bytes().starts_with(b"stampede-guard; hit"));
    if is_hit {
        assert!(!head.headers.contains_key(CONNECTION), "it is of one connection");
    }
    let is_conditional = fields.contains_key(IF_NONE_MATCH) || fields.contains_key(IF_MODIFIED_SINCE);
    match head.status {
        StatusCode::NOT_MODIFIED => {
            assert!(is_conditional || exchange.status == head.status, "a 304 without a condition");
        }
        status if method == Method::HEAD && is_hit => assert!(body.is_empty(), "{status} to a HEAD"),
        StatusCode::PARTIAL_CONTENT if exchange.status == StatusCode::OK => {
            assert!(fields.contains_key(RANGE), "a part without a range");
            let range = head.headers[CONTENT_RANGE].to_str().expect("text");
            let (first, rest) = range["bytes ".len()..].split_once('-').expect("a range");
            let last = rest.split_once('/').expect("a length").0;
            let (first, last): (usize, usize) =
                (first.parse().expect("a number"), last.parse().expect("a number"));
            assert_eq!(body, exchange.content[first..=last], "{range}");
        }
        status if status == exchange.status => {
            let is_part = status == StatusCode::PARTIAL_CONTENT;
            assert!(is_part || body == exchange.content, "{status}: {body:?}");
        }
        status => {
            assert!(matches!(status.as_u16(), 200 | 206 | 416 | 502 | 504), "{status} is no answer")
        }
    }
}
