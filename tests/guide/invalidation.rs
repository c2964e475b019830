//! The code of `docs/invalidation.md`.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use http::Request;
use stampede_guard::http::HttpPolicy;
use stampede_guard::testing::{ChaosStore, Replica};
use stampede_guard::{ErrorKind, LoadContext, MemoryStore, Policy, StampedeGuard};
use tokio::time::Instant;

use crate::requests::{self, send};

#[derive(Clone, Default)]
struct Database {
    version: Arc<AtomicU64>,
    loads: Arc<AtomicU64>,
}

impl Database {
    async fn price(&self, _id: u64) -> Result<u64, std::io::Error> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        let version = self.version.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(10)).await;
        Ok(version)
    }

    async fn set_price(&self, _id: u64) -> Result<(), std::io::Error> {
        self.version.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

async fn change(guard: &StampedeGuard, db: &Database, id: u64) -> Result<(), Box<dyn Error>> {
    db.set_price(id).await?; // first the origin ..
    guard.invalidate(("price", id)).await?; // .. then the cache: the next caller loads the new price
    Ok(())
}

async fn price(guard: &StampedeGuard, db: &Database, id: u64) -> Option<u64> {
    let db = db.clone();
    guard.get_or_load(("price", id), move || async move { db.price(id).await }).await.ok()
}

#[tokio::test(start_paused = true)]
async fn an_invalidation_wins_over_a_running_load() -> Result<(), Box<dyn Error>> {
    let (store, db) = (MemoryStore::new(), Database::default());
    let [here, there] = [StampedeGuard::new(store.clone()), StampedeGuard::new(store)];
    let older = tokio::spawn({
        let (there, db) = (there.clone(), db.clone());
        async move { price(&there, &db, 7).await }
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    change(&here, &db, 7).await?;
    let (a, b) = tokio::join!(price(&here, &db, 7), price(&there, &db, 7));
    assert_eq!((a, b), (Some(1), Some(1)), "callers after the invalidation");
    assert_eq!(older.await?, Some(0), "the caller before it");
    assert_eq!(there.get::<u64>(("price", 7)).await?, Some(1));
    Ok(())
}

async fn load(mut cx: LoadContext<u64>, db: Database, id: u64) -> Result<u64, Box<dyn Error + Send + Sync>> {
    cx.tag([("product", id)]).await?;
    Ok(db.price(id).await?)
}

#[derive(Clone, Debug)]
struct Product {
    category: &'static str,
    name: String,
}

/// A shop whose product 7 has a name with the version of its data.
#[derive(Clone, Default)]
struct Catalog {
    version: Arc<AtomicU64>,
}

impl Catalog {
    async fn product(&self, id: u64) -> Result<Product, std::io::Error> {
        let name = format!("product {id} of version {}", self.version.load(Ordering::Relaxed));
        tokio::time::sleep(Duration::from_millis(10)).await;
        Ok(Product { category: "books", name })
    }
}

async fn product_name(mut cx: LoadContext<String>, db: Catalog, id: u64) -> Result<String, std::io::Error> {
    let product = db.product(id).await?;
    cx.tag([("category", product.category)]).await.map_err(std::io::Error::other)?;
    Ok(product.name)
}

#[tokio::test(start_paused = true)]
async fn a_tag_that_is_part_of_the_value_is_added_after_it_is_loaded() -> Result<(), Box<dyn Error>> {
    let (guard, db) = (StampedeGuard::in_memory(), Catalog::default());
    let ask = || {
        let (guard, db) = (guard.clone(), db.clone());
        async move { guard.load("p").get(move |cx| product_name(cx, db, 7)).await.map(|loaded| loaded.value) }
    };
    let older = tokio::spawn(ask());
    tokio::time::sleep(Duration::from_millis(5)).await;
    let version = db.version.fetch_add(1, Ordering::Relaxed) + 1;
    guard.invalidate_tag(("category", "books")).await?; // the loader does not know the tag yet
    older.await??;
    assert_eq!(ask().await?, format!("product 7 of version {version}"));
    Ok(())
}

#[tokio::test]
async fn tags_reach_many_values_at_once() -> Result<(), Box<dyn Error>> {
    let db = Database::default();
    let policy = Policy::builder().tags(["catalog"]).build()?; // every value under this policy
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;

    for id in [7, 8] {
        let db = db.clone();
        guard.load(("price", id)).get(move |cx| load(cx, db, id)).await?;
    }
    guard.insert_with_tags(("offer", 1), &299_u64, ["sale"]).await?;

    guard.invalidate_tag(("product", 7)).await?; // what the loader tagged
    assert!(!guard.contains(("price", 7)).await?);
    assert!(guard.contains(("price", 8)).await?);
    guard.invalidate_tag("catalog").await?; // what the policy tagged: all of them
    assert!(!guard.contains(("price", 8)).await?);
    assert!(!guard.contains(("offer", 1)).await?);
    Ok(())
}

#[tokio::test]
async fn everything_of_a_namespace() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().invalidate_all(true).build()?;
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    guard.insert("a", &1_u64).await?;
    guard.invalidate_all().await?; // every value stored under a policy with `invalidate_all(true)`
    assert!(!guard.contains("a").await?);

    let without = guard.with_policy(Policy::builder().build()?);
    let refused = without.invalidate_all().await.expect_err("would not reach its own values");
    assert_eq!(refused.kind(), ErrorKind::InvalidPolicy);
    Ok(())
}

#[tokio::test]
async fn several_are_invalidated_at_once() -> Result<(), Box<dyn Error>> {
    let db = Database::default();
    let policy = Policy::builder().http(HttpPolicy::default().authority("shop.example")).build()?;
    let guard = StampedeGuard::builder(MemoryStore::new()).policy(policy).build()?;
    let page = guard.http_key(&Request::get("/product/7").body(())?).ok_or("no key")?;
    guard.insert(("price", 7), &499_u64).await?;
    guard.insert(page.clone(), &499_u64).await?;
    guard.insert_with_tags(("offer", 7), &499_u64, ["catalog"]).await?;

    db.set_price(7).await?;
    guard.invalidation().key(("price", 7)).tag("catalog").path("/product/7").send().await?;

    let left: Vec<_> = guard.get_many::<u64, _>([("price", 7).into(), page, ("offer", 7).into()]).await;
    assert!(left.into_iter().all(|value: Result<Option<u64>, _>| value.is_ok_and(|value| value.is_none())));
    Ok(())
}

#[tokio::test]
async fn every_query_of_a_path_is_invalidated() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::in_memory();

    let http = HttpPolicy::default().authority("shop.example").path_tags(true);
    let guard = guard.with_policy(Policy::builder().http(http).build()?);
    let page = guard.http_key(&Request::get("/product/7?utm_source=mail").body(())?).ok_or("no key")?;
    guard.insert(page.clone(), &499_u64).await?;
    assert!(guard.contains(page.clone()).await?);
    guard.invalidate_path("/product/7").await?;
    assert!(!guard.contains(page).await?);
    Ok(())
}

#[tokio::test]
async fn an_unconfirmed_invalidation_is_retained() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::new(redis::Client::open("redis://127.0.0.1:1/")?);
    let error = guard.invalidate(("price", 7)).await.expect_err("Redis is away");
    println!("{error}: {}", guard.stats().kept_invalidations);
    let printed = include_str!("../../docs/invalidation.md").replace('\n', " ");
    assert!(printed.contains(&format!("{error}: {}", guard.stats().kept_invalidations)), "{error}");
    Ok(())
}

