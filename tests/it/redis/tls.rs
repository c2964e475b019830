//! A server with TLS: commands and messages use it. A wrong set-up costs requests no more than a server that is down, and
//! is reported with advice.

use super::nodes::{Reply, call};
use super::*;
use crate::certificates::{self, Authority, HERE, TlsServer};
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::field;

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(60);

fn guard(client: redis::Client, policy: Policy) -> StampedeGuard {
    StampedeGuard::builder(client).policy(policy).build().expect("valid")
}

async fn connected(client: redis::Client) -> StampedeGuard {
    let guard = guard(client, lease_of(LEASE));
    connects(&guard).await;
    guard
}

async fn works_with(args: &[&str]) {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), args);
    let guards =
        [connected(authority.client(&server.url())).await, connected(authority.client(&server.url())).await];
    share_a_load(&server.plain, &guards).await;
    // Both guards' connections for commands and for messages use TLS, and there are no other connections.
    let through = format!(":{}", server.tls_port);
    eventually_eq("through TLS, all of them", SOON, vec![true; 4], async || {
        let list: String = server.plain.run(&["CLIENT", "LIST"]);
        let ours = list.lines().filter(|client| field(client, "user") == Some("minimal"));
        ours.map(|client| field(client, "laddr").expect("laddr").ends_with(&through)).collect()
    })
    .await;
}

#[tokio::test]
async fn guards_share_a_load_through_tls_1_3() {
    works_with(&["--tls-protocols", "TLSv1.3"]).await;
}

#[tokio::test]
async fn guards_share_a_load_through_tls_1_2() {
    works_with(&["--tls-protocols", "TLSv1.2"]).await;
}

#[tokio::test]
async fn guards_share_a_load_in_resp3_through_tls() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    let url = format!("{}?protocol=resp3", server.url());
    let guards = [connected(authority.client(&url)).await, connected(authority.client(&url)).await];
    share_a_load(&server.plain, &guards).await;
}

#[tokio::test]
async fn a_server_with_tls_and_without_room_for_connections_is_reported_as_such() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    // The server allows only this connection.
    let mut admin = server.plain.conn();
    ailments::run(&mut admin, &["CONFIG", "SET", "maxclients", "1"]);
    loads_go_on_without(&guard(authority.client(&server.url()), Policy::default()), "maxclients").await;
}

/// The configuration of a child process.
#[derive(Serialize, Deserialize)]
struct NodeConfig {
    redis: String,
    authority: String,
    origin: String,
}

/// A child with its own guard, which loads each key that it receives from the parent at the origin.
pub(super) fn node(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let NodeConfig { redis, authority, origin } = child.config();
        let guard = connected(certificates::client(&redis, &authority, None)).await;
        let report = child.report();
        child.ready();
        loop {
            let key = child.recv_line().await;
            report
                .event_with(&key, &call(guard.clone(), origin.clone(), key.clone(), "load".to_owned()).await);
        }
    })
}

#[tokio::test]
async fn processes_share_a_load_through_tls() {
    let (authority, origin) = (Authority::new(), Origin::start().await);
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    let config = NodeConfig { redis: server.url(), authority: authority.pem(), origin: origin.addr() };
    let fleet = Fleet::spawn(3, "tls_node", &config);
    fleet.wait_ready().await;
    origin.script("k", [origin::Answer::value("v").after(ms(300))]);
    for member in fleet.members() {
        member.send("k");
    }
    for member in fleet.members() {
        let reply: Reply = serde_json::from_value(member.wait_event("k").await).expect("a reply");
        assert_eq!(reply.result.as_deref(), Ok("v"));
    }
    assert_eq!(origin.loads("k"), 1);
}

/// The client resolves the server's name, and the certificate must contain that name.
#[tokio::test]
async fn a_server_is_connected_to_by_its_name() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&["localhost"]), &[]);
    let by_name = server.url().replace("127.0.0.1", "localhost");
    assert_eq!(answer(&connected(authority.client(&by_name)).await, "k", 1).await, 1);
}

#[tokio::test]
async fn a_certificate_for_other_hosts_is_reported_as_such() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&["redis.example"]), &[]);
    let guard = guard(authority.client(&server.url()), Policy::default());
    loads_go_on_without(&guard, "connect by a name in it, or have it name this host").await;
}

