//! Invalidation of many values at once: what it costs, and that no caller receives an older value afterwards.

use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use stampede_guard::StampedeGuard;

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

async fn connected(server: &RedisServer) -> StampedeGuard {
    let client = redis::Client::open(server.url()).expect("an address");
    let guard = StampedeGuard::builder(client).policy(policy(Mode::Tagged)).build().expect("valid");
    guard.connect().await.expect("connects");
    guard
}
