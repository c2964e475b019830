//! One process with thousands of waiters: its inbox breaks, or all of them reach their time-out at the same moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use stampede_guard::lock::{LockError, Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::stage::Stage;
use crate::table::{Limit, Row, Table, Unit, millis};

const WAITERS: usize = 8_000;
/// Bounds in milliseconds: for all scripts of such a moment together, and for one PING during it.
const LONGEST: f64 = 250.0;
const WORST: f64 = 25.0;
const TTL: Duration = Duration::from_secs(120);
/// When no script has run for this long, the scripts are over.
const QUIET: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(60);

type Waiter = JoinHandle<Result<MutexGuard, LockError>>;

pub(crate) fn rows(table: &mut Table) {
    killed(table, false);
    killed(table, true);
    timed_out(table);
}

/// Ends the subscription of a process whose tasks wait. With `freed`, the mutex is freed before the process has subscribed again.
fn killed(table: &mut Table, freed: bool) {
    let stage = Stage::start();
    let mutex = mutex(&stage, Duration::MAX);
    let mut guard = stage.runtime.block_on(mutex.lock()).expect("it is free");
    let waiters = wait(&stage, &mutex);
    let what = if freed { ", the mutex freed meanwhile" } else { "" };
    let round = Round::begin(&stage);
    stage.run::<()>(redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("pubsub"));
    if freed {
        stage.runtime.block_on(guard.unlock()).expect("an answer");
    }
    stage.runtime.block_on(quiet(&stage));
    round.end(&stage, table, &format!("CLIENT KILL TYPE pubsub, {WAITERS} waiters{what}"));
    assert_eq!(length(&stage) + usize::from(freed), WAITERS, "each has a position, and one the mutex");
    for waiter in waiters {
        waiter.abort();
    }
}

/// Lets all waiters reach their time-out at about the same moment.
fn timed_out(table: &mut Table) {
    let stage = Stage::start();
    let mutex = mutex(&stage, Duration::from_secs(20));
    let guard = stage.runtime.block_on(mutex.lock()).expect("it is free");
    let waiters = wait(&stage, &mutex);
    let round = Round::begin(&stage);
    stage.runtime.block_on(async {
        for waiter in waiters {
            assert!(waiter.await.expect("joined").is_err(), "it is held");
        }
        let since = Instant::now();
        while length(&stage) > 0 {
            assert!(since.elapsed() < SOON, "entries are left");
            sleep(Duration::from_millis(20)).await;
        }
    });
    round.end(&stage, table, &format!("{WAITERS} time-outs at once"));
    stage.runtime.block_on(async { drop(guard) });
}

/// The mutex, whose waiters give up after `patience`.
fn mutex(stage: &Stage, patience: Duration) -> Mutex {
    let builder = stage.guard().locks().mutex("contended").ttl(TTL);
    builder.acquire_timeout(patience).build().expect("a name")
}

/// Starts all waiters. Returns when all of them are in the queue.
fn wait(stage: &Stage, mutex: &Mutex) -> Vec<Waiter> {
    stage.runtime.block_on(async {
        let waiter = || {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await })
        };
        let waiters = (0..WAITERS).map(|_| waiter()).collect();
        let since = Instant::now();
        while length(stage) < WAITERS {
            assert!(since.elapsed() < SOON, "not all are in the queue");
            sleep(Duration::from_millis(5)).await;
        }
        waiters
    })
}

fn length(stage: &Stage) -> usize {
    stage.run(redis::cmd("LLEN").arg("sg1:mq:{default:contended}"))
}

/// Waits until no script has run for [`QUIET`].
async fn quiet(stage: &Stage) {
    let (mut calls, mut since) = (0, Instant::now());
    while since.elapsed() < QUIET {
        sleep(Duration::from_millis(50)).await;
        let (now, _) = scripts(stage);
        if now != calls {
            (calls, since) = (now, Instant::now());
        }
    }
}

/// How many scripts were called since the server's statistics were reset, and how many milliseconds they took together.
fn scripts(stage: &Stage) -> (u64, f64) {
    let stats: String = stage.run(redis::cmd("INFO").arg("commandstats"));
    let (mut calls, mut micros) = (0, 0);
    for line in stats.lines().filter(|line| line.starts_with("cmdstat_eval")) {
        let number = |name: &str| {
            let text = line.split([':', ',']).find_map(|part| part.strip_prefix(name)).expect("a number");
            text.parse::<u64>().expect("a number")
        };
        calls += number("calls=");
        micros += number("usec=");
    }
    (calls, micros as f64 / 1e3)
}

/// Measures PINGs from a separate thread, and the time that scripts take meanwhile.
struct Round {
    ends: Arc<AtomicBool>,
    worst: thread::JoinHandle<f64>,
    ping: f64,
}

impl Round {
    fn begin(stage: &Stage) -> Self {
        let ping = stage.ping();
        stage.run::<()>(redis::cmd("CONFIG").arg("RESETSTAT"));
        stage.forget();
        let (ends, mut connection) = (Arc::new(AtomicBool::new(false)), stage.server.conn());
        let until = Arc::clone(&ends);
        let worst = thread::spawn(move || {
            let mut worst: f64 = 0.0;
            while !until.load(Ordering::Relaxed) {
                let sent = Instant::now();
                redis::cmd("PING").query::<()>(&mut connection).expect("an answer");
                worst = worst.max(millis(sent.elapsed()));
                thread::sleep(Duration::from_millis(1));
            }
            worst
        });
        Self { ends, worst, ping }
    }

    fn end(self, stage: &Stage, table: &mut Table, what: &str) {
        let (calls, sum) = scripts(stage);
        self.ends.store(true, Ordering::Relaxed);
        let worst = self.worst.join().expect("an answer to each");
        let in_pings = |time: f64| format!("{:.0} PINGs of {:.3} ms", time / self.ping, self.ping);
        let row = |what: String, must, measured, detail| Row {
            what,
            unit: Unit::Millis,
            must: Limit::AtMost(must),
            aim: Limit::None,
            measured,
            detail,
        };
        let longest = stage.scripts().0.into_iter().fold(0.0, f64::max);
        let detail = format!("{calls} calls, the longest {longest:.2} ms; {}", in_pings(sum));
        table.add(row(format!("{what}: all scripts"), LONGEST, sum, detail));
        table.add(row(format!("{what}: worst PING"), WORST, worst, in_pings(worst)));
    }
}
