//! What a caller reads of a load that failed: the truth about where and when, and the causes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join;
use futures_util::poll;
use stampede_guard::{ErrorKind, LoadError, MemoryStore, Policy, StampedeGuard};

/// Everybody who is told of a failure by its text was told of "another process".
#[tokio::test(start_paused = true)]
async fn a_text_does_not_claim_another_process_where_there_is_none() {
    let policy = Policy::builder().error_for(Duration::from_secs(3)).build().expect("valid");
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let (fail, fails) = tokio::sync::oneshot::channel::<()>();
    let mut led = Box::pin(guard.get_or_load("key", || async move {
        let _ = fails.await;
        Err::<u8, _>(7_u64)
    }));
    assert!(poll!(&mut led).is_pending());
    let mut told = Box::pin(guard.get_or_load("key", || async { Err::<u8, _>("mine".to_owned()) }));
    assert!(poll!(&mut told).is_pending());
    tokio::task::yield_now().await;
    fail.send(()).expect("the load runs");
    let (led, told) = join(led, told).await;
    assert_eq!(led.expect_err("failed").to_string(), "the load failed: 7");
    let later = guard.get_or_load("key", || async { Err::<u8, _>("mine".to_owned()) }).await;
    for told in [told, later] {
        let told = told.expect_err("failed");
        assert!(told.is_remote(), "{told:?}");
        assert_eq!(told.to_string(), "another caller's load failed: 7");
    }
}

/// Of `no user` because of `no route` the others were told `no user`.
#[tokio::test(start_paused = true)]
async fn the_causes_of_a_failure_reach_everyone_who_is_told_of_it() {
    let policy = Policy::builder().error_for(Duration::from_secs(3)).build().expect("valid");
    let store = MemoryStore::new();
    let guards = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    let load = || async { Err::<u8, _>(anyhow::anyhow!("no route")).context("no user") };
    let here = guards[0].get_or_load("key", load).await.expect_err("failed");
    assert_eq!(here.to_string(), "the load failed: no user");
    assert_eq!(format!("{here:#}"), "the load failed: no user: no route");
    let there = guards[1].get_or_load("key", load).await.expect_err("failed");
    assert!(matches!(&there, LoadError::Remote(text) if text == "no user: no route"), "{there:?}");
}

/// It was called a panic.
#[tokio::test]
async fn a_load_whose_runtime_is_shut_down_is_told_of_as_that() {
    let guard = StampedeGuard::in_memory();
    let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let other = other.expect("a runtime");
    let (begun, begins) = tokio::sync::oneshot::channel();
    let mut call = Box::pin(guard.get_or_load("key", || async move {
        let _ = begun.send(());
        std::future::pending::<Result<u8, String>>().await
    }));
    {
        let _in_the_other = other.enter();
        assert!(poll!(&mut call).is_pending(), "the flight's task is the other runtime's");
    }
    begins.await.expect("the load runs");
    other.shutdown_background();
    let error = call.await.expect_err("dropped");
    assert_eq!(error.guard().map(stampede_guard::Error::kind), Some(ErrorKind::Vanished));
    assert_eq!(error.to_string(), "the load ended without an outcome: its task was dropped");
}

/// A server with a runtime per core: each of those who waited loaded for itself, all at once, whatever the cap.
#[test]
fn who_waits_in_another_runtime_than_the_one_that_ends_loads_once_more_in_all() {
    const LEASE: Duration = Duration::from_millis(200);
    let policy = Policy::builder().lease(LEASE).command_timeout(LEASE / 4).coordination_budget(LEASE);
    let policy = policy.max_concurrent_loads(1).build().expect("valid");
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let (ends, stays) = (runtime().expect("a runtime"), runtime().expect("a runtime"));
    let (begun, begins) = std::sync::mpsc::channel();
    let leads = guard.clone();
    ends.spawn(async move {
        let load = || async move {
            let _ = begun.send(());
            std::future::pending::<Result<u8, String>>().await
        };
        leads.get_or_load("key", load).await
    });
    begins.recv().expect("the load runs");
    let [loads, seated] = [(); 2].map(|()| Arc::<AtomicUsize>::default());
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let (guard, loads, seated) = (guard.clone(), Arc::clone(&loads), Arc::clone(&seated));
            stays.spawn(async move {
                let load = || async move {
                    loads.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, String>(7_u8)
                };
                let mut call = Box::pin(guard.get_or_load("key", load));
                assert!(poll!(&mut call).is_pending());
                seated.fetch_add(1, Ordering::SeqCst);
                call.await
            })
        })
        .collect();
    while seated.load(Ordering::SeqCst) < 50 {
        std::thread::yield_now();
    }
    ends.shutdown_background();
    for call in calls {
        assert_eq!(stays.block_on(call).expect("joined").expect("loaded"), 7);
    }
    assert_eq!(loads.load(Ordering::SeqCst), 1, "and one lease that passed");
}

/// All of them told of "replacing the entry".
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_change_that_is_not_confirmed_says_what_it_was() {
    let replica = stampede_guard::testing::ChaosStore::new(1).replica();
    let guard = StampedeGuard::new(replica.clone());
    guard.insert("key", &1_u8).await.expect("stored");
    replica.cut();
    let told = [
        guard.insert("key", &1_u8).await,
        guard.invalidate("key").await,
        guard.invalidate_tag("tag").await,
        guard.invalidate_all().await,
    ];
    let told = told.map(|told| told.expect_err("cut off").to_string());
    let does =
        ["the insertion", "the invalidation", "the invalidation by the tag", "the invalidation by the tag"];
    for (told, does) in told.iter().zip(does) {
        assert!(told.starts_with(&format!("not confirmed: {does} of key #")), "{told}");
    }
}
