//! An invalidation during a load: A loads a key for 300 ms. 100 ms after it began the origin changes, and the key is invalidated: by A
//! itself, or by B. When the load is done, both are read again. An older value then is wrong: it stays for its whole lifetime.

use std::thread::sleep;
use std::time::Duration;

use serde_json::json;

use super::{Measured, lacking};
use crate::fleet::{Fleet, Options, burst, now_ms};
use crate::participants::Participant;
use crate::stats::version;
use crate::wire::Command;

const TRIALS: usize = 5;

pub(super) fn run(participant: &Participant) -> Measured {
    let mut fleet =
        Fleet::start(participant, Options { processes: 2, latency_ms: 300, ..Options::default() })?;
    if let Some(cell) = lacking(&fleet, &["invalidate"]) {
        return cell;
    }
    let mut old = [[0, 0], [0, 0]];
    let (mut took, mut failed) = (Vec::new(), None);
    for trial in 0..2 * TRIALS {
        let by_b = trial % 2;
        let key = [format!("change-{trial}")];
        let start = now_ms() + 60.0;
        let led = fleet.replicas[0].send(burst(&key, 1, start))?;
        sleep(Duration::from_secs_f64(((start + 100.0 - now_ms()) / 1e3).max(0.0)));
        let current = fleet.origin.change();
        let begun = std::time::Instant::now();
        let reply = fleet.replicas[by_b].ask(Command::Invalidate { key: key[0].clone() })?;
        took.push(begun.elapsed().as_secs_f64() * 1e3);
        failed = failed.or(reply.error);
        fleet.replicas[0].reply(led)?;
        // The value is stored by then, if it is.
        sleep(Duration::from_millis(40));
        let reads: Vec<_> =
            fleet.replicas.iter_mut().map(|replica| replica.send(burst(&key, 1, now_ms()))).collect();
        for (reader, id) in reads.into_iter().enumerate() {
            let reply = fleet.replicas[reader].reply(id?)?;
            let seen = reply.calls.first().and_then(|call| version(&call.2));
            if seen.is_none_or(|seen| seen < current) {
                old[by_b][reader] += 1;
            }
        }
    }
    took.sort_by(f64::total_cmp);
    let cell = json!({
        "trials": TRIALS,
        "by_a": { "old_in_a": old[0][0], "old_in_b": old[0][1] },
        "by_b": { "old_in_a": old[1][0], "old_in_b": old[1][1] },
        "invalidate_p50_ms": crate::stats::quantile(&took, 0.5),
        "first_error": failed,
    });
    Ok((fleet.ready.version.clone(), cell))
}
