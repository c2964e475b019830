//! The bytes that a client sees on the wire: real axum servers, real connections.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use stampede_guard::StampedeGuard;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::kit::{guard, policy, secs};
use crate::support::gate::{Counter, Gate};
use crate::support::probe::eventually;

pub(super) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    addr
}

pub(super) fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).build_http()
}

/// Sends the request line with a `Host` and these headers, and reads everything until the server closes.
pub(super) async fn raw(addr: SocketAddr, line: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let request = format!("{line}\r\nHost: shop.example\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut all = Vec::new();
    tokio::time::timeout(secs(10), stream.read_to_end(&mut all)).await.expect("an end").unwrap();
    String::from_utf8(all).unwrap().to_ascii_lowercase()
}

/// A response of `abc` and `def`, with a gate between them.
fn gated(gate: &Gate) -> Response {
    let gate = gate.clone();
    let stream = futures_util::stream::unfold(0, move |n| {
        let gate = gate.clone();
        async move {
            match n {
                0 => Some((Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"abc"))), 1)),
                1 => {
                    gate.pass().await;
                    Some((Ok(Frame::data(Bytes::from_static(b"def"))), 2))
                }
                _ => None,
            }
        }
    });
    Response::new(Body::new(StreamBody::new(stream)))
}

fn gated_app(gate: &Gate, loads: &Counter, guard: StampedeGuard) -> Router {
    let (gate, loads) = (gate.clone(), loads.clone());
    Router::new()
        .route(
            "/{*path}",
            get(move || async move {
                drop(loads.start());
                gated(&gate)
            }),
        )
        .layer(guard)
}

#[tokio::test]
async fn the_first_byte_is_on_the_wire_before_the_body_ends() {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let addr = serve(gated_app(&gate, &loads, guard())).await;
    let mut response = client().get(format!("http://{addr}/x").parse().unwrap()).await.unwrap();
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(b"abc".starts_with(&first), "{first:?}");
    gate.open();
    let rest = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!([first, rest].concat(), b"abcdef");
}

#[tokio::test]
async fn a_client_that_closes_or_half_closes_in_the_middle_stops_no_load() {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let guard = guard();
    let addr = serve(gated_app(&gate, &loads, guard.clone())).await;
    for (n, half) in [false, true].into_iter().enumerate() {
        gate.close();
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = format!("GET /{n} HTTP/1.1\r\nHost: shop.example\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        if half {
            stream.shutdown().await.unwrap();
        } else {
            drop(stream);
        }
        assert_eq!(guard.stats().tasks, 1, "the load goes on");
        gate.open();
        eventually("the load ends", secs(5), async || guard.stats().tasks == 0).await;
        let hit = raw(addr, &format!("GET /{n} HTTP/1.1"), "").await;
        assert!(hit.contains("; hit; ttl=") && hit.contains("abcdef"), "{hit}");
        assert_eq!(loads.started(), n + 1);
    }
}

/// A server closes the connection on an error, and drops all bytes that it has not sent yet.
#[tokio::test]
async fn a_client_of_a_broken_body_has_every_byte_that_had_arrived() {
    let (frames, receiver) = tokio::sync::mpsc::unbounded_channel::<Result<Frame<Bytes>, std::io::Error>>();
    let receiver = Arc::new(std::sync::Mutex::new(Some(receiver)));
    let handler = move || async move {
        let mut receiver = receiver.lock().unwrap().take().expect("one request");
        let frames = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
        Response::new(Body::new(StreamBody::new(frames)))
    };
    let addr = serve(Router::new().route("/", get(handler)).layer(guard())).await;
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: shop.example\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut all = Vec::new();
    for (line, come) in [("one\n", "one"), ("two\n", "two")] {
        frames.send(Ok(Frame::data(Bytes::from_static(line.as_bytes())))).unwrap();
        let has_come = |all: &[u8]| all.windows(3).any(|bytes| bytes == come.as_bytes());
        while !has_come(&all) {
            let read =
                tokio::time::timeout(secs(10), stream.read_buf(&mut all)).await.expect("the line comes");
            assert_ne!(read.unwrap(), 0, "{:?}", String::from_utf8_lossy(&all));
        }
    }
    frames.send(Err(std::io::Error::other("wire cut"))).unwrap();
    tokio::time::timeout(secs(10), stream.read_to_end(&mut all)).await.expect("an end").unwrap();
    let all = String::from_utf8(all).unwrap();
    let (_, body) = all.split_once("\r\n\r\n").unwrap();
    // The chunks' own lines are their lengths; without an empty last chunk, a client knows that the body is
    // incomplete.
    let content: Vec<_> = body.split_inclusive("\r\n").filter(|line| line.len() > 3).collect();
    assert_eq!(content.concat().replace("\r\n", ""), "one\ntwo\n", "{body:?}");
    assert!(!body.contains("0\r\n\r\n"), "{body:?}");
}

