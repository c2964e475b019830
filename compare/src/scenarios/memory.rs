//! Memory: of a process that is connected, of 10,000 values of 1 KiB in it, and of these in Redis.

use std::time::Duration;

use serde_json::json;

use super::{Measured, lacking};
use crate::fleet::{Fleet, Options};
use crate::participants::Participant;
use crate::stats::round;
use crate::support::redis_server::RedisServer;
use crate::wire::Command;

const KEYS: usize = 10_000;

pub(super) fn run(participant: &Participant) -> Measured {
    let mut fleet = Fleet::start(participant, Options { latency_ms: 0, ..Options::default() })?;
    if let Some(cell) = lacking(&fleet, &["memory"]) {
        return cell;
    }
    let (idle, server) = (fleet.replicas[0].memory(), used(&fleet.redis));
    let filled = fleet.replicas[0].ask(Command::Fill { prefix: "memory-".to_owned(), keys: KEYS })?;
    if let Some(error) = filled.error {
        return Err(format!("filling: {error}"));
    }
    // Writes in the background, and garbage of the moment.
    std::thread::sleep(Duration::from_millis(500));
    let stored = fleet.redis.run::<usize>(&["DBSIZE"]);
    let cell = json!({
        "idle_mib": round(idle),
        "full_mib": round(fleet.replicas[0].memory()),
        "redis_keys": stored,
        "redis_bytes_per_value": ((used(&fleet.redis) - server) / KEYS as f64).round().max(0.0),
    });
    Ok((fleet.ready.version.clone(), cell))
}

fn used(redis: &RedisServer) -> f64 {
    let info: String = redis.run(&["INFO", "memory"]);
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
    line.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or_default()
}
