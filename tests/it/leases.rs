//! A lease and its waiters, when a fault strikes while the lease ends.

use std::time::Duration;

use stampede_guard::testing::{Answer, ChaosStore, Fault, Origin};
use stampede_guard::{LoadError, OnWaitTimeout, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::asking::ask;
use crate::support::warnings::Warnings;

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A lease that outlasts every wait in these tests, so that a lease that is not released makes the test fail.
fn policy() -> PolicyBuilder {
    Policy::builder().lease(secs(60))
}

fn node(chaos: &ChaosStore, policy: PolicyBuilder) -> StampedeGuard {
    StampedeGuard::new(chaos.clone()).with_policy(policy.build().expect("valid"))
}

/// The answer to the release was lost, so the process may still have the lease, and no other process would end it.
#[tokio::test(start_paused = true)]
async fn a_lease_without_a_confirmed_end_is_released() {
    for answer in [Answer::Value, Answer::Fail, Answer::Panic] {
        let (chaos, origin) = (ChaosStore::new(1), Origin::new());
        let [leading, other] = [(); 2].map(|()| node(&chaos, policy()));
        origin.answer("k", [answer]);
        origin.hold();
        let leads = ask(&leading, &origin);
        origin.wait_for_loads("k", 1).await;
        chaos.once(Fault::ErrorBefore);
        origin.release();
        assert_eq!(leads.await.expect("joined").is_ok(), answer == Answer::Value);
        let began = Instant::now();
        assert!(ask(&other, &origin).await.expect("joined").is_ok());
        assert!(began.elapsed() < secs(1), "{answer:?}: {:?}", began.elapsed());
        assert_eq!((leading.stats().store_errors, origin.loads("k")), (1, 2), "{answer:?}");
    }
}

/// A waiter that misses its wake-up sleeps for the rest of the lease that it knew of. It must still find the outcome of the failed load
/// after that.
#[tokio::test(start_paused = true)]
async fn a_failure_stays_until_the_last_waiter_can_read_it() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let [leading, waiting] = [(); 2].map(|()| node(&chaos, policy()));
    origin.always("k", Answer::Fail);
    origin.hold();
    let leads = ask(&leading, &origin);
    origin.wait_for_loads("k", 1).await;
    let waits = ask(&waiting, &origin);
    // The load takes longer than a third of the lease, so the lease is renewed once.
    sleep(secs(21)).await;
    chaos.inject(Fault::WakeLost, 1.0);
    origin.release();
    assert!(leads.await.expect("joined").is_err());
    let failure = waits.await.expect("joined").expect_err("the failure");
    assert!(matches!(failure, LoadError::Remote { .. }), "{failure:?}");
    assert_eq!(origin.loads("k"), 1);
}

/// The first waiter's time is over. A later caller joins the remaining waiters, so that only one flight of the process waits.
#[tokio::test(start_paused = true)]
async fn a_caller_after_the_first_has_left_joins_the_remaining_waiters() {
    let (chaos, origin) = (ChaosStore::new(1), Origin::new());
    let impatient = policy().wait_timeout(secs(10), OnWaitTimeout::Fail);
    let (leading, waiting) = (node(&chaos, policy()), node(&chaos, impatient));
    origin.hold();
    let leads = ask(&leading, &origin);
    origin.wait_for_loads("k", 1).await;
    let first = ask(&waiting, &origin);
    sleep(secs(6)).await;
    let second = ask(&waiting, &origin);
    assert!(first.await.expect("joined").is_err());
    sleep(secs(2)).await;
    let third = ask(&waiting, &origin);
    sleep(secs(1)).await;
    assert_eq!((second.is_finished(), waiting.stats().tasks), (false, 1));
    origin.release();
    for call in [leads, second, third] {
        assert!(call.await.expect("joined").is_ok());
    }
    assert_eq!(origin.loads("k"), 1);
}

/// While the runtime's only thread is blocked, nothing renews the lease. Regression: the values were never stored, and no warning said why.
#[tokio::test]
async fn blocking_the_thread_for_longer_than_the_lease_is_warned_of() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = node(&ChaosStore::new(1), Policy::builder().lease(Duration::from_millis(200)));
    for n in 1..=2_u8 {
        let load = move || async move {
            std::thread::sleep(Duration::from_millis(300));
            Ok::<_, String>(n)
        };
        assert_eq!(guard.get_or_load("k", load).await.ok(), Some(n), "it is not stored");
    }
    assert_eq!(guard.stats().commits_refused, 2);
    assert_eq!(warnings.about("spawn_blocking").len(), 1, "{warnings:?}");
}
