//! Those who stop waiting: a future that is dropped takes no permit along, and its place is nobody's.

use std::sync::Arc;

use futures_util::future::join_all;

use super::*;
use crate::support::gate::Counter;
use crate::support::probe::DropAt;

cases! {
    a_wait_that_is_dropped_at_any_point_costs_nobody_a_permit,
    who_leaves_at_random_takes_no_permit_along,
}

/// S4.15: each of the points at which an acquisition can be dropped: of one that is free, and of one that is released while
/// it waits, alone and with another one behind it.
async fn a_wait_that_is_dropped_at_any_point_costs_nobody_a_permit(stage: Stage) {
    for (busy, behind) in [(false, false), (true, false), (true, true)] {
        for n in 0.. {
            let [a, b] = stage.handles(1);
            let mut held = if busy { Some(free(&b).await) } else { None };
            let dropped = tokio::spawn({
                let a = a.clone();
                async move { DropAt::new(n, a.acquire(Wait::Forever)).await.is_some() }
            });
            if busy && !dropped.is_finished() {
                eventually("it waits, or has gone", SOON, async || {
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
            // What it acquired after all was dropped with it.
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

/// S4.15: the flaw of a wait that nobody looks at any more and that is granted the permit. A thousand times one of
/// three leaves at about the moment of the release, or never; the permit reaches the last one at once.
async fn who_leaves_at_random_takes_no_permit_along(stage: Stage) {
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
                // What one of the last round acquired after all may still be on its way back.
                let mut held = a.acquire(Wait::Forever).await.expect("asks").expect("it waits for ever");
                // One is dropped, the other's time is over.
                let leaving = [(&a, true), (&b, false)].map(|(semaphore, dropped)| {
                    let (semaphore, left) = (semaphore.clone(), left.clone());
                    let patience = Duration::from_micros(fastrand::u64(..4_000));
                    tokio::spawn(async move {
                        let told = if dropped { Wait::Forever } else { Wait::For(patience) };
                        let limit = if dropped { patience } else { SOON };
                        let acquired = tokio::time::timeout(limit, semaphore.acquire(told)).await;
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
