//! Credentials that rotate: every connection logs in with the provider's credentials, logs in again before they end, and is not replaced
//! for that. The tests' servers remove the user of a token when it ends, which closes each connection that still uses it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use stampede_guard::lock::{Mutex, Waiting};
use stampede_guard::{Backend, Credentials};

use super::*;
use crate::support::redis_server::MINIMAL_ACL;
use crate::support::tokens::{TOKEN, Tokens, token};
use crate::support::warnings::Warnings;

/// How long a token is valid.
const LIFE: Duration = Duration::from_secs(2);

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(120);

/// A provider of credentials that requests tokens from this issuer.
pub(crate) fn by(issuer: &str) -> impl Fn() -> CredentialsFuture + Send + Sync + 'static {
    let issuer: Arc<str> = issuer.into();
    move || {
        let issuer = Arc::clone(&issuer);
        Box::pin(async move {
            let (user, password, life) = token(&issuer).await?;
            Ok(Credentials::new(user, password).valid_for(life))
        })
    }
}

type CredentialsFuture = BoxFuture<'static, std::io::Result<Credentials>>;

fn of(backend: Backend, lease: Duration) -> StampedeGuard {
    StampedeGuard::builder(backend).policy(lease_of(lease)).build().expect("valid")
}

fn on(server: &RedisServer, tokens: &Tokens) -> StampedeGuard {
    of(Backend::from(server.client()).credentials(by(&tokens.addr())), LEASE)
}

async fn pair(server: &RedisServer, tokens: &Tokens) -> [StampedeGuard; 2] {
    let guards = [on(server, tokens), on(server, tokens)];
    for guard in &guards {
        connects(guard).await;
    }
    guards
}

/// Sends requests of every kind, one after the other, until `lasts` has passed. All must succeed. Returns their number.
async fn ask(guard: &StampedeGuard, lasts: Duration, name: impl Fn(u32) -> String) -> u32 {
    let (until, requests) = (Instant::now() + lasts, AtomicU32::new(0));
    let mutex = Mutex::new(&guard.locks(), "m").expect("valid");
    while Instant::now() < until {
        let number = requests.fetch_add(1, Ordering::Relaxed);
        let key = name(number % 50);
        match number % 7 {
            0 => guard.invalidate(&*key).await.expect("confirmed"),
            1 => guard.insert(&*key, &number).await.expect("stored"),
            2 => {
                let mut held = mutex.lock().await.expect("held");
                assert!(held.unlock().await.expect("released"));
            }
            _ => drop(answer(guard, &key, number).await),
        }
        tokio::time::sleep(ms(2)).await;
    }
    requests.into_inner()
}

/// Checks that no request was answered without the store, and no connection was lost.
fn nothing_failed(guards: &[StampedeGuard]) {
    for guard in guards {
        let (stats, health) = (guard.stats(), guard.health());
        assert_eq!(
            (stats.store_errors, stats.fail_open_loads, stats.failed, stats.leases_lost),
            (0, 0, 0, 0),
            "{stats:?}"
        );
        assert_eq!((health.outages, health.credential_failures), (0, 0), "{health}");
        assert_eq!((health.commands, health.inbox), (LinkState::Up, LinkState::Up), "{health}");
    }
}

/// The promise as the issue states it.
#[tokio::test]
async fn tokens_of_two_seconds_cost_no_request_and_no_connection_in_a_minute() {
    let server = RedisServer::start();
    let tokens = Tokens::start(&[server.port()], LIFE, &[]);
    let guards = pair(&server, &tokens).await;
    share_a_load(&server, &guards).await;
    let (ours, opened) = (server.ids_of(TOKEN), server.opened());
    assert_eq!(ours.len(), 4);
    let minute = Duration::from_secs(60);
    let requests = tokio::join!(ask(&guards[0], minute, key), ask(&guards[1], minute, key));
    nothing_failed(&guards);
    // Reading the counter a second time takes a new connection, which counts, too.
    assert_eq!((server.opened() - opened, server.ids_of(TOKEN)), (1, ours), "no other connection");
    let issued = tokens.issued();
    assert!((76..=120).contains(&issued), "{issued} tokens for two guards, one for each 1.3 to 1.56 seconds");
    assert!(requests.0 + requests.1 > 1_000, "{requests:?}");
    println!("{requests:?} requests, {issued} tokens, no connection beside the first four");
    // Notifications arrive, too.
    guards[0].invalidate("k").await.expect("confirmed");
    share_a_load(&server, &guards).await;
}

