//! The metrics that a recorder receives, and the pages that list them.

mod recorder;
#[cfg(feature = "axum")]
mod routes;
mod samples;
mod scrapes;

use std::collections::BTreeSet;
use std::time::Duration;

use metrics::Unit;
use recorder::{Recorded, virtual_time};
use stampede_guard::metrics::{BUCKETS, Kind, METRICS};
use stampede_guard::{ErrorKind, MemoryStore, OnWaitTimeout, Policy, StampedeGuard};
use tokio::time::sleep;

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

async fn loads_after(time: Duration) -> Result<u8, String> {
    sleep(time).await;
    Ok(1)
}

/// S2.5: leaders, waiters and the duration of waits.
#[test]
fn requests_loads_and_waits_are_recorded_without_keys_in_labels() {
    let recorded = Recorded::default();
    recorded.during(async {
        let guard = StampedeGuard::in_memory();
        let load = || loads_after(secs(1));
        let both = tokio::join!(guard.get_or_load("secret", load), guard.get_or_load("secret", load));
        assert_eq!((both.0.expect("loaded"), both.1.expect("loaded")), (1, 1));
        guard.get_or_load("secret", load).await.expect("hit");
        guard.get_or_load("other", || async { Err::<u8, _>("no") }).await.expect_err("fails");
    });
    let count = |series: &str| recorded.count(series).unwrap_or_else(|| panic!("no {series}"));
    for (outcome, requests) in [
        ("outcome=led,policy=default", 1),
        ("outcome=coalesced,policy=default", 1),
        ("outcome=hit,policy=default,tier=store", 1),
        ("outcome=hit,policy=default,tier=local", 0),
        ("outcome=failed,policy=default", 1),
        ("outcome=stale,policy=default", 0),
        ("outcome=bypassed,policy=default", 0),
    ] {
        assert_eq!(count(&format!("stampede_guard_requests_total{{{outcome}}}")), requests, "{outcome}");
    }
    assert_eq!(count("stampede_guard_loads_total{policy=default}"), 2);
    assert_eq!(count("stampede_guard_loads_saved_total{policy=default}"), 2);
    assert_eq!(count("stampede_guard_load_seconds{policy=default}"), 2);
    assert_eq!(count("stampede_guard_wait_seconds{policy=default}"), 1);
    assert_eq!(count("stampede_guard_load_failures_total{policy=default,reason=error}"), 1);
    let names = recorded.names().concat();
    assert!(!names.contains("secret") && !names.contains("other"), "{names}");
}

#[test]
fn counters_exist_from_the_start_with_their_units_and_help_texts() {
    let recorded = Recorded::default();
    // There is no runtime here: a guard can be made before there is one.
    let guard = metrics::with_local_recorder(&recorded, StampedeGuard::in_memory);
    let names = recorded.names();
    for metric in METRICS.iter().filter(|metric| metric.kind == Kind::Counter) {
        let of_metric = |name: &&String| name.split('{').next() == Some(metric.name);
        assert!(names.iter().any(|name| of_metric(&name)), "{} is missing: {names:?}", metric.name);
    }
    let described = recorded.described();
    for metric in METRICS {
        let (unit, help) = &described[metric.name];
        assert_eq!(help, metric.help);
        let expected = if metric.name.ends_with("_seconds") {
            Some(Unit::Seconds)
        } else if metric.name.ends_with("_bytes") {
            Some(Unit::Bytes)
        } else {
            None
        };
        assert_eq!(*unit, expected, "{}", metric.name);
        assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
    }
    assert_eq!(described.len(), METRICS.len());
    drop(guard);
}

#[test]
fn each_series_has_the_labels_of_its_metric() {
    let recorded = Recorded::default();
    recorded.during(async {
        let guard = StampedeGuard::builder(MemoryStore::new()).namespace("shop").build().expect("valid");
        guard.get_or_load("key", || loads_after(secs(1))).await.expect("loaded");
    });
    for series in recorded.names() {
        let (name, labels) = series.trim_end_matches('}').split_once('{').expect("a series");
        let metric = METRICS.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("{name}"));
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            let (label, _) = label.split_once('=').expect("a label");
            assert!(metric.labels.contains(&label), "{series}");
        }
    }
    assert_eq!(
        recorded.gauge("stampede_guard_breaker_open{namespace=shop}"),
        Some(1.0),
        "the guard has ended"
    );
}

