//! Which nodes the guard asks about the slots, which replies it accepts, and how many times it asks.

use super::*;

/// The number of CLUSTER commands that this node has received so far.
fn slot_queries(node: &RedisServer) -> usize {
    let stats: String = node.run(&["INFO", "commandstats"]);
    let calls = stats.lines().filter(|line| line.starts_with("cmdstat_cluster"));
    let calls =
        calls.filter_map(|line| line.split_once("calls=")?.1.split(',').next()?.parse::<usize>().ok());
    calls.sum()
}

/// The client knows only the addresses of the masters, and all of them are dead.
#[tokio::test]
async fn replicas_that_took_over_from_all_masters_are_found() {
    let cluster = Cluster::calm();
    let guard = connected(&cluster, LEASE).await;
    guard.insert("k", &1).await.expect("stored");
    for master in 0..3 {
        cluster.node(master).kill();
    }
    for replica in 3..6 {
        cluster.node(replica).run::<()>(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
    }
    cluster.await_agreement();
    let agreed = Instant::now();
    while guard.insert("k", &2).await.is_err() {
        assert!(agreed.elapsed() < FAILOVER, "{}", guard.health());
    }
    assert_eq!(guard.get::<u32>("k").await.expect("a store"), Some(2));
}

/// Most of the addresses that the client knows lead to nodes that were reset.
#[tokio::test]
async fn nodes_that_know_of_no_slots_are_not_believed() {
    let cluster = Cluster::patient();
    let blank = [cluster.blank(), cluster.blank()];
    let ports = [blank[0].port(), blank[1].port(), cluster.node(1).port()].map(|port| port.to_string());
    let guard = unconnected(&format!("{SCHEME}{}", ports.join(",")), lease_of(LEASE));
    let keys: Vec<_> = (0..3).map(|master| cluster.key_on(master, "k")).collect();
    // The nodes without slots reply first.
    cluster.node(1).pause();
    guard.insert(&*keys[0], &0).await.expect_err("no node knows the slot");
    cluster.node(1).resume();
    let resumed = Instant::now();
    while guard.insert(&*keys[0], &1).await.is_err() {
        assert!(resumed.elapsed() < SOON, "{}", guard.health());
    }
    for key in &keys {
        guard.insert(&**key, &1).await.expect("stored");
        assert_eq!(guard.get::<u32>(&**key).await.expect("a store"), Some(1));
    }
}

/// A master hangs and is not replaced, while its keys are requested all the time. Not every process may query the other nodes about the
/// slots ten times a second.
#[tokio::test]
async fn a_master_that_hangs_causes_few_slot_queries() {
    let cluster = Cluster::patient();
    let guard = unconnected(&cluster.url(), Policy::default());
    connects(&guard).await;
    let key = cluster.key_on(0, "hung");
    answer(&guard, &key, 1).await;
    cluster.node(0).pause();
    let before = slot_queries(cluster.node(1));
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        let _ = guard.get::<u32>(&*key).await;
        tokio::time::sleep(ms(10)).await;
    }
    let sent = slot_queries(cluster.node(1)) - before;
    assert!((1..=25).contains(&sent), "queried {sent} times in five seconds");
    cluster.node(0).resume();
    let resumed = Instant::now();
    while guard.insert(&*key, &8).await.is_err() {
        assert!(resumed.elapsed() < Duration::from_secs(1) + SLACK + STANDSTILL, "{}", guard.health());
    }
}

/// The master that has the counter of the loads hangs. The limit is not enforced then, and no call waits for that master.
#[tokio::test]
async fn a_cap_on_a_master_that_hangs_costs_the_other_masters_nothing() {
    let cluster = Cluster::patient();
    let guard =
        unconnected(&cluster.url(), Policy::builder().max_concurrent_loads(2).build().expect("valid"));
    connects(&guard).await;
    answer(&guard, "first", 1).await;
    let cold = |master| (0..20).map(|n| cluster.key_on(master, &format!("cold{n}"))).collect::<Vec<_>>();
    let keys = [cold(0), cold(1), cold(2)];
    let counts = |node: &RedisServer| node.keys().iter().any(|key| !key.starts_with("sg1:e:"));
    let hung = (0..3).find(|master| counts(cluster.node(*master))).expect("one of them counts");
    cluster.node(hung).pause();
    let keys = [&keys[(hung + 1) % 3][..], &keys[(hung + 2) % 3]].concat();
    let mut added = Vec::new();
    for key in &keys {
        let started = Instant::now();
        answer(&guard, key, 7).await;
        added.push(started.elapsed());
    }
    keep_to_the_budget(&added, "beside");
    assert!(median(added.clone()) <= NOTHING, "{added:?}");
    let (mut stored, in_peace) = (0, guard.with_policy(lease_of(LEASE)));
    for key in &keys {
        stored += usize::from(in_peace.get::<u32>(&**key).await.expect("a store") == Some(7));
    }
    assert!(
        stored >= 30,
        "values are stored all the same, except for a few that were late on a busy machine: {stored}"
    );
}