fn key(number: u32) -> String {
    format!("k{number}")
}

/// The connection for commands may use either protocol. (The one for messages always uses RESP3.)
#[tokio::test]
async fn the_connection_for_commands_logs_in_again_in_either_protocol() {
    let server = RedisServer::start();
    let tokens = Tokens::start(&[server.port()], LIFE, &[]);
    let mut guards = Vec::new();
    for protocol in ["resp2", "resp3"] {
        let url = format!("{}?protocol={protocol}", server.url());
        let backend = Backend::try_from(url).expect("an address").credentials(by(&tokens.addr()));
        guards.push(of(backend, LEASE));
        connects(guards.last().expect("one")).await;
    }
    let guards: [StampedeGuard; 2] = guards.try_into().expect("two");
    share_a_load(&server, &guards).await;
    let ours = server.ids_of(TOKEN);
    tokio::join!(ask(&guards[0], LIFE * 2, key), ask(&guards[1], LIFE * 2, key));
    nothing_failed(&guards);
    assert_eq!(server.ids_of(TOKEN), ours);
}

/// A killed server has lost all users, so it refuses the first token that it receives, and the provider is called for another one at once.
#[tokio::test]
async fn after_a_restart_connections_are_opened_with_a_later_token() {
    let server = RedisServer::start();
    // Tokens are valid for much longer than the test, so only a refusal makes the guard request another one.
    let tokens = Tokens::start(&[server.port()], LEASE * 10, &[]);
    let guards = pair(&server, &tokens).await;
    share_a_load(&server, &guards).await;
    assert_eq!(tokens.issued(), 2);
    server.restart();
    for guard in &guards {
        eventually("works again", SOON, async || guard.insert("x", &1).await.is_ok()).await;
        eventually_eq("hears again", SOON, LinkState::Up, async || guard.health().inbox).await;
        let health = guard.health();
        assert!(health.credential_failures >= 1, "{health}");
    }
    guards[0].invalidate("k").await.expect("confirmed");
    share_a_load_of(&server, &guards, "k", [3, 4]).await;
    assert!(tokens.issued() < 20, "{} tokens: no storm", tokens.issued());
}

/// The provider is away for less than the rest of a token's life, and then for longer than that.
#[tokio::test]
async fn a_provider_that_fails_costs_nothing_until_the_token_ends() {
    let server = RedisServer::start();
    let life = Duration::from_secs(6);
    let tokens = Tokens::start(&[server.port()], life, &[]);
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = on(&server, &tokens);
    connects(&guard).await;
    let ours = server.ids_of(TOKEN);
    tokens.fail(true);
    // The provider is called after at most 4.8 s of the token's 6 s.
    eventually("it is called", SOON, async || guard.health().credential_failures > 0).await;
    assert_eq!(answer(&guard, "k", 1).await, 1);
    tokens.fail(false);
    eventually_eq("a token", SOON, 2, async || tokens.issued()).await;
    ask(&guard, life / 2, key).await;
    assert!(server.ids_of(TOKEN).is_superset(&ours), "they are open, with the second token");
    let (stats, health) = (guard.stats(), guard.health());
    assert_eq!((stats.store_errors, stats.fail_open_loads, health.outages), (0, 0, 0), "{stats:?} {health}");

    tokens.fail(true);
    eventually("the token ends", SOON, async || guard.health().commands == LinkState::Down).await;
    let requests = requests(&guard, "alone", 20).await;
    assert!(median(requests.clone()) <= NOTHING, "{requests:?}");
    eventually("the reason is reported", SOON, async || {
        guard
            .health()
            .reason
            .is_some_and(|why| why.contains("provider of credentials") && why.contains("no tokens today"))
    })
    .await;
    assert!(!format!("{:?} {}", guard.health(), guard.health()).contains("secret"));
    let warned = warnings.about("no new credentials");
    assert_eq!(warned.len(), 1, "once a minute: {warned:?}");
    assert!(warned[0].contains("no tokens today"), "{warned:?}");
    assert!(warnings.about("secret").is_empty());

    tokens.fail(false);
    eventually("works again", SOON, async || guard.insert("x", &1).await.is_ok()).await;
}

