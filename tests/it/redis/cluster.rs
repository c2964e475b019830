//! Every promise also holds on a Redis Cluster, and a fault of one master does not affect the keys of others.

mod dead_waiters;
mod failures;
mod moves;
mod rights;
#[cfg(feature = "tls")]
mod tls;
mod views;

use redis::cluster::ClusterClient;
use stampede_guard::InvalidationTarget;
use stampede_guard::health::{Breaker, Finding, LinkState, Severity, Topology};
use stampede_guard::lock::{Mutex, Semaphore, Wait};

use super::doctor::examined;
use super::nodes::{Reply, all_load};
use super::*;
use crate::support::cluster::Cluster;

/// The scheme of the URLs that stand for clusters in these tests: `cluster://<port>,<port>`.
pub(super) const SCHEME: &str = "cluster://";

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(60);

/// The bound from the death of a master until the guard works with its replica: the time until the other masters call it dead, an election
/// and a connection, and slack for a busy machine.
const FAILOVER: Duration = Duration::from_secs(20);

pub(crate) fn client(url: &str) -> ClusterClient {
    let ports = url.strip_prefix(SCHEME).expect("a URL").split(',');
    ClusterClient::new(ports.map(|port| format!("redis://spread:pw@127.0.0.1:{port}/"))).expect("nodes")
}

async fn connected(cluster: &Cluster, lease: Duration) -> StampedeGuard {
    let guard = unconnected(&cluster.url(), lease_of(lease));
    connects(&guard).await;
    guard
}

/// Checks that one node leads a load of `key`, and that the other waits and is notified.
async fn share(cluster: &Cluster, guards: &[StampedeGuard; 2], key: &str) {
    share_at(cluster.node(cluster.master_of(key)), guards, key).await;
}

/// Like `share`, if `server` has the slot of the key.
async fn share_at(server: &RedisServer, guards: &[StampedeGuard; 2], key: &str) {
    share_a_load_of(server, guards, key, [0, 1]).await;
}

/// One master of three is stopped: the invalidations of the other masters' keys are confirmed, and the error names the rest.
#[tokio::test]
async fn one_invalidation_on_all_masters_names_what_one_of_them_has_not_confirmed() {
    let cluster = Cluster::patient();
    let [guard, other] = [connected(&cluster, LEASE).await, connected(&cluster, LEASE).await];
    let keys: Vec<_> = (0..3).map(|master| cluster.key_on(master, "together")).collect();
    for key in &keys {
        answer(&guard, key, 1).await;
    }
    // It is not the master of the registry of processes with copies, where each change is announced.
    let away = (cluster.master_of("") + 1) % 3;
    cluster.node(away).pause();
    let began = Instant::now();
    let error = guard.invalidation().keys(&keys).send().await.expect_err("a master is stopped");
    assert!(began.elapsed() < Duration::from_secs(2) + SLACK, "{:?}", began.elapsed());
    assert_eq!(error.unconfirmed(), [InvalidationTarget::Key(keys[away].as_str().into())], "{error}");
    for key in keys.iter().filter(|key| **key != keys[away]) {
        assert_eq!(other.get::<u32>(key).await.expect("a store"), None, "{key}");
    }
    cluster.node(away).resume();
    eventually("it is sent", FAILOVER, async || guard.stats().kept_invalidations == 0).await;
    eventually("it is answered", FAILOVER, async || matches!(other.get::<u32>(&keys[away]).await, Ok(None)))
        .await;
}

