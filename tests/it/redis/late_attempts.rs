//! A late attempt at a change that is already confirmed, on a server and on a cluster: it changes nothing.

use super::*;
use crate::late_attempts::all_hold;

#[tokio::test]
async fn a_late_attempt_at_a_confirmed_change_changes_nothing_on_a_server() {
    let server = RedisServer::start();
    all_hold(redis::Client::open(server.minimal_user()).expect("an address")).await;
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn a_late_attempt_at_a_confirmed_change_changes_nothing_on_a_cluster() {
    let cluster = crate::support::cluster::Cluster::patient();
    all_hold(super::cluster::client(&cluster.url())).await;
}
