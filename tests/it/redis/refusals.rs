//! A server that answers but refuses writes: out of memory, or demoted to a replica. Commits fail, no lease stays, no
//! caller is stuck, and all works again when the refusals end.

use std::pin::pin;

use futures_util::poll;
use stampede_guard::OnStoreDown;
use stampede_guard::health::Breaker;

use super::doctor::examined;
use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::probe::assert_nothing_left;
use crate::support::warnings::Warnings;

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
enum Refusal {
    OutOfMemory,
    ReadOnly,
}

impl Refusal {
    /// The length of the leases. Out of memory, leases can still be released. On a replica they cannot, and no waiter can be notified, so
    /// waiters wait for the end of the lease, as behind a dead leader.
    fn lease(self) -> Duration {
        match self {
            Self::OutOfMemory => LEASE,
            Self::ReadOnly => Duration::from_secs(2),
        }
    }

    fn begin(self, server: &RedisServer) {
        match self {
            Self::OutOfMemory => server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]),
            Self::ReadOnly => server.run::<()>(&["REPLICAOF", "127.0.0.1", "1"]),
        }
    }

    fn end(self, server: &RedisServer) {
        match self {
            Self::OutOfMemory => server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]),
            Self::ReadOnly => server.run::<()>(&["REPLICAOF", "NO", "ONE"]),
        }
    }
}

/// The server begins to refuse writes while one node holds a load and two others wait for it. Then the load ends.
async fn in_the_middle_of_a_load(refusal: Refusal) {
    let server = RedisServer::start();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(local(&server, lease_of(refusal.lease())).await);
    }
    let (gate, loads) = (Gate::closed(), Counter::default());
    let call =
        |guard: &StampedeGuard| tokio::spawn(held_load(guard, "k", Ok::<_, String>(1u8), &gate, &loads));
    let mut callers = vec![call(&guards[0])];
    loads.reach(1).await;
    for (waiting, guard) in guards[1..].iter().enumerate() {
        callers.extend((0..5).map(|_| call(guard)));
        queued(&server, "k", waiting + 1).await;
    }
    refusal.begin(&server);
    gate.open();
    for caller in callers {
        let answered = tokio::time::timeout(SOON, caller).await.expect("no caller is stuck");
        assert_eq!(answered.expect("joined").expect("a value"), 1);
    }
    // The value could not be stored, so each node has loaded it once for itself.
    assert_eq!(loads.started(), 3, "{refusal:?}");
    if matches!(refusal, Refusal::OutOfMemory) {
        assert_nothing_left(&server, SOON).await;
    }
    costs_little(&guards[0], refusal).await;

    refusal.end(&server);
    let back = Instant::now();
    while guards[0].get::<u32>("back").await.ok().flatten().is_none() {
        assert!(back.elapsed() < SOON, "{refusal:?}: nothing is stored again");
        answer(&guards[0], "back", 1).await;
        tokio::time::sleep(ms(10)).await;
    }
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

/// Checks that calls are answered while the server refuses writes, at little cost.
async fn costs_little(guard: &StampedeGuard, refusal: Refusal) {
    let guard = &guard.with_policy(hurried_lease_of(refusal.lease()));
    let mut added = Vec::new();
    for request in 0..40 {
        let started = Instant::now();
        assert_eq!(answer(guard, &format!("meanwhile-{request}"), 3).await, 3);
        added.push(started.elapsed());
    }
    added.sort();
    // Half of the time of a call that waits in vain for a reply.
    assert!(added[20] <= ms(100), "{refusal:?}: {added:?}");
    assert!(added[39] <= ms(1_200) + STANDSTILL, "{refusal:?}: {added:?}");
}

#[tokio::test]
async fn a_commit_refused_for_memory_leaves_no_lease_and_no_waiter() {
    in_the_middle_of_a_load(Refusal::OutOfMemory).await;
}

#[tokio::test]
async fn a_commit_refused_by_a_replica_leaves_no_lease_and_no_waiter() {
    in_the_middle_of_a_load(Refusal::ReadOnly).await;
}

#[tokio::test]
async fn loads_go_on_without_a_server_that_starts_out_of_memory() {
    let server = RedisServer::with_args(["--maxmemory", "1"]);
    let guard = local(&server, lease_of(LEASE)).await;
    costs_little(&guard, Refusal::OutOfMemory).await;
    assert_eq!(server.keys(), Vec::<String>::new());
    assert!(guard.stats().fail_open_loads >= 40);
}

