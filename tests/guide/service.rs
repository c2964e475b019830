//! The code of `docs/service.md`: its blocks, in their order, are the `src/main.rs` of the page.
#![expect(dead_code, reason = "`main` is the program of the page; the tests ask its parts")]

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Display;
use std::future::IntoFuture as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::{HeaderName, StatusCode};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use serde::{Deserialize, Serialize};
use stampede_guard::http::HttpPolicy;
use stampede_guard::lock::Locks;
use stampede_guard::{Policy, StampedeGuard};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, oneshot};
use tower_http::compression::CompressionLayer;
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Product {
    id: u64,
    name: String,
    cents: u64,
}

/// A database whose queries take 300 ms. Product 13 can not be read.
#[derive(Clone)]
struct Db {
    rows: Arc<Mutex<HashMap<u64, Product>>>,
    queries: Arc<AtomicU64>,
}

impl Db {
    fn filled() -> Self {
        let rows = (1..=20).map(|id| (id, Product { id, name: format!("product {id}"), cents: 100 * id }));
        Self { rows: Arc::new(Mutex::new(rows.collect())), queries: Arc::default() }
    }

    async fn query(&self, what: &str) {
        println!("query: {what}");
        self.queries.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }

    async fn product(&self, id: u64) -> Result<Option<Product>, io::Error> {
        self.query(&format!("product {id}")).await;
        if id == 13 {
            return Err(io::Error::other("the row can not be read"));
        }
        Ok(self.rows.lock().await.get(&id).cloned())
    }

    async fn save(&self, product: Product) -> Result<(), io::Error> {
        self.rows.lock().await.insert(product.id, product);
        Ok(())
    }

    async fn total(&self) -> Result<u64, io::Error> {
        self.query("total").await;
        Ok(self.rows.lock().await.values().map(|product| product.cents).sum())
    }
}

/// The rates' API, behind the guard.
#[derive(Clone)]
struct Rates {
    client: ClientWithMiddleware,
    api: String,
}

impl Rates {
    /// The guard's policy has no `HttpPolicy::authority`: it would give `/rates/USD` of all APIs one key.
    fn new(guard: &StampedeGuard, api: String) -> Result<Self, stampede_guard::Error> {
        let reqwest = reqwest::Client::new();
        let client = ClientBuilder::new(reqwest.clone()).with(guard.reqwest(reqwest)?).build();
        Ok(Self { client, api })
    }

    async fn rate(&self, currency: &str) -> Result<String, reqwest_middleware::Error> {
        let response = self.client.get(format!("{}/rates/{currency}", self.api)).send().await?;
        Ok(response.error_for_status()?.text().await?)
    }
}

#[derive(Clone)]
struct Shop {
    db: Db,
    guard: StampedeGuard,
    locks: Locks,
    rates: Rates,
}

/// From the cache; loaded once in the fleet. `None` is stored, too, for `negative_for`.
async fn product(State(shop): State<Shop>, Path(id): Path<u64>) -> Response {
    let db = shop.db.clone(); // the load owns what it uses: it may outlive this request
    match shop.guard.get_or_load(("product", id), move || async move { db.product(id).await }).await {
        Ok(Some(product)) => Json(product).into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(error) => bad_gateway(error).into_response(),
    }
}

/// First the database, then the cache.
async fn change(
    State(shop): State<Shop>,
    Path(id): Path<u64>,
    Json(product): Json<Product>,
) -> Result<StatusCode, StatusCode> {
    if product.id != id {
        return Err(StatusCode::BAD_REQUEST);
    }
    shop.db.save(product).await.map_err(bad_gateway)?;
    // An error: the product is saved, and the old one may be served. The client sends the request again.
    shop.guard.invalidate(("product", id)).await.map_err(unavailable)?;
    Ok(StatusCode::NO_CONTENT)
}

/// A slow page. It states no lifetime, so the layer's policy decides.
async fn report(State(shop): State<Shop>) -> Result<String, StatusCode> {
    let total = shop.db.total().await.map_err(bad_gateway)?;
    Ok(format!("all products: {total} cents\n"))
}

async fn rate(State(shop): State<Shop>, Path(currency): Path<String>) -> Result<String, StatusCode> {
    if !currency.bytes().all(|letter| letter.is_ascii_uppercase()) {
        return Err(StatusCode::NOT_FOUND); // only letters become part of the API's URL
    }
    shop.rates.rate(&currency).await.map_err(bad_gateway)
}