/// The provider gives a token of a user without rights here. The error must not contain the password.
#[tokio::test]
async fn a_token_that_the_server_refuses_is_reported_without_it() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let tokens = Tokens::start(&[other.port()], LIFE, &[]);
    let guard = on(&server, &tokens);
    let advice = "the server refuses the credentials that the provider gave";
    eventually(advice, SOON, async || {
        let why = chain(&guard.connect().await.expect_err("no connection"));
        assert!(!why.contains("secret"), "{why}");
        why.contains(advice)
    })
    .await;
    let report = guard.doctor().await.to_string();
    assert!(report.contains(advice) && !report.contains("secret"), "{report}");
    assert!(tokens.issued() < 60, "{} tokens: no storm", tokens.issued());
}

/// The connection for announcements of keys is open only while a waiter needs it, here for longer than a token is valid.
#[tokio::test]
async fn a_wait_by_announcements_outlives_tokens() {
    let server = RedisServer::start();
    let rights = ["+config|get", "+config|set", "&__keyspace@*"];
    let tokens = Tokens::start(&[server.port()], LIFE, &rights);
    let guard = on(&server, &tokens);
    connects(&guard).await;
    server.run::<()>(&["SET", "sg1:foreign", "theirs"]);
    let locks = guard.locks();
    let mutex = Mutex::builder(&locks, "foreign").prefix("sg1:").ttl(LEASE).wait(Waiting::Keyspace);
    let mutex = mutex.build().expect("valid");
    let waits = tokio::spawn(async move { mutex.lock().await.map(drop) });
    eventually_eq("three connections", SOON, 3, async || server.ids_of(TOKEN).len()).await;
    let ours = server.ids_of(TOKEN);
    tokio::time::sleep(LIFE * 3).await;
    assert_eq!(server.ids_of(TOKEN), ours, "none was opened anew");
    server.run::<()>(&["DEL", "sg1:foreign"]);
    notified(waits).await.expect("no panic").expect("the lock");
}

/// A password in a file is rotated by hand: the provider does not know when it ends.
#[tokio::test]
async fn a_password_without_an_expiry_is_requested_for_each_new_connection() {
    let server = RedisServer::start();
    let number = Arc::new(AtomicU32::new(1));
    let present = Arc::clone(&number);
    let backend = Backend::from(server.client()).credentials(move || {
        let password = format!("pw-{}", present.load(Ordering::SeqCst));
        async move { Ok::<_, String>(Credentials::new("filed", password)) }
    });
    let change = |to: u32| {
        let rights = MINIMAL_ACL.split_whitespace().filter(|right| !right.starts_with('>'));
        let password = format!(">pw-{to}");
        let command: Vec<_> =
            ["ACL", "SETUSER", "filed", "resetpass", &password].into_iter().chain(rights).collect();
        server.run::<()>(&command);
        number.store(to, Ordering::SeqCst);
    };
    change(1);
    let guard = of(backend, LEASE);
    connects(&guard).await;
    change(2);
    // When the connections are cut, they are opened again with the password that is valid then.
    assert!(server.kill_clients() >= 2);
    eventually("works again", SOON, async || guard.insert("x", &1).await.is_ok()).await;
    eventually_eq("hears again", SOON, LinkState::Up, async || guard.health().inbox).await;
    // Credentials that are less than a tenth of a second old are used again, and may be refused.
    assert!(guard.health().credential_failures <= 1, "{}", guard.health());
}

