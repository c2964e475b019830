//! Makes many calls of one kind, one after the other on one thread, for `scripts/instructions`, which counts what a call takes.
//!
//! `instructions ROW CALLS`, with `REDIS_URL` set: the names of the rows are in [`main`].

use std::convert::Infallible;
use std::future::pending;
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use bytes::Bytes;
use http::Uri;
use http_body_util::BodyExt as _;
use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use tokio::runtime::{Builder, Runtime};
use tower::Service as _;

use crate::caches::{Map, Moka, Quick};
use crate::responses::{HEADERS_OF_A_HIT, body, headers, request, response};
use crate::values::{User, key, keys, lasting, until_copied};

mod caches;
mod responses;
mod values;

/// Longer than all calls take.
const LONG: Duration = Duration::from_secs(86_400);

/// Few, because each copy of a response writes its `Age` anew each second, and counting makes a second short.
const KEYS: u32 = 10;

/// Only what runs in this function is counted: the calls, and the tasks that run meanwhile.
#[inline(never)]
fn measured(runtime: &Runtime, calls: Pin<&mut dyn Future<Output = ()>>) {
    runtime.block_on(calls);
}

/// How many calls are measured, and on which runtime.
struct Calls {
    runtime: Runtime,
    number: u32,
}

fn main() {
    let mut words = std::env::args().skip(1);
    let (row, number) = (words.next().unwrap_or_default(), words.next().and_then(|word| word.parse().ok()));
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let calls = Calls { runtime, number: number.expect("instructions ROW CALLS") };
    match &*row {
        "raw-get" => calls.raw_get(),
        "loader-redis" => calls.loader(&calls.on_redis()),
        "loader-memory" => calls.local_loader(false),
        "loader-memory-inspected" => calls.local_loader(true),
        "loader-miss" => calls.miss(&in_memory(lasting().build().expect("valid"))),
        "loader-miss-redis" => calls.miss(&calls.on_redis()),
        "layer-redis" => calls.layer(calls.on_redis(), true),
        "layer-memory" => calls.layer(in_memory(lasting().build().expect("valid")), true),
        "layer-memory-inspected" => calls.layer(calls.inspected(), true),
        "layer-miss" => calls.layer(in_memory(lasting().build().expect("valid")), false),
        "router" => calls.requests(router(), true),
        "inspector" => calls.fleet(),
        "quick_cache" => calls.map::<Quick<User>>(),
        "moka" => calls.map::<Moka<User>>(),
        _ => panic!("no such row: {row}"),
    }
}

fn in_memory(policy: Policy) -> StampedeGuard {
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build().expect("valid")
}

fn client() -> redis::Client {
    redis::Client::open(std::env::var("REDIS_URL").expect("REDIS_URL is set")).expect("a URL")
}

/// A service that has its response ready.
fn router() -> Router {
    Router::new().route("/report/{number}", get(async || response(headers(), body()).map(Body::new)))
}

impl Calls {
    fn run(&self, calls: impl Future<Output = ()>) {
        measured(&self.runtime, pin!(calls));
    }

    /// A guard on the server, without copies in memory. Its time limits are long, because counting makes it slow.
    fn on_redis(&self) -> StampedeGuard {
        let policy = Policy::builder()
            .fresh_for(Duration::from_secs(3_600))
            .lease(Duration::from_secs(600))
            .command_timeout(Duration::from_secs(10))
            .coordination_budget(Duration::from_secs(20));
        let policy = policy.build().expect("valid");
        let guard = StampedeGuard::builder(client()).policy(policy).build().expect("valid");
        self.runtime.block_on(guard.connect()).expect("connected");
        guard
    }

    fn raw_get(&self) {
        let mut connection =
            self.runtime.block_on(client().get_multiplexed_async_connection()).expect("connected");
        let texts = keys(KEYS);
        let mut get = async |key: &str| -> Option<Vec<u8>> {
            redis::cmd("GET").arg(key).query_async(&mut connection).await.expect("answered")
        };
        self.run(async {
            for call in 0..self.number {
                black_box(get(key(&texts, 0, call)).await);
            }
        });
    }

    fn loader(&self, guard: &StampedeGuard) {
        let texts = keys(KEYS);
        self.runtime.block_on(async {
            for _ in 0..2 {
                for key in &*texts {
                    load(guard, key).await;
                }
            }
        });
        self.run(async {
            for call in 0..self.number {
                load(guard, key(&texts, 0, call)).await;
            }
        });
    }