/// Work that one process does at a time.
async fn import(State(shop): State<Shop>) -> Result<StatusCode, StatusCode> {
    let mutex = shop.locks.mutex("import").ttl(Duration::from_secs(10)).auto_renew(true);
    let mutex = mutex.build().map_err(unavailable)?;
    let Some(mut held) = mutex.try_lock().await.map_err(unavailable)? else {
        return Ok(StatusCode::CONFLICT); // it runs already, here or in another process
    };
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs(2)) => {} // the work
        () = held.lost() => return Err(StatusCode::SERVICE_UNAVAILABLE), // another process may run it by now
    }
    let was_held = held.unlock().await.map_err(unavailable)?;
    Ok(if was_held { StatusCode::NO_CONTENT } else { StatusCode::SERVICE_UNAVAILABLE })
}

/// The guard's view of Redis. It sends no command.
async fn health(State(shop): State<Shop>) -> String {
    format!("{}\n", shop.guard.health())
}

fn bad_gateway(error: impl Display) -> StatusCode {
    eprintln!("{error}");
    StatusCode::BAD_GATEWAY
}

fn unavailable(error: impl Display) -> StatusCode {
    eprintln!("{error}");
    StatusCode::SERVICE_UNAVAILABLE
}

/// The service. The guard is a parameter: on Redis in `main`, in memory in tests.
fn app(db: Db, guard: StampedeGuard, rates_api: String) -> Result<Router, Box<dyn Error>> {
    let policy = guard
        .policy()
        .to_builder()
        .fresh_for(Duration::from_secs(30))
        .stale_while_revalidate(Duration::from_secs(60))
        .http(HttpPolicy::default().authority("shop.example")) // one key for all names and ports
        .build()?;
    let pages = guard.with_policy(policy); // the same guard and connections, with another policy
    let shop = Shop { db, locks: guard.locks(), rates: Rates::new(&guard, rates_api)?, guard };

    let id = HeaderName::from_static("x-request-id");
    Ok(Router::new()
        .route("/report", get(report))
        // Here: layers that read credentials or set cookies. They are inside the guard.
        .layer(pages)
        // Added after the guard's layer, so it does not store their responses.
        .route("/products/{id}", get(product).put(change))
        .route("/rates/{currency}", get(rate))
        .route("/import", post(import))
        .route("/health", get(health))
        // Outside the guard: these run for hits, too. The last one is the outermost.
        .layer(CompressionLayer::new())
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(10)))
        .layer(PropagateRequestIdLayer::new(id.clone()))
        .layer(TraceLayer::new_for_http())
        .layer(SetRequestIdLayer::new(id, MakeRequestUuid))
        .with_state(shop))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(io::stderr).init(); // prints the guard's warnings
    let redis = redis::Client::open(setting("REDIS_URL", "redis://127.0.0.1/"))?;
    let policy = Policy::builder().negative_for(Duration::from_secs(5)).build()?;
    let guard = StampedeGuard::builder(redis).namespace("shop").policy(policy).build()?;
    if let Err(error) = guard.connect().await {
        eprintln!("{error}; requests are answered all the same");
    }
    let app = app(Db::filled(), guard.clone(), setting("RATES_API", "http://127.0.0.1:9000"))?;
    let listener = TcpListener::bind(("127.0.0.1", setting("PORT", "8080").parse()?)).await?;

    let mut terminated = signal(SignalKind::terminate())?;
    let (stopping, stopped) = oneshot::channel();
    let stop = async move {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        let _ = stopping.send(());
    };
    let requests = axum::serve(listener, app).with_graceful_shutdown(stop).into_future();
    let too_late = async {
        let _ = stopped.await;
        tokio::time::sleep(Duration::from_secs(12)).await; // more than the `TimeoutLayer`'s 10 s
    };
    tokio::select! {
        served = requests => served?, // all requests are answered
        () = too_late => {}           // a client still reads its response
    }
    let ended = guard.shutdown(Duration::from_secs(5)).await; // handlers use the guard: after them
    println!("{ended:?}");
    Ok(())
}