#[tokio::test]
async fn all_masters_keep_every_promise() {
    let cluster = Cluster::calm();
    let guards = [connected(&cluster, LEASE).await, connected(&cluster, LEASE).await];
    let health = guards[0].health();
    let stands = (health.topology, health.commands, health.inbox, health.breaker);
    assert_eq!(stands, (Topology::Cluster, LinkState::Up, LinkState::Up, Breaker::Closed), "{health}");
    assert!(health.clock.is_some_and(|clock| clock.ahead_ms.abs() < 1_000), "{health}");

    // For a key on each master: both nodes share one load, and see an invalidation.
    for master in 0..3 {
        let key = cluster.key_on(master, "shared");
        share(&cluster, &guards, &key).await;
        assert_eq!(cluster.node(master).keys(), [format!("sg1:e:{{default:{key}}}")]);
        assert_eq!(guards[1].get::<usize>(&*key).await.expect("a store"), Some(0));
        guards[1].invalidate(&*key).await.expect("confirmed");
        assert_eq!(guards[0].get::<usize>(&*key).await.expect("a store"), None);
    }

    // A value on one master has tags whose ids are on all masters.
    let tags: Vec<_> = (0..3).map(|master| cluster.key_on(master, "tag")).collect();
    for tag in &tags {
        guards[0].insert_with_tags("tagged", &7, tags.iter().map(String::as_str)).await.expect("stored");
        let tagged = patient(LEASE).tags(tags.clone());
        let reader = guards[1].with_policy(tagged.build().expect("valid"));
        assert_eq!(reader.get::<u32>("tagged").await.expect("a store"), Some(7));
        guards[1].invalidate_tag(&**tag).await.expect("confirmed");
        assert_eq!(reader.get::<u32>("tagged").await.expect("a store"), None, "{tag}");
    }

    // A lock is handed over in the queue's order, even if the next waiter's inbox is at another node of the cluster.
    for name in ["m-1", "m-2", "m-3"] {
        let mutexes = guards.each_ref().map(|guard| Mutex::new(&guard.locks(), name).expect("valid"));
        let mut held = mutexes[0].lock().await.expect("free");
        let waits = {
            let mutex = mutexes[1].clone();
            tokio::spawn(async move { mutex.lock().await })
        };
        eventually_eq("one waits", SOON, 1, async || {
            cluster.keys().iter().filter(|key| key.starts_with("sg1:mq:")).count()
        })
        .await;
        let fence = held.fence();
        assert!(held.unlock().await.expect("released"));
        let mut next = waits.await.unwrap().expect("handed over");
        assert!(next.fence() > fence);
        let believed = next.remaining();
        let left = mutexes[0].remaining().await.expect("a store");
        assert!(left >= believed, "it is a whole lease, not a claim: {left:?}, and it goes by {believed:?}");
        assert!(next.unlock().await.expect("it was held"));
        let semaphore = Semaphore::new(&guards[0].locks(), name, 1).expect("valid");
        let permit = semaphore.acquire(Wait::Now).await.expect("a store").expect("a permit");
        let other = Semaphore::new(&guards[1].locks(), name, 1).expect("valid");
        let waits = tokio::spawn(async move { other.acquire(Wait::For(SOON)).await });
        eventually_eq("one waits", SOON, 1, async || {
            cluster.keys().iter().filter(|key| key.starts_with("sg1:sq:")).count()
        })
        .await;
        drop(permit);
        assert!(waits.await.unwrap().expect("a store").is_some());
    }

    let report = examined(&guards[0]).await;
    assert!(report.findings.iter().all(|finding| finding.severity <= Severity::Note), "{report}");
    let of = |check: &str| report.findings.iter().find(|finding| finding.check == check).expect("checked");
    assert!(of("cluster").found.contains("3 masters serve all slots"), "{report}");
    assert_eq!(report.findings.iter().filter(|finding| finding.check == "master").count(), 3, "{report}");
    assert!(of("notifications").found.contains("heard"), "{report}");

    // WAIT is sent to the same master as the write.
    let ports = cluster.nodes()[..3].iter().map(|node| node.url());
    let replicated = Policy::builder().invalidate_replicas(1, SOON).build().expect("valid");
    let guard = StampedeGuard::builder(ClusterClient::new(ports).expect("nodes"));
    let guard = guard.policy(replicated).build().expect("valid");
    for master in 0..3 {
        guard.invalidate(&*cluster.key_on(master, "waits")).await.expect("its replica has it");
    }
    for node in &cluster.nodes()[..3] {
        assert_eq!(node.keys_without_ttl(), Vec::<String>::new());
    }
    settled(&guards).await;
    drop((guards, guard));
    eventually_eq("no connection is left", SOON, 0, async || {
        let lists = cluster.nodes().iter().map(|node| node.run::<String>(&["CLIENT", "LIST"]));
        lists.map(|list| list.matches("user=spread").count()).sum::<usize>()
    })
    .await;
}

/// A wrong set-up costs almost nothing, and its errors say what to change.
#[tokio::test]
async fn a_wrong_set_up_is_reported_with_advice() {
    let cluster = Cluster::patient();
    // A client for a single server that connects to a cluster node.
    let warnings = crate::support::warnings::Warnings::default();
    let _listens = warnings.listen();
    let one = unconnected(&cluster.node(0).url(), lease_of(LEASE));
    let elsewhere = cluster.key_on(1, "k");
    assert_eq!(answer(&one, &elsewhere, 1).await, 1);
    let text = chain(&one.get::<u32>(&*elsewhere).await.expect_err("another node's"));
    assert!(text.contains("ClusterClient"), "{text}");
    assert_eq!(warnings.about("ClusterClient").len(), 1);
    let report = examined(&one).await;
    assert!(report.to_string().contains("a node of a Redis Cluster"), "{report}");
    // A cluster client that connects to a single server.
    let server = RedisServer::start();
    let several = StampedeGuard::builder(ClusterClient::new([server.url()]).expect("a node"));
    let several = several.build().expect("valid");
    loads_go_on_without(&several, "not part of a cluster").await;
    // A user without the right to CLUSTER SLOTS.
    for node in cluster.nodes() {
        node.run::<()>(&["ACL", "SETUSER", "spread", "-cluster"]);
    }
    loads_go_on_without(&unconnected(&cluster.url(), Policy::default()), "may not do what the guard does")
        .await;
    let report = examined(&unconnected(&cluster.url(), Policy::default())).await;
    assert!(report.to_string().contains("+cluster|slots"), "{report}");
    for node in cluster.nodes() {
        node.run::<()>(&["ACL", "SETUSER", "spread", "+cluster|slots"]);
    }
    // Slots without a master.
    for node in cluster.nodes() {
        node.run::<()>(&["CLUSTER", "DELSLOTS", "0", "1", "2"]);
    }
    let guard = unconnected(&cluster.url(), lease_of(LEASE));
    eventually("the doctor notices", SOON, async || {
        let report = guard.doctor().await;
        report
            .findings
            .iter()
            .any(|finding| finding.check == "cluster" && finding.severity == Severity::Problem)
    })
    .await;
    assert_eq!(answer(&guard, "anything", 1).await, 1);
}

