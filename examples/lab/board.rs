//! What became of the requests: counts by outcome, times, and the requests that wait now.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How one request was answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Outcome {
    /// With a stored value.
    Hit,
    /// With a stored value that is no longer fresh.
    Stale,
    /// By a load of its own, which others may share.
    Loaded,
    /// By the load of another request.
    Waited,
    /// By a load without Redis.
    Alone,
    /// With an error, or not in time.
    Failed,
}

pub(crate) const OUTCOMES: [(Outcome, &str); 6] = [
    (Outcome::Hit, "hit"),
    (Outcome::Stale, "stale"),
    (Outcome::Loaded, "loaded"),
    (Outcome::Waited, "waited"),
    (Outcome::Alone, "alone"),
    (Outcome::Failed, "failed"),
];

/// Counts of requests by outcome, and their times.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    pub(crate) outcomes: [u64; OUTCOMES.len()],
    pub(crate) times: Histogram,
}

impl Counts {
    fn new() -> Self {
        Self { outcomes: [0; OUTCOMES.len()], times: Histogram::new() }
    }

    fn add(&mut self, outcome: Outcome, time: Duration) {
        self.outcomes[outcome as usize] += 1;
        self.times.add(time);
    }

    pub(crate) fn of(&self, outcome: Outcome) -> u64 {
        self.outcomes[outcome as usize]
    }

    pub(crate) fn requests(&self) -> u64 {
        self.outcomes.iter().sum()
    }
}

/// The requests of the load generator.
#[derive(Debug)]
pub(crate) struct Board {
    start: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    totals: Counts,
    /// Since the last sample.
    sample: Counts,
    /// Since the last [`Board::open_window`].
    window: Counts,
    in_flight: u64,
    /// Requests that wait, by key and replica.
    waiting: HashMap<(u64, usize), u64>,
}

impl Board {
    pub(crate) fn new() -> Self {
        let state = State {
            totals: Counts::new(),
            sample: Counts::new(),
            window: Counts::new(),
            in_flight: 0,
            waiting: HashMap::new(),
        };
        Self { start: Instant::now(), state: Mutex::new(state) }
    }

    /// Milliseconds since the lab began.
    pub(crate) fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis().try_into().unwrap_or(u64::MAX)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(&self) {
        self.state().in_flight += 1;
    }

    pub(crate) fn end(&self, outcome: Outcome, time: Duration) {
        let state = &mut *self.state();
        state.in_flight -= 1;
        for counts in [&mut state.totals, &mut state.sample, &mut state.window] {
            counts.add(outcome, time);
        }
    }

    /// Counts a request as waiting at a replica until the result is dropped.
    pub(crate) fn wait(&self, key: u64, replica: usize) -> Waiting<'_> {
        *self.state().waiting.entry((key, replica)).or_default() += 1;
        Waiting { board: self, slot: (key, replica) }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.state().in_flight
    }

    pub(crate) fn totals(&self) -> Counts {
        self.state().totals.clone()
    }

    /// The counts since the last call.
    pub(crate) fn take_sample(&self) -> Counts {
        std::mem::replace(&mut self.state().sample, Counts::new())
    }

    /// Begins to count for a preset's result.
    pub(crate) fn open_window(&self) {
        self.state().window = Counts::new();
    }

    pub(crate) fn window(&self) -> Counts {
        self.state().window.clone()
    }

    /// How many requests wait for a key.
    pub(crate) fn waiting_for(&self, key: u64) -> u64 {
        self.state().waiting.iter().filter(|((of, _), _)| *of == key).map(|(_, count)| count).sum()
    }

    /// How many requests wait at a replica.
    pub(crate) fn waiting_at(&self, replica: usize) -> u64 {
        self.state().waiting.iter().filter(|((_, at), _)| *at == replica).map(|(_, count)| count).sum()
    }

    pub(crate) fn to_json(&self) -> Value {
        let (totals, in_flight) = (self.totals(), self.in_flight());
        let mut state = json!({ "requests": totals.requests(), "in_flight": in_flight });
        for (outcome, name) in OUTCOMES {
            state[name] = totals.of(outcome).into();
        }
        state
    }
}

/// A request that waits at a replica.
pub(crate) struct Waiting<'a> {
    board: &'a Board,
    slot: (u64, usize),
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let waiting = &mut self.board.state().waiting;
        if let Some(count) = waiting.get_mut(&self.slot) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.slot);
            }
        }
    }
}

/// Times in buckets of five percent each, from 0.1 ms to two minutes.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    buckets: Vec<u32>,
}

const BUCKETS: usize = 288;
const LEAST_MS: f64 = 0.1;
const RATIO: f64 = 1.05;

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { buckets: vec![0; BUCKETS] }
    }

    fn add(&mut self, time: Duration) {
        let ms = time.as_secs_f64() * 1e3;
        let bucket = ((ms / LEAST_MS).max(1.0).ln() / RATIO.ln()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (sum, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += count;
        }
    }

    /// The time in milliseconds that this share of the requests did not exceed.
    pub(crate) fn quantile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.buckets.iter().map(|count| u64::from(*count)).sum();
        let rank = (all as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= rank {
                let ms = LEAST_MS * RATIO.powf(bucket as f64 + 0.5);
                return Some((ms * 100.0).round() / 100.0);
            }
        }
        None
    }
}
