//! How much later a wait ends without notifications. The lease is so long that no waiter can have waited for its end.

use super::*;
use crate::support::rounds::{Rounds, Timing};

const LEASE: Duration = Duration::from_secs(120);
/// The interval in which a waiter without notifications checks the lease.
const LOOK: Duration = Duration::from_millis(500);
/// The time until a node notices that messages do not arrive: it pings the inbox within a second, and waits up to a second for the reply.
const NOTICED: Duration = Duration::from_secs(2);

/// Returns the time from the end of a load until the waiting node's answer. `silence` is called just before the load ends.
async fn late(
    server: &RedisServer,
    [leads, waits]: &[StampedeGuard; 2],
    round: usize,
    silence: impl FnOnce(),
) -> Duration {
    let (key, gate, loads) = (format!("k-{round}"), Gate::closed(), Counter::default());
    let leader = held_call_of(leads, &key, 1, &gate, &loads);
    loads.reach(1).await;
    let waiter = held_call_of(waits, &key, 2, &gate, &loads);
    queued(server, &key, 1).await;
    silence();
    gate.open();
    assert_eq!(leader.await.expect("joined"), 1);
    let ended = Instant::now();
    assert_eq!(waiter.await.expect("joined"), 1);
    assert_eq!(loads.started(), 1);
    ended.elapsed()
}

#[tokio::test]
async fn without_the_right_to_subscribe_waits_end_half_a_second_late() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
    let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
    let mut rounds = Rounds::of("subscriptions refused");
    while let Some(round) = rounds.next() {
        rounds.note([Timing::once("late", late(&server, &guards, round, || ()).await, LOOK)]);
    }
}

/// A node that leads, and a node that waits behind a proxy, which can block its messages.
async fn with_a_proxied_waiter() -> (RedisServer, Proxy, [StampedeGuard; 2]) {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let guards = [local(&server, lease_of(LEASE)).await, unconnected(&proxy.url(), lease_of(LEASE))];
    // The first load opens the inbox.
    answer(&guards[1], "warm", 1).await;
    (server, proxy, guards)
}

fn hears(guard: &StampedeGuard, state: LinkState) -> impl Future<Output = ()> + '_ {
    eventually_eq("its inbox", SOON, state, async move || guard.health().inbox)
}

#[tokio::test]
async fn where_messages_do_not_come_waits_end_half_a_second_late() {
    let (server, proxy, guards) = with_a_proxied_waiter().await;
    hears(&guards[1], LinkState::Up).await;
    proxy.set(Mode::BlackHoleSubscriptions);
    hears(&guards[1], LinkState::Down).await;
    let mut rounds = Rounds::of("messages do not come");
    while let Some(round) = rounds.next() {
        rounds.note([Timing::once("late", late(&server, &guards, round, || ()).await, LOOK)]);
    }
}

#[tokio::test]
async fn where_messages_cease_waits_end_two_seconds_late() {
    let (server, proxy, guards) = with_a_proxied_waiter().await;
    let mut rounds = Rounds::of("messages cease");
    while let Some(round) = rounds.next() {
        hears(&guards[1], LinkState::Up).await;
        let late = late(&server, &guards, round, || proxy.set(Mode::BlackHoleSubscriptions)).await;
        rounds.note([Timing::once("late", late, NOTICED)]);
        proxy.set(Mode::Pass);
    }
}
