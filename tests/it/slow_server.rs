//! Thousands of keys are requested at once, and the server executes one command after the other. No command may wait for longer than its
//! time limit. The clock is paused, so that the time that this process needs does not count.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::testing::ChaosStore;
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::many_keys::{by_a_call_each, by_a_warm_up, by_one_call, loaded_and_stored_once};

const NODES: usize = 3;

/// The time that the server needs for one command. All commands of a test together need several times the time limit of one command.
const EACH: Duration = Duration::from_micros(50);

/// All nodes, under this policy, request all keys at once: each key is loaded once and stored. Meanwhile a hit takes no longer than this
/// bound.
async fn at_once(
    keys: u64,
    policy: fn() -> Policy,
    ask: impl AsyncFn(&StampedeGuard, &Arc<AtomicUsize>),
) -> Duration {
    let chaos = ChaosStore::new(1);
    let guard = || StampedeGuard::builder(chaos.replica()).policy(policy()).build().expect("valid");
    let guards: [StampedeGuard; NODES] = std::array::from_fn(|_| guard());
    let other = StampedeGuard::new(chaos.replica());
    other.insert("hot", &7_u64).await.expect("stored");
    chaos.command_time(EACH);
    let loads = Arc::new(AtomicUsize::new(0));
    let calls = join_all(guards.iter().map(|guard| ask(guard, &loads)));
    let mut slowest = Duration::ZERO;
    let hot = async {
        loop {
            let began = Instant::now();
            let hit = other.get_or_load("hot", || async { Ok::<_, String>(8_u64) }).await;
            assert_eq!(hit.expect("a value"), 7, "its hit was lost");
            slowest = slowest.max(began.elapsed());
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        _ = calls => {}
        () = hot => {}
    }
    let stats = guards.each_ref().map(StampedeGuard::stats);
    loaded_and_stored_once(&other, keys, &loads, stats).await;
    slowest
}

fn tagged() -> Policy {
    Policy::builder().tags(["of all"]).build().expect("valid")
}

#[tokio::test(start_paused = true)]
async fn calls_for_thousands_of_keys_load_each_once() {
    const KEYS: u64 = 2_500;
    for policy in [Policy::default, tagged] {
        let slowest = at_once(KEYS, policy, async |guard, loads| by_one_call(guard, KEYS, loads).await);
        let slowest = slowest.await;
        // A read of 256 keys is 13 ms of this server's time.
        assert!(slowest < Duration::from_millis(20), "{slowest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn warm_ups_of_several_nodes_store_each_key_once() {
    const KEYS: u64 = 2_500;
    at_once(KEYS, Policy::default, async |guard, loads| by_a_warm_up(guard, KEYS, loads).await).await;
}

#[tokio::test(start_paused = true)]
async fn single_callers_of_thousands_of_keys_load_each_once() {
    // Regression: with more than 10,000 keys per node, the number of flights was exceeded, and the other callers loaded for themselves.
    const KEYS: u64 = 10_500;
    at_once(KEYS, Policy::default, async |guard, loads| by_a_call_each(guard, KEYS, loads).await).await;
}
