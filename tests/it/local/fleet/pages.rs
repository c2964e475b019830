//! One web server per process, with the layer and a local tier: a POST to one server invalidates the page of all others.

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use super::process::{Config, policy};
use super::truth::{Subject, Truth};
use super::{ONE_FLEET, TERM};
use crate::support::PATIENCE;
use crate::support::processes::{Child, Fleet};
use crate::support::redis_server::RedisServer;

const PROCESSES: usize = 3;
const PAGE: usize = 0;

/// A process whose page shows the version. A POST makes a new version.
pub(super) fn serve(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let builder = crate::redis::builder(&config.redis).policy(policy(true, None)).local_term(TERM);
        let guard = builder.build().expect("valid");
        crate::redis::connects(&guard).await;
        let truth = Truth::connect(&config).await;
        let show = async |State(truth): State<Truth>| {
            let version = truth.value(PAGE).await.versions[0].1;
            ([("cache-control", "max-age=600")], version.to_string())
        };
        let change = async |State(truth): State<Truth>| {
            truth.raise(Subject::Key(PAGE)).await;
            StatusCode::NO_CONTENT
        };
        let app = Router::new().route("/page", get(show).post(change)).with_state(truth).layer(guard.clone());
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("bound").to_string();
        tokio::spawn(async move { axum::serve(listener, app).await });
        child.report().event_with("addr", &addr);
        loop {
            child.recv_line().await;
            child.report().event_with("hits", &guard.stats().local_hits);
        }
    })
}

type Http = Client<hyper_util::client::legacy::connect::HttpConnector, Full<Bytes>>;

/// Sends a request, and returns the version on the page.
async fn send(http: Http, method: &'static str, addr: String) -> u64 {
    let request = axum::http::Request::builder().method(method).uri(format!("http://{addr}/page"));
    // The key contains the `Host`, so all processes are reached by one name.
    let request = request.header("host", "shop.example").body(Full::default()).expect("a request");
    let response = http.request(request).await.expect("a response");
    assert!(response.status().is_success(), "{}", response.status());
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    std::str::from_utf8(&body).expect("text").parse().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_at_one_server_invalidates_the_pages_of_all() {
    const ROUNDS: usize = 60;
    let _one_fleet = ONE_FLEET.lock().await;
    let (server, truth) = (RedisServer::start(), RedisServer::start());
    let (redis, truth) = (server.minimal_user(), truth.url());
    let config = Config { redis, truth, process: 0, keeps: true, callers: 0, strict: true };
    let fleet = Fleet::spawn(PROCESSES, "local.pages", &config);
    let mut addrs = Vec::new();
    for member in fleet.members() {
        addrs.push(member.wait_event("addr").await.as_str().expect("text").to_owned());
    }
    let http: Http = Client::builder(TokioExecutor::new()).build_http();
    let pages =
        || join_all((0..4 * PROCESSES).map(|n| send(http.clone(), "GET", addrs[n % PROCESSES].clone())));
    let hits = async || {
        let mut all = Vec::new();
        for member in fleet.members() {
            member.send("hits");
            all.push(member.wait_event("hits").await.as_u64().expect("a number"));
        }
        all
    };
    let began = Instant::now();
    while hits().await.iter().any(|hits| *hits < 10) {
        assert!(began.elapsed() < PATIENCE, "{:?}", hits().await);
        pages().await;
    }
    sleep(2 * TERM).await;
    let mut slowest = Duration::ZERO;
    for round in 1..=ROUNDS {
        let posted = Instant::now();
        // Other clients send requests meanwhile, which may receive either version.
        let post = send(http.clone(), "POST", addrs[round % PROCESSES].clone());
        tokio::join!(post, pages());
        slowest = slowest.max(posted.elapsed());
        for _ in 0..3 {
            let versions = pages().await;
            assert!(versions.iter().all(|version| *version == round as u64), "round {round}: {versions:?}");
        }
    }
    let hits = hits().await;
    println!("{ROUNDS} posts, the slowest {slowest:.1?}; hits from memory: {hits:?}");
    assert!(hits.iter().all(|hits| *hits > 100), "{hits:?}");
}
