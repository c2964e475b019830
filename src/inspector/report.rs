//! What a process reports of itself, as JSON: all times in milliseconds, keys as their escaped texts.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::guard_state::GuardState;
use crate::health::Health;
use crate::key::{FlightKey, Key, LoadMode};
use crate::observe::hot_keys::CountedKey;
use crate::observe::{Outcome, PolicyCounters, Requests};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How many of the oldest loads a process reports.
const MOST_LOADS: usize = 50;
/// How many hot keys a process reports.
const MOST_HOT: usize = 30;

/// What a process says of itself, beside what its guard knows.
#[derive(Clone, Debug, Default)]
pub(super) struct Identity {
    pub(super) name: Option<Box<str>>,
    /// Whether the fleet may switch the guard off.
    pub(super) may_act: bool,
}

pub(super) fn process_id(state: &GuardState) -> String {
    state.store.node().simple().to_string()
}

pub(super) fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// The JSON text of a report, in at most `most` bytes: its lists are shortened until it is short enough.
pub(super) fn within(mut report: Value, most: usize) -> Vec<u8> {
    loop {
        let text = report.to_string().into_bytes();
        if text.len() <= most {
            return text;
        }
        let lists = ["policies", "hot", "loads"].map(|list| report[list].as_array().map_or(0, Vec::len));
        let longest = lists.iter().zip(["policies", "hot", "loads"]).max_by_key(|(length, _)| **length);
        match longest {
            Some((length, list)) if *length > 0 => {
                if let Some(list) = report[list].as_array_mut() {
                    list.truncate(length / 2);
                }
                report["is_shortened"] = true.into();
            }
            // Nothing else has a length that grows.
            _ => return json!({ "process": report["process"] }).to_string().into_bytes(),
        }
    }
}

/// What a process reports of itself.
pub(super) fn process(state: &Arc<GuardState>, identity: &Identity, began: Instant) -> Value {
    let local = state.local.health();
    let loads = state.flights.oldest(MOST_LOADS);
    let left_out = state.flights.len().saturating_sub(loads.len());
    let loads: Vec<_> =
        loads.into_iter().map(|(flight, age, waiters)| load(state, &flight, age, waiters)).collect();
    let stats = state.stats();
    let stats: Map<String, Value> =
        stats.named().into_iter().map(|(name, count)| (name.to_owned(), count.into())).collect();
    json!({
        "process": process_id(state),
        "name": identity.name,
        "pid": std::process::id(),
        "version": VERSION,
        "uptime_ms": millis(began.elapsed()),
        "health": health(&state.store.health()),
        "is_bypassed": state.is_bypassed(),
        "stats": stats,
        "local": local.map(|local| json!({
            "copies": local.copies,
            "bytes": local.bytes,
            "capacity": local.capacity,
            "lease_remaining_ms": millis(local.lease_remaining),
        })),
        "policies": state.counters.policies().iter().map(|policy| policy_counts(policy)).collect::<Vec<_>>(),
        "loads": loads,
        "loads_left_out": left_out,
        "hot": hot_keys(state),
    })
}

/// The hot keys of the last minute.
fn hot_keys(state: &GuardState) -> Vec<Value> {
    let hottest = state.hot_keys.get().map(|hot_keys| hot_keys.hottest(MOST_HOT)).unwrap_or_default();
    let counted = |(key, counted): (Box<str>, CountedKey)| json!({ "key": key, "count": counted.count, "error": counted.error });
    hottest.into_iter().map(counted).collect()
}

fn load(state: &GuardState, flight: &FlightKey, age: Duration, waiters: usize) -> Value {
    json!({
        "key": flight.key.name_within(&state.namespace),
        "digest": format!("#{}", flight.key.digest()),
        "age_ms": millis(age),
        "waiters": waiters,
        "mode": mode(flight.mode),
    })
}

fn mode(mode: LoadMode) -> &'static str {
    match mode {
        LoadMode::Leased => "under the lease",
        LoadMode::Unleased => "beside the lease",
        LoadMode::Probe => "probe",
        LoadMode::BackgroundRefresh => "in the background",
        LoadMode::ForcedReload => "forced",
    }
}

fn health(health: &Health) -> Value {
    json!({
        "topology": health.topology.to_string(),
        "commands": health.commands.to_string(),
        "open_connections": health.open_connections,
        "inbox": health.inbox.to_string(),
        "breaker": health.breaker.to_string(),
        "reason": health.reason,
        "outages": health.outages,
        "inbox_lag_ms": health.inbox_lag.map(millis),
        "clock_ahead_ms": health.clock.map(|clock| clock.ahead_ms),
    })
}

fn policy_counts(policy: &PolicyCounters) -> Value {
    let sum = |metric: &str| -> u64 {
        policy.counts.all().filter(|(name, ..)| *name == metric).map(|(.., counter)| counter.get()).sum()
    };
    let mut routes = Vec::new();
    policy.routes.each(|route, requests| {
        routes.push(json!({ "route": &**route, "requests": request_counts(requests) }));
    });
    json!({
        "name": &*policy.name,
        "requests": request_counts(policy.requests()),
        "loads": sum("stampede_guard_loads_total"),
        "load_failures": sum("stampede_guard_load_failures_total"),
        "routes": routes,
    })
}

fn request_counts(requests: &Requests) -> Value {
    let counts = requests.counts().into_iter().map(|(outcome, count)| {
        // Unlike in metrics, hits from memory have a name of their own.
        let name = match outcome {
            Outcome::LocalHit => "local_hits",
            Outcome::Hit => "hits",
            other => other.as_str(),
        };
        (name.to_owned(), count.into())
    });
    counts.collect::<Map<String, Value>>().into()
}

/// What a process knows of one key.
pub(super) fn key(state: &Arc<GuardState>, full: &str) -> Value {
    let key = Key::of_full(full);
    let flight = LoadMode::ALL.into_iter().find_map(|mode| {
        let flight = FlightKey { key: key.clone(), mode };
        let (age, waiters) = state.flights.progress_of(&flight)?;
        Some(load(state, &flight, age, waiters))
    });
    json!({ "process": process_id(state), "has_copy": state.local.has_copy(&key), "load": flight })
}
