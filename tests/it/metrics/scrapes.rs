//! `scrape_interval`: what a rate between two scrapes shows of the first counts of a policy.

use std::collections::BTreeMap;
use std::time::Duration;

use stampede_guard::{ErrorKind, MemoryStore, Policy, StampedeGuard};
use tokio::time::sleep;

use super::recorder::Recorded;

const INTERVAL: Duration = Duration::from_secs(15);

fn guard() -> StampedeGuard {
    StampedeGuard::builder(MemoryStore::new()).scrape_interval(INTERVAL).build().expect("valid")
}

fn named(guard: &StampedeGuard, name: &str) -> StampedeGuard {
    guard.with_policy(Policy::builder().name(name).build().expect("valid"))
}

async fn ask(guard: &StampedeGuard, key: u32) {
    guard.get_or_load(key, || async { Ok::<_, String>(1) }).await.expect("loaded");
}

/// What Prometheus computes as `increase`: the differences of successive scrapes. A series has no difference at its first one.
#[derive(Default)]
struct Scraper {
    last: BTreeMap<String, u64>,
    increases: BTreeMap<String, u64>,
}

impl Scraper {
    fn scrape(&mut self, recorded: &Recorded) {
        for series in recorded
            .names()
            .into_iter()
            .filter(|name| name.contains("_total{policy=") || name.contains("_requests_total{"))
        {
            let count = recorded.count(&series).expect("a counter");
            if let Some(last) = self.last.insert(series.clone(), count) {
                *self.increases.entry(series).or_default() += count - last;
            }
        }
    }
}

#[test]
fn rates_include_the_first_counts_of_a_policy_that_is_used_late() {
    // The phases of the scrapes against the seconds in which counters are published.
    for phase_ms in [0, 1, 500, 7_300, 14_999] {
        let (recorded, mut scraper) = (Recorded::default(), Scraper::default());
        recorded.during(async {
            let guard = guard();
            let (late, never) = (named(&guard, "late"), named(&guard, "never"));
            sleep(Duration::from_millis(phase_ms)).await;
            for turn in 0..12 {
                if turn == 5 {
                    for key in [1, 1, 2] {
                        ask(&late, key).await;
                    }
                }
                if turn == 9 {
                    late.get_or_load(3, || async { Err::<u8, _>("no") }).await.expect_err("fails");
                }
                sleep(INTERVAL).await;
                scraper.scrape(&recorded);
            }
            assert!(!recorded.names().concat().contains("never"), "{:?}", recorded.names());
            drop(never);
        });
        for (series, increase) in [
            ("stampede_guard_requests_total{outcome=led,policy=late}", 2),
            ("stampede_guard_requests_total{outcome=hit,policy=late,tier=store}", 1),
            ("stampede_guard_requests_total{outcome=failed,policy=late}", 1),
            ("stampede_guard_requests_total{outcome=stale,policy=late}", 0),
            ("stampede_guard_loads_total{policy=late}", 3),
            ("stampede_guard_loads_saved_total{policy=late}", 1),
            ("stampede_guard_load_failures_total{policy=late,reason=error}", 1),
        ] {
            assert_eq!(scraper.increases.get(series), Some(&increase), "{series} at {phase_ms} ms");
        }
    }
}

#[cfg(feature = "axum")]
#[test]
fn rates_include_the_first_counts_of_a_route() {
    use axum::{Router, body::Body, routing::get};
    use http::Request;
    use tower::ServiceExt as _;

    let (recorded, mut scraper) = (Recorded::default(), Scraper::default());
    recorded.during(async {
        let guard = guard();
        let app = Router::new().route("/users/{id}", get(|| async { "a user" })).layer(guard.clone());
        for paths in [&[][..], &["/users/1", "/users/1"], &[], &["/users/1"], &[], &["/nowhere"], &[], &[]] {
            for path in paths {
                let request =
                    Request::builder().uri(*path).header("host", "shop.example").body(Body::empty());
                app.clone().oneshot(request.expect("a request")).await.expect("infallible");
            }
            sleep(INTERVAL).await;
            scraper.scrape(&recorded);
        }
    });
    for (labels, increase) in [
        ("outcome=led,policy=default,route=/users/{id}", 1),
        ("outcome=hit,policy=default,route=/users/{id},tier=store", 2),
        ("outcome=led,policy=default", 1),
    ] {
        let series = format!("stampede_guard_requests_total{{{labels}}}");
        assert_eq!(scraper.increases.get(&series), Some(&increase), "{series}");
    }
}

#[test]
fn counts_are_withheld_for_the_interval_and_published_when_the_guard_ends() {
    const LOADS: &str = "stampede_guard_loads_total{policy=a}";
    let recorded = Recorded::default();
    recorded.during(async {
        let guard = guard();
        let (a, b) = (named(&guard, "a"), named(&guard, "b"));
        assert_eq!(recorded.count(LOADS), None, "not used yet");
        ask(&a, 1).await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!((recorded.count(LOADS), guard.stats().loads), (Some(0), 1));
        sleep(INTERVAL).await;
        assert_eq!(recorded.count(LOADS), Some(1));
        ask(&a, 2).await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!(recorded.count(LOADS), Some(2), "later counts are not withheld");
        ask(&b, 3).await;
    });
    assert_eq!(recorded.count("stampede_guard_loads_total{policy=b}"), Some(1), "the guard has ended");
}

#[test]
fn an_interval_of_more_than_an_hour_is_refused() {
    let build =
        |secs| StampedeGuard::builder(MemoryStore::new()).scrape_interval(Duration::from_secs(secs)).build();
    let error = build(3601).expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
    assert!(error.to_string().contains("scrape_interval is 3601s: choose at most 3600s"), "{error}");
    build(3600).expect("an hour");
}
