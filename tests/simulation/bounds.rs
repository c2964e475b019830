//! I4: how long a call may take, whatever goes wrong, by what it is and what its policy says.
//!
//! Timers of a stopped node run on, and what they would do waits: so what the call's own node was stopped for while the call was
//! there comes on top, and no other node's stop does: who waits for another node has a bound of its own on that.

use std::time::Duration;

use tokio::time::Instant;

use super::nodes::Node;
use super::plan::{Call, Does, Ends, Profile, What};
use super::world::World;
use crate::sync::lock;

/// How long an invalidation or an insertion is tried, by what is documented of them.
const CHANGE: Duration = Duration::from_secs(2);
/// What is slept between two tries of a change, the last of which may be followed by it.
const PAUSE: Duration = Duration::from_millis(50);
/// What timers are late by, each up to a millisecond.
const SLACK: Duration = Duration::from_millis(10);
/// How many loaders that panic one after the other are followed by another one before the flight is given up.
const MOST_HOPS: usize = 3;

impl World {
    /// I4, of a call that has just returned.
    pub(super) fn check_time(&self, node: &Node, call: &Call, asked: u64, began: Instant) {
        let took = began.elapsed();
        let stops = node.stops_since(began);
        let most = self.most(call.node, call.does, call.key) + together(stops.clone());
        let most = match self.plan.profile {
            Profile::None => most.min(self.most_when_well(call, asked)),
            Profile::Mixed | Profile::Heavy => most,
        };
        let what = format_args!("{:?} of key {} at n{}", call.does, call.key, node.id);
        self.oracle.check(took <= most, format_args!("I4: {what} took {took:?}, more than {most:?}"));
        if call.loads() {
            let mut busy = lock(&self.oracle.state).loads.times(node.id, call.key, began);
            busy.extend(stops);
            let (idle, most) = (took.saturating_sub(together(busy)), self.most_idle());
            self.oracle.check(
                idle <= most,
                format_args!("I4: {what} was without a load at its node for {idle:?}, more than {most:?}"),
            );
        }
    }

    /// I9: a caller asks again once at most, however often the tag changes: a load that begins after it came is for it. (One more may be
    /// another flight's, which went on alone.)
    pub(super) fn check_rounds(&self, node: &Node, call: &Call, asked: u64) {
        let other_flights = |other: &Call| {
            other.key == call.key && (other.does == Does::Refresh || other.load.ends == Ends::DoNotStore)
        };
        if self.plan.profile != Profile::None
            || call.does != Does::Load
            || self.plan.all_calls().any(|call| other_flights(&call))
        {
            return;
        }
        let state = lock(&self.oracle.state);
        // A node's own changes, and those of a key, part its callers into several flights.
        let of_key = state.by_key.get(&call.key).and_then(|of| of.invalidated.last());
        let has_changed =
            state.changes.iter().any(|(at, _)| *at == node.id) || of_key.is_some_and(|(_, seq)| *seq > asked);
        let loads = state.loads.since(node.id, call.key, asked);
        drop(state);
        self.oracle.check(
            has_changed || loads <= 2,
            format_args!(
                "I9: {loads} loads of key {} at n{} before a caller was answered",
                call.key, node.id
            ),
        );
    }

    /// No call returns later, whatever it is and wherever: for those that have not returned at all.
    pub(super) fn bound(&self) -> Duration {
        let stops = self.plan.events.iter().map(|event| match event.what {
            What::Stop(lasts) => lasts,
            What::Crash(_) | What::Cut(_) | What::Leave(..) => Duration::ZERO,
        });
        let calls = (0..self.plan.nodes).flat_map(|slot| (0..self.plan.keys).map(move |key| (slot, key)));
        let longest = calls.map(|(slot, key)| self.most(slot, Does::Load, key)).max().unwrap_or_default();
        longest.max(CHANGE + PAUSE + SLACK) + stops.sum::<Duration>()
    }

    /// B1, on a node that is not stopped.
    fn most(&self, slot: usize, does: Does, key: u8) -> Duration {
        let policy = &self.plan.policy;
        // Who looks up waits for the read before its queue's own, each within one command; and the budget is two of them.
        let look_up = policy.coordination_budget;
        match does {
            Does::Get => look_up + SLACK,
            Does::Invalidate | Does::InvalidateTag | Does::Insert => CHANGE + PAUSE + SLACK,
            Does::Load | Does::Refresh => self.most_idle() + self.longest_loads(slot, key),
        }
    }

    /// How long a call that brings a loader may be there while its node loads nothing for it. It looks; waits for others' loads
    /// elsewhere; and looks again, if it has waited for long enough. What its flight may ask of the store is one more budget, but
    /// for one acquire: after a wait it has the lease's time.
    fn most_idle(&self) -> Duration {
        let policy = &self.plan.policy;
        policy.coordination_budget * 3 + policy.wait_timeout + policy.lease + SLACK
    }

    /// The loads of this key at this node that one call can wait for one after the other when it waits for nobody else: one, those
    /// before it that panic, and one each, with the lease and without it, whose tag has changed since it began.
    fn longest_loads(&self, slot: usize, key: u8) -> Duration {
        let here = self.plan.all_calls().filter(|call| call.node == slot && call.key == key && call.loads());
        let hops = here.filter(|call| call.load.ends == Ends::Panic).count().min(MOST_HOPS);
        let outdated = if self.plan.tagged { 2 } else { 0 };
        self.longest_load(key) * (1 + hops + outdated) as u32
    }

    /// Of this key's, wherever: those who are told of a load elsewhere may have waited for all of it.
    fn longest_load(&self, key: u8) -> Duration {
        let load_timeout = self.plan.policy.load_timeout;
        let of_key = self.plan.all_calls().filter(|call| call.key == key && call.loads());
        let takes = of_key.map(|call| match call.load.ends {
            Ends::Never => load_timeout,
            _ => call.load.takes.min(load_timeout),
        });
        takes.max().unwrap_or_default()
    }

    /// Where nothing goes wrong: what is loaded, and loaded again after each invalidation and by each who had to leave.
    fn most_when_well(&self, call: &Call, asked: u64) -> Duration {
        let latency = self.plan.trip();
        if !call.loads() {
            // Behind one that is on its way, and the way itself; a look-up may be left out, and made after all.
            return latency * 3 + SLACK;
        }
        let left = self.plan.events.iter().filter(|event| matches!(event.what, What::Leave(..))).count();
        let loads = 2 + (left + self.oracle.invalidations(call.key, asked)) as u32;
        (self.longest_load(call.key) + latency * 8 + SLACK * 2) * loads
    }
}

/// How long these times are together: what they share counts once.
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
