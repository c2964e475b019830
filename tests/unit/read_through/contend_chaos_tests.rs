//! How a flight's attempt to get the lease treats commands that fail, on a store with injected faults.

use super::*;
use crate::read_through::lease::UNUSABLE_LIMIT;
use crate::testing::{ChaosStore, Fault};

/// Otherwise a flight would never end if another program keeps writing unreadable values under the key.
#[tokio::test(start_paused = true)]
async fn a_flight_gives_up_after_three_different_unreadable_entries() {
    let chaos = ChaosStore::new(1);
    let mut side = Side::at(StampedeGuard::new(chaos.replica()));
    side.stores(&value(side.now(), side.now() + 5_000)).await;
    chaos.inject(Fault::Corrupt, 1.0);
    let before = chaos.commands();
    let found = side.contend().await;
    assert!(
        matches!(&found, AcquireOutcome::StoreDown(error) if error.kind == StoreErrorKind::Transient),
        "{}",
        name(&found)
    );
    assert_eq!(chaos.commands() - before, u64::from(UNUSABLE_LIMIT) + 1);
}

/// Otherwise the lease would block all other flights until it expires.
#[tokio::test(start_paused = true)]
async fn a_lease_that_may_have_been_granted_is_released() {
    let chaos = ChaosStore::new(1);
    let mut side = Side::at(StampedeGuard::new(chaos.replica()));
    chaos.once(Fault::ErrorAfter);
    let found = side.contend().await;
    assert!(matches!(found, AcquireOutcome::StoreDown(_)), "{}", name(&found));
    assert!(chaos.store().lease(side.key.name()).is_some(), "it was granted");
    sleep(Duration::from_millis(10)).await;
    assert!(chaos.store().lease(side.key.name()).is_none(), "and is free again");
}

/// The flight was notified that it has the lease, but cannot confirm the grant at the store.
#[tokio::test(start_paused = true)]
async fn a_grant_that_cannot_be_confirmed_is_released() {
    let chaos = ChaosStore::new(1);
    let sides = [(); 2].map(|()| Side::at(StampedeGuard::new(chaos.replica())));
    let [mut one, mut other] = sides;
    let lease = one.leads().await;
    let (found, ()) = tokio::join!(biased; other.contend(), async {
        lease.hand_over(1).await;
        assert!(chaos.store().lease(one.key.name()).is_some(), "the waiter has it");
        chaos.inject(Fault::ErrorBefore, 1.0);
    });
    assert!(matches!(found, AcquireOutcome::StoreDown(_)), "{}", name(&found));
    chaos.calm();
    sleep(Duration::from_millis(200)).await;
    assert!(chaos.store().lease(one.key.name()).is_none(), "long before it would have ended");
}

/// Otherwise it would repeat the load that the leader is running or has just ended.
#[tokio::test(start_paused = true)]
async fn a_flight_that_waited_for_a_leader_survives_a_short_disconnect() {
    let chaos = ChaosStore::new(1);
    let [mut one, mut other] = [(); 2].map(|()| Side::at(StampedeGuard::new(chaos.replica())));
    let lease = one.leads().await;
    let bytes = value(one.now(), one.now() + 5_000).encode(&one.key);
    let (found, ()) = tokio::join!(biased; other.contend(), async {
        assert_eq!(lease.commit(bytes, Duration::from_secs(60)).await, Some(TokenCheck::Held));
        chaos.once(Fault::ErrorBefore);
    });
    assert!(is_value(&found) && chaos.struck(Fault::ErrorBefore) == 1, "{}", name(&found));
}

/// The flight has waited for no leader, so waiting for the store would save no load.
#[tokio::test(start_paused = true)]
async fn a_flight_that_has_not_waited_gives_up_at_once() {
    let chaos = ChaosStore::new(1);
    let mut side = Side::at(StampedeGuard::new(chaos.replica()));
    chaos.once(Fault::ErrorBefore);
    let before = chaos.commands();
    let found = side.contend().await;
    assert!(matches!(found, AcquireOutcome::StoreDown(_)), "{}", name(&found));
    assert_eq!(chaos.commands() - before, 0, "none came through");
}

/// A forged message that a load has ended, which arrives at this moment, must not make the flight wait for answers again and again, each
/// time as long as a lease.
#[tokio::test(start_paused = true)]
async fn a_flight_past_its_deadline_does_not_wait_for_another_lease() {
    let (trip, most) = (Duration::from_millis(2), Policy::default().coordination_budget * 2);
    // With most of these seeds, the forged message says that a load has ended.
    for seed in 0..8 {
        let chaos = ChaosStore::new(seed);
        chaos.latency(trip, trip);
        let [mut one, mut other] = [(); 2].map(|()| Side::at(StampedeGuard::new(chaos.replica())));
        let _lease = one.leads().await;
        chaos.once(Fault::WakeForged);
        let (began, mut budget) = (Instant::now(), Policy::default().budget());
        let request = AcquireRequest { deadline: began, ..other.request(&mut budget) };
        let lose_the_next = async { chaos.inject(Fault::BlackHole, 1.0) };
        let (found, ()) = tokio::join!(biased; contend(request), lose_the_next);
        assert!(
            matches!(found, AcquireOutcome::StoreDown(_) | AcquireOutcome::WaitedOut),
            "SEED={seed}: {}",
            name(&found)
        );
        assert!(began.elapsed() < most, "SEED={seed}: {:?}", began.elapsed());
    }
}
