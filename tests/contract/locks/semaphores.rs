//! How many tokens hold permits, in which order they get them, and what happens to permits that are not returned.

use super::*;

contract! {
    at_most_capacity_tokens_hold_permits,
    the_first_creation_wins_and_says_so,
    taking_a_permit_again_takes_no_second,
    a_late_take_of_a_holder_takes_nothing,
    permits_are_served_first_come_first,
    a_freed_permit_goes_to_the_waiter_and_to_no_other_token,
    a_position_for_a_permit_can_be_abandoned,
    a_caller_that_does_not_queue_is_not_handed_a_permit,
    dead_waiters_for_permits_are_passed_over,
    a_lease_that_ended_is_recovered_once,
    recovered_permits_go_to_the_waiters,
    a_refresh_keeps_a_permit_and_does_not_revive_one,
    added_permits_go_to_the_waiters,
    a_deleted_semaphore_closes_its_waiters,
    waiters_are_notified_of_a_permit_for_a_shorter_time,
    a_look_creates_nothing,
    an_idle_semaphore_expires_and_a_used_one_stays,
    a_semaphore_and_a_mutex_of_one_name_are_two_locks,
    any_lease_and_capacity_is_accepted,
}

fn create(capacity: u32) -> Create {
    Create { capacity, idle_ttl: LEASE }
}

/// S4.3, S4.34: fifty simultaneous takes create the semaphore once, and no more than its capacity are granted.
async fn at_most_capacity_tokens_hold_permits(world: &World) {
    let nodes = [world.node().await, world.node().await];
    let askers: Vec<_> = (0..50).map(|i| Asker::on(&nodes[i % 2], &semaphore("k"))).collect();
    let taken = join_all(askers.iter().map(|asker| asker.permit(asker.ask_permit(5)))).await;
    assert_eq!(taken.iter().filter(|taken| taken.granted).count(), 5);
    assert!(taken.iter().all(|taken| taken.created_with == 5));
    let mut available: Vec<_> =
        taken.iter().filter(|taken| taken.granted).map(|taken| taken.available).collect();
    available.sort_unstable();
    assert_eq!(available, [0, 1, 2, 3, 4]);
    let state = askers[0].state().await.expect("it is there");
    assert_eq!((state.capacity, state.available, state.waiting, state.holders.len()), (5, 0, 45, 5));
    assert!(state.holders.iter().all(|(_, left)| *left <= LEASE && *left > LEASE / 2), "{state:?}");
}

/// S4.33: a semaphore keeps the capacity of its first creation, and later answers report it.
async fn the_first_creation_wins_and_says_so(world: &World) {
    let asker = Asker::separate(world, &semaphore("k")).await;
    let state = asker.change(SemaphoreChange::Ensure(create(5))).await.expect("made");
    assert_eq!((state.created, state.created_with, state.capacity, state.available), (true, 5, 5, 5));
    let state = asker.change(SemaphoreChange::Ensure(create(3))).await.expect("there");
    assert_eq!((state.created, state.created_with, state.capacity, state.available), (false, 5, 5, 5));
    let taken = asker.must_take_permit(3).await;
    assert_eq!((taken.created_with, taken.available), (5, 4));
    let state = asker.change(SemaphoreChange::Add { permits: 1, semaphore: create(3) }).await.expect("there");
    assert_eq!((state.created, state.created_with, state.capacity, state.available), (false, 5, 6, 5));
}

/// Invariant 3 of locks: a repeated take restarts the lease of the permit.
async fn taking_a_permit_again_takes_no_second(world: &World) {
    let asker = Asker::separate(world, &semaphore("k")).await;
    let short = TakePermit { lease: ms(2_000), ..asker.ask_permit(2) };
    let taken = asker.permit(short).await;
    assert!(taken.granted && taken.available == 1, "{taken:?}");
    assert!(taken.next_expiry.is_some_and(|left| left <= ms(2_000) && left > ms(500)), "{taken:?}");
    let taken = asker.must_take_permit(2).await;
    assert_eq!(taken.available, 1);
    assert!(taken.next_expiry.is_some_and(|left| left > ms(2_000)), "the lease started anew: {taken:?}");
    assert_eq!(asker.free_permit().await, PermitFreed { was_held: true, available: 2 });
    // S3.21, S4.8: a second free of the same permit adds none.
    assert_eq!(asker.free_permit().await, PermitFreed { was_held: false, available: 2 });
}

