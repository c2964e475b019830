//! A cluster with TLS: the guard connects to every node through TLS, with the client's own certificates. An error with a
//! certificate is reported as for a single server.

use super::*;
use crate::certificates::{Authority, HERE, Identity};
use crate::support::redis_server::field;

fn client(seeds: &[String], authority: &Authority, identity: Option<&Identity>) -> ClusterClient {
    let builder = ClusterClient::builder(seeds.to_vec()).certs(authority.certificates(identity));
    builder.build().expect("nodes and certificates")
}

fn guarded(client: ClusterClient, policy: Policy) -> StampedeGuard {
    StampedeGuard::builder(client).policy(policy).build().expect("valid")
}

/// The URL of a node, with the login of the smallest user.
fn url(scheme: &str, host: &str, port: u16) -> String {
    format!("{scheme}://spread:pw@{host}:{port}/")
}

fn tls_port(node: &RedisServer) -> u16 {
    node.tls_port().expect("it has one")
}

/// Counts the guards' connections to each running node, and checks that all of them use TLS.
fn through_tls(cluster: &Cluster) -> Vec<usize> {
    let count = |node: &RedisServer| {
        let list: String = node.run(&["CLIENT", "LIST"]);
        let port = format!(":{}", tls_port(node));
        let ours = list.lines().filter(|client| field(client, "user") == Some("spread"));
        let ways: Vec<_> =
            ours.map(|client| field(client, "laddr").expect("laddr").ends_with(&port)).collect();
        assert!(ways.iter().all(|tls| *tls), "{list}");
        ways.len()
    };
    cluster.nodes().iter().filter(|node| node.is_running()).map(count).collect()
}

/// The client knows one node's address, and all nodes require client certificates.
#[tokio::test]
async fn every_node_is_spoken_to_through_tls_wherever_slots_go() {
    let authority = Authority::new();
    let cluster = Cluster::with_tls(authority.files(&authority.sign(&HERE)).mutual());
    let (seed, ours) =
        (url("rediss", "127.0.0.1", tls_port(cluster.node(0))), authority.sign(&["this.service"]));
    let mut guards = Vec::new();
    for _ in 0..2 {
        let client = client(std::slice::from_ref(&seed), &authority, Some(&ours));
        let guard = guarded(client, lease_of(LEASE));
        connects(&guard).await;
        guards.push(guard);
    }
    let guards = <[StampedeGuard; 2]>::try_from(guards).expect("two");
    // For a key on each master: both nodes share one load, by a notification, and both hit afterwards.
    for master in 0..3 {
        let key = cluster.key_on(master, "shared");
        share(&cluster, &guards, &key).await;
        for guard in &guards {
            assert_eq!(guard.get::<usize>(&*key).await.expect("a store"), Some(0));
        }
    }
    let connections = async || through_tls(&cluster).iter().sum::<usize>();
    eventually_eq("to each master, and for messages", SOON, 2 * (3 + 1), connections).await;
    // A replica that has sent nothing for a while is reported as missing, so this waits until it has sent something.
    eventually("all is well", SOON, async || {
        let report = examined(&guards[0]).await;
        report.findings.iter().all(|finding| finding.severity <= Severity::Note)
    })
    .await;

    // MOVED names a master that the slot map knows.
    let key = cluster.key_on(1, "moved");
    guards[0].insert(&*key, &1).await.expect("stored");
    cluster.move_slot(cluster.slot_of(&key), 1, 2);
    assert_eq!(guards[1].get::<u32>(&*key).await.expect("a store"), Some(1));

    // MOVED names a node that neither the client nor the slot map knew as a master.
    cluster.node(0).kill();
    cluster.await_promotion(0);
    cluster.await_agreement();
    let (key, killed) = (cluster.key_on(0, "after"), Instant::now());
    for guard in &guards {
        while guard.insert(&*key, &2).await.is_err() || guard.health().inbox != LinkState::Up {
            assert!(killed.elapsed() < FAILOVER, "{}", guard.health());
            tokio::time::sleep(ms(10)).await;
        }
    }
    share_at(cluster.node(3), &guards, &cluster.key_on(0, "shared-again")).await;
    eventually_eq("as many as before", SOON, (true, 2 * (3 + 1)), async || {
        let connections = through_tls(&cluster);
        let promoted = connections[2];
        (promoted >= 2, connections.iter().sum::<usize>())
    })
    .await;
}

#[tokio::test]
async fn a_wrong_tls_set_up_is_reported_with_advice() {
    let (authority, another) = (Authority::new(), Authority::named("another"));
    let cluster = Cluster::patient_with_tls(authority.files(&authority.sign(&HERE)));
    let seeds = |scheme: &str, port: fn(&RedisServer) -> u16| -> Vec<_> {
        cluster.nodes().iter().map(|node| url(scheme, "127.0.0.1", port(node))).collect()
    };
    let untrusted = guarded(client(&seeds("rediss", tls_port), &another, None), Policy::default());
    loads_go_on_without(&untrusted, "name it as `root_cert`").await;
    let report = examined(&untrusted).await.to_string();
    assert!(report.contains("name it as `root_cert`"), "{report}");
    let at_plain_ports = client(&seeds("rediss", RedisServer::port), &authority, None);
    let without_tls = ClusterClient::new(seeds("redis", tls_port)).expect("nodes");
    let checks = [(at_plain_ports, "port for TLS"), (without_tls, "if it wants TLS, use rediss://")].map(
        |(client, advice)| async move {
            let guard = guarded(client, Policy::default());
            connect_advises(&guard, advice).await;
        },
    );
    join_all(checks).await;
    eventually_eq("none is left", SOON, vec![0; 3], async || through_tls(&cluster)).await;
}

/// Nodes announce addresses to each other unless they are configured to announce host names. A certificate may contain only names.
#[tokio::test]
async fn nodes_are_connected_to_by_the_names_that_they_announce() {
    let authority = Authority::new();
    let cluster = Cluster::patient_with_tls(authority.files(&authority.sign(&["localhost"])));
    let seed = [url("rediss", "localhost", tls_port(cluster.node(0)))];
    let by_address = guarded(client(&seed, &authority, None), Policy::default());
    loads_go_on_without(&by_address, "the server's certificate is for other hosts").await;
    for node in cluster.nodes() {
        node.run::<()>(&["CONFIG", "SET", "cluster-announce-hostname", "localhost"]);
        node.run::<()>(&["CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname"]);
    }
    let by_name = guarded(client(&seed, &authority, None), lease_of(LEASE));
    for master in 0..3 {
        let key = cluster.key_on(master, "k");
        eventually("all names are known", SOON, async || {
            let inserted = by_name.insert(&*key, &master).await;
            inserted.is_ok() && by_name.get::<usize>(&*key).await.ok() == Some(Some(master))
        })
        .await;
    }
}
