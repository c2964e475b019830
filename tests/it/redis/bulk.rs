//! Thousands of keys at once, in several nodes: a healthy server stays healthy.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::sleep;

use super::*;

const NODES: usize = 3;

type Loading = BoxFuture<'static, Result<Vec<(u64, u64)>, String>>;

/// A loader of many keys that counts its calls for each key.
fn counted(loads: &Arc<AtomicUsize>) -> impl Fn(Vec<u64>) -> Loading + Send + Sync + 'static {
    let loads = Arc::clone(loads);
    move |keys: Vec<u64>| {
        loads.fetch_add(keys.len(), Ordering::Relaxed);
        Box::pin(async move { Ok(keys.into_iter().map(|key| (key, key)).collect()) })
    }
}

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
    assert_eq!(loads.load(Ordering::Relaxed) as u64, keys, "{stats:?}");
    let stored = guards[0].get_many::<u64, _>(0..keys).await;
    let stored = stored.into_iter().filter(|found| matches!(found, Ok(Some(_)))).count();
    assert_eq!(stored as u64, keys, "{stats:?}");
    assert!(stats.iter().all(|stats| stats.fail_open_loads == 0), "{stats:?}");
}

/// 14,656 loads, and 1,190 values that were stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_ask_for_the_same_thousands_of_keys_load_each_once() {
    const KEYS: u64 = 5_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| {
        let answers = guard.get_or_load_many(0..KEYS, counted(loads)).await;
        assert!(
            answers.iter().zip(0..).all(|(answer, key)| matches!(answer, Ok(Some(found)) if *found == key))
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_single_callers_of_each_node_load_each_key_once() {
    // Without optimisation, more reads than these take longer than a read may.
    const KEYS: u64 = 1_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| {
        let answers = (0..KEYS).map(|key| {
            let loads = Arc::clone(loads);
            guard.get_or_load(key, move || async move {
                loads.fetch_add(1, Ordering::Relaxed);
                Ok::<_, String>(key)
            })
        });
        assert!(
            join_all(answers)
                .await
                .into_iter()
                .zip(0..)
                .all(|(answer, key)| matches!(answer, Ok(found) if found == key))
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_up_of_thousands_of_keys_by_several_nodes_stores_each_once() {
    const KEYS: u64 = 5_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| {
        let warmed = guard.warm(0..KEYS, KEYS as usize, counted(loads)).await;
        assert_eq!((warmed.stored + warmed.found, warmed.failed), (KEYS, 0), "{warmed:?}");
    })
    .await;
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
