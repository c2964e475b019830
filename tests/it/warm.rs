//! Warm-ups, on the in-memory store with a paused clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(feature = "testing")]
use stampede_guard::testing::ChaosStore;
use stampede_guard::{MemoryStore, Policy, PolicyBuilder, StampedeGuard, Warmed};
use tokio::time::{Instant, sleep};

fn on(store: &MemoryStore, policy: PolicyBuilder) -> StampedeGuard {
    StampedeGuard::builder(store.clone()).policy(policy.build().expect("valid")).build().expect("valid")
}

/// Warms a thousand keys in groups of a hundred. Each group takes a second to load.
async fn warm(guard: &StampedeGuard, loads: &Arc<AtomicUsize>) -> Warmed {
    let loads = Arc::clone(loads);
    let load = move |keys: Vec<u64>| {
        assert!(keys.len() <= 100);
        loads.fetch_add(keys.len(), Ordering::Relaxed);
        async move {
            sleep(Duration::from_secs(1)).await;
            Ok::<_, &str>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>())
        }
    };
    guard.warm(0..1_000_u64, 100, load).await
}

#[tokio::test(start_paused = true)]
async fn replicas_share_the_work_and_load_each_key_once() {
    let (store, loads) = (MemoryStore::new(), Arc::default());
    let fleet: Vec<_> = (0..4).map(|_| on(&store, Policy::builder())).collect();
    let began = Instant::now();
    let warmed = futures_util::future::join_all(fleet.iter().map(|guard| warm(guard, &loads))).await;
    assert_eq!(loads.load(Ordering::Relaxed), 1_000);
    for warmed in &warmed {
        assert_eq!((warmed.stored + warmed.found, warmed.failed), (1_000, 0), "{warmed:?}");
    }
    assert_eq!(warmed.iter().map(|warmed| warmed.stored).sum::<u64>(), 1_000);
    assert!(began.elapsed() <= Duration::from_secs(10), "{:?}", began.elapsed());
    // A process that starts later loads nothing, because it finds what the fleet has stored.
    let again = warm(&on(&store, Policy::builder()), &loads).await;
    assert_eq!((again.stored, again.found, loads.load(Ordering::Relaxed)), (0, 1_000, 1_000));
}

#[tokio::test(start_paused = true)]
async fn a_warm_up_begins_only_while_a_permit_is_free() {
    let (store, loads) = (MemoryStore::new(), Arc::default());
    let guard = on(&store, Policy::builder().max_concurrent_loads(1));
    let live = tokio::spawn({
        let guard = guard.clone();
        async move {
            let load = || async {
                sleep(Duration::from_secs(3)).await;
                Ok::<_, &str>(())
            };
            guard.get_or_load("live", load).await
        }
    });
    sleep(Duration::from_millis(1)).await;
    let waits = tokio::spawn({
        let (guard, loads) = (guard.clone(), Arc::clone(&loads));
        async move { warm(&guard, &loads).await }
    });
    sleep(Duration::from_secs(2)).await;
    assert_eq!(loads.load(Ordering::Relaxed), 0, "the live load has the permit");
    live.await.expect("no panic").expect("loaded");
    assert_eq!(waits.await.expect("no panic").stored, 1_000);
}

#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn before_the_first_connection_a_warm_up_waits_for_the_store() {
    let (chaos, loads) = (ChaosStore::new(1), Arc::default());
    let replica = chaos.replica();
    replica.cut();
    let guard = StampedeGuard::new(replica.clone());
    let waits = tokio::spawn({
        let (guard, loads) = (guard.clone(), Arc::clone(&loads));
        async move { warm(&guard, &loads).await }
    });
    sleep(Duration::from_secs(20)).await;
    assert_eq!(loads.load(Ordering::Relaxed), 0, "nothing would be stored");
    replica.resume();
    assert_eq!(waits.await.expect("no panic").stored, 1_000);
    let stored = StampedeGuard::new(chaos.clone()).get_many::<u64, _>(0..1_000_u64).await;
    assert!(stored.into_iter().all(|found| found.is_ok_and(|found| found.is_some())));
}

#[tokio::test(start_paused = true)]
async fn failures_are_recorded_and_the_other_groups_continue() {
    let guard = on(&MemoryStore::new(), Policy::builder());
    let load = |keys: Vec<u64>| async move {
        if keys.contains(&3) {
            Err("no such table")
        } else {
            Ok(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>())
        }
    };
    let warmed = guard.warm(0..10_u64, 2, load).await;
    assert_eq!((warmed.stored, warmed.found, warmed.failed), (8, 0, 2));
    guard.shutdown(Duration::ZERO).await;
    let after = guard.warm(10..20_u64, 2, |_| async { Ok::<[(u64, u64); 0], &str>([]) }).await;
    assert_eq!((after.stored, after.failed), (0, 10), "a guard that is shut down warms nothing");
}

/// Regression: each row was reported as loaded, also if it was not stored.
#[tokio::test(start_paused = true)]
async fn only_stored_values_count_as_stored() {
    let (store, loads) = (MemoryStore::new(), Arc::default());
    let (off, trial) = (on(&store, Policy::builder()), on(&store, Policy::builder().shadow(true)));
    off.set_bypass(true);
    for guard in [off, trial] {
        let warmed = warm(&guard, &loads).await;
        assert_eq!((warmed.stored, warmed.bypassed), (0, 1_000), "{warmed:?}");
        assert_eq!(loads.load(Ordering::Relaxed), 0, "its loads would warm nothing");
    }
    // A number below 128 takes one byte.
    let warmed = warm(&on(&store, Policy::builder().max_body(1)), &loads).await;
    assert_eq!((warmed.stored, warmed.unstorable), (128, 872), "{warmed:?}");
}

#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn what_the_store_does_not_take_is_loaded_again() {
    use stampede_guard::testing::Fault;
    for (lost, expected) in [(1, (10, 0)), (TRIES, (0, 10))] {
        let chaos = ChaosStore::new(1);
        let guard = StampedeGuard::new(chaos.replica());
        let (full, tries) = (chaos.clone(), Arc::new(AtomicUsize::new(0)));
        let load = move |keys: Vec<u64>| {
            let (full, tries) = (full.clone(), Arc::clone(&tries));
            async move {
                match tries.fetch_add(1, Ordering::Relaxed) < lost {
                    true => full.inject(Fault::OutOfMemory, 1.0),
                    false => full.calm(),
                }
                Ok::<_, &str>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>())
            }
        };
        let warmed = guard.warm(0..10_u64, 10, load).await;
        assert_eq!((warmed.stored, warmed.unconfirmed), expected, "lost: {lost}, {warmed:?}");
    }
}

/// How many times a warm-up tries to load a key.
#[cfg(feature = "testing")]
const TRIES: usize = 3;
