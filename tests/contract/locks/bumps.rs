//! A take *instead of* a token that holds the mutex: one step with the effect of a free and a take.

use super::*;

contract! {
    a_token_that_gives_way_queues_behind_the_last,
    without_waiters_the_mutex_is_taken_again,
    a_lost_mutex_is_queued_for,
    a_take_instead_sent_again_changes_nothing,
    a_take_instead_that_does_not_queue_still_gives_way,
    a_position_in_the_queue_is_abandoned_too,
    a_mutex_without_a_holder_goes_to_the_head_of_the_queue,
    giving_way_passes_over_the_dead,
    giving_way_to_a_holder_without_an_expiry_says_so,
    fences_grow_over_bumps,
}

#[track_caller]
fn busy(answer: (Taken, bool), was_held: bool) {
    let (taken, held) = answer;
    assert!(matches!(taken, Taken::Busy { remaining: Some(left) } if left <= LEASE), "{taken:?}");
    assert_eq!(held, was_held);
}

async fn a_token_that_gives_way_queues_behind_the_last(world: &World) {
    let (holder, fence) = Asker::holding(world, &mutex("k")).await;
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    let again = Asker::on(&holder.node, &mutex("k"));
    busy(again.take_instead_of(&holder).await, true);
    assert!(one.owns().await && !holder.owns().await);
    let first = one.granted().await;
    assert!(!holder.free().await, "it was released");
    assert!(one.free().await);
    let second = two.granted().await;
    assert!(again.has_no_hints().await);
    assert!(two.free().await);
    let third = again.granted().await;
    assert!(fence < first && first < second && second < third);
    assert!(again.owns().await && again.free().await && again.look().await.is_none());
}

async fn without_waiters_the_mutex_is_taken_again(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    let Taken::Granted { fence } = holder.take_for(Some(ms(5_000))).await else { panic!("it is free") };
    let again = Asker::on(&holder.node, &mutex("k"));
    let (taken, was_held) = again.take_instead_of(&holder).await;
    assert!(matches!(taken, Taken::Granted { fence: next } if next > fence) && was_held, "{taken:?}");
    let left = again.look().await.and_then(|holder| holder.remaining).expect("it ends");
    assert!(left > LEASE / 2, "the full time: {left:?}");
    assert!(again.owns().await && !holder.free().await);
    assert!(holder.has_no_hints().await && again.has_no_hints().await);
}

async fn a_lost_mutex_is_queued_for(world: &World) {
    let late = Asker::separate(world, &mutex("k")).await;
    late.take_for(Some(ms(20))).await;
    until(async || late.look().await.is_none()).await;
    let (next, _) = Asker::holding(world, &mutex("k")).await;
    let again = Asker::on(&late.node, &mutex("k"));
    busy(again.take_instead_of(&late).await, false);
    assert!(next.owns().await && next.free().await);
    again.granted().await;
    assert!(again.free().await);
    // An expired mutex without another holder is taken.
    late.take_for(Some(ms(20))).await;
    until(async || late.look().await.is_none()).await;
    let (taken, was_held) = again.take_instead_of(&late).await;
    assert!(matches!(taken, Taken::Granted { .. }) && !was_held, "{taken:?}");
}

/// Invariant 3 of locks, for a take that replaces a token: it is sent again, because its first answer was lost.
async fn a_take_instead_sent_again_changes_nothing(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    let again = Asker::on(&holder.node, &mutex("k"));
    busy(again.take_instead_of(&holder).await, true);
    for _ in 0..3 {
        busy(again.take_instead_of(&holder).await, false);
    }
    one.granted().await;
    assert!(one.owns().await && one.free().await);
    two.granted().await;
    assert!(two.free().await);
    let fence = again.granted().await;
    assert_eq!(again.take_instead_of(&holder).await, (Taken::Granted { fence }, false));
    assert!(again.free().await);
    assert!(again.look().await.is_none(), "it was queued once");
}

async fn a_take_instead_that_does_not_queue_still_gives_way(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let waiter = Asker::waiting(world, &mutex("k")).await;
    let again = Asker::on(&holder.node, &mutex("k"));
    let ask = Take { queue: false, instead: Some(&holder.token), ..again.ask() };
    assert!(matches!(again.take(ask).await, Taken::Busy { .. }));
    waiter.granted().await;
    assert!(waiter.free().await);
    assert!(waiter.look().await.is_none() && again.has_no_hints().await);
}

async fn a_position_in_the_queue_is_abandoned_too(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    let again = Asker::on(&one.node, &mutex("k"));
    busy(again.take_instead_of(&one).await, false);
    assert!(holder.owns().await && holder.free().await);
    two.granted().await;
    assert!(two.free().await);
    again.granted().await;
    assert!(again.free().await && one.is_passed_over(world).await && one.look().await.is_none());
}

/// Invariant 2 of locks: no token barges in while another one waits.
async fn a_mutex_without_a_holder_goes_to_the_head_of_the_queue(world: &World) {
    let (dead, [waiter]) = left_by_the_dead(world).await;
    let again = Asker::on(&dead.node, &dead.name);
    busy(again.take_instead_of(&dead).await, false);
    waiter.granted().await;
    assert!(waiter.free().await);
    again.granted().await;
}

async fn giving_way_passes_over_the_dead(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    for _ in 0..2 {
        let Asker { node, wait, .. } = Asker::waiting(world, &mutex("k")).await;
        drop(wait);
        world.dead(node).await;
    }
    let again = Asker::on(&holder.node, &mutex("k"));
    let (taken, was_held) = again.take_instead_of(&holder).await;
    assert!(matches!(taken, Taken::Granted { .. }) && was_held, "{taken:?}");
    assert!(again.owns().await && again.free().await && again.look().await.is_none());
}

async fn giving_way_to_a_holder_without_an_expiry_says_so(world: &World) {
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let endless = Asker::separate(world, &mutex("k")).await;
    endless.take_for(None).await;
    let again = Asker::on(&holder.node, &mutex("k"));
    assert_eq!(again.take_instead_of(&holder).await, (Taken::Busy { remaining: None }, true));
    endless.granted().await;
    assert!(endless.free().await);
    again.granted().await;
    assert!(again.look().await.is_some_and(|holder| holder.remaining.is_some()), "as it has sent a request");
}

async fn fences_grow_over_bumps(world: &World) {
    let node = world.node().await;
    let (mut holder, mut last) = (Asker::on(&node, &mutex("k")), 0);
    holder.must_take().await;
    for _ in 0..20 {
        let again = Asker::on(&node, &mutex("k"));
        let (taken, was_held) = again.take_instead_of(&holder).await;
        let Taken::Granted { fence } = taken else { panic!("{taken:?}") };
        assert!(was_held && fence > last, "{fence} after {last}");
        (holder, last) = (again, fence);
    }
}
