//! The holder of a mutex, its time to live, and the steps that only the holder may take.

use super::*;
use crate::store::StoreErrorKind;

contract! {
    a_free_mutex_is_granted_and_a_held_one_says_for_how_long,
    of_simultaneous_callers_one_is_granted,
    taking_again_is_granted_with_the_same_fence_and_the_full_time,
    a_mutex_runs_out_by_itself,
    a_mutex_without_an_expiry_stays,
    a_late_free_does_not_free_the_next_holders_mutex,
    a_free_by_a_token_that_never_held_changes_nothing,
    a_free_against_an_expiry_is_one_or_the_other,
    an_extension_restarts_the_time_and_adds_nothing,
    an_extension_of_a_lost_mutex_does_not_restore_it,
    a_look_names_the_holder_and_leaves_nothing,
    fences_grow_over_free_expiry_hand_over_and_force,
    force_notifies_the_holder_and_frees,
    mutexes_are_independent,
    any_time_to_live_is_accepted,
    names_of_any_shape_are_distinguished,
    a_closed_node_says_so,
}

async fn a_free_mutex_is_granted_and_a_held_one_says_for_how_long(world: &World) {
    let (holder, fence) = Asker::holding(world, &mutex("k")).await;
    assert!(fence > 0);
    let other = Asker::separate(world, &mutex("k")).await;
    let Taken::Busy { remaining: Some(remaining) } = other.take(other.ask()).await else {
        panic!("it is held");
    };
    assert!(remaining <= LEASE && remaining > LEASE / 2, "{remaining:?}");
    assert!(holder.owns().await && !other.owns().await);
    assert!(holder.free().await);
    other.granted().await;
    assert!(other.owns().await);
}

async fn of_simultaneous_callers_one_is_granted(world: &World) {
    let nodes = [world.node().await, world.node().await, world.node().await];
    let askers: Vec<_> = (0..60).map(|i| Asker::on(&nodes[i % 3], &mutex("k"))).collect();
    let taken = join_all(askers.iter().map(|asker| asker.take(asker.ask()))).await;
    assert_eq!(taken.iter().filter(|taken| matches!(taken, Taken::Granted { .. })).count(), 1);
}

/// Invariant 3 of locks (S1.23): a take whose answer was lost is sent again.
async fn taking_again_is_granted_with_the_same_fence_and_the_full_time(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    let Taken::Granted { fence } = holder.take_for(Some(ms(2_000))).await else { panic!("it is free") };
    assert_eq!(holder.must_take().await, fence);
    let other = Asker::separate(world, &mutex("k")).await;
    let taken = other.take(other.ask()).await;
    assert!(matches!(taken, Taken::Busy { remaining: Some(left) } if left > ms(2_000)), "{taken:?}");
    assert!(holder.free().await);
    let granted = other.granted().await;
    assert_eq!(other.must_take().await, granted, "a grant that was sent is the same");
}

async fn a_mutex_runs_out_by_itself(world: &World) {
    let (old, new) = (Asker::separate(world, &mutex("k")).await, Asker::separate(world, &mutex("k")).await);
    let started = Instant::now();
    assert!(matches!(old.take_for(Some(ms(150))).await, Taken::Granted { .. }));
    let ask = Take { queue: false, ..new.ask() };
    while let Taken::Busy { remaining } = new.take(ask).await {
        assert!(remaining.is_some_and(|left| left <= ms(150)), "{remaining:?}");
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(5)).await;
    }
    assert!(started.elapsed() >= ms(149), "{:?}", started.elapsed());
}

/// S1.3: a mutex that was taken without a time to live is the only kind of key without an expiry.
async fn a_mutex_without_an_expiry_stays(world: &World) {
    let (holder, waiter) =
        (Asker::separate(world, &mutex("k")).await, Asker::separate(world, &mutex("k")).await);
    assert!(matches!(holder.take_for(None).await, Taken::Granted { .. }));
    assert!(holder.look().await.is_some_and(|holder| holder.remaining.is_none()));
    assert_eq!(waiter.take_for(None).await, Taken::Busy { remaining: None });
    assert!(matches!(holder.take_for(None).await, Taken::Granted { .. }), "again");
    assert!(holder.free().await);
    waiter.granted().await;
    waiter.claim(world, None).await;
    assert!(waiter.look().await.is_some_and(|holder| holder.remaining.is_none()), "as it has sent a request");
    assert!(waiter.free().await);
    assert!(waiter.look().await.is_none());
}

