//! The guard on real Redis servers, and in real processes if a test needs them: each file tests one promise of the README.
//!
//! A *node* is one guard. Several nodes in the test's process stand for replicas that share only the store. Nodes that are
//! killed or stopped are child processes in the role `node`, which execute the test's commands.

mod ailments;
mod bulk;
mod bulkhead;
mod cancellation;
mod changes;
mod chaos;
pub(crate) mod clock;
#[cfg(feature = "cluster")]
pub(crate) mod cluster;
mod connections;
pub(crate) mod credentials;
mod cuts;
mod deployments;
mod doctor;
mod figures;
mod firewall;
mod freshness;
mod invalidation;
#[cfg(feature = "testing")]
mod late_attempts;
mod leaders;
mod leftovers;
mod many;
mod markers;
#[cfg(feature = "macros")]
mod memoize_attribute;
mod networks;
mod nodes;
#[cfg(feature = "testing")]
mod on_the_way;
mod outages;
mod partitions;
mod refusals;
mod replicas;
mod rights;
mod runtimes;
#[cfg(feature = "sentinel")]
mod sentinel;
mod several_connections;
mod shared_connections;
mod shared_errors;
mod spinlock;
mod stale;
mod store_down;
mod strangers;
mod tags;
#[cfg(feature = "tls")]
mod tls;
mod unconfirmed;
mod wake_ups;
mod wire;

use std::fmt::Debug;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::health::LinkState;
use stampede_guard::{Policy, PolicyBuilder, StampedeGuard, StampedeGuardBuilder, Stats};
use tokio::time::Instant;

use crate::held_calls::{held_call_of, held_load};
use crate::support::PATIENCE;
use crate::support::gate::{Counter, Gate};
use crate::support::origin::{self, Origin};
use crate::support::probe::{eventually, eventually_eq};
use crate::support::processes::{Child, Fleet, Member, Role};
use crate::support::redis_server::RedisServer;
use nodes::{Config, Counts, Nodes, Windows};
use store_down::{NOTHING, SLACK, STANDSTILL, keep_to_the_budget, median, requests};

pub(crate) const ROLES: &[Role] = &[
    ("node", nodes::node),
    ("herd", figures::herd),
    ("many", many::load),
    ("warm", many::warm),
    ("behind_a_firewall", firewall::behind),
    #[cfg(feature = "tls")]
    ("tls_node", tls::node),
];

/// The bound of waits for which no time is promised.
const SOON: Duration = Duration::from_secs(10);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A policy whose `command_timeout` is as long as the lease allows. On a busy machine a late command would otherwise make a node load for
/// itself.
fn lease_of(lease: Duration) -> Policy {
    patient(lease).build().expect("valid")
}

fn patient(lease: Duration) -> PolicyBuilder {
    let command = (lease / 4).min(Duration::from_secs(2));
    Policy::builder().lease(lease).command_timeout(command).coordination_budget(command * 4)
}

/// Like [`lease_of`], with a short budget, for tests that measure what an unreachable server costs.
fn hurried_lease_of(lease: Duration) -> Policy {
    let command = (lease / 4).min(ms(400));
    let builder = Policy::builder().lease(lease).command_timeout(command).coordination_budget(ms(800));
    builder.build().expect("valid")
}

/// A connected node in this process, with the documented minimal rights.
async fn local(server: &RedisServer, policy: Policy) -> StampedeGuard {
    let guard = unconnected(&server.minimal_user(), policy);
    connects(&guard).await;
    guard
}

/// Connects, with several attempts: each has about a second, and a busy machine may stall for that long.
#[track_caller]
pub(crate) fn connects(guard: &StampedeGuard) -> impl Future<Output = ()> + '_ {
    eventually("connects", PATIENCE, move || async move { guard.connect().await.is_ok() })
}

/// Opens the connection to a server that cannot run the commands of a load, or refuses them to the user: `connect` fails all the same.
#[track_caller]
fn opens(guard: &StampedeGuard) -> impl Future<Output = ()> + '_ {
    eventually("opens", PATIENCE, move || async move {
        let _ = guard.connect().await;
        guard.health().commands == LinkState::Up
    })
}

/// Waits until the text of `connect`'s error, without its causes, contains `advice`. A timeout may be reported first.
#[track_caller]
fn connect_advises(guard: &StampedeGuard, advice: &str) -> impl Future<Output = ()> {
    eventually(format!("`connect` advises `{advice}`"), SOON, move || async move {
        let error = guard.connect().await.expect_err("no connection");
        let (why, text) = (chain(&error), error.to_string());
        assert!(!why.contains("pw"), "{why}");
        assert!(why.matches(&*text).count() == 1 && !text.ends_with("failed"), "{why}");
        text.contains(advice)
    })
}

