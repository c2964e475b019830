//! The guard on real Redis servers, where it matters in real processes: each file is one promise of the README.
//!
//! A *node* is a guard of its own. Nodes in this process stand for replicas where only the store lies between
//! them; nodes that are killed or stopped are child processes in the role `node`, which the test tells what to do.

mod ailments;
mod bulkhead;
mod cancellation;
mod changes;
mod chaos;
pub(crate) mod clock;
#[cfg(feature = "cluster")]
mod cluster;
mod connections;
mod doctor;
mod figures;
mod firewall;
mod freshness;
mod invalidation;
mod leaders;
mod leftovers;
mod markers;
mod networks;
mod outages;
mod partitions;
mod refusals;
mod rights;
#[cfg(feature = "sentinel")]
mod sentinel;
mod spinlock;
mod stale;
mod store_down;
mod strangers;
mod tags;
#[cfg(feature = "tls")]
mod tls;
mod wake_ups;
mod wire;

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard, Stats};
use tokio::time::Instant;

use crate::support::gate::{Counter, Gate};
use crate::support::origin::{self, Origin};
use crate::support::probe::{eventually, eventually_eq};
use crate::support::processes::{Child, Fleet, Member, Role};
use crate::support::redis_server::RedisServer;
use store_down::{NOTHING, SLACK, median, requests};

pub(crate) const ROLES: &[Role] = &[
    ("node", node),
    ("herd", figures::herd),
    ("behind_a_firewall", firewall::behind),
    #[cfg(feature = "tls")]
    ("tls_node", tls::node),
];

/// What must happen, but not at any particular speed.
const SOON: Duration = Duration::from_secs(10);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A policy whose lease is short and whose commands may be slow: the machine of the tests is busy.
fn lease_of(lease: Duration) -> Policy {
    let builder =
        Policy::builder().lease(lease).coordination_budget(ms(800)).command_timeout(lease.min(ms(800)) / 4);
    builder.build().expect("valid")
}

/// A connected node in this process, with the documented minimal rights.
async fn local(server: &RedisServer, policy: Policy) -> StampedeGuard {
    let guard = unconnected(&server.minimal_user(), policy);
    guard.connect().await.expect("connects");
    guard
}

/// A node on one server; on what is named by a URL that only tests know, for several.
fn unconnected(url: &str, policy: Policy) -> StampedeGuard {
    #[cfg(feature = "sentinel")]
    if url.starts_with(sentinel::SCHEME) {
        return StampedeGuard::builder(sentinel::client(url)).policy(policy).build().expect("valid");
    }
    #[cfg(feature = "cluster")]
    if url.starts_with(cluster::SCHEME) {
        return StampedeGuard::builder(cluster::client(url)).policy(policy).build().expect("valid");
    }
    let client = redis::Client::open(url).expect("an address");
    StampedeGuard::builder(client).policy(policy).build().expect("valid")
}

/// A load at once, and its answer.
async fn answer(guard: &StampedeGuard, key: &str, value: u32) -> u32 {
    guard.get_or_load(key, move || async move { Ok::<_, String>(value) }).await.expect("a value")
}

/// An error and all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// These two share a load though only the first of them leads it, and are told: the lease outlives the test.
async fn share_a_load(server: &RedisServer, guards: &[StampedeGuard; 2]) {
    share_a_load_of(server, guards, [1, 2]).await;
    let failed = guards.each_ref().map(|guard| (guard.stats().fail_open_loads, guard.stats().store_errors));
    assert_eq!(failed, [(0, 0); 2]);
}

/// The same, of what each of them would load.
async fn share_a_load_of(server: &RedisServer, guards: &[StampedeGuard; 2], values: [u32; 2]) {
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leader = held_call(&guards[0], values[0], &gate, &loads);
    loads.reach(1).await;
    let follower = held_call(&guards[1], values[1], &gate, &loads);
    queued(server, "k", 1).await;
    gate.open();
    let given = (leader.await.unwrap(), follower.await.unwrap());
    assert_eq!((given, loads.started()), ((values[0], values[0]), 1));
}

/// Such a server costs next to nothing, and who asks why it is gone without is told what to do.
async fn is_gone_without(guard: &StampedeGuard, advice: &str) {
    let first = requests(guard, "first", 3).await;
    assert!(first.iter().all(|added| *added <= ms(100) + SLACK), "{advice}: {first:?}");
    let later = requests(guard, "later", 30).await;
    assert!(later.iter().all(|added| *added <= ms(100) + SLACK), "{advice}: {later:?}");
    assert!(median(later.clone()) <= NOTHING, "{advice}: {later:?}");
    let stats = guard.stats();
    assert!(stats.fail_open_loads >= 30 && stats.failed == 0, "{stats:?}");
    let started = Instant::now();
    let why = chain(&guard.connect().await.expect_err("no connection"));
    assert!(started.elapsed() <= Duration::from_secs(1) + SLACK * 2, "{:?}", started.elapsed());
    assert!(why.contains(advice), "{why}");
    assert!(!why.contains("pw"), "{why}");
}

