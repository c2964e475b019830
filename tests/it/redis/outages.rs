//! Promises 3 and 6 in the middle of a wait: while a leader loads and other processes wait for it, the server is killed, restarted,
//! stopped, emptied, or cuts connections. Every caller receives a correct value, there are no more loads than docs/faults.md allows, and
//! afterwards all processes work as before.

use super::*;
use crate::support::origin::Answer;

/// The lease is so long that the leader keeps it even if the machine stalls for a moment.
const LEASE: Duration = Duration::from_secs(3);
/// Longer than a test waits, so that a test fails if a waiter sleeps until this lease ends.
const LONG_LEASE: Duration = Duration::from_secs(120);

/// Lets node 0 hold a load of `k`, for which nodes 1 and 2 wait with five callers each.
async fn in_the_middle(lease: Duration) -> Nodes {
    let nodes = Nodes::start(3, lease).await;
    nodes.origin.script("k", [Answer::value("v").held()]);
    nodes.one_leads("k", "load k 5", 5).await;
    nodes
}

/// Ends the load, and checks that all callers are answered, nothing is left, and the nodes work.
async fn and_then(nodes: &Nodes) {
    nodes.origin.release("k");
    nodes.all_get(0..3, "k", "v").await;
    nodes.nothing_left(0..3).await;
    nodes.work(0..3).await;
}

/// Checks that loads <= 1 + lost leases + refused commits + fail-open loads, and that no process loads more than once in one wave.
async fn loads_are_bounded(nodes: &Nodes) {
    let mut allowed = 1;
    for index in 0..3 {
        let stats = nodes.stats(index).await;
        allowed += stats.leases_lost + stats.commits_refused + stats.fail_open_loads;
    }
    let loads = nodes.origin.loads("k");
    assert!(loads as u64 <= allowed && loads <= 3, "{loads} loads, {allowed} are explained");
}

/// Waits until every node has both its connections again.
async fn connected_again(nodes: &Nodes) {
    eventually_eq("connections are made again", SOON, (6, 3), async || {
        (nodes.server.client_count(), nodes.server.pubsub_clients())
    })
    .await;
}

#[tokio::test]
async fn scripts_that_are_flushed_cost_nothing() {
    let nodes = in_the_middle(LEASE).await;
    nodes.server.script_flush();
    and_then(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 1);
}

#[tokio::test]
async fn cut_subscriptions_cost_no_load() {
    let nodes = in_the_middle(LONG_LEASE).await;
    assert_eq!(nodes.server.kill_pubsub(), 3);
    nodes.origin.release("k");
    // The lease is long, so a waiter that has lost its wake-up for good would not answer in time.
    nodes.all_get(0..3, "k", "v").await;
    and_then_as_before(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 1);
}

#[tokio::test]
async fn subscriptions_cut_again_and_again_cost_no_load() {
    let nodes = in_the_middle(LONG_LEASE).await;
    for _ in 0..5 {
        nodes.server.kill_pubsub();
        eventually_eq("the subscriptions are back", SOON, 3, async || nodes.server.pubsub_clients()).await;
    }
    and_then(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 1);
}

#[tokio::test]
async fn cut_connections_cost_no_load() {
    let nodes = in_the_middle(LEASE).await;
    assert_eq!(nodes.server.kill_clients(), 6);
    connected_again(&nodes).await;
    and_then(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 1);
}

/// FLUSHALL removes the lease without notifying any process, so the waiters notice it by their timers.
#[tokio::test]
async fn an_emptied_server_costs_one_lease_and_one_load() {
    let nodes = in_the_middle(LEASE).await;
    nodes.server.flush_all();
    nodes.origin.wait_for_loads("k", 2).await;
    and_then(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 2);
    loads_are_bounded(&nodes).await;
}

#[tokio::test]
async fn a_restarted_server_costs_at_most_one_load_per_process() {
    let nodes = in_the_middle(LEASE).await;
    nodes.server.restart();
    connected_again(&nodes).await;
    and_then(&nodes).await;
    loads_are_bounded(&nodes).await;
}

/// Without a server each process loads once for itself.
#[tokio::test]
async fn a_killed_server_costs_one_load_per_process() {
    let nodes = in_the_middle(LEASE).await;
    nodes.server.kill();
    nodes.origin.wait_for_loads("k", 3).await;
    nodes.origin.release("k");
    nodes.all_get(0..3, "k", "v").await;
    nodes.server.start_again();
    and_then_as_before(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 3);
    loads_are_bounded(&nodes).await;
}

#[tokio::test]
async fn a_stopped_server_costs_one_load_per_process() {
    let nodes = in_the_middle(LEASE).await;
    nodes.server.pause();
    nodes.origin.wait_for_loads("k", 3).await;
    nodes.origin.release("k");
    nodes.all_get(0..3, "k", "v").await;
    // The commands that timed out run now. Whatever they would write is refused or expires.
    nodes.server.resume();
    and_then_as_before(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 3);
    loads_are_bounded(&nodes).await;
}

/// During a short stop, the load continues, and the waiters go on waiting.
#[tokio::test]
async fn a_server_that_hangs_for_a_moment_costs_no_load() {
    let nodes = in_the_middle(LONG_LEASE).await;
    nodes.server.pause();
    tokio::time::sleep(ms(150)).await;
    nodes.server.resume();
    and_then(&nodes).await;
    assert_eq!(nodes.origin.loads("k"), 1);
}

/// The leader's process dies together with the server while the fleet waits for it.
#[tokio::test]
async fn leader_and_server_that_die_together_cost_one_load_per_process() {
    let nodes = in_the_middle(LEASE).await;
    nodes.server.kill();
    nodes.node(0).kill();
    nodes.origin.release("k");
    nodes.all_get(1..3, "k", "v").await;
    assert!(nodes.origin.loads("k") <= 3);
    nodes.server.start_again();
    nodes.nothing_left(1..3).await;
    nodes.work(1..3).await;
}

async fn and_then_as_before(nodes: &Nodes) {
    nodes.nothing_left(0..3).await;
    nodes.work(0..3).await;
}
