//! A service for `compare/in_front`: an axum server that has its responses ready, and the same behind the layer.
//!
//! `service THREADS`, with `REDIS_URL` set. Prints its address. The paths are `/bare/SIZE`, `/memory/SIZE` (the layer, with copies in memory)
//! and `/redis/SIZE` (the layer without them).

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::routing::get;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header};
use stampede_guard::{Policy, PolicyBuilder, StampedeGuard};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};

use crate::responses::{headers, response};

#[allow(dead_code, reason = "other benches use the rest")]
mod responses;

/// The largest body.
static LONGEST: [u8; 16 * 1024] = [b'v'; 16 * 1024];

fn runtime(threads: usize) -> Runtime {
    let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    builder.worker_threads(threads).enable_all().build().expect("a runtime")
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|word| word.parse().ok()).expect("service THREADS");
    runtime(threads).block_on(serve());
}

async fn serve() {
    let policy = Policy::builder()
        .fresh_for(Duration::from_secs(3_600))
        .coordination_budget(Duration::from_secs(4))
        .command_timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(4));
    let (memory, redis) = (guard(policy.clone().local_for(Duration::MAX)), guard(policy));
    for guard in [&memory, &redis] {
        guard.connect().await.expect("connected");
    }
    let app = Router::new()
        .route("/memory/{size}", get(ready))
        .layer(memory)
        .merge(Router::new().route("/redis/{size}", get(ready)).layer(redis))
        .route("/bare/{size}", get(ready));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    println!("{}", listener.local_addr().expect("bound"));
    axum::serve(listener, app).await.expect("it serves until it is killed");
}

fn guard(policy: PolicyBuilder) -> StampedeGuard {
    let client = redis::Client::open(std::env::var("REDIS_URL").expect("REDIS_URL is set")).expect("a URL");
    StampedeGuard::builder(client).policy(policy.build().expect("valid")).build().expect("valid")
}

async fn ready(Path(size): Path<usize>) -> Response<Body> {
    let mut headers: HeaderMap = headers();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    response(headers, Bytes::from_static(&LONGEST[..size])).map(Body::new)
}
