//! Promises 4 to 6 while one node is cut off from the server: the other nodes continue, and neither late nor lost commands of the cut-off
//! node do harm.

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::assert_nothing_left;
use crate::support::proxy::{Mode, Proxy};

/// The lease is so long that a test fails if the lease is never released.
const LONG_LEASE: Duration = Duration::from_secs(60);

/// Two nodes on one server, one of them behind a proxy.
struct Cut {
    server: RedisServer,
    proxy: Proxy,
    behind: StampedeGuard,
    direct: StampedeGuard,
}

impl Cut {
    async fn new(lease: Duration) -> Self {
        let server = RedisServer::start();
        let proxy = Proxy::start(server.port()).await;
        let behind = unconnected(&proxy.url(), lease_of(lease));
        connects(&behind).await;
        let direct = local(&server, lease_of(lease)).await;
        // The server learns the scripts first, so that the cut affects one EVALSHA, and not the EVAL that follows an unknown script.
        answer(&behind, "warm", 1).await;
        Self { server, proxy, behind, direct }
    }

    /// Like `new`, with a short budget for the node behind the proxy.
    async fn hurried(lease: Duration) -> Self {
        let cut = Self::new(lease).await;
        Self { behind: cut.behind.with_policy(hurried_lease_of(lease)), ..cut }
    }

    async fn nothing_left(&self) {
        settled(&[self.behind.clone(), self.direct.clone()]).await;
        assert_nothing_left(&self.server, SOON).await;
    }
}

#[tokio::test]
async fn a_leader_that_is_cut_off_costs_one_lease_and_can_not_overwrite() {
    let cut = Cut::hurried(ms(2_000)).await;
    let (old, new, loads) = (Gate::closed(), Gate::closed(), Counter::default());
    new.open();
    let leader = held_call(&cut.behind, 1, &old, &loads);
    loads.reach(1).await;
    let waiter = held_call(&cut.direct, 2, &new, &loads);
    queued(&cut.server, "k", 1).await;
    let since = Instant::now();
    cut.proxy.set(Mode::BlackHole);
    assert_eq!(waiter.await.expect("joined"), 2);
    assert!(since.elapsed() < ms(2_000 + 100) + STANDSTILL, "one lease: {:?}", since.elapsed());
    assert_eq!(loads.started(), 2);
    // The load ends during the cut: its own caller does not wait for the store.
    let ended = Instant::now();
    old.open();
    assert_eq!(leader.await.expect("joined"), 1);
    assert!(ended.elapsed() < ms(800) + Duration::from_secs(1) + STANDSTILL, "{:?}", ended.elapsed());
    // The commands that were held back arrive now.
    cut.proxy.set(Mode::Pass);
    cut.nothing_left().await;
    assert_eq!(cut.direct.get::<u32>("k").await.expect("store"), Some(2));
    assert_eq!(answer(&cut.direct, "k", 3).await, 2);
}

#[tokio::test]
async fn a_waiter_that_is_cut_off_loads_for_itself_after_its_wait() {
    const LEASE: Duration = Duration::from_secs(3);
    let cut = Cut::hurried(LEASE).await;
    let (gate, open, loads) = (Gate::closed(), Gate::closed(), Counter::default());
    open.open();
    let leader = held_call(&cut.direct, 1, &gate, &loads);
    loads.reach(1).await;
    let waiter = held_call(&cut.behind, 2, &open, &loads);
    queued(&cut.server, "k", 1).await;
    let since = Instant::now();
    cut.proxy.set(Mode::BlackHole);
    assert_eq!(waiter.await.expect("joined"), 2);
    let (took, most) = (since.elapsed(), LEASE + ms(800) + Duration::from_secs(2) + STANDSTILL);
    assert!(took < most, "one lease, one budget and slack: {took:?}");
    gate.open();
    assert_eq!(leader.await.expect("joined"), 1);
    cut.proxy.set(Mode::Pass);
    cut.nothing_left().await;
    assert_eq!(cut.direct.get::<u32>("k").await.expect("store"), Some(1), "stored only under a lease");
    assert_eq!(loads.started(), 2);
}

/// The commit runs and its reply is lost: the value is stored, and the other node reads it.
#[tokio::test]
async fn a_commit_with_a_lost_reply_counts() {
    let cut = Cut::new(LONG_LEASE).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leader = held_call(&cut.behind, 1, &gate, &loads);
    loads.reach(1).await;
    let waiter = held_call(&cut.direct, 2, &gate, &loads);
    queued(&cut.server, "k", 1).await;
    cut.proxy.set(Mode::NoReplies);
    gate.open();
    assert_eq!(waiter.await.expect("joined"), 1);
    assert_eq!(leader.await.expect("joined"), 1);
    assert_eq!(loads.started(), 1);
    cut.proxy.set(Mode::Pass);
    cut.nothing_left().await;
    // The node may have abandoned the silent connection, so this waits until it is connected again.
    connects(&cut.behind).await;
    assert_eq!(answer(&cut.behind, "k", 3).await, 1);
}

