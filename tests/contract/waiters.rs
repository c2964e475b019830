//! Waiters are notified in the order of the queue, whatever happens to the holder and to the waiters before them.

use super::*;

contract! {
    a_caller_that_does_not_queue_is_not_handed_the_lease,
    a_waiter_is_queued_once_and_served_first_come_first,
    a_hand_over_reports_how_many_loads_have_vanished,
    a_hand_over_skips_dead_nodes,
    a_hand_over_passes_over_waiters_that_have_left,
    a_waiter_that_releases_gives_up_its_position,
    a_hand_over_of_a_node_that_leaves_passes_over_its_own_waiters,
    a_grant_holds_though_its_message_is_never_read,
    a_hand_over_without_waiters_frees_the_lease,
    every_end_of_a_lease_wakes_every_waiter,
    a_wake_up_before_the_waiter_looks_is_retained,
    an_invalidation_ends_the_lease_and_notifies_holder_and_waiters,
    an_insertion_beats_a_running_lease,
    an_insertion_over_an_entry_replaces_no_other_entry,
    resources_are_independent,
    a_name_of_any_bytes_is_distinguished_in_messages,
}

async fn a_caller_that_does_not_queue_is_not_handed_the_lease(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let passer = Flight::separate(world, &key("k")).await;
    let ask = Acquire { queue: false, ..passer.ask() };
    assert!(matches!(passer.acquire(ask).await, Acquired::Held { .. }));
    assert_eq!(holder.hand_over(0).await, HandedOver::Freed);
    assert!(matches!(passer.acquire(ask).await, Acquired::Granted));
}

async fn a_waiter_is_queued_once_and_served_first_come_first(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let (one, two) = (Flight::waiting(world, &key("k")).await, Flight::waiting(world, &key("k")).await);
    one.must_wait().await;
    assert_eq!(holder.hand_over(0).await, HandedOver::ToWaiter);
    assert_eq!(one.granted(world).await, 0);
    assert!(two.is_passed_over(world).await);
    assert_eq!(one.hand_over(0).await, HandedOver::ToWaiter);
    assert_eq!(two.granted(world).await, 0);
    assert_eq!(two.hand_over(0).await, HandedOver::Freed, "the first is not queued a second time");
}

async fn a_hand_over_reports_how_many_loads_have_vanished(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let waiter = Flight::waiting(world, &key("k")).await;
    assert_eq!(holder.hand_over(2).await, HandedOver::ToWaiter);
    assert_eq!(waiter.hints().await, Hints { granted: Some(2), ..Hints::default() });
    waiter.must_hold().await;
    assert_eq!(holder.renew(LEASE).await, TokenCheck::Lost);
    assert_eq!(waiter.commit("v").await, TokenCheck::Held);
}

async fn a_hand_over_skips_dead_nodes(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    for _ in 0..3 {
        let Flight { store, watch, .. } = Flight::waiting(world, &key("k")).await;
        drop(watch);
        world.dead(store).await;
    }
    let alive = Flight::waiting(world, &key("k")).await;
    assert_eq!(holder.hand_over(1).await, HandedOver::ToWaiter);
    assert_eq!(alive.hints().await.granted, Some(1));
    alive.must_hold().await;
}

async fn a_hand_over_passes_over_waiters_that_have_left(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let node = world.node().await;
    for _ in 0..3 {
        let left = Flight::on(&node, &key("k"));
        left.must_wait().await;
    }
    let alive = Flight::waiting(world, &key("k")).await;
    assert_eq!(holder.hand_over(1).await, HandedOver::ToWaiter);
    assert_eq!(alive.granted(world).await, 1, "the node of the waiters that left hands over again");
    alive.must_hold().await;
}

/// A node that shuts down must not hand the lease to a waiter of its own that has just left. When two processes shut down
/// at once, the second must not hand its lease to the first, which can still receive messages.
async fn a_waiter_that_releases_gives_up_its_position(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let (leaves, stays) = (Flight::waiting(world, &key("k")).await, Flight::waiting(world, &key("k")).await);
    assert_eq!(leaves.release().await, TokenCheck::Lost);
    assert_eq!(holder.hand_over(0).await, HandedOver::ToWaiter);
    assert_eq!(stays.granted(world).await, 0);
    assert!(leaves.has_no_hints().await);
    // The position is also given up if it is the only one in the queue.
    let last = Flight::waiting(world, &key("k")).await;
    assert_eq!(last.release().await, TokenCheck::Lost);
    assert_eq!(stays.hand_over(0).await, HandedOver::Freed);
}

async fn a_hand_over_of_a_node_that_leaves_passes_over_its_own_waiters(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let own = Flight::on(&holder.store, &key("k"));
    own.must_wait().await;
    let other = Flight::waiting(world, &key("k")).await;
    assert_eq!(holder.end_handing_over(0, true).await, HandedOver::ToWaiter);
    other.must_hold().await;
    let last = Flight::on(&other.store, &key("k"));
    last.must_wait().await;
    assert_eq!(other.end_handing_over(0, true).await, HandedOver::Freed);
}

async fn a_grant_holds_though_its_message_is_never_read(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let (granted, other) = (Flight::waiting(world, &key("k")).await, Flight::waiting(world, &key("k")).await);
    assert_eq!(holder.hand_over(1).await, HandedOver::ToWaiter);
    other.must_wait().await;
    granted.must_hold().await;
    assert_eq!(granted.commit("v").await, TokenCheck::Held);
}

