//! [`MutexGuard::bump`]: whether the caller holds the mutex, and what its guard reports, before, during and after the call.

use super::*;
use crate::lock::{Held, LockError, Waiting};

#[tokio::test(start_paused = true)]
async fn a_bump_gives_way_to_the_waiters_and_reacquires_after_them() {
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    let mut guard = locked(&a).await;
    let before = Held::clone(&guard);
    let visit = |mutex: Mutex| async move {
        let mut guard = locked(&mutex).await;
        sleep(ms(10)).await;
        assert!(guard.unlock().await.expect("asks"));
        guard.fence()
    };
    let one = waiting(visit(mutex(&locks))).await;
    let two = waiting(visit(mutex(&locks))).await;
    let (took, was_held) = timed(guard.bump()).await;
    assert!(was_held.expect("asks"));
    assert_eq!((took, guard.waited(), guard.attempts()), (ms(20), ms(20), 1));
    let [one, two] = [one.await.expect("joined"), two.await.expect("joined")];
    assert!(before.fence() < one && one < two && two < guard.fence());
    assert!(a.is_held() && guard.is_owned().await.expect("asks"));
    assert_eq!(before.remaining(), Some(Duration::ZERO), "the earlier one has ended");
    assert!(!before.is_owned().await.expect("asks"));
    assert!(guard.unlock().await.expect("asks"));
    assert!(!a.is_held() && !a.is_locked().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn a_bump_without_waiters_reacquires_at_once() {
    let a = with(&Locks::in_memory(), |builder| builder.ttl(ms(1000)).auto_renew(true));
    let mut guard = locked(&a).await;
    let (token, fence) = (guard.token().to_owned(), guard.fence());
    for _ in 0..3 {
        // The new acquisition is renewed like the old one.
        pass(ms(2_000)).await;
        assert!(guard.bump().await.expect("asks"));
        assert_eq!(guard.remaining(), Some(ms(988)));
    }
    assert!(guard.token() != token && guard.fence() > fence);
    pass(ms(2_000)).await;
    assert!(guard.is_owned().await.expect("asks"));
    drop(guard);
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn a_bump_reports_a_lost_mutex_and_reacquires_it() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(100)));
    let mut guard = locked(&a).await;
    pass(ms(150)).await;
    assert!(!guard.bump().await.expect("asks"));
    assert!(guard.is_owned().await.expect("asks"));
    assert!(guard.unlock().await.expect("asks"));
    assert!(matches!(guard.bump().await, Err(LockError::NotHeld)));
}

/// If the wait of a bump fails, the guard holds nothing, and the caller is no longer in the queue.
#[tokio::test(start_paused = true)]
async fn a_bump_that_times_out_holds_nothing() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.acquire_timeout(ms(50)));
    let mut guard = locked(&a).await;
    let next = waiting({
        let next = mutex(&locks);
        async move { next.lock().await }
    })
    .await;
    let (took, error) = timed(guard.bump()).await;
    assert!(matches!(error, Err(LockError::AcquireTimeout { attempts: 1, .. })), "{error:?}");
    assert!(took == ms(50) && !a.is_held(), "{took:?}");
    assert!(matches!(guard.bump().await, Err(LockError::NotHeld)));
    assert!(!guard.unlock().await.expect("asks"));
    let mut next = next.await.expect("joined").expect("acquired");
    settle().await;
    assert!(next.unlock().await.expect("asks"));
    settle().await;
    assert!(!a.is_locked().await.expect("asks"), "its position was abandoned");
}

#[tokio::test(start_paused = true)]
async fn a_bump_that_is_dropped_leaves_the_queue_and_no_lock() {
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    let mut guard = locked(&a).await;
    let next = waiting({
        let next = mutex(&locks);
        async move { next.lock().await }
    })
    .await;
    assert!(tokio::time::timeout(ms(50), guard.bump()).await.is_err());
    let mut next = next.await.expect("joined").expect("acquired");
    assert!(matches!(guard.bump().await, Err(LockError::NotHeld)));
    assert!(a.is_held() && !guard.unlock().await.expect("asks") && !a.is_held());
    settle().await;
    assert!(next.unlock().await.expect("asks"));
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));
}

/// A polling bump does not queue, but the waiters in the queue get the mutex before it acquires it again.
#[tokio::test(start_paused = true)]
async fn a_polling_bump_gives_way_to_the_queue_and_polls_again() {
    let locks = Locks::in_memory();
    let polls = Waiting::Poll { interval: ms(10), jitter: 0.0 };
    let a = with(&locks, |builder| builder.wait(polls));
    let mut guard = locked(&a).await;
    let next = waiting({
        let next = mutex(&locks);
        async move {
            let _guard = locked(&next).await;
            sleep(ms(15)).await;
        }
    })
    .await;
    assert!(guard.bump().await.expect("asks"));
    assert_eq!((guard.attempts(), guard.waited()), (3, ms(20)));
    next.await.expect("joined");
    assert!(guard.unlock().await.expect("asks"));
}
