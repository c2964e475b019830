//! The soak test: four processes under load for a long time, a fault every few seconds, and an oracle that reads all logs afterwards. `make
//! soak` runs it for ten minutes, or for `DURATION` seconds; a short run is among the ordinary tests. With `TOKENS=2` the processes log in
//! with tokens that are valid for two seconds. The first tenth of the time has no faults, so the guard must explain each connection that is
//! opened then, apart from the first ones.
//!
//! The processes write their answers to files, which survive a SIGKILL; the origin records each load; and a MONITOR shows
//! whether an entry is written outside of a script.

mod connections;
mod leak;
mod nemesis;
mod oracle;
mod truth;
mod worker;

use std::fmt::Write as _;
use std::time::Duration;

use nemesis::Nemesis;
use oracle::Verdict;

use crate::support::os::wall_ns;
use crate::support::processes::Role;

pub(crate) const ROLES: &[Role] = &[("soak", worker::work), ("soak.leak", leak::fill)];

const PROCESSES: usize = 4;
const KEYS: usize = 2_000;
/// The requests of each process, so that there are 300 per second in all.
const REQUESTS_PER_SECOND: u64 = 75;

const FRESH: Duration = Duration::from_secs(4);
const LEASE: Duration = Duration::from_secs(2);
const LOAD_TIMEOUT: Duration = Duration::from_secs(3);
/// For how long a process may serve from memory after a renewal. Shorter than most faults.
const TERM: Duration = Duration::from_secs(1);
/// How long the slowest load takes.
const LOAD: Duration = Duration::from_millis(500);

/// How many faults there are, how long they last, and for how long the test runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    lasts: Duration,
    /// The least and the most seconds between two faults.
    pause: (f64, f64),
    /// The least and the most seconds for which a process is stopped, or the network is bad.
    ill: (f64, f64),
}

/// Whether the process in this slot keeps copies in its memory. All do but the last one.
const fn keeps(slot: usize) -> bool {
    slot + 1 < PROCESSES
}

async fn run(plan: Plan) -> Verdict {
    let from_env = std::env::var("SG_SEED").ok().map(|seed| seed.parse().expect("SG_SEED is a number"));
    let seed = from_env.unwrap_or_else(|| fastrand::u64(..));
    let tokens = std::env::var("TOKENS").is_ok().then(|| seconds("TOKENS", 2));
    println!("SG_SEED={seed} TOKENS={tokens:?}: {plan:?}");
    let mut nemesis = Nemesis::start(seed, tokens).await;
    nemesis.rest(plan.lasts / 10).await;
    nemesis.rage(Plan { lasts: plan.lasts * 9 / 10, ..plan }).await;
    let verdict = nemesis.heal_and_evaluate().await;
    let mut text = String::new();
    write!(text, "{verdict}").expect("a text");
    println!("{text}");
    verdict
}

fn seconds(name: &str, otherwise: u64) -> Duration {
    let from_env = std::env::var(name).ok().map(|text| text.parse().expect("a number of seconds"));
    Duration::from_secs(from_env.unwrap_or(otherwise))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_promises_hold_under_load_while_things_break() {
    let plan = Plan { lasts: Duration::from_secs(20), pause: (0.5, 2.0), ill: (0.3, 2.5) };
    run(plan).await.must_be_clean();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "ten minutes: make soak"]
async fn the_promises_hold_for_long() {
    let plan = Plan { lasts: seconds("DURATION", 600), pause: (5.0, 20.0), ill: (1.0, 15.0) };
    run(plan).await.must_be_clean();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: make soak-leak"]
async fn a_million_keys_leave_nothing() {
    leak::run().await;
}
