//! The guard around reqwest: as a middleware, and as a layer of a tower stack.
//!
//! `cargo run --features reqwest --example reqwest_client`. With `REDIS_URL` several processes ask the API once, together.

use std::error::Error;
use std::time::{Duration, Instant};

use axum::extract::Path;
use axum::http::{Response, header};
use axum::{Router, routing::get};
use reqwest_middleware::ClientBuilder;
use stampede_guard::StampedeGuard;
use stampede_guard::http::reqwest::ReqwestService;
use tokio::net::TcpListener;
use tower::{ServiceBuilder, ServiceExt as _};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let guard = match std::env::var("REDIS_URL") {
        Ok(url) => StampedeGuard::new(redis::Client::open(url)?),
        Err(_) => StampedeGuard::in_memory(),
    };
    let api = start_api().await?;
    let reqwest = reqwest::Client::new();

    println!("as a middleware, around an API that takes 200 ms:");
    let client = ClientBuilder::new(reqwest.clone()).with(guard.reqwest(reqwest.clone())?).build();
    for path in ["/price/ant", "/price/ant", "/price/bee"] {
        let sent = Instant::now();
        let response = client.get(format!("{api}{path}")).send().await?;
        let status = response.headers().get(header::CACHE_STATUS).cloned();
        println!("{:>6} ms  {path}  {:?}  {status:?}", sent.elapsed().as_millis(), response.text().await?);
    }

    println!("as a layer of a tower stack, on the same store:");
    let stack = ServiceBuilder::new().layer(guard).service(ReqwestService::new(reqwest.clone())?);
    for path in ["/price/ant", "/price/cat"] {
        let sent = Instant::now();
        let request = reqwest.get(format!("{api}{path}")).build()?;
        let response: Response<_> = stack.clone().oneshot(request.try_into()?).await?;
        let status = response.headers().get(header::CACHE_STATUS).cloned();
        println!("{:>6} ms  {path}  {status:?}", sent.elapsed().as_millis());
    }

    let account = reqwest::Client::builder()
        .default_headers([(header::AUTHORIZATION, "Bearer 1234".parse()?)].into_iter().collect());
    if let Err(refusal) = ReqwestService::new(account.build()?) {
        println!("a client that adds credentials behind the guard is refused:\n  {refusal}");
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
    let listener = match TcpListener::bind(("127.0.0.1", 3986)).await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind(("127.0.0.1", 0)).await?,
    };
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(
        async move { axum::serve(listener, Router::new().route("/price/{name}", get(price))).await },
    );
    Ok(url)
}