/// Invariants 1 and 3 of locks: a take on a broken connection may run after the one that was sent again and granted.
async fn a_late_take_of_a_holder_takes_nothing(world: &World) {
    let (holder, other) =
        (Asker::separate(world, &semaphore("k")).await, Asker::separate(world, &semaphore("k")).await);
    let late = async || {
        // The token is registered anew, so the node does not know of its earlier takes.
        let Asker { node, name, token, .. } = &holder;
        let late = Asker { wait: node.await_grant(name, token), ..Asker::on(node, name) };
        late.permit(TakePermit { token, ..late.ask_permit(2) }).await
    };
    holder.must_take_permit(2).await;
    let taken = late().await;
    assert!(taken.granted && taken.available == 1, "{taken:?}");
    other.must_take_permit(2).await;
    let taken = late().await;
    assert!(taken.granted && taken.available == 0, "{taken:?}");
    assert_eq!(holder.state().await.map(|state| (state.waiting, state.holders.len())), Some((0, 2)));
    assert_eq!(other.free_permit().await, PermitFreed { was_held: true, available: 1 });
    assert_eq!(holder.free_permit().await, PermitFreed { was_held: true, available: 2 });
}

/// S4.2: permits are granted in the order of the takes, also across nodes.
async fn permits_are_served_first_come_first(world: &World) {
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(world.node().await);
    }
    let askers: Vec<_> = (0..20).map(|number| Asker::on(&nodes[number * 3 % 4], &semaphore("k"))).collect();
    for (number, asker) in askers.iter().enumerate() {
        assert_eq!(asker.permit(asker.ask_permit(3)).await.granted, number < 3, "number {number}");
    }
    for (number, asker) in askers.iter().enumerate() {
        assert_eq!(
            asker.free_permit().await,
            PermitFreed { was_held: true, available: (number.max(16) - 16) as u32 }
        );
        if let Some(next) = askers.get(number + 3) {
            assert_eq!(next.granted().await, 0);
        }
        if let Some(after) = askers.get(number + 4) {
            assert!(after.has_no_hints().await, "number {number}");
        }
    }
}

/// Invariant 2 of locks: a token that comes later does not get the freed permit.
async fn a_freed_permit_goes_to_the_waiter_and_to_no_other_token(world: &World) {
    let one = Asker::separate(world, &semaphore("k")).await;
    one.must_take_permit(1).await;
    let two = Asker::separate(world, &semaphore("k")).await;
    assert_eq!(two.must_wait_for_permit(1).await.available, 0);
    for _ in 0..3 {
        two.must_wait_for_permit(1).await;
    }
    assert_eq!(one.free_permit().await, PermitFreed { was_held: true, available: 0 });
    one.must_wait_for_permit(1).await;
    two.granted().await;
    assert!(one.has_no_hints().await);
    assert!(two.free_permit().await.was_held);
    one.granted().await;
    assert_eq!(one.free_permit().await.available, 1);
    assert!(two.has_no_hints().await, "it was queued once");
}

async fn a_position_for_a_permit_can_be_abandoned(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    holder.must_take_permit(1).await;
    let (one, two) =
        (Asker::separate(world, &semaphore("k")).await, Asker::separate(world, &semaphore("k")).await);
    one.must_wait_for_permit(1).await;
    two.must_wait_for_permit(1).await;
    assert_eq!(one.free_permit().await, PermitFreed { was_held: false, available: 0 });
    assert!(holder.free_permit().await.was_held);
    two.granted().await;
    assert!(one.has_no_hints().await);
}