/// S0.7: the late holder of an expired mutex does not free another token's.
async fn a_late_free_does_not_free_the_next_holders_mutex(world: &World) {
    let late = Asker::separate(world, &mutex("k")).await;
    late.take_for(Some(ms(20))).await;
    let next = Asker::separate(world, &mutex("k")).await;
    let ask = Take { queue: false, ..next.ask() };
    until(async || matches!(next.take(ask).await, Taken::Granted { .. })).await;
    assert!(!late.free().await);
    assert!(next.owns().await);
    assert!(next.free().await);
    assert!(!next.free().await, "the second time it holds nothing");
}

async fn a_free_by_a_token_that_never_held_changes_nothing(world: &World) {
    let stranger = Asker::separate(world, &mutex("k")).await;
    assert!(!stranger.free().await, "of nothing");
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    assert!(!stranger.free().await);
    assert!(!stranger.extend(Some(LEASE)).await);
    assert!(holder.owns().await);
}

/// S1.22: a token that takes the mutex after the expiry keeps it, whenever the old holder's free comes.
async fn a_free_against_an_expiry_is_one_or_the_other(world: &World) {
    let (node, other) = (world.node().await, world.node().await);
    for round in 0..60 {
        let name = mutex(&format!("race {round}"));
        let (old, new) = (Asker::on(&node, &name), Asker::on(&other, &name));
        old.take_for(Some(ms(3))).await;
        if let Taken::Granted { .. } = new.take(new.ask()).await {
            continue; // The machine is busy, and the time has passed already.
        }
        let free = async {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(2_000..4_500))).await;
            old.free().await
        };
        // The waiter's timer starts this take, at about the same time as the free.
        let take = async {
            tokio::time::sleep(ms(3)).await;
            new.take(new.ask()).await
        };
        let (_, taken) = tokio::join!(free, take);
        if let Taken::Busy { remaining } = taken {
            // This process's clock was a little ahead of the store's.
            assert!(remaining.is_some_and(|left| left <= ms(3)), "{remaining:?}");
            until(async || matches!(new.take(new.ask()).await, Taken::Granted { .. })).await;
        }
        assert!(!old.owns().await && new.owns().await, "round {round}");
        assert!(!old.free().await && new.free().await, "round {round}");
    }
}

/// S5.2: an extension sets the remaining time to the requested one, and does not add to it.
async fn an_extension_restarts_the_time_and_adds_nothing(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    holder.take_for(Some(ms(5_000))).await;
    assert!(holder.extend(Some(ms(7_000))).await);
    let left = holder.look().await.and_then(|holder| holder.remaining).expect("it ends");
    assert!(left <= ms(7_000) && left > ms(5_000), "{left:?}");
    assert!(holder.extend(None).await);
    assert_eq!(holder.look().await.expect("held").remaining, None);
    assert!(holder.extend(Some(LEASE)).await);
    assert!(holder.look().await.is_some_and(|holder| holder.remaining.is_some()));
}

async fn an_extension_of_a_lost_mutex_does_not_restore_it(world: &World) {
    let holder = Asker::separate(world, &mutex("k")).await;
    holder.take_for(Some(ms(20))).await;
    until(async || holder.look().await.is_none()).await;
    assert!(!holder.extend(Some(LEASE)).await);
    assert!(!holder.extend(None).await);
    assert!(holder.look().await.is_none());
    let (next, _) = Asker::holding(world, &mutex("k")).await;
    assert!(!holder.extend(Some(ms(1))).await);
    assert!(next.owns().await);
}

async fn a_look_names_the_holder_and_leaves_nothing(world: &World) {
    let asker = Asker::separate(world, &mutex("k")).await;
    assert!(asker.look().await.is_none());
    asker.must_take().await;
    let holder = asker.look().await.expect("held");
    assert_eq!(holder.token, asker.token.as_str().as_bytes());
    assert!(holder.remaining.is_some_and(|left| left <= LEASE && left > LEASE / 2), "{holder:?}");
    assert!(asker.free().await);
    assert!(asker.look().await.is_none());
}

/// S3.16: each grant has a greater fence than the one before, however the mutex was freed.
async fn fences_grow_over_free_expiry_hand_over_and_force(world: &World) {
    let node = world.node().await;
    let mut last = 0;
    let mut check = |fence: u64, how: &str| {
        assert!(fence > last, "after {how}: {fence} after {last}");
        last = fence;
    };
    for _ in 0..20 {
        let (one, two) = (Asker::on(&node, &mutex("k")), Asker::on(&node, &mutex("k")));
        check(one.must_take().await, "a free");
        two.must_wait().await;
        one.free().await;
        check(two.granted().await, "a hand-over");
        one.must_wait().await;
        assert!(two.force().await);
        check(one.granted().await, "a force");
        assert!(one.free().await);
        let Taken::Granted { fence } = two.take_for(Some(ms(5))).await else { panic!("it is free") };
        check(fence, "a free");
        let ask = Take { queue: false, ..one.ask() };
        let after = loop {
            match one.take(ask).await {
                Taken::Granted { fence } => break fence,
                Taken::Busy { .. } => tokio::time::sleep(ms(1)).await,
            }
        };
        check(after, "an expiry");
        assert!(one.free().await);
    }
}

