//! Leases: for how long others cannot use the permit of a holder that does nothing, and what a call after the end of the lease does.

use super::*;

cases! {
    a_permit_comes_back_when_its_lease_is_over,
    a_waiter_gets_the_permit_when_its_lease_is_over,
    a_refresh_starts_the_lease_anew,
    a_lost_permit_is_not_refreshed_and_not_released,
    a_late_release_adds_no_permit,
    each_stale_permit_is_taken_back_once,
    a_renewed_permit_is_never_stale,
    a_holder_learns_that_its_permit_is_lost,
    a_semaphore_outlives_its_idle_time_while_permits_are_held,
    a_semaphore_expires_after_its_idle_time,
    permits_with_ended_leases_are_all_free_again,
    a_waiter_that_is_not_polled_costs_its_lease_and_a_moment,
}

/// For permits whose leases should end, and that the test does not have to hold before that.
const LEASE: Duration = Duration::from_secs(1);

/// Long enough for a busy machine to act within it, and short enough to wait for its end.
const LONGER: Duration = Duration::from_secs(3);

impl Stage {
    fn leased(&self, permits: u32) -> [Semaphore; 2] {
        self.handles_with(permits, |builder| builder.lease(LEASE))
    }
}

async fn is_stale(permit: &Permit) {
    eventually("its lease ends", SOON, async || !permit.is_held().await.expect("asks")).await;
}

/// S4.16, S4.17, S4.9: a permit is held until its lease ends. After that, `release_stale` or another `acquire` takes it back.
async fn a_permit_comes_back_when_its_lease_is_over(stage: Stage) {
    let [looking, acquiring] = ["looking", "acquiring"].map(|name| {
        [&stage.one, &stage.other].map(|locks| locks.semaphore(name, 1).lease(LONGER).build().expect("valid"))
    });
    let stale = async |[a, b]: &[Semaphore; 2]| {
        let held = free(a).await;
        tokio::time::sleep(LONGER / 3).await;
        assert_eq!(b.release_stale().await.expect("asks"), 0);
        assert!(held.is_held().await.expect("asks") && none_is_free(b).await);
        is_stale(&held).await;
        assert!(!b.holds(held.token()).await.expect("asks"));
        assert_eq!(available(b).await, 1, "what has ended does not count");
        held
    };
    let _held = tokio::join!(stale(&looking), stale(&acquiring));
    assert_eq!(looking[1].release_stale().await.expect("asks"), 1);
    assert!(free(&acquiring[1]).await.release().await.expect("asks").was_held);
    for [a, b] in [looking, acquiring] {
        assert_eq!(b.release_stale().await.expect("asks"), 0, "once");
        assert_eq!(available(&a).await, 1);
    }
}

/// S4.16, S4.17: when a permit's lease has ended, a waiter gets the permit without a call by another client.
async fn a_waiter_gets_the_permit_when_its_lease_is_over(stage: Stage) {
    let [a, _] = stage.leased(1);
    let b = with(&stage.other, 1, |builder| builder);
    let since = Instant::now();
    let _held = free(&a).await;
    let next = b.acquire(Wait::For(SOON)).await.expect("asks").expect("in time");
    // The server counts whole milliseconds.
    stage.took(since, LEASE - ms(2));
    assert!(next.is_held().await.expect("asks"));
}

/// S3.20: a permit that is refreshed after half of its lease is still held after 1.1 leases; a refresh adds no more than one lease.
async fn a_refresh_starts_the_lease_anew(stage: Stage) {
    let lease = ms(4_000);
    let [a, b] = stage.handles_with(1, |builder| builder.lease(lease));
    let held = free(&a).await;
    tokio::time::sleep(lease / 2).await;
    assert!(held.refresh().await.expect("asks"));
    let left = b.holders().await.expect("asks")[0].remaining;
    assert!(left > lease / 2 && left <= lease, "{left:?}");
    let own = held.remaining();
    assert!(own > lease / 2 && own <= lease - ms(42), "less 1 % and 2 ms: {own:?}");
    tokio::time::sleep(lease * 3 / 5).await;
    assert!(held.is_held().await.expect("asks") && none_is_free(&b).await);
    is_stale(&held).await;
}

