//! An answer that may not be stored: 2 x 20 callers ask for a cold key, and each value says that it is private.
//!
//! A library that lines up its callers for such an answer makes the last one wait for all others.

use std::collections::HashMap;

use serde_json::json;

use super::{Measured, lacking};
use crate::fleet::{Fleet, Options, burst, now_ms};
use crate::origin::Kind;
use crate::participants::Participant;
use crate::stats::{calls, summary};

const ROUNDS: usize = 2;

pub(super) fn run(participant: &Participant) -> Measured {
    let mut fleet =
        Fleet::start(participant, Options { processes: 2, kind: Kind::Private, ..Options::default() })?;
    if let Some(cell) = lacking(&fleet, &["uncacheable"]) {
        return cell;
    }
    let (mut each, mut all) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        fleet.origin.reset();
        let replies = fleet.ask_all(&burst(&[format!("private-{round}")], 20, now_ms() + 100.0))?;
        let calls = calls(&replies);
        let mut versions = HashMap::<_, usize>::new();
        for call in calls.iter().filter(|call| call.2.starts_with('=')) {
            *versions.entry(&call.2).or_default() += 1;
        }
        let mut one = summary(&calls);
        one["loads"] = json!(fleet.origin.loads());
        one["shared"] = json!(versions.values().filter(|&&count| count > 1).sum::<usize>());
        each.push(one);
        all.extend(calls);
    }
    let most = |name: &str| each.iter().filter_map(|round| round[name].as_u64()).max();
    let mut cell = summary(&all);
    cell["loads"] = json!(most("loads"));
    cell["shared"] = json!(most("shared"));
    cell["rounds"] = json!(each);
    Ok((fleet.ready.version.clone(), cell))
}