async fn force_notifies_the_holder_and_frees(world: &World) {
    let other = Asker::separate(world, &mutex("k")).await;
    assert!(!other.force().await, "it has no holder");
    let (holder, _) = Asker::holding(world, &mutex("k")).await;
    holder.wait.hold();
    let (one, two) = (Asker::waiting(world, &mutex("k")).await, Asker::waiting(world, &mutex("k")).await);
    assert!(other.force().await);
    assert!(holder.notified().await.broken);
    one.granted().await;
    assert!(!holder.free().await && !holder.extend(Some(LEASE)).await);
    assert!(one.free().await);
    two.granted().await;
    assert!(other.force().await);
    assert!(other.look().await.is_none());
}

async fn mutexes_are_independent(world: &World) {
    let (on_a, _) = Asker::holding(world, &mutex("a")).await;
    let (on_b, _) = Asker::holding(world, &mutex("b")).await;
    let (waits_a, waits_b) =
        (Asker::waiting(world, &mutex("a")).await, Asker::waiting(world, &mutex("b")).await);
    assert!(on_a.free().await);
    waits_a.granted().await;
    assert!(waits_b.has_no_hints().await);
    assert!(on_b.owns().await);
}

/// S0.4: every time to live is accepted, and none makes a key that stays for ever.
async fn any_time_to_live_is_accepted(world: &World) {
    let node = world.node().await;
    for ttl in [Duration::ZERO, Duration::from_nanos(1), ms(1), Duration::from_secs(1 << 40), Duration::MAX] {
        let (holder, waiter) = (Asker::on(&node, &mutex("k")), Asker::on(&node, &mutex("k")));
        assert!(matches!(holder.take_for(Some(ttl)).await, Taken::Granted { .. }), "{ttl:?}");
        // A time to live below a millisecond may already have passed.
        let _ = waiter.take_for(Some(ttl)).await;
        holder.extend(Some(ttl)).await;
        for asker in [holder, waiter] {
            let freed = asker.node.free_mutex(&asker.name, &asker.token, Some(ttl), WITHIN).await;
            freed.expect("free");
        }
        until(async || Asker::on(&node, &mutex("k")).look().await.is_none()).await;
    }
}

async fn names_of_any_shape_are_distinguished(world: &World) {
    let plain = Key::new("name space", &CacheKey::from(&[0, 255, b'{', b'}', b':', b' '][..]));
    let long = Key::new("ns", &CacheKey::from(&[b'k'; 5_000][..]));
    // The last two have one text, as the tag of our mutex and as the key of a foreign mutex.
    let names = [LockName::mutex(plain.name()), LockName::mutex(long.name()), LockName::mutex("sg1:k")]
        .into_iter()
        .chain([LockName::prefixed("sg1:k")]);
    let mut all = Vec::new();
    for name in names {
        let (holder, _) = Asker::holding(world, &name).await;
        let waiter = Asker::waiting(world, &name).await;
        all.push((holder, waiter));
    }
    for (holder, waiter) in &all {
        assert!(holder.owns().await);
        assert!(holder.free().await);
        waiter.granted().await;
    }
    for (_, waiter) in &all {
        assert!(waiter.has_no_hints().await && waiter.free().await);
    }
}

async fn a_closed_node_says_so(world: &World) {
    let closed = Asker::separate(world, &mutex("k")).await;
    closed.must_take().await;
    closed.node.close();
    let locks = &closed.node;
    let kinds = [
        locks.take_mutex(&closed.name, closed.ask(), WITHIN).await.map(|_| ()),
        locks.free_mutex(&closed.name, &closed.token, Some(LEASE), WITHIN).await.map(|_| ()),
        locks.look_at_semaphore(&semaphore("k"), WITHIN).await.map(|_| ()),
    ]
    .map(|answer| answer.expect_err("it is closed").kind);
    assert_eq!(kinds, [StoreErrorKind::Closed; 3]);
    assert!(Asker::separate(world, &mutex("k")).await.look().await.is_some(), "the others go on");
}
