use tokio::time::timeout;

use super::*;
use crate::lock::{Held, LockError};

/// S1.24: `remaining` is the time to live less 1 % and 2 ms for clock drift, measured from when the granting command was sent.
#[tokio::test(start_paused = true)]
async fn remaining_counts_from_the_grant_and_keeps_the_drift_back() {
    let a = with(&Locks::in_memory(), |builder| builder.ttl(ms(1000)));
    let guard = locked(&a).await;
    assert_eq!(guard.remaining(), Some(ms(988)));
    pass(ms(300)).await;
    assert_eq!(guard.remaining(), Some(ms(688)));
    pass(ms(700)).await;
    assert_eq!(guard.remaining(), Some(ms(0)));
    assert_eq!((guard.attempts(), guard.waited()), (1, ms(0)));
}

/// S1.25: `expired` resolves at the end of the time to live, or when the lock is released before.
#[tokio::test(start_paused = true)]
async fn expired_resolves_at_the_end_of_the_time_or_at_the_unlock() {
    let a = with(&Locks::in_memory(), |builder| builder.ttl(ms(1000)));
    let mut guard = locked(&a).await;
    assert_eq!(timed(guard.expired()).await.0, ms(988));
    assert!(!a.is_locked().await.expect("asks") || guard.is_owned().await.expect("asks"));
    guard.unlock().await.expect("asks");

    let mut guard = locked(&a).await;
    let expired = waiting(guard.expired()).await;
    guard.unlock().await.expect("asks");
    expired.await.expect("no panic");
    assert_eq!(timed(guard.expired()).await.0, ms(0));
}

/// S3.14: also without renewal, a loss is known at the end of the time to live.
#[tokio::test(start_paused = true)]
async fn lost_resolves_when_the_time_is_over_and_never_after_an_unlock() {
    let a = with(&Locks::in_memory(), |builder| builder.ttl(ms(1000)));
    let mut guard = locked(&a).await;
    assert_eq!(timed(guard.lost()).await.0, ms(988));
    assert!(!guard.extend(ms(1000)).await.expect("asks"), "lost is lost");
    guard.unlock().await.expect("asks");

    let mut guard = locked(&a).await;
    let lost = waiting(guard.lost()).await;
    guard.unlock().await.expect("asks");
    pass(ms(5000)).await;
    assert!(!lost.is_finished());
    lost.abort();
}

/// S5.2: an extension sets the lease of a holder, here from 2 s to 3 s. It does not create a lost one again.
#[tokio::test(start_paused = true)]
async fn extend_starts_the_time_anew() {
    let locks = Locks::in_memory();
    let (a, b) = (with(&locks, |builder| builder.ttl(ms(2000))), mutex(&locks));
    let mut guard = locked(&a).await;
    pass(ms(500)).await;
    assert!(guard.extend(ms(3000)).await.expect("asks"));
    assert_eq!(b.remaining().await.expect("asks"), Some(ms(3000)));
    assert_eq!(guard.remaining(), Some(ms(2968)));
    assert!(guard.extend(ms(100)).await.expect("asks"), "shorter as well");
    assert_eq!(guard.remaining(), Some(ms(97)));
    assert!(matches!(guard.extend(ms(0)).await, Err(LockError::InvalidTtl { .. })));
    pass(ms(101)).await;
    assert!(!guard.extend(ms(1000)).await.expect("asks"));
    assert!(!a.is_locked().await.expect("asks"));
    assert!(matches!(guard.ensure().await, Err(LockError::NotHeld)));
    assert!(!guard.unlock().await.expect("asks"));
    assert!(!guard.extend(ms(1000)).await.expect("asks"));
}

