//! Promise 5: an invalidation wins over loads and reads that were in progress.

use std::time::Duration;

use futures_util::future::join_all;
use stampede_guard::{MemoryStore, StampedeGuard};

use crate::support::gate::{Counter, Gate};

fn load(
    gate: &Gate,
    value: u8,
) -> impl FnOnce() -> std::pin::Pin<Box<dyn Future<Output = Result<u8, String>> + Send>> + Send + use<> {
    let gate = gate.clone();
    move || {
        Box::pin(async move {
            gate.pass().await;
            Ok(value)
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_value_loaded_before_an_invalidation_is_neither_stored_nor_returned_to_later_callers() {
    let store = MemoryStore::new();
    let guards = [StampedeGuard::new(store.clone()), StampedeGuard::new(store)];
    for invalidating in 0..2 {
        let (old, new) = (Gate::closed(), Gate::closed());
        let first = tokio::spawn({
            let (guard, load) = (guards[0].clone(), load(&old, 1));
            async move { guard.get_or_load("key", load).await }
        });
        tokio::time::sleep(Duration::from_millis(1)).await;
        guards[invalidating].invalidate("key").await.expect("confirmed");
        tokio::time::sleep(Duration::from_millis(1)).await;

        let later: Vec<_> = guards
            .iter()
            .map(|guard| {
                let (guard, load) = (guard.clone(), load(&new, 2));
                tokio::spawn(async move { guard.get_or_load("key", load).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(1)).await;
        old.open();
        assert_eq!(first.await.expect("joined").expect("its own load"), 1);
        assert_eq!(guards[0].get::<u8>("key").await.expect("store"), None, "the older load was not stored");
        new.open();
        for value in later {
            assert_eq!(value.await.expect("joined").expect("loaded"), 2);
        }
        assert_eq!(guards[1].get::<u8>("key").await.expect("store"), Some(2));
        guards[0].invalidate("key").await.expect("confirmed");
    }
}

#[tokio::test(start_paused = true)]
async fn an_insert_during_a_load_stays() {
    let (guard, gate) = (StampedeGuard::in_memory(), Gate::closed());
    let first = tokio::spawn({
        let (guard, load) = (guard.clone(), load(&gate, 1));
        async move { guard.get_or_load("key", load).await }
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    guard.insert("key", &2u8).await.expect("stored");
    assert_eq!(guard.get_or_load("key", load(&gate, 3)).await.expect("hit"), 2);
    gate.open();
    assert_eq!(first.await.expect("joined").expect("its own load"), 1);
    assert_eq!(guard.get::<u8>("key").await.expect("store"), Some(2));
}

/// A caller whose load may be older than an invalidation asks again once, and then counts as earlier than the next load. So with
/// invalidations faster than loads, no caller waits for ever, and none loads alone.
#[tokio::test(start_paused = true)]
async fn under_invalidations_that_are_faster_than_loads_each_caller_asks_again_once() {
    let (store, loads) = (MemoryStore::new(), Counter::default());
    let guards = [StampedeGuard::new(store.clone()), StampedeGuard::new(store)];
    let calls = join_all((0..50).map(|_| {
        let loads = loads.clone();
        guards[0].get_or_load("key", move || async move {
            let _running = loads.start();
            tokio::time::sleep(Duration::from_millis(300)).await;
            Ok::<_, String>(loads.started())
        })
    }));
    let invalidations = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            guards[1].invalidate("key").await.expect("confirmed");
        }
    };
    let values = tokio::select! { values = calls => values, () = invalidations => unreachable!() };
    assert!(values.iter().all(Result::is_ok), "{values:?}");
    assert!(loads.started() <= 2, "{} loads", loads.started());
}