#[derive(Clone)]
struct Shop {
    guard: StampedeGuard,
    db: Database,
}

async fn product(State(shop): State<Shop>, Path(id): Path<u64>) -> Result<String, StatusCode> {
    let price = shop.db.price(id).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    Ok(format!("price {price}"))
}

async fn update(State(shop): State<Shop>, Path(id): Path<u64>) -> Result<StatusCode, StatusCode> {
    shop.db.set_price(id).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    Ok(StatusCode::NO_CONTENT)
}

/// An import has changed prices behind the service's back.
async fn imported(State(shop): State<Shop>) -> Result<StatusCode, StatusCode> {
    let invalidation = shop.guard.invalidation().path("/product/7"); // needs `HttpPolicy::authority`
    let invalidation = invalidation.tag("products"); // every response under the policy with this tag
    invalidation.send().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(StatusCode::NO_CONTENT)
}

fn app(db: Database) -> Result<Router, stampede_guard::Error> {
    let http = HttpPolicy::default().authority("shop.example");
    let policy = Policy::builder().http(http).tags(["products"]).build()?;
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let shop = Shop { guard: guard.clone(), db };
    Ok(Router::new()
        .route("/product/{id}", get(product).put(update)) // PUT through the layer: invalidates the GET's response
        .layer(guard)
        .route("/admin/imported", post(imported)) // added after the layer: not guarded, calls the guard itself
        .with_state(shop))
}

#[tokio::test(start_paused = true)]
async fn over_http() -> Result<(), Box<dyn Error>> {
    let db = Database::default();
    let app = app(db.clone())?;
    for _ in 0..2 {
        assert_eq!(requests::get(&app, "/product/7").await.text(), "price 0");
    }
    let put = send(&app, "PUT", "/product/7", &[("authorization", "Bearer 7f3a")]).await;
    assert_eq!((put.status, put.remark()), (204, "fwd=method"));
    assert_eq!(requests::get(&app, "/product/7").await.text(), "price 1");

    db.set_price(7).await?;
    assert_eq!(requests::get(&app, "/product/7").await.text(), "price 1", "the guard can not know");
    assert_eq!(send(&app, "POST", "/admin/imported", &[]).await.status, 204);
    assert_eq!(requests::get(&app, "/product/7").await.text(), "price 2");
    requests::get(&app, "/product/8").await;
    assert_eq!(send(&app, "POST", "/admin/imported", &[]).await.status, 204);
    assert!(!requests::get(&app, "/product/8").await.is_hit(), "by the tag");
    Ok(())
}

/// Creates an article. No response names its URI, so the tag reaches the list, the searches and an earlier 404.
async fn publish(State(shop): State<Shop>) -> Result<StatusCode, StatusCode> {
    shop.guard.invalidate_tag("articles").await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(StatusCode::ACCEPTED)
}