/// Within one process, callers still share loads.
#[tokio::test]
async fn callers_of_one_node_share_a_load_though_the_server_refuses() {
    let server = RedisServer::with_args(["--maxmemory", "1"]);
    let guard = local(&server, lease_of(LEASE)).await;
    let loads = Counter::default();
    let callers = (0..20).map(|_| {
        let loads = loads.clone();
        guard.get_or_load("k", move || async move {
            let _running = loads.start();
            tokio::time::sleep(ms(300)).await;
            Ok::<_, String>(1)
        })
    });
    assert!(join_all(callers).await.into_iter().all(|value| value.is_ok()));
    assert_eq!(loads.started(), 1);
}

/// Regression: there was one warning per connection, so an outage after the first one was not reported.
#[tokio::test]
async fn each_outage_without_memory_is_one_warning() {
    let server = RedisServer::start();
    let guard = local(&server, lease_of(LEASE)).await;
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    for outage in 1..=2 {
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
        eventually("it is logged", SOON, async || {
            answer(&guard, &format!("during-{outage}"), 1).await;
            warnings.about("refuses").len() == outage
        })
        .await;
        for request in 0..20 {
            answer(&guard, &format!("still-{outage}-{request}"), 1).await;
        }
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
        answer(&guard, &format!("after-{outage}"), 1).await;
        assert_eq!(guard.get::<u32>(&*format!("after-{outage}")).await.expect("store"), Some(1));
        let warned = warnings.about("refuses");
        assert_eq!(warned.len(), outage, "{warned:?}");
    }
}

/// If rights are missing, the server counts as down until they are restored.
#[tokio::test]
async fn loads_go_on_while_rights_are_missing_and_use_them_when_restored() {
    let server = RedisServer::start();
    let guard = local(&server, lease_of(LEASE)).await;
    answer(&guard, "before", 1).await;
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-evalsha", "-eval"]);
    costs_little(&guard, Refusal::ReadOnly).await;
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+evalsha", "+eval"]);
    answer(&guard, "after", 1).await;
    settled(std::slice::from_ref(&guard)).await;
    assert_eq!(guard.get::<u32>("after").await.expect("store"), Some(1));
    assert_eq!(answer(&guard, "before", 2).await, 1);
}

#[tokio::test]
async fn loads_go_on_with_a_wrong_password_until_it_is_right_again() {
    let server = RedisServer::start();
    let guard = local(&server, lease_of(LEASE)).await;
    answer(&guard, "before", 1).await;
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetpass", ">another"]);
    server.kill_clients();
    costs_little(&guard, Refusal::ReadOnly).await;
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetpass", ">pw"]);
    connects(&guard).await;
    assert_eq!(answer(&guard, "before", 2).await, 1);
    assert_eq!(answer(&guard, "after", 1).await, 1);
    assert_eq!(guard.get::<u32>("after").await.expect("store"), Some(1));
}

/// Without SUBSCRIBE no waiter is notified. Waits end by timers, and there is still only one load.
#[tokio::test]
async fn without_the_right_to_subscribe_waits_end_by_their_timers() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
    let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
    let loads = Counter::default();
    let started = Instant::now();
    let callers = (0..20).map(|caller| {
        let loads = loads.clone();
        guards[caller % 2].get_or_load("k", move || async move {
            let _running = loads.start();
            tokio::time::sleep(ms(300)).await;
            Ok::<_, String>(1)
        })
    });
    assert!(join_all(callers).await.into_iter().all(|value| value.is_ok()));
    assert_eq!(loads.started(), 1);
    assert!(started.elapsed() < Duration::from_secs(4) + STANDSTILL, "{:?}", started.elapsed());
}

/// Regression: without messages, for up to a third of a lease, a caller received a load that had begun before another process's
/// invalidation, although the caller came after the acknowledgement.
#[tokio::test]
async fn without_the_right_to_subscribe_a_later_caller_never_receives_an_invalidated_value() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
    let lease = Duration::from_secs(60);
    let guards = [local(&server, lease_of(lease)).await, local(&server, lease_of(lease)).await];
    let (gate, loads) = (Gate::closed(), Counter::default());
    let led = held_call(&guards[0], 1, &gate, &loads);
    loads.reach(1).await;
    guards[1].invalidate("k").await.expect("confirmed");
    let mut after = pin!(answer(&guards[0], "k", 2));
    assert!(poll!(&mut after).is_pending(), "it has begun");
    gate.open();
    assert_eq!(led.await.expect("joined"), 1, "it came before");
    assert_eq!(after.await, 2);
}