#[tokio::test]
async fn trailers_are_on_the_wire_of_a_miss_and_of_a_hit() {
    let handler = || async {
        let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "6".parse().unwrap())]);
        let frames =
            [Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"abc"))), Ok(Frame::trailers(trailers))];
        let body = Body::new(StreamBody::new(futures_util::stream::iter(frames)));
        http::Response::builder().header("trailer", "x-sum").body(body).unwrap()
    };
    let addr = serve(Router::new().route("/", get(handler)).layer(guard())).await;
    for remark in ["fwd=uri-miss; stored", "hit; ttl="] {
        let seen = raw(addr, "GET / HTTP/1.1", "TE: trailers\r\n").await;
        assert!(seen.contains(remark), "{seen}");
        assert!(seen.ends_with("\r\n0\r\nx-sum: 6\r\n\r\n"), "{remark}: {seen}");
    }
}

/// axum itself gives a 204 a `Content-Length`; the guard adds nothing to a response without one.
#[tokio::test]
async fn a_hit_is_framed_as_the_answer_without_the_guard() {
    let app = Router::new()
        .route("/empty", get(|| async { http::StatusCode::NO_CONTENT }))
        .route("/nothing", get(|| async {}))
        .route("/full", get(|| async { "abc" }));
    let (bare, guarded) = (serve(app.clone()).await, serve(app.layer(guard())).await);
    for uri in ["/empty", "/nothing", "/full"] {
        raw(guarded, &format!("GET {uri} HTTP/1.1"), "").await;
        for line in ["GET / HTTP/1.1", "HEAD / HTTP/1.1", "GET / HTTP/1.0"].map(|line| line.replace('/', uri))
        {
            let line = line.replace(&format!("HTTP{uri}"), "HTTP/");
            let (expected, seen) = (raw(bare, &line, "").await, raw(guarded, &line, "").await);
            assert!(seen.contains("; hit; ttl="), "{line}: {seen}");
            let framing = |text: &str| {
                let (head, body) = text.split_once("\r\n\r\n").unwrap();
                let mut lines: Vec<_> =
                    head.lines().filter(|line| !is_the_guards(line)).map(str::to_owned).collect();
                lines.sort();
                (lines, body.to_owned())
            };
            assert_eq!(framing(&seen), framing(&expected), "{line}");
        }
    }
}

/// Origins that speak HTTP/1.0, or repeat a length (RFC 9110, 8.6): their stored responses are sent in the server's
/// own form. Regression: hyper closed the connection of a HEAD with two lines of a length, without an answer.
#[tokio::test]
async fn a_stored_response_of_an_odd_origin_is_sent_in_good_form() {
    for (version, lengths) in
        [(http::Version::HTTP_10, 1), (http::Version::HTTP_3, 0), (http::Version::HTTP_11, 2)]
    {
        let app = Router::new().route(
            "/",
            get(move || async move {
                let mut response = Response::new(Body::from("abc"));
                *response.version_mut() = version;
                for _ in 0..lengths {
                    response.headers_mut().append("content-length", "3".parse().unwrap());
                }
                response
            }),
        );
        let guard = guard();
        // The first client gets the origin's answer as it is.
        let first = tower::Layer::layer(&guard, app.clone());
        let request = http::Request::get("/").header("host", "shop.example").body(Body::empty()).unwrap();
        super::kit::read(tower::ServiceExt::oneshot(first, request).await.unwrap()).await;
        let addr = serve(app.layer(guard)).await;
        for (line, body) in [("GET / HTTP/1.1", "abc"), ("HEAD / HTTP/1.1", ""), ("GET / HTTP/1.0", "abc")] {
            let seen = raw(addr, line, "").await;
            let own = line[line.len() - 8..].to_ascii_lowercase();
            assert!(seen.starts_with(&format!("{own} 200 ok\r\n")), "{version:?} {line}: {seen:?}");
            assert!(seen.contains("; hit; ttl=") && seen.ends_with(&format!("\r\n\r\n{body}")), "{seen}");
            assert_eq!(seen.matches("content-length: 3\r\n").count(), 1, "{line}: {seen}");
        }
    }
}

fn is_the_guards(line: &str) -> bool {
    ["age:", "cache-status:", "date:"].iter().any(|name| line.starts_with(name))
}

