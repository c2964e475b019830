//! Tests of the tests' own support, on which all other modules rely.

use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use redis::AsyncCommands as _;
use serde::{Deserialize, Serialize};

use crate::support::gate::{Counter, Gate};
use crate::support::monitor::Monitor;
use crate::support::origin::{self, Answer, End, Origin};
use crate::support::os::is_alive;
use crate::support::probe::{DropAt, assert_nothing_left, count_polls, eventually, eventually_eq};
use crate::support::processes::{Child, Fleet, Role};
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::{RedisServer, plain_connection};
use crate::support::rounds::{Rounds, Timing};

const BOUND: Duration = Duration::from_secs(10);

/// A pause, after which a test claims that something did not happen. On a slow machine that proves less, but it never fails wrongly.
async fn a_while() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

pub(crate) const ROLES: &[Role] =
    &[("harness.load", load_once), ("harness.panic", panic_at_once), ("harness.parent", be_a_parent)];

#[derive(Serialize, Deserialize)]
struct LoadConfig {
    origin: String,
    key: String,
}

/// A child that loads one key at the origin when its parent says so.
fn load_once(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: LoadConfig = child.config();
        child.ready();
        child.wait_go().await;
        child.event("loading");
        let loaded = origin::load(&config.origin, &config.key).await;
        child.result(&(child.index(), loaded));
    })
}

fn panic_at_once(_: Child) -> BoxFuture<'static, ()> {
    Box::pin(async { panic!("the last words of a child") })
}

/// A child that owns a stopped server and a stopped process, and waits to be killed.
fn be_a_parent(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let server = RedisServer::start();
        let fleet =
            Fleet::spawn(1, "harness.load", &LoadConfig { origin: String::new(), key: String::new() });
        fleet.wait_ready().await;
        server.pause();
        fleet.member(0).pause();
        child.result(&(server.pid(), fleet.member(0).pid(), server.folder()));
        child.recv_line().await;
    })
}

#[test]
fn server_is_private_and_starts_empty() {
    let (one, two) = (RedisServer::start(), RedisServer::start());
    one.run::<()>(&["SET", "k", "v"]);
    assert_eq!((one.keys(), two.keys()), (vec!["k".to_owned()], vec![]));
    assert_eq!(one.keys_without_ttl(), ["k"]);
    one.run::<()>(&["PEXPIRE", "k", "60000"]);
    assert!(one.keys_without_ttl().is_empty());
    one.flush_all();
    assert!(one.keys().is_empty());
}

#[test]
fn server_takes_arguments() {
    let server = RedisServer::with_args(["--maxmemory", "3mb"]);
    let value: Vec<String> = server.run(&["CONFIG", "GET", "maxmemory"]);
    assert_eq!(value, ["maxmemory", "3145728"]);
}

#[test]
fn restarted_server_is_empty_on_the_same_port() {
    let server = RedisServer::start();
    let (url, pid) = (server.url(), server.pid());
    server.run::<()>(&["SET", "k", "v"]);
    server.restart();
    assert_eq!(server.url(), url);
    assert_ne!(server.pid(), pid);
    assert!(server.keys().is_empty());
    assert!(!is_alive(pid));

    server.kill();
    assert!(server.client().get_connection().is_err());
    server.start_again();
    server.run::<()>(&["PING"]);
}

#[tokio::test]
async fn paused_server_does_not_answer_until_resumed() {
    let server = RedisServer::start();
    let mut conn = plain_connection(&server.client()).await;
    server.pause();
    let set = tokio::spawn(async move { conn.set::<_, _, ()>("k", "v").await });
    a_while().await;
    assert!(!set.is_finished());
    server.resume();
    set.await.unwrap().unwrap();
}

#[test]
fn a_dropped_server_ends_even_if_stopped() {
    let server = RedisServer::start();
    let pid = server.pid();
    server.pause();
    assert!(is_alive(pid));
    drop(server);
    assert!(!is_alive(pid));
}