fn setting(name: &str, otherwise: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| otherwise.to_owned())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::{Request, header};
    use http_body_util::BodyExt as _; // `collect`
    use stampede_guard::MemoryStore;
    use stampede_guard::testing::ChaosStore;
    use tower::ServiceExt as _; // `oneshot`

    use super::*;

    /// Sends one request; returns status, `Cache-Status` and body.
    async fn ask(
        app: &Router,
        method: &str,
        path: &str,
        body: &'static str,
    ) -> Result<(StatusCode, String, String), Box<dyn Error>> {
        let request = Request::builder().method(method).uri(path).header(header::HOST, "shop.example");
        let request = request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body))?;
        let response = app.clone().oneshot(request).await?;
        let status = response.status();
        let cache_status = response.headers().get(header::CACHE_STATUS).map(|value| value.to_str());
        let cache_status = cache_status.transpose()?.unwrap_or_default().to_owned();
        let text = response.into_body().collect().await?.to_bytes();
        Ok((status, cache_status, String::from_utf8(text.to_vec())?))
    }

    const CHANGED: &str = r#"{ "id": 7, "name": "tea", "cents": 499 }"#;

    #[tokio::test(start_paused = true)]
    async fn two_replicas_share_loads() -> Result<(), Box<dyn Error>> {
        let (db, store) = (Db::filled(), MemoryStore::new()); // the store stands for Redis
        let replica =
            || app(db.clone(), StampedeGuard::new(store.clone()), "http://rates.invalid".to_owned());
        let (one, two) = (replica()?, replica()?);

        let both = tokio::join!(ask(&one, "GET", "/products/7", ""), ask(&two, "GET", "/products/7", ""));
        assert_eq!((both.0?.0, both.1?.0), (StatusCode::OK, StatusCode::OK));
        assert_eq!(ask(&one, "GET", "/products/99", "").await?.0, StatusCode::NOT_FOUND);
        assert_eq!(ask(&two, "GET", "/products/99", "").await?.0, StatusCode::NOT_FOUND); // stored
        assert_eq!(db.queries.load(Ordering::SeqCst), 2);
        assert_eq!(ask(&one, "GET", "/products/13", "").await?.0, StatusCode::BAD_GATEWAY); // not stored

        assert_eq!(ask(&one, "PUT", "/products/7", CHANGED).await?.0, StatusCode::NO_CONTENT);
        assert!(ask(&two, "GET", "/products/7", "").await?.2.contains("tea"));

        let (_, _, before) = ask(&one, "GET", "/report", "").await?;
        ask(&one, "PUT", "/products/7", r#"{ "id": 7, "name": "tea", "cents": 599 }"#).await?;
        tokio::time::sleep(Duration::from_secs(31)).await; // takes no time: the clock is paused
        let (_, cache_status, text) = ask(&two, "GET", "/report", "").await?;
        assert!(cache_status.starts_with("stampede-guard; hit; ttl=-"), "{cache_status}"); // stale
        assert_eq!(text, before);
        tokio::time::sleep(Duration::from_secs(1)).await; // the load in the background
        assert_ne!(ask(&two, "GET", "/report", "").await?.2, before);
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_without_its_store_answers() -> Result<(), Box<dyn Error>> {
        let (db, chaos) = (Db::filled(), ChaosStore::new(42));
        let replica = chaos.replica();
        let guard = StampedeGuard::new(replica.clone());
        let app = app(db.clone(), guard.clone(), "http://rates.invalid".to_owned())?;

        replica.cut(); // from now on no command has an answer
        assert_eq!(ask(&app, "GET", "/products/7", "").await?.0, StatusCode::OK);
        assert_eq!(guard.stats().fail_open_loads, 1);
        let (status, cache_status, _) = ask(&app, "GET", "/report", "").await?;
        assert_eq!(status, StatusCode::OK);
        assert!(cache_status.contains("uncoordinated"), "{cache_status}");
        let (status, _, _) = ask(&app, "PUT", "/products/7", CHANGED).await?;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE); // saved, and not invalidated

        replica.resume();
        assert_eq!(ask(&app, "PUT", "/products/7", CHANGED).await?.0, StatusCode::NO_CONTENT);
        assert!(ask(&app, "GET", "/products/7", "").await?.2.contains("tea"));
        Ok(())
    }
}

/// What the page says and does not show.
mod statements {
    use super::*;
    use crate::requests;

