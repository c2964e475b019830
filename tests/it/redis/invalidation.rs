//! Promise 5 between nodes: a load from before an invalidation is never stored. In the invalidating node no later caller receives it; in
//! another node no later caller does, once the message has arrived or, if the message was lost, after the next renewal.

use super::*;
use crate::support::gate::{Counter, Gate};
use crate::support::origin::Answer;
use crate::support::probe::assert_nothing_left;
use crate::support::rounds::{Rounds, Timing};

/// The lease is so long that it is not renewed during a test.
const LEASE: Duration = Duration::from_secs(120);

type Caller = tokio::task::JoinHandle<u32>;

/// A load of the value 1 that runs on the first of these nodes.
struct OldLoad {
    server: RedisServer,
    guards: Vec<StampedeGuard>,
    gate: Gate,
    loads: Counter,
    caller: Caller,
}

impl OldLoad {
    async fn start(nodes: usize, lease: Duration) -> Self {
        let server = RedisServer::start();
        let mut guards = Vec::new();
        for _ in 0..nodes {
            guards.push(local(&server, lease_of(lease)).await);
        }
        let (gate, loads) = (Gate::closed(), Counter::default());
        let caller = held_call(&guards[0], 1, &gate, &loads);
        loads.reach(1).await;
        Self { server, guards, gate, loads, caller }
    }

    /// Ends the old load: only its own caller receives its value, and the store contains `newer`.
    async fn ends_unseen(self, newer: Option<u32>) {
        self.gate.open();
        assert_eq!(self.caller.await.expect("joined"), 1, "its own load");
        settled(&self.guards).await;
        for guard in &self.guards {
            assert_eq!(guard.get::<u32>("k").await.expect("store"), newer);
        }
        assert_nothing_left(&self.server, SOON).await;
    }
}

#[tokio::test]
async fn in_the_invalidating_node_the_very_next_caller_gets_the_newer_value() {
    let old = OldLoad::start(1, LEASE).await;
    old.guards[0].invalidate("k").await.expect("confirmed");
    assert_eq!(answer(&old.guards[0], "k", 2).await, 2);
    old.ends_unseen(Some(2)).await;
}

/// The node may not subscribe, so it cannot have learnt of its own invalidation by a message.
#[tokio::test]
async fn in_the_invalidating_node_the_newer_value_needs_no_message() {
    for insert in [false, true] {
        let server = RedisServer::start();
        server.run::<()>(&["ACL", "SETUSER", "minimal", "-subscribe"]);
        let guards = vec![local(&server, lease_of(LEASE)).await];
        let (gate, loads) = (Gate::closed(), Counter::default());
        let caller = held_call(&guards[0], 1, &gate, &loads);
        loads.reach(1).await;
        let old = OldLoad { server, guards, gate, loads, caller };
        if insert {
            old.guards[0].insert("k", &2u32).await.expect("stored");
        } else {
            old.guards[0].invalidate("k").await.expect("confirmed");
        }
        let next = tokio::time::timeout(SOON, answer(&old.guards[0], "k", 2)).await;
        assert_eq!(next.expect("it does not wait for the old load"), 2);
        old.ends_unseen(Some(2)).await;
    }
}

#[tokio::test]
async fn an_older_load_is_not_stored_after_an_invalidation_even_without_a_newer_load() {
    for invalidating in 0..2 {
        let old = OldLoad::start(2, LEASE).await;
        old.guards[invalidating].invalidate("k").await.expect("confirmed");
        old.ends_unseen(None).await;
    }
}

/// Sends callers until one of them, the first that does not receive the old value, starts a new load. Returns all callers.
async fn until_a_caller_starts_anew(old: &OldLoad, within: Duration) -> Vec<Caller> {
    let (started, open) = (Instant::now(), Gate::closed());
    open.open();
    let mut callers = Vec::new();
    while old.loads.started() < 2 {
        assert!(started.elapsed() < within, "callers still join the old load after {:?}", started.elapsed());
        callers.push(held_call(&old.guards[0], 2, &open, &old.loads));
        tokio::time::sleep(ms(2)).await;
    }
    callers
}

