//! Thousands of keys at once, in several nodes, must not overload a healthy server.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use tokio::time::sleep;

use super::*;
use crate::many_keys::{by_a_call_each, by_a_warm_up, by_one_call, loaded_and_stored_once};
use crate::support::proxy::{Mode, Proxy};

const NODES: usize = 3;

/// Lets all nodes request the same keys at once, while other requests read one hot key.
async fn at_once(server: &RedisServer, keys: u64, ask: impl AsyncFn(&StampedeGuard, &Arc<AtomicUsize>)) {
    let guards = join_all((0..NODES).map(|_| local(server, lease_of(Duration::from_secs(10))))).await;
    answer(&guards[0], "hot", 7).await;
    let loads = Arc::new(AtomicUsize::new(0));
    let calls = join_all(guards.iter().map(|guard| ask(guard, &loads)));
    let is_over = std::cell::Cell::new(false);
    let hot = async {
        while !is_over.get() {
            assert_eq!(answer(&guards[1], "hot", 8).await, 7, "its hit was lost");
            sleep(Duration::from_millis(1)).await;
        }
    };
    let calls = async {
        calls.await;
        is_over.set(true);
    };
    futures_util::future::join(calls, hot).await;
    let stats: Vec<_> = guards.iter().map(StampedeGuard::stats).collect();
    loaded_and_stored_once(&guards[0], keys, &loads, &stats).await;
    assert!(stats.iter().all(|stats| stats.fail_open_loads == 0), "{stats:?}");
}

/// Regression: there were 14,656 loads, and only 1,190 values were stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_ask_for_the_same_thousands_of_keys_load_each_once() {
    const KEYS: u64 = 5_000;
    let server = RedisServer::start();
    at_once(&server, KEYS, async |guard, loads| by_one_call(guard, KEYS, loads).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_single_callers_of_each_node_load_each_key_once() {
    // Without optimisation, more reads than these take longer than a read may take.
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

/// The server hangs when the loads end. A call must not wait for one command timeout after another, once for each of its values.
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
    // It takes two seconds on an idle machine. Waiting for one command per value would take minutes.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    server.resume();
}

/// Regression: only few commands are sent at once to a near server. When the server becomes distant, there must be more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_many_keys_at_a_server_that_has_become_distant_do_not_wait_one_behind_the_other() {
    // With as many commands at once as at the near server, this would take 15 seconds.
    const KEYS: u64 = 1_000;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let policy = Policy::builder()
        // Longer than a busy machine stands still.
        .command_timeout(Duration::from_millis(2_500))
        .coordination_budget(Duration::from_secs(8))
        .lease(Duration::from_secs(10));
    let client = redis::Client::open(proxy.url()).expect("an address");
    let guard = StampedeGuard::builder(client).policy(policy.build().expect("valid")).build().expect("valid");
    connects(&guard).await;
    proxy.set(Mode::Delay(Duration::from_millis(100)));
    let (began, loads) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    by_a_call_each(&guard, KEYS, &loads).await;
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!(guard.stats().fail_open_loads, 0);
}

/// At one of the masters, each command has to wait for tens of milliseconds.
#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_master_does_not_delay_the_keys_of_another_one() {
    let cluster = crate::support::cluster::Cluster::calm();
    let guard = unconnected(&cluster.url(), lease_of(Duration::from_secs(10)));
    connects(&guard).await;
    let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let busy = {
        let (mut admin, is_over) = (cluster.node(0).conn(), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let spin = "local t = redis.call('TIME') local from = t[1] * 1000000 + t[2] \
                        repeat t = redis.call('TIME') until t[1] * 1000000 + t[2] - from > 20000";
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                redis::cmd("EVAL").arg(spin).arg(0).exec(&mut admin).expect("it runs");
            }
        })
    };
    let slow = (0..60).map(|n| cluster.key_on(0, &format!("slow-{n}"))).collect::<Vec<_>>();
    let slow = slow.into_iter().map(|key| {
        let guard = guard.clone();
        tokio::spawn(async move { answer(&guard, &key, 1).await })
    });
    let slow: Vec<_> = slow.collect();
    sleep(Duration::from_millis(60)).await;
    answer(&guard, &cluster.key_on(1, "quick"), 2).await;
    let waiting = slow.iter().filter(|slow| !slow.is_finished()).count();
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    busy.join().expect("no panic");
    assert!(waiting > 30, "only {waiting} were still waiting");
    join_all(slow).await;
}
