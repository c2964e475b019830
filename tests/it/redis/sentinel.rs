//! The guard works with the primary that the sentinels name: at the start and after a failover, and never with a replica.

#[cfg(feature = "tls")]
mod tls;

use redis::ConnectionAddr;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use stampede_guard::health::{LinkState, Severity, Topology};
use stampede_guard::lock::{Mutex, Semaphore, Wait};

use super::doctor::examined;
use super::nodes::{Reply, all_load};
use super::*;
use crate::support::sentinels::{NAME, ROLE, Sentinels};

/// The scheme of the URLs that stand for sentinels in these tests: `sentinels://<port>,<port>/<name>`.
pub(super) const SCHEME: &str = "sentinels://";

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(60);

/// The bound from the death of a primary until the guard works with the next one: two seconds until the sentinels call it dead, an
/// election, a connection, and slack for a busy machine, on which a failed election is repeated after six seconds.
const FAILOVER: Duration = Duration::from_secs(60);

pub(super) fn client(url: &str) -> SentinelClient {
    let (ports, name) = url.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/')).expect("a URL");
    let ports: Vec<u16> = ports.split(',').map(|port| port.parse().expect("a port")).collect();
    of(&ports, name, SentinelServerType::Master)
}

fn of(ports: &[u16], name: &str, kind: SentinelServerType) -> SentinelClient {
    let sentinels = ports.iter().map(|port| ConnectionAddr::Tcp("127.0.0.1".to_owned(), *port));
    let builder = SentinelClientBuilder::new(sentinels, name, kind).expect("sentinels");
    builder
        .set_client_to_redis_username("watched")
        .set_client_to_redis_password("pw")
        .build()
        .expect("a client")
}

fn guarded(client: SentinelClient, policy: Policy) -> StampedeGuard {
    StampedeGuard::builder(client).policy(policy).build().expect("valid")
}

async fn connected(watch: &Sentinels) -> StampedeGuard {
    let guard = unconnected(&watch.url(), lease_of(LEASE));
    connects(&guard).await;
    guard
}

/// Waits until the guards write to `server` and receive its messages.
async fn work_on(server: &RedisServer, guards: &[StampedeGuard]) {
    let started = Instant::now();
    for (index, guard) in guards.iter().enumerate() {
        let key = format!("works-{index}");
        while !(guard.insert(&*key, &1).await.is_ok()
            && server.keys().contains(&format!("sg1:e:{{default:{key}}}"))
            && guard.health().inbox == LinkState::Up)
        {
            assert!(started.elapsed() < FAILOVER, "{:?}: {}", started.elapsed(), guard.health());
            tokio::time::sleep(ms(10)).await;
        }
    }
}

/// Invalidates the key, and checks that the two nodes share its next load.
async fn share_again(server: &RedisServer, guards: &[StampedeGuard; 2]) {
    guards[0].invalidate("k").await.expect("confirmed");
    share_a_load_of(server, guards, "k", [3, 4]).await;
}

#[tokio::test]
async fn one_load_per_fleet_and_the_locks_on_the_primary() {
    let watch = Sentinels::start();
    let guards = [connected(&watch).await, connected(&watch).await];
    assert_eq!(guards[0].health().topology, Topology::Sentinel);
    share_a_load(watch.first(), &guards).await;

    let mutexes = guards.each_ref().map(|guard| Mutex::new(&guard.locks(), "m").expect("valid"));
    let mut held = mutexes[0].lock().await.expect("free");
    let waits = tokio::spawn({
        let mutex = mutexes[1].clone();
        async move { mutex.lock().await.map(|guard| guard.fence()) }
    });
    eventually_eq("one waits", SOON, 1, async || watch.first().run::<usize>(&["LLEN", "sg1:mq:{default:m}"]))
        .await;
    let fence = held.fence();
    assert!(held.unlock().await.expect("released"));
    assert!(waits.await.unwrap().expect("handed over") > fence);
    let semaphore = Semaphore::new(&guards[0].locks(), "s", 1).expect("valid");
    assert!(semaphore.acquire(Wait::Now).await.expect("a store").is_some());

    eventually_eq("two connections each, on the primary", SOON, 4, async || {
        let primary = watch.first().run::<String>(&["CLIENT", "LIST"]);
        primary.lines().filter(|line| line.contains("user=watched")).count()
    })
    .await;
    let replica = watch.second().run::<String>(&["CLIENT", "LIST"]);
    assert!(!replica.contains("user=watched"), "no guard is on the replica: {replica}");
}

