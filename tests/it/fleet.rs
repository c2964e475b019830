//! Promise 1 with real processes on a real Redis: one load per cold key, whatever the shape of the fleet.

use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use stampede_guard::{Policy, StampedeGuard};

use crate::support::origin::{self, Answer, Origin};
use crate::support::probe::assert_nothing_left;
use crate::support::processes::{Child, Fleet, Role};
use crate::support::redis_server::RedisServer;

pub(crate) const ROLES: &[Role] = &[("fleet.load", load_keys)];

#[derive(Serialize, Deserialize)]
struct Config {
    redis: String,
    origin: String,
    callers: usize,
    keys: usize,
}

/// What one process reports: its answers in order, with errors as text.
#[derive(Serialize, Deserialize)]
struct Report {
    answers: Vec<Result<String, String>>,
    /// How long it took until the last answer.
    took: Duration,
    flights: u64,
    tasks: u64,
}

/// The longest value that is shared, in bytes.
const MAX_BODY: usize = 1_024;

/// A machine that runs 24 processes on two cores stalls for longer than the default timeouts. These tests are about
/// counts, so no command may time out and no lease may end.
fn patient() -> Policy {
    Policy::builder()
        .coordination_budget(Duration::from_secs(8))
        .command_timeout(Duration::from_secs(2))
        .lease(Duration::from_secs(8))
        .max_body(MAX_BODY)
        .build()
        .expect("valid")
}

fn load_keys(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config: Config = child.config();
        let client = redis::Client::open(config.redis.as_str()).expect("an address");
        let guard = StampedeGuard::builder(client).policy(patient()).build().expect("valid");
        crate::redis::connects(&guard).await;
        child.ready();
        child.wait_go().await;
        let calls = (0..config.callers).map(|caller| {
            let (guard, origin) = (guard.clone(), config.origin.clone());
            let key = format!("k{}", caller % config.keys);
            async move {
                let load = {
                    let key = key.clone();
                    move || async move { origin::load(&origin, &key).await }
                };
                guard.get_or_load(key, load).await.map_err(|error| error.to_string())
            }
        });
        let began = tokio::time::Instant::now();
        let answers = join_all(calls).await;
        let took = began.elapsed();
        // The callers receive their answers a moment before the tasks end, so this waits.
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while guard.stats().tasks > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let stats = guard.stats();
        child.result(&Report { answers, took, flights: stats.flights, tasks: stats.tasks });
    })
}

/// Runs one wave of calls, and checks that it left nothing behind.
async fn wave(processes: usize, callers: usize, keys: usize, answer: Answer) -> (Origin, Vec<Report>) {
    let (server, origin) = (RedisServer::start(), Origin::start().await);
    for key in 0..keys {
        origin.script(&format!("k{key}"), [answer.clone()]);
    }
    let config = Config { redis: server.minimal_user(), origin: origin.addr(), callers, keys };
    let fleet = Fleet::spawn(processes, "fleet.load", &config);
    fleet.wait_ready().await;
    fleet.go();
    let reports = fleet.results::<Report>().await;
    assert_eq!(reports.len(), processes);
    for report in &reports {
        assert_eq!((report.answers.len(), report.flights, report.tasks), (callers, 0, 0));
    }
    assert_nothing_left(&server, Duration::from_secs(60)).await;
    (origin, reports)
}

async fn one_load(processes: usize, callers: usize) {
    let answer = Answer::value("v").after(Duration::from_millis(300));
    let (origin, reports) = wave(processes, callers, 1, answer).await;
    assert_eq!(origin.loads("k0"), 1);
    assert!(reports.iter().flat_map(|report| &report.answers).all(|answer| answer.as_deref() == Ok("v")));
}

#[tokio::test]
async fn two_processes_of_two_hundred_callers_load_once() {
    one_load(2, 200).await;
}

/// S2.1
#[tokio::test]
async fn eight_processes_of_twenty_five_callers_load_once() {
    one_load(8, 25).await;
}

#[tokio::test]
async fn ten_processes_of_forty_callers_load_once() {
    one_load(10, 40).await;
}

#[tokio::test]
async fn twenty_four_processes_of_four_callers_load_once() {
    one_load(24, 4).await;
}

#[tokio::test]
async fn a_hundred_keys_at_once_load_once_each() {
    let answer = Answer::value("v").after(Duration::from_millis(100));
    let (origin, _) = wave(4, 400, 100, answer).await;
    for key in 0..100 {
        assert_eq!(origin.loads(&format!("k{key}")), 1, "k{key}");
    }
}

/// Without shared failures each waiter would load in turn: 40 loads in 8.1 s.
/// S2.13
#[tokio::test]
async fn a_failing_load_runs_once_for_the_whole_fleet() {
    let answer = Answer::failure("no route").after(Duration::from_millis(200));
    let (origin, reports) = wave(4, 10, 1, answer).await;
    assert_eq!(origin.loads("k0"), 1);
    for answer in reports.iter().flat_map(|report| &report.answers) {
        let error = answer.as_ref().expect_err("the load failed");
        assert!(error.ends_with("no route"), "{error}");
    }
}

/// S2.13 for a value that cannot be shared: every waiter loads, all at the same time.
#[tokio::test]
async fn a_value_over_max_body_is_loaded_by_all_waiters_at_once() {
    const LOAD: Duration = Duration::from_millis(500);
    let long = "v".repeat(MAX_BODY);
    let (origin, reports) = wave(4, 10, 1, Answer::value(&*long).after(LOAD)).await;
    assert_eq!(origin.loads("k0"), 40, "each its own");
    for report in &reports {
        assert!(report.answers.iter().all(|answer| answer.as_ref() == Ok(&long)));
        // The time of the first load, and that of all other loads together. If these ran one after another, they would take twenty seconds.
        assert!(report.took < LOAD * 2 + Duration::from_secs(5), "{:?}", report.took);
    }
}
