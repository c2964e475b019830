//! [`ChaosStore`] in front of a real server: faults that a test injects between guard and server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use stampede_guard::testing::{ChaosStore, Fault, Replica};

use super::*;
use crate::support::probe::assert_nothing_left;

const LEASE: Duration = Duration::from_millis(1_600);

fn in_front_of(server: &RedisServer, seed: u64) -> ChaosStore<redis::Client> {
    ChaosStore::over(redis::Client::open(server.minimal_user()).expect("an address"), seed)
}

async fn replica(chaos: &ChaosStore<redis::Client>) -> (StampedeGuard, Replica) {
    let replica = chaos.replica();
    let guard = StampedeGuard::builder(replica.clone()).policy(lease_of(LEASE)).build().expect("valid");
    connects(&guard).await;
    (guard, replica)
}

/// Runs one load, with `fault` at its commit. Returns whether the value is stored afterwards.
async fn is_committed(fault: Fault) -> bool {
    let server = RedisServer::start();
    let chaos = in_front_of(&server, 1);
    let (guard, _) = replica(&chaos).await;
    let load = {
        let chaos = chaos.clone();
        move || async move {
            // The next command is the commit.
            chaos.once(fault);
            Ok::<_, String>(7)
        }
    };
    assert_eq!(guard.get_or_load("k", load).await.ok(), Some(7), "{fault}: the caller gets its load");
    // A ghost command may arrive up to three seconds after its deadline.
    settled(std::slice::from_ref(&guard)).await;
    assert_nothing_left(&server, SOON).await;
    assert_eq!(chaos.struck(fault), 1, "{fault}");
    let spared = StampedeGuard::new(chaos.store());
    spared.get::<u32>("k").await.expect("answered").is_some()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_fault_on_a_commit_decides_whether_the_value_is_stored() {
    for (fault, made) in [
        (Fault::ErrorBefore, false),
        (Fault::ErrorAfter, true),
        (Fault::BlackHole, false),
        (Fault::Ghost, false),
        (Fault::OutOfMemory, false),
        (Fault::ReadOnly, false),
    ] {
        assert_eq!(is_committed(fault).await, made, "{fault}");
    }
}

/// Two replicas share a load, with `fault` in the messages to the one that waits. Returns how much later than the load's end it was
/// answered.
async fn notified_after(fault: Fault) -> Duration {
    let server = RedisServer::start();
    let chaos = in_front_of(&server, 1);
    let ((leads, _), (waits, _)) = (replica(&chaos).await, replica(&chaos).await);
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leader = held_call(&leads, 1, &gate, &loads);
    loads.reach(1).await;
    let waiter = held_call(&waits, 2, &gate, &loads);
    queued(&server, "k", 1).await;
    chaos.once(fault);
    let opened = Instant::now();
    gate.open();
    assert_eq!(leader.await.expect("joined"), 1);
    assert_eq!(notified(waiter).await.expect("joined"), 1);
    let late = opened.elapsed();
    assert_eq!((loads.started(), chaos.struck(fault)), (1, 1), "{fault}");
    settled(&[leads, waits]).await;
    late
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_survive_lost_doubled_and_forged_wake_ups() {
    let late = notified_after(Fault::WakeLost).await;
    assert!(late > LEASE / 4, "without its message: {late:?}");
    notified_after(Fault::WakeTwice).await;
    notified_after(Fault::WakeForged).await;
}

/// One replica has the lease and is killed; the other one has none and is cut off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_of_a_server_are_cut_off_and_killed() {
    let server = RedisServer::start();
    let chaos = in_front_of(&server, 1);
    let ((dying, at), (cut, way)) = (replica(&chaos).await, replica(&chaos).await);
    let (living, _) = replica(&chaos).await;

    way.cut();
    assert_eq!(cut.health().commands, LinkState::Down);
    assert_eq!(answer(&cut, "k", 3).await, 3, "it loads for itself");
    assert_eq!(living.get::<u32>("k").await.expect("answered"), None);

    let (gate, loads) = (Gate::closed(), Counter::default());
    drop(held_call(&dying, 1, &gate, &loads));
    loads.reach(1).await;
    at.kill();
    let began = Instant::now();
    assert_eq!(answer(&living, "k", 2).await, 2);
    assert!(began.elapsed() <= LEASE + SLACK, "{:?}", began.elapsed());

    way.resume();
    assert_eq!(answer(&cut, "k", 3).await, 2, "it is back");
}

/// Under every fault all callers are answered. Afterwards one load is enough again, and nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_caller_is_answered_under_every_fault() {
    const ROUNDS: usize = 12;
    let server = RedisServer::start();
    let chaos = in_front_of(&server, 4);
    chaos.latency(ms(0), ms(4));
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(replica(&chaos).await.0);
    }
    for &fault in Fault::ON_ANY_STORE {
        chaos.inject(fault, 0.05);
    }
    let answered = Arc::<AtomicUsize>::default();
    let calls = (0..24).map(|caller: usize| {
        let (guard, answered) = (guards[caller % 3].clone(), Arc::clone(&answered));
        tokio::spawn(async move {
            for round in 0..ROUNDS {
                let load = || async {
                    tokio::time::sleep(ms(5)).await;
                    Ok::<_, String>(1)
                };
                let key = ("key", round, caller % 2);
                let answer = tokio::time::timeout(SOON, guard.get_or_load(key, load)).await;
                assert_eq!(answer.expect("no call hangs").ok(), Some(1));
                answered.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.expect("no panic");
    }
    assert_eq!(answered.load(Ordering::Relaxed), 24 * ROUNDS);
    let struck: u64 = Fault::ON_ANY_STORE.iter().map(|fault| chaos.struck(*fault)).sum();
    assert!(struck > 50, "{struck}");
    let elsewhere = Fault::ALL.iter().filter(|fault| !Fault::ON_ANY_STORE.contains(fault));
    assert!(elsewhere.clone().count() == 8 && elsewhere.into_iter().all(|fault| chaos.struck(*fault) == 0));

    chaos.calm();
    settled(&guards).await;
    // Faults that last (lost subscriptions, refused writes) end within a second, and ghost commands run within three.
    assert_nothing_left(&server, SOON).await;
    let loads = Counter::default();
    for guard in &guards {
        let loads = loads.clone();
        let load = move || async move {
            let _running = loads.start();
            Ok::<_, String>(2)
        };
        assert_eq!(guard.get_or_load("well", load).await.ok(), Some(2));
    }
    assert_eq!(loads.started(), 1);
}
