//! Waiters for a mutex get it in the order in which they came, whatever happens to the holder and to the waiters before them.

use super::*;

contract! {
    waiters_are_served_first_come_first,
    a_waiter_is_queued_once,
    a_caller_that_does_not_queue_is_not_handed_the_mutex,
    a_grant_lasts_as_long_as_the_waiter_has_requested,
    no_token_barges_in_after_an_expiry,
    a_take_that_serves_another_token_keeps_its_own_position,
    the_head_itself_takes_what_has_expired,
    an_abandoned_position_is_not_served,
    dead_nodes_are_passed_over,
    behind_several_dead_waiters_a_live_one_is_notified,
    waiters_that_have_left_are_passed_over,
    after_an_expiry_dead_waiters_are_passed_over_for_the_caller,
    a_grant_that_no_waiter_received_is_returned,
    a_grant_before_the_waiter_looks_is_retained,
    of_many_waiters_in_a_process_one_is_the_first,
    waiters_are_notified_of_a_holder_for_a_shorter_time,
    waiters_are_notified_of_an_extension_for_a_shorter_time,
    waiters_are_notified_when_the_head_takes_the_mutex_itself,
    a_leaving_waiter_hands_on_a_mutex_without_a_holder,
}

/// S4.2 for the mutex: strictly first in, first out, across nodes.
async fn waiters_are_served_first_come_first(world: &World) {
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(world.node().await);
    }
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let mut waiters = Vec::new();
    for number in 0..20 {
        waiters.push(Asker::on(&nodes[number * 7 % 4], &mutex("k")));
        waiters[number].must_wait().await;
    }
    let mut before = &holder;
    for (number, waiter) in waiters.iter().enumerate() {
        assert!(before.free().await);
        waiter.granted().await;
        assert!(waiter.owns().await, "number {number}");
        before = waiter;
    }
    assert!(before.free().await);
    assert!(before.look().await.is_none());
}

/// Invariant 3 of locks: a repeated take does not queue its token again.
async fn a_waiter_is_queued_once(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    for _ in 0..3 {
        one.must_wait().await;
    }
    assert!(holder.free().await);
    one.granted().await;
    assert!(two.is_passed_over(world).await);
    assert!(one.free().await);
    two.granted().await;
    assert!(two.free().await);
    assert!(two.look().await.is_none(), "the first is not served a second time");
    assert!(one.is_passed_over(world).await);
}

async fn a_caller_that_does_not_queue_is_not_handed_the_mutex(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let passer = Asker::separate(world, &mutex("k")).await;
    let ask = Take { queue: false, ..passer.ask() };
    assert!(matches!(passer.take(ask).await, Taken::Busy { .. }));
    assert!(holder.free().await);
    assert!(passer.has_no_hints().await && passer.look().await.is_none());
    assert!(matches!(passer.take(ask).await, Taken::Granted { .. }));
}

async fn a_grant_lasts_as_long_as_the_waiter_has_requested(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let waiter = Asker::separate(world, &mutex("k")).await;
    waiter.take_for(Some(ms(5_000))).await;
    assert!(holder.free().await);
    waiter.granted().await;
    let left = waiter.look().await.and_then(|holder| holder.remaining).expect("it ends");
    assert!(left <= ms(5_000) && left > ms(1_000), "{left:?}");
}

/// Invariant 2 of locks in a case that is easily missed: another waiter's take is the one that finds the mutex free.
async fn no_token_barges_in_after_an_expiry(world: &World) {
    let (_dead, [one, two]) = left_by_the_dead(world).await;
    let late = Asker::separate(world, &one.name).await;
    late.must_wait().await;
    one.granted().await;
    assert!(one.owns().await);
    assert!(one.free().await);
    two.granted().await;
    assert!(two.free().await);
    late.granted().await;
}

