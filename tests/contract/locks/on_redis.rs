//! Conditions that only a server has: lost scripts and data, too little memory, lost connections.

use super::super::on_redis::{at, own_keys, world_of};
use super::*;
use crate::store::StoreErrorKind;

on_servers! {
    every_key_of_a_mutex_has_a_ttl_at_every_step,
    the_queue_lasts_for_twice_the_longest_time,
    every_key_of_a_semaphore_has_a_ttl_at_every_step,
    fences_grow_though_keys_are_deleted,
    fences_grow_over_a_failover_that_lost_the_latest,
    a_fence_exceeds_the_stored_one_whatever_the_clock_shows,
    a_holder_whose_data_is_lost_holds_nothing,
    a_server_without_memory_still_frees_and_hands_over,
    a_grant_is_returned_after_the_server_was_away,
    a_second_queue_position_of_the_same_token_is_passed_over,
    a_queue_position_of_a_holder_is_passed_over,
    each_waiter_is_offered_a_separate_fence,
}

/// Invariant 6 of locks (S0.4, S3.12, S4.21). It is checked after each step, and the server's scripts are flushed before each.
async fn every_key_of_a_mutex_has_a_ttl_at_every_step(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let check = |step: &str, keys: &[&str]| {
        assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "after {step}");
        assert_eq!(own_keys(server), keys, "after {step}");
        server.script_flush();
    };
    let [lock, queue, fence] = &["m", "mq", "mf"].map(|kind| at(kind, "k"));
    let (lock, queue, fence) = (lock.as_str(), queue.as_str(), fence.as_str());
    let (one, two) = (Asker::separate(world, &mutex("k")).await, Asker::separate(world, &mutex("k")).await);
    let three = Asker::separate(world, &mutex("k")).await;
    check("nothing", &[]);
    one.must_take().await;
    check("granted", &[lock, fence]);
    two.must_wait().await;
    check("queued", &[lock, fence, queue]);
    three.must_wait().await;
    check("queued behind", &[lock, fence, queue]);
    assert!(one.extend(Some(LEASE)).await);
    check("extended", &[lock, fence, queue]);
    assert!(one.free().await);
    check("handed over", &[lock, fence, queue]);
    assert!(three.force().await);
    check("forced", &[lock, fence]);
    one.must_wait().await;
    check("queued again", &[lock, fence, queue]);
    assert!(!one.free().await);
    check("abandoned", &[lock, fence]);
    assert!(three.free().await);
    check("freed", &[fence]);
    assert!(one.look().await.is_none());
    check("read", &[fence]);
    let Taken::Granted { .. } = one.take_for(Some(ms(150))).await else { panic!("it is free") };
    two.must_wait().await;
    until(async || one.look().await.is_none()).await;
    check("expired", &[fence, queue]);
    three.must_wait().await;
    let roll = at("mr", "k");
    let passed_on = [lock, fence, queue, &roll];
    check("passed on", if world.gives_claims() { &passed_on } else { &passed_on[..3] });
}

/// The queue lasts longer than any holder's time to live, because a waiter may send its next command only after that time.
async fn the_queue_lasts_for_twice_the_longest_time(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let pttl = || server.run::<i64>(&["PTTL", &at("mq", "k")]);
    let (one, two, three) = (
        Asker::separate(world, &mutex("k")).await,
        Asker::separate(world, &mutex("k")).await,
        Asker::separate(world, &mutex("k")).await,
    );
    one.take_for(Some(ms(10_000))).await;
    two.take_for(Some(ms(50_000))).await;
    assert!((90_001..=101_000).contains(&pttl()), "{}", pttl());
    three.take_for(Some(ms(1_000))).await;
    assert!(pttl() > 90_000, "a short one behind does not shorten it: {}", pttl());
    server.run::<()>(&["PEXPIRE", &at("mq", "k"), "5000"]);
    assert!(one.free().await || one.force().await);
    two.granted().await;
    two.claim(world, Some(ms(50_000))).await;
    three.take_for(Some(ms(1_000))).await;
    assert!(pttl() > 90_000, "the next holder may keep it for 50 s: {}", pttl());
    assert!(two.extend(None).await);
    one.take_for(Some(ms(1_000))).await;
    assert!(pttl() > 86_000_000, "behind a holder without an end: {}", pttl());
    assert!(two.free().await);
}

