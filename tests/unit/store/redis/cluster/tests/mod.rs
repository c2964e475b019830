//! A cluster of scripted nodes: which requests each node receives, how many, and what follows from its answers.

mod node;
mod start;

use redis::Value;
use tokio::time::{sleep, timeout};

use node::{NIL, Node, dead, sent_on};

use super::*;
use crate::store::StoreErrorKind;
use crate::store::redis::commands::{Commands, Route};
use crate::store::redis::connection::send::SendMode;

const ANSWER: Duration = Duration::from_millis(500);
/// Longer than a busy machine pauses.
const SOON: Duration = Duration::from_secs(10);

fn cluster(nodes: &[&Node]) -> Arc<Cluster> {
    let urls = nodes.iter().map(|node| format!("redis://{}/", node.address));
    Cluster::new(ClusterClient::new(urls).expect("nodes"), ANSWER)
}

/// A guard's sender of commands to this cluster.
fn commands(cluster: &Arc<Cluster>) -> Commands {
    Route::Cluster(Arc::clone(cluster)).into()
}

/// A cluster of two masters. Both report that each of them has half of the slots.
async fn halves() -> ([Node; 2], Arc<Cluster>) {
    let nodes = [Node::start(1_000).await, Node::start(2_000).await];
    for node in &nodes {
        node.says(&[(8_191, Some(&nodes[0])), (16_383, Some(&nodes[1]))]);
    }
    let cluster = cluster(&[&nodes[0], &nodes[1]]);
    cluster.until_up().await.expect("they answer");
    // The slot map changes twice: once when one node has answered, and once when both have.
    eventually("both views are used", || *cluster.changes().borrow() >= 2).await;
    (nodes, cluster)
}

async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let waited = timeout(SOON, async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "not in time: {what}");
}

/// Sends a GET, to the master of this key.
async fn get(cluster: &Arc<Cluster>, key: &str, within: Duration) -> Result<Value, StoreError> {
    let get = redis::cmd("GET").arg("k").to_owned();
    cluster.send(key, &get, within, SendMode::Once).await.map(|(reply, _)| reply)
}

/// A key in the first half of the slots, or in the second.
fn key_in(half: u16) -> String {
    (0..).map(|n: u32| n.to_string()).find(|key| slot_of(key) / 8_192 == half).expect("one in two")
}

fn master(cluster: &Cluster, slot: u16) -> Option<Address> {
    let layout = cluster.state().slot_map.layout().ok()??;
    layout.master(slot).map(|master| master.address.clone())
}

#[tokio::test]
async fn a_moved_reply_updates_the_slot_map_at_once() {
    let ([first, second], cluster) = halves().await;
    let third = Node::start(0).await;
    // The nodes report no slots any more, so the slot map stays as it is.
    first.says(&[]);
    second.says(&[]);
    let key = key_in(0);
    first.will_answer([sent_on("MOVED", &key, &second), NIL.to_owned()]);
    let before = first.slot_queries();
    assert_eq!(get(&cluster, &key, SOON).await.ok(), Some(Value::Nil));
    assert_eq!(master(&cluster, slot_of(&key)), Some(second.address.clone()));
    assert_eq!(cluster.coverage().expect("a map").masters.len(), 2, "it is known");
    eventually("the nodes are queried", || first.slot_queries() > before).await;
    cluster.moved(8_192, third.address.clone()).expect("an address");
    assert_eq!(cluster.coverage().expect("a map").masters.len(), 3, "it is new");
    assert_eq!(master(&cluster, 8_192), Some(third.address.clone()));
    assert_eq!(master(&cluster, 8_193), Some(second.address.clone()));
    // What all nodes report replaces the correction of a single slot.
    for node in [&first, &second, &third] {
        node.says(&[(8_191, Some(&first)), (16_383, Some(&second))]);
    }
    cluster.suspect();
    eventually("it is as they say", || master(&cluster, 8_192) == Some(second.address.clone())).await;
    assert_eq!(cluster.coverage().expect("a map").masters.len(), 2);
}

