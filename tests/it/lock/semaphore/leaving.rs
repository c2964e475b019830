//! Waiters that leave: when a future is dropped, neither a permit nor a position in the queue is lost with it.

use std::sync::Arc;

use futures_util::future::join_all;

use super::*;
use crate::support::gate::Counter;
use crate::support::probe::DropAt;

cases! {
    a_wait_dropped_at_any_point_loses_no_permit,
    waiters_that_leave_at_random_lose_no_permit,
}

/// S4.15: an acquisition is dropped at each of its await points. The permit is free, or is released while the acquisition waits, with and
/// without another waiter behind it.
async fn a_wait_dropped_at_any_point_loses_no_permit(stage: Stage) {
    for (busy, behind) in [(false, false), (true, false), (true, true)] {
        for n in 0.. {
            let [a, b] = stage.handles(1);
            let mut held = if busy { Some(free(&b).await) } else { None };
            let dropped = tokio::spawn({
                let a = a.clone();
                async move { DropAt::new(n, a.acquire(Wait::Forever)).await.is_some() }
            });
            if busy && !dropped.is_finished() {
                eventually("it waits, or has left", SOON, async || {
                    dropped.is_finished() || b.waiting().await.expect("asks") == 1
                })
                .await;
            }
            let next = behind.then(|| waiter(&b));
            if let Some(held) = &mut held {
                held.release().await.expect("asks");
            }
            if let Some(next) = next {
                let since = Instant::now();
                drop(granted(next).await);
                stage.took(since, Duration::ZERO);
            }
            // If the acquisition got a permit after all, its drop has released that.
            let done = dropped.await.expect("joined");
            eventually_eq("all is free again", AT_ONCE, (1, 0), async || {
                (available(&b).await, b.waiting().await.expect("asks"))
            })
            .await;
            if done {
                assert!(n > usize::from(busy), "a matrix of {n} points");
                break;
            }
        }
    }
}

/// S4.15: it would be a flaw to grant the permit to a waiter that has left. A thousand times, one of three waiters leaves at about the
/// moment of the release, or not at all. The permit reaches the last waiter at once.
async fn waiters_that_leave_at_random_lose_no_permit(stage: Stage) {
    const ROUNDS: usize = 1_000;
    const LANES: usize = 8;
    let left = Counter::default();
    let stage = Arc::new(stage);
    let lanes = (0..LANES).map(|lane| {
        let (stage, left) = (Arc::clone(&stage), left.clone());
        tokio::spawn(async move {
            let [a, b] = [&stage.one, &stage.other]
                .map(|locks| locks.semaphore(("lane", lane), 1).build().expect("valid"));
            for _ in 0..ROUNDS / LANES {
                // A waiter that left may have acquired the permit of the last round, which may still be on its way back.
                let mut held = a.acquire(Wait::Forever).await.expect("asks").expect("it waits for ever");
                // One of these waiters is dropped, and the other one times out.
                let leaving = [(&a, true), (&b, false)].map(|(semaphore, dropped)| {
                    let (semaphore, left) = (semaphore.clone(), left.clone());
                    let patience = Duration::from_micros(fastrand::u64(..4_000));
                    tokio::spawn(async move {
                        let wait = if dropped { Wait::Forever } else { Wait::For(patience) };
                        let limit = if dropped { patience } else { SOON };
                        let acquired = tokio::time::timeout(limit, semaphore.acquire(wait)).await;
                        if acquired.map_or(true, |acquired| acquired.expect("asks").is_none()) {
                            drop(left.start());
                        }
                    })
                });
                let next = waiter([&a, &b][fastrand::usize(..2)]);
                tokio::time::sleep(Duration::from_micros(fastrand::u64(..4_000))).await;
                let since = Instant::now();
                held.release().await.expect("asks");
                let next = tokio::time::timeout(SOON, next).await.expect("the permit was lost");
                let mut next = next.expect("joined").expect("asks").expect("it waits for ever");
                assert!(since.elapsed() < SOON / 2, "{:?}", since.elapsed());
                join_all(leaving).await;
                assert!(next.release().await.expect("asks").was_held);
            }
            eventually_eq("all is free again", SOON, (1, 0), async || {
                (available(&a).await, a.waiting().await.expect("asks"))
            })
            .await;
        })
    });
    for lane in join_all(lanes).await {
        lane.expect("no permit is lost");
    }
    assert!(left.started() > ROUNDS / 10, "only {} of them left", left.started());
}
