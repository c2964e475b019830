//! Events of a node: it crashes, stops, is cut off from the store, or is shut down and replaced.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::nodes::Node;
use super::plan::{Profile, What};
use super::world::World;
use crate::store::Token;
use crate::sync::lock;

impl World {
    pub(super) async fn happen(&self, slot: usize, what: What) {
        let node = Arc::clone(&lock(&self.nodes)[slot]);
        self.oracle.note(format_args!("n{} {what:?}", node.id));
        match what {
            What::Crash(back) => self.replace(slot, &node, back).await,
            What::Leave(deadline, back) => {
                self.leave(&node, deadline).await;
                self.replace(slot, &node, back).await;
            }
            What::Stop(lasts) => {
                node.stop();
                sleep(lasts).await;
                node.resume();
            }
            What::MoveAway(by, lasts) => {
                node.replica.move_away(by);
                sleep(lasts).await;
                node.replica.move_away(if slot == 0 { self.plan.detour } else { Duration::ZERO });
            }
            What::MissMessages(lasts) => {
                node.replica.miss_messages(true);
                sleep(lasts).await;
                node.replica.miss_messages(false);
            }
            What::Cut(lasts) => {
                node.cut();
                sleep(lasts).await;
                node.resume();
            }
        }
    }

    /// Kills the node with all its calls, and starts its successor after `back`.
    async fn replace(&self, slot: usize, node: &Arc<Node>, back: Duration) {
        node.kill();
        for call in lock(&node.calls).drain(..) {
            call.abort();
        }
        sleep(back).await;
        let mut nodes = lock(&self.nodes);
        // Another event may have replaced the node meanwhile.
        if Arc::ptr_eq(&nodes[slot], node) {
            nodes[slot] = self.node(slot);
        }
    }

    /// I13: shuts the node down.
    async fn leave(&self, node: &Node, deadline: Duration) {
        node.replica.runs().await;
        node.leaves.store(true, Ordering::Relaxed);
        let began = Instant::now();
        let done = node.guard.shutdown(deadline).await;
        let took = began.elapsed();
        if node.replica.is_dead() {
            return;
        }
        self.oracle.note(format_args!("n{} has left after {took:?}: {done:?}", node.id));
        self.oracle.check(
            took <= deadline + Duration::from_millis(1_010),
            format_args!("I13: n{} took {took:?} to leave within {deadline:?}", node.id),
        );
        // The process exits now. Commands that it has sent before still arrive.
        node.kill();
        sleep(self.plan.trip() * 2).await;
        let (inside, _) = node.guard.parts();
        let id = inside.store.node().simple().to_string();
        let is_sound = self.plan.profile == Profile::None;
        // With faults, a lease does not count if its flight had abandoned or ended it before the grant: the node may not know of the grant.
        let granted = |token: &Token| {
            lock(&self.oracle.state).tokens.get(token).is_some_and(|holder| holder.granted && !holder.over)
        };
        let held = self.keys.iter().filter_map(|key| self.chaos.store().lease(key.name()));
        let held = held.filter(|(token, _)| token.node() == id && (is_sound || granted(token))).count();
        // A flight that ends at the very deadline leaves no time to release its lease.
        let had_time = !done.finished || took + self.plan.trip() < deadline;
        let is_right =
            if is_sound && had_time { (held, done.abandoned) == (0, 0) } else { held <= done.abandoned };
        self.oracle.check(
            is_right || self.struck() > 0,
            format_args!("I13: n{} has left {held} leases: {done:?}", node.id),
        );
    }
}