async fn a_caller_that_does_not_queue_is_not_handed_a_permit(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    holder.must_take_permit(1).await;
    let passer = Asker::separate(world, &semaphore("k")).await;
    let ask = TakePermit { queue: false, ..passer.ask_permit(1) };
    let taken = passer.permit(ask).await;
    assert!(!taken.granted && taken.next_expiry.is_some_and(|left| left > LEASE / 2), "{taken:?}");
    assert_eq!(holder.free_permit().await, PermitFreed { was_held: true, available: 1 });
    assert!(passer.has_no_hints().await);
    assert!(passer.permit(ask).await.granted);
}

/// S4.14: a permit that is granted to an unreachable waiter is not lost, but granted to the next one.
async fn dead_waiters_for_permits_are_passed_over(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    holder.must_take_permit(1).await;
    for _ in 0..2 {
        let dead = Asker::separate(world, &semaphore("k")).await;
        dead.must_wait_for_permit(1).await;
        let Asker { node, wait, .. } = dead;
        drop(wait);
        world.dead(node).await;
    }
    let node = world.node().await;
    Asker::on(&node, &semaphore("k")).must_wait_for_permit(1).await;
    let alive = Asker::separate(world, &semaphore("k")).await;
    alive.must_wait_for_permit(1).await;
    assert!(holder.free_permit().await.was_held);
    alive.granted().await;
    let state = alive.state().await.expect("there");
    assert_eq!((state.available, state.waiting), (0, 0));
    assert!(alive.free_permit().await.was_held);
    assert_eq!(alive.state().await.expect("there").available, 1);
}

/// S4.18, S4.19: if a permit whose lease has ended is recovered, and its holder frees it late, one permit becomes available, not two.
async fn a_lease_that_ended_is_recovered_once(world: &World) {
    let nodes = [world.node().await, world.node().await];
    let [stale, steady] = after_the_stale([&nodes[0], &nodes[1]], "k", 1, 3).await;
    assert_eq!(steady.state().await.expect("there").available, 2, "a look says what a take would find");
    let mut recovered = 0;
    for _ in 0..10 {
        recovered += steady.change(SemaphoreChange::Sweep).await.expect("there").recovered;
    }
    assert_eq!(recovered, 1);
    assert_eq!(stale.free_permit().await, PermitFreed { was_held: false, available: 2 });
    assert_eq!(steady.free_permit().await, PermitFreed { was_held: true, available: 3 });
}

/// S4.16, S4.17: a take by any token recovers permits whose leases have ended, and so does a sweep, but always for the queue in its order.
async fn recovered_permits_go_to_the_waiters(world: &World) {
    let node = world.node().await;
    for by in ["take", "sweep", "free", "refresh"] {
        let [one, two, three, four, five] = after_the_stale([&node; 5], by, 2, 2).await;
        let (stale, waiters) = ([one, two], [three, four, five]);
        match by {
            "take" => {
                // The caller is the second in the queue: the waiter before it is served first, then the caller.
                let taken = waiters[1].must_take_permit(2).await;
                assert_eq!(taken.available, 0);
            }
            "sweep" => {
                let state = waiters[0].change(SemaphoreChange::Sweep).await.expect("there");
                assert_eq!((state.recovered, state.available, state.waiting), (2, 0, 1));
                waiters[1].granted().await;
            }
            "refresh" => {
                assert!(!stale[0].refresh(LEASE).await);
                waiters[1].granted().await;
            }
            _ => {
                assert_eq!(stale[0].free_permit().await, PermitFreed { was_held: false, available: 0 });
                waiters[1].granted().await;
            }
        }
        waiters[0].granted().await;
        waiters[2].must_wait_for_permit(2).await;
        assert!(waiters[2].has_no_hints().await, "{by}");
    }
}

