//! Tags on a real server with the minimal rights: their cost, their invalidation, and the confirmation by replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use stampede_guard::LoadContext;

use super::*;
use crate::support::monitor::Monitor;
use crate::support::proxy::{Mode, Proxy};

fn tagged() -> PolicyBuilder {
    tagless().tags(["catalog"])
}

fn tagless() -> PolicyBuilder {
    Policy::builder().coordination_budget(ms(800)).command_timeout(ms(400))
}

async fn nodes(server: &RedisServer, n: usize) -> Vec<StampedeGuard> {
    let mut nodes = Vec::new();
    for _ in 0..n {
        let policy = patient(Duration::from_secs(60)).tags(["catalog"]);
        nodes.push(local(server, policy.build().expect("valid")).await);
    }
    nodes
}

#[tokio::test]
async fn a_hit_under_tags_costs_one_mget_and_an_invalidation_one_script() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2).await;
    assert_eq!(answer(&nodes[0], "k", 1).await, 1);
    // The server learns the script of an invalidation.
    nodes[1].invalidate_tag("other").await.expect("confirmed");
    settled(&nodes).await;
    let monitor = Monitor::start(&server);
    assert_eq!(nodes[1].get::<u32>("k").await.expect("answered"), Some(1));
    nodes[1].invalidate_tag("catalog").await.expect("confirmed");
    assert_eq!(nodes[0].get::<u32>("k").await.expect("answered"), None);
    let commands = monitor.finish().without(["ping", "time"]);
    assert_eq!(commands.by_name.get("mget"), Some(&2), "{commands:?}");
    assert_eq!(commands.by_name.get("evalsha"), Some(&1), "{commands:?}");
    assert_eq!(commands.total, 3, "{commands:?}");
}

#[tokio::test]
async fn an_evicted_or_foreign_id_costs_misses_and_brings_nothing_back() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2).await;
    let id = "sg1:t:{default:catalog}";
    assert_eq!(answer(&nodes[0], "k", 1).await, 1);
    let stored: String = server.run(&["GET", id]);
    server.run::<()>(&["DEL", id]);
    assert_eq!(answer(&nodes[1], "k", 2).await, 2, "evicted");
    server.run::<()>(&["DEL", id]);
    server.run::<()>(&["RPUSH", id, "foreign data"]);
    assert_eq!(nodes[0].get::<u32>("k").await.expect("answered"), None, "foreign");
    // Without the id a load still answers its callers, and its value is not stored.
    assert_eq!(answer(&nodes[1], "k", 3).await, 3);
    assert_eq!(nodes[0].get::<u32>("k").await.expect("answered"), None);
    server.run::<()>(&["DEL", id]);
    assert_eq!(answer(&nodes[1], "k", 4).await, 4);
    assert_ne!(server.run::<String>(&["GET", id]), stored);
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}

/// On a server the state of a tag is a text, which an expiry changes in place.
#[tokio::test]
async fn an_expired_tag_makes_values_stale_in_each_process_and_leaves_nothing_behind() {
    let server = RedisServer::start();
    for local_for in [0, 60] {
        let policy = || {
            let policy =
                patient(Duration::from_secs(60)).tags(["catalog"]).local_for(Duration::from_secs(local_for));
            policy.stale_while_revalidate(Duration::from_secs(60)).build().expect("valid")
        };
        let nodes = [local(&server, policy()).await, local(&server, policy()).await];
        let key = &*format!("k{local_for}");
        assert_eq!(answer(&nodes[0], key, 1).await, 1);
        assert_eq!(answer(&nodes[1], key, 2).await, 1);
        for value in [2, 3] {
            nodes[0].expire_tag("catalog").await.expect("confirmed");
            assert_eq!(answer(&nodes[1], key, value).await, value - 1, "stale, while it is loaded anew");
            settled(&nodes).await;
            assert_eq!(nodes[0].get::<u32>(key).await.expect("answered"), Some(value));
            assert!(nodes[0].remaining_freshness(key).await.expect("answered") > Some(Duration::ZERO));
        }
        nodes[1].invalidate_tag("catalog").await.expect("confirmed");
        assert_eq!(nodes[0].get::<u32>(key).await.expect("answered"), None);
    }
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}