/// A node that is not connected yet: on one server, or on sentinels or a cluster if the URL has their test-only scheme.
fn unconnected(url: &str, policy: Policy) -> StampedeGuard {
    builder(url).policy(policy).build().expect("valid")
}

/// The builder of a node like `unconnected`.
pub(crate) fn builder(url: &str) -> StampedeGuardBuilder {
    #[cfg(feature = "sentinel")]
    if url.starts_with(sentinel::SCHEME) {
        return StampedeGuard::builder(sentinel::client(url));
    }
    #[cfg(feature = "cluster")]
    if url.starts_with(cluster::SCHEME) {
        return StampedeGuard::builder(cluster::client(url));
    }
    StampedeGuard::builder(redis::Client::open(url).expect("an address"))
}

/// Calls `get_or_load` with a loader that returns `value` at once.
async fn answer(guard: &StampedeGuard, key: &str, value: u32) -> u32 {
    guard.get_or_load(key, move || async move { Ok::<_, String>(value) }).await.expect("a value")
}

/// The texts of an error and of all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Checks that two nodes share a load. The lease outlasts the test, so the follower must be notified.
async fn share_a_load(server: &RedisServer, guards: &[StampedeGuard; 2]) {
    // A first attempt to connect may have failed, so the counters need not be 0.
    let failed =
        || guards.each_ref().map(|guard| (guard.stats().fail_open_loads, guard.stats().store_errors));
    let before = failed();
    share_a_load_of(server, guards, "k", [1, 2]).await;
    assert_eq!(failed(), before);
}

/// Like `share_a_load`, for any key. Each node would load its own value of `values`.
async fn share_a_load_of(server: &RedisServer, guards: &[StampedeGuard; 2], key: &str, values: [u32; 2]) {
    share_a_load_in("default", server, guards.each_ref(), key, values).await;
}

/// Like `share_a_load_of`, in any namespace.
async fn share_a_load_in(
    namespace: &str,
    server: &RedisServer,
    guards: [&StampedeGuard; 2],
    key: &str,
    values: [u32; 2],
) {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leader = held_call_of(guards[0], key, values[0], &gate, &loads);
    loads.reach(1).await;
    let follower = held_call_of(guards[1], key, values[1], &gate, &loads);
    queued_in(namespace, server, key, 1).await;
    gate.open();
    let received = notified(futures_util::future::join(leader, follower)).await;
    let received = (received.0.unwrap(), received.1.unwrap());
    assert_eq!((received, loads.started()), ((values[0], values[0]), 1), "{namespace}:{key}");
}

/// Waits for callers that should be notified. Fails if they sleep until the lease ends.
async fn notified<T>(waiting: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, waiting).await.expect("notified when the load has ended")
}

/// Checks that loads continue without the server at almost no cost, and that `connect` reports `advice`.
async fn loads_go_on_without(guard: &StampedeGuard, advice: &str) {
    let first = requests(guard, "first", 3).await;
    keep_to_the_budget(&first, advice);
    let later = requests(guard, "later", 30).await;
    keep_to_the_budget(&later, advice);
    assert!(median(later.clone()) <= NOTHING, "{advice}: {later:?}");
    let stats = guard.stats();
    assert!(stats.fail_open_loads >= 30 && stats.failed == 0, "{stats:?}");
    let started = Instant::now();
    guard.connect().await.expect_err("no connection");
    assert!(started.elapsed() <= Duration::from_secs(1) + STANDSTILL, "{:?}", started.elapsed());
    connect_advises(guard, advice).await;
}

/// Waits until every flight of these nodes has ended.
async fn settled(guards: &[StampedeGuard]) {
    for guard in guards {
        let over = async || (guard.stats().flights, guard.stats().tasks) == (0, 0);
        eventually(format!("flights end: {:?}", guard.stats()), SOON, over).await;
    }
}

/// Waits until `nodes` nodes are in the queue for `key`.
async fn queued(server: &RedisServer, key: &str, nodes: usize) {
    queued_in("default", server, key, nodes).await;
}

/// Like `queued`, in any namespace.
async fn queued_in(namespace: &str, server: &RedisServer, key: &str, nodes: usize) {
    let queue = format!("sg1:q:{{{namespace}:{key}}}");
    eventually_eq("nodes wait", SOON, nodes, async || server.run::<usize>(&["LLEN", &queue])).await;
}

/// Calls with a load of `value` that waits at `gate`.
fn held_call(
    guard: &StampedeGuard,
    value: u32,
    gate: &Gate,
    loads: &Counter,
) -> tokio::task::JoinHandle<u32> {
    held_call_of(guard, "k", value, gate, loads)
}
