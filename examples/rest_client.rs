//! Memoizing a REST client: the HTTP layer on the client's side. Then `memoize` for a service that is not HTTP.
//!
//! `cargo run --example rest_client`. With `REDIS_URL` several processes ask the API once, together; run it twice
//! within ten seconds to see the second run answered from the store (the in-memory store ends with the process).

use std::error::Error;
use std::time::{Duration, Instant};

use axum::extract::Path;
use axum::http::{Request, header};
use axum::{Router, routing::get};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use stampede_guard::{CacheKey, StampedeGuard};
use tokio::net::TcpListener;
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let guard = match std::env::var("REDIS_URL") {
        Ok(url) => StampedeGuard::new(redis::Client::open(url)?),
        Err(_) => StampedeGuard::in_memory(),
    };
    let api = start_api().await?;

    // hyper's client is a tower service, so the guard wraps it like a server's router.
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let client = ServiceBuilder::new().layer(guard.clone()).service(client);
    let ask = async |path: &str, authorization: Option<&str>| {
        let mut request = Request::get(format!("{api}{path}"));
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let sent = Instant::now();
        let response = client.clone().oneshot(request.body(Empty::new())?).await?;
        let status = response.headers().get(header::CACHE_STATUS).cloned();
        let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        println!("{:>6} ms  {path}  {body:?}  {status:?}", sent.elapsed().as_millis());
        Ok::<_, Box<dyn Error>>(())
    };
    println!("a REST API that takes 200 ms:");
    let (one, two) = tokio::join!(ask("/price/ant", None), ask("/price/ant", None));
    one.and(two)?;
    ask("/price/ant", None).await?;
    ask("/price/bee", None).await?;
    println!("with credentials nothing is shared:");
    ask("/price/ant", Some("Bearer 1234")).await?;

    println!("any other tower service, keyed by a function:");
    let square = service_fn(|n: u64| async move {
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok::<u64, std::io::Error>(n * n)
    });
    let key = |n: &u64| CacheKey::from(("square", n));
    let square = ServiceBuilder::new().layer(guard.memoize(key)).service(square);
    for n in [12, 12, 13] {
        let sent = Instant::now();
        let result = square.clone().oneshot(n).await?;
        println!("{:>6} ms  {n} squared is {result}", sent.elapsed().as_millis());
    }
    Ok(())
}

/// Starts the API and returns its URL.
async fn start_api() -> Result<String, std::io::Error> {
    let price = |Path(name): Path<String>| async move {
        tokio::time::sleep(Duration::from_millis(200)).await;
        ([(header::CACHE_CONTROL, "max-age=10")], format!("{name}: {} coins", name.len() * 14))
    };
    // A fixed port, so that a second run requests the same URL; another port if it is taken.
    let listener = match TcpListener::bind(("127.0.0.1", 3987)).await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind(("127.0.0.1", 0)).await?,
    };
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(
        async move { axum::serve(listener, Router::new().route("/price/{name}", get(price))).await },
    );
    Ok(url)
}