/// The time of an expiry is noted by the clock of the process that makes it, which may be ahead of the reader's.
#[tokio::test]
async fn an_expiry_from_the_future_ends_the_freshness_all_the_same() {
    let server = RedisServer::start();
    let policy =
        patient(Duration::from_secs(60)).tags(["catalog"]).stale_while_revalidate(Duration::from_secs(60));
    let node = local(&server, policy.build().expect("valid")).await;
    assert_eq!(answer(&node, "k", 1).await, 1);
    let (id, now) = ("sg1:t:{default:catalog}", server.run::<Vec<u64>>(&["TIME"])[0]);
    let number: String = server.run(&["GET", id]);
    server.run::<()>(&["SET", id, &format!("{number}:1:{}", (now + 20) * 1_000), "KEEPTTL"]);
    assert_eq!(node.remaining_freshness("k").await.expect("answered"), Some(Duration::ZERO));
    assert_eq!(answer(&node, "k", 2).await, 1, "stale");
    settled(std::slice::from_ref(&node)).await;
    assert_eq!(answer(&node, "k", 3).await, 2);
}

/// An expiry needs memory, and an invalidation does not.
#[tokio::test]
async fn an_expiry_without_memory_invalidates() {
    let server = RedisServer::start();
    let nodes = nodes(&server, 2).await;
    assert_eq!(answer(&nodes[0], "k", 1).await, 1);
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    nodes[0].expire_tag("catalog").await.expect("confirmed");
    assert_eq!(nodes[1].get::<u32>("k").await.expect("answered"), None);
}

/// If a value lives longer than the policy says, the check of the ids at the end of the load extends their TTL to that of the value, in the
/// same round trip.
#[tokio::test]
async fn tag_ids_outlive_their_value_without_an_extra_round_trip() {
    const DAY: Duration = Duration::from_secs(86_400);
    let server = RedisServer::start();
    let node =
        local(&server, patient(Duration::from_secs(60)).tags(["catalog"]).build().expect("valid")).await;
    let load = |days: u32| {
        move |mut cx: LoadContext<u32>| async move {
            cx.tag(["sale"]).await.map_err(|error| error.to_string())?;
            if days > 0 {
                cx.fresh_for(DAY * days);
            }
            Ok::<_, String>(days)
        }
    };
    // The server learns the scripts of loads and of ids.
    assert_eq!(node.load("first").get(load(0)).await.ok().map(|loaded| loaded.value), Some(0));
    let mut longest = 0;
    for (key, days, mget, evalsha) in [("a", 0, 2, 5), ("b", 30, 1, 6), ("c", 7, 1, 6), ("d", 0, 2, 5)] {
        settled(std::slice::from_ref(&node)).await;
        let monitor = Monitor::start(&server);
        assert_eq!(node.load(key).get(load(days)).await.ok().map(|loaded| loaded.value), Some(days));
        settled(std::slice::from_ref(&node)).await;
        let commands = monitor.finish().without(["ping", "time", "role"]);
        // First the entry is read together with the policy's ids. Then come the lease, the policy's ids with the entry in the journal of
        // tags, a check of these ids, the value's own id, a look at the journal, and the commit.
        assert_eq!(commands.by_name.get("mget"), Some(&mget), "{days}: {commands:?}");
        assert_eq!(commands.by_name.get("evalsha"), Some(&evalsha), "{days}: {commands:?}");
        assert_eq!(commands.total, mget + evalsha + 1, "{days}: {commands:?}");
        let life = |key: &str| server.run::<u64>(&["PTTL", key]);
        longest = longest.max(life(&format!("sg1:e:{{default:{key}}}")));
        for tag in ["catalog", "sale"] {
            assert!(life(&format!("sg1:t:{{default:{tag}}}")) > longest, "{days}: {tag}");
        }
    }
}

/// Makes one call at `node`, whose load reads the version at its beginning and then takes a while.
async fn ask(node: StampedeGuard, version: Arc<AtomicU32>) -> u32 {
    let load = move || async move {
        let loaded = version.load(Ordering::SeqCst);
        tokio::time::sleep(ms(fastrand::u64(1..8))).await;
        Ok::<_, String>(loaded)
    };
    node.get_or_load("k", load).await.expect("loaded")
}

/// A tag is invalidated at random moments, while loads run in every node. A caller that comes after the acknowledgement, in any node,
/// receives a value whose load began after the invalidation.
#[tokio::test]
async fn a_caller_after_the_acknowledgement_never_receives_an_older_value() {
    const INVALIDATIONS: usize = 60;
    let server = RedisServer::start();
    let nodes = nodes(&server, 3).await;
    let (version, stop) = (Arc::new(AtomicU32::new(1)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..12)
        .map(|caller| {
            let (node, version, stop) = (nodes[caller % 3].clone(), Arc::clone(&version), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut calls = 0;
                while !stop.load(Ordering::SeqCst) {
                    ask(node.clone(), Arc::clone(&version)).await;
                    calls += 1;
                    tokio::time::sleep(ms(fastrand::u64(0..3))).await;
                }
                calls
            })
        })
        .collect();
    for _ in 0..INVALIDATIONS {
        tokio::time::sleep(ms(fastrand::u64(0..12))).await;
        let newest = version.fetch_add(1, Ordering::SeqCst) + 1;
        nodes[fastrand::usize(..3)].invalidate_tag("catalog").await.expect("confirmed");
        let later = nodes.iter().map(|node| ask(node.clone(), Arc::clone(&version)));
        for value in join_all(later).await {
            assert!(value >= newest, "received {value} after {newest} was acknowledged");
        }
    }
    stop.store(true, Ordering::SeqCst);
    let calls: usize = join_all(callers).await.into_iter().map(|calls| calls.expect("joined")).sum();
    assert!(calls > INVALIDATIONS, "{calls} calls");
}

