//! The calm phase after the faults: every caller is answered, one load is enough, and nothing is left.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::nodes::Node;
use super::oracle::Value;
use super::plan::{Does, Ends, Script};
use super::world::{World, cache_key};

/// The longest time for which a command may be on its way: the delay of a ghost command and a margin.
const LATE_COMMANDS: Duration = Duration::from_millis(4_200);

impl World {
    /// I12, first half: once the faults have ended, every caller is answered.
    pub(super) async fn heal(self: &Arc<Self>) {
        self.oracle.note("calm");
        self.chaos.calm();
        for node in self.living() {
            node.resume();
        }
        let nodes = self.living();
        for key in 0..self.plan.keys {
            let Some(node) = nodes.get(usize::from(key) % nodes.len().max(1)) else { return };
            let healed = timeout(self.bound(), self.ask(node, key)).await;
            // An error is accepted: a load that began before the end of the faults may still fail for all its waiters.
            if healed.is_err() && !node.replica.is_dead() {
                self.oracle.violated(format_args!("I12: key {key} is not answered when all is well again"));
            }
        }
    }

    async fn ask(self: &Arc<Self>, node: &Arc<Node>, key: u8) -> Result<Value, String> {
        let (world, at) = (Arc::clone(self), Arc::clone(node));
        let script = Script { takes: Duration::from_millis(20), ends: Ends::Value };
        let came = Instant::now();
        let loader = move |cx| async move { world.load(&at, key, Does::Load, came, script, cx).await };
        let asking = self.asks(node, key, Does::Load);
        let answer = node.guard.load(cache_key(key)).get(loader).await.map(|loaded| loaded.value);
        asking.answered();
        answer.map_err(|error| error.to_string())
    }

    /// I12, second half, and I7: one load per key is enough for all nodes, and then nothing is left.
    pub(super) async fn settle(self: &Arc<Self>) {
        let policy = &self.plan.policy;
        sleep(LATE_COMMANDS + policy.load_timeout + policy.lease * 2).await;
        let nodes = self.living();
        for key in 0..self.plan.keys {
            let before = self.oracle.loads_of(key);
            let asks = nodes.iter().map(|node| self.ask(node, key));
            let answers = futures_util::future::join_all(asks).await;
            if let Some(Err(error)) = answers.iter().find(|answer| answer.is_err()) {
                self.oracle.violated(format_args!("I12: key {key} when all is well: {error}"));
            }
            // If a stale value was served, its background load runs now.
            sleep(Duration::from_millis(100)).await;
            let loads = self.oracle.loads_of(key) - before;
            let stored = self.chaos.store().entry(self.keys[usize::from(key)].name()).is_some();
            if loads > 1 || !stored && !nodes.is_empty() {
                self.oracle.violated(format_args!(
                    "I12: key {key}: {loads} loads when all is well, stored={stored}"
                ));
            }
        }
        sleep(policy.load_timeout + policy.lease * 2).await;
        for key in &self.keys {
            if self.chaos.store().lease(key.name()).is_some() {
                self.oracle.violated(format_args!("I7: {} is still leased", key.name()));
            }
        }
        for node in nodes {
            let stats = node.guard.stats();
            let (inside, _) = node.guard.parts();
            let left = [
                stats.flights as usize,
                stats.tasks as usize,
                inside.leases.count(),
                inside.possible_leases.count(),
                inside.reads.len(),
                stats.kept_invalidations as usize,
            ];
            if left != [0; 6] || self.chaos.has_waiters(&node.replica) {
                self.oracle.violated(format_args!(
                    "I7: left in node {}: flights, tasks, leases, doubtful ones, reads, retained invalidations {left:?}",
                    node.id
                ));
            }
        }
    }
}