/// After five redirections without a pause, the next one waits, and then follows the slot map.
#[tokio::test]
async fn a_command_sent_back_and_forth_pauses_between_nodes() {
    let ([first, second], cluster) = halves().await;
    let key = key_in(0);
    // The command must also accept a timeout that is too long for any `Instant`.
    assert!(get(&cluster, &key, Duration::MAX).await.is_ok());
    let [to, fro] = [&second, &first].map(|node| sent_on("MOVED", &key, node));
    first.will_answer([to]);
    second.will_answer([fro.clone(), fro.clone(), fro.clone(), fro, NIL.to_owned()]);
    assert_eq!(get(&cluster, &key, SOON).await.ok(), Some(Value::Nil));
    assert_eq!((first.commands().len(), second.commands().len()), (1 + 4, 5));

    let ([first, second], cluster) = halves().await;
    let [to, fro] = [&second, &first].map(|node| sent_on("ASK", &key, node));
    first.will_answer([to.clone(), to.clone(), to, NIL.to_owned()]);
    second.will_answer([fro]);
    assert_eq!(get(&cluster, &key, SOON).await.ok(), Some(Value::Nil));
    assert_eq!(first.commands(), ["GET", "ASKING", "GET", "ASKING", "GET", "GET"]);
    assert_eq!(second.commands(), ["ASKING", "GET"].repeat(3));
    // MOVED sends the command back to `first`, which has the slot by the slot map. Only a redirection by ASK needs ASKING.
    second.will_answer([sent_on("MOVED", &key, &first)]);
    first.will_answer([sent_on("ASK", &key, &second), NIL.to_owned()]);
    assert_eq!(get(&cluster, &key, SOON).await.ok(), Some(Value::Nil));
    assert_eq!(first.commands()[6..], ["GET", "GET"]);
}

#[tokio::test]
async fn a_command_for_a_migrating_slot_is_retried_within_its_deadline() {
    let ([first, _second], cluster) = halves().await;
    first.will_answer(["-TRYAGAIN Multiple keys request during rehashing of slot\r\n".to_owned()]);
    // If the test process wakes up too late, no time is left for another attempt, so several runs are allowed.
    let (mut errors, mut attempts) = (Vec::new(), 0);
    while errors.len() < 5 && !errors.contains(&StoreErrorKind::Transient) {
        let before = first.commands().len();
        let error = get(&cluster, &key_in(0), Duration::from_millis(300)).await.expect_err("it never ends");
        errors.push(error.kind);
        attempts = first.commands().len() - before;
    }
    assert!(errors.contains(&StoreErrorKind::Transient), "{errors:?}");
    assert!((2..=10).contains(&attempts), "at first after 5 ms, then after 40: {attempts}");
}