/// The user may read entries, but not acquire leases.
#[tokio::test]
async fn connecting_without_the_key_rights_of_a_load_is_an_error() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetkeys", "~sg1:[eqo]:*"]);
    let guard = unconnected(&server.minimal_user(), lease_of(LEASE));
    connect_advises(&guard, "rights that docs/redis.md lists").await;
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~sg1:l:*"]);
    connects(&guard).await;
}

/// Under `CLIENT PAUSE WRITE` a server does not reply to scripts. The guard gives up its probe before it takes the silence for a dead
/// connection.
#[tokio::test]
async fn a_server_that_holds_writes_back_keeps_its_connection() {
    let server = RedisServer::start();
    let guard = unconnected(&server.minimal_user(), Policy::default());
    connects(&guard).await;
    let before = server.client_count();
    server.run::<()>(&["CLIENT", "PAUSE", "3000", "WRITE"]);
    let began = Instant::now();
    guard.connect().await.expect("a pause is no error");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let health = guard.health();
    assert_eq!((health.commands, health.breaker), (LinkState::Up, Breaker::Closed), "{health}");
    assert_eq!(server.client_count(), before);
}

/// `connect` tries only the commands that loads need. If commands of other features are missing, `doctor()` reports it, or their first use.
#[tokio::test]
async fn connecting_does_not_require_commands_that_loads_do_not_need() {
    let renamed = ["ZADD", "INCR", "PUBLISH"];
    let server = RedisServer::with_args(renamed.iter().flat_map(|command| ["--rename-command", command, ""]));
    connects(&unconnected(&server.url(), lease_of(LEASE))).await;
    assert_eq!(server.keys(), [""; 0]);
    // A temporary refusal is no error of connecting either.
    let server = RedisServer::start();
    for refusal in [Refusal::OutOfMemory, Refusal::ReadOnly] {
        let guard = unconnected(&server.url(), lease_of(LEASE));
        connects(&guard).await;
        refusal.begin(&server);
        guard.connect().await.unwrap_or_else(|error| panic!("{refusal:?}: {}", chain(&error)));
        refusal.end(&server);
    }
}

/// A missing command is named by `connect()`, by the causes of a failed call's error, and by `doctor()`. Loads continue without the server.
#[tokio::test]
async fn missing_commands_are_named() {
    for (lacks, text) in [
        (&["EVALSHA", "EVAL"][..], "runs no scripts"),
        (&["EVALSHA"], "runs no scripts"),
        (&["LPOS"], "which doctor() names"),
        (&["PTTL"], "which doctor() names"),
        (&["GET"], "which doctor() names"),
    ] {
        let named = if text.contains("scripts") { "runs no scripts" } else { lacks[0] };
        let renamed = lacks.iter().flat_map(|command| ["--rename-command", command, ""]);
        let server = RedisServer::with_args(renamed);
        let guards =
            [unconnected(&server.url(), lease_of(LEASE)), unconnected(&server.url(), lease_of(LEASE))];
        for guard in &guards {
            connect_advises(guard, named).await;
        }
        let (gate, loads) = (Gate::closed(), Counter::default());
        let leads = held_call(&guards[0], 1, &gate, &loads);
        loads.reach(1).await;
        // Only now, behind a leader, the commands of waiters are needed.
        let fails =
            guards[1].with_policy(patient(LEASE).on_store_down(OnStoreDown::FailClosed).build().unwrap());
        let refused = fails.get_or_load("k", || async { Ok::<_, String>(2) }).await.expect_err("no lease");
        assert!(chain(&refused).contains(text), "{lacks:?}: {}", chain(&refused));
        assert_eq!(answer(&guards[1], "k", 3).await, 3, "{lacks:?}");
        let report = examined(&guards[0]).await.to_string();
        assert!(report.contains(lacks[0]), "{lacks:?}: {report}");
        gate.open();
        assert_eq!(leads.await.unwrap(), 1);
    }
}