async fn a_hand_over_without_waiters_frees_the_lease(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    assert_eq!(holder.hand_over(1).await, HandedOver::Freed);
    Flight::holding(world, &key("k")).await;
}

async fn every_end_of_a_lease_wakes_every_waiter(world: &World) {
    let node = world.node().await;
    for end in ["commit", "fail", "release", "invalidate", "insert"] {
        let holder = Flight::holding(world, &key(end)).await;
        let mut waiters = vec![Flight::waiting(world, &key(end)).await];
        for _ in 0..2 {
            waiters.push(Flight::on(&node, &key(end)));
            waiters[waiters.len() - 1].must_wait().await;
        }
        match end {
            "commit" => assert_eq!(holder.commit("v").await, TokenCheck::Held),
            "fail" => assert_eq!(holder.fail(holder.failure()).await, TokenCheck::Held),
            "release" => assert_eq!(holder.release().await, TokenCheck::Held),
            "invalidate" => holder.invalidate().await,
            _ => {
                holder.insert("v", None).await;
            }
        }
        for waiter in &waiters {
            let hints = waiter.hints().await;
            if matches!(end, "commit" | "fail") {
                assert_eq!(hints.finished, Some(holder.token.clone()), "{end}");
            }
            assert_eq!(hints.granted, None, "{end}");
        }
        // All waiters were notified, so the queue is empty.
        let late = Flight::separate(world, &key(end)).await;
        let seen = bytes("v");
        late.acquire(Acquire { seen: Some(&seen), ..late.ask() }).await;
        assert_eq!(late.hand_over(0).await, HandedOver::Freed, "{end}");
    }
}

/// Invariant 3 of the store: the waiter is registered before it tries to acquire.
async fn a_wake_up_before_the_waiter_looks_is_retained(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    let waiter = Flight::waiting(world, &key("k")).await;
    holder.commit("v").await;
    // The message arrives before any task awaits it.
    assert!(Flight::on(&waiter.store, &key("other")).has_no_hints().await);
    assert_eq!(waiter.hints().await.finished, Some(holder.token.clone()));
}

async fn an_invalidation_ends_the_lease_and_notifies_holder_and_waiters(world: &World) {
    let failed = Flight::holding(world, &key("k")).await;
    failed.fail(Fail { replay: LEASE, ..failed.failure() }).await;
    let other = Flight::separate(world, &key("k")).await;
    other.invalidate().await;
    let holder = Flight::holding(world, &key("k")).await;
    let waiter = Flight::waiting(world, &key("k")).await;
    other.invalidate().await;
    assert!(holder.hints().await.invalidated);
    assert!(waiter.hints().await.invalidated);
    assert_eq!(holder.renew(LEASE).await, TokenCheck::Lost);
    assert_eq!(holder.commit("older").await, TokenCheck::Lost);
    assert_eq!(other.look_up().await, None);
    waiter.must_hold().await;
    assert_eq!(waiter.commit("newer").await, TokenCheck::Held);
    other.invalidate().await;
    assert_eq!(other.look_up().await, None);
}

/// If the entry that should be replaced was removed or replaced, nothing is stored. An insertion that is sent again because its first
/// answer was lost takes effect once.
async fn an_insertion_over_an_entry_replaces_no_other_entry(world: &World) {
    let one = Flight::separate(world, &key("k")).await;
    one.insert("a", None).await;
    one.insert("b", Some("a")).await;
    assert_eq!(one.look_up().await, Some(bytes("b")));
    one.insert("b", Some("a")).await;
    assert_eq!(one.look_up().await, Some(bytes("b")));
    one.insert("c", Some("a")).await;
    assert_eq!(one.look_up().await, None, "something else was there, and is invalidated");
    one.insert("c", Some("a")).await;
    assert_eq!(one.look_up().await, None, "nothing was there");
}

async fn an_insertion_beats_a_running_lease(world: &World) {
    let holder = Flight::holding(world, &key("k")).await;
    holder.insert("inserted", None).await;
    assert!(holder.hints().await.invalidated);
    assert_eq!(holder.commit("older").await, TokenCheck::Lost);
    assert_eq!(holder.fail(holder.failure()).await, TokenCheck::Lost);
    assert_eq!(holder.look_up().await, Some(bytes("inserted")));
}

async fn resources_are_independent(world: &World) {
    let (one, two) = (Flight::holding(world, &key("a")).await, Flight::holding(world, &key("b")).await);
    let (on_a, on_b) = (Flight::waiting(world, &key("a")).await, Flight::waiting(world, &key("b")).await);
    one.commit("v").await;
    on_a.hints().await;
    assert!(on_b.has_no_hints().await);
    assert_eq!(two.look_up().await, None);
    one.invalidate().await;
    assert_eq!(two.renew(LEASE).await, TokenCheck::Held);
}

async fn a_name_of_any_bytes_is_distinguished_in_messages(world: &World) {
    let names: [&[u8]; 5] = [b"a:b", b"{}", b"} w\r\n", &[0, 255, 37], &[b'k'; 5_000]];
    for name in names {
        let k = Key::new("name space", &CacheKey::from(name));
        let holder = Flight::holding(world, &k).await;
        let waiter = Flight::waiting(world, &k).await;
        assert_eq!(holder.hand_over(1).await, HandedOver::ToWaiter);
        assert_eq!(waiter.hints().await.granted, Some(1));
        let second = Flight::waiting(world, &k).await;
        waiter.commit("v").await;
        assert_eq!(second.hints().await.finished, Some(waiter.token.clone()));
    }
}
