//! The scenarios, and the order in which they run: each subject in turn, one at a time, so that none has the machine beside another.

mod cold;
mod expiring;
mod failing;
mod hits;
mod invalidation;
mod leader;
mod memory;
mod outage;
mod uncacheable;

use std::process::ExitCode;
use std::time::Instant;

use serde_json::{Value, json};

use crate::fleet::Fleet;
use crate::participants::{ALL, Participant, is_selected};
use crate::results::{Results, keep_machine, load};

/// The versions of a subject, and its cell.
pub(crate) type Measured = Result<(String, Value), String>;

type Scenario = (&'static str, fn(&Participant) -> Measured);

const SCENARIOS: [Scenario; 11] = [
    ("cold", cold::run),
    ("failing", failing::run),
    ("killed", leader::killed),
    ("paused", leader::paused),
    ("cancelled", leader::cancelled),
    ("uncacheable", uncacheable::run),
    ("outage", outage::run),
    ("expiring", expiring::plain),
    ("stale", expiring::stale),
    ("invalidation", invalidation::run),
    ("memory", memory::run),
];

/// Runs what `SCENARIO` and `ONLY` name, else everything.
pub(crate) fn run() -> ExitCode {
    let (begun, before) = (Instant::now(), load());
    let unknown = |variable: &str, known: &[&str]| {
        let names = std::env::var(variable).unwrap_or_default();
        let parts = names.split(',').map(str::trim).filter(|part| !part.is_empty());
        parts.filter(|part| !known.iter().any(|name| name.starts_with(part))).map(str::to_owned).next()
    };
    let scenarios: Vec<_> = SCENARIOS.iter().map(|&(name, _)| name).chain(["hits"]).collect();
    let subjects: Vec<_> = ALL.iter().map(|participant| participant.name).collect();
    for (variable, known) in [("SCENARIO", &scenarios), ("ONLY", &subjects)] {
        if let Some(name) = unknown(variable, known) {
            eprintln!("{variable}={name}: there is none with that name; there are {}", known.join(", "));
            return ExitCode::FAILURE;
        }
    }
    let mut failed = false;
    for (name, scenario) in SCENARIOS.iter().filter(|(name, _)| is_selected("SCENARIO", name)) {
        let mut results = Results::open(name);
        for participant in
            ALL.iter().filter(|each| each.name != "redis-get" && is_selected("ONLY", each.name))
        {
            let (started, load) = (Instant::now(), load());
            let (version, cell) = scenario(participant).unwrap_or_else(|error| {
                failed = true;
                ("?".to_owned(), json!({ "failed": error }))
            });
            println!(
                "{name:13} {:18} {:5.1} s  {}",
                participant.name,
                started.elapsed().as_secs_f64(),
                summary(&cell)
            );
            results.keep(participant.name, &version, load, cell);
        }
    }
    if is_selected("SCENARIO", "hits") {
        failed |= !hits::run(&mut Results::open("hits"));
    }
    let complete =
        ["SCENARIO", "ONLY"].iter().all(|variable| std::env::var(variable).unwrap_or_default().is_empty());
    keep_machine(before, begun.elapsed().as_secs_f64(), complete);
    if failed {
        eprintln!("a subject failed: VERBOSE=1 shows what its processes print");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// The cell of a library without a feature.
fn lacking(fleet: &Fleet, features: &[&str]) -> Option<Measured> {
    let reason = features.iter().find_map(|feature| fleet.lacks().get(*feature))?;
    Some(Ok((fleet.ready.version.clone(), json!({ "does_not": reason }))))
}

/// One line for the terminal.
fn summary(cell: &Value) -> String {
    let mut copy = cell.clone();
    fn shorten(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.retain(|name, _| !matches!(name.as_str(), "rounds" | "distribution" | "timeline"));
                fields.values_mut().for_each(shorten);
            }
            Value::Array(items) if items.len() > 8 => items.truncate(8),
            _ => {}
        }
    }
    shorten(&mut copy);
    copy.to_string()
}
