use super::*;
use crate::lock::{LockError, Waiting};

fn poll(interval: Duration) -> Waiting {
    Waiting::Poll { interval, jitter: 0.0 }
}

#[tokio::test(start_paused = true)]
async fn waiters_are_served_in_their_order_with_one_attempt_each() {
    let locks = Locks::in_memory();
    let mut guard = locked(&mutex(&locks)).await;
    let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..20 {
        let (mutex, order) = (mutex(&locks), order.clone());
        waiting(async move {
            let mut guard = mutex.lock().await.expect("handed over");
            order.send((number, guard.attempts())).expect("listening");
            guard.unlock().await.expect("asks");
        })
        .await;
    }
    pass(ms(100)).await;
    assert!(guard.unlock().await.expect("asks"));
    for number in 0..20 {
        assert_eq!(served.recv().await, Some((number, 1)));
    }
}

#[tokio::test(start_paused = true)]
async fn no_caller_barges_in() {
    let locks = Locks::in_memory();
    let (a, b, c) = (mutex(&locks), mutex(&locks), mutex(&locks));
    let mut guard = locked(&a).await;
    let next = waiting(async move { b.lock().await }).await;
    guard.unlock().await.expect("asks");
    assert!(c.try_lock().await.expect("asks").is_none());
    assert!(next.await.expect("no panic").expect("handed over").is_owned().await.expect("asks"));
}

/// S0.11: a dead holder blocks the lock for its time to live.
#[tokio::test(start_paused = true)]
async fn a_dead_holder_is_waited_for_until_its_time_is_over() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(1000)));
    let dead = locked(&a).await;
    std::mem::forget(dead);
    let (took, guard) = timed(async { locked(&mutex(&locks)).await }).await;
    assert!((ms(1000)..=ms(1010)).contains(&took), "{took:?}");
    assert_eq!(guard.attempts(), 2);
}

/// Of all waiters of a process, only the first one watches the clock, so another must do that when it leaves.
#[tokio::test(start_paused = true)]
async fn the_next_waiter_watches_when_the_first_has_left() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(1000)));
    std::mem::forget(locked(&a).await);
    let (b, c) = (mutex(&locks), mutex(&locks));
    let first = waiting(async move { b.lock().await.map(drop) }).await;
    let second = waiting(timed(async move { c.lock().await.map(|guard| guard.attempts()) })).await;
    first.abort();
    let (took, attempts) = second.await.expect("no panic");
    assert!((ms(1000)..=ms(1010)).contains(&took), "{took:?}");
    assert_eq!(attempts.expect("it is free"), 2);
}

/// S0.19, S1.13, S3.1: the default timeout is 10 s.
#[tokio::test(start_paused = true)]
async fn the_acquire_timeout_is_exact_and_leaves_the_queue() {
    let locks = Locks::in_memory();
    let (a, b) = (mutex(&locks), with(&locks, |builder| builder.acquire_timeout(ms(300))));
    let mut guard = locked(&a).await;
    let (took, error) = timed(b.lock()).await;
    assert_eq!(took, ms(300));
    let error = error.expect_err("busy");
    assert!(
        matches!(error, LockError::AcquireTimeout { attempts: 1, waited } if waited == ms(300)),
        "{error:?}"
    );
    assert!(error.is_busy() && !error.is_store() && !b.is_held());
    settle().await;
    // If the grant went to the waiter that timed out, the mutex would stay locked.
    guard.unlock().await.expect("asks");
    assert!(!a.is_locked().await.expect("asks"));
    let ten = mutex(&locks);
    let _guard = locked(&a).await;
    assert_eq!(timed(ten.lock()).await.0, Duration::from_secs(10));
}

/// S3.5: with a timeout of zero, the call still makes one attempt.
#[tokio::test(start_paused = true)]
async fn without_any_time_there_is_still_one_attempt() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.acquire_timeout(ms(0)));
    let guard = locked(&a).await;
    let b = a.clone();
    let (took, error) = timed(b.lock()).await;
    assert!(matches!(error, Err(LockError::AcquireTimeout { attempts: 1, .. })) && took == ms(0));
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_without_end_waits_for_ever() {
    let locks = Locks::in_memory();
    let (a, b) = (mutex(&locks), with(&locks, |builder| builder.acquire_timeout(Duration::MAX)));
    let mut guard = with(&locks, MutexBuilder::non_expiring).lock().await.expect("free");
    let next = waiting(async move { b.lock().await.map(|guard| guard.waited()) }).await;
    pass(Duration::from_secs(3600)).await;
    guard.unlock().await.expect("asks");
    assert_eq!(next.await.expect("no panic").expect("handed over"), Duration::from_secs(3600));
    drop(a);
}

