//! X1: a replica receives a SIGTERM while it loads. The tests run `examples/axum_server.rs` as a real process, because users copy that
//! program.

use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinHandle;

use crate::support::example::Example;
use crate::support::probe::{assert_nothing_left, eventually_eq};
use crate::support::redis_server::RedisServer;
use crate::support::rounds::{Rounds, Timing};

const LOADS: usize = 50;
const SOON: Duration = Duration::from_secs(10);

fn replica(server: &RedisServer, load_ms: &str, deadline_ms: &str) -> (Example, String) {
    let redis = server.minimal_user();
    // Nothing must time out on a busy machine, and no lease must end during a test: a lease that is free was released.
    let patient = [("BUDGET_MS", "4000"), ("LEASE_MS", "60000")];
    let env = [("REDIS_URL", &*redis), ("PORT", "0"), ("LOAD_MS", load_ms), ("DEADLINE_MS", deadline_ms)];
    let env = [&env[..], &patient].concat();
    let replica = Example::start("axum_server", &env);
    let url = replica.printed("listening on ").split(';').next().expect("a URL").to_owned();
    (replica, url)
}

/// Requests each of these reports once. Returns its status and body, or that the connection was cut. All requests have the same host, as
/// behind a load balancer, so that replicas share the responses.
fn ask_for(url: &str, reports: Range<usize>) -> Vec<JoinHandle<Result<(u16, String), ()>>> {
    let client = Client::builder(TokioExecutor::new()).build_http::<axum::body::Body>();
    let ask = |report: usize| {
        let (client, uri) = (client.clone(), format!("{url}/report/{report}"));
        tokio::spawn(async move {
            let request = http::Request::get(uri).header("host", "shop.example");
            let request = request.body(axum::body::Body::empty()).expect("a request");
            let response = client.request(request).await.map_err(drop)?;
            let status = response.status().as_u16();
            let body = response.into_body().collect().await.map_err(drop)?.to_bytes();
            Ok((status, String::from_utf8_lossy(&body).into_owned()))
        })
    };
    reports.map(ask).collect()
}

/// Checks that each client receives its own report. The first one has this number.
async fn are_served(calls: Vec<JoinHandle<Result<(u16, String), ()>>>, first: usize) {
    for (report, answer) in (first..).zip(join_all(calls).await) {
        let (status, body) = answer.expect("joined").expect("answered");
        assert_eq!((status, &*body), (200, &*format!("report {report}: all is well\n")));
    }
}

async fn keys(server: &RedisServer, kind: &str, n: usize) {
    let head = format!("sg1:{kind}:");
    let count = async || server.keys().iter().filter(|key| key.starts_with(&head)).count();
    eventually_eq(format!("keys {head}*"), SOON, n, count).await;
}

#[tokio::test]
async fn a_terminated_replica_answers_its_loads() {
    let server = RedisServer::start();
    let (mut replica, url) = replica(&server, "1500", "20000");
    let calls = ask_for(&url, 0..LOADS);
    keys(&server, "l", LOADS).await;
    replica.terminate();
    are_served(calls, 0).await;
    assert!(replica.ended().await.success());
    assert_eq!(
        replica.printed("Shutdown "),
        "{ finished: true, handed_over: 0, abandoned: 0, unsent_invalidations: 0 }"
    );
    keys(&server, "l", 0).await;
    keys(&server, "e", LOADS).await;
    assert_nothing_left(&server, SOON).await;
}

#[tokio::test]
async fn loads_beyond_a_terminated_replicas_deadline_go_to_another() {
    let server = RedisServer::start();
    let (mut leaves, url) = replica(&server, "600000", "500");
    let (mut stays, other) = replica(&server, "20", "20000");
    let cut = ask_for(&url, 0..LOADS);
    keys(&server, "l", LOADS).await;
    let waits = ask_for(&other, 0..LOADS / 2);
    keys(&server, "q", LOADS / 2).await;
    let began = Instant::now();
    leaves.terminate();
    are_served(waits, 0).await;
    assert!(leaves.ended().await.success());
    let took = began.elapsed();
    assert!(took < Duration::from_millis(500) + SOON, "{took:?}");
    assert_eq!(
        leaves.printed("Shutdown "),
        format!("{{ finished: false, handed_over: {LOADS}, abandoned: 0, unsent_invalidations: 0 }}")
    );
    // Each lease was handed over, or released if no process waited for it, so the next request does not wait until a dead process's lease
    // ends.
    keys(&server, "l", 0).await;
    // The loads of these clients were handed over, so they are cut off when the process ends, or receive an error just before.
    for answer in join_all(cut).await {
        if let Ok((status, text)) = answer.expect("joined") {
            assert_eq!(status, 502, "{text}");
        }
    }
    stays.terminate();
    assert!(stays.ended().await.success());
    assert_nothing_left(&server, SOON).await;
}

/// The process ends when its loads have ended.
#[tokio::test]
async fn a_terminated_replica_ends_with_its_loads() {
    let load = Duration::from_millis(600);
    let server = RedisServer::start();
    let mut rounds = Rounds::of("its loads end in time");
    while rounds.next().is_some() {
        let (mut leaves, url) = replica(&server, "600", "10000");
        let calls = ask_for(&url, 0..LOADS);
        keys(&server, "l", LOADS).await;
        let terminated = Instant::now();
        leaves.terminate();
        are_served(calls, 0).await;
        let answered = terminated.elapsed();
        assert!(leaves.ended().await.success());
        rounds.note([
            Timing::once("answered", answered, load),
            Timing::once("ended", terminated.elapsed(), load),
        ]);
        server.flush_all();
    }
}

/// The process must end at most a second after its deadline: handing over takes no longer.
#[tokio::test]
async fn a_terminated_replica_has_handed_over_a_second_after_its_deadline() {
    let deadline = Duration::from_millis(500);
    let server = RedisServer::start();
    let (_stays, other) = replica(&server, "20", "20000");
    let mut rounds = Rounds::of("its loads do not end in time");
    while let Some(round) = rounds.next() {
        let reports = round * LOADS..(round + 1) * LOADS;
        let (mut leaves, url) = replica(&server, "600000", "500");
        let cut = ask_for(&url, reports.clone());
        keys(&server, "l", LOADS).await;
        let waits = ask_for(&other, reports.start..reports.start + LOADS / 2);
        keys(&server, "q", LOADS / 2).await;
        let terminated = Instant::now();
        leaves.terminate();
        are_served(waits, reports.start).await;
        let answered = terminated.elapsed();
        keys(&server, "l", 0).await;
        let freed = terminated.elapsed();
        assert!(leaves.ended().await.success());
        let most = deadline + Duration::from_secs(1);
        rounds.note([
            Timing::once("answered elsewhere", answered, most),
            Timing::once("no lease left", freed, most),
            Timing::once("ended", terminated.elapsed(), most),
        ]);
        join_all(cut).await;
    }
}
