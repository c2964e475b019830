//! Promise 1 on the in-memory store: one load, however many callers there are and whatever its outcome.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use stampede_guard::{Codec, ErrorKind, LoadError, MemoryStore, Policy, StampedeGuard};
use tokio::time::Instant;

use crate::support::gate::{Counter, Gate};
use crate::support::warnings::Warnings;

const LOAD: Duration = Duration::from_millis(200);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Guards that stand for replicas: each a separate node, all on one store.
fn replicas(n: usize) -> Vec<StampedeGuard> {
    let store = MemoryStore::new();
    (0..n).map(|_| StampedeGuard::new(store.clone())).collect()
}

/// S2.3: a waiter receives the value of the one load, and does not load.
#[tokio::test(start_paused = true)]
async fn callers_of_all_replicas_share_one_load() {
    let (guards, loads) = (replicas(4), Counter::default());
    let calls = (0..200).map(|caller| {
        let (guard, loads) = (guards[caller % 4].clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                tokio::time::sleep(LOAD).await;
                Ok::<_, String>(format!("by {caller}"))
            };
            guard.get_or_load("key", load).await
        }
    });
    let started = Instant::now();
    let values = join_all(calls).await;
    assert_eq!(loads.started(), 1);
    let first = values[0].as_ref().expect("loaded");
    assert!(values.iter().all(|value| value.as_ref().ok() == Some(first)));
    assert!(started.elapsed() < LOAD + Duration::from_millis(20), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn different_keys_load_side_by_side() {
    let (guards, loads) = (replicas(2), Counter::default());
    let calls = (0..400).map(|caller| {
        let (guard, loads) = (guards[caller % 2].clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                tokio::time::sleep(LOAD).await;
                Ok::<_, String>(caller / 4)
            };
            guard.get_or_load(("item", caller / 4), load).await
        }
    });
    let started = Instant::now();
    for (caller, value) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(value.expect("loaded"), caller / 4);
    }
    assert_eq!((loads.started(), loads.most_at_once()), (100, 100));
    assert!(started.elapsed() < LOAD * 2);
}

/// S2.13
#[tokio::test(start_paused = true)]
async fn a_failing_loader_runs_once_per_wave_and_all_callers_fail_at_once() {
    let (guards, loads) = (replicas(4), Counter::default());
    for wave in 1..=2 {
        let calls = (0..40).map(|caller| {
            let (guard, loads) = (guards[caller % 4].clone(), loads.clone());
            async move {
                let load = move || async move {
                    let _running = loads.start();
                    tokio::time::sleep(LOAD).await;
                    Err::<u8, _>("no route".to_owned())
                };
                guard.get_or_load("key", load).await.expect_err("fails")
            }
        });
        let started = Instant::now();
        let errors = join_all(calls).await;
        assert_eq!(loads.started(), wave);
        assert!(started.elapsed() < LOAD + Duration::from_millis(20), "{:?}", started.elapsed());
        // Callers in the leader's process share the error itself; others get its text.
        let local: Vec<_> = errors.iter().filter_map(LoadError::loader).collect();
        assert_eq!(local.len(), 10);
        assert!(local.iter().all(|error| std::ptr::eq(*error, local[0])));
        for error in errors {
            assert!(error.to_string().ends_with("no route"), "{error}");
        }
    }
}

