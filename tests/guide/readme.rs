//! `README.md`.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::middleware::{Next, from_fn};
use axum::{Json, Router, routing::get};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use stampede_guard::lock::LockError;
use stampede_guard::{Policy, StampedeGuard};
use tower::{ServiceBuilder, ServiceExt as _};
use tower_http::trace::TraceLayer;

async fn report(Path(id): Path<u64>) -> String {
    format!("report {id}")
}

/// Stands for a layer that takes the client's token off the request.
async fn authenticate(mut request: Request<Body>, next: Next) -> Response<Body> {
    request.headers_mut().remove("authorization");
    next.run(request).await
}

fn app(redis: redis::Client) -> Router {
    let app = Router::new()
        .route("/report/{id}", get(report))
        .layer(from_fn(authenticate)) // inside: requests with credentials always come here
        .layer(StampedeGuard::new(redis)) // the one line
        .layer(TraceLayer::new_for_http()) // outside: runs for hits, too
        .route("/health", get(|| async { "up" })); // added after the guard: not cached
    app
}

fn guard() -> Result<StampedeGuard, Box<dyn Error>> {
    let redis = redis::Client::open("redis://127.0.0.1/")?; // connects at the first request; Redis may be down
    let policy =
        Policy::builder().fresh_for(Duration::from_secs(30)).stale_while_revalidate(Duration::from_secs(60));
    let guard = StampedeGuard::builder(redis)
        .namespace("shop") // one per service: two services with one namespace read each other's values
        .policy(policy.build()?)
        .build()?; // other routes: guard.with_policy(guard.policy().to_builder().fresh_for(..).build()?)
    Ok(guard)
}

#[tokio::test]
async fn a_guard_is_made_without_a_server() {
    assert!(guard().is_ok());
}

#[tokio::test]
async fn the_layer_is_one_line() -> Result<(), Box<dyn Error>> {
    // No server is there: requests are answered all the same.
    let app = app(redis::Client::open("redis://127.0.0.1:1/")?);
    let response = app.oneshot(Request::get("/report/7").body(Body::empty())?).await?;
    assert_eq!(response.into_body().collect().await?.to_bytes(), "report 7");
    Ok(())
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct User {
    name: String,
}

#[derive(Clone, Default)]
struct Db {
    users: Arc<Mutex<HashMap<u64, User>>>,
}

impl Db {
    async fn find_user(&self, id: u64) -> Result<Option<User>, std::io::Error> {
        Ok(self.users.lock().expect("no panic").get(&id).cloned())
    }

    async fn rename(&self, id: u64, name: String) -> Result<(), std::io::Error> {
        self.users.lock().expect("no panic").insert(id, User { name });
        Ok(())
    }
}

#[derive(Clone)]
struct Shop {
    guard: StampedeGuard,
    db: Db,
}

impl Shop {
    fn new() -> Self {
        Self { guard: StampedeGuard::in_memory(), db: Db::default() }
    }

    async fn rebuild_index(&self) {}
}

async fn user(State(shop): State<Shop>, Path(id): Path<u64>) -> Result<Json<User>, StatusCode> {
    let db = shop.db.clone(); // the load may outlive this request, so it owns what it uses
    let user = shop.guard.get_or_load(("user", id), move || async move { db.find_user(id).await });
    match user.await {
        Ok(Some(user)) => Ok(Json(user)),
        Ok(None) => Err(StatusCode::NOT_FOUND), // "there is none" is a value too: it is cached
        Err(_) => Err(StatusCode::BAD_GATEWAY), // the load failed, and all its waiters received the error
    }
}

async fn rename(State(shop): State<Shop>, Path(id): Path<u64>, name: String) -> Result<(), StatusCode> {
    shop.db.rename(id, name).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    // Wins over loads in progress, in every process: a caller that asks after this gets the new name.
    shop.guard.invalidate(("user", id)).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
}

async fn rebuild(State(shop): State<Shop>) -> Result<StatusCode, StatusCode> {
    let down = |_| StatusCode::SERVICE_UNAVAILABLE;
    let index = shop.guard.locks().mutex("search-index").auto_renew(true).build().map_err(down)?;
    let Some(mut held) = index.try_lock().await.map_err(down)? else {
        return Ok(StatusCode::CONFLICT); // another process rebuilds it
    };
    shop.rebuild_index().await;
    let was_held = held.unlock().await.map_err(down)?; // false: the mutex was lost meanwhile
    Ok(if was_held { StatusCode::OK } else { StatusCode::CONFLICT })
}

#[tokio::test]
async fn a_loader_caches_what_is_missing_too_and_an_invalidation_ends_that() {
    let shop = Shop::new();
    let ask = || user(State(shop.clone()), Path(7));
    assert_eq!(ask().await.err(), Some(StatusCode::NOT_FOUND));
    shop.db.users.lock().expect("no panic").insert(7, User { name: "Ada".into() });
    assert_eq!(ask().await.err(), Some(StatusCode::NOT_FOUND), "cached");
    rename(State(shop.clone()), Path(7), "Grace".into()).await.expect("renamed");
    assert_eq!(ask().await.expect("found").0.name, "Grace");
    let stats = shop.guard.stats();
    assert_eq!((stats.loads, stats.hits), (2, 1));
}

#[tokio::test]
async fn a_lock_has_one_holder() -> Result<(), LockError> {
    let shop = Shop::new();
    assert_eq!(rebuild(State(shop.clone())).await, Ok(StatusCode::OK));
    let held = shop.guard.locks().mutex("search-index").build()?.try_lock().await?;
    assert_eq!(rebuild(State(shop)).await, Ok(StatusCode::CONFLICT));
    drop(held);
    Ok(())
}

#[tokio::test]
async fn a_rest_client_shares_answers() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::in_memory();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/price", listener.local_addr()?);
    let api = Router::new().route("/price", get(|| async { "42 coins" }));
    tokio::spawn(async move { axum::serve(listener, api).await });

    // hyper's client, as any Tower service; reqwest takes three lines more.
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let client = ServiceBuilder::new().layer(guard.clone()).service(client);

    let price = client.clone().oneshot(Request::get(&url).body(Empty::new())?).await?;
    assert_eq!(price.status(), StatusCode::OK);
    let price = client.oneshot(Request::get(&url).body(Empty::new())?).await?;
    assert_eq!(price.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes(), "42 coins");
    assert_eq!(guard.stats().hits, 1);
    Ok(())
}