#[tokio::test]
async fn an_invalidation_waits_for_replicas_where_the_policy_asks_for_it() {
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    // These nodes use the full user: WAIT is not among the minimal rights, because only `invalidate_replicas` needs it.
    let asks = |replicas| {
        let policy = Policy::builder().coordination_budget(ms(2_000)).command_timeout(ms(1_000));
        policy.lease(SOON).invalidate_replicas(replicas, ms(1_000)).build().expect("valid")
    };
    let guard = unconnected(&server.url(), asks(1));
    guard.insert("k", &1_u32).await.expect_err("there is no replica");
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    eventually("the replica follows", SOON, async || guard.invalidate("k").await.is_ok()).await;
    guard.insert("k", &2_u32).await.expect("a replica has it");
    assert_eq!(replica.run::<usize>(&["EXISTS", "sg1:e:{default:k}"]), 1);
    let two = guard.with_policy(asks(2));
    let error = two.invalidate("k").await.expect_err("there is one replica");
    assert!(error.to_string().contains("1 of 2 replicas"), "{error}");
    // A stopped replica confirms nothing, not even the removal of a key that did not exist.
    replica.pause();
    for _ in 0..2 {
        guard.invalidate_tag("t").await.expect_err("the replica is stopped");
    }
    // Meanwhile other calls do not wait behind the invalidation, and their connection stays open.
    let hurried =
        unconnected(&server.url(), tagless().invalidate_replicas(1, ms(1_000)).build().expect("valid"));
    connects(&hurried).await;
    let errors = hurried.stats().store_errors;
    let (waiting, ()) = tokio::join!(hurried.invalidate("other"), async {
        for _ in 0..40 {
            assert_eq!(hurried.get::<u32>("none").await.expect("answered"), None);
            tokio::time::sleep(ms(10)).await;
        }
    });
    waiting.expect_err("the replica is stopped");
    assert_eq!(hurried.stats().store_errors, errors);
}

/// Without a limit, each invalidation would hold a new connection for as long as the replica is unreachable.
#[tokio::test]
async fn invalidations_that_wait_for_replicas_open_four_connections_at_the_most() {
    const WITHIN: Duration = Duration::from_secs(1);
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    let policy = Policy::builder().coordination_budget(ms(2_000)).command_timeout(ms(1_000)).lease(SOON);
    let policy = policy.invalidate_replicas(1, WITHIN).build().expect("valid");
    let guard = unconnected(&server.url(), policy);
    eventually("the replica follows", SOON, async || guard.invalidate("k").await.is_ok()).await;
    replica.pause();
    eventually("what was waited for is over", SOON, async || server.client_count() <= 3).await;
    let before = server.client_count();
    let waiting = (0..200).map(|key| {
        let guard = guard.clone();
        tokio::spawn(async move {
            let started = Instant::now();
            guard.invalidate(("k", key)).await.expect_err("the replica is stopped");
            started.elapsed()
        })
    });
    let waiting: Vec<_> = waiting.collect();
    let mut most = 0;
    while !waiting.iter().all(|waits| waits.is_finished()) {
        most = most.max(server.client_count());
        tokio::time::sleep(ms(20)).await;
    }
    assert!((before + 1..=before + 4).contains(&most), "{most} connections, {before} before");
    for waited in join_all(waiting).await {
        let waited = waited.expect("joined");
        assert!(waited <= WITHIN + STANDSTILL, "{waited:?}");
    }
    replica.resume();
    eventually("it follows again", SOON, async || guard.invalidate("k").await.is_ok()).await;
}

