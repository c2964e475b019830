use super::*;
use crate::lock::{LockError, Permit, Semaphore, SemaphoreBuilder, Wait, Waiting};

fn permits(locks: &Locks, permits: u32, set: impl FnOnce(SemaphoreBuilder) -> SemaphoreBuilder) -> Semaphore {
    set(locks.semaphore("gate", permits)).build().expect("valid")
}

fn plain(number: u32) -> Semaphore {
    permits(&Locks::in_memory(), number, |builder| builder)
}

async fn now(semaphore: &Semaphore) -> Option<Permit> {
    semaphore.acquire(Wait::Now).await.expect("asks")
}

/// S4.3, S4.4, S4.5, S4.36, S3.17: without a free permit a caller receives none, at once or after its time.
#[tokio::test(start_paused = true)]
async fn no_more_permits_are_granted_than_there_are() {
    let gate = plain(5);
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(now(&gate).await.expect("free"));
    }
    let (took, none) = timed(now(&gate)).await;
    assert!(none.is_none() && took == ms(0));
    let (took, none) = timed(gate.acquire(Wait::For(ms(250)))).await;
    assert!(none.expect("asks").is_none() && took == ms(250));
    let tokens: std::collections::HashSet<_> = held.iter().map(|permit| permit.token().to_owned()).collect();
    assert_eq!(tokens.len(), 5);
    assert_eq!(gate.holders().await.expect("asks").len(), 5);
    settle().await;
    assert_eq!((gate.available_permits().await.expect("asks"), gate.waiting().await.expect("asks")), (0, 0));
}

/// S4.8, S4.9: a permit is released once; a second release adds none.
#[tokio::test(start_paused = true)]
async fn a_release_reports_whether_it_was_held_and_the_free_permits() {
    let gate = plain(2);
    let (mut one, other) = (now(&gate).await.expect("free"), now(&gate).await.expect("free"));
    assert!(one.is_held().await.expect("asks") && gate.holds(one.token()).await.expect("asks"));
    let released = one.release().await.expect("asks");
    assert!(released.was_held && released.available == 1);
    assert!(!one.is_held().await.expect("asks") && !gate.holds(one.token()).await.expect("asks"));
    let again = one.release().await.expect("asks");
    assert!(!again.was_held && again.available == 1);
    assert!(!one.refresh().await.expect("asks"));
    drop(one);
    settle().await;
    assert!(other.is_held().await.expect("asks"));
    assert_eq!(gate.available_permits().await.expect("asks"), 1);
    drop(other);
    settle().await;
    assert_eq!(gate.available_permits().await.expect("asks"), 2);
}

/// S4.2: waiters get permits in the order of their calls, and before any later caller.
#[tokio::test(start_paused = true)]
async fn waiters_are_served_in_their_order() {
    let gate = plain(2);
    let (one, other) = (now(&gate).await.expect("free"), now(&gate).await.expect("free"));
    let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..20 {
        let (gate, order) = (gate.clone(), order.clone());
        waiting(async move {
            let permit = gate.acquire(Wait::Forever).await.expect("asks").expect("waits");
            order.send((number, permit.attempts())).expect("listening");
            tokio::time::sleep(ms(10)).await;
        })
        .await;
    }
    assert_eq!(gate.waiting().await.expect("asks"), 20);
    assert!(now(&gate).await.is_none(), "no caller barges in");
    drop((one, other));
    for number in 0..20 {
        assert_eq!(served.recv().await, Some((number, 1)));
    }
}