async fn every_key_of_a_semaphore_has_a_ttl_at_every_step(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let check = |step: &str, keys: &[&str]| {
        assert_eq!(server.keys_without_ttl(), Vec::<String>::new(), "after {step}");
        assert_eq!(own_keys(server), keys, "after {step}");
        server.script_flush();
    };
    let [holders, meta, queue] = &["sh", "sm", "sq"].map(|kind| at(kind, "k"));
    let (holders, meta, queue) = (holders.as_str(), meta.as_str(), queue.as_str());
    let semaphore = semaphore("k");
    let (one, two) = (Asker::separate(world, &semaphore).await, Asker::separate(world, &semaphore).await);
    let three = Asker::separate(world, &semaphore).await;
    let create = Create { capacity: 1, idle_ttl: ms(10_000) };
    one.change(SemaphoreChange::Ensure(create)).await;
    check("made", &[meta]);
    one.must_take_permit(1).await;
    check("granted", &[holders, meta]);
    two.must_wait_for_permit(1).await;
    three.must_wait_for_permit(1).await;
    check("queued", &[holders, meta, queue]);
    for key in [holders, meta, queue] {
        let left: u64 = server.run(&["PTTL", key]);
        assert!(left > LEASE.as_millis() as u64, "{key} is needed for longer than {left}");
    }
    assert!(one.refresh(LEASE).await);
    check("refreshed", &[holders, meta, queue]);
    assert!(one.free_permit().await.was_held);
    check("handed over", &[holders, meta, queue]);
    one.change(SemaphoreChange::Add { permits: 1, semaphore: create }).await;
    check("added to", &[holders, meta]);
    one.change(SemaphoreChange::Sweep).await;
    check("swept", &[holders, meta]);
    assert!(two.free_permit().await.was_held && three.free_permit().await.was_held);
    check("freed", &[meta]);
    assert!(server.run::<i64>(&["PTTL", meta]) <= 10_000, "it is not needed any more");
    one.must_take_permit(1).await;
    two.must_take_permit(1).await;
    three.must_wait_for_permit(1).await;
    one.change(SemaphoreChange::Delete).await;
    check("deleted", &[]);
}

/// S3.16, also if the stored fence is deleted, and if foreign clients change the mutex.
async fn fences_grow_though_keys_are_deleted(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (asker, _) = Asker::holding(world, &mutex("k")).await;
    let (lock, fences) = (&*at("m", "k"), &*at("mf", "k"));
    let mut last = 0;
    for round in 0..40 {
        let command: &[&str] = match round % 4 {
            0 => &["DEL", lock],
            1 => &["DEL", lock, fences],
            2 => &["FLUSHALL"],
            _ => &["SET", lock, "another's", "PX", "1"],
        };
        server.run::<()>(command);
        until(async || asker.look().await.is_none()).await;
        let fence = asker.must_take().await;
        assert!(fence > last, "round {round}: {fence} after {last}");
        last = fence;
    }
}

/// A promoted replica, or a server that restarts from an older data set, has lost the latest holders and their fences, and has all earlier
/// data. New fences are greater than the lost ones all the same.
async fn fences_grow_over_a_failover_that_lost_the_latest(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (lock, fences) = (&*at("m", "k"), &*at("mf", "k"));
    let (asker, _) = Asker::holding(world, &mutex("k")).await;
    let replicated: String = server.run(&["GET", fences]);
    let mut last = 0;
    for _ in 0..3 {
        assert!(asker.free().await);
        last = asker.must_take().await;
    }
    // A promotion or a restart takes at least this long, so the clock has passed the lost fences.
    tokio::time::sleep(Duration::from_millis(20)).await;
    server.run::<()>(&["DEL", lock]);
    server.run::<()>(&["SET", fences, &replicated, "PX", "86400000"]);
    let fence = asker.must_take().await;
    assert!(fence > last, "{fence} after {last}");
}

