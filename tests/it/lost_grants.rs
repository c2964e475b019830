//! Waiters for locks whose message is lost, arrives twice, or is forged.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::lock::{Locks, Wait};
use stampede_guard::testing::{ChaosStore, Fault};
use tokio::time::Instant;

const TTL: Duration = Duration::from_secs(2);

fn chaos(seed: u64) -> ChaosStore {
    let chaos = ChaosStore::new(seed);
    chaos.latency(Duration::from_millis(1), Duration::from_millis(3));
    chaos
}

/// Counts the holder while it has the lock. At most `most` may have it at once.
async fn has_it(holders: &AtomicUsize, most: usize) {
    let before = holders.fetch_add(1, Ordering::SeqCst);
    assert!(before < most, "{before} have it");
    tokio::time::sleep(Duration::from_millis(5)).await;
    holders.fetch_sub(1, Ordering::SeqCst);
}

/// The lock is granted to the waiter, and the message is lost. The waiter asks when the holder's TTL would have ended, and not later than
/// that.
#[tokio::test(start_paused = true)]
async fn a_lost_grant_costs_the_rest_of_the_holders_ttl() {
    let chaos = chaos(1);
    let [holder, waiter] = [(); 2].map(|()| Locks::new(chaos.clone()));
    let [held, contended] = [&holder, &waiter].map(|locks| locks.mutex("m").ttl(TTL).build().expect("valid"));
    let mut guard = held.lock().await.expect("free");
    let waiting = tokio::spawn(async move {
        let mut guard = contended.lock().await.expect("its turn comes");
        let had_it = Instant::now();
        guard.unlock().await.expect("answered");
        had_it
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    chaos.once(Fault::WakeLost);
    let unlocked = Instant::now();
    guard.unlock().await.expect("answered");
    let had_it = waiting.await.expect("joined");
    assert_eq!(chaos.struck(Fault::WakeLost), 1);
    let late = had_it - unlocked;
    assert!(late > TTL / 2 && late < TTL, "{late:?}");
}

/// Although messages are lost, repeated and forged, each waiter has its turn, and there are never too many holders.
#[tokio::test(start_paused = true)]
async fn every_waiter_has_its_turn_whatever_messages_are_lost() {
    const FAULTS: [(Fault, f64); 4] = [
        (Fault::WakeLost, 0.2),
        (Fault::Unreachable, 0.02),
        (Fault::WakeTwice, 0.3),
        (Fault::WakeForged, 0.1),
    ];
    let mut struck = [0; FAULTS.len()];
    for seed in 0..20 {
        let chaos = chaos(seed);
        for (fault, chance) in FAULTS {
            chaos.inject(fault, chance);
        }
        let (holders, users) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let turns = (0..4).flat_map(|_| {
            let locks = Locks::new(chaos.clone());
            let (holders, users) = (&holders, &users);
            (0..3).map(move |_| {
                let mutex = locks.mutex("m").ttl(TTL).acquire_timeout(TTL * 100).build().expect("valid");
                let semaphore = locks.semaphore("s", 2).lease(TTL).build().expect("valid");
                let (holders, users) = (Arc::clone(holders), Arc::clone(users));
                tokio::spawn(async move {
                    for _ in 0..5 {
                        let mut guard = mutex.lock().await.expect("its turn comes");
                        has_it(&holders, 1).await;
                        guard.unlock().await.expect("answered");
                        let permit = semaphore.acquire(Wait::For(TTL * 100)).await.expect("answered");
                        let mut permit = permit.expect("its turn comes");
                        has_it(&users, 2).await;
                        permit.release().await.expect("answered");
                    }
                })
            })
        });
        let turns: Vec<_> = turns.collect();
        for turn in tokio::time::timeout(TTL * 200, join_all(turns)).await.expect("no waiter hangs") {
            turn.unwrap_or_else(|error| panic!("SEED={seed}: {error}"));
        }
        for (sum, (fault, _)) in struck.iter_mut().zip(FAULTS) {
            *sum += chaos.struck(fault);
        }
    }
    assert!(struck.iter().all(|struck| *struck > 100), "{struck:?}");
}