#[tokio::test]
async fn a_client_that_does_not_read_delays_a_body_over_max_body() {
    const CHUNK: usize = 64 * 1024;
    let polled = Arc::<AtomicUsize>::default();
    let counter = polled.clone();
    let handler = move || async move {
        let stream = futures_util::stream::iter(0..4096).map_frames(counter);
        Response::new(Body::new(StreamBody::new(stream)))
    };
    let guard = StampedeGuard::in_memory().with_policy(policy().max_body(CHUNK).build().unwrap());
    let addr = serve(Router::new().route("/", get(handler)).layer(guard)).await;
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: shop.example\r\nConnection: close\r\n\r\n").await.unwrap();
    stream.read_exact(&mut [0; 12]).await.unwrap();
    // Nothing may happen here, so there is no event to wait for; a slow machine only makes this weaker.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let ahead = polled.load(Ordering::SeqCst);
    assert!(ahead < 1024, "{ahead} chunks were taken for a client that reads nothing");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert_eq!(polled.load(Ordering::SeqCst), 4096);
    assert!(rest.len() >= 4096 * CHUNK);
}

trait MapFrames: Sized {
    fn map_frames(
        self,
        counter: Arc<AtomicUsize>,
    ) -> impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send;
}

impl<S: futures_util::Stream<Item = i32> + Send> MapFrames for S {
    fn map_frames(
        self,
        counter: Arc<AtomicUsize>,
    ) -> impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
        static CHUNK: [u8; 64 * 1024] = [b'x'; 64 * 1024];
        futures_util::StreamExt::map(self, move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(Frame::data(Bytes::from_static(&CHUNK)))
        })
    }
}

/// The server leaves Nagle's algorithm on, as axum's does by default.
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_miss_is_not_delayed_by_delayed_acknowledgements() {
    let server = crate::support::redis_server::RedisServer::start();
    let patient = policy().coordination_budget(secs(8)).command_timeout(secs(2)).lease(secs(8));
    let redis = redis::Client::open(server.minimal_user()).unwrap();
    let guard = StampedeGuard::builder(redis).policy(patient.build().unwrap()).build().unwrap();
    crate::redis::connects(&guard).await;
    let app = Router::new().route("/{n}", get(|| async { "abc".repeat(1000) })).layer(guard);
    let (addr, client) = (serve(app).await, client());
    // Such a wait takes 40 ms, and came to one miss in two. Repeating the rounds discounts a busy machine.
    let mut slow = Vec::new();
    for round in 0..3 {
        let mut times = Vec::new();
        for n in 0..50 {
            let started = std::time::Instant::now();
            let uri = format!("http://{addr}/{}", round * 50 + n);
            client.get(uri.parse().unwrap()).await.unwrap().into_body().collect().await.unwrap();
            times.push(started.elapsed());
        }
        times.sort();
        slow.push(times[35]);
    }
    assert!(slow.iter().any(|time| *time < Duration::from_millis(35)), "{slow:?}");
}

/// Storing after the last byte was sent would lose the next request's hit.
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_times_on_redis_the_request_after_a_whole_response_hits() {
    let server = crate::support::redis_server::RedisServer::start();
    let (loads, gate) = (Counter::default(), Gate::closed());
    gate.open();
    let patient = policy().coordination_budget(secs(8)).command_timeout(secs(2)).lease(secs(8));
    let client_of_redis = redis::Client::open(server.minimal_user()).unwrap();
    let guard = StampedeGuard::builder(client_of_redis).policy(patient.build().unwrap()).build().unwrap();
    crate::redis::connects(&guard).await;
    let (counter, streamed) = (loads.clone(), loads.clone());
    let app = Router::new()
        .route(
            "/whole/{n}",
            get(|| async move {
                drop(counter.start());
                "abc".repeat(1000)
            }),
        )
        .route(
            "/streamed/{n}",
            get(move || async move {
                drop(streamed.start());
                gated(&gate)
            }),
        )
        .route("/empty/{n}", get(|| async { http::StatusCode::NO_CONTENT }))
        .layer(guard.clone());
    let (addr, client) = (serve(app).await, client());
    let mut misses = Vec::new();
    for n in 0..200 {
        let uri = match n % 5 {
            0 => format!("http://{addr}/empty/{n}"),
            1 | 2 => format!("http://{addr}/streamed/{n}"),
            _ => format!("http://{addr}/whole/{n}"),
        };
        let mut bodies = Vec::new();
        for round in 0..2 {
            let response = client.get(uri.parse().unwrap()).await.unwrap();
            let remark = response.headers()["cache-status"].to_str().unwrap().to_owned();
            if round == 0 {
                assert!(remark.contains("fwd=uri-miss; stored"), "{uri}: {remark}");
            } else if !remark.contains("hit") {
                misses.push(format!("{uri}: {remark}"));
            }
            bodies.push(response.into_body().collect().await.unwrap().to_bytes());
        }
        assert_eq!(bodies[0], bodies[1]);
    }
    assert!(misses.is_empty(), "{misses:?}");
    assert_eq!((loads.started(), guard.stats().loads), (160, 200));
}
