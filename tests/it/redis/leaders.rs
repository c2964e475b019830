//! Promises 4 and 5: a leader that dies, panics, leaves or is stopped costs at most one lease, and never a herd of loads. Its late commit
//! is refused.

use super::*;
use crate::support::origin::{Answer, End};

/// The lease is so long that the leader keeps it even if the machine stalls for a moment.
const LEASE: Duration = Duration::from_secs(3);
/// Longer than a test waits, so that a test fails if a waiter sleeps until this lease ends.
const LONG_LEASE: Duration = Duration::from_secs(120);

/// Nodes on an origin that holds the first load of `k`, and answers the second one at once.
async fn nodes(n: usize, lease: Duration) -> Nodes {
    let nodes = Nodes::start(n, lease).await;
    nodes.origin.script("k", [Answer::value("first").held(), Answer::value("second")]);
    nodes
}

#[tokio::test]
async fn a_load_without_callers_still_answers_the_fleet() {
    let nodes = nodes(3, LONG_LEASE).await;
    nodes.one_leads("k", "load k 3", 5).await;
    nodes.node(0).send("cancel");
    nodes.stats(0).await;
    nodes.origin.release("k");
    nodes.all_get([1, 2], "k", "first").await;
    assert_eq!(nodes.origin.loads("k"), 1);
    assert_eq!(nodes.origin.history("k")[0].ended.expect("it ended").1, End::Served);
    nodes.nothing_left(0..3).await;
}

/// The waiters must be answered within the dead leader's lease, plus the time of their own load and slack for a busy machine.
async fn a_dead_leader_costs_one_lease(kill: impl AsyncFnOnce(&Member)) {
    let nodes = nodes(3, LEASE).await;
    nodes.one_leads("k", "load k 3", 5).await;
    let died = Instant::now();
    kill(nodes.node(0)).await;
    nodes.all_get([1, 2], "k", "second").await;
    assert!(died.elapsed() < LEASE + Duration::from_secs(4), "{:?}", died.elapsed());
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left(1..3).await;
    nodes.work(1..3).await;
}

/// S2.8
#[tokio::test]
async fn a_killed_leader_costs_one_lease_and_one_load() {
    a_dead_leader_costs_one_lease(async |leader| leader.kill()).await;
}

#[tokio::test]
async fn an_aborted_leader_process_costs_one_lease_and_one_load() {
    a_dead_leader_costs_one_lease(async |leader| {
        leader.send("die");
        assert!(!leader.wait_exit().await.success());
    })
    .await;
}

/// The server's clock is set back by a minute while the leader dies, so the lease would end a minute too late. The waiters sleep for
/// one lease, as usual; then one of them cuts the lease down to its proper length, which is the second lease of waiting.
#[tokio::test]
async fn a_leader_that_dies_while_the_servers_clock_is_set_back_costs_two_leases() {
    let nodes = nodes(3, LEASE).await;
    nodes.one_leads("k", "load k 3", 5).await;
    let died = Instant::now();
    nodes.node(0).kill();
    let left = Duration::from_millis(60_700).as_millis().to_string();
    nodes.server.run::<()>(&["PEXPIRE", "sg1:l:{default:k}", &left]);
    nodes.all_get([1, 2], "k", "second").await;
    assert!(died.elapsed() < LEASE * 2 + Duration::from_secs(4), "{:?}", died.elapsed());
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left(1..3).await;
    nodes.work(1..3).await;
}

#[tokio::test]
async fn a_panicking_leader_hands_over_at_once() {
    let nodes = nodes(3, LONG_LEASE).await;
    nodes.one_leads("k", "panic k", 5).await;
    nodes.origin.release("k");
    nodes.all_get([1, 2], "k", "second").await;
    let own = nodes.replies(0, "k").await;
    assert!(own[0].result.as_ref().is_err_and(|text| text.contains("panics on command")), "{own:?}");
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left(0..3).await;
}

#[tokio::test]
async fn a_leader_that_shuts_down_hands_over_at_once() {
    let nodes = nodes(3, LONG_LEASE).await;
    nodes.one_leads("k", "load k 1", 5).await;
    nodes.node(0).send("shutdown");
    assert_eq!(nodes.node(0).wait_event("shutdown").await, 1);
    nodes.all_get([1, 2], "k", "second").await;
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left(1..3).await;
}

