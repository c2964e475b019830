//! A loader that panics, or that requests its own key: its own caller receives an error, and the other callers receive another load's
//! value.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use stampede_guard::{ErrorKind, LoadError, MemoryStore, Policy, StampedeGuard};

use crate::support::gate::Counter;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A loader that panics in its first `panics` runs, counted over all callers.
fn fragile(
    loads: &Counter,
    panics: usize,
) -> impl FnOnce() -> std::pin::Pin<Box<dyn Future<Output = Result<u8, String>> + Send>> + Send + use<> {
    let loads = loads.clone();
    move || {
        Box::pin(async move {
            let _running = loads.start();
            let this = loads.started();
            tokio::time::sleep(ms(100)).await;
            assert!(this > panics, "scripted panic {this}");
            Ok(1)
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_panicking_leader_gets_the_panic_and_one_waiter_takes_over() {
    let (guard, loads) = (StampedeGuard::in_memory(), Counter::default());
    let values = join_all((0..50).map(|_| guard.get_or_load("key", fragile(&loads, 1)))).await;
    let panicked: Vec<_> = values.iter().filter_map(|value| value.as_ref().err()).collect();
    assert_eq!(panicked.len(), 1);
    assert!(
        matches!(panicked[0], LoadError::Panicked(text) if text.contains("scripted panic 1")),
        "{panicked:?}"
    );
    assert_eq!(loads.started(), 2);
    assert_eq!(guard.stats().takeovers, 1);
}

/// Regression: the caller received the panic, although there was an older value that could stand in.
#[tokio::test(start_paused = true)]
async fn an_older_value_stands_in_for_a_panicked_load() {
    let policy = Policy::builder().stale_if_error(Duration::from_secs(60)).build().expect("valid");
    let (guard, loads) = (StampedeGuard::in_memory().with_policy(policy), Counter::default());
    guard.insert("key", &7_u8).await.expect("stored");
    guard.expire("key").await.expect("confirmed");
    let value = guard.get_or_load("key", fragile(&loads, 1)).await;
    assert!(matches!(value, Ok(7)), "{value:?}");
    assert_eq!(guard.stats().stand_ins, 1);
    let value = guard.get_or_load("key", fragile(&loads, 1)).await;
    assert!(matches!(value, Ok(1)), "the next one tries at once: {value:?}");
}

#[tokio::test(start_paused = true)]
async fn a_panic_without_local_waiters_hands_over_to_another_process() {
    let store = MemoryStore::new();
    let guards = [StampedeGuard::new(store.clone()), StampedeGuard::new(store)];
    let loads = Counter::default();
    let leader = tokio::spawn({
        let (guard, load) = (guards[0].clone(), fragile(&loads, 1));
        async move { guard.get_or_load("key", load).await }
    });
    loads.reach(1).await;
    let started = tokio::time::Instant::now();
    let values = join_all((0..10).map(|_| guards[1].get_or_load("key", fragile(&loads, 1)))).await;
    assert!(values.iter().all(|value| matches!(value, Ok(1))), "{values:?}");
    assert!(matches!(leader.await.expect("joined"), Err(LoadError::Panicked(_))));
    assert_eq!(loads.started(), 2);
    assert_eq!((guards[0].stats().takeovers, guards[1].stats().takeovers), (1, 0));
    assert!(started.elapsed() < ms(250), "no caller waited for the lease: {:?}", started.elapsed());
}

/// The runbook reads the counter `takeovers` as "another caller's loader has continued", so it must not count here.
#[tokio::test(start_paused = true)]
async fn a_panic_of_a_lone_caller_is_no_takeover() {
    let (guard, loads) = (StampedeGuard::in_memory(), Counter::default());
    guard.get_or_load("key", fragile(&loads, 1)).await.expect_err("panicked");
    assert_eq!(guard.stats().takeovers, 0);
    // The client leaves before the loader panics.
    let load = guard.get_or_load("key", fragile(&loads, 2));
    tokio::time::timeout(ms(50), load).await.expect_err("left");
    tokio::time::sleep(ms(100)).await;
    assert_eq!((loads.started(), guard.stats().takeovers), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn takeovers_are_bounded_and_then_the_wave_fails() {
    let (guard, loads) = (StampedeGuard::in_memory(), Counter::default());
    let values = join_all((0..50).map(|_| guard.get_or_load("key", fragile(&loads, usize::MAX - 1)))).await;
    assert!(values.iter().all(|value| matches!(value, Err(LoadError::Panicked(_)))), "{values:?}");
    assert_eq!(loads.started(), 4, "the first and three takeovers");
    // The next callers have the full number of takeovers again.
    assert!(guard.get_or_load("key", fragile(&loads, 4)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn takeovers_are_bounded_across_processes() {
    let store = MemoryStore::new();
    let guards: Vec<_> = (0..8).map(|_| StampedeGuard::new(store.clone())).collect();
    let loads = Counter::default();
    let values =
        join_all(guards.iter().map(|guard| guard.get_or_load("key", fragile(&loads, usize::MAX - 1)))).await;
    assert!(values.iter().all(|value| matches!(value, Err(LoadError::Panicked(_)))), "{values:?}");
    assert_eq!(loads.started(), 4, "the first and three takeovers");
}

#[tokio::test]
async fn a_load_that_asks_for_its_own_key_is_an_error_that_says_so() {
    let guard = StampedeGuard::in_memory();
    let inner = guard.clone();
    let load = move || async move { inner.get_or_load("key", || async { Ok::<u8, String>(1) }).await };
    let error = guard.get_or_load("key", load).await.expect_err("re-entrant");
    let inner = error.loader().expect("the loader's own error").guard().expect("the guard's").clone();
    assert_eq!(inner.kind(), ErrorKind::Reentrant);
    assert!(inner.to_string().contains("asked for the same key"), "{inner}");
    assert!(!error.to_string().contains("default:key"), "no key text: {error}");
}

#[tokio::test]
async fn a_load_may_ask_for_other_keys_but_not_for_the_keys_of_its_outer_loads() {
    let guard = StampedeGuard::in_memory();
    let (middle, innermost) = (guard.clone(), guard.clone());
    let outer = move || async move {
        let load = move || async move {
            match innermost.get_or_load("outer", || async { Ok::<u8, String>(0) }).await {
                Err(LoadError::Guard(error)) if error.kind() == ErrorKind::Reentrant => Ok::<u8, String>(3),
                other => panic!("{other:?}"),
            }
        };
        middle.get_or_load("inner", load).await
    };
    assert_eq!(guard.get_or_load("outer", outer).await.expect("loaded"), 3);
}

/// `get_or_load` documents this under "Panics".
#[test]
fn outside_a_tokio_runtime_a_load_panics_and_says_so() {
    let guard = StampedeGuard::in_memory();
    let call = || guard.get_or_load("key", || async { Ok::<u8, String>(1) }).now_or_never();
    let panic = std::panic::catch_unwind(AssertUnwindSafe(call)).expect_err("no runtime");
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    let text = owned.or_else(|| panic.downcast_ref::<&str>().copied());
    assert!(text.is_some_and(|text| text.contains("Tokio")), "{text:?}");
}
