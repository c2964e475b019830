//! A node whose unconfirmed invalidations were replaced by one invalidation of everything: a separate world for one seed of eight, with its
//! own random stream.
//!
//! Once the store has confirmed that invalidation, the node serves nothing older than its invalidations (I3), and immediately one load of a
//! key is enough again (I12).

use std::time::Duration;

use fastrand::Rng;
use tokio::time::{sleep, timeout};

use crate::testing::{ChaosStore, Origin};
use crate::{Policy, StampedeGuard};

/// Sets this world's random stream, which differs from that of the plans.
const STREAM: u64 = 0x6f76_6572_666c;
const KEYS: u64 = 5;

async fn ask(guard: &StampedeGuard, origin: &Origin, key: u64) -> Option<u64> {
    let origin = origin.clone();
    guard.get_or_load(("k", key), move || async move { origin.load(key).await }).await.ok()
}

/// Runs the seed's world of overflows and returns its violations.
pub(super) async fn violations(seed: u64) -> Vec<String> {
    let seed = seed ^ STREAM;
    let (chaos, mut random) = (ChaosStore::new(seed), Rng::with_seed(seed));
    let mut ms = |least: u64, most: u64| Duration::from_millis(random.u64(least..=most));
    chaos.latency(Duration::from_millis(1), ms(1, 8));
    let (load_timeout, patience, later) = (ms(3_000, 8_000), ms(1, 100), ms(0, 500));
    let most_unsent = random.usize(1..=2);
    let policy = Policy::builder().load_timeout(load_timeout).invalidate_all(random.bool());
    let policy = policy.fresh_for(Duration::from_secs(600)).build().expect("a valid policy");
    let replica = chaos.replica();
    let builder = StampedeGuard::builder(replica.clone()).policy(policy);
    let guard = builder.most_kept_invalidations(most_unsent).build().expect("a guard");
    let (origin, mut violations) = (Origin::new(), Vec::new());
    // The last key is first loaded and stored after the outage.
    for key in 0..KEYS - 1 {
        ask(&guard, &origin, key).await;
    }
    replica.cut();
    // One key more than the node retains. The values of other keys are older than the invalidation of everything, but current.
    let changed = most_unsent as u64 + 1;
    for key in 0..changed {
        origin.change(key);
        // The caller leaves before its invalidation is confirmed.
        let _ = timeout(patience, guard.invalidate(("k", key))).await;
    }
    replica.resume();
    while guard.stats().kept_invalidations > 0 {
        sleep(Duration::from_millis(10)).await;
    }
    sleep(later).await;
    for key in 0..KEYS {
        let (before, current) = (origin.loads(key), origin.version(key));
        for _ in 0..4 {
            let answer = ask(&guard, &origin, key).await;
            if answer.is_none_or(|version| version < current) {
                violations
                    .push(format!("I3: the node gives {answer:?} of key {key}, invalidated at {current}"));
            }
        }
        let loads = origin.loads(key) - before;
        if loads > 1 {
            violations.push(format!("I12: {loads} loads of key {key} after the invalidation of everything"));
        }
    }
    violations
}