/// If replicas lack a change, the store still counts as reachable.
#[tokio::test]
async fn many_invalidations_are_made_while_a_replica_is_stopped() {
    // Longer than an invalidation is retried.
    const WITHIN: Duration = Duration::from_millis(2_300);
    const KEYS: u64 = 300;
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    let guard =
        unconnected(&server.url(), patient(SOON).invalidate_replicas(1, WITHIN).build().expect("valid"));
    eventually("the replica follows", SOON, async || guard.invalidate("k").await.is_ok()).await;
    let stored = guard.with_policy(Policy::default()).insert_many((0..KEYS).map(|key| (key, 1))).await;
    assert!(stored.into_iter().all(|stored| stored.is_ok()));
    replica.pause();
    for answer in guard.invalidate_many(0..KEYS).await {
        let error = answer.expect_err("the replica is stopped").to_string();
        assert!(!error.contains("not confirmed yet"), "{error}");
    }
    assert_eq!(guard.stats().kept_invalidations, 0);
    assert!(server.keys().iter().all(|key| !key.starts_with("sg1:e:")));
}

/// The connection for WAIT, or its server, hangs. The caller receives the error after its bound.
#[tokio::test]
async fn an_invalidation_waits_for_replicas_no_longer_than_its_bound() {
    const WITHIN: Duration = Duration::from_millis(300);
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let policy = patient(SOON).invalidate_replicas(1, WITHIN).build().expect("valid");
    let guard = unconnected(&proxy.url(), policy);
    connects(&guard).await;
    proxy.set(Mode::BlackHoleNew);
    let mut fastest = Duration::MAX;
    // On a busy machine an attempt may take longer, but not each of five.
    for _ in 0..5 {
        let started = Instant::now();
        let error = chain(&guard.invalidate("k").await.expect_err("no replica confirms it"));
        assert!(error.contains("not confirmed by replicas"), "{error}");
        fastest = fastest.min(started.elapsed());
    }
    assert!(fastest >= WITHIN && fastest < WITHIN * 3, "{fastest:?}");
    proxy.set(Mode::Pass);
    let error = chain(&guard.invalidate("k").await.expect_err("there is no replica"));
    assert!(error.contains("0 of 1 replicas"), "{error}");
}

/// The address now leads to another server. What that server's WAIT returns says nothing about a change on the first server.
#[tokio::test]
async fn replicas_of_another_server_confirm_nothing() {
    let servers = [(); 2].map(|()| RedisServer::start());
    let proxy = Proxy::start(servers[0].port()).await;
    let policy = patient(SOON).invalidate_replicas(0, ms(1_000)).build().expect("valid");
    let guard = unconnected(&proxy.url(), policy);
    connects(&guard).await;
    guard.invalidate("k").await.expect("that is the server which has it");
    proxy.lead_to(servers[1].port());
    let error = chain(&guard.invalidate("k").await.expect_err("that is another one"));
    assert!(error.contains("not confirmed by replicas"), "{error}");
}

/// A call whose loader adds a tag, as in the README: an error of `tag` ends the load.
async fn priced(node: &StampedeGuard, price: u32, server: Option<&Arc<RedisServer>>) -> u32 {
    let server = server.cloned();
    let load = move |mut cx: LoadContext<u32>| async move {
        if let Some(server) = &server {
            server.pause();
        }
        cx.tag([("product", 7)]).await?;
        if let Some(server) = &server {
            server.resume();
        }
        cx.fresh_for(Duration::from_secs(60));
        Ok::<_, stampede_guard::Error>(price)
    };
    let answer = tokio::time::timeout(SOON, node.load("price").get(load)).await;
    answer.expect("it does not wait for the server").expect("a store is no reason to fail").value
}

#[tokio::test]
async fn a_store_that_hangs_while_a_loader_adds_a_tag_does_not_fail_the_load() {
    let server = Arc::new(RedisServer::start());
    let node = local(&server, tagged().build().expect("valid")).await;
    // The server hangs while the load adds its tag, and is back when the load ends.
    assert_eq!(priced(&node, 1, Some(&server)).await, 1);
    settled(std::slice::from_ref(&node)).await;
    eventually("it is back", SOON, async || node.get::<u32>("price").await.is_ok()).await;
    node.insert("price", &0_u32).await.expect("confirmed");
    node.invalidate("price").await.expect("confirmed");
    assert_eq!(priced(&node, 2, None).await, 2);
    assert_eq!(node.get::<u32>("price").await.expect("answered"), Some(2));
    node.invalidate_tag(("product", 7)).await.expect("confirmed");
    assert_eq!(node.get::<u32>("price").await.expect("answered"), None);
    server.kill();
    assert_eq!(priced(&node, 3, None).await, 3);
    assert_eq!(priced(&node, 4, None).await, 4, "the breaker is open");
    node.shutdown(ms(100)).await;
    assert_eq!(priced(&node, 5, None).await, 5);
}
