//! How a replica asks the origin.

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use axum::body::Bytes;

use crate::origin::REPLICA;

pub(crate) struct OriginClient {
    id: usize,
    /// Host and port.
    origin: String,
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl OriginClient {
    pub(crate) fn new(id: usize, origin: &str) -> Self {
        Self { id, origin: origin.to_owned(), client: client() }
    }

    /// Asks for a value, and passes the origin's answer on.
    pub(crate) async fn load(&self, version: &str, key: u64) -> Response {
        let request = Request::get(format!("http://{}/load/{version}/report/{key}", self.origin))
            .header(REPLICA, self.id)
            .body(Empty::new());
        let Ok(request) = request else { return StatusCode::BAD_REQUEST.into_response() };
        match self.client.request(request).await {
            Ok(response) => {
                let mut headers = HeaderMap::new();
                if let Some(value) = response.headers().get(header::CACHE_CONTROL) {
                    headers.insert(header::CACHE_CONTROL, value.clone());
                }
                (response.status(), headers, Body::new(response.into_body())).into_response()
            }
            Err(_) => (StatusCode::BAD_GATEWAY, "the origin does not answer\n").into_response(),
        }
    }
}

/// A client that keeps its connections.
pub(crate) fn client() -> Client<HttpConnector, Empty<Bytes>> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}