/// The primary is killed while three processes wait for a fourth one's load. This may cost one load per process, because no process can
/// know how long there will be no primary.
#[tokio::test]
async fn a_primary_that_dies_during_a_load_is_replaced() {
    let (watch, origin) = (Sentinels::vigilant(), Origin::start().await);
    let config = Config { redis: watch.url(), origin: origin.addr(), lease_ms: 60_000, windows: None };
    let fleet = Fleet::spawn(4, "node", &config);
    fleet.wait_ready().await;
    origin.script("k", [(); 4].map(|()| origin::Answer::value("v").after(ms(1_500))));
    for (index, member) in fleet.members().iter().enumerate() {
        member.send("load k 10");
        if index == 0 {
            origin.wait_for_loads("k", 1).await;
        }
    }
    queued(watch.first(), "k", 3).await;
    watch.first().kill();
    for member in fleet.members() {
        let replies: Vec<Reply> = serde_json::from_value(member.wait_event("k").await).expect("replies");
        assert!(replies.len() == 10 && replies.iter().all(|r| r.result.as_deref() == Ok("v")), "{replies:?}");
    }
    assert!((1..=4).contains(&origin.loads("k")), "{}", origin.loads("k"));

    // The new primary must work like the old one.
    for member in fleet.members() {
        let started = Instant::now();
        loop {
            member.send("connect");
            if member.wait_event("connect").await == true {
                break;
            }
            assert!(started.elapsed() < FAILOVER, "{:?}", started.elapsed());
        }
    }
    // After a stall of the machine a node may load without the server, but not every time.
    let mut loads = Vec::new();
    while loads.last() != Some(&1) {
        let key = format!("after-{}", loads.len());
        origin.script(&key, [origin::Answer::value("after").after(ms(300))]);
        all_load(&fleet, &key, 10, "after").await;
        loads.push(origin.loads(&key));
        assert!(loads.len() < 4, "{loads:?}");
    }
}

/// A manual failover happens during a load with a waiter. Afterwards the nodes share a load, and its messages come from the new primary.
#[tokio::test]
async fn the_inbox_follows_to_the_new_primary() {
    let watch = Sentinels::start();
    let guards = [connected(&watch).await, connected(&watch).await];
    let (gate, loads) = (Gate::closed(), Counter::default());
    let leader = held_call(&guards[0], 1, &gate, &loads);
    loads.reach(1).await;
    let follower = held_call(&guards[1], 2, &gate, &loads);
    queued(watch.first(), "k", 1).await;
    watch.fail_over();
    work_on(watch.second(), &guards).await;
    gate.open();
    assert_eq!(leader.await.unwrap(), 1);
    assert!([1, 2].contains(&follower.await.unwrap()));
    assert!(loads.started() <= 2, "at most one more, while no primary was reachable: {}", loads.started());
    share_again(watch.second(), &guards).await;
}

/// Sentinels close the connections of a demoted primary. Without sentinels the guard must notice the demotion by itself, or it would read
/// from the replica for ever.
#[tokio::test]
async fn a_primary_that_became_a_replica_is_not_read_from() {
    let watch = Sentinels::start();
    let guard = connected(&watch).await;
    answer(&guard, "k", 1).await;
    for sentinel in 0..3 {
        watch.kill(sentinel);
    }
    let other = watch.second().port().to_string();
    watch.second().run::<()>(&["REPLICAOF", "NO", "ONE"]);
    watch.first().run::<()>(&["REPLICAOF", "127.0.0.1", &other]);
    eventually("it is dropped", SOON, async || guard.health().commands == LinkState::Down).await;
    assert!(guard.get::<u32>("k").await.is_err());
    assert_eq!(answer(&guard, "k", 2).await, 2, "loaded, not read from the replica");
    // A refused write may notice the demotion before the next check of the role.
    let why = guard.health().reason.expect("why");
    assert!(["replica", "read only", "sentinel"].iter().any(|word| why.contains(word)), "{why}");
}

/// A primary that is cut off from its replicas and the sentinels still reports the role of a primary.
#[tokio::test]
async fn a_primary_that_the_sentinels_have_replaced_is_left() {
    let watch = Sentinels::start();
    let guard = connected(&watch).await;
    answer(&guard, "k", 1).await;
    for sentinel in 0..3 {
        watch.ask::<()>(sentinel, &["SENTINEL", "REMOVE", NAME]);
    }
    watch.first().run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    watch.second().run::<()>(&["REPLICAOF", "NO", "ONE"]);
    let second = watch.second().port().to_string();
    for sentinel in 0..3 {
        watch.ask::<()>(sentinel, &["SENTINEL", "MONITOR", NAME, "127.0.0.1", &second, "2"]);
    }
    work_on(watch.second(), std::slice::from_ref(&guard)).await;
    let role: (String, i64, redis::Value) = watch.first().run(&["ROLE"]);
    assert_eq!(role.0, "master", "the first still believes to be the primary");
}

/// A guard may start before its sentinels. It works without them, and uses the primary as soon as one sentinel answers.
#[tokio::test]
async fn sentinels_may_come_later() {
    let watch = Sentinels::asleep();
    let guard = unconnected(&watch.url(), Policy::default());
    loads_go_on_without(&guard, "no sentinel can be reached").await;
    // Only the last sentinel of the list runs.
    watch.wake(2);
    work_on(watch.first(), std::slice::from_ref(&guard)).await;
}

