//! What a process reports of itself, as JSON: all times in milliseconds, keys as their escaped texts.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::flight::waiter::FlightProgress;
use crate::guard_state::GuardState;
use crate::health::Health;
use crate::key::{FlightKey, Key, LoadMode};
use crate::observe::PolicyCounters;
use crate::observe::hot_keys::CountedKey;

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

/// The JSON text of a report, in at most `most` bytes: first without routes, then with ever shorter lists.
pub(super) fn within(mut report: Value, most: usize) -> Vec<u8> {
    let mut text = report.to_string();
    if text.len() > most {
        report["is_shortened"] = true.into();
        for policy in report["policies"].as_array_mut().into_iter().flatten() {
            policy["routes"] = Value::Array(Vec::new());
        }
        text = report.to_string();
    }
    // Each round takes half of each list.
    while text.len() > most && shorten_all(&mut report) {
        text = report.to_string();
    }
    text.into_bytes()
}

/// Takes away half of each list; returns whether any had elements.
fn shorten_all(report: &mut Value) -> bool {
    ["policies", "hot", "loads"].map(|list| shorten(report, list)).contains(&true)
}

/// Takes away half of a list, at least one; returns whether there was one.
fn shorten(report: &mut Value, list: &str) -> bool {
    let Some(length) = report[list].as_array().map(Vec::len).filter(|length| *length > 0) else {
        return false;
    };
    if let Some(list) = report[list].as_array_mut() {
        list.truncate(length / 2);
    }
    if list == "loads" {
        let left_out = report["loads_left_out"].as_u64().unwrap_or_default();
        report["loads_left_out"] = (left_out + (length - length / 2) as u64).into();
    }
    true
}

/// What a process reports of itself.
pub(super) fn process(state: &Arc<GuardState>, identity: &Identity, began: Instant) -> Value {
    let local = state.local.health();
    let loads = state.flights.oldest(MOST_LOADS);
    let left_out = state.flights.len().saturating_sub(loads.len());
    let loads: Vec<_> = loads.into_iter().map(|(flight, progress)| load(state, &flight, progress)).collect();
    let stats = Value::from_iter(state.stats().named());
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

fn load(state: &GuardState, flight: &FlightKey, progress: FlightProgress) -> Value {
    let FlightProgress { age, waiters, loads, lease_remaining } = progress;
    json!({
        "key": flight.key.name_within(&state.namespace),
        "digest": format!("#{}", flight.key.digest()),
        "age_ms": millis(age),
        "waiters": waiters,
        "mode": mode(flight.mode),
        "attempts": loads,
        "lease_remaining_ms": lease_remaining.map(millis),
        "phase": if loads == 0 { "waiting" } else { "loading" },
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
        let requests = Value::from_iter(requests.stats().requests_named());
        routes.push(json!({ "route": &**route, "requests": requests }));
    });
    json!({
        "name": &*policy.name,
        "requests": Value::from_iter(policy.request_stats().requests_named()),
        "loads": sum("stampede_guard_loads_total"),
        "load_failures": sum("stampede_guard_load_failures_total"),
        "routes": routes,
    })
}

/// What a process knows of one key.
pub(super) fn key(state: &Arc<GuardState>, full: &str) -> Value {
    let key = Key::of_full(full);
    let flight = LoadMode::ALL.into_iter().find_map(|mode| {
        let flight = FlightKey { key: key.clone(), mode };
        let progress = state.flights.progress_of(&flight)?;
        Some(load(state, &flight, progress))
    });
    json!({ "process": process_id(state), "has_copy": state.local.has_copy(&key), "load": flight })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_that_is_too_long_loses_its_routes_first_and_says_so() {
        let route = |n: usize| json!({ "route": format!("/a/long/route/{n}"), "requests": { "hits": 1 } });
        let routes = || (0..200).map(route).collect::<Vec<_>>();
        let policy = |n: usize| json!({ "name": format!("p{n}"), "routes": routes() });
        let load = |n: usize| json!({ "key": "k".repeat(n) });
        let report = |loads: usize| {
            json!({
                "process": "p",
                "policies": (0..2).map(policy).collect::<Vec<_>>(),
                "loads": (0..loads).map(load).collect::<Vec<_>>(),
                "loads_left_out": 5,
                "hot": [],
            })
        };
        let read = |text: Vec<u8>| serde_json::from_slice::<Value>(&text).expect("JSON");
        let whole = read(within(report(3), 100_000));
        assert!(whole["is_shortened"].is_null());
        assert_eq!(whole["policies"][0]["routes"][199]["requests"]["hits"], 1);
        let shorter = read(within(report(3), 2_000));
        assert_eq!(
            (&shorter["is_shortened"], shorter["loads"].as_array().map(Vec::len)),
            (&json!(true), Some(3))
        );
        let without_routes = json!([{ "name": "p0", "routes": [] }, { "name": "p1", "routes": [] }]);
        assert_eq!(shorter["policies"], without_routes);
        let shortest = read(within(report(100), 2_000));
        let kept = shortest["loads"].as_array().map_or(0, Vec::len);
        assert!((1..100).contains(&kept), "{shortest}");
        assert_eq!(shortest["loads_left_out"], 5 + 100 - kept);
    }
}
