//! Requests to a service of the guide, as a client sends them.

use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Request};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;

/// A response, read to its end.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// What the guard says of the response, without its name.
    pub(crate) fn remark(&self) -> &str {
        self.header("cache-status").trim_start_matches("stampede-guard; ")
    }

    pub(crate) fn is_hit(&self) -> bool {
        self.remark().starts_with("hit")
    }
}

/// Sends one request. `Host` is `shop.example` unless `headers` has one.
pub(crate) async fn send(app: &Router, method: &str, path: &str, headers: &[(&str, &str)]) -> Seen {
    send_content(app, method, path, headers, "").await
}

/// Sends one request with content.
pub(crate) async fn send_content(
    app: &Router,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    content: &'static str,
) -> Seen {
    let mut request = Request::builder().method(method).uri(path);
    if headers.iter().all(|(name, _)| *name != "host") {
        request = request.header("host", "shop.example");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::from(content)).expect("a request");
    let (head, body) = app.clone().oneshot(request).await.expect("infallible").into_parts();
    let body = body.collect().await.expect("a whole body").to_bytes().to_vec();
    Seen { status: head.status.as_u16(), headers: head.headers, body }
}

pub(crate) async fn get(app: &Router, path: &str) -> Seen {
    send(app, "GET", path, &[]).await
}
