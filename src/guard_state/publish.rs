//! Publishes a guard's counters and gauges through the `metrics` facade: once a second, when the guard ends, and when a policy is new.
//!
//! The counters are the guard's own; a recorder receives the increments since the last time. So a hit needs no look-up of a metrics
//! handle, and a recorder that is installed later still receives all earlier counts.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use metrics::{
    Counter, Gauge, IntoF64, Key, KeyName, Label, Level, Metadata, Recorder, SharedString, Unit,
    with_recorder,
};
use tokio::time::sleep;

use super::GuardState;
use crate::health::{Breaker, Health, LinkState};
use crate::metrics::{Kind, METRICS};
use crate::observe::{Outcome, PolicyCounters, Requests, Series};
use crate::task::{OwnedTask, TaskOwner, TaskRef};

const PERIOD: Duration = Duration::from_secs(1);
const METADATA: Metadata<'_> = Metadata::new("stampede_guard", Level::INFO, Some("stampede_guard"));
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl GuardState {
    /// Starts the task that publishes, if there is none and the caller is in a runtime.
    #[inline]
    pub(crate) fn publish_regularly(self: &Arc<Self>) {
        if !self.published.task.is_running() {
            self.published.task.start(self, publish_task);
        }
    }

    /// Publishes the increments since the last time, and the present gauges.
    pub(crate) fn publish(&self) {
        with_recorder(|recorder| {
            // Without a recorder the increments would be lost.
            if is_installed(recorder, &self.namespace) {
                self.publish_to(recorder);
            }
        });
    }

    fn publish_to(&self, recorder: &dyn Recorder) {
        if !self.published.described.swap(true, Ordering::Relaxed) {
            describe(recorder);
        }
        let is_first = !self.published.registered.swap(true, Ordering::Relaxed);
        for (series, counter) in self.counters.guard.all() {
            let count = counter.unpublished();
            if count > 0 || is_first {
                recorder.register_counter(&key(series, Vec::new()), &METADATA).increment(count);
            }
        }
        for policy in self.counters.policies() {
            publish_policy(recorder, &policy);
        }
        self.publish_gauges(recorder);
    }

    fn publish_gauges(&self, recorder: &dyn Recorder) {
        let Health {
            topology,
            commands,
            inbox,
            breaker,
            clock,
            silent_for,
            inbox_lag,
            local,
            outages,
            credential_failures,
            ..
        } = Health { local: self.local.health(), ..self.store.health() };
        let guard = GuardGauges { recorder, namespace: &self.namespace };
        let opened = self.counters.outages.unpublished_of(outages);
        guard.counter("stampede_guard_breaker_opened_total").increment(opened);
        let failed = self.counters.credential_failures.unpublished_of(credential_failures);
        guard.counter("stampede_guard_credential_failures_total").increment(failed);
        guard.set(
            "stampede_guard_breaker_open",
            match breaker {
                Breaker::Closed => 0.0,
                Breaker::Partly => 0.5,
                Breaker::Open => 1.0,
            },
        );
        for (connection, link) in [("commands", commands), ("inbox", inbox)] {
            let up = if link == LinkState::Up { 1.0 } else { 0.0 };
            let labels = vec![Label::new("connection", connection)];
            guard.gauge("stampede_guard_connected", labels).set(up);
        }
        let seconds = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64();
        guard.set("stampede_guard_inbox_lag_seconds", seconds(inbox_lag));
        guard.set("stampede_guard_inbox_silence_seconds", seconds(silent_for));
        guard.set(
            "stampede_guard_clock_ahead_seconds",
            clock.map_or(0.0, |clock| clock.ahead_ms as f64 / 1e3),
        );
        guard.set("stampede_guard_flights", self.flights.len() as f64);
        guard.set("stampede_guard_tasks", self.tasks.count() as f64);
        guard.set("stampede_guard_leases", self.leases.count() as f64);
        guard.set("stampede_guard_kept_invalidations", self.retained.count() as f64);
        if let Some(local) = local {
            guard.set("stampede_guard_local_copies", local.copies as f64);
            guard.set("stampede_guard_local_bytes", local.bytes as f64);
            guard.set("stampede_guard_local_capacity_bytes", local.capacity as f64);
            guard.set("stampede_guard_local_lease_seconds", local.lease_remaining.as_secs_f64());
        }
        let labels = vec![Label::new("version", VERSION), Label::new("topology", topology.to_string())];
        guard.gauge("stampede_guard_info", labels).set(1.0);
    }
}

