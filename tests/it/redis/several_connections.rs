//! Several connections for commands: each key has one of them, all lead to one server, and none is left dead.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use stampede_guard::health::Breaker;

use super::*;
use crate::support::monitor::Monitor;
use crate::support::proxy::{Mode, Proxy};
use crate::support::scratch::Scratch;

const KEYS: u32 = 64;

async fn guard_of_four(url: &str, policy: Policy) -> StampedeGuard {
    let client = redis::Client::open(url).expect("an address");
    let guard = StampedeGuard::builder(client).policy(policy).connections(4).build().expect("valid");
    connects(&guard).await;
    guard
}

async fn load_all(guard: &StampedeGuard) {
    let loads = (0..KEYS).map(|key| guard.get_or_load(key, || async move { Ok::<_, String>(1) }));
    for loaded in join_all(loads).await {
        assert_eq!(loaded.expect("loaded"), 1);
    }
}

/// If the release of a lease overtook its ACQUIRE, the lease would have no holder until it expires.
#[tokio::test]
async fn the_commands_of_a_key_share_a_connection_and_every_connection_has_keys() {
    let server = RedisServer::start();
    let guard = guard_of_four(&server.minimal_user(), Policy::default()).await;
    assert_eq!(guard.health().open_connections, 4);
    let monitor = Monitor::start(&server);
    load_all(&guard).await;
    load_all(&guard).await;
    for key in 0..KEYS {
        guard.invalidate(key).await.expect("confirmed");
    }
    let mut by_key = BTreeMap::<_, BTreeSet<_>>::new();
    for line in &monitor.finish().without(["ping", "time", "subscribe"]).lines {
        let source = line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).expect("a source").0;
        let key = line.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(key, _)| key);
        by_key.entry(key.to_owned()).or_default().insert(source.to_owned());
    }
    let keys = by_key.iter().filter(|(key, _)| key.starts_with("default:"));
    assert!(keys.clone().count() >= KEYS as usize, "{by_key:?}");
    assert!(keys.clone().all(|(_, sources)| sources.len() == 1), "{by_key:?}");
    assert_eq!(keys.flat_map(|(_, sources)| sources).collect::<BTreeSet<_>>().len(), 4, "{by_key:?}");
}

#[tokio::test]
async fn if_one_is_cut_all_are_replaced_and_no_caller_fails() {
    let server = RedisServer::start();
    let guard = guard_of_four(&server.minimal_user(), Policy::default()).await;
    load_all(&guard).await;
    let before = server.ids_of("minimal");
    for round in 1..=4 {
        let victim = server.ids_of("minimal").into_iter().next_back().expect("connections");
        server.run::<()>(&["CLIENT", "KILL", "ID", &victim]);
        load_all(&guard).await;
        eventually("four are open, none of them old", SOON, async || {
            let now = server.ids_of("minimal");
            !now.contains(&victim) && guard.health().open_connections == 4
        })
        .await;
        assert_eq!(guard.health().breaker, Breaker::Closed, "round {round}");
    }
    assert!(server.ids_of("minimal").len() <= before.len(), "none is left behind");
}

/// The other connections are answered all the time, so the server is not silent as a whole.
#[tokio::test]
async fn one_that_dies_in_silence_is_found_while_the_others_are_answered() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let policy = Policy::builder().command_timeout(ms(200)).coordination_budget(ms(400));
    let guard = guard_of_four(&proxy.url(), policy.build().expect("valid")).await;
    load_all(&guard).await;
    for flow in 1..4 {
        let opened = proxy.connections();
        // Counted from the last four: the inbox opened before them.
        proxy.set(Mode::BlackHoleFlow(opened - flow));
        eventually("four others are opened", SOON, async || {
            load_all(&guard).await;
            proxy.connections() >= opened + 4
        })
        .await;
        eventually("all answer", SOON, async || {
            let reads = (0..KEYS).map(|key| guard.get::<u32>(key));
            join_all(reads).await.into_iter().all(|read| matches!(read, Ok(Some(1))))
        })
        .await;
        proxy.set(Mode::Pass);
    }
}

/// A server without room for more connections refuses some of them.
#[tokio::test]
async fn connections_that_the_server_refuses_are_done_without() {
    let server = RedisServer::start();
    let open = server.run::<String>(&["INFO", "clients"]);
    let open: usize =
        open.lines().find_map(|line| line.strip_prefix("connected_clients:")?.parse().ok()).expect("a count");
    server.run::<()>(&["CONFIG", "SET", "maxclients", &(open + 2).to_string()]);
    let guard = guard_of_four(&server.url(), Policy::default()).await;
    load_all(&guard).await;
    let open = guard.health().open_connections;
    assert!((1..4).contains(&open), "{open}");
}

#[tokio::test]
async fn a_count_out_of_range_is_an_error_that_names_the_range() {
    for connections in [0, 65] {
        let built = StampedeGuard::builder(redis::Client::open("redis://127.0.0.1:1/").expect("an address"))
            .connections(connections)
            .build();
        let error = built.expect_err("out of range").to_string();
        assert!(error.contains("choose from 1 to 64"), "{error}");
    }
}

/// How often the server has read from its clients.
fn reads(server: &RedisServer) -> u64 {
    let stats = server.run::<String>(&["INFO", "stats"]);
    let reads = stats.lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
    reads.and_then(|reads| reads.parse().ok()).expect("a count")
}

/// Each caller, as it sends its next command, wakes the task that writes. If that task ran at once, each command would be a write.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_next_commands_of_callers_that_are_answered_together_leave_together() {
    let files = Scratch::new();
    let server = RedisServer::with_args(["--unixsocket".to_owned(), files.text("redis.sock")]);
    let socket = format!("unix://{}?user=minimal&pass=pw", files.text("redis.sock"));
    for url in [server.url(), server.minimal_user(), socket] {
        let client = redis::Client::open(url).expect("an address");
        let guard = StampedeGuard::builder(client).policy(lease_of(SOON)).build().expect("valid");
        connects(&guard).await;
        load_all(&guard).await;
        let before = reads(&server);
        let callers = (0..64_u32).map(|caller| {
            let guard = guard.clone();
            tokio::spawn(async move {
                for call in 0..50 {
                    let read = guard.get::<u32>((caller * 31 + call) % KEYS).await;
                    assert_eq!(read.expect("answered"), Some(1));
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.expect("no panic");
        }
        let reads = reads(&server) - before;
        assert!(reads < 64 * 50 / 2, "{reads} reads of 3,200 commands");
    }
}

/// One command is lost, and no other is sent: the checks of all connections find out that the server hangs.
#[tokio::test]
async fn a_server_that_hangs_is_noticed_by_the_checks_of_all_connections() {
    let server = RedisServer::start();
    let policy = Policy::builder().command_timeout(ms(200)).coordination_budget(ms(400));
    let guard = guard_of_four(&server.url(), policy.build().expect("valid")).await;
    server.pause();
    guard.get::<u32>("k").await.expect_err("the server hangs");
    eventually("the breaker is open", SOON, async || guard.health().breaker == Breaker::Open).await;
    server.resume();
    eventually("all are back", SOON, async || guard.health().open_connections == 4).await;
}
