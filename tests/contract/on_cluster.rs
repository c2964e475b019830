//! The contract on a real cluster. All cases share one cluster, because starting it takes longer than most of them; each
//! case uses key names of its own, which are spread over all masters.
//!
//! Left out, in addition to [`LEFT_OUT`]: `equal_answers`, because memory gives no claims; `wake_ups`, because its race is the same on
//! three servers; `foreign` and `keyspace`, because they set rights, flags and databases on one server; and the loss of all messages of a
//! server, because an inbox may be at any node (`redis::cluster::failures`).

use std::panic::AssertUnwindSafe;

use ::redis::cluster::ClusterClient;
use futures_util::future::{FutureExt as _, LocalBoxFuture};
use futures_util::stream::{self, StreamExt as _};

use super::support::cluster::Cluster;
use super::*;
use crate::store::redis::{Connections, RedisStore};

/// A case and its name.
pub(super) type Case = (&'static str, fn(&World) -> LocalBoxFuture<'_, ()>);

/// How many cases run at once. There may be several, because most of them wait for the clock.
const AT_ONCE: usize = 6;

/// The cases that do not hold on a cluster, and why.
const LEFT_OUT: [(&str, &str); 7] = [
    ("waiters::a_hand_over_skips_dead_nodes", DEAD),
    ("queues::dead_nodes_are_passed_over", DEAD),
    ("queues::after_an_expiry_dead_waiters_are_passed_over_for_the_caller", DEAD),
    (
        "queues::waiters_are_notified_of_a_holder_for_a_shorter_time",
        "one process is notified of each hand-over, whatever the times are",
    ),
    ("bumps::giving_way_passes_over_the_dead", DEAD),
    (
        "bumps::giving_way_to_a_holder_without_an_expiry_says_so",
        "a claim has an end, until its holder asks again",
    ),
    ("semaphores::dead_waiters_for_permits_are_passed_over", DEAD),
];

const DEAD: &str = "PUBLISH does not report dead nodes; it costs a claim, see redis::cluster::failures";

/// A node that is not connected yet.
pub(super) fn node(cluster: &Cluster) -> Store {
    let ports = cluster.nodes().iter().map(|node| node.port());
    let client = ClusterClient::new(ports.map(|port| format!("redis://spread:pw@127.0.0.1:{port}/")));
    let connections = Connections::spread(client.expect("nodes"), ms(1_000).into(), Default::default());
    Store::Redis(Arc::new(RedisStore::on(Arc::new(connections))))
}

#[tokio::test]
async fn the_contract_holds_on_a_cluster() {
    let world = World::Cluster(Cluster::patient());
    let all = [
        attempts::cases(),
        leases::cases(),
        waiters::cases(),
        lists::cases(),
        tags::cases(),
        volumes::cases(),
        locks::cases(),
    ]
    .concat();
    let is_left_out = |name: &str| LEFT_OUT.iter().any(|(left_out, _)| name.ends_with(left_out));
    let (left_out, cases): (Vec<Case>, Vec<Case>) = all.into_iter().partition(|(name, _)| is_left_out(name));
    assert_eq!(left_out.len(), LEFT_OUT.len(), "each is a case");
    let mut failed = failures(&world, "case", cases, AT_ONCE).await;
    // Cases that affect a whole server run one at a time.
    failed.extend(
        failures(
            &world,
            "server-case",
            [on_redis::cases(), long_queues::cases(), locks::server_cases(), volumes::server_cases()]
                .concat(),
            1,
        )
        .await,
    );
    assert!(failed.is_empty(), "on a cluster these do not hold: {failed:#?}");
    world.check();
}

/// Runs the cases, each in a separate namespace, and returns those that failed.
async fn failures(world: &World, kind: &str, cases: Vec<Case>, at_once: usize) -> Vec<&'static str> {
    let runs = cases.into_iter().enumerate().map(|(number, (name, case))| {
        let run = AssertUnwindSafe(NAMESPACE.scope(format!("{kind}-{number}"), case(world))).catch_unwind();
        async move { run.await.err().map(|_| name) }
    });
    stream::iter(runs).buffer_unordered(at_once).filter_map(async |failed| failed).collect().await
}