/// S3.20, S3.21: the book's tests of evicted holders check the same.
async fn a_lost_permit_is_not_refreshed_and_not_released(stage: Stage) {
    let [a, b] = stage.leased(1);
    let mut lost = free(&a).await;
    is_stale(&lost).await;
    assert!(!lost.refresh().await.expect("asks"));
    assert_eq!((available(&b).await, lost.remaining()), (1, Duration::ZERO), "it is not added again");
    let mut own = free(&with(&stage.other, 1, |builder| builder)).await;
    assert!(!lost.refresh().await.expect("asks"));
    assert!(!lost.release().await.expect("asks").was_held);
    assert!(own.refresh().await.expect("asks"));
    assert!(own.release().await.expect("asks").was_held);
    assert!(!own.release().await.expect("asks").was_held);
}

/// S4.18: it would be a flaw to give one permit two holders. Here a permit was taken back and granted to another client before its old
/// holder releases it.
async fn a_late_release_adds_no_permit(stage: Stage) {
    let [a, b] = stage.leased(2);
    let mut late: [Permit; 2] = tokio::join!(free(&a), free(&a)).into();
    for permit in &late {
        is_stale(permit).await;
    }
    assert_eq!(b.release_stale().await.expect("asks"), 2);
    let lasting = with(&stage.other, 2, |builder| builder);
    let mut others = [free(&lasting).await, free(&lasting).await];
    for permit in &mut late {
        assert!(!permit.release().await.expect("asks").was_held);
        assert!(a.signal(permit.token()).await.expect("asks").is_none());
        assert_eq!(available(&a).await, 0);
        assert!(none_is_free(&b).await);
    }
    for permit in &mut others {
        assert!(permit.release().await.expect("asks").was_held);
    }
    assert_eq!((available(&a).await, a.capacity().await.expect("asks")), (2, 2), "never three");
}

/// S4.19: two nodes together call `release_stale` ten times at once.
async fn each_stale_permit_is_taken_back_once(stage: Stage) {
    let [a, b] = stage.leased(3);
    let held: [Permit; 3] = tokio::join!(free(&a), free(&b), free(&a)).into();
    for permit in &held {
        is_stale(permit).await;
    }
    let watchdogs = (0..10).map(|watchdog| [&a, &b][watchdog % 2].release_stale());
    let taken_back = futures_util::future::join_all(watchdogs).await;
    let total: u32 = taken_back.into_iter().map(|taken_back| taken_back.expect("asks")).sum();
    assert_eq!((total, available(&a).await), (3, 3));
}

/// S4.35: the permit is renewed for two leases. When it is dropped, the renewal ends.
async fn a_renewed_permit_is_never_stale(stage: Stage) {
    let [a, b] = stage.handles_with(1, |builder| builder.lease(LONGER).auto_renew(true));
    let held = free(&a).await;
    let until = Instant::now() + LONGER * 2;
    while Instant::now() < until {
        assert_eq!(b.release_stale().await.expect("asks"), 0);
        assert!(held.is_held().await.expect("asks") && !held.remaining().is_zero());
        tokio::time::sleep(LONGER / 15).await;
    }
    drop(held);
    eventually_eq("it is released", AT_ONCE, 1, async || available(&b).await).await;
    assert_eq!(b.release_stale().await.expect("asks"), 0, "and not left to its end");
}

/// The semaphore is deleted, which the holder's next renewal notices.
async fn a_holder_learns_that_its_permit_is_lost(stage: Stage) {
    let [a, b] = stage.handles_with(1, |builder| builder.lease(LEASE).auto_renew(true));
    let held = free(&a).await;
    let (lost, expired) = (held.lost(), held.expired());
    assert!(b.delete().await.expect("asks"));
    let both = async {
        lost.await;
        expired.await;
    };
    tokio::time::timeout(LEASE + AT_ONCE, both).await.expect("it is notified");
    assert!(!held.refresh().await.expect("asks"));
    assert!(!b.exists().await.expect("asks"), "a refresh creates nothing");
}

