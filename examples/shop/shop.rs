//! A shop: three replicas, one database, and pages that say which articles they show, so that each change invalidates exactly the pages
//! that show what was changed.
//!
//! ```text
//! cargo run --features axum --example shop
//! REDIS_URL=redis://127.0.0.1/ cargo run --features axum --example shop
//! ```
//!
//! Without `REDIS_URL` the replicas share a store in memory. Then, from another terminal (two replicas, and the pages without the guard):
//!
//! ```text
//! curl -i http://127.0.0.1:8080/category/office
//! curl -i -X PUT -d 'price=1290&stock=3' http://127.0.0.1:8081/article/3
//! curl -i -X POST -d 'title=glass+lamp&category=office&price=4990&stock=1' http://127.0.0.1:8080/article
//! curl -i -X DELETE http://127.0.0.1:8082/article/3
//! curl -i -X POST http://127.0.0.1:8080/template
//! curl -i http://127.0.0.1:8083/search?word=lamp
//! ```
//!
//! With `RUN_ONCE=1` the shop sends itself a few requests and ends. `BUDGET_MS` and `LEASE_MS` are as in the example `axum_server`.

mod database;
mod pages;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use database::{Database, Error};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use pages::{Shop, changes, pages};
use stampede_guard::http::HttpPolicy;
use stampede_guard::{Backend, MemoryStore, Policy, StampedeGuard};
use support::{exit, unusable};
use tokio::net::TcpListener;

const REPLICAS: u16 = 3;

#[tokio::main]
async fn main() -> ExitCode {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    exit(run().await)
}

async fn run() -> Result<(), Error> {
    let once = std::env::var_os("RUN_ONCE").is_some();
    let port = match std::env::var("PORT") {
        Ok(port) => port.parse()?,
        Err(_) if once => 0,
        Err(_) => 8080,
    };
    let folder = Folder::create()?;
    let file = folder.0.join("shop.db");
    Database::open(&file)?.fill().await?;

    let memory = MemoryStore::new();
    // Articles are numbered anew in each run, so it has its own namespace; a real service has a fixed one.
    let namespace = format!("shop-{:08x}", fastrand::u32(..));
    let mut urls = Vec::new();
    for number in 0..REPLICAS {
        let guard = StampedeGuard::builder(backend(&memory)?).namespace(&*namespace);
        let guard = guard.policy(policy()?).build()?;
        guard.connect().await.map_err(|error| unusable(&error, "a store in memory"))?;
        let shop = Shop { database: Database::open(&file)?, guard };
        urls.push(serve(port, number, replica(shop)).await?);
        println!("replica {number}: {}", urls[usize::from(number)]);
    }
    let shop = Shop { database: Database::open(&file)?, guard: StampedeGuard::in_memory() };
    println!("without the guard: {}", serve(port, REPLICAS, pages().with_state(shop)).await?);

    if once { visit(&urls).await } else { Ok(tokio::signal::ctrl_c().await?) }
}

fn policy() -> Result<Policy, Error> {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(600))
        // A page in this window, by its age or by a new template, is served and made anew. An invalidated page is gone.
        .stale_while_revalidate(Duration::from_secs(600))
        .local_for(Duration::MAX)
        .tags(["template"])
        .coordination_budget(millis("BUDGET_MS", 100))
        .lease(millis("LEASE_MS", 2_000))
        // All replicas have one host, whatever their ports are.
        .http(HttpPolicy::default().authority("shop.example"));
    Ok(policy.build()?)
}

fn replica(shop: Shop) -> Router {
    pages().layer(shop.guard.clone()).merge(changes()).with_state(shop)
}

/// Starts the server of this number, each on a port of its own from the first one on; 0 is any free one. Returns its URL.
async fn serve(first: u16, number: u16, app: Router) -> Result<String, Error> {
    let port = if first == 0 { 0 } else { first + number };
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(url)
}

/// Redis, or the memory that all replicas share.
fn backend(memory: &MemoryStore) -> Result<Backend, Error> {
    Ok(match std::env::var("REDIS_URL") {
        Ok(url) => redis::Client::open(url)?.into(),
        Err(_) => memory.clone().into(),
    })
}

/// A time in milliseconds from the environment.
fn millis(name: &str, otherwise: u64) -> Duration {
    let configured = std::env::var(name).ok().and_then(|text| text.parse().ok());
    Duration::from_millis(configured.unwrap_or(otherwise))
}

/// Makes two changes, and shows which pages each of them invalidates.
async fn visit(urls: &[String]) -> Result<(), Error> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let send = async |method: &str, replica: usize, path: &str, form: &'static str| {
        let request = Request::builder().method(method).uri(format!("{}{path}", urls[replica]));
        let request = request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        let response = client.request(request.body(Body::from(form))?).await?;
        let status = response.headers().get(header::CACHE_STATUS).and_then(|value| value.to_str().ok());
        println!("  {method} {path}: {} {}", response.status(), status.unwrap_or_default());
        Ok::<_, Error>(())
    };
    let visit_all = async |replica| {
        for page in ["/", "/category/kitchen", "/category/office", "/search?word=oak", "/article/3"] {
            send("GET", replica, page, "").await?;
        }
        Ok::<_, Error>(())
    };
    println!("\nReplica 0, at first:");
    visit_all(0).await?;
    println!("\nReplica 1 changes a price; replica 2 then:");
    send("PUT", 1, "/article/3", "price=1290&stock=3").await?;
    visit_all(2).await?;
    println!("\nReplica 2 adds an article; replica 1 then:");
    send("POST", 2, "/article", "title=glass+lamp&category=office&price=4990&stock=1").await?;
    visit_all(1).await
}

/// The folder of the database. It is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn create() -> std::io::Result<Self> {
        let folder = std::env::temp_dir().join(format!("stampede-guard-shop-{:016x}", fastrand::u64(..)));
        std::fs::create_dir(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