#[test]
fn the_minimal_user_has_the_documented_rights_and_no_more() {
    let server = RedisServer::start();
    for _ in 0..2 {
        let mut conn = redis::Client::open(server.minimal_user()).unwrap().get_connection().unwrap();
        redis::cmd("SET").arg("sg1:e:{k}").arg("v").query::<()>(&mut conn).unwrap();
        let foreign = redis::cmd("SET").arg("other").arg("v").query::<()>(&mut conn);
        let forbidden = redis::cmd("FLUSHALL").query::<()>(&mut conn);
        assert_eq!(foreign.unwrap_err().code(), Some("NOPERM"));
        assert_eq!(forbidden.unwrap_err().code(), Some("NOPERM"));
        server.restart();
    }
}

#[tokio::test]
async fn the_server_counts_and_cuts_clients_and_subscriptions() {
    let server = RedisServer::start();
    let _conn = plain_connection(&server.client()).await;
    let mut pubsub = server.client().get_async_pubsub().await.unwrap();
    pubsub.subscribe("c").await.unwrap();
    assert_eq!((server.client_count(), server.pubsub_clients()), (2, 1));
    assert_eq!(server.kill_pubsub(), 1);
    eventually_eq("the subscriber has left", BOUND, (1, 0), async || {
        (server.client_count(), server.pubsub_clients())
    })
    .await;
    assert_eq!(server.kill_clients(), 1);
    eventually_eq("all have left", BOUND, 0, async || server.client_count()).await;
}

#[tokio::test]
async fn the_monitor_counts_clients_commands_exactly() {
    let server = RedisServer::start();
    let mut admin = server.conn();
    let mut before = plain_connection(&server.client()).await;
    before.set::<_, _, ()>("before", "1").await.unwrap();

    let monitor = Monitor::start(&server);
    let mut conn = plain_connection(&server.client()).await;
    for i in 0..100 {
        conn.set::<_, _, ()>(i, "] \"GET\" \"[0 lua]\r\n").await.unwrap();
    }
    let script = "redis.call('get', 'x') return redis.call('get', 'y')";
    redis::cmd("EVAL").arg(script).arg(0).query_async::<()>(&mut before).await.unwrap();
    redis::cmd("PING").query_async::<()>(&mut before).await.unwrap();
    redis::cmd("SET").arg("admin").arg(1).query::<()>(&mut admin).unwrap();
    server.keys();
    let commands = monitor.finish();

    assert_eq!(commands.total, 102, "{commands:#?}");
    assert_eq!((commands.of("set"), commands.of("eval"), commands.of("ping")), (100, 1, 1));
    assert_eq!((commands.of("get"), commands.of("keys"), commands.of("echo")), (0, 0, 0));
    let commands = commands.without(["ping"]);
    assert_eq!((commands.total, commands.lines.len()), (101, 101));
    before.set::<_, _, ()>("after", "1").await.unwrap();
    assert_eq!(Monitor::start(&server).finish().total, 0);
}