/// A token that is in the queue takes an expired mutex: the head of the queue is served, and the token keeps its position, and has only
/// one.
async fn a_take_that_serves_another_token_keeps_its_own_position(world: &World) {
    let (_dead, [one, two]) = left_by_the_dead(world).await;
    two.must_wait().await;
    one.granted().await;
    assert!(one.free().await);
    two.granted().await;
    assert!(two.free().await);
    assert!(two.look().await.is_none() && two.has_no_hints().await);
}

async fn the_head_itself_takes_what_has_expired(world: &World) {
    let (_dead, [one, two]) = left_by_the_dead(world).await;
    one.must_take().await;
    assert!(one.has_no_hints().await, "it was answered, not notified");
    two.must_wait().await;
    assert!(one.free().await);
    two.granted().await;
    assert!(two.free().await && two.look().await.is_none());
}

async fn an_abandoned_position_is_not_served(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    assert!(!one.free().await, "it held nothing");
    assert!(holder.owns().await);
    assert!(holder.free().await);
    two.granted().await;
    assert!(one.has_no_hints().await);
}

async fn dead_nodes_are_passed_over(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    for _ in 0..3 {
        let Asker { node, wait, .. } = Asker::waiting(world, &mutex("k")).await;
        drop(wait);
        world.dead(node).await;
    }
    let alive = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.free().await);
    alive.granted().await;
    assert!(alive.owns().await);
    let dead = Asker::waiting(world, &mutex("k")).await;
    let Asker { node, wait, .. } = dead;
    drop(wait);
    world.dead(node).await;
    assert!(alive.free().await);
    assert!(alive.look().await.is_none(), "no waiter is left");
}

/// If PUBLISH does not report that a waiter's node is dead, its grant is a claim, and a live waiter must be notified when the claim ends.
async fn behind_several_dead_waiters_a_live_one_is_notified(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    for _ in 0..3 {
        let Asker { node, wait, .. } = Asker::waiting(world, &mutex("k")).await;
        drop(wait);
        if world.gives_claims() {
            // In a cluster the server need not have noticed that the node is dead.
            node.close();
        } else {
            world.dead(node).await;
        }
    }
    let alive = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.free().await);
    if world.gives_claims() {
        assert!(alive.notified().await.missed);
        let taken = alive.take(alive.ask()).await;
        assert!(matches!(taken, Taken::Busy { remaining: Some(left) } if left <= LEASE / 4), "{taken:?}");
    } else {
        alive.granted().await;
    }
}

async fn waiters_that_have_left_are_passed_over(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let node = world.node().await;
    for _ in 0..3 {
        Asker::on(&node, &mutex("k")).must_wait().await;
    }
    let alive = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.free().await);
    alive.granted().await;
    assert!(alive.owns().await);
}

async fn after_an_expiry_dead_waiters_are_passed_over_for_the_caller(world: &World) {
    let (_dead, [waiter]) = left_by_the_dead(world).await;
    let Asker { node, name, wait, .. } = waiter;
    drop(wait);
    world.dead(node).await;
    let late = Asker::separate(world, &name).await;
    late.must_take().await;
    assert!(late.owns().await);
}

/// Invariant 5 of locks. It holds also for a grant without an expiry, which would otherwise be lost for ever.
async fn a_grant_that_no_waiter_received_is_returned(world: &World) {
    // The time to live is longer than this test waits, so an expiry cannot pass for a return. A claim lasts a quarter of that, which is
    // shorter, in case the grant is returned too late on a busy machine.
    for ttl in [Some(2 * WITHIN), None] {
        let (holder, _) = Asker::holding(world, &mutex("k")).await;
        let left = Asker::separate(world, &mutex("k")).await;
        left.take_for(ttl).await;
        let Asker { node, wait, .. } = left;
        drop(wait);
        assert!(holder.free().await);
        until_within(WITHIN, async || holder.look().await.is_none()).await;
        drop(node);
    }
}

async fn a_grant_before_the_waiter_looks_is_retained(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let waiter = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.free().await);
    // The message arrives before any task awaits it.
    let other = mutex(&probe_beside(&waiter.name.tag, |text| mutex(text).tag.to_string()));
    assert!(Asker::on(&waiter.node, &other).has_no_hints().await);
    assert!(timeout(Duration::ZERO, waiter.granted()).await.is_ok());
}

