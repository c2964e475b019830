//! What the guard makes of a cluster where masters do not say the same, or nothing.

use super::*;

/// The client was made with the masters, and there is none of them left.
#[tokio::test]
async fn replicas_that_took_over_from_all_masters_are_found() {
    let cluster = Cluster::start();
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

/// Among the addresses that the client was given are nodes that were reset, and they are more than the others.
#[tokio::test]
async fn nodes_that_know_of_no_slots_are_not_believed() {
    let cluster = Cluster::patient();
    let blank = [cluster.blank(), cluster.blank()];
    let ports = [blank[0].port(), blank[1].port(), cluster.node(1).port()].map(|port| port.to_string());
    let guard = unconnected(&format!("{SCHEME}{}", ports.join(",")), lease_of(LEASE));
    let keys: Vec<_> = (0..3).map(|master| cluster.key_on(master, "k")).collect();
    // Those who know nothing are heard first.
    cluster.node(1).pause();
    guard.insert(&*keys[0], &0).await.expect_err("nobody knows where");
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

/// The master that counts the loads hangs. The cap is not kept then, and nobody waits for it.
#[tokio::test]
async fn a_cap_whose_master_hangs_costs_the_others_nothing() {
    let cluster = Cluster::patient();
    let guard =
        unconnected(&cluster.url(), Policy::builder().max_concurrent_loads(2).build().expect("valid"));
    guard.connect().await.expect("connects");
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
    assert!(added.iter().all(|added| *added <= ms(100) + SLACK), "{added:?}");
    assert!(median(added.clone()) <= NOTHING, "{added:?}");
    assert_eq!(guard.get::<u32>(&*keys[39]).await.expect("a store"), Some(7), "they are stored all the same");
}
