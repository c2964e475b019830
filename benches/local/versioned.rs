//! A process whose callers read versions all the time, and which invalidates a key when the bench says so.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use stampede_guard::StampedeGuard;
use tokio::time::sleep;

use crate::clock::monotonic_ns;
use crate::holders::{bare, connected};
use crate::support::processes::{Child, Report, Role};

pub(crate) const ROLE: Role = ("versioned", versioned);

/// The event that reports an acknowledged invalidation, with the key. Its data is a moment after the acknowledgement.
pub(crate) const INVALIDATED: &str = "invalidated";

const CALLERS: usize = 25;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    /// The address under which each process's guard reaches the server.
    pub(crate) redis: Vec<String>,
    /// The address under which loaders reach the server, which is the origin, too.
    pub(crate) origin: String,
    pub(crate) keys: usize,
}

/// What the callers of one process received.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// For each key and version, when the latest call began that received this version: key, version, moment.
    pub(crate) latest: Vec<(usize, u64, u64)>,
    pub(crate) reads: u64,
    pub(crate) local_hits: u64,
    pub(crate) failed: u64,
}

#[derive(Debug, Default)]
struct Notes {
    latest: HashMap<(usize, u64), u64>,
    reads: u64,
    failed: u64,
}

/// The key under which the origin stores the version of `key`.
pub(crate) fn origin_key(key: usize) -> String {
    format!("origin:{key}")
}

fn versioned(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis, origin, keys } = child.config();
        let guard = connected(&redis[child.index()]).await;
        let origin = bare(&redis::Client::open(origin.as_str()).expect("an address")).await;
        let notes = Arc::<Mutex<Notes>>::default();
        for _ in 0..CALLERS {
            tokio::spawn(call(guard.clone(), origin.clone(), keys, Arc::clone(&notes)));
        }
        child.ready();
        loop {
            let line = child.recv_line().await;
            match line.split_once(' ') {
                Some((_, key)) => {
                    let key = key.parse().expect("the number of a key");
                    tokio::spawn(invalidate(guard.clone(), key, child.report()));
                }
                None => break,
            }
        }
        let notes = std::mem::take(&mut *notes.lock().unwrap_or_else(PoisonError::into_inner));
        let latest = notes.latest.into_iter().map(|((key, version), began)| (key, version, began)).collect();
        let local_hits = guard.stats().local_hits;
        child.result(&Seen { latest, reads: notes.reads, local_hits, failed: notes.failed });
    })
}

/// Invalidates the key again and again until that is acknowledged.
async fn invalidate(guard: StampedeGuard, key: usize, report: Report) {
    while guard.invalidate(("version", key)).await.is_err() {
        sleep(Duration::from_millis(10)).await;
    }
    let at = monotonic_ns();
    report.event_with(&format!("{INVALIDATED} {key}"), &at);
}

/// A caller, which reads one key after the other until it is stopped.
async fn call(guard: StampedeGuard, origin: MultiplexedConnection, keys: usize, notes: Arc<Mutex<Notes>>) {
    loop {
        let key = fastrand::usize(..keys);
        let began = monotonic_ns();
        let mut origin = origin.clone();
        let load = move || async move {
            redis::cmd("GET").arg(origin_key(key)).query_async::<u64>(&mut origin).await
        };
        let version = guard.load(("version", key)).get_shared(move |_| load()).await;
        {
            let mut notes = notes.lock().unwrap_or_else(PoisonError::into_inner);
            match version {
                Ok(version) => {
                    notes.reads += 1;
                    let latest = notes.latest.entry((key, *version.value)).or_default();
                    *latest = began.max(*latest);
                }
                Err(_) => notes.failed += 1,
            }
        }
        sleep(Duration::from_micros(fastrand::u64(2_000..6_000))).await;
    }
}
