//! Sentinels and servers with TLS: every connection uses TLS, also to a promoted primary, and a certificate error is
//! reported as for a single server.

use redis::TlsMode;

use super::*;
use crate::certificates::{Authority, HERE};
use crate::support::redis_server::field;

/// The authorities that a client trusts, for sentinels and for servers. `None` means that they are connected to without TLS.
#[derive(Clone, Copy)]
struct Trust<'a> {
    at_sentinels: Option<&'a Authority>,
    at_servers: Option<&'a Authority>,
}

impl<'a> Trust<'a> {
    fn everywhere(authority: &'a Authority) -> Self {
        Self { at_sentinels: Some(authority), at_servers: Some(authority) }
    }

    fn client(self, ports: &[u16]) -> SentinelClient {
        let sentinels = ports.iter().map(|&port| {
            let host = "127.0.0.1".to_owned();
            match self.at_sentinels {
                Some(_) => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
                None => ConnectionAddr::Tcp(host, port),
            }
        });
        let mut builder =
            SentinelClientBuilder::new(sentinels, NAME, SentinelServerType::Master).expect("sentinels");
        if let Some(authority) = self.at_sentinels {
            builder = builder.set_client_to_sentinel_certificates(authority.certificates(None));
        }
        if let Some(authority) = self.at_servers {
            builder = builder
                .set_client_to_redis_tls_mode(TlsMode::Secure)
                .set_client_to_redis_certificates(authority.certificates(None));
        }
        builder
            .set_client_to_redis_username("watched")
            .set_client_to_redis_password("pw")
            .build()
            .expect("a client")
    }
}

/// Counts the guards' connections to a server, and checks that all of them use TLS.
fn through_tls(server: &RedisServer) -> usize {
    let list: String = server.run(&["CLIENT", "LIST"]);
    let port = format!(":{}", server.tls_port().expect("it has one"));
    let ours = list.lines().filter(|client| field(client, "user") == Some("watched"));
    let ways: Vec<_> = ours.map(|client| field(client, "laddr").expect("laddr").ends_with(&port)).collect();
    assert!(ways.iter().all(|tls| *tls), "{list}");
    ways.len()
}

/// Waits until the server has this many connections. A connection that is closing, or a repeated attempt, counts for a moment.
async fn connected_to(server: &RedisServer, connections: usize) {
    eventually_eq("connections through TLS", SOON, connections, async || through_tls(server)).await;
}

#[tokio::test]
async fn guards_share_loads_through_tls_before_and_after_a_failover() {
    let authority = Authority::new();
    let watch = Sentinels::with_tls(authority.files(&authority.sign(&HERE)));
    let mut guards = Vec::new();
    for _ in 0..2 {
        let client = Trust::everywhere(&authority).client(&watch.tls_ports());
        let guard = guarded(client, lease_of(LEASE));
        connects(&guard).await;
        guards.push(guard);
    }
    let guards = <[StampedeGuard; 2]>::try_from(guards).expect("two");
    share_a_load(watch.first(), &guards).await;
    assert_eq!(guards[1].get::<u32>("k").await.expect("a store"), Some(1));
    connected_to(watch.first(), 4).await;
    let report = examined(&guards[0]).await;
    let of = |check: &str| report.findings.iter().find(|finding| finding.check == check).expect("checked");
    assert_eq!(of("sentinels").severity, Severity::Ok, "{report}");
    let primary = format!("127.0.0.1:{}", watch.first().tls_port().expect("it has one"));
    assert!(of("topology").found.contains(&primary), "{report}");

    watch.fail_over();
    work_on(watch.second(), &guards).await;
    share_again(watch.second(), &guards).await;
    assert_eq!(guards[1].get::<u32>("k").await.expect("a store"), Some(3));
    connected_to(watch.second(), 4).await;
    connected_to(watch.first(), 0).await;
}

#[tokio::test]
async fn a_wrong_tls_set_up_is_reported_with_advice() {
    let (authority, another) = (Authority::new(), Authority::named("another"));
    let watch = Sentinels::with_tls(authority.files(&authority.sign(&HERE)));
    let right = Trust::everywhere(&authority);
    for trust in
        [Trust { at_sentinels: Some(&another), ..right }, Trust { at_servers: Some(&another), ..right }]
    {
        let guard = guarded(trust.client(&watch.tls_ports()), Policy::default());
        loads_go_on_without(&guard, "name it as `root_cert`").await;
    }
    let unencrypted = "if they want TLS";
    let checks = [
        (Trust { at_servers: None, ..right }, watch.tls_ports(), unencrypted),
        (Trust { at_sentinels: None, ..right }, watch.tls_ports(), unencrypted),
        (right, watch.ports(), "ports for TLS"),
    ]
    .map(|(trust, ports, advice)| async move {
        let guard = guarded(trust.client(&ports), Policy::default());
        // Until the attempts at silent sentinels have timed out, `connect` reports only that there is no answer.
        eventually(advice, SOON, async || {
            assert!(guard.connect().await.is_err());
            guard.health().reason.is_some_and(|why| why.contains(advice))
        })
        .await;
    });
    join_all(checks).await;
    for server in [watch.first(), watch.second()] {
        connected_to(server, 0).await;
    }
    // A client may use plain ports for the sentinels and TLS for the servers.
    let guard = guarded(Trust { at_sentinels: None, ..right }.client(&watch.ports()), lease_of(LEASE));
    connects(&guard).await;
    connected_to(watch.first(), 2).await;
}