/// S4.7: the permit is also released if the work fails or panics, and without a permit the work does not run.
#[tokio::test(start_paused = true)]
async fn with_permit_returns_the_value_and_releases() {
    let gate = plain(1);
    let free = async || gate.available_permits().await.expect("asks");
    let inside = gate.with_permit(Wait::Now, async |permit| (permit.remaining(), free().await)).await;
    assert_eq!(inside.expect("asks"), Some((ms(59_398), 0)));
    assert_eq!(free().await, 1);
    let failed = gate.with_permit(Wait::Now, async |_| Err::<(), _>("no")).await.expect("asks");
    assert_eq!((failed, free().await), (Some(Err("no")), 1));

    let inner = gate.clone();
    let panicked =
        tokio::spawn(
            async move { inner.with_permit(Wait::Now, async |_| panic!("on purpose")).await.map(drop) },
        );
    assert!(panicked.await.expect_err("panics").is_panic());
    settle().await;
    assert_eq!(free().await, 1);

    let _held = now(&gate).await.expect("free");
    let called = gate.with_permit(Wait::For(ms(10)), async |_| unreachable!("there is no permit")).await;
    assert_eq!(called.expect("asks"), None::<()>);
}

/// S4.16, S4.17, S4.18: a permit whose lease has ended becomes free, but a late release of it does not free another one.
#[tokio::test(start_paused = true)]
async fn a_lease_that_ended_comes_back_once() {
    let locks = Locks::in_memory();
    let gate = permits(&locks, 1, |builder| builder.lease(ms(1000)));
    let mut late = now(&gate).await.expect("free");
    let (took, next) = timed(gate.acquire(Wait::For(ms(2000)))).await;
    assert!((ms(1000)..=ms(1010)).contains(&took), "{took:?}");
    let mut next = next.expect("asks").expect("stale");
    assert!(!late.release().await.expect("asks").was_held);
    assert_eq!(gate.available_permits().await.expect("asks"), 0);
    assert!(next.release().await.expect("asks").was_held);

    std::mem::forget(now(&gate).await.expect("free"));
    pass(ms(500)).await;
    assert_eq!(gate.release_stale().await.expect("asks"), 0);
    pass(ms(600)).await;
    assert_eq!(gate.release_stale().await.expect("asks"), 1);
    assert_eq!(gate.release_stale().await.expect("asks"), 0);
    assert_eq!(gate.available_permits().await.expect("asks"), 1);
}

/// S3.20, S4.35: a refresh restarts the lease; it does not bring back a permit whose lease has ended.
#[tokio::test(start_paused = true)]
async fn a_permit_lives_as_long_as_it_is_refreshed() {
    let locks = Locks::in_memory();
    let gate = permits(&locks, 1, |builder| builder.lease(ms(1000)));
    let permit = now(&gate).await.expect("free");
    pass(ms(600)).await;
    assert!(permit.refresh().await.expect("asks"));
    pass(ms(800)).await;
    assert!(permit.is_held().await.expect("asks") && permit.remaining() == ms(188));
    assert_eq!(timed(permit.lost()).await.0, ms(188));
    pass(ms(20)).await;
    assert!(!permit.refresh().await.expect("asks"));
    assert!(now(&gate).await.is_some(), "it was not added again");
    settle().await;

    let renewing = permits(&locks, 1, |builder| builder.lease(ms(1000)).auto_renew(true));
    let permit = now(&renewing).await.expect("free");
    pass(ms(5000)).await;
    assert!(permit.is_held().await.expect("asks"));
    drop(permit);
    settle().await;
    assert!(now(&gate).await.is_some());
}

/// S4.10, S4.11, S4.12, S4.23: reading its state does not create a semaphore.
#[tokio::test(start_paused = true)]
async fn a_semaphore_is_created_enlarged_and_deleted() {
    let gate = plain(3);
    assert!(!gate.exists().await.expect("asks"));
    assert_eq!((gate.available_permits().await.expect("asks"), gate.capacity().await.expect("asks")), (3, 3));
    assert!(!gate.exists().await.expect("asks"), "questions create nothing");
    assert!(gate.ensure_created().await.expect("asks") && gate.exists().await.expect("asks"));
    assert!(!gate.ensure_created().await.expect("asks"));
    assert_eq!(gate.add_permits(2).await.expect("asks"), 5);
    assert_eq!((gate.available_permits().await.expect("asks"), gate.capacity().await.expect("asks")), (5, 5));
    assert!(gate.delete().await.expect("asks"));
    assert!(!gate.delete().await.expect("asks") && !gate.exists().await.expect("asks"));
    assert_eq!(gate.capacity().await.expect("asks"), 3);
}

