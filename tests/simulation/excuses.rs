//! I5: the reasons for which a load may begin without the lease. They are derived without the node's own counters: the wire shows which
//! commands failed, the store which leases were granted, and the clock how long callers have waited.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::loads::Begins;
use super::nodes::{Node, Window};
use super::plan::{Does, Ends, Profile};
use super::world::World;
use crate::read_through::batch::LATER;
use crate::store::Token;
use crate::sync::lock;

/// How soon a background load begins, in addition to the time that its commands may take.
const SOON: Duration = Duration::from_millis(20);

impl World {
    /// Describes a load that begins now: its lease, or its excuse for having none.
    pub(super) fn begins(&self, node: &Node, key: u8, does: Does, came: Instant) -> Begins {
        let policy = &self.plan.policy;
        let leaves = node.leaves.load(Ordering::Relaxed);
        let lease = self.chaos.holds(&node.replica, self.keys[usize::from(key)].name());
        let window = node.window(key, policy.coordination_budget + SOON, self.bound());
        let asks = if self.plan.tagged { policy.command_timeout } else { Duration::ZERO };
        // The next loader may belong to a call for many keys, which collects its keys for a moment, and sends one command per key until
        // each flight has had its turn. This is added to the time.
        let asks = asks + LATER + policy.command_timeout * self.plan.keys.into();
        let after = lock(&self.oracle.state).loads.taken_over(node.id, key, asks);
        let excuse = match (leaves, window) {
            (true, _) => Some("being shut down"),
            (false, None) => None,
            (false, Some(_)) if after.is_some() => Some("that of one that panicked"),
            (false, Some(window)) => self.excuse(node, key, window, lease.as_ref()),
        };
        Begins { node: node.id, key, does, came, lease, excuse, after, lanes: self.lanes(key, window) }
    }

    /// Why the node may load the key without the lease, for a call in this window. `held` is the lease that the node has now, for another
    /// load of the key.
    fn excuse(&self, node: &Node, key: u8, window: Window, held: Option<&Token>) -> Option<&'static str> {
        let Window { from, waited } = window;
        if waited >= self.plan.policy.wait_timeout {
            return Some("having waited");
        }
        // Timers ran on while the node was stopped, so its budget or its lease may have run out.
        if !node.stops_since(from).is_empty() {
            return Some("having been stopped");
        }
        let state = lock(&self.oracle.state);
        if state.loads.was_troubled(node.id, key, from) {
            return Some("a command that went wrong");
        }
        state.loads.has_lost(node.id, key, from, held).then_some("a lease that was lost")
    }

    /// I8: how many loads of one key a node may run at once without a lease, not counting loads that later callers do not join: one, and
    /// one more for each of these that occurs in the run: forced reloads; callers that have waited for `wait_timeout`; probes whether the
    /// resource is still uncacheable; tag checks while commands fail, which detach flights without the oracle's knowledge.
    fn lanes(&self, key: u8, window: Option<Window>) -> usize {
        let refreshes = self.plan.all_calls().any(|call| call.key == key && call.does == Does::Refresh);
        let has_waited = window.is_some_and(|window| window.waited >= self.plan.policy.wait_timeout);
        let heals =
            self.plan.all_calls().any(|call| call.asks_for(key) && call.load.ends == Ends::DoNotStore);
        let parts = self.plan.tagged && self.plan.profile != Profile::None;
        [refreshes, has_waited, heals, parts].into_iter().filter(|is_so| *is_so).count() + 1
    }
}
