//! Thousands of keys at once, in several nodes: a healthy server stays healthy.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use tokio::time::sleep;

use super::*;
use crate::crowd::{by_a_call_each, by_a_warm_up, by_one_call, loaded_and_stored_once};

const NODES: usize = 3;

/// All nodes ask for the same keys at once, beside requests for one hot key.
async fn at_once(server: &RedisServer, keys: u64, ask: impl AsyncFn(&StampedeGuard, &Arc<AtomicUsize>)) {
    let guards = join_all((0..NODES).map(|_| local(server, lease_of(Duration::from_secs(10))))).await;
    answer(&guards[0], "hot", 7).await;
    let loads = Arc::new(AtomicUsize::new(0));
    let asked = join_all(guards.iter().map(|guard| ask(guard, &loads)));
    let is_over = std::cell::Cell::new(false);
    let hot = async {
        while !is_over.get() {
            assert_eq!(answer(&guards[1], "hot", 8).await, 7, "its hit was lost");
            sleep(Duration::from_millis(1)).await;
        }
    };
    let asked = async {
        asked.await;
        is_over.set(true);
    };
    futures_util::future::join(asked, hot).await;
    let stats: Vec<_> = guards.iter().map(StampedeGuard::stats).collect();
    loaded_and_stored_once(&guards[0], keys, &loads, &stats).await;
    assert!(stats.iter().all(|stats| stats.fail_open_loads == 0), "{stats:?}");
}

/// 14,656 loads, and 1,190 values that were stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_ask_for_the_same_thousands_of_keys_load_each_once() {
    const KEYS: u64 = 5_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| by_one_call(guard, KEYS, loads).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_single_callers_of_each_node_load_each_key_once() {
    // Without optimisation, more reads than these take longer than a read may.
    const KEYS: u64 = 1_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| by_a_call_each(guard, KEYS, loads).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_up_of_thousands_of_keys_by_several_nodes_stores_each_once() {
    const KEYS: u64 = 5_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| by_a_warm_up(guard, KEYS, loads).await).await;
}

/// The server hangs as the loads end: no call waits for each of its values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_under_thousands_of_keys_costs_a_bounded_time() {
    const KEYS: u64 = 5_000;
    let server = Arc::new(RedisServer::start());
    let guard = local(&server, Policy::default()).await;
    let hangs = Arc::clone(&server);
    let load = move |keys: Vec<u64>| {
        hangs.pause();
        async move { Ok::<_, String>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>()) }
    };
    let began = Instant::now();
    let answers = guard.get_or_load_many(0..KEYS, load).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Some(_)))));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    server.resume();
}
