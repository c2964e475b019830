//! Two events on one mutex in the same millisecond.

use std::sync::atomic::{AtomicUsize, Ordering};

use stampede_guard::lock::Waiting;

use super::*;

/// S1.22: 10,000 holders unlock at about the moment at which their TTL ends, while another client waits. None of them deletes the next
/// holder's lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_late_unlocks_delete_nothing_of_others() {
    const LANES: usize = 100;
    const ROUNDS: usize = 100;
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let late = std::sync::Arc::new(AtomicUsize::new(0));
    let lanes = (0..LANES).map(|lane| {
        let (one, other, late) = (one.clone(), other.clone(), late.clone());
        tokio::spawn(async move {
            // Most clients wait for the end of the other one's TTL, which takes two commands. Some poll.
            let polls = Waiting::Poll { interval: ms(4), jitter: 1.0 };
            let waiting = if lane % 5 == 0 { polls } else { Waiting::Notify };
            let next = other.mutex(("race", lane)).wait(waiting).acquire_timeout(Duration::MAX);
            let next = next.build().expect("valid");
            let mut round = 0;
            while round < ROUNDS {
                let first = one.mutex(("race", lane)).ttl(ms(fastrand::u64(10..20))).build().expect("valid");
                let mut first = match first.lock().await {
                    Ok(guard) => guard,
                    // On a busy machine a grant may come too late. It was released, so this was no race.
                    Err(LockError::GrantedTooLate { .. }) => continue,
                    Err(error) => panic!("{error:?}"),
                };
                let unlock = async {
                    tokio::time::sleep(ms(fastrand::u64(5..25))).await;
                    first.unlock().await.expect("asks")
                };
                let (in_time, second) = tokio::join!(unlock, next.lock());
                let mut second = second.expect("acquired");
                late.fetch_add(usize::from(!in_time), Ordering::Relaxed);
                assert!(second.unlock().await.expect("asks"), "lane {lane}, round {round}: it was deleted");
                round += 1;
            }
        })
    });
    for lane in lanes.collect::<Vec<_>>() {
        lane.await.expect("nothing was deleted");
    }
    let late = late.load(Ordering::Relaxed);
    println!("{late} of {} unlocks were too late", LANES * ROUNDS);
    assert!(late >= 1_000, "{late} too late: no race");
}

/// S0.10, S0.22: it would be a flaw to subscribe after the message was sent, or to have a callback that fails in every contended wait.
/// 1,000 times, the holder unlocks at the moment at which another client begins to wait.
#[tokio::test]
async fn an_unlock_while_a_wait_begins_is_not_missed() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let (a, b) = (mutex(&one), mutex(&other));
    let mut waits = Vec::new();
    for round in 0..1_000 {
        let mut guard = locked(&a).await;
        let unlock = async {
            for _ in 0..round % 8 {
                tokio::task::yield_now().await;
            }
            assert!(guard.unlock().await.expect("asks"));
            Instant::now()
        };
        let wait = async {
            let next = locked(&b).await;
            (next, Instant::now())
        };
        let (unlocked, (mut next, acquired)) = tokio::join!(unlock, wait);
        waits.push(acquired.saturating_duration_since(unlocked));
        assert!(next.unlock().await.expect("asks"));
    }
    waits.sort();
    println!("median {:?}, worst {:?}", waits[500], waits[999]);
    // The waiters' timers are a minute away, so only a message can have woken them.
    assert!(waits[500] < ms(50), "median {:?}, p99 {:?}", waits[500], waits[990]);
    assert!(waits[999] < AT_ONCE, "worst {:?}", waits[999]);
}

/// S0.10: the waiter's node may still be connecting, and receive no messages yet.
#[tokio::test]
async fn an_unlock_before_the_waiter_has_subscribed_is_not_missed() {
    let server = RedisServer::start();
    let one = node(&server).await;
    let mut worst = Duration::ZERO;
    for round in 0..40 {
        let mut guard = locked(&mutex(&one)).await;
        let late = waiter(&unconnected(&server.minimal_user()));
        if round % 2 == 0 {
            queued(&server, 1).await;
        } else {
            tokio::task::yield_now().await;
        }
        guard.unlock().await.expect("asks");
        let (mut next, took) = granted(late).await;
        worst = worst.max(took);
        assert!(next.unlock().await.expect("asks"));
    }
    assert!(worst < AT_ONCE, "{worst:?}");
}

/// S5.13: it would be a flaw to act both on a timer and on a message. The holder unlocks when its TTL ends, and its waiter's timer fires:
/// the waiter acquires the mutex once, and no second acquisition is left.
#[tokio::test]
async fn a_grant_and_a_timer_that_meet_are_one_acquisition() {
    const LANES: usize = 10;
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let lanes = (0..LANES).map(|lane| {
        let (one, other) = (one.clone(), other.clone());
        tokio::spawn(async move {
            for _ in 0..20 {
                let first = one.mutex(("meet", lane)).ttl(ms(40)).build().expect("valid");
                let second = other.mutex(("meet", lane)).build().expect("valid");
                let mut first = match first.lock().await {
                    Ok(guard) => guard,
                    // On a busy machine a grant may come too late. It was released.
                    Err(LockError::GrantedTooLate { .. }) => continue,
                    Err(error) => panic!("{error:?}"),
                };
                let unlock = async {
                    tokio::time::sleep(ms(36) + Duration::from_micros(fastrand::u64(0..10_000))).await;
                    first.unlock().await.expect("asks")
                };
                let (_, next) = tokio::join!(unlock, second.lock());
                let mut next = next.expect("acquired");
                assert!(next.is_owned().await.expect("asks"));
                assert!(next.unlock().await.expect("asks"));
                assert!(!next.unlock().await.expect("asks"), "once");
                assert!(!second.is_locked().await.expect("asks"), "no other client has it");
            }
        })
    });
    for lane in lanes.collect::<Vec<_>>() {
        lane.await.expect("one acquisition each");
    }
    free(&server, AT_ONCE).await;
}