/// A guard may start before its cluster. It works without the cluster, and uses it as soon as one node answers.
#[tokio::test]
async fn a_cluster_may_come_later() {
    let cluster = Cluster::patient();
    for node in cluster.nodes() {
        node.pause();
    }
    let guard = unconnected(&cluster.url(), Policy::default());
    loads_go_on_without(&guard, "no answer in time").await;
    for node in cluster.nodes() {
        node.resume();
    }
    let resumed = Instant::now();
    while guard.insert("k", &1).await.is_err() {
        assert!(resumed.elapsed() < SOON, "{}", guard.health());
    }
    let in_peace = guard.with_policy(lease_of(LEASE));
    assert_eq!(in_peace.get::<u32>("k").await.expect("a store"), Some(1));
}

/// On a cluster, the ids of tags are read with GET, which fails on a foreign type, and not with MGET, which returns nil.
#[tokio::test]
async fn an_evicted_or_foreign_id_of_a_tag_costs_misses() {
    let cluster = Cluster::patient();
    let [key, tag] = [cluster.key_on(0, "tagged"), cluster.key_on(1, "tag")];
    let tagged = unconnected(&cluster.url(), patient(LEASE).tags([&*tag]).build().expect("valid"));
    connects(&tagged).await;
    let (server, id) = (cluster.node(1), format!("sg1:t:{{default:{tag}}}"));
    assert_eq!(answer(&tagged, &key, 1).await, 1);
    assert_eq!(tagged.get::<u32>(&*key).await.expect("answered"), Some(1));
    server.run::<()>(&["DEL", &id]);
    assert_eq!(tagged.get::<u32>(&*key).await.expect("answered"), None, "evicted");
    server.run::<()>(&["RPUSH", &id, "foreign data"]);
    assert_eq!(tagged.get::<u32>(&*key).await.expect("answered"), None, "foreign");
    assert_eq!(tagged.stats().store_errors, 0);
    server.run::<()>(&["DEL", &id]);
    assert_eq!(answer(&tagged, &key, 2).await, 2);
    assert_eq!(tagged.get::<u32>(&*key).await.expect("answered"), Some(2));
    // If the right to read is missing, the read fails: the id does not count as missing.
    server.run::<()>(&["ACL", "SETUSER", "spread", "-get"]);
    tagged.get::<u32>(&*key).await.expect_err("not permitted");
}

/// The loader sets a long lifetime, and some of the ids are on other masters than the value.
#[tokio::test]
async fn tag_ids_outlive_their_value() {
    let cluster = Cluster::patient();
    let tags: Vec<_> = (0..3).map(|master| cluster.key_on(master, "tag")).collect();
    let guard = unconnected(&cluster.url(), patient(LEASE).tags([&*tags[0]]).build().expect("valid"));
    connects(&guard).await;
    let own = tags[1..].to_vec();
    let load = |mut cx: stampede_guard::LoadContext<u32>| async move {
        cx.tag(own).await.map_err(|error| error.to_string())?;
        cx.fresh_for(Duration::from_secs(30 * 86_400));
        Ok::<_, String>(1)
    };
    let key = cluster.key_on(0, "tagged");
    assert_eq!(guard.load(&*key).get(load).await.ok().map(|loaded| loaded.value), Some(1));
    settled(std::slice::from_ref(&guard)).await;
    let life = |master, key: String| cluster.node(master).run::<i64>(&["PTTL", &key]);
    let longest = life(0, format!("sg1:e:{{default:{key}}}"));
    assert!(longest > 20 * 86_400_000, "{longest}");
    for (master, tag) in tags.iter().enumerate() {
        let lives = life(master, format!("sg1:t:{{default:{tag}}}"));
        assert!(lives > longest, "{tag}: {lives}, {longest}");
    }
}
