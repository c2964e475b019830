//! Calls for many keys on a real server, in real processes, and in a cluster.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::health::LinkState;
use stampede_guard::{Policy, StampedeGuard};
use tokio::time::Instant;

use super::{SOON, connects, eventually_eq, lease_of, ms, unconnected};
use crate::support::gate::Counter;
use crate::support::monitor::Monitor;
use crate::support::origin::{self, Answer, Origin};
use crate::support::probe::assert_nothing_left;
use crate::support::processes::{Child, Fleet};
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::RedisServer;

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
    origin: String,
    lease: Duration,
    /// For each process, its keys in the order in which it names them.
    keys: Vec<Vec<u64>>,
}

/// What one process received, and how many times its loader was called.
#[derive(Serialize, Deserialize)]
struct Report {
    answers: Vec<Result<Option<String>, String>>,
    calls: usize,
    took: Duration,
}

/// The guard of a process. Returns when the parent says that the process may begin.
async fn started(child: &mut Child) -> (Config, StampedeGuard) {
    let config: Config = child.config();
    let client = redis::Client::open(config.redis.as_str()).expect("an address");
    let guard = StampedeGuard::builder(client).policy(lease_of(config.lease)).build().expect("valid");
    connects(&guard).await;
    child.ready();
    child.wait_go().await;
    (config, guard)
}

/// A loader that requests each of the keys at the origin.
async fn load_all(origin: Arc<str>, keys: Vec<u64>) -> Result<Vec<(u64, String)>, String> {
    let load = async |key: u64| Ok((key, origin::load(&origin, &key.to_string()).await?));
    join_all(keys.into_iter().map(load)).await.into_iter().collect()
}

/// A process that requests all its keys in one call.
pub(crate) fn load(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let (config, guard) = started(&mut child).await;
        let (calls, began) = (Counter::default(), Instant::now());
        let (counter, origin) = (calls.clone(), Arc::<str>::from(config.origin));
        let load = move |keys| {
            let (call, loads) = (counter.start(), load_all(Arc::clone(&origin), keys));
            async move {
                let _call = call;
                loads.await
            }
        };
        let answers = guard.get_or_load_many(config.keys[child.index()].clone(), load).await;
        let answers = answers.into_iter().map(|answer| answer.map_err(|error| error.to_string())).collect();
        child.result(&Report { answers, calls: calls.started(), took: began.elapsed() });
    })
}

/// A process that warms its keys, five at once.
pub(crate) fn warm(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let (config, guard) = started(&mut child).await;
        let (report, origin) = (child.report(), Arc::<str>::from(config.origin));
        let load = move |keys| {
            report.event("called");
            load_all(Arc::clone(&origin), keys)
        };
        let warmed = guard.warm(config.keys[child.index()].clone(), 5, load).await;
        child.result(&[warmed.stored, warmed.found, warmed.failed]);
    })
}

/// For each process three quarters of the keys `0..keys`, in an order that looks random and is always the same.
fn overlapping(processes: u64, keys: u64) -> Vec<Vec<u64>> {
    let of = |process: u64| {
        let mut own: Vec<u64> = (0..keys).filter(|key| !(key + process).is_multiple_of(4)).collect();
        own.sort_by_key(|key| (key * 7_919 + process * 104_729) % 1_009);
        own
    };
    (0..processes).map(of).collect()
}

#[tokio::test]
async fn overlapping_sets_of_eight_processes_load_each_key_once() {
    let (server, origin) = (RedisServer::start(), Origin::start().await);
    for key in 0..80 {
        origin.script(&key.to_string(), [Answer::value(format!("v{key}")).after(ms(200))]);
    }
    let keys = overlapping(8, 80);
    let config =
        Config { redis: server.minimal_user(), origin: origin.addr(), lease: Duration::from_secs(8), keys };
    let fleet = Fleet::spawn(8, "many", &config);
    fleet.wait_ready().await;
    fleet.go();
    for (keys, report) in config.keys.iter().zip(fleet.results::<Report>().await) {
        let expected: Vec<_> = keys.iter().map(|key| Ok(Some(format!("v{key}")))).collect();
        assert_eq!(report.answers, expected);
        assert!(report.calls <= 1, "the leases are free at once: {}", report.calls);
    }
    for key in 0..80 {
        assert_eq!(origin.loads(&key.to_string()), 1, "key {key}");
    }
    assert_nothing_left(&server, SOON).await;
}

