//! A reverse proxy that caches: axum in front, the guard, a hyper client behind.
//!
//! ```text
//! LISTEN=127.0.0.1:8101 ORIGIN=http://127.0.0.1:8100 cargo run --example reverse_proxy
//! REDIS_URL=redis://127.0.0.1/ .. cargo run --example reverse_proxy          a replica of a fleet
//! ```
//!
//! `BUDGET_MS` is how long a request waits for Redis before it does without, and `LEASE_MS` how long a load is believed to
//! run without a sign of life.
//!
//! Every method is forwarded but `CONNECT`, and nothing is tried twice. `make conformance` runs the public test suite
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
    // What keeps the guard from its server, and what to do about it, is a warning.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let set = |name, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let origin = Origin::new(&set("ORIGIN", "http://127.0.0.1:8100"))?;
    let guard = match std::env::var("REDIS_URL") {
        Ok(url) => StampedeGuard::builder(redis::Client::open(url)?).policy(policy()?).build()?,
        Err(_) => StampedeGuard::in_memory().with_policy(policy()?),
    };
    // Not required: connected here, the first request does not wait for it. A Redis that is down stops nothing.
    if let Err(error) = guard.connect().await {
        println!("{error}; requests are answered all the same");
    }

    // An origin that can not be reached is an error to the guard, which may have a stale response for it; only
    // what is an error outside the guard too becomes an answer.
    let proxy = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(bad_gateway))
        .layer(guard.clone())
        .service(service_fn(move |request| origin.clone().forward(request)));

    let listener = TcpListener::bind(set("LISTEN", "127.0.0.1:8101")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    // A short answer waits for no acknowledgement of the one before it.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            println!("no TCP_NODELAY: {error}");
        }
    });
    let stop = async {
        if tokio::signal::ctrl_c().await.is_err() {
            // Without the signal there is no graceful end; serving goes on.
            std::future::pending().await
        }
    };
    axum::serve(listener, Shared::new(proxy)).with_graceful_shutdown(stop).await?;

    // Loads that nobody waits for any more still deserve to be stored; what takes longer goes to another replica.
    println!("{:?}", guard.shutdown(Duration::from_secs(5)).await);
    println!("{:?}", guard.stats());
    Ok(())
}

async fn bad_gateway(error: Unreachable) -> (StatusCode, &'static str) {
    println!("{error}");
    (StatusCode::BAD_GATEWAY, "the origin can not be reached\n")
}

/// What is stored, and for how long.
fn policy() -> Result<Policy, Box<dyn Error>> {
    // By the letter of RFC 9111, as a proxy in front of somebody else's service has to be.
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
            // Shorter than the origin's patience, else a request meets a connection that is being closed. Node's is
            // 5 seconds, other servers' is longer.
            .pool_idle_timeout(Duration::from_secs(4))
            .pool_timer(TokioTimer::new())
            .retry_canceled_requests(false)
            .build(connector);
        Ok(Self { client, authority: authority.clone() })
    }

    /// Sends a request on as a gateway must (RFC 9110, 7.6), and brings the response back.
    async fn forward(self, mut request: Request<Body>) -> Result<Response<Body>, Unreachable> {
        // No tunnels lead through here (RFC 9110, 9.3.6).
        if request.method() == Method::CONNECT {
            return Ok(StatusCode::NOT_IMPLEMENTED.into_response());
        }
        let Ok(uri) = self.at_origin(request.uri()) else {
            return Ok(StatusCode::BAD_REQUEST.into_response());
        };
        let asked = std::mem::replace(request.uri_mut(), uri);
        let version = std::mem::replace(request.version_mut(), Version::HTTP_11);

        let headers = request.headers_mut();
        // The authority of HTTP/2, and of HTTP/1 in absolute form, is the host that is meant (RFC 9112, 3.2.2).
        if let Some(host) = asked.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
            headers.insert(header::HOST, host);
        }
        remove_hop_by_hop(headers);
        headers.append(header::VIA, via(version));

        let mut response = self.client.request(request).await.map_err(Unreachable)?.map(Body::new);
        remove_hop_by_hop(response.headers_mut());
        Ok(response)
    }

    /// The same path and query, byte for byte, on the origin.
    fn at_origin(&self, asked: &Uri) -> Result<Uri, axum::http::Error> {
        let path = asked.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        Uri::builder().scheme(Scheme::HTTP).authority(self.authority.clone()).path_and_query(path).build()
    }
}

/// What is about this connection and not about the message (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Removes what is for this hop only: the known fields, and those that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed = headers.get_all(header::CONNECTION).into_iter();
    let listed = listed.filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(','));
    let listed: Vec<_> = listed.filter_map(|name| name.trim().parse::<HeaderName>().ok()).collect();
    for name in listed.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Who passed the request on, and in which version it was received (RFC 9110, 7.6.3).
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
