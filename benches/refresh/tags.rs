//! Invalidation and expiry of many values at once: what they cost, and that no caller receives an older value afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use stampede_guard::{Policy, StampedeGuard};

use crate::callers::{KEY, Mode, TAG, policy, run_with, version};
use crate::support::monitor::Monitor;
use crate::support::os::wall_ns;
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Table, Unit};

const ENTRIES: u32 = 100_000;
const INVALIDATIONS: u32 = 200;

pub(crate) async fn many(table: &mut Table) {
    let server = RedisServer::start();
    let guard = connected(&server).await;
    let store = |entry: u32| {
        let guard = guard.clone();
        async move { guard.insert(("entry", entry), &entry).await.expect("stored") }
    };
    stream::iter(0..ENTRIES).map(store).buffer_unordered(200).collect::<Vec<()>>().await;
    assert_eq!(guard.get::<u32>(("entry", 4711_u32)).await.ok().flatten(), Some(4711));
    let monitor = Monitor::start(&server);
    guard.invalidate_tag(TAG).await.expect("confirmed");
    let commands = monitor.finish().without(["ping", "time"]);
    for entry in (0..ENTRIES).step_by(1000) {
        assert_eq!(guard.get::<u32>(("entry", entry)).await.expect("answered"), None);
    }
    table.add(Row {
        what: "invalidating a tag of 100,000 entries: round trips".into(),
        unit: Unit::Count,
        must: Limit::AtMost(2.0),
        aim: Limit::AtMost(1.0),
        measured: commands.total as f64,
        detail: format!("{:?}", commands.by_name),
    });
}

pub(crate) async fn racing(table: &mut Table) {
    // For each acknowledgement, its moment and the version that was then current.
    let mut acknowledged = Vec::new();
    let ran = run_with(Mode::Tagged, Duration::from_secs(8), async |server, origin| {
        let guard = connected(server).await;
        for number in 1..=INVALIDATIONS {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..50))).await;
            origin.script(KEY, [version(number)]);
            guard.invalidate_tag(TAG).await.expect("confirmed");
            acknowledged.push((wall_ns(), number));
        }
    })
    .await;
    let old = ran.calls.iter().filter(|call| {
        let newest =
            acknowledged.iter().rev().find(|(at, _)| *at < call.begun).map_or(0, |(_, number)| *number);
        call.version.is_none_or(|version| version < newest)
    });
    let old = old.count();
    table.add(Row {
        what: "200 invalidations during loads, 8x25: older values given after the acknowledgement".into(),
        unit: Unit::Count,
        must: Limit::Exactly(0.0),
        aim: Limit::None,
        measured: old as f64,
        detail: format!("{} loads, {} calls", ran.loads.len(), ran.calls.len()),
    });
}

const PAGES: u32 = 10_000;
const PURGED_LOADS: u32 = 8;
const PURGED_LOAD: Duration = Duration::from_millis(50);

/// 10,000 values of one tag are expired while they are asked for 1,000 times a second, by the guards of two processes.
pub(crate) async fn expired(table: &mut Table) {
    let server = RedisServer::start();
    let windows = Policy::builder().stale_while_revalidate(Duration::from_secs(600)).tags([TAG]);
    let policy = windows.max_concurrent_loads(PURGED_LOADS).build().expect("valid");
    let guards = [connected_with(&server, &policy).await, connected_with(&server, &policy).await];
    let store = |page: u32| {
        let guard = guards[0].clone();
        async move { guard.insert(("page", page), &0).await.expect("stored") }
    };
    stream::iter(0..PAGES).map(store).buffer_unordered(200).collect::<Vec<()>>().await;
    let loads = Loads::default();
    let before = asked(&guards, &loads, 5_000).await;
    assert_eq!(loads.all.load(Ordering::Relaxed), 0);
    guards[1].expire_tag(TAG).await.expect("confirmed");
    let after = asked(&guards, &loads, 20_000).await;
    let waited = after.iter().filter(|took| **took >= PURGED_LOAD).count();
    let all = loads.all.load(Ordering::Relaxed);
    let mut add = |what: &str, unit, must, aim, measured, detail| {
        table.add(Row { what: what.into(), unit, must, aim, measured, detail });
    };
    add(
        "10,000 values expired by their tag, 1,000 calls a second: calls that waited as long as a load",
        Unit::Count,
        Limit::Exactly(0.0),
        Limit::None,
        waited as f64,
        format!("{} calls, {all} loads", after.len()),
    );
    let most = loads.most.load(Ordering::Relaxed);
    add(
        "the same: loads at once, of 8 that the limit allows",
        Unit::Count,
        Limit::AtMost(f64::from(PURGED_LOADS)),
        Limit::None,
        most as f64,
        String::new(),
    );
    let possible = 20.0 * f64::from(PURGED_LOADS) / PURGED_LOAD.as_secs_f64();
    add(
        "the same: loads / loads that the limit allows in that time",
        Unit::Ratio,
        Limit::AtLeast(0.5),
        Limit::AtLeast(0.9),
        all as f64 / possible,
        format!("{all} / {possible}"),
    );
    let [plain, purged] = [before, after].map(|mut took| {
        took.sort();
        took[took.len() * 99 / 100].as_secs_f64() * 1e3
    });
    add(
        "the same: calls' p99 / their p99 before",
        Unit::Ratio,
        Limit::AtMost(4.0),
        Limit::AtMost(2.0),
        purged / plain,
        format!("{purged:.2} ms / {plain:.2} ms"),
    );
}

#[derive(Clone, Default)]
struct Loads {
    all: Arc<AtomicUsize>,
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

/// How long each of so many calls took, of which one begins each millisecond.
async fn asked(guards: &[StampedeGuard], loads: &Loads, calls: usize) -> Vec<Duration> {
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    let mut asked = Vec::with_capacity(calls);
    for call in 0..calls {
        ticks.tick().await;
        let (guard, loads, page) =
            (guards[call % guards.len()].clone(), loads.clone(), fastrand::u32(..PAGES));
        asked.push(tokio::spawn(async move {
            let load = move || async move {
                loads.all.fetch_add(1, Ordering::Relaxed);
                let running = loads.running.fetch_add(1, Ordering::Relaxed) + 1;
                loads.most.fetch_max(running, Ordering::Relaxed);
                tokio::time::sleep(PURGED_LOAD).await;
                loads.running.fetch_sub(1, Ordering::Relaxed);
                Ok::<_, String>(1_u32)
            };
            let began = Instant::now();
            guard.get_or_load(("page", page), load).await.expect("a value");
            began.elapsed()
        }));
    }
    let took = stream::iter(asked).then(async |call| call.await.expect("no panic"));
    took.collect().await
}

async fn connected(server: &RedisServer) -> StampedeGuard {
    connected_with(server, &policy(Mode::Tagged)).await
}

async fn connected_with(server: &RedisServer, policy: &Policy) -> StampedeGuard {
    let client = redis::Client::open(server.url()).expect("an address");
    let guard = StampedeGuard::builder(client).policy(policy.clone()).build().expect("valid");
    guard.connect().await.expect("connects");
    guard
}
