//! The start of a cluster client: while it has no slot map, and while it knows only one node's view of the slots.

use super::node::hanging;
use super::*;
use crate::store::StoreErrorKind;
use crate::store::contract::support::warnings::Warnings;

/// At first the only node refuses to report slots, and that reason is logged once. Later the node reports them.
#[tokio::test]
async fn without_a_slot_map_callers_wait_on_and_commands_fail() {
    let warnings = Warnings::default();
    let _listens = warnings.listen();
    let node = Node::start(0).await;
    lock(&node.said).refuses = true;
    let cluster = cluster(&[&node]);
    assert_eq!(cluster.link(), (LinkState::Idle, Breaker::Closed, None));
    let key = key_in(0);
    let started = Instant::now();
    let error = get(&cluster, &key, 2 * SOON).await.expect_err("there is no slot map");
    assert_eq!(error.kind, StoreErrorKind::Unavailable, "it was not the command that is refused");
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    assert!(commands(&cluster).is_down(&key) && commands(&cluster).down().is_some());
    let (link, breaker, why) = cluster.link();
    assert_eq!((link, breaker), (LinkState::Down, Breaker::Open));
    assert!(why.as_ref().is_some_and(|why| why.contains("no permissions")), "{why:?}");
    let waits = [true, false].map(|all| {
        let (cluster, key) = (Arc::clone(&cluster), key.clone());
        tokio::spawn(async move { if all { cluster.until_up().await } else { cluster.reach(&key).await } })
    });
    let before = node.slot_queries();
    eventually("it is queried again", || node.slot_queries() > before + 2).await;
    assert_eq!(warnings.about("which slot").len(), 1);
    let before = node.slot_queries();
    sleep(Duration::from_millis(200)).await;
    assert!(node.slot_queries() - before < 50, "{} times at once", node.slot_queries() - before);
    // The node now has another reason not to report slots, and the link reports that one.
    lock(&node.said).refuses = false;
    let reason = || cluster.link().2.unwrap_or_default();
    eventually("it is another", || reason().contains("knows of no slots")).await;
    assert!(waits.iter().all(|wait| !wait.is_finished()));
    node.says(&[(16_383, Some(&node))]);
    for wait in waits {
        timeout(SOON, wait).await.expect("in time").expect("no panic").expect("it is up");
    }
    // A cluster of one node has no other views, so the task does not query for them again and again.
    let before = node.slot_queries();
    sleep(Duration::from_millis(300)).await;
    assert!(node.slot_queries() <= before + 2, "{} times", node.slot_queries() - before);
}

/// The view of the node that answers first is used at once, until the other nodes have answered.
#[tokio::test]
async fn the_first_slot_map_is_compared_with_those_of_other_nodes() {
    let nodes = [Node::start(0).await, Node::start(0).await];
    nodes[0].says(&[(8_191, Some(&nodes[0])), (16_383, Some(&nodes[1]))]);
    nodes[1].says(&[(99, Some(&nodes[0])), (16_383, Some(&nodes[1]))]);
    let cluster = cluster(&[&nodes[0]]);
    assert!(get(&cluster, &key_in(1), SOON).await.is_ok());
    eventually("the newer view is used", || master(&cluster, 100) == Some(nodes[1].address.clone())).await;
    let mut all_known_nodes = cluster.cluster_nodes.all_known_nodes();
    all_known_nodes.sort();
    all_known_nodes.dedup();
    assert_eq!(all_known_nodes.len(), 2, "it is known where to ask");
}

/// The client knows three nodes: one is down, one does not answer, and one answers.
#[tokio::test]
async fn the_first_node_that_answers_is_enough() {
    let (down_node, hangs, node) = (dead(), hanging(), Node::start(0).await);
    node.says(&[(16_383, Some(&node))]);
    let cluster =
        |nodes: &[String]| Cluster::new(ClusterClient::new(nodes.to_vec()).expect("nodes"), 2 * SOON);
    let url = |address: &Address| format!("redis://{address}/");
    let all = cluster(&[url(&down_node.address), url(&hangs.1), url(&node.address)]);
    assert!(get(&all, "k", SOON).await.is_ok());
    // If no node answers, the client waits until its time limit, and no longer.
    let alone = cluster(&[url(&hangs.1)]);
    let late = timeout(SOON, get(&alone, "k", Duration::from_millis(200))).await;
    let error = late.expect("in time").expect_err("it says nothing");
    assert_eq!(error.kind, StoreErrorKind::Unavailable);
}