/// Stores a fence as if a clock that was an hour ahead had issued it.
fn count_ahead(world: &World) -> u64 {
    let server = world.server_of(&mutex("k").tag);
    let (secs, _): (u64, u64) = server.run(&["TIME"]);
    let ahead = (secs + 3_600) * 1_000_000;
    server.run::<()>(&["SET", &at("mf", "k"), &ahead.to_string(), "PX", "86400000"]);
    ahead
}

/// Fences come from the server's clock. The stored fence matters only if that clock was set back.
async fn a_fence_exceeds_the_stored_one_whatever_the_clock_shows(world: &World) {
    let ahead = count_ahead(world);
    let (holder, fence) = Asker::holding(world, &mutex("k")).await;
    assert_eq!(fence, ahead + 1);
    let waiter = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.free().await);
    assert_eq!(waiter.granted().await, ahead + 2);
}

/// S3.14: a holder whose mutex was removed holds nothing, whether another token has the mutex now or none has.
async fn a_holder_whose_data_is_lost_holds_nothing(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let waiter = Asker::waiting(world, &mutex("k")).await;
    server.flush_all();
    assert!(!holder.extend(Some(LEASE)).await && !holder.owns().await);
    waiter.must_take().await;
    assert!(!holder.free().await && waiter.owns().await);

    let on_permit = Asker::separate(world, &semaphore("k")).await;
    on_permit.must_take_permit(1).await;
    server.flush_all();
    assert!(!on_permit.refresh(LEASE).await);
    assert_eq!(on_permit.free_permit().await, PermitFreed { was_held: false, available: 0 });
    assert_eq!(own_keys(server), Vec::<String>::new());
}

/// A restarted server has lost all waiters. Waiters and holders are notified that messages may have been lost.
#[tokio::test]
async fn holders_and_waiters_are_notified_when_messages_may_have_been_lost() {
    let world = World::redis();
    let server = world_of(&world);
    let (holder, _) = Asker::holding(&world, &mutex("k")).await;
    holder.wait.hold();
    let waiter = Asker::waiting(&world, &mutex("k")).await;
    let on_permit = Asker::separate(&world, &semaphore("k")).await;
    assert!(server.kill_pubsub() >= 2);
    for asker in [&holder, &waiter, &on_permit] {
        assert!(asker.notified().await.missed);
    }
    // Each is notified once for the loss, and once for the new subscription.
    until(async || waiter.node.grants_arrive() && holder.node.grants_arrive()).await;
    assert!(waiter.notified().await.missed);
    waiter.must_wait().await;
    assert!(holder.free().await);
    waiter.granted().await;
}

/// When memory is full, the server refuses steps that need memory, but runs steps that release memory.
async fn a_server_without_memory_still_frees_and_hands_over(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let waiter = Asker::waiting(world, &mutex("k")).await;
    let late = Asker::separate(world, &mutex("k")).await;
    let with_permit = Asker::separate(world, &semaphore("k")).await;
    with_permit.must_take_permit(1).await;
    let for_permit = Asker::separate(world, &semaphore("k")).await;
    for_permit.must_wait_for_permit(1).await;
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let transient = |refused: Result<MutexTaken, crate::store::StoreError>| {
        assert_eq!(refused.expect_err("no memory").kind, StoreErrorKind::Transient);
    };
    transient(late.node.take_mutex(&late.name, late.ask(), WITHIN).await);
    let beside = probe_beside(&mutex("k").tag, |text| mutex(text).tag.to_string());
    let other = Asker::separate(world, &mutex(&beside)).await;
    transient(other.node.take_mutex(&other.name, other.ask(), WITHIN).await);
    assert!(holder.extend(Some(LEASE)).await);
    assert!(holder.free().await);
    waiter.granted().await;
    let again = Asker::on(&waiter.node, &mutex("k"));
    let (taken, was_held) = again.take_instead_of(&waiter).await;
    assert!(matches!(taken, Taken::Granted { .. }) && was_held, "it takes what it gives back: {taken:?}");
    assert!(again.owns().await && again.free().await);
    assert!(with_permit.refresh(LEASE).await);
    assert!(with_permit.free_permit().await.was_held);
    for_permit.granted().await;
    assert!(for_permit.free_permit().await.was_held);
    for_permit.change(SemaphoreChange::Delete).await;
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(own_keys(server), [at("mf", "k")]);
}

