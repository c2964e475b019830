//! Guards and locks from clones of one backend share two connections, and each guard is still a separate node.

use std::collections::BTreeSet;

use stampede_guard::lock::{Locks, Mutex};
use stampede_guard::{Backend, ErrorKind};

use super::*;

/// The lease is so long that a test fails if a waiter is not notified.
const LEASE: Duration = Duration::from_secs(120);

const NAMESPACES: [&str; 3] = ["prices", "users", "pages"];

fn backend(server: &RedisServer) -> Backend {
    Backend::try_from(server.minimal_user()).expect("an address")
}

async fn guard(backend: &Backend, namespace: &str) -> StampedeGuard {
    let builder = StampedeGuard::builder(backend.clone()).namespace(namespace).policy(lease_of(LEASE));
    let guard = builder.build().expect("valid");
    connects(&guard).await;
    guard
}

/// The ids of the guards' connections. They are recognised by their user, which no other connection has.
fn connections(server: &RedisServer) -> BTreeSet<String> {
    server.ids_of("minimal")
}

#[tokio::test]
async fn any_number_of_guards_have_two_connections_and_all_are_notified() {
    let server = RedisServer::start();
    let (here, there) = (backend(&server), backend(&server));
    let mut pairs = Vec::new();
    for namespace in NAMESPACES {
        pairs.push((namespace, guard(&here, namespace).await, guard(&there, namespace).await));
    }
    let locks = Locks::new(here.clone());
    locks.connect().await.expect("connected");
    assert_eq!(connections(&server).len(), 4, "two for each backend");

    for (namespace, here, there) in &pairs {
        share_a_load_in(namespace, &server, [there, here], "a", [1, 2]).await;
        share_a_load_in(namespace, &server, [here, there], "b", [1, 2]).await;
    }
    let mutex = Mutex::new(&locks, "m").expect("valid");
    let held = Mutex::new(&pairs[0].2.locks(), "m").expect("valid").try_lock().await.expect("answered");
    assert!(held.is_some(), "guards' locks are in their own namespace");
    assert!(mutex.try_lock().await.expect("answered").is_some());
    assert_eq!(connections(&server).len(), 4);
}