#[test]
fn each_histogram_has_bounds_that_grow() {
    let histograms: BTreeSet<_> =
        METRICS.iter().filter(|metric| metric.kind == Kind::Histogram).map(|metric| metric.name).collect();
    assert_eq!(BUCKETS.iter().map(|(name, _)| *name).collect::<BTreeSet<_>>(), histograms);
    for (name, bounds) in BUCKETS {
        assert!(bounds.is_sorted_by(|a, b| a < b) && bounds.len() > 5, "{name}");
    }
}

#[test]
fn a_recorder_that_is_installed_later_receives_all_earlier_counts() {
    let recorded = Recorded::default();
    virtual_time(async {
        let guard = StampedeGuard::in_memory();
        for key in 0..7_u32 {
            guard.get_or_load(("k", key), || loads_after(secs(1))).await.expect("loaded");
        }
        let _installed = metrics::set_default_local_recorder(&recorded);
        // Two seconds are enough for a second of waiting and for the task that publishes.
        sleep(secs(2)).await;
        assert_eq!(recorded.count("stampede_guard_loads_total{policy=default}"), Some(7));
        guard.get_or_load("last", || loads_after(secs(1))).await.expect("loaded");
        sleep(secs(2)).await;
        assert_eq!(recorded.count("stampede_guard_loads_total{policy=default}"), Some(8));
        assert_eq!(recorded.described().len(), METRICS.len());
    });
}

#[test]
fn guards_of_one_process_add_up() {
    let recorded = Recorded::default();
    recorded.during(async {
        for namespace in ["a", "b"] {
            let guard =
                StampedeGuard::builder(MemoryStore::new()).namespace(namespace).build().expect("valid");
            guard.get_or_load("key", || loads_after(secs(1))).await.expect("loaded");
            sleep(secs(1)).await;
        }
    });
    assert_eq!(recorded.count("stampede_guard_loads_total{policy=default}"), Some(2));
    let up = "stampede_guard_connected{connection=commands,namespace=";
    assert_eq!(
        (recorded.gauge(&format!("{up}a}}")), recorded.gauge(&format!("{up}b}}"))),
        (Some(0.0), Some(0.0))
    );
}

#[test]
fn each_policy_has_counts_under_its_name() {
    let recorded = Recorded::default();
    recorded.during(async {
        let guard = StampedeGuard::in_memory();
        let reports = guard.with_policy(Policy::builder().name("reports").build().expect("valid"));
        assert_eq!(recorded.count("stampede_guard_loads_total{policy=reports}"), Some(0), "from the start");
        let short_lived = reports.policy().to_builder().fresh_for(secs(1)).build().expect("valid");
        guard.get_or_load("a", || loads_after(secs(1))).await.expect("loaded");
        for (key, guard) in [("b", &reports), ("c", &reports), ("d", &guard.with_policy(short_lived))] {
            guard.get_or_load(key, || loads_after(secs(1))).await.expect("loaded");
        }
        // The stats are those of the guard.
        assert_eq!((guard.stats().loads, reports.stats().loads), (4, 4));
    });
    assert_eq!(recorded.count("stampede_guard_loads_total{policy=default}"), Some(1));
    assert_eq!(recorded.count("stampede_guard_loads_total{policy=reports}"), Some(3));
    assert_eq!(recorded.count("stampede_guard_load_seconds{policy=reports}"), Some(3));
}

/// The provider fails before there is a connection, so this needs no server.
#[cfg(feature = "redis")]
#[test]
fn failures_of_the_provider_of_credentials_are_recorded() {
    use stampede_guard::{Backend, Credentials};

    const FAILURES: &str = "stampede_guard_credential_failures_total{namespace=default}";
    let recorded = Recorded::default();
    recorded.during(async {
        let backend = Backend::try_from("redis://127.0.0.1:1/").expect("an address");
        let backend = backend.credentials(|| async { Err::<Credentials, _>("no token today") });
        let guard = StampedeGuard::builder(backend).build().expect("valid");
        assert_eq!(recorded.count(FAILURES), Some(0), "from the start");
        guard.connect().await.expect_err("no credentials");
        sleep(secs(2)).await;
        assert!(recorded.count(FAILURES) >= Some(1));
        guard.shutdown(secs(1)).await;
        let failed = guard.health().credential_failures;
        drop(guard);
        sleep(secs(2)).await;
        assert_eq!(recorded.count(FAILURES), Some(failed), "each is reported once");
    });
}

