//! Promise 9, measured in bytes that the system counts: a full in-memory store takes no more than its capacity. Each test runs in a
//! separate process, in which nothing else grows.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use tower::{Layer as _, ServiceExt as _};

use crate::support::processes::{Child, Fleet, Role};

pub(crate) const ROLES: &[Role] = &[("memory.values", fill_with_values), ("memory.pages", fill_with_pages)];

const MIB: usize = 1024 * 1024;
/// The capacity of the store that is filled.
const CAPACITY: usize = 16 * MIB;

/// How many bytes of this process are in memory; `None` where there is no `/proc`.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<usize>().ok()? * 1024)
}

/// Puts entries until some are evicted. Reports how many bytes that took, and how many entries there are.
async fn filled(mut child: Child, store: MemoryStore, mut put: impl AsyncFnMut(u64)) {
    child.ready();
    child.wait_go().await;
    for number in 0..100 {
        put(number).await;
    }
    let before = resident();
    let (mut number, mut most) = (100, 0);
    // Continues well beyond the first eviction, until the maps have reached their final size.
    while store.len() as u64 > number - number / 4 {
        for _ in 0..100 {
            put(number).await;
            number += 1;
        }
        most = most.max(store.len());
    }
    let took = before.zip(resident()).map(|(before, after)| after.saturating_sub(before));
    child.result(&(took, store.len()));
}

fn fill_with_values(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let store = MemoryStore::with_capacity(CAPACITY);
        let guard = StampedeGuard::new(store.clone());
        filled(child, store, async move |number| {
            guard.insert(("user", number), &number).await.expect("stored");
        })
        .await;
    })
}

fn fill_with_pages(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let store = MemoryStore::with_capacity(CAPACITY);
        let guard = StampedeGuard::new(store.clone()).with_policy(Policy::builder().build().expect("valid"));
        let missing = tower::service_fn(|_: Request<Full<Bytes>>| async {
            let mut response = Response::new(Full::new(Bytes::from("not found")));
            *response.status_mut() = StatusCode::NOT_FOUND;
            Ok::<_, std::convert::Infallible>(response)
        });
        let shop = guard.layer(missing);
        filled(child, store, async move |number| {
            let request = Request::get(format!("/{number}")).header("host", "shop.example");
            let request = request.body(Full::default()).expect("a request");
            let response = shop.clone().oneshot(request).await.expect("a response");
            let body = http_body_util::BodyExt::collect(response.into_body()).await.expect("a body");
            assert_eq!(body.to_bytes(), "not found");
        })
        .await;
    })
}

async fn what_it_takes(role: &str) -> Option<(usize, usize)> {
    let fleet = Fleet::spawn(1, role, &());
    fleet.wait_ready().await;
    fleet.go();
    let (took, entries): (Option<usize>, usize) = fleet.member(0).result().await;
    let took = took?;
    println!("{role}: {} KiB for {entries} entries, {} bytes each", took / 1024, took / entries);
    Some((took, entries))
}

/// Regression: 64 MiB of small 404s took 218 MiB.
#[tokio::test]
async fn a_store_full_of_small_values_takes_no_more_than_its_capacity() {
    for role in ["memory.values", "memory.pages"] {
        let Some((took, _)) = what_it_takes(role).await else { return };
        assert!(took <= CAPACITY * 13 / 10, "{role}: {took} of {CAPACITY}");
        assert!(took >= CAPACITY / 2, "{role}: {took} of {CAPACITY}: there is room that is not used");
    }
}

/// A hit in memory never waits for anything, so other tasks run only because of the runtime's budget.
#[tokio::test]
async fn a_task_that_only_hits_lets_other_tasks_run() {
    let guard = StampedeGuard::in_memory();
    guard.insert("k", &7_u8).await.expect("stored");
    let other = tokio::spawn(async {});
    for _ in 0..10_000 {
        assert_eq!(guard.get::<u8>("k").await.expect("answered"), Some(7));
        if other.is_finished() {
            return;
        }
    }
    panic!("the other task did not run");
}