/// The lease is granted and the reply is lost: the caller loads without a lease, and its guard releases the lease as soon as it can reach
/// the server.
async fn gives_back_a_lease_it_did_not_hear_of(cut_off: impl FnOnce(&Proxy)) {
    let cut = Cut::new(LONG_LEASE).await;
    let open = Gate::closed();
    open.open();
    let loads = Counter::default();
    // The acquire runs, but its reply is held back.
    let held = Gate::closed();
    let waits = tokio::spawn({
        let (guard, held, loads) = (cut.behind.clone(), held.clone(), loads.clone());
        async move {
            held.pass().await;
            let load = move || async move {
                let _running = loads.start();
                Ok::<_, String>(1u32)
            };
            guard.get_or_load("k", load).await.expect("a value")
        }
    });
    cut.proxy.set(Mode::NoReplies);
    held.open();
    eventually("the lease is taken", SOON, async || {
        cut.server.keys().iter().any(|key| key == "sg1:l:{default:k}")
    })
    .await;
    cut_off(&cut.proxy);
    assert_eq!(waits.await.expect("joined"), 1);
    cut.proxy.set(Mode::Pass);
    // The other node gets the lease much earlier than the lease would expire.
    let next = tokio::time::timeout(SOON, held_call(&cut.direct, 2, &open, &loads)).await;
    assert_eq!(next.expect("the lost lease was released").expect("joined"), 2);
    cut.nothing_left().await;
}

#[tokio::test]
async fn a_lease_grant_lost_to_a_timeout_is_released() {
    gives_back_a_lease_it_did_not_hear_of(|_| ()).await;
}

/// The connection breaks after the acquire has run.
#[tokio::test]
async fn a_lease_grant_lost_with_the_connection_is_released() {
    gives_back_a_lease_it_did_not_hear_of(|proxy| proxy.set(Mode::Reset)).await;
}

/// Regression: an insertion has no lease, and one that was delayed and abandoned overwrote newer insertions of any node.
#[tokio::test]
async fn an_insertion_that_comes_late_does_not_overwrite_a_newer_one() {
    let cut = Cut::new(LONG_LEASE).await;
    cut.behind.insert("k", &0u32).await.expect("confirmed");
    // The command is held back, and the guard retries it on another connection.
    let held = tokio::spawn({
        let behind = cut.behind.clone();
        cut.proxy.set(Mode::BlackHole);
        async move { behind.insert("k", &1u32).await }
    });
    let error = held.await.expect("joined").expect_err("it was not confirmed");
    assert!(error.to_string().contains("not confirmed"), "{error}");
    cut.direct.insert("k", &2u32).await.expect("confirmed");
    // By the server's clock, a command may run until one second after its caller has given up.
    tokio::time::sleep(ms(1_500)).await;
    cut.proxy.set(Mode::Pass);
    // The command that was held back arrives before any later one.
    connects(&cut.behind).await;
    for _ in 0..20 {
        assert_eq!(cut.direct.get::<u32>("k").await.expect("store"), Some(2));
        tokio::time::sleep(ms(10)).await;
    }
    cut.behind.insert("k", &3u32).await.expect("confirmed");
    assert_eq!(cut.direct.get::<u32>("k").await.expect("store"), Some(3));
    cut.nothing_left().await;
}

/// A distant server is slow, not down.
#[tokio::test]
async fn a_slow_network_costs_its_round_trips_and_no_load() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    // A follower makes three round trips. Each of them may take one second, and together they may take four.
    let guards = [(); 3].map(|()| unconnected(&proxy.url(), lease_of(LONG_LEASE)));
    for guard in &guards {
        connects(guard).await;
        answer(guard, "warm", 1).await;
    }
    proxy.set(Mode::Delay(ms(100)));
    let loads = Counter::default();
    let callers = (0..30).map(|caller| {
        let loads = loads.clone();
        guards[caller % 3].get_or_load("k", move || async move {
            let _running = loads.start();
            tokio::time::sleep(ms(600)).await;
            Ok::<_, String>(1)
        })
    });
    assert!(join_all(callers).await.into_iter().all(|value| value.is_ok()));
    assert_eq!(loads.started(), 1);
    settled(&guards).await;
    proxy.set(Mode::Pass);
    assert_nothing_left(&server, SOON).await;
}
