//! Thousands of keys at once on a server that executes one command after the other: no command waits longer than it may. With a paused
//! clock, so that the time of this process does not count.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use stampede_guard::testing::ChaosStore;
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::{Instant, sleep};

const NODES: usize = 3;

/// As a command of this server takes, all of them at once would take several times a command's time limit.
const EACH: Duration = Duration::from_micros(50);

type Loading = BoxFuture<'static, Result<Vec<(u64, u64)>, String>>;

fn counted(loads: &Arc<AtomicUsize>) -> impl Fn(Vec<u64>) -> Loading + Send + Sync + 'static {
    let loads = Arc::clone(loads);
    move |keys: Vec<u64>| {
        loads.fetch_add(keys.len(), Ordering::Relaxed);
        Box::pin(async move { Ok(keys.into_iter().map(|key| (key, key)).collect()) })
    }
}

/// All nodes ask at once, under this policy; each key is loaded once, and stored. Meanwhile hits of one key take no longer than this.
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
    let asked = join_all(guards.iter().map(|guard| ask(guard, &loads)));
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
        _ = asked => {}
        () = hot => {}
    }
    let stats = guards.each_ref().map(StampedeGuard::stats);
    assert_eq!(loads.load(Ordering::Relaxed) as u64, keys, "{stats:#?}");
    let stored = other.get_many::<u64, _>(0..keys).await;
    let stored = stored.into_iter().filter(|found| matches!(found, Ok(Some(_)))).count();
    assert_eq!(stored as u64, keys, "{stats:#?}");
    slowest
}

fn tagged() -> Policy {
    Policy::builder().tags(["of all"]).build().expect("valid")
}

#[tokio::test(start_paused = true)]
async fn calls_for_thousands_of_keys_load_each_once() {
    const KEYS: u64 = 2_500;
    for policy in [Policy::default, tagged] {
        let slowest = at_once(KEYS, policy, async |guard, loads| {
            let answers = guard.get_or_load_many(0..KEYS, counted(loads)).await;
            assert!(
                answers
                    .iter()
                    .zip(0..)
                    .all(|(answer, key)| matches!(answer, Ok(Some(found)) if *found == key))
            );
        });
        let slowest = slowest.await;
        assert!(slowest < Duration::from_millis(15), "{slowest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn warm_ups_of_several_nodes_store_each_key_once() {
    const KEYS: u64 = 2_500;
    at_once(KEYS, Policy::default, async |guard, loads| {
        let warmed = guard.warm(0..KEYS, KEYS as usize, counted(loads)).await;
        assert_eq!((warmed.stored + warmed.found, warmed.failed), (KEYS, 0), "{warmed:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn single_callers_of_thousands_of_keys_load_each_once() {
    const KEYS: u64 = 2_500;
    at_once(KEYS, Policy::default, async |guard, loads| {
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
