//! I4: how long a call may take whatever goes wrong, by its kind and its policy.
//!
//! Timers of a stopped node continue, but their actions wait. So the time for which the call's own node was stopped during the call
//! is added to the bound. Stops of other nodes are not added: `wait_timeout` bounds a wait for another node.

use std::time::Duration;

use tokio::time::Instant;

use super::nodes::Node;
use super::plan::{Call, Does, Ends, Profile, What};
use super::world::World;
use crate::sync::lock;

/// How long an invalidation or an insertion is retried before its caller receives an error, as documented.
const CHANGE: Duration = Duration::from_secs(2);
/// The sleep between two attempts at a change. It may also follow the last attempt.
const PAUSE: Duration = Duration::from_millis(50);
/// Timers are late, each by up to a millisecond.
const SLACK: Duration = Duration::from_millis(10);
/// After this many loaders in turn that panicked, a flight tries no other one.
const MOST_HOPS: usize = 3;

impl World {
    /// I4 for a call that has just returned.
    pub(super) fn check_time(&self, node: &Node, call: &Call, start_seq: u64, began: Instant) {
        let took = began.elapsed();
        let stops = node.stops_since(began);
        let most = self.most(call.node, call.does, call.key) + together(stops.clone());
        let most = match self.plan.profile {
            Profile::None => most.min(self.most_when_well(call, start_seq)),
            Profile::Mixed | Profile::Heavy => most,
        };
        let what = format_args!("{:?} of key {} at n{}", call.does, call.key, node.id);
        self.oracle.check(took <= most, format_args!("I4: {what} took {took:?}, more than {most:?}"));
        // The keys of a call for many are answered together.
        if call.loads() && call.does != Does::LoadMany {
            let mut busy = lock(&self.oracle.state).loads.times(node.id, call.key, began);
            busy.extend(stops);
            let announces =
                if call.does == Does::Refresh { self.longest_change() * 2 } else { Duration::ZERO };
            let (idle, most) = (took.saturating_sub(together(busy)), self.most_idle() + announces);
            self.oracle.check(
                idle <= most,
                format_args!("I4: {what} was without a load at its node for {idle:?}, more than {most:?}"),
            );
        }
    }

    /// I9: a caller waits for at most two loads of its node under a lease, however often the tag changes, because a load that begins after
    /// the caller came answers it. The second load may belong to another flight that continued alone, and a third one to that of a call for
    /// many keys.
    pub(super) fn check_rounds(&self, node: &Node, call: &Call, start_seq: u64) {
        let other_flights = |other: &Call| {
            other.asks_for(call.key) && (other.does == Does::Refresh || other.load.ends == Ends::DoNotStore)
        };
        if self.plan.profile != Profile::None
            || call.does != Does::Load
            || self.plan.all_calls().any(|call| other_flights(&call))
        {
            return;
        }
        let state = lock(&self.oracle.state);
        // Changes by this node, and changes of the key, divide the node's callers among several flights.
        let of_key = state.by_key.get(&call.key).and_then(|of| of.invalidated.last());
        let has_changed =
            state.changing.contains(&node.id) || of_key.is_some_and(|(_, seq)| *seq > start_seq);
        let loads = state.loads.since(node.id, call.key, start_seq);
        drop(state);
        let is_many =
            |other: Call| other.node == call.node && other.does == Does::LoadMany && other.asks_for(call.key);
        let most = if self.plan.all_calls().any(is_many) { 3 } else { 2 };
        self.oracle.check(
            has_changed || loads <= most,
            format_args!(
                "I9: {loads} loads of key {} at n{} before a caller was answered",
                call.key, node.id
            ),
        );
    }

    /// An upper bound for every call at every node, to detect calls that never return.
    pub(super) fn bound(&self) -> Duration {
        *self.bound.get_or_init(|| {
            let stops = self.plan.events.iter().map(|event| match event.what {
                What::Stop(lasts) => lasts,
                What::Crash(_)
                | What::Cut(_)
                | What::MoveAway(..)
                | What::MissMessages(_)
                | What::Leave(..) => Duration::ZERO,
            });
            let calls = (0..self.plan.nodes).flat_map(|slot| (0..self.plan.keys).map(move |key| (slot, key)));
            let most = calls
                .flat_map(|(slot, key)| [Does::Load, Does::Refresh].map(|does| self.most(slot, does, key)));
            most.max().unwrap_or_default().max(self.longest_change()) + stops.sum::<Duration>()
        })
    }

