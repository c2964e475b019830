//! `docs/testing.md`.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response, header};
use axum::{Router, routing::get};
use stampede_guard::http::{HttpPolicy, explain};
use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin};
use stampede_guard::{Policy, StampedeGuard};
use tower::ServiceExt as _;

#[derive(Clone, Default)]
struct Shop {
    queries: Arc<AtomicUsize>,
}

async fn report(State(shop): State<Shop>) -> String {
    shop.queries.fetch_add(1, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(50)).await;
    "all is well".to_owned()
}

/// The service. Its guard is a parameter: on Redis in production, in memory in tests.
fn app(shop: Shop, guard: StampedeGuard) -> Router {
    Router::new().route("/report/{id}", get(report)).layer(guard).with_state(shop)
}

#[tokio::test]
async fn a_report_is_queried_once() -> Result<(), Box<dyn Error>> {
    let shop = Shop::default();
    let app = app(shop.clone(), StampedeGuard::in_memory());

    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let request = Request::get("/report/7").header(header::HOST, "shop.example").body(Body::empty())?;
        clients.spawn(app.clone().oneshot(request));
    }
    for response in clients.join_all().await {
        assert_eq!(response?.status(), 200);
    }
    assert_eq!(shop.queries.load(Ordering::SeqCst), 1);
    Ok(())
}

#[test]
fn a_basket_is_not_shared() -> Result<(), Box<dyn Error>> {
    let policy = HttpPolicy::default();
    let request = Request::get("http://shop.example/basket").body(())?;
    let response = Response::builder().header("cache-control", "private").body(())?;
    let decision = explain(&request, &response, &policy);
    assert_eq!(decision.to_string(), "not stored: private (RFC 9111, 5.2.2.7)");

    let response = Response::builder().header("cache-control", "s-maxage=300").body(())?;
    let decision = explain(&request, &response, &policy);
    assert_eq!(decision.to_string(), "stored, fresh for 300s: s-maxage (RFC 9111, 5.2.2.10)");
    assert_eq!(decision.fresh_for, Some(Duration::from_secs(300)));
    Ok(())
}

#[derive(Clone)]
struct Prices {
    guard: StampedeGuard,
    origin: Origin,
}

impl Prices {
    async fn price(&self, id: u32) -> Option<u64> {
        let origin = self.origin.clone();
        let load = move || async move { origin.load(format!("price:{id}")).await };
        self.guard.get_or_load(("price", id), load).await.ok()
    }
}

#[tokio::test(start_paused = true)]
async fn each_caller_has_a_price_whatever_happens_to_the_store() -> Result<(), Box<dyn Error>> {
    for seed in 0..20 {
        let (chaos, origin) = (ChaosStore::new(seed), Origin::new());
        chaos.latency(Duration::from_millis(1), Duration::from_millis(3));
        origin.takes(Duration::from_millis(200));
        for fault in [Fault::ErrorAfter, Fault::BlackHole, Fault::WakeLost, Fault::EvictLease] {
            chaos.inject(fault, 0.1);
        }
        let replica = || Prices { guard: StampedeGuard::new(chaos.clone()), origin: origin.clone() };
        let replicas = [replica(), replica(), replica()];

        let mut callers = tokio::task::JoinSet::new();
        for n in 0..30 {
            let prices = replicas[n % 3].clone();
            callers.spawn(async move { prices.price(7).await });
        }
        for price in callers.join_all().await {
            assert_eq!(price, Some(0), "SEED={seed}");
        }
        assert!(origin.loads("price:7") <= 6, "SEED={seed}"); // not thirty
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_stale_price_stands_in() -> Result<(), Box<dyn Error>> {
    let origin = Origin::new();
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(60))
        .stale_if_error(Duration::from_secs(3600))
        .build()?;
    let prices = Prices { guard: StampedeGuard::in_memory().with_policy(policy), origin: origin.clone() };
    assert_eq!(prices.price(7).await, Some(0));

    origin.change("price:7"); // its values are versions: the next one is 1
    origin.answer("price:7", [Answer::Fail]);
    tokio::time::sleep(Duration::from_secs(61)).await; // takes no time: the clock is paused
    assert_eq!(prices.price(7).await, Some(0)); // the stale one

    tokio::time::sleep(Duration::from_secs(6)).await; // the back-off is over
    assert_eq!(prices.price(7).await, Some(1));
    assert_eq!((origin.loads("price:7"), origin.most_at_once("price:7")), (3, 1));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_cut_off_still_answers() -> Result<(), Box<dyn Error>> {
    let (chaos, origin) = (ChaosStore::new(42), Origin::new());
    let replica = chaos.replica();
    let prices = Prices { guard: StampedeGuard::new(replica.clone()), origin: origin.clone() };

    replica.cut(); // also: stop, resume, move_away, kill
    assert_eq!(prices.price(7).await, Some(0));
    assert_eq!(prices.guard.stats().fail_open_loads, 1);

    replica.resume();
    chaos.once(Fault::Flush);
    assert_eq!(prices.price(7).await, Some(0));
    assert_eq!(chaos.struck(Fault::Flush), 1);
    Ok(())
}

/// In front of a real server, in an integration test.
fn over_redis() -> Result<StampedeGuard, Box<dyn Error>> {
    let chaos = ChaosStore::over(redis::Client::open("redis://127.0.0.1/")?, 42);
    for &fault in Fault::ON_ANY_STORE {
        chaos.inject(fault, 0.05);
    }
    let guard = StampedeGuard::new(chaos);
    Ok(guard)
}

#[test]
fn a_guard_on_faults_in_front_of_redis_can_be_made() -> Result<(), Box<dyn Error>> {
    over_redis().map(drop)
}
