//! The last minute, four times a second, as the page plots it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::board::{Board, Histogram, OUTCOMES, Outcome};
use crate::controls::Controls;
use crate::fleet::Fleet;
use crate::origin::Origin;
use crate::store::Store;
use crate::story::Story;

pub(crate) const PERIOD: Duration = Duration::from_millis(250);
/// A minute and a bit, so that the oldest point lies outside of the plot.
const MAX_SAMPLES: usize = 244;
/// A quantile is taken over this many samples.
const SMOOTHED: usize = 4;
/// So many late samples, one after the other, mean that the machine can not keep up. The lab says so again after this time.
const LATE_SAMPLES: u32 = 3;
const LATE_AGAIN: Duration = Duration::from_secs(20);
/// The keys that the page plots.
const CHART_KEYS: u64 = 6;

pub(crate) struct History {
    board: Arc<Board>,
    story: Arc<Story>,
    controls: watch::Receiver<Controls>,
    origin: Arc<Origin>,
    fleet: Arc<Fleet>,
    store: Arc<Store>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    samples: VecDeque<Value>,
    times: VecDeque<Histogram>,
    taken: u64,
    loads: u64,
    commands: u64,
    local_hits: u64,
}

impl History {
    /// Begins to take samples.
    pub(crate) fn start(
        board: Arc<Board>,
        story: Arc<Story>,
        controls: watch::Receiver<Controls>,
        origin: Arc<Origin>,
        fleet: Arc<Fleet>,
        store: Arc<Store>,
    ) -> Arc<Self> {
        let history =
            Arc::new(Self { board, story, controls, origin, fleet, store, state: Mutex::default() });
        tokio::spawn(history.clone().record());
        history
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The samples after one that the page has.
    pub(crate) fn since(&self, seq: u64) -> Vec<Value> {
        let state = self.state();
        let newer = state.samples.iter().filter(|sample| sample["seq"].as_u64() > Some(seq));
        newer.cloned().collect()
    }

    fn take(&self) {
        let counts = self.board.take_sample();
        let pressure = self.origin.pressure();
        let longest_queue = self.origin.take_longest_queue();
        let lanes = self.origin.take_lanes();
        let (commands, local_hits) = (self.fleet.commands(), self.fleet.local_hits());
        let keys = self.controls.borrow().keys.min(CHART_KEYS);
        let leases = (1..=keys).map(|key| {
            let lane = lanes.get(&key);
            json!([
                lane.map_or(0, |lane| lane.most),
                lane.map_or(0, |lane| lane.replica),
                self.board.waiting_for(key)
            ])
        });
        let leases: Value = leases.collect();
        let mode = self.controls.borrow().mode;

        let state = &mut *self.state();
        state.taken += 1;
        state.times.push_back(counts.times.clone());
        if state.times.len() > SMOOTHED {
            state.times.pop_front();
        }
        let mut times = Histogram::new();
        state.times.iter().for_each(|slot| times.merge(slot));

        let loads = pressure.loads - state.loads;
        let from_memory = local_hits.saturating_sub(state.local_hits).min(counts.of(Outcome::Hit));
        let mut sample = json!({
            "seq": state.taken, "at_ms": self.board.now_ms(), "mode": mode, "store": self.store.state(),
            "loads": loads, "running": pressure.running, "queue": longest_queue,
            "waiting": self.board.in_flight(), "p50": times.quantile(0.5), "p99": times.quantile(0.99),
            "commands": commands.saturating_sub(state.commands), "leases": leases, "memory": from_memory,
        });
        for (outcome, name) in OUTCOMES {
            sample[name] = counts.of(outcome).into();
        }
        sample["hit"] = (counts.of(Outcome::Hit) - from_memory).into();
        (state.loads, state.commands, state.local_hits) = (pressure.loads, commands, local_hits);
        state.samples.push_back(sample);
        if state.samples.len() > MAX_SAMPLES {
            state.samples.pop_front();
        }
        // Four samples are a second.
        let last = state.samples.iter().rev().take(SMOOTHED);
        let loads_per_second = last.filter_map(|sample| sample["loads"].as_f64()).sum();
        self.story.look(longest_queue, loads_per_second);
    }

    /// Takes samples until the lab ends.
    async fn record(self: Arc<Self>) {
        let mut period = interval(PERIOD);
        period.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let (mut last, mut late, mut warned) = (Instant::now(), 0, None::<Instant>);
        loop {
            period.tick().await;
            self.take();
            // A sample that comes so late says that this process had no processor.
            late = if last.elapsed() > 2 * PERIOD { late + 1 } else { 0 };
            last = Instant::now();
            if late >= LATE_SAMPLES && warned.is_none_or(|warned| warned.elapsed() > LATE_AGAIN) {
                warned = Some(last);
                self.story.say("This machine is too busy for this load: send fewer requests, or start the lab with `--release`.");
            }
        }
    }
}