/// Waits until every flight of these nodes has ended.
async fn settled(guards: &[StampedeGuard]) {
    for guard in guards {
        let over = async || (guard.stats().flights, guard.stats().tasks) == (0, 0);
        eventually(format!("flights end: {:?}", guard.stats()), SOON, over).await;
    }
}

/// Waits until so many nodes wait in the queue for `key`.
async fn queued(server: &RedisServer, key: &str, nodes: usize) {
    let queue = format!("sg1:q:{{default:{key}}}");
    eventually_eq("nodes wait", SOON, nodes, async || server.run::<usize>(&["LLEN", &queue])).await;
}

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
    origin: String,
    lease_ms: u64,
    windows: Option<Windows>,
}

/// How long values are fresh, and may be served after that; without, the defaults.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Windows {
    fresh_ms: u64,
    revalidate_ms: u64,
    error_ms: u64,
}

impl Windows {
    fn set(self, lease: Duration) -> Policy {
        let builder = Policy::builder()
            .lease(lease)
            .coordination_budget(ms(800))
            .command_timeout(lease.min(ms(800)) / 4)
            .fresh_for(ms(self.fresh_ms))
            .ttl_jitter(0.0)
            .stale_while_revalidate(ms(self.revalidate_ms))
            .stale_if_error(ms(self.error_ms))
            .back_off(SOON);
        builder.build().expect("valid")
    }
}

/// How one call was answered, and when after it began.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reply {
    result: Result<String, String>,
    took_ms: u64,
}

/// What the tests read of [`Stats`].
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Counts {
    loads: u64,
    fail_open_loads: u64,
    commits_refused: u64,
    leases_lost: u64,
    takeovers: u64,
    flights: u64,
    tasks: u64,
}

impl From<Stats> for Counts {
    fn from(stats: Stats) -> Self {
        let Stats { loads, fail_open_loads, commits_refused, leases_lost, takeovers, flights, tasks, .. } =
            stats;
        Self { loads, fail_open_loads, commits_refused, leases_lost, takeovers, flights, tasks }
    }
}

/// A child that does as it is told, line by line:
///
/// - `load <key> <n>`: n callers at once load it at the origin; answered by an event `<key>`
/// - `panic <key>`: one caller, whose load panics when the origin has answered
/// - `cancel`: aborts all callers
/// - `refresh <key> <n>`: as `load`, whatever there is
/// - `get <key>`, `invalidate <key>`, `connect`, `shutdown`, `stats`: answered by an event of that name
/// - `die`: the process aborts
fn node(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let lease = ms(config.lease_ms);
        let policy = config.windows.map_or_else(|| lease_of(lease), |windows| windows.set(lease));
        let guard = unconnected(&config.redis, policy);
        guard.connect().await.expect("connects");
        let report = child.report();
        let mut callers: HashMap<String, _> = HashMap::new();
        child.ready();
        loop {
            let line = child.recv_line().await;
            let words: Vec<_> = line.split(' ').collect();
            match words[..] {
                [how @ ("load" | "panic" | "refresh"), key, ..] => {
                    let n = words.get(2).map_or(1, |n| n.parse().expect("n"));
                    let how = how.to_owned();
                    let calls = (0..n)
                        .map(|_| call(guard.clone(), config.origin.clone(), key.to_owned(), how.clone()));
                    let (calls, key) = (join_all(calls), key.to_owned());
                    let task = {
                        let key = key.clone();
                        tokio::spawn(async move { report.event_with(&key, &calls.await) })
                    };
                    callers.insert(key, task);
                }
                ["cancel"] => callers.drain().for_each(|(_, task)| task.abort()),
                ["connect"] => report.event_with("connect", &guard.connect().await.is_ok()),
                ["get", key] => report.event_with("get", &guard.get::<String>(key).await.expect("an answer")),
                ["invalidate", key] => {
                    report.event_with("invalidate", &guard.invalidate(key).await.is_ok());
                }
                ["shutdown"] => {
                    report.event_with("shutdown", &guard.shutdown(ms(50)).await.handed_over);
                }
                ["stats"] => report.event_with("stats", &Counts::from(guard.stats())),
                ["die"] => std::process::abort(),
                _ => panic!("told `{line}`"),
            }
        }
    })
}