/// S3.20, S4.35: a refresh extends a permit's lease, but does not bring back a permit whose lease has ended.
async fn a_refresh_keeps_a_permit_and_does_not_revive_one(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    assert!(!holder.refresh(LEASE).await, "there is no semaphore");
    assert!(holder.permit(TakePermit { lease: ms(5_000), ..holder.ask_permit(1) }).await.granted);
    assert!(holder.refresh(ms(7_000)).await);
    let [(ref token, left)] = holder.state().await.expect("there").holders[..] else { panic!("one holder") };
    assert!(*token == holder.token && left <= ms(7_000) && left > ms(5_000), "{left:?}");
    assert!(holder.refresh(ms(20)).await);
    until(async || holder.state().await.expect("there").available == 1).await;
    assert!(!holder.refresh(LEASE).await);
    assert_eq!(holder.state().await.expect("there").available, 1);
    let other = Asker::separate(world, &semaphore("k")).await;
    other.must_take_permit(1).await;
    assert!(!holder.refresh(LEASE).await);
}

/// S4.23: permits that are added are granted to waiters first.
async fn added_permits_go_to_the_waiters(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    holder.must_take_permit(1).await;
    let (one, two) =
        (Asker::separate(world, &semaphore("k")).await, Asker::separate(world, &semaphore("k")).await);
    one.must_wait_for_permit(1).await;
    two.must_wait_for_permit(1).await;
    let add = |permits| SemaphoreChange::Add { permits, semaphore: create(1) };
    let state = holder.change(add(3)).await.expect("there");
    assert_eq!((state.created_with, state.capacity, state.available, state.waiting), (1, 4, 1, 0));
    one.granted().await;
    two.granted().await;
    let state = holder.change(add(u32::MAX)).await.expect("there");
    assert_eq!(state.capacity, u32::MAX);
    let made = Asker::separate(world, &semaphore("made by an addition")).await;
    let state = made.change(add(3)).await.expect("made");
    assert_eq!((state.created, state.created_with, state.capacity, state.available), (true, 1, 4, 4));
}

/// S4.12: the waiters of a deleted semaphore are notified that it is closed, and no step of a former holder creates it again.
async fn a_deleted_semaphore_closes_its_waiters(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    assert!(holder.change(SemaphoreChange::Delete).await.is_none(), "there is none");
    holder.must_take_permit(1).await;
    let (one, two) =
        (Asker::separate(world, &semaphore("k")).await, Asker::separate(world, &semaphore("k")).await);
    one.must_wait_for_permit(1).await;
    two.must_wait_for_permit(1).await;
    let before = two.change(SemaphoreChange::Delete).await.expect("it was there");
    assert_eq!((before.capacity, before.waiting, before.holders.len()), (1, 2, 1));
    assert!(two.change(SemaphoreChange::Delete).await.is_none(), "and is no more");
    assert!(one.notified().await.closed && two.notified().await.closed);
    assert!(one.state().await.is_none());
    assert_eq!(holder.free_permit().await, PermitFreed { was_held: false, available: 0 });
    assert!(!holder.refresh(LEASE).await);
    assert!(one.state().await.is_none(), "nothing brought it back");
    assert_eq!(one.must_take_permit(4).await.created_with, 4);
}

/// S4.14: a waiter sleeps until the next lease ends, and the lease of the next holder may end sooner.
async fn waiters_are_notified_of_a_permit_for_a_shorter_time(world: &World) {
    let holder = Asker::separate(world, &semaphore("k")).await;
    holder.must_take_permit(1).await;
    holder.wait.hold();
    let one = Asker::separate(world, &semaphore("k")).await;
    assert!(!one.permit(TakePermit { lease: ms(20_000), ..one.ask_permit(1) }).await.granted);
    let two = Asker::separate(world, &semaphore("k")).await;
    assert!(two.must_wait_for_permit(1).await.next_expiry.is_some_and(|left| left > ms(20_000)));
    assert!(holder.free_permit().await.was_held);
    one.granted().await;
    assert!(two.notified().await.missed);
    assert!(two.must_wait_for_permit(1).await.next_expiry.is_some_and(|left| left <= ms(20_000)));
    one.wait.hold();
    while timeout(Duration::ZERO, two.wait.notified()).await.is_ok() {}
    assert!(one.refresh(LEASE).await && two.has_no_hints().await);
    assert!(one.refresh(ms(20_000)).await);
    assert!(two.notified().await.missed);
}

