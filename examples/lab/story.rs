//! The sentences that explain the last events.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::board::Board;
use crate::controls::{Controls, Mode};

/// How many sentences are stored.
const MAX_SENTENCES: usize = 60;
/// How long after the loss of a replica another one's load is reported as its continuation.
const TAKEOVER_MS: u64 = 8_000;
/// Sentences about ordinary loads come no more often than that.
const ORDINARY_MS: u64 = 6_000;

/// A load at the origin, and the replica that requested it.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) key: u64,
    pub(crate) replica: usize,
    pub(crate) began_ms: u64,
}

/// The name of a key, as the page shows it.
pub(crate) fn report(key: u64) -> String {
    format!("report:{key}")
}

/// A time as a sentence has it.
pub(crate) fn seconds(ms: u64) -> String {
    if ms < 100 { format!("{ms} ms") } else { format!("{:.1} s", ms as f64 / 1e3) }
}

/// A number of things.
pub(crate) fn number(count: u64, one: &str, many: &str) -> String {
    match count {
        0 => format!("no {many}"),
        1 => format!("1 {one}"),
        _ => format!("{} {many}", grouped(count)),
    }
}

/// A number with a comma between each three digits.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(crate) struct Story {
    board: Arc<Board>,
    controls: watch::Receiver<Controls>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number, time and text.
    events: VecDeque<(u64, u64, String)>,
    count: u64,
    /// Replicas that load a key now.
    loading: HashMap<u64, Vec<usize>>,
    lost: Vec<LostLoad>,
    ordinary_ms: u64,
    /// Since when the origin has fallen behind.
    behind_ms: Option<u64>,
}

/// A load whose replica was lost.
struct LostLoad {
    load: Load,
    lost_ms: u64,
    how: &'static str,
}

impl Story {
    pub(crate) fn new(board: Arc<Board>, controls: watch::Receiver<Controls>) -> Arc<Self> {
        Arc::new(Self { board, controls, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sentence, and returns it.
    pub(crate) fn say(&self, text: impl Into<String>) -> String {
        let text = text.into();
        self.state().say(self.board.now_ms(), text.clone());
        text
    }

    pub(crate) fn to_json(&self) -> Value {
        let state = self.state();
        let events = state.events.iter();
        events.map(|(id, at_ms, text)| json!({ "id": id, "at_ms": at_ms, "text": text })).collect()
    }

    fn mode(&self) -> Mode {
        self.controls.borrow().mode
    }

    /// Reports that a replica was lost, and remembers its loads: another replica goes on with them.
    pub(crate) fn replica_lost(&self, replica: usize, how: &'static str, loads: Vec<Load>) -> String {
        let now = self.board.now_ms();
        let text = match loads.first() {
            None => format!("Replica {replica} {how}. It loaded nothing at that moment."),
            Some(load) if self.mode() == Mode::Off => {
                format!("Replica {replica} {how} while it loaded {}.", report(load.key))
            }
            Some(load) => format!(
                "Replica {replica} {how} while it loaded {}. Its lease ends within 2 s, then another replica loads.",
                report(load.key)
            ),
        };
        let state = &mut *self.state();
        if self.mode() != Mode::Off {
            // One of them stands for all.
            state.lost.extend(loads.into_iter().take(1).map(|load| LostLoad { load, lost_ms: now, how }));
        }
        state.say(now, text.clone());
        text
    }

    /// Called by the origin when a replica asks for a load.
    pub(crate) fn load_began(&self, key: u64, replica: usize) {
        let now = self.board.now_ms();
        let state = &mut *self.state();
        state.loading.entry(key).or_default().push(replica);
        state.lost.retain(|lost| now - lost.lost_ms < TAKEOVER_MS);
        let lost = state.lost.iter().position(|lost| lost.load.key == key && lost.load.replica != replica);
        if let Some(lost) = lost.map(|at| state.lost.swap_remove(at)) {
            let (was, how, key) = (lost.load.replica, lost.how, report(key));
            let after = seconds(now - lost.lost_ms);
            state.say(
                now,
                format!(
                    "Replica {was} {how} while it loaded {key}; replica {replica} went on after {after}."
                ),
            );
        }
    }

    /// Called by the origin when a load ends.
    pub(crate) fn load_ended(&self, key: u64, replica: usize, served: bool) {
        let waiting = self.board.waiting_for(key);
        let (now, mode) = (self.board.now_ms(), self.mode());
        let state = &mut *self.state();
        if let Some(loading) = state.loading.get_mut(&key) {
            if let Some(at) = loading.iter().position(|at| *at == replica) {
                loading.swap_remove(at);
            }
            if loading.is_empty() {
                state.loading.remove(&key);
            }
        }
        if mode == Mode::Off || waiting < 5 || !state.may_add_ordinary(now) {
            return;
        }
        let (key, waiting) = (report(key), number(waiting, "waiting request", "waiting requests"));
        let text = if served {
            format!("Replica {replica} loaded {key} once, for {waiting}.")
        } else {
            format!("The load of {key} by replica {replica} failed. {waiting} of the fleet are told at once.")
        };
        state.say_ordinary(now, text);
    }

    /// Looks for a herd and for an origin that falls behind; called with each sample.
    pub(crate) fn look(&self, queue: usize, loads_per_second: f64) {
        let now = self.board.now_ms();
        let (mode, capacity, finishes) = {
            let controls = self.controls.borrow();
            (controls.mode, controls.capacity as usize, controls.loads_per_second())
        };
        let state = &mut *self.state();
        match state.behind_ms {
            None if queue > 20.max(3 * capacity) => {
                state.behind_ms = Some(now);
                let text = format!(
                    "The origin falls behind: {loads_per_second:.0} loads a second come in, and it can finish {finishes:.0}."
                );
                state.say(now, text);
            }
            Some(since) if queue == 0 => {
                state.behind_ms = None;
                state.say(now, format!("The origin's queue is empty again, after {}.", seconds(now - since)));
            }
            _ => {}
        }
        let herd = state.loading.iter().max_by_key(|(_, replicas)| replicas.len());
        let Some((key, size)) = herd.map(|(key, replicas)| (*key, replicas.len())) else { return };
        if mode == Mode::Off && size >= 5 && state.may_add_ordinary(now) {
            let key = report(key);
            state.say_ordinary(
                now,
                format!("{size} requests load {key} at the same time: each miss is a load."),
            );
        }
    }
}

impl State {
    fn say(&mut self, now: u64, text: String) {
        self.count += 1;
        self.events.push_back((self.count, now, text));
        if self.events.len() > MAX_SENTENCES {
            self.events.pop_front();
        }
    }

    /// Whether the last sentences are old enough for one about ordinary loads, which must not hide them.
    fn may_add_ordinary(&self, now: u64) -> bool {
        let last = self.events.back().map_or(0, |(_, at, _)| *at);
        now.saturating_sub(last) > ORDINARY_MS / 2 && now.saturating_sub(self.ordinary_ms) > ORDINARY_MS
    }

    fn say_ordinary(&mut self, now: u64, text: String) {
        self.ordinary_ms = now;
        self.say(now, text);
    }
}