#[tokio::test]
async fn a_hand_over_skips_a_killed_waiter() {
    let nodes = nodes(3, LONG_LEASE).await;
    nodes.one_leads("k", "panic k", 5).await;
    nodes.node(1).kill();
    eventually_eq("the server notices", SOON, 2, async || nodes.server.pubsub_clients()).await;
    nodes.origin.release("k");
    nodes.all_get([2], "k", "second").await;
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left([0, 2]).await;
}

/// The grant is sent to the connection of a stopped process. That costs one lease, like a dead leader.
#[tokio::test]
async fn a_hand_over_to_a_stopped_waiter_costs_one_lease() {
    let nodes = nodes(3, LEASE).await;
    nodes.one_leads("k", "panic k", 5).await;
    nodes.node(1).pause();
    nodes.origin.release("k");
    nodes.all_get([2], "k", "second").await;
    nodes.node(1).resume();
    nodes.all_get([1], "k", "second").await;
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.nothing_left(0..3).await;
}

/// Stops a leader for longer than its lease, while another node loads a newer value.
async fn stopped_past_its_lease() -> Nodes {
    let nodes = nodes(3, LEASE).await;
    nodes.one_leads("k", "load k 3", 5).await;
    nodes.node(0).pause();
    nodes.all_get([1, 2], "k", "second").await;
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes
}

/// S2.9: a former leader neither frees nor overwrites another process's lease or entry.
#[tokio::test]
async fn a_late_commit_of_a_stopped_leader_is_refused() {
    let nodes = stopped_past_its_lease().await;
    nodes.origin.release("k");
    nodes.origin.wait_for_ends("k", 2).await;
    nodes.node(0).resume();
    // The leading caller receives the load's own value, its waiters that value or the newer one, and later callers the newer one.
    nodes.overtaken(0, "k", "first", "second").await;
    nodes.nothing_left(0..3).await;
    let stats = nodes.stats(0).await;
    assert!(stats.commits_refused + stats.leases_lost >= 1, "{stats:?}");
    for index in 0..3 {
        nodes.node(index).send("load k 2");
    }
    nodes.all_get(0..3, "k", "second").await;
    assert_eq!(nodes.origin.loads("k"), 2);
}

#[tokio::test]
async fn callers_after_a_stopped_leader_do_not_join_its_old_load() {
    let nodes = stopped_past_its_lease().await;
    nodes.node(0).resume();
    eventually("the old leader notices", SOON, async || nodes.stats(0).await.leases_lost == 1).await;
    nodes.node(0).send("get k");
    assert_eq!(nodes.node(0).wait_event("get").await, "second");
    assert_eq!(nodes.origin.running("k"), 1, "the old load still runs");
    nodes.origin.release("k");
    nodes.overtaken(0, "k", "first", "second").await;
    nodes.node(0).send("get k");
    assert_eq!(nodes.node(0).wait_event("get").await, "second", "what came too late was not stored");
    nodes.nothing_left(0..3).await;
}

/// Each grant contains the number of loads that have vanished so far, so all processes together give up after four loads.
#[tokio::test]
async fn a_wave_of_panicking_leaders_fails_after_three_hand_overs() {
    let nodes = Nodes::start(6, LONG_LEASE).await;
    nodes.origin.script("k", [Answer::value("v").held()]);
    nodes.node(0).send("panic k");
    nodes.origin.wait_for_loads("k", 1).await;
    for waiting in 1..6 {
        nodes.node(waiting).send("panic k");
        queued(&nodes.server, "k", waiting).await;
    }
    nodes.origin.release("k");
    for index in 0..6 {
        let reply = nodes.replies(index, "k").await;
        assert!(reply[0].result.as_ref().is_err_and(|text| text.contains("panics on command")), "{reply:?}");
    }
    assert_eq!(nodes.origin.loads("k"), 4, "the first and three more");
    let mut takeovers = 0;
    for index in 0..6 {
        takeovers += nodes.stats(index).await.takeovers;
    }
    assert_eq!(takeovers, 3);
}
