//! One of several replicas shuts down while it loads hundreds of keys, as in a deployment under load.

use tokio::task::JoinHandle;

use super::*;

/// So few that a shutdown releases all leases well within its second.
const KEYS: usize = 500;
/// The lease is so long that a test fails if a replica keeps it after its shutdown.
const LEASE: Duration = Duration::from_secs(60);

/// A node with one running call per key, and the counter of its loads.
struct Busy {
    guard: StampedeGuard,
    gate: Gate,
    loads: Counter,
    calls: Vec<JoinHandle<bool>>,
}

impl Busy {
    /// Requests every key. The loads wait at the gate.
    async fn on(server: &RedisServer) -> Self {
        let (guard, gate, loads) = (local(server, lease_of(LEASE)).await, Gate::closed(), Counter::default());
        let ask = |key: usize| {
            let (guard, gate, loads) = (guard.clone(), gate.clone(), loads.clone());
            async move {
                let load = move || async move {
                    let _running = loads.start();
                    gate.pass().await;
                    Ok::<_, String>(key as u64)
                };
                guard.get_or_load(("k", key), load).await.is_ok_and(|value| value == key as u64)
            }
        };
        let calls = (0..KEYS).map(|key| tokio::spawn(ask(key))).collect();
        Self { guard, gate, loads, calls }
    }

    async fn loads_all(&self) {
        let began = Instant::now();
        self.loads.reach(KEYS).await;
        assert!(began.elapsed() < LEASE / 4, "{:?}", began.elapsed());
    }

    /// Shuts the node down, and checks that it hands over this many leases and abandons none.
    async fn leaves(&self, leases: usize) {
        let shutdown = self.guard.shutdown(ms(100)).await;
        let outcome = (shutdown.finished, shutdown.handed_over, shutdown.abandoned);
        assert_eq!(outcome, (false, leases, 0));
    }

    async fn gives_answers(self) {
        self.gate.open();
        for call in join_all(self.calls).await {
            assert!(call.expect("joined"));
        }
    }
}

/// Two nodes: the first one has all leases, and the second one waits for each of them.
async fn one_waits_for_the_other(server: &RedisServer) -> [Busy; 2] {
    let leads = Busy::on(server).await;
    leads.loads_all().await;
    let waits = Busy::on(server).await;
    let queues = async || server.keys().iter().filter(|key| key.starts_with("sg1:q:")).count();
    eventually_eq("it waits for all", SOON, KEYS, queues).await;
    [leads, waits]
}

#[tokio::test]
async fn loads_of_a_replica_that_shuts_down_continue_on_another() {
    let server = RedisServer::start();
    let [leads, waits] = one_waits_for_the_other(&server).await;
    leads.leaves(KEYS).await;
    waits.loads_all().await;
    waits.gives_answers().await;
    leads.gives_answers().await;
}

/// The waiting replica leaves first, so the leader has no waiter to which it could hand over.
#[tokio::test]
async fn a_new_replica_waits_for_no_lease_of_replicas_that_shut_down() {
    let server = RedisServer::start();
    let [leads, waits] = one_waits_for_the_other(&server).await;
    waits.leaves(0).await;
    leads.leaves(KEYS).await;
    let comes = Busy::on(&server).await;
    comes.loads_all().await;
    for node in [comes, waits, leads] {
        node.gives_answers().await;
    }
}
