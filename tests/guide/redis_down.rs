//! `docs/redis-down.md`. Redis "is down" on port 1 of this machine, where nothing listens.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode, header};
use axum::{Router, routing::get};
use stampede_guard::health::Breaker;
use stampede_guard::{OnStoreDown, Policy, StampedeGuard};
use tokio::time::timeout;
use tower::ServiceExt as _;

static QUERIES: AtomicUsize = AtomicUsize::new(0);

async fn fetch_user(id: u64) -> Result<String, std::io::Error> {
    QUERIES.fetch_add(1, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(500)).await;
    Ok(format!("user {id}"))
}

#[tokio::test]
async fn callers_of_one_process_still_share_a_load() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::new(redis::Client::open("redis://127.0.0.1:1/")?); // nothing listens there

    let (one, two, three) = tokio::join!(
        guard.get_or_load(("user", 7), || fetch_user(7)),
        guard.get_or_load(("user", 7), || fetch_user(7)),
        guard.get_or_load(("user", 7), || fetch_user(7)),
    );
    assert_eq!((one?, two?, three?), ("user 7".into(), "user 7".into(), "user 7".into()));
    assert_eq!(guard.stats().loads, 1); // one load for the three callers of this process
    assert_eq!(guard.stats().fail_open_loads, 1); // it ran without Redis

    assert_eq!(QUERIES.load(Ordering::SeqCst), 1);
    // Nothing was stored: the next caller loads.
    guard.get_or_load(("user", 7), || fetch_user(7)).await?;
    assert_eq!(QUERIES.load(Ordering::SeqCst), 2);
    Ok(())
}

async fn status(State(guard): State<StampedeGuard>) -> String {
    guard.health().to_string()
}

#[tokio::test]
async fn health_says_why() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::new(redis::Client::open("redis://127.0.0.1:1/")?);
    let app: Router = Router::new().route("/status", get(status)).with_state(guard.clone());
    assert!(guard.connect().await.is_err());
    assert_eq!(guard.health().breaker, Breaker::Open);
    let response = app.oneshot(Request::get("/status").body(Body::empty())?).await?;
    let text = axum::body::to_bytes(response.into_body(), 1_000).await?;
    let text = String::from_utf8(text.to_vec())?;
    println!("{text}");
    assert!(
        text.contains("commands=down") && text.contains("breaker=open") && text.contains("reason="),
        "{text}"
    );
    Ok(())
}

fn closed() -> Result<Policy, stampede_guard::Error> {
    let policy = Policy::builder().on_store_down(OnStoreDown::FailClosed).build()?;
    Ok(policy)
}

#[tokio::test]
async fn fail_closed_answers_503() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::new(redis::Client::open("redis://127.0.0.1:1/")?).with_policy(closed()?);
    let app: Router = Router::new().route("/report", get(|| async { "a report" })).layer(guard);
    let request = Request::get("http://shop.example/report").body(Body::empty())?;
    let response = app.oneshot(request).await?;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key(header::RETRY_AFTER));
    println!("{:?}", response.headers());
    Ok(())
}

#[tokio::test]
async fn a_process_loads_no_more_at_once_than_it_may() -> Result<(), Box<dyn Error>> {
    let redis = redis::Client::open("redis://127.0.0.1:1/")?;
    let policy = Policy::builder()
        .max_concurrent_loads(40) // in the whole fleet, as long as Redis counts
        .max_fail_open_loads(4) // in each of ten processes, while it can not be reached
        .build()?;
    let guard = StampedeGuard::builder(redis).policy(policy).build()?;

    let mut callers = tokio::task::JoinSet::new();
    for id in 0..20 {
        let guard = guard.clone();
        let load = || async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            Ok::<_, std::io::Error>(1)
        };
        callers.spawn(async move { guard.get_or_load(("report", id), load).await.is_ok() });
    }
    let answered = callers.join_all().await.into_iter().filter(|answered| *answered).count();
    assert_eq!((answered, guard.stats().overloaded), (4, 16));
    Ok(())
}

/// Whether the invalidation was confirmed.
async fn forget(guard: &StampedeGuard, id: u64) -> bool {
    match timeout(Duration::from_millis(200), guard.invalidate(("user", id))).await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            println!("not invalidated: {error}");
            false
        }
        Err(_) => false, // not confirmed yet: it is sent when Redis is back
    }
}

#[tokio::test]
async fn an_invalidation_is_retried_until_its_caller_leaves() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::new(redis::Client::open("redis://127.0.0.1:1/")?);
    let began = Instant::now();
    assert!(!forget(&guard, 7).await);
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(forget(&StampedeGuard::in_memory(), 7).await);
    Ok(())
}
