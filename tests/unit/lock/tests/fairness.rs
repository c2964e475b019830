use super::*;
use crate::lock::{Fairness, LockError};

fn eventual(locks: &Locks, bound: Duration) -> Mutex {
    with(locks, |builder| builder.fairness(Fairness::Eventual(bound)))
}

/// Holds the mutex for 10 ms, unlocks and locks again at once, for ever.
fn hog(mutex: Mutex) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            let mut guard = mutex.lock().await.expect("in time");
            sleep(ms(10)).await;
            guard.unlock().await.expect("asks");
        }
    })
}

/// A caller that locks again at once overtakes those that have to wake up, until they have waited for the bound.
#[tokio::test(start_paused = true)]
async fn no_wait_is_longer_than_the_bound_and_a_turn() {
    let locks = Locks::in_memory();
    let hog = hog(eventual(&locks, ms(100)));
    pass(ms(5)).await;
    let mut fence = 0;
    for _ in 0..20 {
        let mutex = eventual(&locks, ms(100));
        let (took, mut guard) = timed(async move { mutex.lock().await.expect("in time") }).await;
        assert!((ms(85)..=ms(115)).contains(&took), "{took:?}");
        assert!(guard.fence() > fence, "fences grow");
        assert!(guard.attempts() <= 11, "asked once for each time that it was told: {}", guard.attempts());
        fence = guard.fence();
        assert!(guard.unlock().await.expect("asks"));
        pass(ms(3)).await;
    }
    hog.abort();
}

/// Several waiters have reached the bound: they are served in their order, one turn each.
#[tokio::test(start_paused = true)]
async fn waiters_beyond_the_bound_are_served_in_their_order() {
    let locks = Locks::in_memory();
    let hog = hog(eventual(&locks, ms(50)));
    pass(ms(5)).await;
    let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..5 {
        let (mutex, order) = (eventual(&locks, ms(50)), order.clone());
        waiting(async move {
            let (took, guard) = timed(mutex.lock()).await;
            let mut guard = guard.expect("in time");
            order.send((number, took)).expect("listening");
            sleep(ms(10)).await;
            guard.unlock().await.expect("asks");
        })
        .await;
    }
    for number in 0..5 {
        let (served, took) = served.recv().await.expect("served");
        assert_eq!(served, number);
        assert!(took <= ms(50 + 10 * 6), "{number}: {took:?}");
    }
    hog.abort();
}

/// The head of the queue is dropped, or gives up, after it was told and before it has asked.
#[tokio::test(start_paused = true)]
async fn a_head_that_is_cancelled_costs_the_next_one_nothing() {
    let locks = Locks::in_memory();
    let mut guard = eventual(&locks, ms(1_000)).lock().await.expect("free");
    let (first, second) = (eventual(&locks, ms(1_000)), eventual(&locks, ms(1_000)));
    let head = waiting(async move { first.lock().await.map(drop) }).await;
    let next = waiting(timed(async move { second.lock().await.map(|guard| guard.waited()) })).await;
    assert!(guard.unlock().await.expect("asks"));
    head.abort();
    let (took, waited) = next.await.expect("no panic");
    assert!(waited.is_ok() && took <= ms(5), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_bump_gives_way_also_to_waiters_within_the_bound() {
    let locks = Locks::in_memory();
    let mutex = eventual(&locks, ms(1_000));
    let mut guard = mutex.lock().await.expect("free");
    let other = eventual(&locks, ms(1_000));
    let had = waiting(async move { other.lock().await.map(|guard| guard.fence()) }).await;
    let before = guard.fence();
    assert!(guard.bump().await.expect("asks"));
    let fence = had.await.expect("no panic").expect("handed over");
    assert!(before < fence && fence < guard.fence());
}

#[test]
fn a_bound_is_more_than_zero_and_at_most_a_day() {
    let locks = Locks::in_memory();
    for bound in [Duration::ZERO, Duration::from_secs(86_401), Duration::MAX] {
        let built = locks.mutex("m").fairness(Fairness::Eventual(bound)).build();
        assert!(matches!(built, Err(LockError::InvalidOption { .. })), "{bound:?}");
    }
    let mutex = locks.mutex("m").fairness(Fairness::Eventual(ms(1))).build().expect("sound");
    assert_eq!(mutex.options().fairness, Fairness::Eventual(ms(1)));
    assert_eq!(locks.mutex("m").build().expect("sound").options().fairness, Fairness::Fifo);
}