/// S4.10, S4.11: reading the state of a semaphore that does not exist does not create it.
async fn a_look_creates_nothing(world: &World) {
    let asker = Asker::separate(world, &semaphore("k")).await;
    assert!(asker.state().await.is_none());
    assert!(asker.change(SemaphoreChange::Sweep).await.is_none());
    assert_eq!(asker.free_permit().await, PermitFreed { was_held: false, available: 0 });
    assert!(asker.state().await.is_none());
    asker.must_take_permit(2).await;
    let state = asker.state().await.expect("there");
    assert_eq!((state.created, state.recovered, state.created_with, state.waiting), (false, 0, 2, 0));
}

/// S4.20, S4.22: an unused semaphore expires, and one with holders does not.
async fn an_idle_semaphore_expires_and_a_used_one_stays(world: &World) {
    let idle = Create { capacity: 2, idle_ttl: ms(40) };
    let short = Asker::separate(world, &semaphore("idle")).await;
    assert!(short.permit(TakePermit { semaphore: idle, ..short.ask_permit(2) }).await.granted);
    let other = Asker::separate(world, &semaphore("idle")).await;
    let ask = TakePermit { semaphore: idle, lease: ms(20), ..other.ask_permit(2) };
    assert!(other.permit(ask).await.granted);
    until(async || other.state().await.is_some_and(|state| state.holders.len() == 1)).await;
    tokio::time::sleep(ms(60)).await;
    let ask = TakePermit { lease: LEASE, ..ask };
    assert_eq!(other.permit(ask).await.available, 0, "a short lease does not end what a long one needs");
    assert!(other.free_permit().await.was_held && short.free_permit().await.was_held);
    until(async || short.state().await.is_none()).await;
}

async fn a_semaphore_and_a_mutex_of_one_name_are_two_locks(world: &World) {
    let (on_mutex, _) = Asker::holding(world, &mutex("k")).await;
    let on_semaphore = Asker::separate(world, &semaphore("k")).await;
    on_semaphore.must_take_permit(1).await;
    on_semaphore.wait.hold();
    let for_mutex = Asker::on(&on_mutex.node, &mutex("k"));
    let for_semaphore = Asker::on(&on_mutex.node, &semaphore("k"));
    for_mutex.must_wait().await;
    for_semaphore.must_wait_for_permit(1).await;
    assert!(on_mutex.free().await);
    for_mutex.granted().await;
    assert!(for_semaphore.has_no_hints().await && for_semaphore.wait.is_first());
    assert!(on_semaphore.free_permit().await.was_held);
    assert_eq!(for_semaphore.granted().await, 0);
}

async fn any_lease_and_capacity_is_accepted(world: &World) {
    let node = world.node().await;
    for (number, time) in
        [Duration::ZERO, Duration::from_nanos(1), ms(1), Duration::MAX].into_iter().enumerate()
    {
        for capacity in [0, 1, u32::MAX] {
            let asker = Asker::on(&node, &semaphore(&format!("{number}:{capacity}")));
            let semaphore = Create { capacity, idle_ttl: time };
            let ask = TakePermit { lease: time, semaphore, ..asker.ask_permit(capacity) };
            let taken = asker.permit(ask).await;
            assert_eq!(taken.granted, capacity > 0, "{time:?} {capacity}: {taken:?}");
            assert_eq!(taken.available, capacity.saturating_sub(1));
            asker.refresh(time).await;
            asker.free_permit().await;
        }
    }
}
