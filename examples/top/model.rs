//! The state of the view: the fleet of the latest answer, the rates of the last minutes, and the operator's choices.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::rates::Rates;

/// A larger number is taken for none, so that no sum is infinite.
const LARGEST: f64 = 1e18;
/// The most hot keys that are listed.
const MOST_HOT: usize = 50;

/// A number of an answer; `None` if it is missing or has another type.
pub(crate) fn number(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.abs() <= LARGEST)
}

pub(crate) fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

/// The objects of a list; none if it is no list.
pub(crate) fn objects(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten().filter(|value| value.is_object())
}

/// A part of the screen with rows that can be scrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Processes,
    Loads,
    Requests,
    Hot,
}

impl Section {
    /// In the order of the key tab.
    pub(crate) const ALL: [Self; 4] = [Self::Processes, Self::Loads, Self::Requests, Self::Hot];
}

#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) name: String,
    /// `None` for a process that has answered.
    pub(crate) silent: Option<Silent>,
    pub(crate) version: Option<String>,
    pub(crate) uptime_ms: Option<f64>,
    pub(crate) commands: Option<String>,
    pub(crate) breaker: Option<String>,
    /// Why the connection is down.
    pub(crate) reason: Option<String>,
    pub(crate) inbox: Option<String>,
    pub(crate) inbox_lag_ms: Option<f64>,
    pub(crate) flights: Option<f64>,
    pub(crate) loads: Option<f64>,
    pub(crate) copies: Option<f64>,
    pub(crate) copied_bytes: Option<f64>,
    pub(crate) kept_invalidations: Option<f64>,
    pub(crate) is_bypassed: bool,
}

#[derive(Debug)]
pub(crate) struct Silent {
    pub(crate) last_answer_ms_ago: Option<f64>,
}

/// How a process is displayed, and the order of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// Its requests go on without Redis.
    Broken,
    /// It is silent, bypassed, or receives no notifications.
    Unusual,
    None,
}

impl Process {
    fn read(process: &Value) -> Self {
        let owned = |value: &Value| text(value).map(str::to_owned);
        let (health, stats, local) = (&process["health"], &process["stats"], &process["local"]);
        let loads = process["loads"].as_array().map(|loads| {
            loads.len() as f64 + number(&process["loads_left_out"]).unwrap_or_default().max(0.0)
        });
        let is_silent = process["state"] == "silent";
        Self {
            name: name(process),
            silent: is_silent.then(|| Silent { last_answer_ms_ago: number(&process["last_answer_ms_ago"]) }),
            version: owned(&process["version"]),
            uptime_ms: number(&process["uptime_ms"]),
            commands: owned(&health["commands"]),
            breaker: owned(&health["breaker"]),
            reason: owned(&health["reason"]),
            inbox: owned(&health["inbox"]),
            inbox_lag_ms: number(&health["inbox_lag_ms"]),
            flights: number(&stats["flights"]),
            loads,
            copies: number(&local["copies"]),
            copied_bytes: number(&local["bytes"]),
            kept_invalidations: number(&stats["kept_invalidations"]),
            is_bypassed: process["is_bypassed"] == true,
        }
    }

    pub(crate) fn trouble(&self) -> Trouble {
        let is_failing =
            |state: &Option<String>| matches!(state.as_deref(), Some("down" | "refused" | "closed"));
        if self.has_open_breaker() || is_failing(&self.commands) {
            Trouble::Broken
        } else if self.silent.is_some() || self.is_bypassed || is_failing(&self.inbox) {
            Trouble::Unusual
        } else {
            Trouble::None
        }
    }

    pub(crate) fn has_open_breaker(&self) -> bool {
        self.breaker.as_deref().is_some_and(|breaker| breaker != "closed")
    }
}

/// The name of a process, or else the first digits of its id.
fn name(process: &Value) -> String {
    let id = || text(&process["process"]).map(|id| id.chars().take(8).collect());
    text(&process["name"]).map(str::to_owned).or_else(id).unwrap_or_default()
}

/// A load in progress.
#[derive(Debug)]
pub(crate) struct Load {
    /// The key, or its digest if the key is not exposed.
    pub(crate) key: String,
    pub(crate) process: String,
    pub(crate) age_ms: Option<f64>,
    pub(crate) waiters: Option<f64>,
    pub(crate) mode: Option<String>,
}

