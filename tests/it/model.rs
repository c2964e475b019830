//! Many callers, keys and nodes in a random order that a seed determines: whatever the order, no caller hangs, no older value is returned
//! after an invalidation, and nothing is left over.
//!
//! The nodes share one in-memory store and a paused clock, so thousands of virtual seconds pass in one. A
//! failing run prints its seed; `SEED=n cargo test --all-features --test it model` runs that one alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stampede_guard::{LoadError, MemoryStore, OnWaitTimeout, Policy, StampedeGuard};
use tokio::time::{sleep, timeout};

const RUNS: u64 = 400;
const NODES: u64 = 4;
const KEYS: u64 = 3;
const CALLERS: u64 = 60;

/// A small generator in this file: the same seed must make the same run with every version of every library.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// The origin's data: a version per key, which only grows.
#[derive(Default)]
struct Origin {
    versions: [AtomicU64; KEYS as usize],
    loads: AtomicU64,
}

/// The outcome of a scripted load.
#[derive(Clone, Copy, Debug)]
enum Script {
    Returns,
    Fails,
    Panics,
    NeverEnds,
    IsTooLong,
}

async fn load(
    origin: Arc<Origin>,
    key: u64,
    takes: Duration,
    script: Script,
) -> Result<(u64, String), String> {
    origin.loads.fetch_add(1, Ordering::SeqCst);
    // The version at the beginning of the load: the load may return no older one.
    let version = origin.versions[key as usize].load(Ordering::SeqCst);
    sleep(takes).await;
    match script {
        Script::Returns => Ok((version, String::new())),
        Script::Fails => Err("scripted".to_owned()),
        Script::Panics => panic!("scripted panic"),
        Script::NeverEnds => std::future::pending().await,
        Script::IsTooLong => Ok((version, "x".repeat(2_000))),
    }
}

fn policy(random: &mut Random) -> Policy {
    let lease = Duration::from_millis(200 + random.below(2_000));
    Policy::builder()
        .lease(lease)
        .command_timeout(Duration::from_millis(10))
        .load_timeout(Duration::from_secs(2 + random.below(8)))
        .wait_timeout(Duration::from_secs(1 + random.below(20)), OnWaitTimeout::Load)
        .fresh_for(Duration::from_millis(500 + random.below(5_000)))
        .max_body(1_000)
        .build()
        .expect("valid")
}

async fn run(seed: u64) {
    let mut random = Random(seed);
    let store = MemoryStore::new();
    let guards: Vec<_> =
        (0..NODES).map(|_| StampedeGuard::new(store.clone()).with_policy(policy(&mut random))).collect();
    let origin = Arc::new(Origin::default());
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..CALLERS {
        let (guard, origin) = (guards[random.below(NODES) as usize].clone(), Arc::clone(&origin));
        let key = random.below(KEYS);
        let starts = Duration::from_millis(random.below(8_000));
        let takes = Duration::from_millis(random.below(3_000));
        let script = match random.below(20) {
            0..=2 => Script::Fails,
            3 | 4 => Script::Panics,
            5 => Script::NeverEnds,
            6 => Script::IsTooLong,
            _ => Script::Returns,
        };
        let leaves = (random.below(6) == 0).then(|| Duration::from_millis(random.below(4_000)));
        let invalidates = random.below(5) == 0;
        callers.spawn(async move {
            sleep(starts).await;
            if invalidates {
                origin.versions[key as usize].fetch_add(1, Ordering::SeqCst);
                guard.invalidate(("key", key)).await.expect("memory never fails");
            }
            // In memory the message arrives together with the invalidation, so promise 5 holds on every node as soon as the notified tasks
            // have run.
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            let oldest = origin.versions[key as usize].load(Ordering::SeqCst);
            let call = guard.get_or_load(("key", key), {
                let origin = Arc::clone(&origin);
                move || load(origin, key, takes, script)
            });
            let answer = match leaves {
                Some(leaves) => timeout(leaves, call).await.ok(),
                None => Some(timeout(Duration::from_secs(120), call).await.expect("no caller hangs")),
            };
            match answer {
                Some(Ok((version, _))) => {
                    if invalidates {
                        assert!(version >= oldest, "{version} after {oldest} was invalidated");
                    }
                }
                Some(Err(LoadError::Guard(error))) => assert!(error.is_timeout(), "{error}"),
                Some(Err(_)) | None => {}
            }
        });
    }
    while let Some(done) = callers.join_next().await {
        done.expect("no caller panics");
    }
    // Loads whose callers have left still run to their ends. After that nothing is left.
    sleep(Duration::from_secs(60)).await;
    for guard in &guards {
        let stats = guard.stats();
        assert_eq!((stats.flights, stats.tasks), (0, 0), "{stats:?}");
    }
    assert!(store.is_empty());
    // The guards still work: one load is enough, and all nodes see its value.
    let before = origin.loads.load(Ordering::SeqCst);
    for guard in &guards {
        let origin = Arc::clone(&origin);
        let call = guard.get_or_load(("key", 0), move || load(origin, 0, Duration::ZERO, Script::Returns));
        call.await.expect("healed");
    }
    assert_eq!(origin.loads.load(Ordering::SeqCst), before + 1);
}

#[test]
fn any_order_of_calls_failures_and_invalidations_keeps_the_promises() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = seed.map_or(0..RUNS, |seed: u64| seed..seed + 1);
    // The panics are scripted, and thousands of their messages would hide a message that matters.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&"scripted panic") {
            hook(info);
        }
    }));
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(run(seed))));
        assert!(ran.is_ok(), "SEED={seed}");
    }
}