/// Creates the article `x`, and names its URI.
async fn create() -> (StatusCode, [(&'static str, &'static str); 1]) {
    (StatusCode::CREATED, [("location", "/articles/x")])
}

#[tokio::test(start_paused = true)]
async fn a_creation_invalidates_its_uri_and_location_and_a_tag_the_rest() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().tags(["articles"]).build()?;
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let shop = Shop { guard: guard.clone(), db: Database::default() };
    let app = Router::new()
        .route("/articles", get(|| async { "a list" }).post(create))
        .route("/articles/{id}", get(|| async { StatusCode::NOT_FOUND }))
        .route("/search", get(|| async { "matches" }))
        .route("/publish", post(publish))
        .layer(guard)
        .with_state(shop);
    let all = ["/articles", "/articles/x", "/articles/y", "/search?q=x"];
    for (path, status, invalidated) in [("/articles", 201, &all[..2]), ("/publish", 202, &all[..])] {
        for path in all {
            requests::get(&app, path).await;
            assert!(requests::get(&app, path).await.is_hit(), "{path}");
        }
        assert_eq!(send(&app, "POST", path, &[]).await.status, status);
        for path in all {
            assert_eq!(!requests::get(&app, path).await.is_hit(), invalidated.contains(&path), "{path}");
        }
    }
    Ok(())
}

async fn forget(guard: StampedeGuard) -> Result<(), Box<dyn Error>> {
    let request = Request::get("/report/7").header("host", "shop.example").body(())?; // as clients send it
    if let Some(key) = guard.http_key(&request) {
        guard.invalidate(key).await?; // all its variants, in the whole fleet, also against loads in progress
    }
    Ok(())
}

#[tokio::test]
async fn by_the_key_of_a_request() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::in_memory();
    let app = Router::new().route("/report/{id}", get(|| async { "all is well" })).layer(guard.clone());
    requests::get(&app, "/report/7").await;
    assert!(requests::get(&app, "/report/7").await.is_hit());
    forget(guard).await?;
    assert!(!requests::get(&app, "/report/7").await.is_hit());
    Ok(())
}

#[expect(dead_code, reason = "needs a server with a replica")]
fn confirmed_by_a_replica() -> Result<StampedeGuard, Box<dyn Error>> {
    let policy = Policy::builder()
        .invalidate_replicas(1, Duration::from_millis(200)) // an error if no replica has it by then
        .build()?;
    let redis = redis::Client::open("redis://127.0.0.1/")?;
    Ok(StampedeGuard::builder(redis).namespace("shop").policy(policy).build()?)
}

/// Two processes with copies on one store: the second one of them, and both guards.
async fn two_with_copies() -> Result<(Replica, [StampedeGuard; 2]), Box<dyn Error>> {
    let chaos = ChaosStore::new(7);
    let (here, there) = (chaos.replica(), chaos.replica());
    let policy = Policy::builder().local_for(Duration::MAX).build()?;
    let guards = [&here, &there].map(|store| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    for guard in &guards {
        guard.connect().await?;
        for _ in 0..3 {
            guard.get_or_load("price", || async { Ok::<_, std::io::Error>(499_u64) }).await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    Ok((there, guards))
}

#[tokio::test(start_paused = true)]
async fn a_writer_waits_no_longer_than_the_page_says() -> Result<(), Box<dyn Error>> {
    let millis = Duration::from_millis;
    // A process with copies is paused: its term is waited for, once.
    let (there, [guard, _other]) = two_with_copies().await?;
    there.stop();
    let began = Instant::now();
    guard.invalidate("price").await?;
    assert!((millis(500)..=millis(2_100)).contains(&began.elapsed()), "{:?}", began.elapsed());
    let began = Instant::now();
    guard.invalidate("price").await?;
    assert!(began.elapsed() < millis(100), "{:?}", began.elapsed());

    // The store does not answer.
    let replica = ChaosStore::new(7).replica();
    let guard = StampedeGuard::new(replica.clone());
    guard.insert("price", &499_u64).await?;
    replica.cut();
    let began = Instant::now();
    guard.invalidate("price").await.expect_err("not confirmed");
    assert!(began.elapsed() <= millis(2_100), "{:?}", began.elapsed());
    let began = Instant::now();
    guard.insert("offer", &499_u64).await.expect_err("not confirmed");
    assert!(began.elapsed() <= millis(2_100), "{:?}", began.elapsed());
    assert_eq!(guard.stats().kept_invalidations, 1, "an insert is not sent again");
    let ended = tokio::time::timeout(millis(200), guard.invalidate("other")).await;
    assert!(ended.is_err() && guard.stats().kept_invalidations == 2, "the deadline of the caller");

    // Through the layer.
    let app = Router::new().route("/", get(|| async { "a page" }).put(|| async { "changed" })).layer(guard);
    let began = Instant::now();
    assert_eq!(send(&app, "PUT", "/", &[]).await.status, 200);
    assert!(began.elapsed() <= millis(110), "{:?}", began.elapsed());
    Ok(())
}
