//! Each node has its own users, rights and settings: a right that a user has at one master may be missing at another.

use super::*;

/// A master that joined later, or restarted without its ACL file, may give the user other rights.
#[tokio::test]
async fn each_master_is_queried_for_the_rights_of_the_user_there() {
    let cluster = Cluster::patient();
    for lacking in 0..3 {
        let node = cluster.node(lacking);
        let address = format!("127.0.0.1:{}", node.port());
        for (right, named) in [
            ("set", "a script may not call - Client: SET"),
            ("evalsha", "this user may not do what the guard does"),
        ] {
            node.run::<()>(&["ACL", "SETUSER", "spread", &format!("-{right}")]);
            let guard = unconnected(&cluster.url(), lease_of(LEASE));
            connect_advises(&guard, named).await;
            connect_advises(&guard, &format!("the master at {address}")).await;
            let report = examined(&guard).await;
            let of = |finding: &&Finding| finding.check == "rights" && finding.severity == Severity::Problem;
            let found: Vec<_> = report.findings.iter().filter(of).collect();
            assert_eq!(found.len(), 1, "{report}");
            assert!(found[0].found.contains(&address), "{report}");
            assert!(found[0].found.contains(&right.to_uppercase()), "{report}");
            assert!(found[0].advice.contains(&format!("+{right}")), "{report}");
            node.run::<()>(&["ACL", "SETUSER", "spread", &format!("+{right}")]);
        }
    }
    let guard = connected(&cluster, LEASE).await;
    let report = examined(&guard).await;
    assert!(report.is_healthy(), "{report}");
    assert!(report.to_string().contains("may do everything at 2 other masters"), "{report}");
    assert_eq!(cluster.keys(), [""; 0], "connect and doctor leave nothing");
}

/// With one master down, `connect` succeeds, and the health reports `Breaker::Partly`.
#[tokio::test]
async fn a_master_that_is_down_is_not_queried() {
    let cluster = Cluster::patient();
    cluster.node(1).kill();
    let guard = connected(&cluster, LEASE).await;
    assert_eq!(guard.health().breaker, Breaker::Partly, "{}", guard.health());
}

/// Each master has its own eviction policy.
#[tokio::test]
async fn the_doctor_looks_at_each_masters_memory() {
    let cluster = Cluster::patient();
    for master in 0..3 {
        cluster.node(master).run::<()>(&["CONFIG", "SET", "maxmemory", "64mb"]);
        cluster.node(master).run::<()>(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]);
    }
    // This guard's user has the right to read these settings.
    let ports = cluster.nodes().iter().map(|node| node.url());
    let guard = StampedeGuard::new(ClusterClient::new(ports).expect("nodes"));
    connects(&guard).await;
    assert!(examined(&guard).await.worst() < Severity::Problem);
    for odd in 0..3 {
        let node = cluster.node(odd);
        node.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]);
        let report = examined(&guard).await;
        let of = |finding: &&Finding| finding.check == "eviction" && finding.severity == Severity::Warning;
        let found: Vec<_> = report.findings.iter().filter(of).collect();
        assert_eq!(found.len(), 1, "{report}");
        if !report
            .to_string()
            .contains(&format!("what follows is about its master at 127.0.0.1:{}", node.port()))
        {
            assert!(found[0].found.contains(&format!("at 127.0.0.1:{}: ", node.port())), "{report}");
        }
        node.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]);
    }
}
