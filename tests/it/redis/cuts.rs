//! Connections that end while they are idle, during a read, or because of a value that the server refuses; and a server that accepts no
//! more connections.

use super::*;

const LEASE: Duration = Duration::from_secs(60);

/// Regression: each connection that was cut cost the next caller its hit, and a load without the lease.
#[tokio::test]
async fn a_connection_that_the_server_closes_while_idle_costs_no_hit() {
    for resp3 in [false, true] {
        let server = RedisServer::start();
        let server = if resp3 { server.in_resp3() } else { server };
        for round in 0..5 {
            let guard = local(&server, lease_of(LEASE)).await;
            answer(&guard, "k", 7).await;
            server.kill_clients();
            assert_eq!(answer(&guard, "k", 8).await, 7, "round {round}, resp3: {resp3}");
            assert_eq!(guard.stats().fail_open_loads, 0);
        }
    }
}

#[tokio::test]
async fn the_guard_reconnects_before_the_next_call() {
    let server = RedisServer::start();
    let guard = local(&server, lease_of(LEASE)).await;
    answer(&guard, "k", 7).await;
    let before = guard.health().outages;
    server.kill_clients();
    eventually("the end is noticed", SOON, async || guard.health().outages > before).await;
    eventually("it is connected", SOON, async || guard.health().commands == LinkState::Up).await;
    assert_eq!(answer(&guard, "k", 8).await, 7);
}

/// If the ACQUIRE of a load meets the broken connection, the load still gets the lease.
#[tokio::test]
async fn a_miss_after_a_cut_is_loaded_under_the_lease() {
    let server = RedisServer::start();
    for round in 0..5 {
        let guard = local(&server, lease_of(LEASE)).await;
        server.kill_clients();
        answer(&guard, &format!("k{round}"), 7).await;
        assert_eq!(guard.stats().fail_open_loads, 0, "{:?}", guard.stats());
    }
}

fn large_values() -> Policy {
    patient(LEASE).max_body(8 * 1024 * 1024).build().expect("valid")
}

const TOO_LARGE: usize = 3 * 1024 * 1024;

/// Regression: at each call, a value over `proto-max-bulk-len` broke the connection that all other commands use.
#[tokio::test]
async fn a_value_over_the_servers_limit_breaks_one_connection_at_most() {
    for may_ask in [false, true] {
        let server = RedisServer::with_args(["--proto-max-bulk-len", "1mb"]);
        let url = if may_ask { server.url() } else { server.minimal_user() };
        let guard = unconnected(&url, large_values());
        connects(&guard).await;
        answer(&guard, "hot", 7).await;
        let before = guard.health().outages;
        for _ in 0..5 {
            let load = || async { Ok::<_, String>("x".repeat(TOO_LARGE)) };
            let large = guard.get_or_load("large", load);
            let (large, hot) = futures_util::future::join(large, answer(&guard, "hot", 8)).await;
            assert_eq!((large.expect("a value").len(), hot), (TOO_LARGE, 7));
            settled(std::slice::from_ref(&guard)).await;
        }
        let broken = guard.health().outages - before;
        assert!(broken <= 1, "{broken} connections were broken, may ask: {may_ask}");
        assert_eq!(guard.stats().fail_open_loads, 0, "{:?}", guard.stats());
    }
}

#[tokio::test]
async fn an_insertion_over_the_servers_limit_names_the_limit() {
    let server = RedisServer::with_args(["--proto-max-bulk-len", "1mb"]);
    let guard = local(&server, large_values()).await;
    let before = guard.health().outages;
    for _ in 0..3 {
        let refused = guard.insert("large", &"x".repeat(TOO_LARGE)).await.expect_err("it is too large");
        assert!(chain(&refused).contains("proto-max-bulk-len"), "{}", chain(&refused));
    }
    assert!(guard.health().outages - before <= 1, "it is sent again");
}

/// Regression: the report advised to use TLS.
#[tokio::test]
async fn a_server_without_room_for_connections_is_reported_as_such() {
    let server = RedisServer::start();
    let user = server.minimal_user();
    let mut admin = server.conn();
    ailments::run(&mut admin, &["CONFIG", "SET", "maxclients", "1"]);
    loads_go_on_without(&unconnected(&user, Policy::default()), "maxclients").await;
    loads_go_on_without(&unconnected(&server.url(), Policy::default()), "maxclients").await;
}
