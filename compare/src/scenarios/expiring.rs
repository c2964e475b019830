//! A hot key that expires: four processes ask for it 1,000 times a second, for nine seconds. It lives for two seconds; a load takes
//! 200 ms. With a stale window of ten seconds, and without one.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Measured, lacking};
use crate::fleet::{Fleet, Options, TIMEOUT_MS, burst, now_ms};
use crate::participants::Participant;
use crate::stats::{calls, distribution, round, summary};
use crate::wire::Command;

const PROCESSES: usize = 4;
const PER_SECOND: u64 = 250;
const SECONDS: f64 = 9.0;
const TTL_MS: u64 = 2_000;

pub(super) fn plain(participant: &Participant) -> Measured {
    run(participant, 0)
}

pub(super) fn stale(participant: &Participant) -> Measured {
    run(participant, 10_000)
}

fn run(participant: &Participant, stale_ms: u64) -> Measured {
    let options = Options { processes: PROCESSES, ttl_ms: TTL_MS, stale_ms, ..Options::default() };
    let mut fleet = Fleet::start(participant, options)?;
    let needs: &[&str] = if stale_ms == 0 { &["expiry"] } else { &["expiry", "stale"] };
    if let Some(cell) = lacking(&fleet, needs) {
        return cell;
    }
    let key = "hot".to_owned();
    // Every process has the value before the clock starts.
    for replica in &mut fleet.replicas {
        replica.ask(burst(std::slice::from_ref(&key), 1, now_ms()))?;
    }
    fleet.origin.reset();
    let (start, at_ms) = (Instant::now() + Duration::from_millis(150), now_ms() + 150.0);
    let command =
        Command::Rate { key, per_second: PER_SECOND, seconds: SECONDS, at_ms, timeout_ms: TIMEOUT_MS };
    let mut replies = fleet.ask_all(&command)?;
    // In the first second interpreters compile what they run; it counts for loads and not for latencies.
    for reply in &mut replies {
        reply.calls.drain(..(PER_SECOND as usize).min(reply.calls.len()));
    }
    let calls = calls(&replies);
    let mut cell = summary(&calls);
    // A call's latency counts from the moment at which it was due, also if its process was late.
    let due: Vec<_> =
        calls.iter().map(|(late, took, id)| (0, (*late).max(0) as u64 + took, id.clone())).collect();
    for (name, value) in
        summary(&due).as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_ms"))
    {
        cell[name.as_str()] = value.clone();
    }
    cell["loads"] = json!(fleet.origin.loads());
    cell["timeline"] = json!(fleet.origin.times(start).into_iter().map(round).collect::<Vec<_>>());
    cell["distribution"] = json!(distribution(&due));
    Ok((fleet.ready.version.clone(), cell))
}
