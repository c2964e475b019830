//! The settings that the page changes, with their bounds.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// How the replicas answer requests.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// A plain cache in the same store, without the guard: read; on a miss load and write.
    Off,
    /// The guard with its defaults.
    On,
    /// The guard, which serves stale values while it loads, and when the origin fails.
    Stale,
    /// The guard with copies in each replica's memory.
    Local,
    /// The guard, which runs only as many loads at once as the origin can take.
    Adaptive,
}

impl Mode {
    /// As the page and the sentences name it.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Off => "guard off",
            Self::On => "guard on",
            Self::Stale => "guard with stale windows",
            Self::Local => "guard with the local tier",
            Self::Adaptive => "guard with adaptive loads",
        }
    }
}

/// All settings. `POST /control` changes some of them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Controls {
    pub(crate) requests_per_second: u64,
    pub(crate) replicas: u64,
    pub(crate) keys: u64,
    pub(crate) latency_ms: u64,
    pub(crate) capacity: u64,
    pub(crate) slowdown_percent: u64,
    pub(crate) failure_percent: u64,
    pub(crate) mode: Mode,
    pub(crate) fresh_ms: u64,
    pub(crate) body_bytes: u64,
    pub(crate) private: bool,
    pub(crate) wait_timeout_ms: u64,
    pub(crate) audit_percent: u64,
}

impl Default for Controls {
    /// An origin that has room for four times the loads of a fleet with the guard, and for fewer than those of a plain cache.
    fn default() -> Self {
        Self {
            requests_per_second: 600,
            replicas: 6,
            keys: 30,
            latency_ms: 300,
            capacity: 8,
            slowdown_percent: 0,
            failure_percent: 0,
            mode: Mode::On,
            fresh_ms: 5_000,
            body_bytes: 1_024,
            private: false,
            wait_timeout_ms: 0,
            audit_percent: 0,
        }
    }
}

/// A setting that is a number: its name, its least and its largest value, and its unit.
pub(crate) struct Limit {
    name: &'static str,
    least: u64,
    most: u64,
    unit: &'static str,
}

const fn limit(name: &'static str, least: u64, most: u64, unit: &'static str) -> Limit {
    Limit { name, least, most, unit }
}

const LIMITS: [Limit; 11] = [
    limit("requests_per_second", 0, 5_000, "requests a second"),
    limit("replicas", 1, 12, "replicas"),
    limit("keys", 1, 500, "keys"),
    limit("latency_ms", 0, 10_000, "ms"),
    limit("capacity", 1, 500, "loads at once"),
    limit("slowdown_percent", 0, 100, "percent of the latency for each queued load"),
    limit("failure_percent", 0, 100, "percent"),
    limit("fresh_ms", 200, 600_000, "ms"),
    limit("body_bytes", 64, 4_194_304, "bytes"),
    limit("wait_timeout_ms", 0, 60_000, "ms (0 is the default of the policy)"),
    limit("audit_percent", 0, 100, "percent of the hits"),
];

impl Controls {
    /// These settings with some of them changed.
    ///
    /// # Errors
    ///
    /// A sentence that says which setting is wrong, and what to choose.
    pub(crate) fn changed(&self, changes: &Map<String, Value>) -> Result<Self, String> {
        let mut all = match serde_json::to_value(self) {
            Ok(Value::Object(all)) => all,
            _ => return Err("the settings can not be written as JSON".to_owned()),
        };
        for (name, value) in changes {
            check(name, value)?;
            all.insert(name.clone(), value.clone());
        }
        serde_json::from_value(Value::Object(all)).map_err(|error| error.to_string())
    }

    /// The bounds of all numbers, for the page's inputs.
    pub(crate) fn limits() -> Value {
        LIMITS.iter().map(|limit| (limit.name.to_owned(), json!([limit.least, limit.most]))).collect()
    }

    /// What a replica needs to know of the settings.
    pub(crate) fn for_replica(&self) -> ReplicaSettings {
        let Self { mode, fresh_ms, wait_timeout_ms, audit_percent, .. } = *self;
        ReplicaSettings { mode, fresh_ms, wait_timeout_ms, audit_percent }
    }

    /// How long a load takes behind which this many others queue.
    pub(crate) fn latency(&self, queue: usize) -> Duration {
        Duration::from_millis(self.latency_ms * (100 + self.slowdown_percent * queue as u64) / 100)
    }

    /// How many loads a second the origin can finish.
    pub(crate) fn loads_per_second(&self) -> f64 {
        self.capacity as f64 * 1000.0 / self.latency_ms.max(1) as f64
    }
}

/// The settings that are sent to each replica.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct ReplicaSettings {
    pub(crate) mode: Mode,
    pub(crate) fresh_ms: u64,
    pub(crate) wait_timeout_ms: u64,
    pub(crate) audit_percent: u64,
}

/// Checks one change.
fn check(name: &str, value: &Value) -> Result<(), String> {
    let label = name.replace('_', " ");
    if let Some(limit) = LIMITS.iter().find(|limit| limit.name == name) {
        let Limit { least, most, unit, .. } = limit;
        let choose = format!("choose a whole number from {least} to {most} {unit}");
        return match value.as_u64() {
            Some(number) if (*least..=*most).contains(&number) => Ok(()),
            _ => Err(format!("{label} is {value}: {choose}")),
        };
    }
    match (name, value) {
        ("private", Value::Bool(_)) => Ok(()),
        ("private", _) => Err(format!("{label} is {value}: choose true or false")),
        ("mode", Value::String(mode))
            if ["off", "on", "stale", "local", "adaptive"].contains(&mode.as_str()) =>
        {
            Ok(())
        }
        ("mode", _) => {
            Err(format!("mode is {value}: choose \"off\", \"on\", \"stale\", \"local\" or \"adaptive\""))
        }
        _ => {
            let names = LIMITS.iter().map(|limit| limit.name).collect::<Vec<_>>().join(", ");
            Err(format!("there is no setting `{name}`: choose one of mode, private, {names}"))
        }
    }
}