/// Regression: two processes with different codecs loaded each other's values anew for ever.
#[tokio::test(start_paused = true)]
async fn processes_with_different_codecs_read_each_others_values() {
    let (store, loads) = (MemoryStore::new(), Counter::default());
    let guards = [Codec::MessagePack, Codec::Json].map(|codec| {
        let policy = Policy::builder().codec(codec).build().expect("valid");
        StampedeGuard::builder(store.clone()).policy(policy).build().expect("valid")
    });
    for first in [0, 1] {
        for caller in 0..60 {
            let loads = loads.clone();
            let load = move || async move {
                let _running = loads.start();
                Ok::<_, String>(Some("text".to_owned()))
            };
            let guard = &guards[(first + caller) % 2];
            let value = guard.get_or_load(("key", first), load).await.expect("loaded");
            assert_eq!(value.as_deref(), Some("text"));
        }
        assert_eq!(loads.started(), 1 + first);
    }
    assert_eq!(guards.map(|guard| guard.stats().unreadable), [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_replayed_to_newcomers_only_for_error_for() {
    let store = MemoryStore::new();
    let policy = Policy::builder().error_for(secs(3)).build().expect("valid");
    let (one, other) = (StampedeGuard::new(store.clone()).with_policy(policy), StampedeGuard::new(store));
    let loads = Counter::default();
    let fail = |guard: &StampedeGuard| {
        let (guard, loads) = (guard.clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                Err::<u8, _>("down".to_owned())
            };
            guard.get_or_load("key", load).await.expect_err("fails")
        }
    };
    assert!(!fail(&one).await.is_remote());
    tokio::time::advance(secs(2)).await;
    assert!(fail(&other).await.is_remote());
    assert_eq!(loads.started(), 1);
    tokio::time::advance(secs(2)).await;
    assert!(!fail(&other).await.is_remote());
    assert_eq!(loads.started(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_uncacheable_value_never_queues_its_waiters() {
    let policy = Policy::builder().max_body(100).build().expect("valid");
    let guards: Vec<_> = replicas(4).iter().map(|guard| guard.with_policy(policy.clone())).collect();
    let loads = Counter::default();
    let call = |caller: usize| {
        let (guard, loads) = (guards[caller % 4].clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                tokio::time::sleep(LOAD).await;
                Ok::<_, String>(Bytes::from(vec![caller as u8; 101]))
            };
            assert_eq!(guard.get_or_load("key", load).await.expect("loaded")[0], caller as u8);
        }
    };
    let started = Instant::now();
    join_all((0..40).map(call)).await;
    // The waiters learn that the value is uncacheable when the first load ends, and then all of them load at once.
    assert_eq!((loads.started(), loads.most_at_once()), (40, 39));
    assert!(started.elapsed() < LOAD * 2 + Duration::from_millis(50), "{:?}", started.elapsed());
    // As long as the store knows that it is uncacheable, new callers do not wait at all.
    let started = Instant::now();
    join_all((0..40).map(call)).await;
    assert_eq!((loads.started(), loads.most_at_once()), (80, 40));
    assert!(started.elapsed() < LOAD + Duration::from_millis(50), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_resource_that_becomes_cacheable_is_shared_again() {
    let guard =
        StampedeGuard::in_memory().with_policy(Policy::builder().max_body(100).build().expect("valid"));
    let loads = Counter::default();
    let call = |len: usize| {
        let (guard, loads) = (guard.clone(), loads.clone());
        async move {
            let load = move || async move {
                let _running = loads.start();
                Ok::<_, String>(Bytes::from(vec![0; len]))
            };
            guard.get_or_load("key", load).await.expect("loaded").len()
        }
    };
    assert_eq!(call(101).await, 101);
    assert_eq!(call(10).await, 10);
    assert_eq!(call(20).await, 10, "the healed entry is a hit");
    assert_eq!(loads.started(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_value_is_loaded_again_when_it_is_no_longer_fresh() {
    let policy = Policy::builder().fresh_for(secs(10)).ttl_jitter(0.0).build().expect("valid");
    let (guard, loads) = (StampedeGuard::in_memory().with_policy(policy), Counter::default());
    for (advance, expected) in [(0, 1), (9, 1), (2, 2)] {
        tokio::time::advance(secs(advance)).await;
        let loads_here = loads.clone();
        let load = move || async move {
            let _running = loads_here.start();
            Ok::<_, String>(())
        };
        guard.get_or_load("key", load).await.expect("loaded");
        assert_eq!(loads.started(), expected);
    }
}

/// S2.17
#[tokio::test]
async fn none_unit_and_false_are_values() {
    let guard = StampedeGuard::in_memory();
    for expected in [None, Some(1)] {
        let _: Option<u8> =
            guard.get_or_load("none", move || async move { Ok::<_, String>(expected) }).await.expect("ok");
    }
    assert_eq!(guard.get::<Option<u8>>("none").await.expect("store"), Some(None));
    assert_eq!(guard.stats().loads, 1);
}

#[tokio::test]
async fn a_stored_value_of_another_type_is_a_miss_and_is_replaced() {
    let guard = StampedeGuard::in_memory();
    guard.insert("key", &"text".to_owned()).await.expect("stored");
    let number: u64 = guard.get_or_load("key", || async { Ok::<_, String>(7) }).await.expect("loaded");
    assert_eq!(number, 7);
    assert_eq!(guard.get::<u64>("key").await.expect("store"), Some(7));
    assert_eq!(guard.get::<String>("key").await.expect("store"), None);
}

#[tokio::test(start_paused = true)]
async fn callers_of_different_types_on_one_flight_each_get_their_own() {
    let (guard, gate) = (StampedeGuard::in_memory(), Gate::closed());
    let text = {
        let (guard, gate) = (guard.clone(), gate.clone());
        tokio::spawn(async move {
            let load = move || async move {
                gate.pass().await;
                Ok::<_, String>("text".to_owned())
            };
            guard.get_or_load("key", load).await
        })
    };
    tokio::task::yield_now().await;
    let number = tokio::spawn({
        let guard = guard.clone();
        async move { guard.get_or_load("key", || async { Ok::<_, std::io::Error>(7u64) }).await }
    });
    tokio::task::yield_now().await;
    gate.open();
    assert_eq!(text.await.expect("joined").expect("loaded"), "text");
    assert_eq!(number.await.expect("joined").expect("loaded"), 7);
}

#[tokio::test]
async fn an_empty_key_is_an_error_at_the_call() {
    let guard = StampedeGuard::in_memory();
    let error = guard.get_or_load("", || async { Ok::<u8, String>(1) }).await.expect_err("empty");
    assert_eq!(error.guard().map(stampede_guard::Error::kind), Some(ErrorKind::InvalidKey));
    assert_eq!(guard.invalidate("").await.expect_err("empty").kind(), ErrorKind::InvalidKey);
}

#[tokio::test]
async fn errors_work_with_the_question_mark() {
    async fn anyhow_error(guard: &StampedeGuard) -> anyhow::Result<u8> {
        Ok(guard.get_or_load("a", || async { Err::<u8, _>(anyhow::anyhow!("first")) }).await?)
    }
    async fn boxed(guard: &StampedeGuard) -> Result<u8, Box<dyn std::error::Error>> {
        Ok(guard.get_or_load("b", || async { Err::<u8, _>("second".to_owned()) }).await?)
    }
    let guard = StampedeGuard::in_memory();
    assert_eq!(format!("{:#}", anyhow_error(&guard).await.expect_err("fails")), "the load failed: first");
    assert_eq!(boxed(&guard).await.expect_err("fails").to_string(), "the load failed: second");
}

#[tokio::test(start_paused = true)]
async fn beyond_max_flights_callers_load_for_themselves_and_are_recorded() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = StampedeGuard::builder(MemoryStore::new()).max_flights(3).build().expect("valid");
    let calls = (0..10).map(|key| {
        let guard = guard.clone();
        async move {
            let load = move || async move {
                tokio::time::sleep(LOAD).await;
                Ok::<_, String>(key)
            };
            guard.get_or_load(("key", key), load).await.expect("loaded")
        }
    });
    assert_eq!(join_all(calls).await, (0..10).collect::<Vec<_>>());
    let stats = guard.stats();
    assert_eq!((stats.led, stats.bypassed, stats.flights, stats.tasks), (3, 7, 0, 0));
    assert_eq!(stats.overloaded, 7);
    assert_eq!(warnings.about("max_flights").len(), 1, "{warnings:?}");
}

#[tokio::test(start_paused = true)]
async fn stored_lifetimes_are_spread() {
    let store = MemoryStore::new();
    let guard = StampedeGuard::new(store.clone());
    for key in 0..200 {
        guard.insert(("key", key), &key).await.expect("stored");
    }
    // The value is fresh for 60 s less up to 10 % of jitter.
    tokio::time::advance(Duration::from_millis(53_900)).await;
    assert_eq!(store.len(), 200);
    tokio::time::advance(secs(3)).await;
    let left = store.len();
    assert!((50..150).contains(&left), "{left} of 200 are left half-way through the spread");
    tokio::time::advance(secs(4)).await;
    assert!(store.is_empty());
}

#[test]
fn a_guard_is_made_and_dropped_outside_a_runtime() {
    fn assert_handle<T: Clone + Send + Sync + std::fmt::Debug + 'static>() {}
    assert_handle::<StampedeGuard>();
    let guard = StampedeGuard::in_memory();
    assert!(format!("{guard:?}").contains("StampedeGuard"));
    drop(guard);
    #[cfg(feature = "redis")]
    drop(StampedeGuard::new(redis::Client::open("redis://127.0.0.1:1/").expect("an address")));
}

#[tokio::test]
async fn neither_value_nor_error_need_be_clone() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct NotClone(u8);
    let guard = StampedeGuard::in_memory();
    // `std::io::Error` is not `Clone` either.
    let value: NotClone =
        guard.get_or_load("key", || async { Ok::<_, std::io::Error>(NotClone(1)) }).await.expect("ok");
    assert_eq!(value.0, 1);
}
