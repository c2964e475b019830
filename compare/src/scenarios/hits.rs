//! Throughput and latency of hits: 64 callers of one process, values of 1 KiB; different keys, and one hot key.
//!
//! All subjects' processes stay; in each round each has one second, in turn, beside none of the others.

use serde_json::{Value, json};

use crate::fleet::{Fleet, Options};
use crate::participants::{ALL, Participant, is_selected};
use crate::results::{Results, load};
use crate::stats::round;
use crate::wire::{Command, Hits};

const ROUNDS: usize = 5;
const CALLERS: usize = 64;
const KEYS: usize = 1_024;
const MS: u64 = 700;

struct Side {
    participant: &'static Participant,
    fleet: Fleet,
    /// Rounds of different keys, and of one.
    rounds: [Vec<Hits>; 2],
}

/// Measures those that are selected, and the plain GET beside them; whether all could be measured.
pub(super) fn run(results: &mut Results) -> bool {
    let load = load();
    let mut all_well = true;
    let mut sides = Vec::new();
    for participant in ALL.iter().filter(|each| each.name == "redis-get" || is_selected("ONLY", each.name)) {
        match start(participant) {
            Ok(fleet) if fleet.lacks().contains_key("hits") => {}
            Ok(fleet) => sides.push(Side { participant, fleet, rounds: [Vec::new(), Vec::new()] }),
            Err(error) => {
                println!("{:13} {:18} {error}", "hits", participant.name);
                results.keep(participant.name, "?", load, json!({ "failed": error }));
                all_well = false;
            }
        }
    }
    // One round to warm up.
    for number in 0..=ROUNDS {
        for side in &mut sides {
            for (kind, keys) in [KEYS, 1].into_iter().enumerate() {
                let command = Command::Hits { prefix: "hit-".to_owned(), keys, callers: CALLERS, ms: MS };
                match side.fleet.replicas[0].ask(command).map(|reply| reply.hits) {
                    Ok(Some(hits)) if number > 0 => side.rounds[kind].push(hits),
                    Ok(_) => {}
                    Err(error) => {
                        println!("{:13} {:18} {error}", "hits", side.participant.name);
                        all_well = false;
                    }
                }
            }
        }
    }
    for side in sides {
        let cell = json!({ "distinct": kind(&side.rounds[0]), "hot": kind(&side.rounds[1]) });
        println!("{:13} {:18}          {}", "hits", side.participant.name, super::summary(&cell));
        results.keep(side.participant.name, &side.fleet.ready.version, load, cell);
    }
    all_well
}

fn start(participant: &Participant) -> Result<Fleet, String> {
    let mut fleet =
        Fleet::start(participant, Options { latency_ms: 0, ttl_ms: 3_600_000, ..Options::default() })?;
    if !fleet.lacks().contains_key("hits") {
        let filled = fleet.replicas[0].ask(Command::Fill { prefix: "hit-".to_owned(), keys: KEYS })?;
        if let Some(error) = filled.error {
            return Err(format!("filling: {error}"));
        }
    }
    Ok(fleet)
}

fn kind(rounds: &[Hits]) -> Value {
    let sorted = |of: fn(&Hits) -> f64| {
        let mut values: Vec<_> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let (rates, p50, p99) =
        (sorted(|hits| hits.per_second), sorted(|hits| hits.p50_us), sorted(|hits| hits.p99_us));
    let middle = |values: &[f64]| values.get(values.len() / 2).copied().unwrap_or_default();
    json!({
        "per_second": middle(&rates).round(),
        "slowest": rates.first().copied().unwrap_or_default().round(),
        "fastest": rates.last().copied().unwrap_or_default().round(),
        "p50_us": round(middle(&p50)),
        "p99_us": round(middle(&p99)),
        "wrong": rounds.iter().map(|hits| hits.wrong).sum::<u64>(),
    })
}