    /// An API whose `/rates/{currency}` answers with its name. It counts its requests.
    async fn api(name: &'static str) -> Result<(String, Arc<AtomicU64>), io::Error> {
        let requests = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&requests);
        let rate = move |Path(currency): Path<String>| {
            counter.fetch_add(1, Ordering::SeqCst);
            async move {
                let known = currency != "XXX";
                known.then(|| format!("{currency} of {name}")).ok_or(StatusCode::INTERNAL_SERVER_ERROR)
            }
        };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let app = Router::new().route("/rates/{currency}", get(rate));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok((url, requests))
    }

    #[tokio::test]
    async fn a_rate_is_requested_once() -> Result<(), Box<dyn Error>> {
        let (url, requests) = api("one").await?;
        let app = app(Db::filled(), StampedeGuard::in_memory(), url)?;
        for _ in 0..2 {
            let seen = requests::get(&app, "/rates/USD").await;
            assert_eq!((seen.status, seen.text()), (200, "USD of one"));
        }
        assert_eq!(requests.load(Ordering::SeqCst), 1);
        assert_eq!(requests::get(&app, "/rates/XXX").await.status, 502);
        assert_eq!(requests::get(&app, "/rates/..%2Fadmin").await.status, 404);
        assert_eq!(requests.load(Ordering::SeqCst), 2);
        Ok(())
    }

    #[tokio::test]
    async fn an_api_that_can_not_be_reached_is_a_502() -> Result<(), Box<dyn Error>> {
        let app = app(Db::filled(), StampedeGuard::in_memory(), "http://127.0.0.1:1".to_owned())?;
        let both = tokio::join!(requests::get(&app, "/rates/USD"), requests::get(&app, "/rates/USD"));
        assert_eq!((both.0.status, both.1.status), (502, 502));
        Ok(())
    }

    #[tokio::test]
    async fn an_authority_gives_one_api_the_answers_of_another() -> Result<(), Box<dyn Error + Send + Sync>> {
        let ((one, _), (two, requests)) = (api("one").await?, api("two").await?);
        let named = HttpPolicy::default().authority("shop.example");
        for (http, second) in [(HttpPolicy::default(), "USD of two"), (named, "USD of one")] {
            let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);
            let one = Rates::new(&guard, one.clone())?;
            let two = Rates::new(&guard, two.clone())?;
            assert_eq!(one.rate("USD").await?, "USD of one");
            assert_eq!(two.rate("USD").await?, second);
        }
        assert_eq!(requests.load(Ordering::SeqCst), 1);
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn one_import_runs() -> Result<(), Box<dyn Error>> {
        let app = app(Db::filled(), StampedeGuard::in_memory(), "http://rates.invalid".to_owned())?;
        let import = || requests::send(&app, "POST", "/import", &[]);
        let (one, two) = tokio::join!(import(), import());
        assert_eq!((one.status, two.status), (204, 409));
        assert_eq!(import().await.status, 204);
        Ok(())
    }

    #[tokio::test]
    async fn a_page_is_invalidated_by_the_guard_with_the_authority() -> Result<(), Box<dyn Error>> {
        let guard = StampedeGuard::in_memory();
        let app = app(Db::filled(), guard.clone(), "http://rates.invalid".to_owned())?;
        requests::get(&app, "/report").await;
        assert!(guard.invalidate_path("/report").await.is_err());
        let http = HttpPolicy::default().authority("shop.example");
        let pages = guard.with_policy(guard.policy().to_builder().http(http).build()?);
        pages.invalidate_path("/report").await?;
        assert!(!requests::get(&app, "/report").await.is_hit());
        assert!(requests::get(&app, "/report").await.is_hit());
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_before_the_end_of_the_requests_takes_their_locks() -> Result<(), Box<dyn Error>> {
        for (delay, status) in [(500, 503), (2_500, 204)] {
            let guard = StampedeGuard::in_memory();
            let app = app(Db::filled(), guard.clone(), "http://rates.invalid".to_owned())?;
            let ending = async {
                tokio::time::sleep(Duration::from_millis(delay)).await;
                guard.shutdown(Duration::from_secs(5)).await
            };
            let (import, ended) = tokio::join!(requests::send(&app, "POST", "/import", &[]), ending);
            assert_eq!((import.status, ended.finished), (status, true));
        }
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_report_is_stored_and_each_response_has_an_id() -> Result<(), Box<dyn Error>> {
        let app = app(Db::filled(), StampedeGuard::in_memory(), "http://rates.invalid".to_owned())?;
        let [one, two] = [requests::get(&app, "/report").await, requests::get(&app, "/report").await];
        assert!(two.is_hit(), "{}", two.remark());
        assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
        // Under another name it is the same page.
        assert!(requests::send(&app, "GET", "/report", &[("host", "127.0.0.1:8081")]).await.is_hit());
        for path in ["/products/1", "/health"] {
            assert_eq!(requests::get(&app, path).await.header("cache-status"), "");
        }
        // Beyond both windows the client waits.
        tokio::time::sleep(Duration::from_secs(91)).await;
        assert_eq!(requests::get(&app, "/report").await.remark().split(';').next(), Some("fwd=uri-miss"));
        Ok(())
    }
}

/// The table of names: each is in the module that the page says.
#[expect(unused_imports, reason = "their paths are the test")]
mod names {
    use stampede_guard::health::{Breaker, Health, LinkState, Report, Severity, Topology};
    use stampede_guard::http::reqwest::{GuardMiddleware, ReqwestService};
    use stampede_guard::http::{
        CacheTerms, Decision, DoNotStore, GuardedBody, HttpPolicy, cache_key, explain,
    };
    use stampede_guard::lock::{LockError, Locks, Mutex, Scope, Semaphore, Wait, Waiting};
    use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin};
    use stampede_guard::{Backend, CacheKey, MemoryStore, StampedeGuard};
    use stampede_guard::{Codec, OnOverload, OnStoreDown, OnWaitTimeout, Policy, PolicyBuilder};
    use stampede_guard::{Error, ErrorKind, LoadContext, LoadError, Shutdown, Stats};
}