/// Each guard has its own four connections for invalidations that wait for replicas.
#[tokio::test]
async fn a_guard_that_waits_long_for_replicas_takes_no_connection_from_another() {
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    replica.run::<()>(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    let backend = Backend::from(server.client());
    let [patient, hurried] = [Duration::from_secs(60), ms(200)].map(|within| {
        let policy = patient(SOON).invalidate_replicas(1, within).build().expect("valid");
        StampedeGuard::builder(backend.clone()).policy(policy).build().expect("valid")
    });
    eventually("the replica follows", SOON, async || hurried.invalidate("k").await.is_ok()).await;
    replica.pause();
    let waiting = (0..8_u64).map(|key| {
        let guard = patient.clone();
        tokio::spawn(async move { guard.invalidate(key).await })
    });
    let waiting: Vec<_> = waiting.collect();
    let blocked = || server.run::<String>(&["INFO", "clients"]).contains("blocked_clients:4");
    eventually("four wait", SOON, async || blocked()).await;
    let error = hurried.invalidate("k").await.expect_err("the replica is stopped");
    assert!(error.to_string().contains("0 of 1 replicas"), "{}", chain(&error));
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Two guards of one namespace are two nodes: each has its own copies, queues and positions.
#[tokio::test]
async fn two_guards_of_one_namespace_share_their_loads_like_two_processes() {
    let server = RedisServer::start();
    let backend = backend(&server);
    let guards = [guard(&backend, "prices").await, guard(&backend, "prices").await];
    share_a_load_in("prices", &server, [&guards[0], &guards[1]], "a", [1, 2]).await;
    assert_eq!(guards.each_ref().map(|guard| (guard.stats().led, guard.stats().coalesced)), [(1, 0), (0, 1)]);
    assert_eq!(connections(&server).len(), 2);
}

#[tokio::test]
async fn an_invalidation_reaches_the_copies_of_each_guard() {
    let server = RedisServer::start();
    let (here, there) = (backend(&server), backend(&server));
    let keeping = |backend: &Backend, namespace: &str| {
        let policy = patient(LEASE).local_for(Duration::MAX).build().expect("valid");
        StampedeGuard::builder(backend.clone()).namespace(namespace).policy(policy).build().expect("valid")
    };
    let prices = [&here, &here, &there].map(|backend| keeping(backend, "prices"));
    let users = [&here, &there].map(|backend| keeping(backend, "users"));
    let all = || prices.iter().chain(&users);
    for guard in all() {
        let is_local = || async {
            answer(guard, "k", 1).await;
            guard.stats().local_hits > 0
        };
        eventually("a hit from memory", SOON, is_local).await;
    }

    prices[0].invalidate("k").await.expect("confirmed");
    for guard in &prices {
        assert_eq!(answer(guard, "k", 2).await, 2);
    }
    for guard in &users {
        assert_eq!(answer(guard, "k", 2).await, 1, "another namespace");
    }
    users[1].invalidate("k").await.expect("confirmed");
    for guard in &users {
        assert_eq!(answer(guard, "k", 3).await, 3);
    }
    assert_eq!(connections(&server).len(), 4);
}

#[tokio::test]
async fn a_guard_that_ends_leaves_the_others_their_connections_and_the_last_closes_them() {
    let server = RedisServer::start();
    let (here, there) = (backend(&server), backend(&server));
    let [one, other] = [guard(&here, "prices").await, guard(&here, "users").await];
    let remote = guard(&there, "users").await;
    let before = connections(&server);
    let channels = || server.run::<Vec<String>>(&["PUBSUB", "CHANNELS", "sg1:i:*"]).len();
    assert_eq!((before.len(), channels()), (4, 3));

    one.shutdown(Duration::ZERO).await;
    eventually_eq("it leaves its channel", SOON, 2, async || channels()).await;
    let error = one.connect().await.expect_err("it is shut down");
    assert_eq!(error.kind(), ErrorKind::Closed);
    share_a_load_in("users", &server, [&remote, &other], "a", [1, 2]).await;
    let late = guard(&here, "pages").await;
    assert_eq!((connections(&server), channels()), (before, 3), "no connection was opened anew");

    drop((other, late));
    eventually_eq("connections", SOON, 2, async || connections(&server).len()).await;
    let later = guard(&here, "users").await;
    share_a_load_in("users", &server, [&remote, &later], "b", [1, 2]).await;
}

#[tokio::test]
async fn all_guards_are_notified_again_after_their_connections_were_lost() {
    let server = RedisServer::start();
    let (here, there) = (backend(&server), backend(&server));
    let mut pairs = Vec::new();
    for namespace in NAMESPACES {
        pairs.push((namespace, guard(&here, namespace).await, guard(&there, namespace).await));
    }
    for key in ["a", "b"] {
        let before = connections(&server);
        server.kill_clients();
        let are_others = || async {
            let now = connections(&server);
            now.len() == 4 && now.is_disjoint(&before)
        };
        eventually("they are opened anew", SOON, are_others).await;
        for (_, here, there) in &pairs {
            for guard in [here, there] {
                let hears = || async {
                    let health = guard.health();
                    (health.commands, health.inbox) == (LinkState::Up, LinkState::Up)
                };
                eventually("hears", SOON, hears).await;
            }
        }
        for (namespace, here, there) in &pairs {
            share_a_load_in(namespace, &server, [there, here], key, [1, 2]).await;
        }
    }
}

/// The server refuses the messages. Each guard that joins must be notified of that, or its waiters would wait for messages.
#[tokio::test]
async fn guards_without_the_right_to_subscribe_load_all_the_same() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
    let backend = backend(&server);
    for namespace in NAMESPACES {
        let builder = StampedeGuard::builder(backend.clone()).namespace(namespace).policy(lease_of(LEASE));
        let guard = builder.build().expect("valid");
        opens(&guard).await;
        eventually("refused", SOON, async || guard.health().inbox == LinkState::Refused).await;
        assert_eq!(answer(&guard, "k", 1).await, 1);
    }
}