#[tokio::test(start_paused = true)]
async fn added_permits_go_to_waiters() {
    let gate = plain(1);
    let _held = now(&gate).await.expect("free");
    let waiter = gate.clone();
    let next = waiting(async move { waiter.acquire(Wait::Forever).await }).await;
    assert_eq!(gate.add_permits(1).await.expect("asks"), 2);
    assert!(next.await.expect("no panic").expect("asks").is_some());
}

#[tokio::test(start_paused = true)]
async fn waiters_for_a_deleted_semaphore_fail() {
    let gate = plain(1);
    let mut held = now(&gate).await.expect("free");
    let waiter = gate.clone();
    let next = waiting(async move { waiter.acquire(Wait::Forever).await.map(drop) }).await;
    gate.delete().await.expect("asks");
    let (took, error) = timed(next).await;
    assert!(matches!(error.expect("no panic"), Err(LockError::Closed)) && took == ms(0));
    assert!(!held.refresh().await.expect("asks"));
    assert_eq!(timed(held.lost()).await.0, ms(0));
    assert!(!held.release().await.expect("asks").was_held);
    assert!(!gate.exists().await.expect("asks"), "nor did any of that create it");
}

#[tokio::test(start_paused = true)]
async fn a_permit_is_released_from_anywhere_by_its_token() {
    let gate = plain(1);
    let permit = now(&gate).await.expect("free");
    let released = gate.signal(permit.token()).await.expect("asks").expect("held");
    assert!(released.was_held && released.available == 1);
    assert!(gate.signal(permit.token()).await.expect("asks").is_none());
    assert!(gate.signal("1").await.expect("asks").is_none(), "S4.24: no token, no permit");
    assert_eq!(gate.available_permits().await.expect("asks"), 1);
    assert!(!permit.refresh().await.expect("asks"));
}

/// S4.33: a semaphore keeps the capacity with which it was created.
#[tokio::test(start_paused = true)]
async fn the_first_handle_sets_the_capacity_and_others_report_the_mismatch() {
    let locks = Locks::in_memory();
    let (five, three) = (permits(&locks, 5, |builder| builder), permits(&locks, 3, |builder| builder));
    assert!(five.ensure_created().await.expect("asks"));
    let error = three.ensure_created().await.expect_err("reported");
    assert!(matches!(error, LockError::CapacityMismatch { expected: 3, actual: 5 }), "{error:?}");
    let mut held = Vec::new();
    while let Some(permit) = now(&three).await {
        held.push(permit);
    }
    assert_eq!((held.len(), three.capacity().await.expect("asks")), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn polling_takes_a_permit_without_queueing() {
    let locks = Locks::in_memory();
    let poll = Waiting::Poll { interval: ms(100), jitter: 0.0 };
    let gate = permits(&locks, 1, |builder| builder.waiting(poll));
    let mut held = now(&gate).await.expect("free");
    let poller = gate.clone();
    let next = waiting(timed(async move { poller.acquire(Wait::For(ms(2000))).await })).await;
    assert_eq!(gate.waiting().await.expect("asks"), 0);
    pass(ms(450)).await;
    held.release().await.expect("asks");
    let (took, permit) = next.await.expect("no panic");
    assert_eq!((took, permit.expect("asks").map(|permit| permit.attempts())), (ms(500), Some(6)));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_was_dropped_loses_no_permit() {
    for dropped_first in [false, true] {
        let gate = plain(1);
        let mut held = now(&gate).await.expect("free");
        let leaver = gate.clone();
        let leaving = waiting(async move { leaver.acquire(Wait::Forever).await.map(std::mem::forget) }).await;
        let waiter = gate.clone();
        let next = waiting(async move { waiter.acquire(Wait::Forever).await }).await;
        if dropped_first {
            leaving.abort();
            settle().await;
            held.release().await.expect("asks");
        } else {
            held.release().await.expect("asks");
            leaving.abort();
        }
        let (took, permit) = timed(next).await;
        assert!(took == ms(0) && permit.expect("no panic").expect("asks").is_some());
    }
}
