//! Calls as numbers.

use serde_json::{Value, json};

use crate::wire::{Call, Reply};

/// The calls of a round, of all processes.
pub(crate) fn calls(replies: &[Reply]) -> Vec<Call> {
    replies.iter().flat_map(|reply| reply.calls.iter().cloned()).collect()
}

/// Count, errors and latencies of some calls.
pub(crate) fn summary(calls: &[Call]) -> Value {
    let latencies = latencies(calls);
    let errors: Vec<_> = calls.iter().filter(|call| call.2.starts_with('!')).collect();
    let unanswered = errors.iter().filter(|call| call.2 == "!no answer").count();
    json!({
        "calls": calls.len(),
        "errors": errors.len(),
        "unanswered": unanswered,
        "first_error": errors.first().map(|call| call.2[1..].to_owned()),
        "p50_ms": quantile(&latencies, 0.5),
        "p99_ms": quantile(&latencies, 0.99),
        "max_ms": quantile(&latencies, 1.0),
    })
}

/// Sorted, in milliseconds.
pub(crate) fn latencies(calls: &[Call]) -> Vec<f64> {
    let mut latencies: Vec<_> = calls.iter().map(|call| call.1 as f64 / 1e3).collect();
    latencies.sort_by(f64::total_cmp);
    latencies
}

/// The quantile of sorted numbers, rounded to a hundredth.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len().max(1));
    round(sorted.get(at - 1).copied().unwrap_or_default())
}

pub(crate) fn round(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}

/// Latencies for a plot: each twentieth, then the last hundredths.
pub(crate) fn distribution(calls: &[Call]) -> Vec<[f64; 2]> {
    let latencies = latencies(calls);
    let shares = (0..20).map(|n| f64::from(n) / 20.0).chain([0.95, 0.99, 1.0]);
    shares.map(|share| [share, quantile(&latencies, share)]).collect()
}

/// The version of a value whose id is `v<version>-<load>`.
pub(crate) fn version(outcome: &str) -> Option<u64> {
    outcome.strip_prefix("=v")?.split('-').next()?.parse().ok()
}
