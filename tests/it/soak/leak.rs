//! A million keys, each requested once, leave neither memory nor flights nor keys behind. (K1)

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _};
use stampede_guard::{Policy, StampedeGuard};

use crate::support::probe::eventually_eq;
use crate::support::processes::{Child, Fleet};
use crate::support::redis_server::RedisServer;

/// The resident memory of the process in KiB; `None` without `/proc`.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

async fn ask(guard: &StampedeGuard, keys: std::ops::Range<u64>) {
    let calls = keys.map(|key| {
        let guard = guard.clone();
        tokio::spawn(async move {
            let value = guard.get_or_load(("key", key), move || async move { Ok::<_, String>(key) }).await;
            assert_eq!(value.expect("a value"), key);
        })
    });
    stream::iter(calls).buffer_unordered(256).for_each(|call| async { call.expect("no panic") }).await;
}

/// A child that requests all keys, rests, and reports its memory before and after that.
pub(super) fn fill(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let (redis, keys): (String, u64) = child.config();
        let bounds =
            Policy::builder().coordination_budget(Duration::from_secs(2)).lease(Duration::from_secs(5));
        let policy = bounds.fresh_for(Duration::from_secs(20)).build().expect("valid");
        let client = redis::Client::open(redis).expect("an address");
        let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
        crate::redis::connects(&guard).await;
        child.ready();
        child.wait_go().await;
        // This is the warm-up: after it, buffers, maps and the allocator have their full size.
        ask(&guard, 0..keys / 20).await;
        let before = resident();
        ask(&guard, keys / 20..keys).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let stats = guard.stats();
        child.result(&(before, resident(), stats.flights + stats.tasks, stats.loads));
    })
}

pub(super) async fn run() {
    let keys = std::env::var("KEYS").map_or(1_000_000, |keys| keys.parse().expect("KEYS is a number"));
    let server = RedisServer::start();
    let fleet = Fleet::spawn(1, "soak.leak", &(server.minimal_user(), keys));
    fleet.wait_ready().await;
    let began = std::time::Instant::now();
    fleet.go();
    // The child takes longer than `result` waits, so this loop waits until its result is there.
    let mut most = 0;
    while fleet.member(0).events("result") == 0 {
        assert!(began.elapsed() < Duration::from_secs(3_600), "it does not end");
        most = most.max(server.run::<usize>(&["DBSIZE"]));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let took = began.elapsed();
    let (before, after, left, loads): (Option<u64>, Option<u64>, u64, u64) = fleet.member(0).result().await;
    println!("{keys} keys in {took:.0?}, {loads} loads; at most {most} on the server at once");
    println!("resident: {before:?} KiB warm, {after:?} KiB after; {left} flights and tasks left");
    assert_eq!(left, 0);
    assert_eq!(loads, keys);
    if let (Some(before), Some(after)) = (before, after) {
        assert!(after <= before + before / 10, "{before} KiB grew to {after} KiB");
    }
    // The keys expire by their TTL.
    eventually_eq("the server is empty", Duration::from_secs(60), 0, async || {
        server.run::<usize>(&["DBSIZE"])
    })
    .await;
    println!("the server is empty again");
}
