//! The error of a failed load, as a caller reads it: where the load failed, when, and the causes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join};
use futures_util::poll;
use stampede_guard::{ErrorKind, LoadError, MemoryStore, OnWaitTimeout, Policy, StampedeGuard};

/// Regression: the text of every shared failure named "another process", also when the load had failed in the same process.
#[tokio::test(start_paused = true)]
async fn an_error_text_claims_no_other_process_where_there_is_none() {
    let policy = Policy::builder().error_for(Duration::from_secs(3)).build().expect("valid");
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let (fail, fails) = tokio::sync::oneshot::channel::<()>();
    let mut led = Box::pin(guard.get_or_load("key", || async move {
        let _ = fails.await;
        Err::<u8, _>(7_u64)
    }));
    assert!(poll!(&mut led).is_pending());
    let mut waiter = Box::pin(guard.get_or_load("key", || async { Err::<u8, _>("mine".to_owned()) }));
    assert!(poll!(&mut waiter).is_pending());
    tokio::task::yield_now().await;
    fail.send(()).expect("the load runs");
    let (led, waited) = join(led, waiter).await;
    assert_eq!(led.expect_err("failed").to_string(), "the load failed: 7");
    let later = guard.get_or_load("key", || async { Err::<u8, _>("mine".to_owned()) }).await;
    for failure in [waited, later] {
        let failure = failure.expect_err("failed");
        assert!(failure.is_remote(), "{failure:?}");
        assert_eq!(failure.to_string(), "another caller's load failed: 7");
    }
}

/// Regression: when a load failed with `no user` caused by `no route`, its waiters received only `no user`.
#[tokio::test(start_paused = true)]
async fn the_causes_of_a_failure_reach_every_caller() {
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

/// Regression: a load whose runtime shut down was reported as a panic.
#[tokio::test]
async fn a_load_in_a_runtime_that_shuts_down_is_reported_as_vanished() {
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

/// As in a server with a runtime per core. Regression: all waiters of the runtime that ended loaded for themselves at once, beyond any cap.
#[test]
fn waiters_of_a_runtime_that_ends_load_once_more_in_all() {
    let policy = short().max_concurrent_loads(1).build().expect("valid");
    let loads = loads_when_a_runtime_ends(StampedeGuard::in_memory().with_policy(policy), Duration::ZERO);
    assert_eq!(loads, 1, "and one lease that passed");
}

/// Regression: the same fault for waiters that load beside the lease, after their `wait_timeout` for another process's load.
#[test]
fn waiters_beside_the_lease_load_once_more_in_all_too() {
    const WAIT: Duration = Duration::from_millis(100);
    let store = MemoryStore::new();
    let waits = short().wait_timeout(WAIT, OnWaitTimeout::Load).build().expect("valid");
    let [holds, guard] = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(waits.clone()));
    let runtime = worker();
    let (begun, begins) = std::sync::mpsc::channel();
    runtime.spawn(async move { holds.get_or_load("key", without_end(begun)).await });
    begins.recv().expect("the load runs");
    assert_eq!(loads_when_a_runtime_ends(guard, WAIT), 1);
}

fn short() -> stampede_guard::PolicyBuilder {
    const LEASE: Duration = Duration::from_millis(200);
    Policy::builder().lease(LEASE).command_timeout(LEASE / 4).coordination_budget(LEASE)
}

fn worker() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime")
}

fn without_end(
    begun: std::sync::mpsc::Sender<()>,
) -> impl FnOnce() -> BoxFuture<'static, Result<u8, String>> {
    move || {
        let _ = begun.send(());
        std::future::pending().boxed()
    }
}

/// Lets 50 callers join a load that has been running for `waited`, and ends that load's runtime. Returns how many of the callers load.
fn loads_when_a_runtime_ends(guard: StampedeGuard, waited: Duration) -> usize {
    let (ends, stays) = (worker(), worker());
    let (begun, begins) = std::sync::mpsc::channel();
    let leads = guard.clone();
    ends.spawn(async move { leads.get_or_load("key", without_end(begun)).await });
    begins.recv().expect("the load runs");
    let [loads, seated] = [(); 2].map(|()| Arc::<AtomicUsize>::default());
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let (guard, loads, seated) = (guard.clone(), Arc::clone(&loads), Arc::clone(&seated));
            stays.spawn(async move {
                let load = move || async move {
                    loads.fetch_add(1, Ordering::SeqCst);
                    // A value loaded outside the lease is not stored, only shared with callers that come while the
                    // load runs.
                    tokio::time::sleep(waited).await;
                    Ok::<_, String>(7_u8)
                };
                let mut call = Box::pin(guard.get_or_load("key", load));
                assert!(poll!(&mut call).is_pending());
                tokio::time::sleep(waited).await;
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
    loads.load(Ordering::SeqCst)
}

/// Regression: the error of every unconfirmed change said "replacing the entry".
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn an_unconfirmed_change_names_its_operation() {
    let replica = stampede_guard::testing::ChaosStore::new(1).replica();
    let guard = StampedeGuard::new(replica.clone());
    let reached = Policy::builder().invalidate_all(true).build().expect("valid");
    guard.insert("key", &1_u8).await.expect("stored");
    replica.cut();
    let failures = [
        guard.insert("key", &1_u8).await,
        guard.invalidate("key").await,
        guard.invalidate_tag("tag").await,
        guard.with_policy(reached).invalidate_all().await,
    ];
    let failures = failures.map(|failure| failure.expect_err("cut off").to_string());
    let does = [
        "not confirmed: the insertion",
        "not confirmed yet: the invalidation",
        "not confirmed yet: the invalidation by the tag",
        "not confirmed yet: the invalidation by the tag",
    ];
    for (failure, does) in failures.iter().zip(does) {
        assert!(failure.starts_with(&format!("{does} of key #")), "{failure}");
    }
}