/// S1.5, S1.6, S1.7, S1.14: a call makes one attempt more than `retries`, and pauses only between attempts.
#[tokio::test(start_paused = true)]
async fn retries_are_limited_and_no_pause_follows_the_last() {
    let locks = Locks::in_memory();
    let _guard = locked(&mutex(&locks)).await;
    for (retries, took) in [(0, 0), (3, 30), (10, 100)] {
        let b = with(&locks, |builder| builder.retries(retries).retry_interval(ms(10)).jitter(0.0));
        let (passed, error) = timed(b.lock()).await;
        assert!(
            matches!(error, Err(LockError::TooManyAttempts { attempts }) if attempts == retries + 1),
            "{error:?}"
        );
        assert_eq!(passed, ms(took));
    }
    let notified = with(&locks, |builder| builder.retries(0));
    let (passed, error) = timed(notified.lock()).await;
    assert!(matches!(error, Err(LockError::TooManyAttempts { attempts: 1 })) && passed == ms(0));
    let single = timed(with(&locks, |builder| builder.wait(poll(ms(10)))).try_lock()).await;
    assert!(single.0 == ms(0) && single.1.expect("asks").is_none());
}

#[tokio::test(start_paused = true)]
async fn with_notify_retries_are_wake_ups_that_did_not_grant() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(100)));
    let guard = locked(&a).await;
    let b = with(&locks, |builder| builder.retries(2));
    let next = waiting(timed(async move { b.lock().await.map(drop) })).await;
    for _ in 0..6 {
        // The lease is extended shortly before the waiter would take again.
        pass(ms(95)).await;
        let _ = guard.extend(ms(100)).await.expect("asks");
    }
    let (took, error) = next.await.expect("no panic");
    assert!(matches!(error, Err(LockError::TooManyAttempts { attempts: 3 })), "{error:?}");
    assert!((ms(190)..=ms(310)).contains(&took), "{took:?}");
}

/// S0.9: a polling waiter acquires a lock at its first poll after the lock became free.
#[tokio::test(start_paused = true)]
async fn polling_acquires_a_free_lock_at_most_one_interval_late() {
    let locks = Locks::in_memory();
    let mut guard = locked(&mutex(&locks)).await;
    for jitter in [0.0, 0.1] {
        let b = with(&locks, |builder| builder.wait(Waiting::Poll { interval: ms(100), jitter }));
        let next = waiting(async move { b.lock().await }).await;
        pass(ms(1000)).await;
        guard.unlock().await.expect("asks");
        guard = next.await.expect("no panic").expect("free");
        assert!((9..=12).contains(&guard.attempts()), "{}", guard.attempts());
        assert!(guard.waited() <= ms(1110));
    }
}

#[tokio::test(start_paused = true)]
async fn polling_asks_once_more_when_its_time_is_over() {
    let locks = Locks::in_memory();
    let mut guard = locked(&mutex(&locks)).await;
    let b = with(&locks, |builder| builder.wait(poll(ms(400))).acquire_timeout(ms(500)));
    let (took, error) = timed(b.lock()).await;
    assert!(matches!(error, Err(LockError::AcquireTimeout { attempts: 3, .. })), "{error:?}");
    assert_eq!(took, ms(500));
    let next = waiting(timed(async move { b.lock().await.map(|guard| guard.attempts()) })).await;
    pass(ms(450)).await;
    guard.unlock().await.expect("asks");
    let (took, attempts) = next.await.expect("no panic");
    assert_eq!((took, attempts.expect("free by then")), (ms(500), 3));
}

/// A poller takes at its own times, so it must not be the waiter that watches the clock for the queue.
#[tokio::test(start_paused = true)]
async fn an_earlier_poller_does_not_stop_the_queue_from_watching_the_clock() {
    let locks = Locks::in_memory();
    std::mem::forget(locked(&with(&locks, |builder| builder.ttl(ms(2000)))).await);
    let polls = with(&locks, |builder| builder.wait(poll(ms(60_000))).acquire_timeout(Duration::MAX));
    let _polls = waiting(async move { polls.lock().await.map(drop) }).await;
    let (took, guard) = timed(async { locked(&mutex(&locks)).await }).await;
    assert!((ms(2000)..=ms(2010)).contains(&took), "{took:?}");
    assert_eq!(guard.attempts(), 2);
}

/// A poller does not act on the message that the next holder's lease ends sooner, so the message must reach the waiters behind it.
#[tokio::test(start_paused = true)]
async fn an_earlier_poller_does_not_swallow_messages_to_the_queue() {
    let locks = Locks::in_memory();
    let mut holder = locked(&mutex(&locks)).await;
    let polls = with(&locks, |builder| builder.wait(poll(ms(60_000))).acquire_timeout(Duration::MAX));
    let _polls = waiting(async move { polls.lock().await.map(drop) }).await;
    let short_holder = with(&locks, |builder| builder.ttl(ms(500)));
    let short_holder = waiting(async move { short_holder.lock().await.map(std::mem::forget) }).await;
    let last = mutex(&locks);
    let last = waiting(timed(async move { last.lock().await.map(drop) })).await;
    holder.unlock().await.expect("asks");
    short_holder.await.expect("no panic").expect("handed over");
    let (took, last) = last.await.expect("no panic");
    last.expect("it is free");
    assert!((ms(500)..=ms(510)).contains(&took), "{took:?}");
}