/// A first connection in progress is reported neither as down nor as up.
#[tokio::test]
async fn a_slow_first_connection_counts_as_connecting() {
    let (node, (_listener, slow)) = (Node::start(0).await, hanging());
    lock(&node.said).slots = vec![(16_383, Some(slow.clone()))];
    let client = ClusterClient::new([format!("redis://{}/", node.address)]).expect("a node");
    let cluster = Cluster::new(client, 2 * SOON);
    let late = get(&cluster, "k", Duration::from_millis(200)).await;
    assert_eq!(late.expect_err("it says nothing").kind, StoreErrorKind::Unavailable, "it was not sent");
    assert_eq!(cluster.link(), (LinkState::Connecting, Breaker::Closed, None));
    lock(&node.said).slots = vec![(8_191, Some(node.address.clone())), (16_383, Some(slow))];
    let cluster =
        Cluster::new(ClusterClient::new([format!("redis://{}/", node.address)]).expect("a node"), 2 * SOON);
    get(&cluster, &key_in(0), SOON).await.expect("it answers");
    get(&cluster, &key_in(1), Duration::from_millis(200)).await.expect_err("it says nothing");
    assert_eq!(cluster.link(), (LinkState::Up, Breaker::Closed, None));
}

/// Without a runtime there is no task that could end the wait, so it must fail.
#[test]
fn without_a_runtime_waiting_for_the_slot_map_fails() {
    let client = ClusterClient::new(["redis://127.0.0.1:1/"]).expect("a node");
    let known_layout = futures_util::FutureExt::now_or_never(Cluster::new(client, ANSWER).known_layout());
    assert!(known_layout.is_some_and(|known_layout| known_layout.is_err()));
}

/// When its runtime shuts down, the refresh task ends, and the result that no node reports slots is reset: the next caller starts it anew.
#[tokio::test]
async fn another_runtime_starts_over() {
    let (node, blank) = (Node::start(0).await, Node::start(0).await);
    node.says(&[(16_383, Some(&node))]);
    let (known_layout, unknown) = (cluster(&[&node]), cluster(&[&blank]));
    let elsewhere = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let elsewhere = elsewhere.expect("a runtime");
    let clusters = [Arc::clone(&known_layout), Arc::clone(&unknown)];
    let used = elsewhere.spawn(async move {
        clusters[0].until_up().await.expect("it answers");
        get(&clusters[1], "k", SOON).await.expect_err("there is no slot map");
    });
    used.await.expect("no panic");
    elsewhere.shutdown_background();
    for cluster in [&known_layout, &unknown] {
        let is_over = || !cluster.task.is_running();
        eventually("there is no refresh task", is_over).await;
    }
    assert!(matches!(unknown.state().slot_map, SlotMap::Blank), "no task refreshes the map any more");
    let before = node.slot_queries();
    assert!(get(&known_layout, "k", SOON).await.is_ok());
    eventually("it is queried", || node.slot_queries() > before).await;
    blank.says(&[(16_383, Some(&node))]);
    assert!(get(&unknown, "k", SOON).await.is_ok(), "it waits for a map as the first does");
}

/// A caller on another runtime waits for a refresh task whose runtime ends. The caller is notified of that, and starts another task.
#[tokio::test]
async fn a_wait_outlives_the_refresh_task() {
    let node = Node::start(0).await;
    let cluster = cluster(&[&node]);
    let elsewhere = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let elsewhere = elsewhere.expect("a runtime");
    let used = elsewhere.spawn({
        let cluster = Arc::clone(&cluster);
        async move { get(&cluster, "k", SOON).await.map(drop) }
    });
    used.await.expect("no panic").expect_err("there is no slot map");
    let waits = tokio::spawn({
        let cluster = Arc::clone(&cluster);
        async move { cluster.until_up().await }
    });
    tokio::task::yield_now().await;
    tokio::task::spawn_blocking(move || drop(elsewhere)).await.expect("no panic");
    node.says(&[(16_383, Some(&node))]);
    timeout(SOON, waits).await.expect("in time").expect("no panic").expect("it is up");
}
