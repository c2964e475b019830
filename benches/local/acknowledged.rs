//! Counts older values that are returned after an acknowledged invalidation. There must be none, even while one process is paused or cut
//! off.
//!
//! Eight processes with 25 callers each read some keys all the time. A value is a number, the version of its key, which the loader reads
//! from the origin: another key on the same server, over a connection that is never cut. Each of four writers raises the versions of its
//! keys at the origin, one after another, has one of the processes invalidate the key, and so receives the moment of the acknowledgement.
//! Meanwhile one process after another is paused, or cut off from the server, for longer than a term.
//!
//! All moments are read from CLOCK_MONOTONIC, which the processes share: by a reader *before* its call, and by the invalidating process
//! *after* its own. So a call that began later by that clock began after the acknowledgement. For each version, each process records the
//! latest beginning of a call that received it. Together with the acknowledgements of the versions, in order, that shows whether any call
//! received an older value.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use crate::holders::bare;
use crate::support::processes::Fleet;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis_server::RedisServer;
use crate::table::{Limit, Row, Table, Unit};
use crate::versioned::{Config, INVALIDATED, Seen, origin_key};

const PROCESSES: usize = 8;
const WRITERS: usize = 4;
const KEYS_OF_A_WRITER: usize = 4;
/// How many invalidations there are by default, and with `FULL=1`.
const INVALIDATIONS: [usize; 2] = [500, 2_000];
/// How long a writer pauses between two invalidations, so that several absences happen during a run.
const PAUSE: Duration = Duration::from_millis(60);
/// How long a process is absent, and for how long no process is after that.
const ABSENT: Duration = Duration::from_secs(3);
const WELL: Duration = Duration::from_secs(1);

/// For each key, the moments of acknowledgement of its versions, in order.
type Acknowledged = HashMap<usize, Vec<(u64, u64)>>;

struct Stage {
    fleet: Fleet,
    proxies: Vec<Proxy>,
    /// The process that is paused or cut off at present, or a number that no process has.
    absent: AtomicUsize,
    ended: AtomicBool,
    begun: AtomicUsize,
    most: usize,
}

const NONE: usize = usize::MAX;

pub(crate) fn rows(table: &mut Table) {
    let is_full = std::env::var_os("FULL").is_some_and(|full| full == "1");
    let most = INVALIDATIONS[usize::from(is_full)];
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    table.add(runtime.block_on(measure(most)));
}

async fn measure(most: usize) -> Row {
    let server = RedisServer::start();
    let mut proxies = Vec::new();
    for _ in 0..PROCESSES {
        proxies.push(Proxy::start(server.port()).await);
    }
    let redis = proxies.iter().map(Proxy::url).collect();
    let config = Config { redis, origin: server.url(), keys: WRITERS * KEYS_OF_A_WRITER };
    let mut origin = bare(&server.client()).await;
    for key in 0..config.keys {
        set(&mut origin, key, 1).await;
    }
    let fleet = Fleet::spawn(PROCESSES, "versioned", &config);
    fleet.wait_ready().await;
    let (absent, ended, begun) = (AtomicUsize::new(NONE), AtomicBool::new(false), AtomicUsize::new(0));
    let stage = Stage { fleet, proxies, absent, ended, begun, most };

    let writers = async {
        let writers = (0..WRITERS).map(|writer| write(&stage, origin.clone(), writer));
        let acknowledged = futures_util::future::join_all(writers).await;
        stage.ended.store(true, Ordering::SeqCst);
        acknowledged.into_iter().flatten().collect::<Acknowledged>()
    };
    let (acknowledged, absences) = tokio::join!(writers, trouble(&stage));
    // Each process answers once more for each key, and then reports what it has seen.
    sleep(Duration::from_secs(1)).await;
    for member in stage.fleet.members() {
        member.send("end");
    }
    let seen: Vec<Seen> = stage.fleet.results().await;
    row(&seen, &acknowledged, absences)
}

