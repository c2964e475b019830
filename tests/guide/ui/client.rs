//! A client with requests of its own is no service of `http::Request`.

use stampede_guard::StampedeGuard;
use tower::{ServiceBuilder, ServiceExt};

use crate::stand_in::reqwest;

async fn ask(guard: StampedeGuard, request: http::Request<String>) {
    let client = ServiceBuilder::new().layer(guard).service(reqwest::Client::new());
    let _ = client.oneshot(request).await;
}

async fn ask_by_a_function(guard: StampedeGuard, request: http::Request<String>) {
    let client = ServiceBuilder::new().layer(guard).service(reqwest::Client::new());
    let _ = ServiceExt::oneshot(client, request).await;
}
