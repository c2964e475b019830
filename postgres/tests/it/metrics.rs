//! What a recorder receives from a real reader, and the page that lists it.

#[allow(dead_code, reason = "the tests of the core crate use more of it")]
#[path = "../../../tests/it/metrics/recorder.rs"]
mod recorder;

use std::collections::BTreeSet;
use std::time::Duration;

use recorder::Recorded;
use stampede_guard::{Backend, MemoryStore, Policy, StampedeGuard};
use stampede_guard_postgres::metrics::BUCKETS;
use stampede_guard_postgres::{LogMessage, LogPosition, PostgresLog};

use crate::support::PATIENCE;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

const READER: &str = "stampede_guard_log_reader{slot=shop}";
const LAG: &str = "stampede_guard_log_lag_bytes{slot=shop}";
const LEFT: &str = "stampede_guard_log_left_bytes{slot=shop}";
const FINAL: &str = "stampede_guard_log_final_seconds{slot=shop}";
/// `max_slot_wal_keep_size` of the test, and the length of a segment, by which the server rounds.
const BOUND: f64 = 8.0 * MEBIBYTE;
const MEBIBYTE: f64 = 1_048_576.0;

fn log(backend: impl Into<Backend>, urls: Vec<String>) -> (StampedeGuard, PostgresLog) {
    let policy = Policy::builder().invalidate_all(true).build().unwrap();
    let guard = StampedeGuard::builder(backend).policy(policy).build().unwrap();
    let log = PostgresLog::builder(&guard, urls).slot("shop").build().unwrap();
    (guard, log)
}

fn commits(recorded: &Recorded) -> [Option<u64>; 4] {
    ["10ms", "100ms", "2s", "longer"].map(|within| {
        recorded.count(&format!("stampede_guard_log_commits_total{{slot=shop,within={within}}}"))
    })
}

/// Commits some messages and waits until they are final.
async fn change(postgres: &PostgresServer, log: &PostgresLog) {
    let client = postgres.connect().await;
    for number in 0..20 {
        let message = LogMessage::new().key(("price", number)).to_bytes();
        client.execute(LogMessage::SQL, &[&message]).await.unwrap();
    }
    let position: String = client.query_one(LogPosition::SQL, &[]).await.unwrap().get(0);
    let position = position.parse().unwrap();
    eventually("the reader has read it", PATIENCE, || log.wait_for(position)).await;
}

#[tokio::test]
async fn a_reader_records_its_commits_and_what_the_server_keeps_until_it_ends() {
    let recorded = Recorded::default();
    // Of this thread, on which all tasks of this test run.
    let _installed = ::metrics::set_default_local_recorder(&recorded);
    let redis = RedisServer::start();
    let postgres = PostgresServer::with_settings([("max_slot_wal_keep_size", "8MB")]);
    let (guard, log) = log(redis.client(), vec![postgres.url()]);
    assert_eq!(commits(&recorded), [Some(0); 4], "from the start");
    assert_eq!((recorded.gauge(READER), recorded.gauge(LAG)), (Some(0.0), Some(0.0)), "from the start");
    assert_eq!((recorded.gauge(LEFT), recorded.count(FINAL)), (None, None), "it is not known");

    let reading = log.spawn();
    // The slot may be made after the first commits: these are in no log.
    change(&postgres, &log).await;
    let before: u64 = commits(&recorded).into_iter().flatten().sum();
    change(&postgres, &log).await;
    let (stats, counted) = (log.stats(), commits(&recorded));
    let expected = [stats.within_10_ms, stats.within_100_ms, stats.within_2_s, stats.later];
    assert_eq!(counted, expected.map(Some));
    let all: u64 = expected.iter().sum();
    assert!(all >= before + 20, "{before} {stats:?}");
    assert_eq!(recorded.count(FINAL), Some(all));
    assert_eq!(recorded.gauge(READER), Some(1.0));
    eventually("the reader looks at its slot", PATIENCE, async || recorded.gauge(LEFT).is_some()).await;
    let (lag, left) = (recorded.gauge(LAG).unwrap(), recorded.gauge(LEFT).unwrap());
    assert!(lag > 0.0 && left > 0.0, "{lag} {left}");
    assert!((BOUND..=BOUND + MEBIBYTE).contains(&(lag + left)), "{lag} + {left}");

    guard.shutdown(Duration::from_secs(5)).await;
    tokio::time::timeout(PATIENCE, reading).await.expect("the reader ends").unwrap();
    assert_eq!((recorded.gauge(READER), recorded.gauge(LAG)), (Some(0.0), Some(0.0)));
}

/// Without `max_slot_wal_keep_size` a slot is never lost, and the disk has no bound.
#[tokio::test]
async fn without_a_bound_a_reader_records_how_much_the_server_keeps_and_nothing_that_is_left() {
    let recorded = Recorded::default();
    let _installed = ::metrics::set_default_local_recorder(&recorded);
    let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
    let (guard, log) = log(redis.client(), vec![postgres.url()]);
    let reading = log.spawn();
    change(&postgres, &log).await;
    eventually("the reader looks at its slot", PATIENCE, async || recorded.gauge(LAG) > Some(0.0)).await;
    assert_eq!(recorded.gauge(LEFT), None);

    // A failure of the server ends the reading until it is back.
    postgres.kill();
    eventually("no process reads", PATIENCE, async || recorded.gauge(READER) == Some(0.0)).await;
    assert_eq!(recorded.gauge(LAG), Some(0.0));
    postgres.start_again();
    eventually("it reads again", PATIENCE, async || recorded.gauge(READER) == Some(1.0)).await;

    // A task that is aborted, or panics, leaves no gauge behind.
    reading.abort();
    assert!(reading.await.unwrap_err().is_cancelled());
    assert_eq!((recorded.gauge(READER), recorded.gauge(LAG)), (Some(0.0), Some(0.0)));
    drop((guard, log));
}

/// docs/metrics.md has each metric of the log and no other, with its labels.
#[tokio::test]
async fn the_page_lists_each_metric_of_the_log() {
    let recorded = Recorded::default();
    let _installed = ::metrics::set_default_local_recorder(&recorded);
    let (_guard, _log) = log(MemoryStore::new(), vec!["postgres://me@db/shop".to_owned()]);
    let described = recorded.described();
    let all: BTreeSet<&str> =
        described.keys().map(String::as_str).filter(|name| name.starts_with("stampede_guard_log_")).collect();
    assert_eq!(all.len(), 5, "{all:?}");
    let page = include_str!("../../../docs/metrics.md");
    let listed: BTreeSet<&str> = page
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("stampede_guard_log_"))
        .collect();
    assert_eq!(listed, all);
    for name in all {
        let labels = if name.ends_with("_total") { "{slot, within}" } else { "{slot}" };
        assert!(page.contains(&format!("`{name}{labels}`")), "{name}{labels}");
        assert!(!described[name].1.is_empty(), "{name} has a help text");
    }
}

#[test]
fn the_buckets_have_the_bounds_of_the_counters() {
    let [(name, bounds)] = BUCKETS else { panic!("one histogram: {BUCKETS:?}") };
    assert_eq!(*name, "stampede_guard_log_final_seconds");
    assert!(bounds.is_sorted_by(|a, b| a < b));
    assert!([0.01, 0.1, 2.0].iter().all(|bound| bounds.contains(bound)), "{bounds:?}");
}