#[tokio::test]
async fn in_the_loading_node_later_callers_get_the_newer_value_once_the_message_arrived() {
    let old = OldLoad::start(2, LEASE).await;
    old.guards[1].invalidate("k").await.expect("confirmed");
    let callers = until_a_caller_starts_anew(&old, Duration::from_secs(2) + STANDSTILL).await;
    assert_eq!(answer(&old.guards[0], "k", 3).await, 2);
    assert_eq!(answer(&old.guards[1], "k", 3).await, 2);
    old.gate.open();
    for caller in callers {
        caller.await.expect("answered");
    }
    old.ends_unseen(Some(2)).await;
}

/// To the loading node, a direct DEL looks like an invalidation whose message was lost. If the node noticed it only at the end of the
/// lease, that would take three times as long as promised.
#[tokio::test]
async fn in_the_loading_node_a_lost_message_costs_a_third_of_the_lease() {
    let lease = Duration::from_secs(3);
    let mut rounds = Rounds::of("a lost message");
    while rounds.next().is_some() {
        let old = OldLoad::start(2, lease).await;
        let lost = Instant::now();
        old.server.run::<()>(&["DEL", "sg1:l:{default:k}", "sg1:e:{default:k}"]);
        let callers = until_a_caller_starts_anew(&old, lease / 3 + Duration::from_secs(1) + STANDSTILL).await;
        rounds.note([Timing::once("strict", lost.elapsed(), lease / 3)]);
        old.gate.open();
        for caller in callers {
            caller.await.expect("answered");
        }
        assert!(old.guards[0].stats().leases_lost >= 1);
        old.ends_unseen(Some(2)).await;
    }
}

#[tokio::test]
async fn waiters_in_other_nodes_wake_and_load_the_newer_value() {
    let old = OldLoad::start(3, LEASE).await;
    let open = Gate::closed();
    open.open();
    let waiter = held_call(&old.guards[1], 2, &open, &old.loads);
    queued(&old.server, "k", 1).await;
    old.guards[2].invalidate("k").await.expect("confirmed");
    assert_eq!(waiter.await.expect("joined"), 2, "the old load is still running");
    assert_eq!(old.loads.started(), 2);
    old.ends_unseen(Some(2)).await;
}

#[tokio::test]
async fn an_insertion_from_another_node_stays() {
    let old = OldLoad::start(2, LEASE).await;
    old.guards[1].insert("k", &5u32).await.expect("stored");
    assert_eq!(answer(&old.guards[1], "k", 3).await, 5);
    eventually("the loading node was notified", Duration::from_secs(2) + STANDSTILL, async || {
        old.guards[0].stats().leases_lost == 1
    })
    .await;
    assert_eq!(answer(&old.guards[0], "k", 3).await, 5);
    old.ends_unseen(Some(5)).await;
}

#[tokio::test]
async fn a_load_begun_after_one_invalidation_falls_to_the_next() {
    let old = OldLoad::start(2, LEASE).await;
    old.guards[0].invalidate("k").await.expect("confirmed");
    let gate = Gate::closed();
    let second = held_call(&old.guards[0], 2, &gate, &old.loads);
    old.loads.reach(2).await;
    old.guards[1].invalidate("k").await.expect("confirmed");
    gate.open();
    assert_eq!(second.await.expect("joined"), 2);
    assert_eq!(answer(&old.guards[1], "k", 3).await, 3);
    old.ends_unseen(Some(3)).await;
}

/// The same promise between processes: one leads, one waits, one invalidates.
#[tokio::test]
async fn an_invalidation_from_another_process_wins_over_a_running_load() {
    let nodes = Nodes::start(3, Duration::from_secs(20)).await;
    nodes.origin.script("k", [Answer::value("old").held(), Answer::value("new")]);
    nodes.one_leads("k", "load k 3", 3).await;
    nodes.node(2).send("invalidate k");
    assert_eq!(nodes.node(2).wait_event("invalidate").await, true);
    // Node 2 has invalidated the key, so its new caller must not receive the old value.
    nodes.node(2).send("load k 1");
    nodes.all_get([1, 2, 2], "k", "new").await;
    assert_eq!(nodes.origin.loads("k"), 2);
    nodes.origin.release("k");
    nodes.overtaken(0, "k", "old", "new").await;
    nodes.nothing_left(0..3).await;
    for index in 0..3 {
        nodes.node(index).send("get k");
        assert_eq!(nodes.node(index).wait_event("get").await, "new");
    }
}
