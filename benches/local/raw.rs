//! A local hit, compared with a plain GET by redis-rs of the same value on the same server.
//!
//! Both have one client thread, so that the server has a processor for itself.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use stampede_guard::StampedeGuard;

use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Table, Unit};
use crate::turns::{concurrent, in_turn, lets_others_run, one_thread};
use crate::values::{User, key, keys, lasting, until_copied};

const CALLERS: u32 = 64;
const KEYS: u32 = 1_000;

pub(crate) fn rows(table: &mut Table) {
    let (server, runtime) = (RedisServer::start(), one_thread());
    let (guard, connection) = runtime.block_on(prepare(&server));
    let texts = keys(KEYS);
    let before = guard.stats();
    let local = concurrent(&runtime, CALLERS, |caller, calls| {
        let (guard, texts) = (guard.clone(), Arc::clone(&texts));
        async move {
            for call in 0..calls {
                let load = || async { Err::<User, _>("this is a hit") };
                let value = guard.load(key(&texts, caller, call)).get_shared(move |_| load()).await;
                black_box(value.expect("a hit").value);
                lets_others_run(call).await;
            }
        }
    });
    let raw = concurrent(&runtime, CALLERS, |caller, calls| {
        let (connection, texts) = (connection.clone(), Arc::clone(&texts));
        async move {
            for call in 0..calls {
                black_box(get(&mut connection.clone(), key(&texts, caller, call)).await);
            }
        }
    });
    let times = in_turn(vec![local, raw]);
    let after = guard.stats();
    let (local, all) = (after.local_hits - before.local_hits, after.loads_saved() - before.loads_saved());
    let ratio = times.throughput(0, 1);
    table.add(Row {
        what: "local hit: `load(..).get_shared` on Redis / raw GET over redis-rs, 64 callers, one thread"
            .into(),
        unit: Unit::Ratio,
        must: Limit::AtLeast(10.0),
        aim: Limit::AtLeast(20.0),
        measured: ratio.median,
        detail: format!(
            "{ratio}; {:.0} ns, control {:.0} ns; {:.2}% of the hits from memory",
            times.of(0).median,
            times.of(1).median,
            local as f64 / all as f64 * 100.0
        ),
    });
}

/// A guard that has all values in memory, and the control's connection.
async fn prepare(server: &RedisServer) -> (StampedeGuard, MultiplexedConnection) {
    let policy =
        lasting().command_timeout(Duration::from_secs(1)).coordination_budget(Duration::from_secs(4));
    let policy = policy.lease(Duration::from_secs(4)).build().expect("valid");
    let guard = StampedeGuard::builder(server.client()).policy(policy).build().expect("valid");
    guard.connect().await.expect("connects");
    let texts = keys(KEYS);
    for (id, key) in texts.iter().enumerate() {
        guard.insert(key.as_str(), &User::new(id as u64)).await.expect("stored");
    }
    until_copied(&guard, &texts).await;
    let mut connection = server.client().get_multiplexed_async_connection().await.expect("connects");
    set_all(&mut connection, &texts).await;
    (guard, connection)
}

/// Stores the encoded values as the guard stores them, without the rest of their entries.
pub(crate) async fn set_all(connection: &mut MultiplexedConnection, texts: &[String]) {
    for (id, key) in texts.iter().enumerate() {
        let encoded = serde_json::to_vec(&User::new(id as u64)).expect("plain values");
        redis::cmd("SET").arg(key).arg(encoded).exec_async(connection).await.expect("SET");
    }
}

pub(crate) async fn get(connection: &mut MultiplexedConnection, key: &str) -> Bytes {
    redis::cmd("GET").arg(key).query_async(connection).await.expect("GET")
}