fn publish_policy(recorder: &dyn Recorder, policy: &PolicyCounters) {
    let name = || Label::new("policy", SharedString::from_shared(Arc::clone(&policy.name)));
    let is_first = policy.is_first_published();
    for (series, counter) in policy.counts.all() {
        let count = counter.unpublished();
        if count > 0 || is_first {
            recorder.register_counter(&key(series, vec![name()]), &METADATA).increment(count);
        }
    }
    let mut saved = 0;
    // The outcomes of requests without a route exist from the start, those of a route from its first request on.
    saved += publish_requests(recorder, &name(), None, policy.requests(), is_first);
    policy.routes.each(|route, requests| {
        saved += publish_requests(recorder, &name(), Some(route), requests, false);
    });
    if saved > 0 || is_first {
        let series = Series { metric: "stampede_guard_loads_saved_total", label: None };
        recorder.register_counter(&key(series, vec![name()]), &METADATA).increment(saved);
    }
}

/// Returns how many of these requests did not load for themselves.
fn publish_requests(
    recorder: &dyn Recorder,
    policy: &Label,
    route: Option<&Arc<str>>,
    requests: &Requests,
    is_first: bool,
) -> u64 {
    let mut saved = 0;
    for (outcome, count) in requests.unpublished() {
        if count == 0 && !is_first {
            continue;
        }
        // A hit is labelled with its tier; the label is empty for all other outcomes.
        let tier = match outcome {
            Outcome::LocalHit => "local",
            Outcome::Hit => "store",
            _ => "",
        };
        if matches!(outcome, Outcome::LocalHit | Outcome::Hit | Outcome::Stale | Outcome::Coalesced) {
            saved += count;
        }
        let route =
            route.map_or(SharedString::const_str(""), |route| SharedString::from_shared(Arc::clone(route)));
        let labels = vec![policy.clone(), Label::new("route", route), Label::new("tier", tier)];
        let series =
            Series { metric: "stampede_guard_requests_total", label: Some(("outcome", outcome.as_str())) };
        recorder.register_counter(&key(series, labels), &METADATA).increment(count);
    }
    saved
}

fn key(series: Series, mut labels: Vec<Label>) -> Key {
    labels.extend(series.label.map(|(name, value)| Label::new(name, value)));
    Key::from_parts(series.metric, labels)
}

struct GuardGauges<'a> {
    recorder: &'a dyn Recorder,
    namespace: &'a str,
}

impl GuardGauges<'_> {
    fn gauge(&self, name: &'static str, mut labels: Vec<Label>) -> Gauge {
        labels.push(Label::new("namespace", self.namespace.to_owned()));
        self.recorder.register_gauge(&Key::from_parts(name, labels), &METADATA)
    }

    fn set(&self, name: &'static str, value: f64) {
        self.gauge(name, Vec::new()).set(value);
    }

    fn counter(&self, name: &'static str) -> Counter {
        let labels = vec![Label::new("namespace", self.namespace.to_owned())];
        self.recorder.register_counter(&Key::from_parts(name, labels), &METADATA)
    }
}

/// Whether a recorder is installed. If none is, the facade passes one that does nothing, and has no function that distinguishes
/// the two. But only a real gauge converts the number that it is set to.
fn is_installed(recorder: &dyn Recorder, namespace: &str) -> bool {
    struct ConversionProbe<'a>(&'a Cell<bool>);
    impl IntoF64 for ConversionProbe<'_> {
        fn into_f64(self) -> f64 {
            self.0.set(true);
            0.0
        }
    }
    let is_converted = Cell::new(false);
    let labels = vec![Label::new("namespace", namespace.to_owned())];
    let gauge = recorder.register_gauge(&Key::from_parts("stampede_guard_flights", labels), &METADATA);
    gauge.increment(ConversionProbe(&is_converted));
    is_converted.get()
}

fn describe(recorder: &dyn Recorder) {
    for metric in METRICS {
        let unit = match metric.unit() {
            Some("seconds") => Some(Unit::Seconds),
            Some("bytes") => Some(Unit::Bytes),
            _ => None,
        };
        let (name, help) = (KeyName::from_const_str(metric.name), SharedString::const_str(metric.help));
        match metric.kind {
            Kind::Counter => recorder.describe_counter(name, unit, help),
            Kind::Gauge => recorder.describe_gauge(name, unit, help),
            Kind::Histogram => recorder.describe_histogram(name, unit, help),
        }
    }
}

impl TaskOwner for GuardState {
    fn owned_task(&self) -> &OwnedTask {
        &self.published.task
    }
}

async fn publish_task(task: TaskRef<GuardState>) {
    loop {
        sleep(PERIOD).await;
        let Some(state) = task.owner() else { return };
        state.publish();
    }
}