/// Two of three masters are down, and some slots have no master at all.
#[tokio::test]
async fn a_cluster_with_some_masters_down_is_not_down() {
    let (node, down_nodes) = (Node::start(0).await, [dead(), dead()]);
    node.says(&[
        (4_000, Some(&down_nodes[0])),
        (8_000, Some(&down_nodes[1])),
        (8_191, None),
        (16_383, Some(&node)),
    ]);
    let cluster = cluster(&[&node]);
    timeout(SOON, cluster.until_up()).await.expect("in time").expect("one of them is up");
    let (down, up) = (key_in(0), key_in(1));
    get(&cluster, &down, SOON).await.expect_err("no server listens");
    assert!(commands(&cluster).is_down(&down) && !commands(&cluster).is_down(&up));
    assert!(commands(&cluster).down().is_none(), "not all of them");
    assert!(!cluster.state().slot_map.layout().expect("a map").expect("a map").is_well());
    let (link, breaker, why) = cluster.link();
    assert_eq!((link, breaker), (LinkState::Up, Breaker::Partly));
    assert!(why.as_ref().is_some_and(|why| why.starts_with(&down_nodes[0].address.to_string())), "{why:?}");
    // A caller that waits for a key of a master that is down keeps waiting.
    let reached = timeout(Duration::from_millis(100), cluster.reach(&down)).await;
    assert!(reached.is_err(), "{reached:?}");
    timeout(SOON, cluster.reach(&up)).await.expect("in time").expect("it is up");

    let unserved = (0..).map(|n: u32| n.to_string()).find(|key| (8_001..8_192).contains(&slot_of(key)));
    let unserved = unserved.expect("one in a hundred");
    assert!(!commands(&cluster).is_down(&unserved), "it may be served soon");
    let error = get(&cluster, &unserved, SOON).await.expect_err("no master has it");
    assert_eq!(error.kind, StoreErrorKind::Transient);
    assert!(error.source.is_some_and(|why| why.to_string().contains("redis-cli --cluster check")));
    assert_eq!(cluster.coverage().expect("a map").unserved, 191);
    cluster.moved(8_100, node.address.clone()).expect("an address");
    assert_eq!(master(&cluster, 8_100), Some(node.address.clone()), "until a node reports another");

    // The client looks for a master of those slots by itself, without a command for them.
    let before = node.slot_queries();
    eventually("it is queried again and again", || node.slot_queries() >= before + 4).await;
    node.says(&[(16_383, Some(&node))]);
    eventually("all is well", || cluster.link().1 == Breaker::Closed).await;
    assert_eq!(cluster.coverage().expect("a map").unserved, 0);
    assert!(cluster.state().slot_map.layout().expect("a map").expect("a map").is_well());
}

#[tokio::test]
async fn a_cluster_with_all_masters_down_is_down() {
    let (node, down_nodes) = (Node::start(0).await, [dead(), dead()]);
    node.says(&[(8_191, Some(&down_nodes[0])), (16_383, Some(&down_nodes[1]))]);
    let cluster = cluster(&[&node]);
    let up = timeout(Duration::from_millis(300), cluster.until_up()).await;
    assert!(up.is_err(), "{up:?}");
    eventually("it is known", || commands(&cluster).down().is_some()).await;
    assert!(!cluster.state().slot_map.layout().expect("a map").expect("a map").is_well());
    let (link, breaker, why) = cluster.link();
    assert_eq!((link, breaker), (LinkState::Down, Breaker::Open));
    assert!(why.as_ref().is_some_and(|why| why.starts_with(&down_nodes[0].address.to_string())), "{why:?}");
    // The client also asks the nodes of its list, because they may have a newer view than the masters that are down.
    node.says(&[(16_383, Some(&node))]);
    eventually("it is up", || commands(&cluster).down().is_none() && cluster.link().0 == LinkState::Up).await;
}

/// All processes must use the same clock, so they take that of one node.
#[tokio::test]
async fn the_clock_is_that_of_the_master_of_the_first_slot() {
    let (_nodes, cluster) = halves().await;
    let server_clock = cluster.clock_at(Instant::now()).expect("it was read");
    assert!((1_000_000..1_900_000).contains(&server_clock), "{server_clock}");
    let ahead = commands(&cluster).clock().expect("it was read").ahead_ms;
    let host = i64::try_from(crate::store::redis::endpoint::host_ms()).expect("a time");
    assert!((1_000_000..1_900_000).contains(&(host + ahead)), "{ahead}");
}

#[tokio::test]
async fn a_suspicion_examines_masters_and_slots() {
    let (nodes, cluster) = halves().await;
    let layout = cluster.state().slot_map.layout().expect("a map").expect("a map");
    let before = nodes.each_ref().map(|node| (node.slot_queries(), node.time_queries()));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(nodes[0].slot_queries(), before[0].0, "there is no reason to look");
    cluster.suspect();
    for (node, (slot_requests, time_requests)) in nodes.iter().zip(before) {
        eventually("both", || node.slot_queries() > slot_requests && node.time_queries() > time_requests)
            .await;
    }
    sleep(Duration::from_millis(50)).await;
    let again = cluster.state().slot_map.layout().expect("a map").expect("a map");
    assert!(Arc::ptr_eq(&layout, &again), "it is the same");
    // The number of examinations is limited, even if there are reasons for one all the time.
    let before = nodes[0].slot_queries();
    for _ in 0..50 {
        cluster.looks.news.notify_one();
        sleep(Duration::from_millis(10)).await;
    }
    assert!(nodes[0].slot_queries() - before <= 10, "{}", nodes[0].slot_queries() - before);
}

