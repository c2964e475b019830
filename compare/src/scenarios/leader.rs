//! The process or the caller that loads a cold key is killed, paused or cancelled.
//!
//! A asks first. 20 callers of B ask 100 ms later; 200 ms after that A is killed or paused. A load takes one second.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Measured, lacking};
use crate::fleet::{Fleet, Options, TIMEOUT_MS, burst, now_ms};
use crate::participants::Participant;
use crate::stats::{calls, summary};
use crate::wire::{Call, Command};

const LOAD_MS: u64 = 1_000;
const WAITERS: usize = 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Pause,
}

pub(super) fn killed(participant: &Participant) -> Measured {
    with_fault(participant, Fault::Kill, 2)
}

pub(super) fn paused(participant: &Participant) -> Measured {
    with_fault(participant, Fault::Pause, 1)
}

fn with_fault(participant: &Participant, fault: Fault, rounds: usize) -> Measured {
    let (mut version, mut each, mut all) = (String::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        // New processes for each round: one of them is lost.
        let options = Options { processes: 2, latency_ms: LOAD_MS, ..Options::default() };
        let mut fleet = Fleet::start(participant, options)?;
        version.clone_from(&fleet.ready.version);
        let (one, calls) = round(&mut fleet, fault)?;
        each.push(one);
        all.extend(calls);
    }
    Ok((version, total(each, &all)))
}

/// Of all rounds: the most loads, the longest wait, and all calls together.
fn total(each: Vec<Value>, all: &[Call]) -> Value {
    let most = |name: &str| {
        let values = each.iter().filter_map(|round| round[name].as_f64());
        values.fold(None, |most: Option<f64>, value| Some(most.map_or(value, |most| most.max(value))))
    };
    let mut cell = summary(all);
    for name in ["loads", "last_answer_ms", "late_write"] {
        cell[name] = json!(most(name));
    }
    cell["rounds"] = json!(each);
    cell
}

fn round(fleet: &mut Fleet, fault: Fault) -> Result<(Value, Vec<Call>), String> {
    let key = ["leader".to_owned()];
    let start = now_ms() + 150.0;
    let [a, b] = &mut fleet.replicas[..] else { return Err("two processes".to_owned()) };
    let led = a.send(burst(&key, 1, start))?;
    let waits = b.send(burst(&key, WAITERS, start + 100.0))?;
    sleep_until(start + 50.0);
    // What A loads is version 1. A load that begins later makes version 2: the older one must not be stored after it.
    fleet.origin.change();
    sleep_until(start + 300.0);
    match fault {
        Fault::Kill => a.process().kill(),
        Fault::Pause => a.process().pause(),
    }
    let calls = calls(&[b.reply(waits)?]);
    let mut one = summary(&calls);
    one["loads"] = json!(fleet.origin.loads());
    // The fault came 200 ms after these callers.
    let last = calls.iter().map(|call| call.0 + call.1 as i64).max().unwrap_or_default();
    one["last_answer_ms"] = json!((last as f64 / 1e3 - 200.0).round());
    if fault == Fault::Pause {
        a.process().resume();
        a.reply(led)?;
        // Whatever A still sends to Redis has arrived by then.
        sleep(Duration::from_millis(300));
        let after = b.ask(burst(&key, 1, now_ms()))?;
        let (before, after) = (calls.last().map(|call| &call.2), after.calls.first().map(|call| &call.2));
        let is_old =
            before.is_some_and(|id| id.starts_with("=v2")) && after.is_some_and(|id| id.starts_with("=v1"));
        one["late_write"] = json!(u8::from(is_old));
    }
    Ok((one, calls))
}

/// The caller that leads goes away 120 ms after it came; 20 callers of its process and 20 of another one wait. A load takes 200 ms.
pub(super) fn cancelled(participant: &Participant) -> Measured {
    let mut fleet = Fleet::start(participant, Options { processes: 2, ..Options::default() })?;
    if let Some(cell) = lacking(&fleet, &["cancel"]) {
        return cell;
    }
    let (mut each, mut all) = (Vec::new(), Vec::new());
    for number in 0..2 {
        fleet.origin.reset();
        let (keys, start) = (vec![format!("cancelled-{number}")], now_ms() + 150.0);
        let [a, b] = &mut fleet.replicas[..] else { return Err("two processes".to_owned()) };
        let led = a.send(Command::Burst {
            keys: keys.clone(),
            callers: WAITERS,
            at_ms: start,
            timeout_ms: TIMEOUT_MS / 2,
            cancel_first_after_ms: Some(120),
        })?;
        let waits = b.send(Command::Burst {
            keys,
            callers: WAITERS,
            at_ms: start,
            timeout_ms: TIMEOUT_MS / 2,
            cancel_first_after_ms: None,
        })?;
        let calls = calls(&[a.reply(led)?, b.reply(waits)?]);
        let mut one = summary(&calls);
        one["loads"] = json!(fleet.origin.loads());
        each.push(one);
        all.extend(calls);
    }
    Ok((fleet.ready.version.clone(), total(each, &all)))
}

fn sleep_until(at_ms: f64) {
    sleep(Duration::from_secs_f64(((at_ms - now_ms()) / 1e3).max(0.0)));
}
