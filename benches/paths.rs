//! Makes one call of the guard, of a chosen kind, for `scripts/path-counts`, which counts the functions of this crate that the call runs.
//!
//! `paths WAY`, with `REDIS_URL` set: `loader-hit`, `loader-miss`, `http-hit`, `http-miss` or `invalidate`.

use std::pin::{Pin, pin};
use std::time::Duration;

use axum::http::{Request, Response, header};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full};
use stampede_guard::{Policy, StampedeGuard};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, Service as _, service_fn};

/// Only what runs in this function is counted: the call, and the tasks that run while it waits.
#[inline(never)]
fn measured(runtime: &Runtime, call: Pin<&mut dyn Future<Output = ()>>) {
    runtime.block_on(call);
}

fn main() {
    let way = std::env::args().nth(1).unwrap_or_default();
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let guard = runtime.block_on(settled(connected()));
    match &*way {
        "loader-hit" => {
            runtime.block_on(settled(load(&guard, "hit")));
            measured(&runtime, pin!(load(&guard, "hit")));
        }
        "loader-miss" => measured(&runtime, pin!(load(&guard, "miss"))),
        "http-hit" => {
            runtime.block_on(settled(request(&guard, "/hit")));
            measured(&runtime, pin!(request(&guard, "/hit")));
        }
        "http-miss" => measured(&runtime, pin!(request(&guard, "/miss"))),
        "invalidate" => {
            runtime.block_on(settled(load(&guard, "changed")));
            measured(&runtime, pin!(async { guard.invalidate("changed").await.expect("invalidated") }));
        }
        _ => panic!("no such way: {way}"),
    }
}

/// Waits until the tasks that the call has started are done, too, so that they are not counted with the next call.
async fn settled<T>(call: impl Future<Output = T>) -> T {
    let value = call.await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    value
}

/// A guard that has sent each of its commands once, so that the server knows all scripts. Its bounds are long, because counting makes it
/// slow.
async fn connected() -> StampedeGuard {
    let client = redis::Client::open(std::env::var("REDIS_URL").expect("REDIS_URL is set")).expect("a URL");
    let policy = Policy::builder()
        .lease(Duration::from_secs(60))
        .command_timeout(Duration::from_secs(10))
        .coordination_budget(Duration::from_secs(20))
        .build()
        .expect("valid");
    let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
    guard.connect().await.expect("connected");
    load(&guard, "first").await;
    request(&guard, "/first").await;
    guard.invalidate("first").await.expect("invalidated");
    guard
}

async fn load(guard: &StampedeGuard, key: &str) {
    let value: String = guard
        .get_or_load(key, || async { Ok::<_, std::io::Error>("value".to_owned()) })
        .await
        .expect("a value");
    assert_eq!(value, "value");
}

async fn request(guard: &StampedeGuard, path: &str) {
    let inner = service_fn(|_: Request<Empty<Bytes>>| async {
        Response::builder()
            .header(header::CACHE_CONTROL, "max-age=3600")
            .body(Full::new(Bytes::from_static(b"body")))
    });
    let request = Request::get(path).header(header::HOST, "shop.example").body(Empty::new()).expect("valid");
    let response = guard.clone().layer(inner).call(request).await.expect("a response");
    assert_eq!(response.into_body().collect().await.expect("whole").to_bytes(), "body");
}