/// An extension must refuse times that `build` refuses: of 2 ms, nothing would remain, and a lease of 10 ms would have to be renewed
/// without a pause.
#[tokio::test(start_paused = true)]
async fn an_extension_has_the_bounds_of_a_time_to_live() {
    let locks = Locks::in_memory();
    for (auto_renew, option, least) in [(false, "ttl", 3), (true, "auto_renew", 30)] {
        let mutex = with(&locks, |builder| builder.ttl(ms(1000)).auto_renew(auto_renew));
        let mut guard = locked(&mutex).await;
        match guard.extend(ms(least - 1)).await {
            Err(error @ LockError::InvalidOption { option: refused, .. }) => {
                assert_eq!(refused, option);
                assert!(error.to_string().ends_with(&format!("choose at least {least}ms")), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(guard.remaining(), Some(ms(988)), "as before");
        assert!(guard.extend(ms(least)).await.expect("asks"));
        assert!(guard.unlock().await.expect("asks"));
    }
}

#[tokio::test(start_paused = true)]
async fn expired_follows_an_extension() {
    let a = with(&Locks::in_memory(), |builder| builder.ttl(ms(1000)));
    let guard = locked(&a).await;
    let expired = tokio::spawn(timed(guard.expired()));
    pass(ms(500)).await;
    assert!(guard.extend(ms(1000)).await.expect("asks"));
    assert_eq!(expired.await.expect("no panic").0, ms(1488));
}

/// S4.35 for mutexes: `auto_renew` keeps a lock with a time to live of 1 s during work of 5 s.
#[tokio::test(start_paused = true)]
async fn auto_renew_keeps_it_until_the_unlock_and_not_longer() {
    let locks = Locks::in_memory();
    let (a, b) = (with(&locks, |builder| builder.ttl(ms(1000)).auto_renew(true)), mutex(&locks));
    let mut guard = locked(&a).await;
    let lost = tokio::spawn(guard.lost());
    for _ in 0..50 {
        pass(ms(100)).await;
        assert!(guard.is_owned().await.expect("asks") && guard.remaining() > Some(ms(600)));
    }
    assert!(!lost.is_finished());
    assert!(guard.unlock().await.expect("asks"));
    let next = locked(&b).await;
    pass(Duration::from_secs(30)).await;
    assert_eq!(b.remaining().await.expect("asks"), Some(Duration::from_secs(30)), "no renewal extends it");
    assert!(next.is_owned().await.expect("asks"));
    lost.abort();
}

#[tokio::test(start_paused = true)]
async fn auto_renew_ends_with_a_dropped_guard_and_with_a_dropped_work() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(1000)).auto_renew(true));
    drop(locked(&a).await);
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));
    let b = a.clone();
    let work = tokio::spawn(async move { b.synchronize(|_| std::future::pending::<()>()).await.map(drop) });
    pass(ms(5000)).await;
    assert!(a.is_locked().await.expect("asks"));
    work.abort();
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));
    pass(ms(5000)).await;
    assert!(!a.is_locked().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn auto_renew_continues_with_the_extended_time() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(1000)).auto_renew(true));
    let guard = locked(&a).await;
    assert!(guard.extend(Duration::from_secs(30)).await.expect("asks"));
    pass(ms(9_000)).await;
    assert_eq!(a.remaining().await.expect("asks"), Some(ms(21_000)), "a third has not passed");
    pass(ms(1_500)).await;
    assert_eq!(a.remaining().await.expect("asks"), Some(ms(29_500)));
    assert!(guard.is_owned().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_refused_notifies_the_holder() {
    let locks = Locks::in_memory();
    let (a, b) = (with(&locks, |builder| builder.ttl(ms(900)).auto_renew(true)), mutex(&locks));
    let guard = locked(&a).await;
    let lost = guard.lost();
    // The lock is taken away while nothing awaits `lost`.
    b.force_unlock().await.expect("asks");
    let other = locked(&b).await;
    assert!(timed(lost).await.0 <= ms(301));
    assert!(other.is_owned().await.expect("asks"));
    let view = Held::clone(&guard);
    drop(guard);
    settle().await;
    assert!(other.is_owned().await.expect("asks") && view.remaining() == Some(ms(0)));
}

#[tokio::test(start_paused = true)]
async fn all_listeners_are_notified() {
    let locks = Locks::in_memory();
    let (a, b) = (mutex(&locks), mutex(&locks));
    let guard = locked(&a).await;
    let mut listeners = Vec::new();
    for _ in 0..3 {
        listeners.push(waiting(guard.lost()).await);
        listeners.push(waiting(guard.expired()).await);
    }
    // A listener that was dropped does not consume the message for the others.
    waiting(guard.lost()).await.abort();
    b.force_unlock().await.expect("asks");
    for listener in listeners {
        timeout(ms(1), listener).await.expect("at once").expect("no panic");
    }
}
