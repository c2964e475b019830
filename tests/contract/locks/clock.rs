//! A server's clock is set back while a holder dies, so the remaining time is longer than the holder requested.

use super::super::on_redis::at;
use super::*;

on_servers! {
    a_mutex_with_more_time_than_its_holder_requested_is_cut,
    a_mutex_whose_expiry_was_removed_gets_it_back,
    a_mutex_that_was_extended_for_longer_keeps_that_time,
    a_renewed_mutex_keeps_its_time,
    permits_with_more_time_than_their_leases_are_cut,
    a_permit_with_a_longer_lease_than_the_others_keeps_it,
}

const SHORT: Duration = Duration::from_millis(400);
const MINUTE: &str = "60700";

/// An asker with a token that says for how long it wants the lock.
fn wanting(node: &Store, name: &LockName, ttl: Duration) -> Asker {
    let token = Token::mint_for(node.node(), ttl);
    let wait = node.await_grant(name, &token);
    Asker { node: node.clone(), name: name.clone(), token, wait }
}

/// A holder of the mutex, and another asker that has sent nothing yet, each on a separate node.
async fn holder_and_waiter(world: &World, ttl: Duration) -> (Asker, Asker) {
    let (one, two) = (world.node().await, world.node().await);
    let holder = wanting(&one, &mutex("k"), ttl);
    assert!(matches!(holder.take_for(Some(ttl)).await, Taken::Granted { .. }));
    (holder, wanting(&two, &mutex("k"), LEASE))
}

/// Asserts that the answer says that another token holds the mutex, for at most `longest`.
#[track_caller]
fn assert_busy_for(taken: Taken, longest: Duration) {
    assert!(matches!(taken, Taken::Busy { remaining: Some(left) } if left <= longest), "{taken:?}");
}

async fn a_mutex_with_more_time_than_its_holder_requested_is_cut(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (_holder, waiter) = holder_and_waiter(world, SHORT).await;
    server.run::<()>(&["PEXPIRE", &at("m", "k"), MINUTE]);
    let started = Instant::now();
    assert_busy_for(waiter.take(waiter.ask()).await, SHORT);
    until(async || matches!(waiter.take(waiter.ask()).await, Taken::Granted { .. })).await;
    assert!(started.elapsed() < 3 * SHORT, "{:?}", started.elapsed());
}

async fn a_mutex_whose_expiry_was_removed_gets_it_back(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (_holder, waiter) = holder_and_waiter(world, SHORT).await;
    server.run::<()>(&["PERSIST", &at("m", "k")]);
    assert_busy_for(waiter.take(waiter.ask()).await, SHORT);
    let endless = Asker::on(&waiter.node, &mutex("endless"));
    assert!(matches!(endless.take_for(None).await, Taken::Granted { .. }));
    let behind = Asker::on(&waiter.node, &mutex("endless"));
    assert_eq!(behind.take(behind.ask()).await, Taken::Busy { remaining: None }, "its token says no time");
    endless.free().await;
}

async fn a_mutex_that_was_extended_for_longer_keeps_that_time(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (holder, waiter) = holder_and_waiter(world, SHORT).await;
    assert!(holder.extend(Some(ms(20_000))).await);
    for _ in 0..2 {
        let taken = waiter.take(waiter.ask()).await;
        assert!(
            matches!(taken, Taken::Busy { remaining: Some(left) } if left > ms(10_000)),
            "it requested that itself: {taken:?}"
        );
    }
    server.run::<()>(&["PEXPIRE", &at("m", "k"), MINUTE]);
    assert_busy_for(waiter.take(waiter.ask()).await, ms(20_000));
    // The next holder has not requested that long time, so its mutex is cut to what it requested.
    assert!(holder.free().await);
    waiter.granted().await;
    server.run::<()>(&["PEXPIRE", &at("m", "k"), MINUTE]);
    let third = wanting(&holder.node, &mutex("k"), LEASE);
    assert_busy_for(third.take(third.ask()).await, LEASE);
}

/// The holder is alive: its watchdog extends the mutex several times within its time to live.
async fn a_renewed_mutex_keeps_its_time(world: &World) {
    let server = world.server_of(&mutex("k").tag);
    let (holder, waiter) = holder_and_waiter(world, SHORT).await;
    server.run::<()>(&["PEXPIRE", &at("m", "k"), MINUTE]);
    assert_busy_for(waiter.take(waiter.ask()).await, SHORT);
    for _ in 0..6 {
        tokio::time::sleep(SHORT / 4).await;
        assert!(holder.extend(Some(SHORT)).await, "it is still the holder's");
        assert_busy_for(waiter.take(waiter.ask()).await, SHORT);
    }
}

/// The scores of holders are moments of the server's clock. When the clock is set back by a minute, they are a minute too late.
async fn permits_with_more_time_than_their_leases_are_cut(world: &World) {
    let server = world.server_of(&semaphore("k").tag);
    let (one, two) = (world.node().await, world.node().await);
    let dead: Vec<_> = (0..3).map(|_| wanting(&one, &semaphore("k"), SHORT)).collect();
    for holder in &dead {
        let taken = holder.permit(TakePermit { lease: SHORT, ..holder.ask_permit(3) }).await;
        assert!(taken.granted);
    }
    for holder in &dead {
        server.run::<()>(&["ZINCRBY", &at("sh", "k"), MINUTE, holder.token.as_str()]);
    }
    let waiters: Vec<_> = (0..3).map(|_| wanting(&two, &semaphore("k"), LEASE)).collect();
    let started = Instant::now();
    for waiter in &waiters {
        let taken = waiter.permit(waiter.ask_permit(3)).await;
        assert!(!taken.granted && taken.next_expiry.is_some_and(|left| left <= SHORT), "{taken:?}");
    }
    for waiter in &waiters {
        until(async || waiter.permit(waiter.ask_permit(3)).await.granted).await;
    }
    assert!(started.elapsed() < 3 * SHORT, "all at once: {:?}", started.elapsed());
}

async fn a_permit_with_a_longer_lease_than_the_others_keeps_it(world: &World) {
    let (one, two) = (world.node().await, world.node().await);
    let holder = wanting(&one, &semaphore("k"), ms(20_000));
    assert!(holder.permit(TakePermit { lease: ms(20_000), ..holder.ask_permit(1) }).await.granted);
    let waiter = wanting(&two, &semaphore("k"), SHORT);
    for _ in 0..2 {
        let taken = waiter.permit(TakePermit { lease: SHORT, ..waiter.ask_permit(1) }).await;
        assert!(!taken.granted && taken.next_expiry.is_some_and(|left| left > ms(10_000)), "{taken:?}");
    }
}