/// The node returns a grant that no waiter received, although its connections are cut meanwhile.
async fn a_grant_is_returned_after_the_server_was_away(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let left = Asker::separate(world, &mutex("k")).await;
    left.take_for(None).await;
    let Asker { node, wait, .. } = left;
    drop(wait);
    assert!(holder.free().await);
    // The connections are cut before or after the node received the grant.
    server.kill_clients();
    until(async || holder.node.look_at_mutex(&mutex("k"), WITHIN).await.is_ok_and(|held| held.is_none()))
        .await;
    drop(node);
}

/// A take that timed out may run after the one that was sent again, so the queue has two positions with the same token.
async fn a_second_queue_position_of_the_same_token_is_passed_over(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let position = |asker: &Asker| format!("{}60000", asker.token.as_str());
    server.run::<()>(&["RPUSH", &at("mq", "k"), &position(&holder)]);
    let waiter = Asker::waiting(world, &mutex("k")).await;
    server.run::<()>(&["RPUSH", &at("mq", "k"), &position(&holder), &position(&holder)]);
    assert!(holder.free().await);
    waiter.granted().await;
    assert!(holder.is_passed_over(world).await);
    // The queue has two more positions with the holder's token. Once the holder has left they have no waiter, and the mutex becomes free.
    let Asker { node, wait, .. } = holder;
    drop(wait);
    assert!(waiter.free().await);
    until(async || waiter.look().await.is_none()).await;
    drop(node);
}

/// A holder of a permit may have a position in the queue, too. When that is served, it neither loses its permit nor receives a second one.
async fn a_queue_position_of_a_holder_is_passed_over(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let name = semaphore("k");
    let (one, two) = (Asker::separate(world, &name).await, Asker::separate(world, &name).await);
    one.must_take_permit(2).await;
    two.must_take_permit(2).await;
    let waiter = Asker::separate(world, &name).await;
    for is_dead in [true, false] {
        server.run::<()>(&["RPUSH", &at("sq", "k"), &format!("{}60000", one.token.as_str())]);
        waiter.must_wait_for_permit(2).await;
        if is_dead {
            // A new registration replaces the holder's, and is dropped at once, as if the holder's process had died.
            drop(one.node.await_grant(&name, &one.token));
        }
        let freed = two.free_permit().await;
        assert_eq!(freed, PermitFreed { was_held: true, available: 0 });
        waiter.granted().await;
        let state = one.state().await.expect("there");
        assert_eq!((state.available, state.holders.len()), (0, 2));
        assert!(state.holders.iter().any(|(holder, left)| *holder == one.token && *left > LEASE / 2));
        assert!(waiter.free_permit().await.was_held);
        two.must_take_permit(2).await;
    }
}

/// A process that was passed over because it listens at another server may still receive its grant, so no other waiter gets that fence.
async fn each_waiter_is_offered_a_separate_fence(world: &World) {
    if world.gives_claims() {
        return;
    }
    let server = world.server_of(&mutex("k").tag);
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    let last = count_ahead(world);
    for _ in 0..3 {
        let nobody = Token::mint(uuid::Uuid::new_v4());
        server.run::<()>(&["RPUSH", &at("mq", "k"), &format!("{}60000", nobody.as_str())]);
    }
    let waiter = Asker::waiting(world, &mutex("k")).await;
    assert!(holder.free().await);
    assert_eq!(waiter.granted().await, last + 4);
}