/// The other processes wait for the length of one lease, not of one lease per key, and load the dead process's keys in few calls.
#[tokio::test]
async fn a_dead_process_costs_its_keys_one_lease() {
    const LEASE: Duration = Duration::from_secs(2);
    let (server, origin) = (RedisServer::start(), Origin::start().await);
    for key in 0..40 {
        origin.script(&key.to_string(), [Answer::value("dead").held(), Answer::value("v")]);
    }
    let keys = vec![(0..40).collect(), (0..40).rev().collect(), (10..30).collect()];
    let config = Config { redis: server.minimal_user(), origin: origin.addr(), lease: LEASE, keys };
    let fleet = Fleet::spawn(3, "many", &config);
    fleet.wait_ready().await;
    fleet.member(0).send("go");
    for key in 0..40 {
        origin.wait_for_loads(&key.to_string(), 1).await;
    }
    fleet.member(1).send("go");
    fleet.member(2).send("go");
    let waiting = || async {
        let mut conn = server.conn();
        let queued =
            |key: u64| redis::cmd("LLEN").arg(format!("sg1:q:{{default:{key}}}")).query::<usize>(&mut conn);
        (0..40).map(queued).sum::<Result<usize, _>>().expect("LLEN")
    };
    super::eventually_eq("both wait", SOON, 60, waiting).await;
    fleet.member(0).kill();
    let mut calls = 0;
    for member in &fleet.members()[1..] {
        let report: Report = member.result().await;
        assert!(report.answers.iter().all(|answer| answer == &Ok(Some("v".into()))));
        assert!(report.took < LEASE * 2 + SOON, "{:?}", report.took);
        calls += report.calls;
    }
    for key in 0..40 {
        assert_eq!(origin.loads(&key.to_string()), 2, "key {key}");
    }
    assert!(calls <= 8, "40 leases that end together are loaded by few calls: {calls}");
    assert_nothing_left(&server, SOON).await;
}

/// A call for a hundred keys, fifty of which are missing, takes less than six round trips. Each takes this long.
#[tokio::test]
async fn fifty_missing_keys_of_a_hundred_take_few_round_trips() {
    const TRIP: Duration = Duration::from_millis(400);
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let policy = Policy::builder()
        .lease(Duration::from_secs(20))
        .command_timeout(Duration::from_secs(5))
        .coordination_budget(Duration::from_secs(20))
        .build()
        .expect("valid");
    let load = |keys: Vec<u64>| async move {
        Ok::<_, String>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>())
    };
    // The server learns the scripts.
    let near = super::local(&server, policy.clone()).await;
    near.get_or_load_many([1_000], load).await;
    let stored = near.insert_many((0..50_u64).map(|key| (key, key))).await;
    assert!(stored.into_iter().all(|stored| stored.is_ok()));
    proxy.set(Mode::Delay(TRIP));
    // While the guard connects, it measures how distant the server is.
    let client = redis::Client::open(proxy.url()).expect("an address");
    let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
    connects(&guard).await;
    let (monitor, began) = (Monitor::start(&server), Instant::now());
    let answers = guard.get_or_load_many(0..100, load).await;
    let took = began.elapsed();
    proxy.set(Mode::Pass);
    let commands = monitor.finish().without(["ping", "time"]);
    let expected: Vec<_> = (0..100).map(Some).collect();
    assert_eq!(answers.into_iter().collect::<Result<Vec<_>, _>>().expect("loaded"), expected);
    assert!(took < TRIP * 6, "{took:?}");
    // A read may return up to 64 MiB, and a value may have a MiB, so a hundred keys take two reads. Each missing key is acquired once and
    // committed once.
    assert_eq!(commands.of("mget"), 2, "{commands:?}");
    assert_eq!(commands.of("evalsha") + commands.of("fcall"), 100, "{commands:?}");
    assert_eq!(commands.total, 102, "{commands:?}");
}

