//! A reverse proxy that caches: axum in front, the guard, a hyper client behind.
//!
//! ```text
//! LISTEN=127.0.0.1:8101 ORIGIN=http://127.0.0.1:8100 cargo run --example reverse_proxy
//! REDIS_URL=redis://127.0.0.1/ .. cargo run --example reverse_proxy          a replica of a fleet
//! ```
//!
//! `BUDGET_MS` is how long a request waits for Redis before it continues without it. `LEASE_MS` is how long a load keeps its
//! lease without a renewal.
//!
//! The proxy forwards every method but `CONNECT`, and never retries a request. `make conformance` runs the public test suite
//! for HTTP caches against this program.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use axum::body::Body;
use axum::error_handling::HandleErrorLayer;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{Method, Request, Response, StatusCode, Uri, Version};
use axum::response::IntoResponse as _;
use axum::serve::ListenerExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use stampede_guard::http::HttpPolicy;
use stampede_guard::{Policy, StampedeGuard};
use tokio::net::TcpListener;
use tower::make::Shared;
use tower::{ServiceBuilder, service_fn};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let set = |name, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let origin = Origin::new(&set("ORIGIN", "http://127.0.0.1:8100"))?;
    let guard = match std::env::var("REDIS_URL") {
        Ok(url) => StampedeGuard::builder(redis::Client::open(url)?).policy(policy()?).build()?,
        Err(_) => StampedeGuard::in_memory().with_policy(policy()?),
    };
    // Optional: the first request then need not wait for the connection. The server also starts while Redis is down.
    if let Err(error) = guard.connect().await {
        println!("{error}; requests are answered all the same");
    }

    // An unreachable origin is an error inside the guard, which may serve a stale response instead. Only an error that
    // leaves the guard becomes a 502.
    let proxy = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(bad_gateway))
        .layer(guard.clone())
        .service(service_fn(move |request| origin.clone().forward(request)));

    let listener = TcpListener::bind(set("LISTEN", "127.0.0.1:8101")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    // Without this, a short response would wait for the acknowledgement of the one before it.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            println!("no TCP_NODELAY: {error}");
        }
    });
    let stop = async {
        if tokio::signal::ctrl_c().await.is_err() {
            // Without a signal handler there is no graceful shutdown; continue to serve.
            std::future::pending().await
        }
    };
    axum::serve(listener, Shared::new(proxy)).with_graceful_shutdown(stop).await?;

    // Abandoned loads are still worth storing; a load past the deadline is handed to another replica.
    println!("{:?}", guard.shutdown(Duration::from_secs(5)).await);
    println!("{:?}", guard.stats());
    Ok(())
}

async fn bad_gateway(error: Unreachable) -> (StatusCode, &'static str) {
    println!("{error}");
    (StatusCode::BAD_GATEWAY, "the origin can not be reached\n")
}

/// The policy of a reverse proxy.
fn policy() -> Result<Policy, Box<dyn Error>> {
    // A proxy in front of a third party's service must follow RFC 9111 strictly.
    let mut policy = Policy::builder().http(HttpPolicy::strict());
    if let Some(budget) = millis("BUDGET_MS")? {
        policy = policy.coordination_budget(budget);
    }
    if let Some(lease) = millis("LEASE_MS")? {
        policy = policy.lease(lease);
    }
    Ok(policy.build()?)
}

fn millis(name: &str) -> Result<Option<Duration>, Box<dyn Error>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    let ms = text.parse().map_err(|error| format!("{name} is {text}, no number of milliseconds: {error}"))?;
    Ok(Some(Duration::from_millis(ms)))
}

/// The server behind the proxy.
#[derive(Clone, Debug)]
struct Origin {
    client: Client<HttpConnector, Body>,
    authority: Authority,
}

impl Origin {
    /// `url` is the origin's scheme and authority; HTTP only, as the client has no TLS.
    fn new(url: &str) -> Result<Self, Box<dyn Error>> {
        let url: Uri = url.parse()?;
        let (Some("http"), Some(authority)) = (url.scheme_str(), url.authority()) else {
            return Err(format!("{url} is not http://HOST[:PORT]").into());
        };
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs(5)));
        let client = Client::builder(TokioExecutor::new())
            // Shorter than the origin's keep-alive time-out, else a request meets a connection that is being closed. Node's
            // time-out is 5 seconds, those of other servers are longer.
            .pool_idle_timeout(Duration::from_secs(4))
            .pool_timer(TokioTimer::new())
            .retry_canceled_requests(false)
            .build(connector);
        Ok(Self { client, authority: authority.clone() })
    }

    /// Forwards a request as a gateway must (RFC 9110, 7.6), and returns the response.
    async fn forward(self, mut request: Request<Body>) -> Result<Response<Body>, Unreachable> {
        // The proxy opens no tunnels (RFC 9110, 9.3.6).
        if request.method() == Method::CONNECT {
            return Ok(StatusCode::NOT_IMPLEMENTED.into_response());
        }
        let Ok(uri) = self.at_origin(request.uri()) else {
            return Ok(StatusCode::BAD_REQUEST.into_response());
        };
        let original = std::mem::replace(request.uri_mut(), uri);
        let version = std::mem::replace(request.version_mut(), Version::HTTP_11);

        let headers = request.headers_mut();
        // The authority of HTTP/2, and of HTTP/1 in absolute form, overrides `Host` (RFC 9112, 3.2.2).
        if let Some(host) = original.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
            headers.insert(header::HOST, host);
        }
        remove_hop_by_hop(headers);
        headers.append(header::VIA, via(version));

        let mut response = self.client.request(request).await.map_err(Unreachable)?.map(Body::new);
        remove_hop_by_hop(response.headers_mut());
        Ok(response)
    }

    /// The same path and query, byte for byte, on the origin.
    fn at_origin(&self, original: &Uri) -> Result<Uri, axum::http::Error> {
        let path = original.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        Uri::builder().scheme(Scheme::HTTP).authority(self.authority.clone()).path_and_query(path).build()
    }
}

/// Fields about this connection and not about the message (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Removes the fields for this hop only: the known ones, and those that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed = headers.get_all(header::CONNECTION).into_iter();
    let listed = listed.filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(','));
    let listed: Vec<_> = listed.filter_map(|name| name.trim().parse::<HeaderName>().ok()).collect();
    for name in listed.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// `Via`: the forwarding proxy, and the version in which it received the request (RFC 9110, 7.6.3).
fn via(received: Version) -> HeaderValue {
    HeaderValue::from_static(match received {
        Version::HTTP_2 => "2 reverse-proxy",
        Version::HTTP_10 => "1.0 reverse-proxy",
        _ => "1.1 reverse-proxy",
    })
}

/// The origin gave no response.
#[derive(Debug)]
struct Unreachable(hyper_util::client::legacy::Error);

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no response from the origin: ")?;
        match self.0.source() {
            Some(source) => write!(f, "{source}"),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Error for Unreachable {}
