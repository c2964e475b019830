//! Unsafe HTTP requests while the Redis server is down: their invalidations are retained.
#![cfg(feature = "http")]

use axum::body::Body;
use axum::routing::get;
use http::{Request, StatusCode};
use tower::ServiceExt as _;

use super::*;
use crate::support::warnings::Warnings;

async fn ask(app: &axum::Router, method: &str) -> Duration {
    let request = Request::builder().method(method).uri("http://host/report").body(Body::empty());
    let started = Instant::now();
    let response = app.clone().oneshot(request.expect("a request")).await.expect("infallible");
    assert_eq!(response.status(), StatusCode::OK);
    started.elapsed()
}

#[tokio::test]
async fn unsafe_requests_cost_nothing_while_the_server_is_dead() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let server = RedisServer::start();
    let guard = local(&server, Policy::default()).await;
    let report = get(|| async { ([("cache-control", "max-age=600")], "report") }).post(|| async { "done" });
    let app = axum::Router::new().route("/report", report).layer(guard.clone());
    // The journal of tags stays for as long as a load may read it.
    let keys = || server.keys().into_iter().filter(|key| !key.starts_with("sg1:j:")).collect::<Vec<_>>();
    let is_stored = || {
        eventually_eq("it is stored", SOON, 1, async || {
            ask(&app, "GET").await;
            keys().len()
        })
    };
    is_stored().await;
    server.kill();

    let mut added = Vec::new();
    for _ in 0..40 {
        added.push(ask(&app, "POST").await);
    }
    keep_to_the_budget(&added, "changes");
    assert!(median(added.clone()) <= NOTHING, "{added:?}");
    // However many requests there are, their invalidation is retained only once for the key, and once for the tag of its resource.
    join_all((0..2_000).map(|_| ask(&app, "POST"))).await;
    settled(std::slice::from_ref(&guard)).await;
    assert_eq!(guard.stats().kept_invalidations, 2);
    assert_eq!(warnings.about("still stored").len(), 1);

    server.start_again();
    eventually_eq("they are sent", SOON, 0, async || guard.stats().kept_invalidations).await;
    is_stored().await;
    ask(&app, "POST").await;
    // If an invalidation takes longer than its request may, it goes on after the response.
    eventually_eq("it is removed", SOON, Vec::<String>::new(), async || keys()).await;
}

/// In the process that made the change, a later caller does not join a load that began before it, even if the store is down.
#[tokio::test]
async fn a_later_caller_does_not_join_a_load_from_before_the_change() {
    let server = RedisServer::start();
    let guard = local(&server, Policy::default()).await;
    server.kill();
    let (gate, loads) = (Gate::closed(), Counter::default());
    let route = {
        let (gate, loads) = (gate.clone(), loads.clone());
        get(move || async move {
            let running = loads.start();
            gate.pass().await;
            drop(running);
            "report"
        })
    };
    let app = axum::Router::new().route("/report", route.post(|| async { "done" })).layer(guard.clone());
    ask(&app, "POST").await;
    let call = |app: &axum::Router| {
        let app = app.clone();
        tokio::spawn(async move { ask(&app, "GET").await })
    };
    let before = call(&app);
    loads.reach(1).await;
    ask(&app, "POST").await;
    let after = call(&app);
    loads.reach(2).await;
    gate.open();
    before.await.expect("joined");
    after.await.expect("joined");
}
