//! Nodes that ask for many keys at once, at a server that executes one command after the other: a separate world for one seed of eight,
//! without faults, with its own random stream.
//!
//! Each key is loaded once, every value is stored, and hits of another node are not lost (I15).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::sleep;

use crate::testing::ChaosStore;
use crate::{Policy, StampedeGuard};

/// Sets this world's random stream, which differs from that of the plans.
const STREAM: u64 = 0x6372_6f77_6473;

/// Runs the seed's world of bulk loads and returns its violations.
pub(super) async fn violations(seed: u64) -> Vec<String> {
    let seed = seed ^ STREAM;
    let (chaos, mut random) = (ChaosStore::new(seed), Rng::with_seed(seed));
    let (nodes, keys) = (random.usize(2..=4), random.u64(60..=150));
    let builder = Policy::builder().tags(random.bool().then_some("all"));
    let keeps = if random.bool() { Duration::MAX } else { Duration::ZERO };
    let policy = builder.local_for(keeps).build().expect("a valid policy");
    let guard = || StampedeGuard::builder(chaos.replica()).policy(policy.clone()).build().expect("a guard");
    let (guards, other): (Vec<_>, _) = ((0..nodes).map(|_| guard()).collect(), guard());
    other.insert("hot", &u64::MAX).await.expect("stored");
    // All commands together take the server many times as long as the timeout of one command.
    chaos.command_time(Duration::from_micros(random.u64(500..=1_000)));
    let warms = random.bool();
    let loads = Arc::new(AtomicU64::new(0));
    let calls = guards.iter().map(async |guard| {
        let loads = Arc::clone(&loads);
        let load = move |keys: Vec<u64>| {
            loads.fetch_add(keys.len() as u64, Ordering::Relaxed);
            async move { Ok::<_, String>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>()) }
        };
        if warms {
            let warmed = guard.warm(0..keys, 80, load).await;
            return warmed.stored + warmed.found;
        }
        let answers = guard.get_or_load_many(0..keys, load).await;
        answers.iter().filter(|answer| matches!(answer, Ok(Some(_)))).count() as u64
    });
    let lost = Rc::new(Cell::new(0));
    let hot = async {
        loop {
            let hit = other.get_or_load("hot", || async { Ok::<_, String>(0_u64) }).await;
            lost.set(lost.get() + u64::from(!matches!(hit, Ok(u64::MAX))));
            sleep(Duration::from_millis(2)).await;
        }
    };
    let answered = tokio::select! {
        answered = join_all(calls) => answered,
        () = hot => Vec::new(),
    };
    chaos.command_time(Duration::ZERO);
    let stored = other.get_many::<u64, _>(0..keys).await;
    let stored = stored.into_iter().filter(|found| matches!(found, Ok(Some(_)))).count() as u64;
    let seen = (answered, loads.load(Ordering::Relaxed), stored, lost.get());
    let expected = (vec![keys; nodes], keys, keys, 0);
    if seen == expected {
        return Vec::new();
    }
    vec![format!(
        "I15: {nodes} nodes, {keys} keys: answers, loads, stored values, lost hits {seen:?}, not {expected:?}"
    )]
}