fn row(seen: &[Seen], acknowledged: &Acknowledged, absences: usize) -> Row {
    let sum = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>();
    let (reads, local, failed) =
        (sum(|seen| seen.reads), sum(|seen| seen.local_hits), sum(|seen| seen.failed));
    let count = acknowledged.values().map(Vec::len).sum::<usize>();
    let older: Vec<_> = seen.iter().flat_map(|seen| older(seen, acknowledged)).collect();
    for (key, version, late) in older.iter().take(5) {
        println!(
            "key {key}: version {version} was given to a call that began {late:.3} ms after the next one's acknowledgement"
        );
    }
    assert!(local > reads / 10, "the tier is in use: {local} of {reads} reads");
    Row {
        what: format!(
            "older values after an acknowledged invalidation, {PROCESSES}x25 callers, {count} invalidations"
        ),
        unit: Unit::Count,
        must: Limit::Exactly(0.0),
        aim: Limit::Exactly(0.0),
        measured: older.len() as f64,
        detail: format!(
            "{reads} reads, {:.1}% from memory, {failed} failed; {absences} processes paused or cut off in turn",
            local as f64 / reads as f64 * 100.0
        ),
    }
}

/// For each version that was received too late: the key, the version, and how many milliseconds after the next version's acknowledgement
/// the call began.
fn older(seen: &Seen, acknowledged: &Acknowledged) -> Vec<(usize, u64, f64)> {
    let late = seen.latest.iter().filter_map(|&(key, version, began)| {
        let next = acknowledged.get(&key)?.iter().find(|(acknowledged, _)| *acknowledged > version)?;
        (began > next.1).then(|| (key, version, (began - next.1) as f64 / 1e6))
    });
    late.collect()
}

/// Raises and invalidates the keys of this writer in turn, until there were enough invalidations.
async fn write(stage: &Stage, mut origin: MultiplexedConnection, writer: usize) -> Acknowledged {
    let mut acknowledged = Acknowledged::new();
    let mut version = 1;
    loop {
        version += 1;
        for key in writer * KEYS_OF_A_WRITER..(writer + 1) * KEYS_OF_A_WRITER {
            let number = stage.begun.fetch_add(1, Ordering::SeqCst);
            if number >= stage.most {
                return acknowledged;
            }
            set(&mut origin, key, version).await;
            // The process that invalidates is one that is not absent. It may become absent meanwhile, and then answers when it is back.
            let absent = stage.absent.load(Ordering::SeqCst);
            let process = (0..PROCESSES).map(|at| (number + at) % PROCESSES).find(|at| *at != absent);
            let member = stage.fleet.member(process.expect("one is well"));
            member.send(&format!("invalidate {key}"));
            let at = member.wait_event(&format!("{INVALIDATED} {key}")).await;
            let at = at.as_u64().expect("the moment of the acknowledgement");
            acknowledged.entry(key).or_default().push((version, at));
            sleep(PAUSE).await;
        }
    }
}

/// Pauses or cuts off one process after another. Returns how many absences there were.
async fn trouble(stage: &Stage) -> usize {
    let mut absences = 0;
    while !stage.ended.load(Ordering::SeqCst) {
        sleep(WELL).await;
        let (process, is_paused) = (absences * 3 % PROCESSES, absences % 2 == 0);
        stage.absent.store(process, Ordering::SeqCst);
        if is_paused {
            stage.fleet.member(process).pause();
        } else {
            stage.proxies[process].set(Mode::BlackHole);
        }
        absences += 1;
        sleep(ABSENT).await;
        if is_paused {
            stage.fleet.member(process).resume();
        } else {
            stage.proxies[process].set(Mode::Pass);
        }
        stage.absent.store(NONE, Ordering::SeqCst);
    }
    absences
}

async fn set(origin: &mut MultiplexedConnection, key: usize, version: u64) {
    redis::cmd("SET").arg(origin_key(key)).arg(version).exec_async(origin).await.expect("SET");
}
