//! A replica of many is shut down while it has a thousand keys in hand: deployments come when there is load.

use tokio::task::JoinHandle;

use super::*;

const KEYS: usize = 1_000;
/// A lease that stays with nobody would be missed.
const LEASE: Duration = Duration::from_secs(60);

/// A node, and how often it has loaded.
struct Busy {
    guard: StampedeGuard,
    gate: Gate,
    loads: Counter,
    asked: Vec<JoinHandle<bool>>,
}

impl Busy {
    /// Asks for every key, and is held up where it loads.
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
        let asked = (0..KEYS).map(|key| tokio::spawn(ask(key))).collect();
        Self { guard, gate, loads, asked }
    }

    async fn loads_all(&self) {
        self.loads.reach(KEYS).await;
    }

    async fn waits_for_all(&self, server: &RedisServer) {
        let queues = async || server.keys().iter().filter(|key| key.starts_with("sg1:q:")).count();
        eventually_eq("it waits for all", SOON, KEYS, queues).await;
    }

    /// Nothing of it would be waited for.
    async fn leaves(&self) {
        let shutdown = self.guard.shutdown(ms(100)).await;
        assert!(!shutdown.finished && shutdown.abandoned == 0, "{shutdown:?}");
    }

    async fn is_answered(self) {
        self.gate.open();
        for asked in join_all(self.asked).await {
            assert!(asked.expect("joined"));
        }
    }
}

#[tokio::test]
async fn a_thousand_loads_go_on_at_another_replica() {
    let server = RedisServer::start();
    let leads = Busy::on(&server).await;
    leads.loads_all().await;
    let waits = Busy::on(&server).await;
    waits.waits_for_all(&server).await;
    leads.leaves().await;
    waits.loads_all().await;
    waits.is_answered().await;
    leads.is_answered().await;
}

/// Those who wait leave first, and then there is nobody to hand over to.
#[tokio::test]
async fn a_replica_that_comes_later_waits_for_none_of_those_that_left() {
    let server = RedisServer::start();
    let leads = Busy::on(&server).await;
    leads.loads_all().await;
    let waits = Busy::on(&server).await;
    waits.waits_for_all(&server).await;
    waits.leaves().await;
    leads.leaves().await;
    let comes = Busy::on(&server).await;
    comes.loads_all().await;
    for node in [comes, waits, leads] {
        node.is_answered().await;
    }
}
