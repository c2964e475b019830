//! What a log needs of its servers: the report says what is missing, and so do the errors of a reader.

use stampede_guard::{MemoryStore, Policy, StampedeGuard};
use stampede_guard_postgres::PostgresLog;

use crate::support::PATIENCE;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;

fn guard() -> StampedeGuard {
    let policy = Policy::builder().invalidate_all(true).build().unwrap();
    StampedeGuard::builder(MemoryStore::new()).policy(policy).build().unwrap()
}

fn log(guard: &StampedeGuard, url: &str) -> PostgresLog {
    PostgresLog::builder(guard, [url]).slot("stampede_guard").build().unwrap()
}

async fn problems(log: &PostgresLog) -> Vec<String> {
    let report = log.doctor().await;
    report.findings.into_iter().filter(|finding| finding.is_problem).map(|finding| finding.text).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_has_what_is_missing() {
    let (guard, server) = (guard(), PostgresServer::start());
    let unread = log(&guard, &server.url());
    let [unbounded] = &problems(&unread).await[..] else { panic!("one problem") };
    assert!(unbounded.contains("max_slot_wal_keep_size is -1"), "{unbounded}");

    let bounded = PostgresServer::with_settings([("max_slot_wal_keep_size", "64MB")]);
    let bounded_log = log(&guard, &bounded.url());
    let report = bounded_log.doctor().await;
    assert!(
        report.is_healthy() && report.to_string().contains("the slot stampede_guard is not there"),
        "{report}"
    );
    let reading = bounded_log.spawn();
    eventually("it is read", PATIENCE, async || {
        bounded_log.doctor().await.to_string().contains("is read; it keeps")
    })
    .await;
    reading.abort();
    eventually("it is read no more", PATIENCE, async || {
        let problems = problems(&bounded_log).await;
        matches!(&problems[..], [unread] if unread.starts_with("no process reads the slot stampede_guard"))
    })
    .await;

    let minimal =
        PostgresServer::with_settings([("wal_level", "replica"), ("max_slot_wal_keep_size", "64MB")]);
    let [level] = &problems(&log(&guard, &minimal.url())).await[..] else { panic!("one problem") };
    assert_eq!(level, "wal_level is replica: set it to logical, and restart");
    minimal.kill();
    let [gone] = &problems(&log(&guard, &minimal.url())).await[..] else { panic!("one problem") };
    assert!(gone.contains("refused"), "{gone}");
}

/// The rights on the page about Postgres are enough, and without one the report and the reader say so.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough() {
    let server = PostgresServer::with_settings([("max_slot_wal_keep_size", "64MB")]);
    let client = server.connect().await;
    client.batch_execute("create role cache login; create role reader login replication").await.unwrap();
    let url = |role: &str| server.url().replace("//postgres@", &format!("//{role}@"));
    let guard = guard();
    let report = log(&guard, &url("cache")).doctor().await.to_string();
    // The connection itself is one for replication.
    assert!(report.contains("PROBLEM") && report.contains("replication"), "{report}");
    let reader = log(&guard, &url("reader"));
    let [publication] = &problems(&reader).await[..] else { panic!("one problem") };
    assert!(publication.ends_with("run CREATE PUBLICATION stampede_guard"), "{publication}");
    client.batch_execute("create publication stampede_guard").await.unwrap();
    assert!(reader.doctor().await.is_healthy());
    let reading = reader.spawn();
    eventually("it is read", PATIENCE, async || {
        reader.doctor().await.to_string().contains("is read; it keeps")
    })
    .await;
    reading.abort();
}

#[test]
fn settings_are_checked_when_the_log_is_built() {
    let lacks_all = StampedeGuard::in_memory();
    let error = PostgresLog::builder(&lacks_all, ["postgres://me@db"]).build().unwrap_err().to_string();
    assert!(error.contains("Policy::builder().invalidate_all(true)"), "{error}");
    let guard = guard();
    let error =
        |urls: &[&str]| PostgresLog::builder(&guard, urls.iter().copied()).build().unwrap_err().to_string();
    assert!(error(&[]).starts_with("no URL"));
    assert!(error(&["postgres://me@db", "mysql://me@db"]).starts_with("not a URL of Postgres"));
    for name in ["", "a b", "A", "1a", "a'; drop table x", &"a".repeat(60)] {
        let slot = PostgresLog::builder(&guard, ["postgres://me@db"]).slot(name).build().unwrap_err();
        assert!(slot.to_string().starts_with("not a name of a slot"), "{slot}");
        let publication = PostgresLog::builder(&guard, ["postgres://me@db"]).publication(name).build();
        assert!(publication.is_err());
    }
}