    fn longest_change(&self) -> Duration {
        CHANGE + PAUSE + SLACK + self.plan.announcing()
    }

    /// B1 for a call to a node of this slot, without the time for which the node is stopped.
    fn most(&self, slot: usize, does: Does, key: u8) -> Duration {
        let policy = &self.plan.policy;
        // A look-up may wait for another caller's read first, and then for its own queue's read, each for at most one command timeout. The
        // budget is two of these.
        let look_up = policy.coordination_budget;
        match does {
            Does::Get => look_up + SLACK,
            Does::Invalidate | Does::InvalidateTag | Does::Insert => self.longest_change(),
            Does::Load => self.most_idle() + self.longest_loads(slot, key),
            // The stored keys are returned together with the last key that is loaded.
            Does::LoadMany => {
                let keys = (0..self.plan.keys).map(|key| self.longest_loads(slot, key));
                self.most_idle() + keys.max().unwrap_or_default()
            }
            // The caller waits until all nodes have dropped their copies, and so do the loads that it waits for.
            Does::Refresh => self.most_idle() + self.longest_change() * 2 + self.longest_loads(slot, key),
        }
    }

    /// How long a call that brings a loader may take while its node runs no load of the key: a budget for its look-up, `wait_timeout`
    /// for loads of other nodes, a budget for the look-up after that timeout, and a budget for its flight's commands. The flight's
    /// acquire after a wait may take a lease longer. If a change of the tag has outdated what it finds then, another flight waits.
    fn most_idle(&self) -> Duration {
        let policy = &self.plan.policy;
        // Without tags, a caller waits for other nodes once. A change of the tag may make it wait once more.
        let waits = if self.plan.tagged { 2 } else { 1 };
        policy.coordination_budget * 4 + policy.wait_timeout * waits + policy.lease + SLACK * 3
    }

    /// How long one call can wait for consecutive loads of this key at this node: one load, the loads before it that panic, and with
    /// tags two more, one with and one without the lease, that a change of the tag outdated.
    fn longest_loads(&self, slot: usize, key: u8) -> Duration {
        let here =
            self.plan.all_calls().filter(|call| call.node == slot && call.asks_for(key) && call.loads());
        let hops = here.filter(|call| call.load.ends == Ends::Panic).count().min(MOST_HOPS);
        let outdated = if self.plan.tagged { 2 } else { 0 };
        self.longest_load(key) * (1 + hops + outdated) as u32
    }

    /// The longest load of this key at any node: a caller that receives another node's outcome may have waited for all of that load.
    fn longest_load(&self, key: u8) -> Duration {
        let load_timeout = self.plan.policy.load_timeout;
        let of_key = self.plan.all_calls().filter(|call| call.asks_for(key) && call.loads());
        let takes = of_key.map(|call| match call.load.ends {
            Ends::Never => load_timeout,
            _ => call.load.takes.min(load_timeout),
        });
        takes.max().unwrap_or_default()
    }

    /// The bound without faults: time for the load, and for another one after each invalidation and each shutdown of a node.
    fn most_when_well(&self, call: &Call, start_seq: u64) -> Duration {
        let latency = self.plan.trip();
        if !call.loads() {
            // A round trip for the read that is already on its way, one for the queue's read, and one for a look-up that was first skipped.
            // A change also waits for the nodes with copies: a term at most, for a node that is leaving, or a registry that is new.
            return latency * 3 + SLACK + self.plan.announcing();
        }
        let left = self.plan.events.iter().filter(|event| matches!(event.what, What::Leave(..))).count();
        let keys = (0..self.plan.keys).filter(|key| call.asks_for(*key));
        let changed = keys.map(|key| self.oracle.invalidations(key, start_seq)).sum::<usize>();
        let loads = 2 + (left + changed) as u32;
        let announces = if call.does == Does::Refresh { self.plan.announcing() } else { Duration::ZERO };
        let keys = (0..self.plan.keys).filter(|key| call.asks_for(*key));
        let longest = keys.map(|key| self.longest_load(key)).max().unwrap_or_default();
        (longest + latency * 8 + SLACK * 4 + announces) * loads
    }
}

/// The total length of these spans. Time in which several spans overlap counts once.
fn together(mut times: Vec<(Instant, Instant)>) -> Duration {
    times.sort_unstable();
    let mut seen: Option<Instant> = None;
    let mut all = Duration::ZERO;
    for (from, to) in times {
        all += to.saturating_duration_since(seen.map_or(from, |seen| seen.max(from)));
        seen = Some(seen.map_or(to, |seen| seen.max(to)));
    }
    all
}