#[tokio::test]
async fn processes_load_at_the_origin_and_report() {
    let origin = Origin::start().await;
    origin.script("k", [Answer::value("v\n\"1\"").held(), Answer::failure("no").held()]);
    let fleet = Fleet::spawn(3, "harness.load", &LoadConfig { origin: origin.addr(), key: "k".into() });
    fleet.wait_ready().await;
    assert_eq!(origin.loads("k"), 0);
    fleet.go();
    origin.wait_for_loads("k", 3).await;
    assert_eq!(origin.running("k"), 3);
    origin.release("k");

    let results: Vec<(usize, Result<String, String>)> = fleet.results().await;
    assert_eq!(results.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(results.iter().filter(|(_, loaded)| *loaded == Ok("v\n\"1\"".into())).count(), 1);
    assert_eq!(results.iter().filter(|(_, loaded)| *loaded == Err("no".into())).count(), 2);
    assert_eq!((origin.loads("k"), origin.total_loads(), origin.running("k")), (3, 3, 0));
    assert!(fleet.member(0).wait_exit().await.success());
}

#[tokio::test]
async fn killed_process_leaves_an_abandoned_load() {
    let origin = Origin::start().await;
    origin.script("k", [Answer::value("v").held()]);
    let fleet = Fleet::spawn(2, "harness.load", &LoadConfig { origin: origin.addr(), key: "k".into() });
    fleet.wait_ready().await;
    fleet.member(0).send("go");
    fleet.member(0).wait_event("loading").await;
    origin.wait_for_loads("k", 1).await;
    let pid = fleet.member(0).pid();
    fleet.member(0).kill();
    assert!(!is_alive(pid));
    origin.wait_for_ends("k", 1).await;
    assert_eq!(origin.history("k")[0].ended.unwrap().1, End::Abandoned);

    fleet.member(1).pause();
    fleet.go();
    origin.release("k");
    a_while().await;
    assert_eq!((fleet.member(1).events("loading"), origin.loads("k")), (0, 1));
    fleet.member(1).resume();
    let results: Vec<(usize, Result<String, String>)> = fleet.results().await;
    assert_eq!(results, [(1, Ok("v".to_owned()))]);
    let history = origin.history("k");
    let (ended, how) = history[1].ended.unwrap();
    assert_eq!(how, End::Served);
    assert!(history[0].started < history[1].started && history[1].started <= ended);
}

#[tokio::test]
async fn a_failing_child_is_reported_with_its_last_output() {
    let fleet = Fleet::spawn(1, "harness.panic", &());
    let waiting = tokio::spawn(async move { fleet.wait_ready().await });
    let panic = waiting.await.unwrap_err().into_panic();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("ended without `ready`") && text.contains("the last words of a child"), "{text}");
    assert!(text.split(':').next().is_some_and(|location| location.ends_with("harness.rs")), "{text}");
}

#[tokio::test]
async fn nothing_outlives_a_killed_parent_even_if_stopped() {
    let fleet = Fleet::spawn(1, "harness.parent", &());
    let (server, grandchild, folder): (u32, u32, String) = fleet.member(0).result().await;
    assert!(is_alive(server) && is_alive(grandchild));
    fleet.member(0).kill();
    eventually("server and grandchild die", BOUND, async || !is_alive(server) && !is_alive(grandchild)).await;
    // The process that should remove the folder was killed.
    std::fs::remove_dir_all(folder).expect("the folder of the server");
}

#[tokio::test]
async fn proxy_holds_delays_and_resets() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let client = redis::Client::open(proxy.url()).unwrap();
    let mut old = plain_connection(&client).await;
    let get = |mut conn: redis::aio::MultiplexedConnection| {
        tokio::spawn(async move { conn.get::<_, Option<String>>("k").await })
    };
    assert_eq!(get(old.clone()).await.unwrap().unwrap(), None);

    proxy.set(Mode::NoReplies);
    let set = tokio::spawn({
        let mut conn = old.clone();
        async move { conn.set::<_, _, ()>("k", "v").await }
    });
    eventually_eq("the command arrives", BOUND, vec!["k".to_owned()], async || server.keys()).await;
    assert!(!set.is_finished());
    proxy.set(Mode::Pass);
    set.await.unwrap().unwrap();

    proxy.set(Mode::BlackHole);
    let held = get(old.clone());
    a_while().await;
    assert!(!held.is_finished());
    proxy.set(Mode::BlackHoleOld);
    let mut new = plain_connection(&client).await;
    assert_eq!(new.get::<_, String>("k").await.unwrap(), "v");
    assert!(!held.is_finished());
    assert_eq!((proxy.connections(), server.client_count()), (2, 2));

    proxy.set(Mode::Delay(Duration::from_millis(80)));
    assert_eq!(held.await.unwrap().unwrap().as_deref(), Some("v"));
    let start = Instant::now();
    old.get::<_, String>("k").await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(80));

    proxy.set(Mode::Reset);
    proxy.set(Mode::Pass);
    assert!(old.get::<_, String>("k").await.is_err());
    assert!(new.get::<_, String>("k").await.is_err());
    eventually_eq("flows have ended", BOUND, 0, async || server.client_count()).await;
    let mut fresh = plain_connection(&client).await;
    assert_eq!(fresh.get::<_, String>("k").await.unwrap(), "v");
}

