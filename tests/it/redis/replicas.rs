//! A fleet of two hundred replicas on one server, which receives each step of a node two hundred times, as does the origin. All nodes are
//! in this process, each with its own two connections. One fleet runs at a time, to limit file descriptors.

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::monitor::Monitor;
use crate::support::probe::assert_nothing_left;
use crate::support::proxy::{Mode, Proxy};
use tokio::sync::Mutex;

const REPLICAS: usize = 200;
/// How many callers each replica has in the outages. They share a load.
const CALLERS: usize = 5;
/// The lease is so long that no command times out while two hundred nodes share two cores.
const LEASE: Duration = Duration::from_secs(8);

static ONE_FLEET: Mutex<()> = Mutex::const_new(());

/// All nodes, each of which has waited for a load once, so that the server knows the scripts and the inboxes are open.
async fn replicas(server: &RedisServer) -> Vec<StampedeGuard> {
    let url = server.minimal_user();
    let guards: Vec<_> = (0..REPLICAS).map(|_| unconnected(&url, lease_of(LEASE))).collect();
    join_all(guards.iter().map(connects)).await;
    one_load(server, &guards, "warm").await;
    guards
}

/// Lets all nodes wait for one load. Returns the time from the end of the load to the last answer.
async fn one_load(server: &RedisServer, guards: &[StampedeGuard], key: &str) -> Duration {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let calls = wave(guards, key, &gate, &loads);
    queued(server, key, REPLICAS - 1).await;
    let ended = Instant::now();
    gate.open();
    all_have_it(calls).await;
    assert_eq!(loads.started(), 1);
    ended.elapsed()
}

type Calls = Vec<tokio::task::JoinHandle<u32>>;

/// Lets every guard request `key`. The load waits at `gate`.
fn wave(guards: &[StampedeGuard], key: &str, gate: &Gate, loads: &Counter) -> Calls {
    guards.iter().map(|guard| held_call_of(guard, key, 1, gate, loads)).collect()
}

async fn all_have_it(calls: Calls) {
    for call in join_all(calls).await {
        assert_eq!(call.expect("joined"), 1);
    }
}

#[tokio::test]
async fn a_cold_key_is_one_load_and_a_few_commands_each() {
    let _one = ONE_FLEET.lock().await;
    let server = RedisServer::start();
    let guards = replicas(&server).await;
    let monitor = Monitor::start(&server);
    let last = one_load(&server, &guards, "k").await;
    let sent = monitor.finish();
    let of = |name: &str| sent.by_name.get(name).copied().unwrap_or(0);
    println!("the last of {REPLICAS} after {last:?}: {} GET, {} EVALSHA", of("get"), of("evalsha"));
    // Each node sends one GET and one acquire. The leader commits, and the others acquire again when they are notified. If the
    // machine stalls for a second, they may miss the notification and acquire once more.
    assert_eq!(of("get"), REPLICAS);
    assert!(of("evalsha") <= 3 * REPLICAS, "{:?}", sent.by_name);
    assert_eq!(of("eval"), 0);
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

/// Promise 4: exactly one of the waiters takes over.
#[tokio::test]
async fn a_leader_that_panics_is_followed_by_one() {
    let _one = ONE_FLEET.lock().await;
    let server = RedisServer::start();
    let guards = replicas(&server).await;
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leader = tokio::spawn({
        let (guard, gate, loads) = (guards[0].clone(), gate.clone(), loads.clone());
        let load = move || async move {
            let _running = loads.start();
            gate.pass().await;
            panic!("as the test wants it");
            #[allow(unreachable_code, reason = "says the type")]
            Ok::<u32, String>(0)
        };
        async move { guard.get_or_load("k", load).await }
    });
    loads.reach(1).await;
    let calls = wave(&guards[1..], "k", &gate, &loads);
    queued(&server, "k", REPLICAS - 1).await;
    gate.open();
    all_have_it(calls).await;
    leader.await.expect("joined").expect_err("it panicked");
    assert_eq!(loads.started(), 2);
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

/// The timers of all waiters end at once, and all of them acquire: one gets the lease, and the others wait for its load.
#[tokio::test]
async fn a_leader_that_is_cut_off_costs_a_lease_and_one_load() {
    const SHORT: Duration = Duration::from_secs(6);
    let _one = ONE_FLEET.lock().await;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let behind = unconnected(&proxy.url(), hurried_lease_of(SHORT));
    connects(&behind).await;
    let guards = replicas(&server).await;
    let guards: Vec<_> = guards.iter().map(|guard| guard.with_policy(lease_of(SHORT))).collect();
    let (never, gate, loads) = (Gate::closed(), Gate::closed(), Counter::default());
    let leader = held_call(&behind, 2, &never, &loads);
    loads.reach(1).await;
    let calls = wave(&guards, "k", &gate, &loads);
    queued(&server, "k", REPLICAS).await;
    let since = Instant::now();
    proxy.set(Mode::BlackHole);
    loads.reach(2).await;
    println!("the second load began after {:?}", since.elapsed());
    assert!(since.elapsed() < SHORT * 2, "{:?}", since.elapsed());
    gate.open();
    all_have_it(calls).await;
    assert_eq!(loads.started(), 2);
    never.open();
    assert_eq!(leader.await.expect("joined"), 2);
    proxy.set(Mode::Pass);
    settled(&guards).await;
    settled(&[behind]).await;
    assert_eq!(guards[0].get::<u32>("k").await.expect("store"), Some(1), "not the cut off leader's value");
    assert_nothing_left(&server, SOON).await;
}

/// Lets an outage begin for all nodes at once. They answer their callers meanwhile, and all reconnect at once after it.
async fn survive(begin: fn(&RedisServer), end: fn(&RedisServer)) {
    let _one = ONE_FLEET.lock().await;
    let server = RedisServer::start();
    let guards = replicas(&server).await;
    begin(&server);
    let (gate, loads) = (Gate::closed(), Counter::default());
    gate.open();
    let callers: Vec<_> = guards.iter().flat_map(|guard| vec![guard.clone(); CALLERS]).collect();
    all_have_it(wave(&callers, "away", &gate, &loads)).await;
    assert!(loads.started() <= REPLICAS, "{} loads of {}", loads.started(), REPLICAS * CALLERS);
    // After this, the pauses between attempts to reconnect have their full length.
    tokio::time::sleep(Duration::from_secs(2)).await;
    end(&server);
    let back = Instant::now();
    let is_up = |guard: &StampedeGuard| {
        let health = guard.health();
        (health.commands, health.inbox) == (LinkState::Up, LinkState::Up)
    };
    eventually("all are connected", SOON + STANDSTILL, async || guards.iter().all(is_up)).await;
    let took = back.elapsed();
    let stats: String = server.run(&["INFO", "stats"]);
    let received = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    let received: usize = received.expect("INFO has it").trim().parse().expect("a number");
    println!("all are back after {took:?}, by {received} connections");
    // Each node has two connections before the outage and two after it, and makes up to four failed attempts in between.
    assert!(received <= REPLICAS * 8, "{received} connections");
    one_load(&server, &guards, "k").await;
    settled(&guards).await;
    assert_nothing_left(&server, SOON).await;
}

#[tokio::test]
async fn a_restart_costs_a_load_each_and_all_are_back() {
    survive(RedisServer::kill, RedisServer::start_again).await;
}

#[tokio::test]
async fn a_server_that_hangs_costs_a_load_each_and_all_are_back() {
    survive(RedisServer::pause, RedisServer::resume).await;
}