async fn call(guard: StampedeGuard, origin: String, key: String, how: String) -> Reply {
    let started = Instant::now();
    let (refresh, panics) = (how == "refresh", how == "panic");
    let load = {
        let key = key.clone();
        move || async move {
            let loaded = origin::load(&origin, &key).await;
            assert!(!panics, "told to panic");
            loaded
        }
    };
    let result = match refresh {
        true => guard.refresh(key, load).await,
        false => guard.get_or_load(key, load).await,
    };
    let result = result.map_err(|error| error.to_string());
    Reply { result, took_ms: started.elapsed().as_millis() as u64 }
}

/// Child processes on one server and one origin.
struct Nodes {
    server: RedisServer,
    origin: Origin,
    fleet: Fleet,
}

impl Nodes {
    async fn start(n: usize, lease: Duration) -> Self {
        Self::start_with(n, lease, None).await
    }

    async fn start_with(n: usize, lease: Duration, windows: Option<Windows>) -> Self {
        let (server, origin) = (RedisServer::start(), Origin::start().await);
        let lease_ms = lease.as_millis() as u64;
        let config = Config { redis: server.minimal_user(), origin: origin.addr(), lease_ms, windows };
        let fleet = Fleet::spawn(n, "node", &config);
        fleet.wait_ready().await;
        Self { server, origin, fleet }
    }

    fn node(&self, index: usize) -> &Member {
        self.fleet.member(index)
    }

    /// Node 0 leads a load of `key` that is held at the origin, told by `tell`; each other one has callers who
    /// wait for it.
    async fn one_leads(&self, key: &str, tell: &str, callers: usize) {
        self.node(0).send(tell);
        self.origin.wait_for_loads(key, 1).await;
        for (waiting, member) in self.fleet.members()[1..].iter().enumerate() {
            member.send(&format!("load {key} {callers}"));
            queued(&self.server, key, waiting + 1).await;
        }
    }

    async fn stats(&self, index: usize) -> Counts {
        self.node(index).send("stats");
        serde_json::from_value(self.node(index).wait_event("stats").await).expect("counts")
    }

    /// The answers of one node's callers.
    #[track_caller]
    fn replies(&self, index: usize, key: &str) -> impl Future<Output = Vec<Reply>> + '_ {
        let event = self.node(index).wait_event(key);
        async move { serde_json::from_value(event.await).expect("replies") }
    }

    /// Waits for the callers of these nodes; every one of them must have been given `value`.
    #[track_caller]
    fn all_get(
        &self,
        nodes: impl IntoIterator<Item = usize>,
        key: &str,
        value: &str,
    ) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        let nodes: Vec<_> = nodes.into_iter().map(|index| (index, self.replies(index, key))).collect();
        let value = value.to_owned();
        async move {
            for (index, replies) in nodes {
                let replies = replies.await;
                let right = replies.iter().all(|reply| reply.result.as_ref() == Ok(&value));
                assert!(right && !replies.is_empty(), "{caller}: node {index}: {replies:?}");
            }
        }
    }

    /// Waits until the flights of these nodes have ended, and nothing is left of them on the server.
    async fn nothing_left(&self, nodes: impl IntoIterator<Item = usize>) {
        for index in nodes {
            eventually("flights end", SOON, async || {
                let stats = self.stats(index).await;
                (stats.flights, stats.tasks) == (0, 0)
            })
            .await;
        }
        crate::support::probe::assert_nothing_left(&self.server, SOON).await;
    }

    /// These nodes work as on the first day: a cold key is loaded once.
    async fn work(&self, nodes: impl IntoIterator<Item = usize>) {
        let nodes: Vec<_> = nodes.into_iter().collect();
        for &index in &nodes {
            self.node(index).send("connect");
            assert_eq!(self.node(index).wait_event("connect").await, true);
        }
        let key = format!("after-{}", fastrand::u32(..));
        self.origin.script(&key, [origin::Answer::value("after").after(ms(200))]);
        for &index in &nodes {
            self.node(index).send(&format!("load {key} 3"));
        }
        self.all_get(nodes.iter().copied(), &key, "after").await;
        assert_eq!(self.origin.loads(&key), 1);
        self.nothing_left(nodes).await;
    }
}

/// A load of `value` that waits at `gate`.
fn held_call(
    guard: &StampedeGuard,
    value: u32,
    gate: &Gate,
    loads: &Counter,
) -> tokio::task::JoinHandle<u32> {
    let (guard, gate, loads) = (guard.clone(), gate.clone(), loads.clone());
    tokio::spawn(async move {
        let load = move || async move {
            let _running = loads.start();
            gate.pass().await;
            Ok::<_, String>(value)
        };
        guard.get_or_load("k", load).await.expect("a value")
    })
}