#[tokio::test]
async fn left_over_keys_are_named() {
    let server = RedisServer::start();
    assert_nothing_left(&server, Duration::ZERO).await;
    server.run::<()>(&["SET", "sg1:e:{k}", "v", "PX", "60000"]);
    server.run::<()>(&["SET", "sg1:l:{k}", "v", "PX", "100"]);
    assert_nothing_left(&server, BOUND).await;
    server.run::<()>(&["SET", "sg1:e:{forever}", "v"]);
    let waiting = tokio::spawn(async move { assert_nothing_left(&server, Duration::ZERO).await });
    let panic = waiting.await.unwrap_err().into_panic();
    assert!(panic.downcast_ref::<String>().unwrap().contains("sg1:e:{forever}"));
}

#[tokio::test(start_paused = true)]
async fn future_is_dropped_at_each_await_point() {
    let counter = Counter::default();
    let work = || {
        let running = counter.start();
        async move {
            tokio::task::yield_now().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(running);
            7
        }
    };
    let mut dropped = 0;
    for n in 0.. {
        let output = DropAt::new(n, work()).await;
        assert_eq!(counter.running(), 0);
        if let Some(output) = output {
            assert_eq!(output, 7);
            break;
        }
        dropped += 1;
    }
    assert_eq!((dropped, count_polls(work()).await), (3, (7, 3)));
}

#[tokio::test(start_paused = true)]
async fn gate_holds_and_counter_counts() {
    let (gate, counter) = (Gate::closed(), Counter::default());
    let tasks: Vec<_> = (0..5)
        .map(|_| {
            let (gate, counter) = (gate.clone(), counter.clone());
            tokio::spawn(async move {
                let _running = counter.start();
                gate.pass().await;
            })
        })
        .collect();
    counter.reach(5).await;
    tasks[0].abort();
    gate.open();
    counter.idle().await;
    assert_eq!((counter.started(), counter.ended(), counter.most_at_once()), (5, 5, 5));
}

#[test]
fn four_late_rounds_are_forgiven() {
    let (promised, mut rounds) = (Duration::from_secs(1), Rounds::of("rounds"));
    let mut number = 0;
    while let Some(round) = rounds.next() {
        assert_eq!(round, number);
        number += 1;
        let took = if round % 2 == 0 { promised } else { promised * 2 };
        rounds.note([Timing::once("a time", took, promised), Timing::once("another", promised, promised)]);
    }
    assert_eq!(number, 9);
}

#[test]
#[should_panic(expected = "late in too many rounds: rounds:\n  [a time 2.0s (of 1.4s, LATE)]\n  []\n")]
fn five_late_rounds_are_too_many() {
    let (promised, mut rounds) = (Duration::from_secs(1), Rounds::of("rounds"));
    while rounds.next().is_some() {
        rounds.note([Timing::once("a time", promised * 2, promised)]);
        rounds.spoil();
    }
}

/// A few slow times among many do not matter. A median is only allowed to be twice the promise.
#[test]
fn a_median_has_no_slack_but_its_own() {
    let ms = Duration::from_millis;
    let of = |times: &[u64]| {
        format!("{:?}", Timing::median("m", &Vec::from_iter(times.iter().map(|&n| ms(n))), ms(1)))
    };
    assert_eq!(of(&[900, 2, 1, 2, 900]), "m 2.0ms (of 2ms)");
    assert_eq!(of(&[1, 3, 3]), "m 3.0ms (of 2ms, LATE)");
}
