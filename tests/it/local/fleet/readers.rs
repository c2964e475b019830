//! The callers of a process: each calls again and again, and notes when the call began and what it received.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::process::{Config, Report};
use super::truth::{Guards, KEYS, Subject, Truth, Value};
use crate::support::os::wall_ns;

/// For a version, the latest call that received it, of the calls that count for the oracle. If that call was right, all earlier calls that
/// received the same version were right, too.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Received {
    pub(super) subject: Subject,
    pub(super) version: u64,
    pub(super) began: u64,
    /// The key, the call, the process that had loaded the value, and when that load ended: for the message of a failing test.
    pub(super) key: usize,
    pub(super) call: String,
    pub(super) by: usize,
    pub(super) ended: u64,
}

/// The kinds of calls that read. A task uses them in turn.
const CALLS: [&str; 6] =
    ["get_or_load", "load, get_shared", "get_or_load", "get", "get_or_load", "get_shared"];

/// What the callers of one task received.
#[derive(Default)]
pub(super) struct Read {
    reads: u64,
    joined: u64,
    failures: Vec<String>,
    received: HashMap<(Subject, u64), Received>,
}

pub(super) async fn read(guards: Guards, truth: Truth, config: Config, over: Arc<AtomicBool>) -> Read {
    let mut read = Read::default();
    while !over.load(Ordering::SeqCst) {
        for call in [fastrand::usize(..CALLS.len()), fastrand::usize(..CALLS.len())].map(|at| CALLS[at]) {
            // Half of the calls are for a quarter of the keys, so that many of them meet a change.
            let key = fastrand::usize(..KEYS);
            let key = if fastrand::bool() { key - key % 4 } else { key };
            let began = wall_ns();
            let value = ask(&guards, &truth, call, key).await;
            read.reads += 1;
            match value {
                // A load without the store is not notified of changes by other processes, and callers that join it receive its value
                // (docs/decisions/005-who-may-have-a-value.md), so they do not count for the oracle.
                Ok(Some(value)) if !config.strict && value.by == config.process && began < value.ended => {
                    read.joined += 1;
                }
                Ok(Some(value)) => read.note(began, key, call, &value),
                Ok(None) => {}
                Err(error) => read.failures.push(format!("{call} of key {key}: {error}")),
            }
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(16..48))).await;
    }
    read
}

async fn ask(guards: &Guards, truth: &Truth, call: &str, key: usize) -> Result<Option<Value>, String> {
    let (guard, of) = (guards.of(key), ("k", key));
    let truth = truth.clone();
    let load = move || truth.load(key);
    match call {
        "get_or_load" => guard.get_or_load(of, load).await.map(Some).map_err(|error| error.to_string()),
        "load, get_shared" => {
            let value = guard.load(of).get_shared(move |_| load()).await;
            value.map(|loaded| Some(Value::clone(&loaded.value))).map_err(|error| error.to_string())
        }
        // Without an answer from the store, these calls return nothing, which is no failure here.
        "get" => Ok(guard.get(of).await.unwrap_or(None)),
        _ => Ok(guard.get_shared::<Value>(of).await.unwrap_or(None).map(|value| Value::clone(&value))),
    }
}

impl Read {
    fn note(&mut self, began: u64, key: usize, call: &str, value: &Value) {
        for &(subject, version) in &value.versions {
            let is_later = |received: &Received| received.began < began;
            if self.received.get(&(subject, version)).is_none_or(is_later) {
                let (call, by, ended) = (call.to_owned(), value.by, value.ended);
                let received = Received { subject, version, began, key, call, by, ended };
                self.received.insert((subject, version), received);
            }
        }
    }
}

impl Report {
    pub(super) fn add(&mut self, read: Read) {
        let Read { reads, joined, failures, received } = read;
        self.reads += reads;
        self.joined += joined;
        self.failures.extend(failures);
        for (_, received) in received {
            let same = |other: &&mut Received| {
                (other.subject, other.version) == (received.subject, received.version)
            };
            match self.received.iter_mut().find(same) {
                Some(other) if other.began >= received.began => {}
                Some(other) => *other = received,
                None => self.received.push(received),
            }
        }
    }
}
