//! Nodes that ask an origin for more than it can do, under an adaptive limit of loads: a separate world for one seed of 256, without faults
//! of commands, with its own random stream.
//!
//! No more loads run than the limit allows, also while a node dies with its permits. The limit moves by at most one step in half a second;
//! it does not move because a single node's loads fail, nor while no load waits for a permit. In the end all permits are free again (I16).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::overload::Origin;
use crate::key::CacheKey;
use crate::lock::{Locks, Semaphore};
use crate::sync::lock;
use crate::testing::{ChaosStore, Fault};
use crate::{AdaptiveLoads, OnOverload, Policy, StampedeGuard};

/// Sets this world's random stream, which differs from that of the plans.
const STREAM: u64 = 0x7375_7267_6573;
const LEAST: u32 = 4;
const START: u32 = 10;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// What the fleet did, as the origin and an observer of the limit see it.
#[derive(Default)]
struct Seen {
    running: AtomicU32,
    /// The greatest limit that was observed during the last second.
    limit: AtomicU32,
    samples: Mutex<Vec<(Instant, u32)>>,
    violations: Mutex<Vec<String>>,
}

impl Seen {
    fn violate(&self, text: String) {
        lock(&self.violations).push(format!("I16: {text}"));
    }

    async fn observe(&self, semaphore: &Semaphore) {
        loop {
            if let Ok(limit) = semaphore.capacity().await {
                let samples = &mut *lock(&self.samples);
                samples.push((Instant::now(), limit));
                let recent = samples.iter().rev().take_while(|(at, _)| at.elapsed() < ms(1_000));
                let greatest = recent.map(|(_, limit)| *limit).max().unwrap_or(START);
                self.limit.store(greatest, Ordering::Relaxed);
            }
            sleep(ms(10)).await;
        }
    }

    fn steps_are_single(&self) {
        let samples = lock(&self.samples);
        let changes: Vec<_> = samples.windows(2).filter(|pair| pair[0].1 != pair[1].1).collect();
        for change in &changes {
            let (before, after) = (change[0].1, change[1].1);
            if after > before * 3 / 2 + 1 || after + 1 < before * 3 / 5 {
                self.violate(format!("the limit went from {before} to {after}"));
            }
        }
        for pair in changes.windows(2) {
            let gap = pair[1][1].0 - pair[0][1].0;
            if gap < ms(450) {
                self.violate(format!("two steps of the limit within {gap:?}"));
            }
        }
    }
}

/// Runs the seed's world of surges and returns its violations.
pub(super) async fn violations(seed: u64) -> Vec<String> {
    let seed = seed ^ STREAM;
    let (chaos, mut random) = (ChaosStore::new(seed), Rng::with_seed(seed));
    chaos.latency(ms(1), ms(random.u64(2..=8)));
    for fault in [Fault::WakeLost, Fault::WakeTwice] {
        chaos.inject(fault, if random.bool() { 0.02 } else { 0.0 });
    }
    let adaptive = AdaptiveLoads::new().name("db").start(START).min(LEAST).max(60);
    let policy = Policy::builder().adaptive_loads(adaptive).permit_timeout(ms(2_000), OnOverload::Shed);
    let policy = policy.build().expect("a valid policy");
    let nodes = random.usize(3..=4);
    let replicas: Vec<_> = (0..nodes).map(|_| chaos.replica()).collect();
    let guard = |store| StampedeGuard::builder(store).policy(policy.clone()).build().expect("a guard");
    let guards: Vec<_> = replicas.iter().cloned().map(guard).collect();
    let observer = guard(chaos.replica());
    let locks = Locks::of(observer.parts().0);
    let semaphore = locks.semaphore(CacheKey::reserved("loads:a:db"), START).build().expect("a semaphore");
    let (origin, seen) = (Origin::new(100.0), Arc::new(Seen::default()));
    seen.limit.store(START, Ordering::Relaxed);
    let (first_fails, dies) = (random.bool(), random.bool().then(|| random.u64(1_000..3_000)));

    let request = |node: usize, key: u64| {
        let (guard, origin, seen) = (guards[node].clone(), origin.clone(), Arc::clone(&seen));
        let fails = node == 0 && first_fails;
        let load = move || async move {
            let running = seen.running.fetch_add(1, Ordering::Relaxed) + 1;
            // The limit may have risen by a step since it was last observed.
            let most = seen.limit.load(Ordering::Relaxed) * 3 / 2 + 1;
            if running > most {
                seen.violate(format!("{running} loads at once under a limit of {most} at most"));
            }
            if !fails {
                origin.load(1.0).await;
            }
            seen.running.fetch_sub(1, Ordering::Relaxed);
            if fails { Err("refused".to_owned()) } else { Ok(key) }
        };
        async move { timeout(ms(2_000), guard.get_or_load(key, load)).await }
    };
    let surge = async {
        let (mut requests, began) = (JoinSet::new(), Instant::now());
        let mut key = 0;
        while began.elapsed() < ms(16_000) {
            let dead = dies.is_some_and(|after| began.elapsed() > ms(after));
            if dead {
                replicas[nodes - 1].kill();
            }
            // The last node is the one that dies, so it receives no more requests after its death.
            let node = random.usize(0..nodes - usize::from(dead));
            key += 1;
            requests.spawn(request(node, key));
            sleep(ms(5)).await;
        }
        requests.join_all().await;
        let mean = {
            let samples = lock(&seen.samples);
            let late =
                samples.iter().filter(|(at, _)| *at - began > ms(6_000)).map(|(_, limit)| f64::from(*limit));
            late.clone().sum::<f64>() / late.count() as f64
        };
        // The least of 231 runs was 6.0. A law that only falls ends at `LEAST`.
        if mean < 5.0 {
            seen.violate(format!("a limit of {mean} on average for an origin that does most with 25"));
        }
        // Afterwards the queue is empty, and the permits of the dead node are free again, one lease after its death.
        sleep(ms(3_000)).await;
        let before = semaphore.capacity().await;
        let callers = (0..3_u64).map(|caller| {
            let request = &request;
            async move {
                for call in 0..60 {
                    let _ = request(1, 1_000_000 * (caller + 1) + call).await;
                }
            }
        });
        join_all(callers).await;
        let (after, free) = (semaphore.capacity().await, semaphore.available_permits().await);
        match (before, after, free) {
            (Ok(before), Ok(after), Ok(free)) if before == after && free == after => {}
            all => seen.violate(format!("limit before, limit after, and permits after quiet loads: {all:?}")),
        }
    };
    tokio::select! {
        () = surge => {}
        () = seen.observe(&semaphore) => {}
    }
    seen.steps_are_single();
    std::mem::take(&mut *lock(&seen.violations))
}