/// As when the latest token has not reached the server yet.
#[tokio::test]
async fn while_the_server_refuses_the_latest_connections_are_opened_with_those_before() {
    let server = RedisServer::start();
    let create = |user: &str| {
        let rights = MINIMAL_ACL.split_whitespace().filter(|right| !right.starts_with('>'));
        server.run::<()>(&["ACL", "SETUSER", user, ">pw"].into_iter().chain(rights).collect::<Vec<_>>());
    };
    create("present");
    let is_later = Arc::new(AtomicBool::new(false));
    let later = Arc::clone(&is_later);
    let backend = Backend::from(server.client()).credentials(move || {
        let user = if later.load(Ordering::SeqCst) { "later" } else { "present" };
        async move { Ok::<_, String>(Credentials::new(user, "pw")) }
    });
    let guard = of(backend, LEASE);
    connects(&guard).await;
    is_later.store(true, Ordering::SeqCst);
    // Credentials that are less than a tenth of a second old are used again, so this takes several cuts.
    eventually("it is refused", SOON, async || {
        server.kill_clients();
        guard.health().credential_failures > 0
    })
    .await;
    eventually("works again", SOON, async || guard.insert("x", &1).await.is_ok()).await;
    eventually_eq("hears again", SOON, LinkState::Up, async || guard.health().inbox).await;
    create("later");
    eventually_eq("both log in", SOON, 2, async || server.ids_of("later").len()).await;
}

#[cfg(feature = "sentinel")]
#[tokio::test]
async fn behind_sentinels_tokens_cost_nothing_and_a_failover_uses_the_present_one() {
    use redis::ConnectionAddr;
    use redis::sentinel::{SentinelClientBuilder, SentinelServerType};

    use crate::support::sentinels::{NAME, ROLE, Sentinels};

    let watch = Sentinels::start();
    let tokens = Tokens::start(&[watch.first().port(), watch.second().port()], LIFE, &[ROLE]);
    let guards = [(); 2].map(|()| {
        let ports = watch.ports();
        let backend = Backend::sentinels(by(&tokens.addr()), move |credentials| {
            let sentinels = ports.iter().map(|port| ConnectionAddr::Tcp("127.0.0.1".to_owned(), *port));
            SentinelClientBuilder::new(sentinels, NAME, SentinelServerType::Master)?
                .set_client_to_redis_username(credentials.username())
                .set_client_to_redis_password(credentials.password())
                .build()
        });
        of(backend, LEASE)
    });
    for guard in &guards {
        connects(guard).await;
    }
    share_a_load(watch.first(), &guards).await;
    let ours = watch.first().ids_of(TOKEN);
    tokio::join!(ask(&guards[0], LIFE * 3, key), ask(&guards[1], LIFE * 3, key));
    nothing_failed(&guards);
    assert_eq!(watch.first().ids_of(TOKEN), ours);

    watch.fail_over();
    for (index, guard) in guards.iter().enumerate() {
        let key = format!("moved-{index}");
        eventually("works on the new primary", PATIENCE, async || {
            guard.insert(&*key, &1).await.is_ok()
                && watch.second().keys().contains(&format!("sg1:e:{{default:{key}}}"))
        })
        .await;
    }
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn on_a_cluster_each_node_receives_each_token() {
    use redis::cluster::ClusterClient;

    use crate::support::cluster::{CLUSTER_RIGHTS, Cluster};

    let cluster = Cluster::calm();
    let ports: Vec<_> = cluster.nodes().iter().map(RedisServer::port).collect();
    let tokens = Tokens::start(&ports, LIFE, &CLUSTER_RIGHTS);
    let guards = [(); 2].map(|()| {
        let nodes = ports.iter().map(|port| format!("redis://127.0.0.1:{port}/"));
        of(Backend::from(ClusterClient::new(nodes).expect("nodes")).credentials(by(&tokens.addr())), LEASE)
    });
    for guard in &guards {
        connects(guard).await;
    }
    let share = async |value| {
        for master in 0..3 {
            let key = cluster.key_on(master, "shared");
            guards[0].invalidate(&*key).await.expect("confirmed");
            share_a_load_of(cluster.node(master), &guards, &key, [value, value + 1]).await;
        }
    };
    share(1).await;
    let ours = || cluster.nodes().iter().map(|node| node.ids_of(TOKEN)).collect::<Vec<_>>();
    let before = ours();
    assert!(before.iter().take(3).all(|ids| ids.len() >= 2), "{before:?}");
    tokio::join!(ask(&guards[0], LIFE * 3, key), ask(&guards[1], LIFE * 3, key));
    nothing_failed(&guards);
    assert_eq!(ours(), before);
    share(3).await;
}