/// The connection is fast enough for each single command, but all commands together take several of their time limits.
#[tokio::test]
async fn a_read_of_many_keys_has_the_time_of_a_command_for_each_of_its_commands() {
    const KEYS: u64 = 512;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let policy = Policy::builder()
        .command_timeout(Duration::from_millis(200))
        .coordination_budget(Duration::from_millis(400))
        .build()
        .expect("valid");
    let client = redis::Client::open(proxy.url()).expect("an address");
    let guard = StampedeGuard::builder(client).policy(policy).build().expect("valid");
    connects(&guard).await;
    let value = "x".repeat(1_000);
    let stored = guard.insert_many((0..KEYS).map(|key| (key, value.clone()))).await;
    assert!(stored.into_iter().all(|stored| stored.is_ok()));
    let opened = proxy.connections();
    // This is 64 values in 40 ms.
    proxy.set(Mode::Trickle(16 * 1024));
    let found = guard.get_many::<String, _>(0..KEYS).await;
    proxy.set(Mode::Pass);
    let found: Vec<_> = found.into_iter().collect::<Result<_, _>>().expect("each is read");
    assert!(found.iter().all(|found| found.as_ref() == Some(&value)));
    assert_eq!(proxy.connections(), opened, "no connection was abandoned");
}

/// As in a deployment, each replica warms the same keys, and one of them is killed.
#[tokio::test]
async fn replicas_share_a_warm_up_and_go_on_where_a_dead_one_was() {
    let (server, origin) = (RedisServer::start(), Origin::start().await);
    for key in 0..60 {
        let answer = Answer::value("v").after(ms(100));
        origin.script(&key.to_string(), [answer.clone(), answer]);
    }
    let config = Config {
        redis: server.minimal_user(),
        origin: origin.addr(),
        lease: Duration::from_secs(1),
        keys: vec![(0..60).collect(); 3],
    };
    let fleet = Fleet::spawn(3, "warm", &config);
    fleet.wait_ready().await;
    fleet.go();
    fleet.member(0).wait_event("called").await;
    fleet.member(0).kill();
    let mut loaded = 0;
    for member in &fleet.members()[1..] {
        let warmed: [u64; 3] = member.result().await;
        assert_eq!((warmed.iter().sum::<u64>(), warmed[2]), (60, 0), "{warmed:?}");
        loaded += warmed[0];
    }
    let loads: usize = (0..60).map(|key| origin.loads(&key.to_string())).sum();
    assert!(loads <= 65, "a group of five is lost with its process: {loads}");
    assert!(loaded <= 60, "{loaded}");
    assert_nothing_left(&server, SOON).await;
}

/// The warm-up begins before there is a server.
#[tokio::test]
async fn a_warm_up_waits_for_a_server_that_starts_later() {
    let server = RedisServer::start();
    server.kill();
    let guard = unconnected(&server.minimal_user(), lease_of(SOON));
    let calls = Counter::default();
    let waits = tokio::spawn({
        let (guard, calls) = (guard.clone(), calls.clone());
        let load = move |keys: Vec<u64>| {
            let _call = calls.start();
            async move { Ok::<_, String>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>()) }
        };
        async move { guard.warm(0..20_u64, 10, load).await }
    });
    eventually_eq("it is found down", SOON, LinkState::Down, async || guard.health().commands).await;
    assert_eq!(calls.started(), 0, "nothing would be stored");
    server.start_again();
    let warmed = waits.await.expect("no panic");
    assert_eq!((warmed.stored, warmed.failed, calls.started()), (20, 0, 2), "{warmed:?}");
    let found = guard.get_many::<u64, _>(0..20_u64).await;
    assert!(found.into_iter().all(|found| found.is_ok_and(|found| found.is_some())));
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn many_keys_of_a_cluster_are_read_and_loaded_on_all_masters() {
    let cluster = crate::support::cluster::Cluster::calm();
    let ports = cluster.nodes()[..3].iter().map(|node| node.url());
    let client = redis::cluster::ClusterClient::new(ports).expect("nodes");
    let guard =
        StampedeGuard::builder(client).policy(lease_of(Duration::from_secs(8))).build().expect("valid");
    connects(&guard).await;
    let calls = Counter::default();
    let counter = calls.clone();
    let load = move |keys: Vec<u64>| {
        let _call = counter.start();
        async move { Ok::<_, String>(keys.into_iter().map(|key| (key, key)).collect::<Vec<_>>()) }
    };
    for _ in 0..2 {
        let answers = guard.get_or_load_many(0..60, load.clone()).await;
        let expected: Vec<_> = (0..60).map(Some).collect();
        assert_eq!(answers.into_iter().collect::<Result<Vec<_>, _>>().expect("loaded"), expected);
    }
    assert_eq!(calls.started(), 1);
    let found = guard.get_many::<u64, _>(0..61_u64).await;
    let found = found.into_iter().collect::<Result<Vec<_>, _>>().expect("answers");
    assert_eq!(found.iter().flatten().count(), 60);
}