#[test]
fn a_name_that_no_dashboard_could_show_is_refused() {
    for (name, words) in [
        ("", "name has 0 bytes: choose 1 to 64"),
        (&*"x".repeat(65), "name has 65 bytes"),
        ("my reports", "the character ' '"),
        ("a\"b", "the character '\"'"),
        ("kö", "the character 'ö'"),
    ] {
        let error = Policy::builder().name(name).build().expect_err(name);
        assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
        assert!(error.to_string().contains(words), "{error}");
    }
    let policy = Policy::builder().name("api/v1:user.list_2-x").build().expect("valid");
    assert_ne!(policy, Policy::default());
}

#[test]
fn failures_of_loads_are_recorded_by_their_reason() {
    let recorded = Recorded::default();
    recorded.during(async {
        let policy = Policy::builder().load_timeout(secs(5)).build().expect("valid");
        let guard = StampedeGuard::in_memory().with_policy(policy);
        guard.get_or_load("a", || async { Err::<u8, _>("no") }).await.expect_err("fails");
        guard.get_or_load("b", || loads_after(secs(9))).await.expect_err("too slow");
        guard
            .get_or_load("c", || async { panic!("scripted") as Result<u8, String> })
            .await
            .expect_err("panics");
        let stats = guard.stats();
        assert_eq!((stats.load_errors, stats.load_timeouts, stats.loads_vanished), (1, 1, 1));
    });
    for reason in ["error", "timeout", "vanished"] {
        let series = format!("stampede_guard_load_failures_total{{policy=default,reason={reason}}}");
        assert_eq!(recorded.count(&series), Some(1), "{series}");
    }
}

/// The alert "waits near wait_timeout" needs this counter, because each policy has another `wait_timeout`.
#[test]
fn waits_of_four_fifths_of_wait_timeout_are_long() {
    virtual_time(async {
        let policy = Policy::builder().wait_timeout(secs(10), OnWaitTimeout::Load).build().expect("valid");
        let guard = StampedeGuard::in_memory().with_policy(policy);
        for (key, time) in [("short", 7), ("long", 9), ("longer", 15)] {
            let ask = || guard.get_or_load(key, move || loads_after(secs(time)));
            let (first, second) = tokio::join!(ask(), ask());
            assert!(first.is_ok() && second.is_ok());
        }
        assert_eq!(guard.stats().long_waits, 2);
    });
}

/// A leader that is killed reports nothing, so its successor reports the lease that expired.
#[test]
fn a_lease_that_ends_with_its_holder_is_recorded_by_its_successor() {
    let store = MemoryStore::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let policy = || Policy::builder().lease(Duration::from_millis(300)).build().expect("valid");
    let (dead, live) =
        [store.clone(), store].map(|store| StampedeGuard::new(store).with_policy(policy())).into();
    let dying = runtime();
    dying.block_on(async {
        let load = dead.get_or_load("key", std::future::pending::<Result<u8, String>>);
        tokio::time::timeout(Duration::from_millis(50), load).await.expect_err("it has no end");
    });
    // The load and the renewals of its lease end with their runtime.
    drop(dying);
    runtime().block_on(async {
        live.get_or_load("key", || loads_after(Duration::ZERO)).await.expect("loaded after the lease");
        assert_eq!((live.stats().leases_expired, live.stats().led), (1, 1));
        // A lease that its holder has ended in any way does not count.
        live.invalidate("key").await.expect("invalidated");
        live.get_or_load("key", || loads_after(Duration::ZERO)).await.expect("loaded");
        assert_eq!(live.stats().leases_expired, 1);
    });
}

#[test]
fn a_lease_that_is_handed_over_has_not_expired() {
    virtual_time(async {
        let store = MemoryStore::new();
        let (here, there) = [store.clone(), store].map(StampedeGuard::new).into();
        let panics = || async {
            sleep(secs(5)).await;
            panic!("scripted") as Result<u8, String>
        };
        let late = async {
            sleep(secs(1)).await;
            there.get_or_load("key", || loads_after(secs(1))).await
        };
        let (first, second) = tokio::join!(here.get_or_load("key", panics), late);
        assert!(first.is_err() && second.is_ok());
        assert_eq!(there.stats().leases_expired, 0);
    });
}

/// The names of metrics that occur in a text.
fn named(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("stampede_guard_") && word.len() > "stampede_guard_".len())
        .collect()
}

/// Every metric is in docs/metrics.md, and the page lists no other. Those of the log are of another package, which tests them.
#[test]
fn the_runbook_explains_each_metric() {
    let all: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(all.len(), METRICS.len(), "a name is there twice");
    let mut explained = named(include_str!("../../docs/metrics.md"));
    explained.retain(|name| !name.starts_with("stampede_guard_log_") && *name != "stampede_guard_postgres");
    assert_eq!(explained, all);
}
