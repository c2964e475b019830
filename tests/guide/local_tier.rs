//! `docs/local-tier.md`.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::{Router, routing::get};
use serde::{Deserialize, Serialize};
use stampede_guard::testing::{ChaosStore, Origin};
use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use tokio::time::sleep;

use crate::requests;

#[derive(Debug, Serialize, Deserialize)]
struct Product {
    name: String,
}

#[derive(Clone)]
struct Database;

impl Database {
    async fn product(&self, id: u64) -> Result<Product, std::io::Error> {
        Ok(Product { name: format!("product {id}") })
    }
}

#[derive(Clone)]
struct Shop {
    guard: StampedeGuard,
    db: Database,
}

fn guard_of_the_shop(redis: redis::Client) -> Result<StampedeGuard, stampede_guard::Error> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(60))
        .local_for(Duration::MAX) // serves a copy from memory as long as it is fresh
        .build()?;
    StampedeGuard::builder(redis)
        .namespace("shop")
        .policy(policy)
        .local_capacity(256 << 20) // bytes of copies in this guard; 64 MiB if this is not set
        .build()
}

async fn name(State(shop): State<Shop>, Path(id): Path<u64>) -> Result<String, StatusCode> {
    let db = shop.db.clone();
    let load = move || async move { db.product(id).await };
    let product = shop.guard.load(("product", id)).get_shared(move |_| load()).await;
    let product: Arc<Product> = product.map_err(|_| StatusCode::BAD_GATEWAY)?.value; // one value for all callers
    Ok(product.name.clone())
}

#[test]
fn the_settings_of_a_service_are_valid() -> Result<(), Box<dyn Error>> {
    let guard = guard_of_the_shop(redis::Client::open("redis://127.0.0.1/")?)?;
    assert_eq!(guard.health().local.map(|local| local.copies), Some(0));
    Ok(())
}

/// Asks until the answer comes from memory: the first request begins the lease, a later one makes the copy.
async fn warm(guard: &StampedeGuard, origin: &Origin) -> u64 {
    loop {
        let (before, value) = (guard.stats().local_hits, price(guard, origin).await);
        if guard.stats().local_hits > before {
            return value;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

async fn price(guard: &StampedeGuard, origin: &Origin) -> u64 {
    let origin = origin.clone();
    let load = move || async move { origin.load("price").await };
    *guard.load("price").get_shared(move |_| load()).await.expect("loaded").value
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_reaches_the_memory_of_other_processes() -> Result<(), Box<dyn Error>> {
    let (fleet, origin) = (MemoryStore::new(), Origin::new());
    let policy = Policy::builder().local_for(Duration::MAX).build()?;
    let process = || StampedeGuard::builder(fleet.clone()).policy(policy.clone()).build();
    let [one, two] = [process()?, process()?];
    assert_eq!((warm(&one, &origin).await, warm(&two, &origin).await), (0, 0));

    let newest = origin.change("price"); // first the origin ..
    one.invalidate("price").await?; // .. then the cache: returns when no process serves the older price any more
    assert_eq!(price(&two, &origin).await, newest);
    assert_eq!(two.stats().local_drops, 1);
    Ok(())
}

#[tokio::test]
async fn handlers_share_one_decoded_value() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().local_for(Duration::MAX).build()?;
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let shop = Shop { guard: guard.clone(), db: Database };
    let app = Router::new().route("/product/{id}", get(name)).with_state(shop);
    while guard.stats().local_hits == 0 {
        assert_eq!(requests::get(&app, "/product/7").await.text(), "product 7");
    }
    let one = guard.get_shared::<Product>(("product", 7_u64)).await?;
    let two = guard.get_shared::<Product>(("product", 7_u64)).await?;
    assert!(one.zip(two).is_some_and(|(one, two)| Arc::ptr_eq(&one, &two)));
    Ok(())
}

#[tokio::test]
async fn the_layer_answers_from_memory() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().local_for(Duration::MAX).build()?;
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let app = Router::new().route("/", get(|| async { "a page" })).layer(guard.clone());
    while guard.stats().local_hits == 0 {
        assert_eq!(requests::get(&app, "/").await.text(), "a page");
    }
    assert!(requests::get(&app, "/").await.is_hit());
    Ok(())
}

fn survives_an_outage() -> Result<Policy, stampede_guard::Error> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(60))
        .stale_while_revalidate(Duration::from_secs(600)) // else a copy ends with its 60 s of freshness
        .local_for(Duration::MAX)
        .local_while_down(Duration::from_secs(300))
        .build()?;
    Ok(policy)
}

#[tokio::test(start_paused = true)]
async fn copies_are_served_while_redis_is_away() -> Result<(), Box<dyn Error>> {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let (with, without) = (chaos.replica(), chaos.replica());
    let lasting = StampedeGuard::builder(with.clone()).policy(survives_an_outage()?).build()?;
    let policy = survives_an_outage()?.to_builder().local_while_down(Duration::ZERO).build()?;
    let loads = StampedeGuard::builder(without.clone()).policy(policy).build()?;
    for guard in [&lasting, &loads] {
        warm(guard, &origin).await;
    }
    with.cut();
    without.cut();
    sleep(Duration::from_secs(120)).await;
    let before = origin.loads("price");
    for _ in 0..10 {
        price(&lasting, &origin).await;
    }
    assert_eq!((origin.loads("price"), lasting.stats().stale), (before, 10));
    for _ in 0..10 {
        price(&loads, &origin).await;
    }
    assert_eq!(origin.loads("price"), before + 10, "one load for each wave of callers");

    // The invalidation of this process itself fails, and drops its own copy all the same.
    let newest = origin.change("price");
    assert!(lasting.invalidate("price").await.is_err());
    assert_eq!(price(&lasting, &origin).await, newest);
    Ok(())
}
