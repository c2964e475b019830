//! The histograms have the samples that alerts rely on: loads that do not end, and waits that end badly.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use stampede_guard::{MemoryStore, OnWaitTimeout, Policy, PolicyBuilder, StampedeGuard};
use tokio::time::sleep;

const LOAD: &str = "stampede_guard_load_seconds";
const WAIT: &str = "stampede_guard_wait_seconds";

/// Keeps each histogram's samples.
#[derive(Default)]
struct Samples(Mutex<HashMap<String, Arc<Series>>>);

#[derive(Default)]
struct Series(Mutex<Vec<f64>>);

impl HistogramFn for Series {
    fn record(&self, value: f64) {
        self.0.lock().expect("no panic").push(value);
    }
}

impl Recorder for Samples {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut all = self.0.lock().expect("no panic");
        Histogram::from_arc(Arc::clone(all.entry(key.name().to_owned()).or_default()))
    }
}

impl Samples {
    /// The samples in whole seconds, sorted. Virtual time passes only in the tests' sleeps, and by milliseconds of jitter.
    fn of(&self, name: &str) -> Vec<u64> {
        let all = self.0.lock().expect("no panic");
        let samples = all.get(name).map(|samples| samples.0.lock().expect("no panic").clone());
        let mut samples: Vec<_> =
            samples.unwrap_or_default().into_iter().map(|it| it.round() as u64).collect();
        samples.sort_unstable();
        samples
    }
}

/// Runs `run` in virtual time and returns its samples.
fn recorded(run: impl Future<Output = ()>) -> Samples {
    let samples = Samples::default();
    metrics::with_local_recorder(&samples, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(run);
    });
    samples
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn guard(policy: PolicyBuilder) -> StampedeGuard {
    StampedeGuard::in_memory().with_policy(policy.build().expect("valid"))
}

type Answer = Result<u8, stampede_guard::LoadError<String>>;

/// A caller loads at `here`. Two seconds later another caller comes to `there`, with a load of one second.
async fn one_waits_for<L>(here: &StampedeGuard, there: &StampedeGuard, load: L) -> (Answer, Answer)
where
    L: Future<Output = Result<u8, String>> + Send + 'static,
{
    let late = async {
        sleep(secs(2)).await;
        there.get_or_load("key", || loads_after(secs(1))).await
    };
    tokio::join!(here.get_or_load("key", || load), late)
}

/// The guards of two processes.
fn two_guards() -> (StampedeGuard, StampedeGuard) {
    let store = MemoryStore::new();
    (StampedeGuard::new(store.clone()), StampedeGuard::new(store))
}

async fn fails_after(time: Duration) -> Result<u8, String> {
    sleep(time).await;
    Err("no".to_owned())
}

async fn loads_after(time: Duration) -> Result<u8, String> {
    sleep(time).await;
    Ok(1)
}

async fn panics_after(time: Duration) -> Result<u8, String> {
    sleep(time).await;
    panic!("scripted");
}

#[test]
fn a_load_that_load_timeout_ends_is_in_the_histogram() {
    let samples = recorded(async {
        let guard = guard(Policy::builder().load_timeout(secs(7)));
        let load = || std::future::pending::<Result<u8, String>>();
        guard.get_or_load("key", load).await.expect_err("it has no end");
    });
    assert_eq!((samples.of(LOAD), samples.of(WAIT)), (vec![7], vec![]));
}

#[test]
fn a_load_outside_the_protocol_is_in_the_histogram() {
    let samples = recorded(async {
        let guard = guard(Policy::builder().load_timeout(secs(7)));
        guard.shutdown(Duration::ZERO).await;
        guard.get_or_load("key", || loads_after(secs(3))).await.expect("loaded");
        guard.get_or_load("key", || loads_after(secs(9))).await.expect_err("too long");
    });
    assert_eq!((samples.of(LOAD), samples.of(WAIT)), (vec![3, 7], vec![]));
}

#[test]
fn a_wait_that_ends_in_a_failure_is_in_the_histogram() {
    let samples = recorded(async {
        let guard = guard(Policy::builder());
        let (first, second) = one_waits_for(&guard, &guard, fails_after(secs(5))).await;
        assert!(first.is_err() && second.is_err());
    });
    assert_eq!((samples.of(LOAD), samples.of(WAIT)), (vec![5], vec![3]));
}

#[test]
fn a_wait_for_another_process_that_fails_is_in_the_histogram() {
    let samples = recorded(async {
        let (here, there) = two_guards();
        let (first, second) = one_waits_for(&here, &there, fails_after(secs(5))).await;
        assert!(first.is_err() && second.is_err());
    });
    assert_eq!((samples.of(LOAD), samples.of(WAIT)), (vec![5], vec![3]));
}

/// Callers that waited for a vanished leader lead next. The alert "p99 near `lease`" is about their waits.
#[test]
fn a_wait_for_a_leader_that_vanished_is_in_the_histogram() {
    let here = recorded(async {
        let guard = guard(Policy::builder());
        let (first, second) = one_waits_for(&guard, &guard, panics_after(secs(5))).await;
        assert!(first.is_err() && second.is_ok());
    });
    assert_eq!((here.of(LOAD), here.of(WAIT)), (vec![1, 5], vec![3]));

    let elsewhere = recorded(async {
        let (here, there) = two_guards();
        let (first, second) = one_waits_for(&here, &there, panics_after(secs(5))).await;
        assert!(first.is_err() && second.is_ok());
    });
    assert_eq!((elsewhere.of(LOAD), elsewhere.of(WAIT)), (vec![1, 5], vec![3]));
}

#[test]
fn a_wait_that_ends_with_a_stand_in_or_at_wait_timeout_is_in_the_histogram() {
    let stand_in = recorded(async {
        let guard = guard(
            Policy::builder()
                .fresh_for(secs(60))
                .ttl_jitter(0.0)
                .stale_if_error(secs(3600))
                .soft_timeout(secs(4)),
        );
        guard.insert("key", &1_u8).await.expect("stored");
        sleep(secs(100)).await;
        let ask = || guard.get_or_load("key", || loads_after(secs(9)));
        let (first, second) = tokio::join!(ask(), ask());
        assert!(first.is_ok() && second.is_ok());
        sleep(secs(20)).await;
    });
    assert_eq!((stand_in.of(LOAD), stand_in.of(WAIT)), (vec![9], vec![4]));

    let patience = recorded(async {
        let guard = guard(Policy::builder().wait_timeout(secs(4), OnWaitTimeout::Fail));
        let ask = || guard.get_or_load("key", || loads_after(secs(9)));
        let (first, second) = tokio::join!(ask(), ask());
        assert!(first.is_ok() && second.is_err());
    });
    assert_eq!((patience.of(LOAD), patience.of(WAIT)), (vec![9], vec![4]));

    let anyway = recorded(async {
        let guard = guard(Policy::builder().wait_timeout(secs(4), OnWaitTimeout::Load));
        let ask = || guard.get_or_load("key", || loads_after(secs(9)));
        let (first, second) = tokio::join!(ask(), ask());
        assert!(first.is_ok() && second.is_ok());
    });
    assert_eq!((anyway.of(LOAD), anyway.of(WAIT)), (vec![9, 9], vec![4]));
}