/// S0.18: of many waiters in a process, only the first one watches the clock.
async fn of_many_waiters_in_a_process_one_is_the_first(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    holder.wait.hold();
    let node = world.node().await;
    let waiters: Vec<_> = (0..50).map(|_| Asker::on(&node, &mutex("k"))).collect();
    for waiter in &waiters {
        waiter.must_wait().await;
    }
    assert_eq!(waiters.iter().filter(|waiter| waiter.wait.is_first()).count(), 1);
    assert!(waiters[0].wait.is_first());
    assert!(holder.free().await);
    waiters[0].granted().await;
    waiters[0].wait.hold();
    assert!(waiters[1].notified().await.role_changed && waiters[1].wait.is_first());
}

/// S0.11: a waiter sleeps for the time of the holder that it met, and the next holder's time may end sooner.
async fn waiters_are_notified_of_a_holder_for_a_shorter_time(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    holder.wait.hold();
    let one = Asker::separate(world, &mutex("k")).await;
    one.take_for(Some(ms(20_000))).await;
    let (two, three) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    assert!(holder.free().await);
    one.granted().await;
    assert!(two.notified().await.missed);
    let taken = two.take(two.ask()).await;
    assert!(matches!(taken, Taken::Busy { remaining: Some(left) } if left <= ms(20_000)), "{taken:?}");
    if !matches!(world, World::Memory(_)) {
        assert!(three.notified().await.missed, "each process is notified");
    }
    one.wait.hold();
    while timeout(Duration::ZERO, two.wait.notified()).await.is_ok() {}
    assert!(one.free().await);
    assert_eq!(
        two.notified().await,
        LockHints { granted: Some(two.must_take().await), ..LockHints::default() }
    );
    assert!(three.has_no_hints().await, "the time of this one is the longer");
}

async fn waiters_are_notified_of_an_extension_for_a_shorter_time(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    assert!(matches!(holder.take_for(None).await, Taken::Granted { .. }));
    holder.wait.hold();
    let waiter = Asker::waiting(world, &mutex("k")).await;
    for (ttl, is_shorter) in [(None, false), (Some(LEASE), true), (Some(2 * LEASE), false), (None, false)] {
        assert!(holder.extend(ttl).await);
        assert_eq!(waiter.hints_so_far().await.is_some_and(|hints| hints.missed), is_shorter, "{ttl:?}");
    }
    for (ttl, is_shorter) in [(LEASE, true), (LEASE / 2, true), (LEASE, false)] {
        assert!(holder.extend(Some(ttl)).await);
        assert_eq!(waiter.hints_so_far().await.is_some_and(|hints| hints.missed), is_shorter, "{ttl:?}");
    }
}

/// The time that the waiter sleeps for, that of the former holder, may be long, although that holder's mutex was freed early by a foreign
/// client or an eviction.
async fn waiters_are_notified_when_the_head_takes_the_mutex_itself(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    assert!(matches!(holder.take_for(None).await, Taken::Granted { .. }));
    holder.wait.hold();
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    assert!(holder.extend(Some(ms(10))).await);
    until(async || holder.look().await.is_none()).await;
    while two.hints_so_far().await.is_some() {}
    while one.hints_so_far().await.is_some() {}
    one.must_take().await;
    one.wait.hold();
    assert!(two.notified().await.missed);
}

/// The mutex has expired, or a foreign client has freed it, and the waiter that should take it leaves. The next waiter gets it.
async fn a_leaving_waiter_hands_on_a_mutex_without_a_holder(world: &World) {
    let (dead, [one, two, three]) = left_by_the_dead(world).await;
    assert!(!one.free().await, "it held nothing");
    two.granted().await;
    assert!(two.extend(Some(ms(10))).await);
    until(async || one.look().await.is_none()).await;
    assert!(!dead.free().await, "so does a holder that is late");
    three.granted().await;
    assert!(three.owns().await);
}
