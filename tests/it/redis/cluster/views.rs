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