    /// A guard in memory with an inspector, which counts hot keys.
    fn inspected(&self) -> StampedeGuard {
        let guard = in_memory(lasting().build().expect("valid"));
        let _runtime = self.runtime.enter();
        let _service = guard.inspector().unprotected().into_service().expect("valid");
        guard
    }

    /// Looks at the fleet of one process with ten policies and a thousand loads. The process reports twice for each look: to its own page,
    /// and to the channel.
    fn fleet(&self) {
        let guard = in_memory(lasting().build().expect("valid"));
        // An answer is shared for a second, so each call has a service of its own.
        let services: Vec<_> = self.runtime.block_on(async {
            for number in 0..1_000_u32 {
                let policy = lasting().name(format!("p{}", number % 10)).load_timeout(LONG).lease(LONG / 4);
                let guard = guard.with_policy(policy.build().expect("valid"));
                tokio::spawn(async move {
                    let load = pending::<Result<User, Infallible>>;
                    guard.get_or_load(("load", number), load).await.expect("it never ends");
                });
            }
            tokio::task::yield_now().await;
            (0..self.number).map(|_| guard.inspector().unprotected().into_service().expect("valid")).collect()
        });
        self.run(async {
            for mut service in services {
                let request = http::Request::get("/api/fleet").header("x-stampede-guard", "bench");
                let request = request.body(Body::empty()).expect("a request");
                black_box(service.call(request).await.expect("infallible"));
            }
        });
    }

    fn local_loader(&self, is_inspected: bool) {
        let guard =
            if is_inspected { self.inspected() } else { in_memory(lasting().build().expect("valid")) };
        let texts = keys(KEYS);
        self.runtime.block_on(until_copied(&guard, &texts));
        self.run(async {
            for call in 0..self.number {
                let load = guard.load(key(&texts, 0, call));
                black_box(
                    load.get_shared(|_| async { Err::<User, _>("this is a hit") }).await.expect("a hit"),
                );
            }
        });
    }

    /// Each call has a key of its own.
    fn miss(&self, guard: &StampedeGuard) {
        self.runtime.block_on(load(guard, "first"));
        let texts = keys(self.number);
        self.run(async {
            for key in &*texts {
                load(guard, key).await;
            }
        });
    }

    fn layer(&self, guard: StampedeGuard, is_hit: bool) {
        self.requests(router().layer(guard), is_hit);
    }

    /// Requests the same pages again and again, or with `is_hit = false` each page once.
    fn requests(&self, router: Router, is_hit: bool) {
        // As `axum::serve` does. Without it each call would make the routes of the handlers anew.
        let mut router: Router = router.with_state(());
        let uris: Vec<Uri> = (0..if is_hit { KEYS } else { self.number })
            .map(|number| format!("/report/{number}").parse().expect("a path"))
            .collect();
        if is_hit {
            self.runtime.block_on(async {
                for _ in 0..3 {
                    for uri in &uris {
                        answer(&mut router, uri).await;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
        }
        self.run(async {
            for call in 0..self.number as usize {
                answer(&mut router, &uris[call % uris.len()]).await;
            }
        });
    }

    fn map<M: Map<User>>(&self) {
        let (map, texts) = (M::with_capacity(KEYS as usize * 10), keys(KEYS));
        for key in &*texts {
            map.insert(key.clone(), Arc::new(User::new(7)));
        }
        self.run(async {
            for call in 0..self.number {
                black_box(map.get(key(&texts, 0, call)).is_some());
            }
        });
    }
}

async fn load(guard: &StampedeGuard, key: &str) {
    let value = guard.get_or_load(key, async || Ok::<_, Infallible>(User::new(7))).await;
    black_box(value.expect("infallible"));
}

/// Sends one request, and reads the whole of its response.
async fn answer(router: &mut Router, uri: &Uri) {
    let mut response = router.call(request(uri)).await.expect("infallible");
    let mut length = 0;
    while let Some(frame) = response.body_mut().frame().await {
        length += frame.expect("whole").data_ref().map_or(0, Bytes::len);
    }
    assert_eq!(length, body().len());
    assert!(response.headers().len() <= HEADERS_OF_A_HIT);
}
