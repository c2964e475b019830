//! The metrics that the runbook lists are those that the `metrics` facade sees.

mod samples;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use stampede_guard::StampedeGuard;

/// Remembers every name and label it is asked for.
#[derive(Default)]
struct Names(Arc<Mutex<BTreeSet<String>>>);

impl Names {
    fn note(&self, key: &Key) {
        let labels = key.labels().map(|label| format!("{}={}", label.key(), label.value()));
        let name = format!("{} {}", key.name(), labels.collect::<Vec<_>>().join(","));
        self.0.lock().expect("no panic").insert(name.trim_end().to_owned());
    }
}

impl Recorder for Names {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.note(key);
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.note(key);
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.note(key);
        Histogram::noop()
    }
}

/// S2.5: leaders, waiters and the duration of waits.
#[test]
fn requests_loads_and_waits_are_counted_without_keys_in_labels() {
    let names = Names::default();
    let seen = Arc::clone(&names.0);
    metrics::with_local_recorder(&names, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let guard = StampedeGuard::in_memory();
            let load = || async {
                tokio::task::yield_now().await;
                Ok::<_, String>(1u8)
            };
            let both = tokio::join!(guard.get_or_load("secret", load), guard.get_or_load("secret", load));
            assert_eq!((both.0.expect("loaded"), both.1.expect("loaded")), (1, 1));
            guard.get_or_load("secret", load).await.expect("hit");
            guard.get_or_load("other", || async { Err::<u8, _>("no") }).await.expect_err("fails");
        });
    });
    let seen = seen.lock().expect("no panic");
    // Only a hit has a tier; for the other outcomes the label is empty.
    let expected = [
        "stampede_guard_load_seconds",
        "stampede_guard_loads_saved_total",
        "stampede_guard_loads_total",
        "stampede_guard_requests_total outcome=coalesced,tier=",
        "stampede_guard_requests_total outcome=failed,tier=",
        "stampede_guard_requests_total outcome=hit,tier=store",
        "stampede_guard_requests_total outcome=led,tier=",
        "stampede_guard_wait_seconds",
    ];
    assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

/// The names of metrics in a text.
fn named(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("stampede_guard_") && word.len() > "stampede_guard_".len())
        .map(str::to_owned)
        .collect()
}

/// Every metric is in the runbook, and the runbook lists no other.
#[test]
fn the_runbook_explains_each_metric() {
    // The gauges of the local tier are published where its lease is renewed.
    let published = concat!(include_str!("../../src/observe.rs"), include_str!("../../src/local/renewal.rs"));
    assert_eq!(named(published), named(include_str!("../../docs/operations.md")));
}