#[tokio::test]
async fn a_certificate_of_an_unknown_authority_is_reported_as_such() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    for trusted in [Authority::named("another"), Authority::new()] {
        let guard = guard(trusted.client(&server.url()), Policy::default());
        loads_go_on_without(&guard, "name it as `root_cert` in the redis::TlsCertificates").await;
    }
}

/// When the certificate is renewed, a running guard connects without being started again.
#[tokio::test]
async fn an_expired_certificate_is_reported_as_such_until_it_is_renewed() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign_expired(&HERE), &[]);
    let guard = guard(authority.client(&server.url()), Policy::default());
    loads_go_on_without(&guard, "renew it, or set this machine's clock").await;
    server.renew(&authority.sign(&HERE));
    let in_peace = guard.with_policy(lease_of(LEASE));
    eventually_eq("values are stored again", SOON, Some(1), async || {
        answer(&in_peace, "back", 1).await;
        in_peace.get::<u32>("back").await.ok().flatten()
    })
    .await;
    settled(std::slice::from_ref(&guard)).await;
}

#[tokio::test]
async fn tls_spoken_to_a_plain_port_is_reported_as_such() {
    let server = RedisServer::start();
    let url = server.minimal_user().replace("redis://", "rediss://");
    let guard = guard(Authority::new().client(&url), Policy::default());
    loads_go_on_without(&guard, "port for TLS").await;
}

#[tokio::test]
async fn plain_text_spoken_to_a_tls_port_is_reported_as_such() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    for user in ["minimal:pw@", ""] {
        let guard = unconnected(&format!("redis://{user}127.0.0.1:{}/", server.tls_port), Policy::default());
        loads_go_on_without(&guard, "if it wants TLS, use rediss://").await;
    }
}

#[tokio::test]
async fn a_server_that_requires_client_certificates_gets_one_or_the_lack_is_reported() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &["--tls-auth-clients", "yes"]);
    let without = guard(authority.client(&server.url()), Policy::default());
    loads_go_on_without(&without, "give one as `client_tls`").await;
    let ours = authority.sign(&["this.service"]);
    let guards = [
        connected(authority.client_as(&server.url(), &ours)).await,
        connected(authority.client_as(&server.url(), &ours)).await,
    ];
    share_a_load(&server.plain, &guards).await;
}

/// The guard's deadlines also apply to a TLS handshake.
#[tokio::test]
async fn a_handshake_without_an_answer_costs_nothing_for_long() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    let proxy = Proxy::start(server.tls_port).await;
    let client = || authority.client(&format!("rediss://minimal:pw@127.0.0.1:{}/", proxy.port()));
    proxy.set(Mode::BlackHole);
    let guard = guard(client(), Policy::default());
    loads_go_on_without(&guard, "no answer to the TLS handshake in time").await;
    proxy.set(Mode::Pass);
    eventually("connects", SOON, async || guard.connect().await.is_ok()).await;

    // They also apply after a connection was established.
    proxy.set(Mode::BlackHole);
    let first = requests(&guard, "hung", 5).await;
    keep_to_the_budget(&first, "hung");
    let later = requests(&guard, "hung-later", 30).await;
    assert!(median(later.clone()) <= NOTHING, "{later:?}");
}

#[tokio::test]
async fn a_server_that_was_restarted_is_connected_to_again() {
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    let guards =
        [connected(authority.client(&server.url())).await, connected(authority.client(&server.url())).await];
    server.plain.restart();
    for guard in &guards {
        eventually("connects", SOON, async || guard.connect().await.is_ok()).await;
    }
    eventually_eq("both hear", SOON, 2, async || server.plain.pubsub_clients()).await;
    let before: Vec<_> = guards.iter().map(|guard| guard.stats().loads).collect();
    assert_eq!(answer(&guards[0], "k", 1).await, 1);
    assert_eq!(answer(&guards[1], "k", 2).await, 1);
    let after: Vec<_> = guards.iter().map(|guard| guard.stats().loads).collect();
    assert_eq!((after[0] - before[0], after[1] - before[1]), (1, 0));
}
