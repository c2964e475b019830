//! A cold key: callers in many processes ask for it at the same moment; the load takes 200 ms.

use serde_json::{Map, Value, json};

use super::Measured;
use crate::fleet::{Fleet, Options, burst, now_ms};
use crate::participants::Participant;
use crate::stats::{calls, distribution, summary};
use crate::support::monitor::Monitor;

const SHAPES: [(usize, usize); 3] = [(2, 200), (8, 25), (24, 4)];
const ROUNDS: usize = 5;

pub(super) fn run(participant: &Participant) -> Measured {
    let (mut version, mut cell) = (String::new(), Map::new());
    for (processes, callers) in SHAPES {
        let mut fleet = Fleet::start(participant, Options { processes, ..Options::default() })?;
        version.clone_from(&fleet.ready.version);
        cell.insert(format!("{processes}x{callers}"), rounds(&mut fleet, callers, ROUNDS)?);
    }
    Ok((version, Value::Object(cell)))
}

/// Several cold keys, one after another: the rounds, and all their calls together.
pub(super) fn rounds(fleet: &mut Fleet, callers: usize, rounds: usize) -> Result<Value, String> {
    let (mut each, mut all) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        fleet.origin.reset();
        let Fleet { redis, replicas, origin, .. } = &mut *fleet;
        let monitor = Monitor::start(redis);
        let command = burst(&[format!("key-{callers}-{round}")], callers, now_ms() + 150.0);
        let mut ids = Vec::new();
        for replica in replicas.iter_mut() {
            ids.push(replica.send(command.clone())?);
        }
        let mut replies = Vec::new();
        for (replica, id) in replicas.iter_mut().zip(ids) {
            replies.push(replica.reply(id)?);
        }
        let (calls, commands) = (calls(&replies), monitor.finish().total);
        let mut one = summary(&calls);
        one["loads"] = json!(origin.loads());
        one["commands"] = json!(commands);
        each.push(one);
        all.extend(calls);
    }
    let most = |name: &str| each.iter().filter_map(|round| round[name].as_u64()).max();
    let mut cell = summary(&all);
    cell["loads"] = json!(most("loads"));
    cell["commands"] = json!(most("commands"));
    cell["distribution"] = json!(distribution(&all));
    cell["rounds"] = json!(each);
    Ok(cell)
}