/// S4.15 for mutexes: a waiter may be dropped at any moment of its wait, and the mutex still reaches the waiters behind it.
#[tokio::test(start_paused = true)]
async fn a_waiter_dropped_at_any_moment_leaves_the_queue() {
    for queued_before in [false, true] {
        for dropped_after in [ms(0), ms(50), ms(100)] {
            let locks = Locks::in_memory();
            let mut guard = locked(&mutex(&locks)).await;
            let early = mutex(&locks);
            let early = if queued_before {
                Some(waiting(async move { early.lock().await.map(std::mem::forget) }).await)
            } else {
                None
            };
            let b = mutex(&locks);
            let leaving = waiting(async move { b.lock().await.map(std::mem::forget) }).await;
            let c = mutex(&locks);
            let late = waiting(async move { c.lock().await }).await;
            pass(dropped_after).await;
            if dropped_after == ms(100) {
                // The grant is on its way to the waiter that leaves, or to the waiter before it.
                guard.unlock().await.expect("asks");
                leaving.abort();
            } else {
                leaving.abort();
                settle().await;
                guard.unlock().await.expect("asks");
            }
            if let Some(early) = early {
                early.await.expect("no panic").expect("handed over");
                mutex(&locks).force_unlock().await.expect("asks");
            }
            let (took, late) = timed(late).await;
            assert!(took < ms(1), "{took:?}");
            assert!(late.expect("no panic").expect("handed over").is_owned().await.expect("asks"));
        }
    }
}

/// A process that was paused reads its grant after that lease has ended and another token was granted the lock.
#[tokio::test(start_paused = true)]
async fn a_grant_that_is_read_too_late_is_not_used() {
    for ttl in [Some(ms(1000)), None] {
        let locks = Locks::in_memory();
        let mut guard = locked(&mutex(&locks)).await;
        let slow = with(&locks, |builder| match ttl {
            Some(ttl) => builder.ttl(ttl),
            None => builder.non_expiring(),
        });
        let slow = slow.lock();
        tokio::pin!(slow);
        assert!(futures_util::poll!(&mut slow).is_pending());
        guard.unlock().await.expect("asks");
        tokio::time::advance(ms(1500)).await;
        if ttl.is_none() {
            mutex(&locks).force_unlock().await.expect("asks");
        }
        let mut other = mutex(&locks).try_lock().await.expect("asks").expect("free by now");
        assert!(futures_util::poll!(&mut slow).is_pending());
        assert!(other.unlock().await.expect("asks"));
        assert!(slow.await.expect("handed over").is_owned().await.expect("asks"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_wait_ends_with_a_whole_time_to_live() {
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    let b = with(&locks, |builder| builder.ttl(ms(1000)));
    let mut guard = locked(&a).await;
    let next = waiting(async move { b.lock().await }).await;
    pass(ms(5000)).await;
    guard.unlock().await.expect("asks");
    let next = next.await.expect("no panic").expect("handed over");
    assert_eq!(next.remaining(), Some(ms(988)));
    assert_eq!((next.attempts(), next.waited()), (1, ms(5000)));
}

/// S2.6: any number of callers may wait. They send commands only when the holder's time is over, here never again after their first.
#[tokio::test(start_paused = true)]
async fn many_wait_and_all_are_served() {
    let locks = Locks::in_memory();
    let mut guard = locked(&mutex(&locks)).await;
    let mut all = Vec::new();
    for _ in 0..500 {
        let mutex = with(&locks, |builder| builder.acquire_timeout(Duration::MAX));
        all.push(tokio::spawn(async move {
            let mut guard = mutex.lock().await.expect("handed over");
            tokio::time::sleep(ms(5)).await;
            let attempts = guard.attempts();
            guard.unlock().await.expect("asks");
            attempts
        }));
    }
    pass(ms(10)).await;
    guard.unlock().await.expect("asks");
    let mut attempts = 0;
    for one in all {
        attempts += one.await.expect("no panic");
    }
    assert_eq!(attempts, 500);
}

#[tokio::test(start_paused = true)]
async fn keyspace_waits_like_notify_where_it_is_announced() {
    let locks = Locks::in_memory();
    let (a, b) = (mutex(&locks), with(&locks, |builder| builder.wait(Waiting::Keyspace)));
    b.check_keyspace().await.expect("announced");
    let mut guard = locked(&a).await;
    let next = waiting(async move { b.lock().await }).await;
    pass(ms(100)).await;
    guard.unlock().await.expect("asks");
    let next = next.await.expect("no panic").expect("handed over");
    assert_eq!((next.attempts(), next.waited()), (2, ms(100)));
}

/// Events before the announcement was set up were not announced, so the waiter takes once more; that attempt does not count as a retry.
#[tokio::test(start_paused = true)]
async fn the_question_after_an_announcement_is_no_retry() {
    let locks = Locks::in_memory();
    std::mem::forget(locked(&with(&locks, |builder| builder.ttl(ms(1000)))).await);
    let b = with(&locks, |builder| builder.wait(Waiting::Keyspace).retries(1));
    let (took, guard) = timed(b.lock()).await;
    assert_eq!(guard.expect("it is free by then").attempts(), 3);
    assert!((ms(1000)..=ms(1010)).contains(&took), "{took:?}");
}
