//! Connections that end while they are idle, under a read, or under a value that the server does not take; and a server that
//! takes no more connections.

use super::*;

/// The advice was to use TLS.
#[tokio::test]
async fn a_server_without_room_for_connections_is_reported_as_such() {
    let server = RedisServer::start();
    let user = server.minimal_user();
    let mut admin = server.conn();
    ailments::run(&mut admin, &["CONFIG", "SET", "maxclients", "1"]);
    is_gone_without(&unconnected(&user, Policy::default()), "maxclients").await;
    is_gone_without(&unconnected(&server.url(), Policy::default()), "maxclients").await;
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_server_with_tls_and_without_room_for_connections_is_reported_as_such() {
    use crate::certificates::{Authority, HERE, TlsServer};
    let authority = Authority::new();
    let server = TlsServer::start(&authority, &authority.sign(&HERE), &[]);
    let client = authority.client(&server.url());
    let mut admin = server.plain.conn();
    ailments::run(&mut admin, &["CONFIG", "SET", "maxclients", "1"]);
    let guard = StampedeGuard::builder(client).policy(Policy::default()).build().expect("valid");
    is_gone_without(&guard, "maxclients").await;
}