/// When the primary dies, the first sentinel of the list hangs, as if both were on one host.
#[tokio::test]
async fn a_sentinel_that_hangs_does_not_hide_the_new_primary() {
    let watch = Sentinels::vigilant();
    let guard = connected(&watch).await;
    watch.pause(0);
    watch.first().kill();
    work_on(watch.second(), std::slice::from_ref(&guard)).await;
}

#[tokio::test]
async fn a_wrong_set_up_is_reported_with_advice() {
    let watch = Sentinels::start();
    let ports = watch.ports();
    let advises = async |client, advice: &str| {
        let guard = guarded(client, Policy::default());
        connect_advises(&guard, advice).await;
    };
    advises(of(&ports, "another", SentinelServerType::Master), "no sentinel knows a primary of this name")
        .await;
    advises(of(&ports, NAME, SentinelServerType::Replica), "SentinelServerType::Master").await;
    // A client for a single server that connects to a sentinel.
    let guard = unconnected(&format!("redis://127.0.0.1:{}", ports[0]), Policy::default());
    loads_go_on_without(&guard, "if it is a Sentinel").await;
    // redis-rs sends ROLE to each server that a sentinel names, before the guard does.
    for server in [watch.first(), watch.second()] {
        server.run::<()>(&["ACL", "SETUSER", "watched", "-role"]);
    }
    advises(client(&watch.url()), "this user may not do what the guard does").await;
    for server in [watch.first(), watch.second()] {
        server.run::<()>(&["ACL", "SETUSER", "watched", ROLE]);
    }
}

/// Regression: a password that the sentinels refused was reported as refused by the primary, and a dead primary was reported as unreachable
/// sentinels.
#[tokio::test]
async fn the_error_names_the_servers_that_refuse_or_are_unreachable() {
    let watch = Sentinels::start();
    let guard = connected(&watch).await;
    watch.ask::<()>(2, &["ACL", "SETUSER", "default", "resetpass", ">another"]);
    // The other sentinels accept the password, so the report contains only a warning.
    let report = examined(&guard).await;
    let sentinels = report
        .findings
        .iter()
        .find(|finding| finding.check == "sentinels" && finding.severity == Severity::Warning);
    let sentinels = sentinels.unwrap_or_else(|| panic!("one of three refuses us:\n{report}"));
    let port = watch.ports()[2].to_string();
    assert!(
        sentinels.found.contains(&port) && sentinels.advice.contains("set_client_to_sentinel_password"),
        "{report}"
    );
    for sentinel in 0..2 {
        watch.ask::<()>(sentinel, &["ACL", "SETUSER", "default", "resetpass", ">another"]);
    }
    let fresh = unconnected(&watch.url(), Policy::default());
    connect_advises(&fresh, "set_client_to_sentinel_password").await;
    let why = chain(&fresh.connect().await.expect_err("no connection"));
    assert!(why.contains("sentinels") && !why.contains("URL"), "{why}");
    drop(watch);

    let watch = Sentinels::start();
    for server in [watch.first(), watch.second()] {
        server.run::<()>(&["ACL", "SETUSER", "watched", "resetpass", ">another"]);
    }
    connect_advises(&unconnected(&watch.url(), Policy::default()), "set_client_to_redis_password").await;
    watch.first().kill();
    connect_advises(
        &unconnected(&watch.url(), Policy::default()),
        "the primary that the sentinels name can not be reached",
    )
    .await;
}

#[tokio::test]
async fn the_doctor_asks_the_sentinels_too() {
    // These sentinels are vigilant, because the report counts a missing sentinel only if the others call it dead.
    let watch = Sentinels::vigilant();
    let fresh = unconnected(&watch.url(), Policy::default());
    assert!(examined(&fresh).await.to_string().contains("3 of 3"), "also before the guard has connected");
    let guard = connected(&watch).await;
    let report = examined(&guard).await;
    let finding = |check: &str| {
        let found = report.findings.iter().find(|finding| finding.check == check);
        found.unwrap_or_else(|| panic!("nothing about {check}:\n{report}"))
    };
    let sentinels = finding("sentinels");
    assert_eq!(sentinels.severity, Severity::Ok, "{report}");
    assert!(sentinels.found.contains("3 of 3") && sentinels.found.contains(NAME), "{report}");
    let primary = format!("127.0.0.1:{}", watch.first().port());
    assert!(finding("topology").found.contains(&primary), "{report}");
    assert!(report.findings.iter().all(|finding| finding.severity != Severity::Problem), "{report}");
    watch.kill(1);
    watch.kill(2);
    let (killed, mut report) = (Instant::now(), guard.doctor().await);
    while killed.elapsed() < SOON {
        if report.findings.iter().any(|f| f.check == "sentinels" && f.severity == Severity::Problem) {
            return;
        }
        report = guard.doctor().await;
    }
    panic!("they are not missed:\n{report}");
}