/// A key with many requests in the last minute.
#[derive(Debug)]
pub(crate) struct HotKey {
    pub(crate) key: String,
    pub(crate) requests: f64,
    /// By how much `requests` may be too high.
    pub(crate) error: f64,
    pub(crate) processes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) namespace: String,
    /// Those with a trouble first, then by name; without the process of this view.
    pub(crate) processes: Vec<Process>,
    /// The slowest first.
    pub(crate) loads: Vec<Load>,
    /// How many loads the processes have beside these.
    pub(crate) loads_left_out: f64,
    /// The hottest first.
    pub(crate) hot: Vec<HotKey>,
    pub(crate) rates: Rates,
    /// How many messages were no answers.
    pub(crate) unreadable: f64,
    pub(crate) took_ms: Option<f64>,
    /// Why the latest request has no answer of the fleet.
    pub(crate) error: Option<String>,
    /// When the data was received, and when the latest request ended.
    received_at: Option<Instant>,
    latest_at: Option<Instant>,
    pub(crate) is_paused: bool,
    pub(crate) focus: usize,
    /// The first row that is displayed, by section.
    pub(crate) scrolls: [usize; Section::ALL.len()],
}

impl Model {
    /// Takes an answer of `GET /api/fleet`. An answer without the other processes keeps the data of the preceding one, and says why.
    pub(crate) fn take(&mut self, answer: Value, at: Instant) {
        if let Some(namespace) = text(&answer["namespace"]) {
            self.namespace = namespace.to_owned();
        }
        if let Some(error) = text(&answer["error"]) {
            return self.miss(error.to_owned(), at);
        }
        let processes: Vec<_> =
            objects(&answer["processes"]).filter(|process| process["is_this"] != true).collect();
        (self.error, self.received_at, self.latest_at) = (None, Some(at), Some(at));
        self.unreadable = number(&answer["unreadable"]).unwrap_or_default().max(0.0);
        self.took_ms = number(&answer["took_ms"]);
        self.rates.take(&processes, at);
        self.loads_left_out = processes
            .iter()
            .filter_map(|process| number(&process["loads_left_out"]))
            .map(|left| left.max(0.0))
            .sum();
        self.loads = loads(&processes);
        self.hot = hot_keys(&processes);
        self.processes = processes.into_iter().map(Process::read).collect();
        self.processes.sort_by(|a, b| a.trouble().cmp(&b.trouble()).then_with(|| a.name.cmp(&b.name)));
    }

    /// A request had no answer of the fleet.
    pub(crate) fn miss(&mut self, error: String, at: Instant) {
        (self.error, self.latest_at) = (Some(error), Some(at));
        self.rates.skip();
    }

    /// How old the data was when the latest request ended; `None` without data.
    pub(crate) fn age(&self) -> Option<Duration> {
        Some(self.latest_at?.saturating_duration_since(self.received_at?))
    }

    pub(crate) fn silent(&self) -> usize {
        self.processes.iter().filter(|process| process.silent.is_some()).count()
    }

    pub(crate) fn focused(&self) -> Section {
        Section::ALL[self.focus % Section::ALL.len()]
    }
}

fn loads(processes: &[&Value]) -> Vec<Load> {
    let mut loads: Vec<_> = processes
        .iter()
        .flat_map(|process| objects(&process["loads"]).map(move |load| (process, load)))
        .map(|(process, load)| Load {
            key: text(&load["key"]).or_else(|| text(&load["digest"])).unwrap_or_default().to_owned(),
            process: name(process),
            age_ms: number(&load["age_ms"]),
            waiters: number(&load["waiters"]),
            mode: text(&load["mode"]).map(str::to_owned),
        })
        .collect();
    loads.sort_by(|a, b| b.age_ms.unwrap_or(-1.0).total_cmp(&a.age_ms.unwrap_or(-1.0)));
    loads
}

/// The hot keys of all processes, each with the sum of its requests.
fn hot_keys(processes: &[&Value]) -> Vec<HotKey> {
    let mut sums = HashMap::<&str, HotKey>::new();
    for hot in processes.iter().flat_map(|process| objects(&process["hot"])) {
        let (Some(key), Some(requests)) = (text(&hot["key"]), number(&hot["count"])) else { continue };
        let new = || HotKey { key: key.to_owned(), requests: 0.0, error: 0.0, processes: 0 };
        let sum = sums.entry(key).or_insert_with(new);
        sum.requests += requests;
        sum.error += number(&hot["error"]).unwrap_or_default();
        sum.processes += 1;
    }
    let mut keys: Vec<_> = sums.into_values().collect();
    keys.sort_by(|a, b| b.requests.total_cmp(&a.requests).then_with(|| a.key.cmp(&b.key)));
    keys.truncate(MOST_HOT);
    keys
}
