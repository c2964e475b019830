//! Redis dies (connections are refused) or hangs (SIGSTOP): 20 callers of one process ask for a key that was stored and for a new one,
//! and 20 more after they were answered, or after ten seconds.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Measured, lacking};
use crate::fleet::{Fleet, Options, TIMEOUT_MS, burst, now_ms};
use crate::participants::Participant;
use crate::stats::{calls, summary};
use crate::wire::Command;

const CALLERS: usize = 20;

pub(super) fn run(participant: &Participant) -> Measured {
    let mut cell = json!({});
    let mut version = String::new();
    for (name, hangs) in [("dead", false), ("hung", true)] {
        let mut fleet = Fleet::start(participant, Options::default())?;
        if let Some(cell) = lacking(&fleet, &["redis"]) {
            return cell;
        }
        version.clone_from(&fleet.ready.version);
        cell[name] = outage(&mut fleet, hangs)?;
    }
    Ok((version, cell))
}

fn outage(fleet: &mut Fleet, hangs: bool) -> Result<Value, String> {
    let replica = &mut fleet.replicas[0];
    replica.ask(burst(&["known".to_owned()], 1, now_ms()))?;
    fleet.origin.reset();
    if hangs {
        fleet.redis.pause();
    } else {
        fleet.redis.kill();
    }
    sleep(Duration::from_millis(50));
    let mut waves = Vec::new();
    for new in ["new-1", "new-2"] {
        let keys = ["known".to_owned(), new.to_owned()];
        let reply = replica.ask(Command::Burst {
            keys: keys.to_vec(),
            callers: CALLERS,
            at_ms: now_ms() + 10.0,
            timeout_ms: TIMEOUT_MS / 2,
            cancel_first_after_ms: None,
        })?;
        waves.push(summary(&calls(&[reply])));
        // Without an answer within the time-out, the next callers would have none either.
        if waves[0]["unanswered"] != 0 {
            break;
        }
    }
    let loads = fleet.origin.loads();
    if hangs {
        fleet.redis.resume();
    }
    Ok(json!({ "first": waves[0], "second": waves.get(1), "loads": loads }))
}