/// S4.20: it would be a flaw if keys expired while permits are held, because permits would be lost or doubled.
async fn a_semaphore_outlives_its_idle_time_while_permits_are_held(stage: Stage) {
    let idle = |builder: SemaphoreBuilder| builder.idle_ttl(ms(200)).lease(LEASE * 5);
    let [a, b] = stage.handles_with(2, idle);
    let mut held = [free(&a).await, free(&a).await];
    let next = waiter(&b);
    queued(&a, 1).await;
    for _ in 0..5 {
        tokio::time::sleep(ms(200)).await;
        assert!(held[0].is_held().await.expect("asks") && held[1].is_held().await.expect("asks"));
        assert_eq!((available(&b).await, b.waiting().await.expect("asks")), (0, 1));
    }
    assert!(held[0].release().await.expect("asks").was_held);
    let mut next = granted(next).await;
    assert!(none_is_free(&b).await);
    assert!(held[1].release().await.expect("asks").was_held);
    assert!(next.release().await.expect("asks").was_held);
    assert_eq!(available(&a).await, 2);
}

/// S4.21, S4.22: a semaphore expires, whether it was only used, released, or held by a client that went away. Added permits expire with it.
async fn a_semaphore_expires_after_its_idle_time(stage: Stage) {
    let uses = async |name: &'static str| {
        let [a, b] = [&stage.one, &stage.other]
            .map(|locks| locks.semaphore(name, 2).idle_ttl(LEASE * 2).lease(LEASE).build().expect("valid"));
        let since = Instant::now();
        // A held permit keeps the semaphore for twice its lease and a second, if that is longer than the idle time.
        let mut lasts = LEASE * 2;
        let mut unreleased = None;
        match name {
            "created" => assert!(a.ensure_created().await.expect("asks")),
            "released" => assert!(free(&a).await.release().await.expect("asks").was_held),
            "added to" => assert_eq!(a.add_permits(1).await.expect("asks"), 3),
            _ => (unreleased, lasts) = (Some(free(&a).await), ms(3_000)),
        }
        assert!(b.exists().await.expect("asks"), "{name}");
        eventually(format!("{name}, it is removed"), SOON, async || !b.exists().await.expect("asks")).await;
        stage.took(since, lasts - ms(2));
        assert_eq!(b.capacity().await.expect("asks"), 2);
        unreleased
    };
    let _unreleased =
        tokio::join!(uses("created"), uses("released"), uses("added to"), uses("never released"));
    stage.keys(&[]);
}

/// S3.17: the book's own test. Three of three permits are granted, the fourth is refused, and all are free again after
/// their leases.
async fn permits_with_ended_leases_are_all_free_again(stage: Stage) {
    let [a, b] = stage.handles_with(3, |builder| builder.lease(LONGER));
    let held = [free(&a).await, free(&a).await, free(&b).await];
    assert!(none_is_free(&b).await);
    for permit in &held {
        is_stale(permit).await;
    }
    assert!(free(&b).await.release().await.expect("asks").was_held);
    let _again = [free(&a).await, free(&b).await, free(&b).await];
    assert!(none_is_free(&a).await);
}

/// The future of a waiter is not polled, as in a `select!` loop that is busy in another branch.
async fn a_waiter_that_is_not_polled_costs_its_lease_and_a_moment(stage: Stage) {
    let [a, b] = stage.leased(1);
    let mut held = free(&with(&stage.one, 1, |builder| builder.lease(SOON))).await;
    let mut silent = Vec::new();
    for waiters in 1..=2 {
        silent.push(Box::pin(b.acquire(Wait::Forever)));
        tokio::select! {
            _ = silent.last_mut().expect("just added") => panic!("it has to wait"),
            () = queued(&a, waiters) => {}
        }
    }
    let next = waiter(&b);
    queued(&a, 3).await;
    let since = Instant::now();
    assert!(held.release().await.expect("asks").was_held);
    let mut next = granted(next).await;
    assert!(since.elapsed() <= 2 * (LEASE + LEASE / 2) + A_MOMENT, "{:?}", since.elapsed());
    assert!(next.release().await.expect("asks").was_held);
    for silent in silent {
        drop(silent.await.expect("asks").expect("its turn comes"));
    }
}
