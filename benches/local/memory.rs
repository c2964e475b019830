//! The resident memory of a process whose tier has received a million keys, once as bytes and once as decoded values.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stampede_guard::StampedeGuard;
use tokio::task::JoinSet;

use crate::holders::patient;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Table, Unit};

pub(crate) const ROLE: Role = ("fills", fills);

const KEYS: usize = 1_000_000;
/// The control has no tier, and shows what a process needs apart from it. That does not grow with the keys, so fewer are enough.
const KEYS_OF_THE_CONTROL: usize = 100_000;
const CALLERS: usize = 256;
const CAPACITY: u64 = 64 * 1024 * 1024;
const VALUE: usize = 200;
const BUFFER: usize = 4 * 1024;
const MIB: f64 = 1024.0 * 1024.0;
/// In how many parts the keys are requested. After each part the process reports that it goes on.
const PARTS: usize = 20;
const PART: &str = "part";

/// The form in which callers receive values.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Form {
    Bytes,
    /// Bytes that are a part of a larger buffer, as if a loader had cut them out of what it has read.
    Slice,
    Decoded,
}

#[derive(Debug, Serialize, Deserialize)]
struct Config {
    redis: String,
    form: Form,
    /// Whether the guard has a local tier.
    tier: bool,
    keys: usize,
}

/// Sizes in mebibytes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Resident {
    before: f64,
    /// The largest size that was seen during the run.
    most: f64,
    /// The size of the copies as the guard reports it.
    charged: f64,
    copies: u64,
}

pub(crate) fn rows(table: &mut Table) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let forms = [Form::Bytes, Form::Slice, Form::Decoded].map(|form| (form, false));
    for (form, one_arena) in forms.into_iter().chain([(Form::Decoded, true)]) {
        let (with, without) = runtime
            .block_on(async { (filled(form, true, one_arena).await, filled(form, false, one_arena).await) });
        let capacity = CAPACITY as f64 / MIB;
        let grown = |resident: Resident| resident.most - resident.before;
        let name = match form {
            Form::Bytes => "`get_or_load` of `Bytes`",
            Form::Slice => "`get_or_load` of `Bytes` that are a slice of 4 KiB",
            Form::Decoded => "`load(..).get_shared` of a record, decoded",
        };
        let arenas = if one_arena { ", one arena of the allocator" } else { "" };
        table.add(Row {
            what: format!(
                "memory that {KEYS} keys leave, {VALUE} bytes each, {name}{arenas} / a capacity of 64 MiB"
            ),
            unit: Unit::Ratio,
            must: Limit::AtMost(1.3),
            aim: Limit::None,
            measured: grown(with) / capacity,
            detail: format!(
                "{:.1} MiB; {} copies, counted as {:.1} MiB; without a tier {:.1} MiB (100,000 keys)",
                grown(with),
                with.copies,
                with.charged,
                grown(without)
            ),
        });
    }
}

/// Fills one process. With `one_arena`, the allocator of the GNU C library has only one arena.
async fn filled(form: Form, tier: bool, one_arena: bool) -> Resident {
    let server = RedisServer::start();
    let keys = if tier { KEYS } else { KEYS_OF_THE_CONTROL };
    let program: &[_] = if one_arena { &["env", "MALLOC_ARENA_MAX=1"] } else { &[] };
    let fleet = Fleet::spawn_by(program, 1, "fills", &Config { redis: server.url(), form, tier, keys });
    fleet.wait_ready().await;
    fleet.member(0).send("go");
    // Each wait of the harness is bounded, and on a slow machine all keys take longer than that.
    for _ in 0..PARTS {
        fleet.member(0).wait_event(PART).await;
    }
    fleet.member(0).result().await
}

fn fills(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Config { redis, form, tier, keys } = child.config();
        let client = redis::Client::open(redis.as_str()).expect("an address");
        // The server drops values after some seconds, so that only the process has to keep a million of them.
        let policy = patient().fresh_for(Duration::from_secs(20));
        let policy = policy.local_for(if tier { Duration::MAX } else { Duration::ZERO });
        let builder = StampedeGuard::builder(client).policy(policy.build().expect("valid"));
        let guard = builder.local_capacity(CAPACITY).build().expect("valid");
        guard.connect().await.expect("connects");
        // After this, connections, tasks and the arenas of the allocator have their full size.
        ask(&guard, form, 0..4 * CALLERS).await;
        child.ready();
        child.recv_line().await;
        let before = resident();
        let most = Arc::new(Mutex::new(before));
        let looks = tokio::spawn(look(Arc::clone(&most)));
        for part in 0..PARTS {
            let first = 4 * CALLERS + part * keys / PARTS;
            ask(&guard, form, first..first + keys / PARTS).await;
            child.event(PART);
        }
        looks.abort();
        let most = *most.lock().unwrap_or_else(PoisonError::into_inner);
        let health = guard.health().local;
        let (copies, bytes) = health.map_or((0, 0), |local| (local.copies, local.bytes));
        child.result(&Resident { before, most, charged: bytes as f64 / MIB, copies });
    })
}

/// Records the largest resident memory, until it is aborted.
async fn look(most: Arc<Mutex<f64>>) {
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = resident();
        let mut most = most.lock().unwrap_or_else(PoisonError::into_inner);
        *most = most.max(now);
    }
}

/// Requests each key twice. The second request makes the decoded value, if that is the form.
async fn ask(guard: &StampedeGuard, form: Form, keys: Range<usize>) {
    let next = Arc::new(AtomicUsize::new(keys.start));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (guard, next, end) = (guard.clone(), Arc::clone(&next), keys.end);
        callers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= end {
                    return;
                }
                for _ in 0..2 {
                    match form {
                        Form::Bytes | Form::Slice => {
                            let whole = if matches!(form, Form::Slice) { BUFFER } else { VALUE };
                            let load = move || async move {
                                Ok::<_, Infallible>(Bytes::from(vec![b'v'; whole]).slice(..VALUE))
                            };
                            guard.get_or_load(("key", number), load).await.expect("infallible");
                        }
                        Form::Decoded => {
                            let load = move || async move { Ok::<_, Infallible>(Record::new(number)) };
                            guard
                                .load(("key", number))
                                .get_shared(move |_| load())
                                .await
                                .expect("infallible");
                        }
                    }
                }
            }
        });
    }
    callers.join_all().await;
}

/// A value whose encoding is about as long as the values of the other forms.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    id: usize,
    name: String,
    mail: String,
    notes: String,
}

impl Record {
    fn new(id: usize) -> Self {
        let text = |length| "v".repeat(length);
        Self { id, name: text(30), mail: text(40), notes: text(100) }
    }
}

/// The resident memory of this process in mebibytes.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: f64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib / 1024.0
}