#[tokio::test]
async fn a_closed_cluster_sends_no_commands() {
    let ([first, second], cluster) = halves().await;
    let server = cluster.server(&first.address).expect("an address");
    assert_eq!(format!("{cluster:?}"), "Cluster { masters: 2, .. }");
    let refresh_tasks = cluster.task.started();
    let waits = tokio::spawn({
        let cluster = Arc::clone(&cluster);
        async move {
            let mut changes = cluster.changes();
            changes.changed().await
        }
    });
    tokio::task::yield_now().await;
    cluster.close();
    timeout(SOON, waits)
        .await
        .expect("waiting callers are notified")
        .expect("no panic")
        .expect("it is there");
    eventually("there is no refresh task", || Arc::strong_count(&cluster.looks) == 1).await;
    assert_eq!(cluster.link(), (LinkState::Closed, Breaker::Open, None));
    assert_eq!(server.down().map(|why| why.kind), Some(StoreErrorKind::Closed));
    let closed = |done: Result<(), StoreError>| done.expect_err("closed").kind == StoreErrorKind::Closed;
    assert!(closed(get(&cluster, &key_in(0), SOON).await.map(drop)));
    assert!(closed(cluster.until_up().await) && closed(cluster.reach(&key_in(0)).await));
    // The cluster was closed while this command was in flight, and now the command is sent on to another node.
    let late = cluster.moved(0, second.address.clone()).expect("an address").server;
    assert!(closed(late.send("", redis::cmd("GET").arg("k"), SOON, SendMode::Once).await.map(drop)));
    assert_eq!(second.commands(), Vec::<String>::new());
    assert_eq!(cluster.task.started(), refresh_tasks, "there is no other");
}

#[tokio::test]
async fn a_dropped_cluster_ends_its_refresh_task() {
    let (_nodes, cluster) = halves().await;
    let looks = Arc::clone(&cluster.looks);
    drop(cluster);
    eventually("there is no refresh task", || Arc::strong_count(&looks) == 1).await;
}

/// Slots may be migrating to or from a node that has none, so its connection is closed only after a while without use.
#[tokio::test]
async fn the_connection_to_a_node_without_slots_is_retained_for_a_while() {
    let (nodes, cluster) = halves().await;
    let connected = || {
        let mut addresses: Vec<_> = cluster.state().servers.keys().cloned().collect();
        addresses.sort();
        addresses
    };
    let (mut both, rest) = (nodes.each_ref().map(|node| node.address.clone()), [nodes[1].address.clone()]);
    both.sort();
    let looks = async || {
        let before = nodes[1].slot_queries();
        cluster.suspect();
        eventually("it is queried", || nodes[1].slot_queries() > before).await;
        sleep(Duration::from_millis(50)).await;
    };
    let pass = async || {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(11)).await;
        tokio::time::resume();
    };
    for node in &nodes {
        node.says(&[(16_383, Some(&nodes[1]))]);
    }
    looks().await;
    eventually("it has none", || master(&cluster, 0) == Some(nodes[1].address.clone())).await;
    assert_eq!(connected(), both);
    pass().await;
    cluster.server(&nodes[0].address).expect("an address");
    looks().await;
    assert_eq!(connected(), both, "it was used");
    pass().await;
    looks().await;
    eventually("it is let go", || connected() == rest).await;
    assert!(get(&cluster, &key_in(0), SOON).await.is_ok());
}

#[tokio::test]
async fn a_failed_command_examines_the_slots() {
    let ([first, second], cluster) = halves().await;
    sleep(Duration::from_millis(400)).await;
    let before = second.slot_queries();
    first.will_answer([String::new()]);
    get(&cluster, &key_in(0), Duration::from_millis(50)).await.expect_err("it is not answered");
    eventually("the other is queried", || second.slot_queries() > before).await;
}
