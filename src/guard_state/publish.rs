//! Publishes a guard's counters and gauges through the `metrics` facade: once a second, when the guard ends, and when a policy is new.
//!
//! The counters are the guard's own; a recorder receives the increments since the last time. So a hit needs no look-up of a metrics
//! handle, and a recorder that is installed later still receives all earlier counts.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use metrics::{IntoF64, Key, KeyName, Label, Level, Metadata, Recorder, SharedString, Unit, with_recorder};
use tokio::time::{Instant, sleep};

use super::GuardState;
use crate::health::{Breaker, LinkState};
use crate::metrics::{Kind, METRICS};
use crate::observe::counts::MetricPublication;
use crate::observe::{Outcome, PolicyCounters, Requests};
use crate::task::{OwnedTask, TaskOwner, TaskRef};

const PERIOD: Duration = Duration::from_secs(1);
const METADATA: Metadata<'_> = Metadata::new("stampede_guard", Level::INFO, Some("stampede_guard"));
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl GuardState {
    /// Starts the task that publishes, if there is none and the caller is in a runtime.
    #[inline]
    pub(super) fn begin_to_publish(self: &Arc<Self>) {
        if !self.counters.publishing.is_running() {
            self.counters.publishing.start(self, publish_task);
        }
    }

    /// Publishes now. The counts of new series are withheld for `withhold`.
    pub(super) fn publish_now(&self, withhold: Duration) {
        with_recorder(|recorder| {
            // Without a recorder the increments would be lost.
            if is_installed(recorder, &self.namespace) {
                self.publish_to(recorder, withhold);
            }
        });
    }

    fn publish_to(&self, recorder: &dyn Recorder, withhold: Duration) {
        if !self.counters.is_described.swap(true, Ordering::Relaxed) {
            describe(recorder);
        }
        let now = Instant::now();
        let at_once = MetricPublication { now, withhold: Duration::ZERO, all: true };
        for (metric, label, counter) in self.counters.guard.all() {
            increment(recorder, metric, label.map(label_of), counter.increment(at_once));
        }
        let has_interval = !self.counters.scrape_interval.is_zero();
        for policy in self.counters.policies() {
            let all = !has_interval || policy.is_used();
            publish_policy(recorder, &policy, MetricPublication { now, withhold, all });
        }
        self.publish_gauges(recorder, at_once);
    }

    fn publish_gauges(&self, recorder: &dyn Recorder, at_once: MetricPublication) {
        let health = self.store.health();
        let namespace = || Label::new("namespace", self.namespace.to_string());
        let opened = self.counters.outages.increment_of(health.outages, at_once);
        increment(recorder, "stampede_guard_breaker_opened_total", [namespace()], opened);
        let failed = self.counters.credential_failures.increment_of(health.credential_failures, at_once);
        increment(recorder, "stampede_guard_credential_failures_total", [namespace()], failed);
        let set = |name, labels: &[(&'static str, &str)], value: f64| {
            let labels = labels.iter().map(|&(name, value)| Label::new(name, value.to_owned()));
            let key = Key::from_parts(name, labels.chain([namespace()]).collect::<Vec<_>>());
            recorder.register_gauge(&key, &METADATA).set(value);
        };
        let breaker = match health.breaker {
            Breaker::Closed => 0.0,
            Breaker::Partly => 0.5,
            Breaker::Open => 1.0,
        };
        let seconds = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64();
        let clock_ahead = health.clock.map_or(0.0, |clock| clock.ahead_ms as f64 / 1e3);
        set("stampede_guard_breaker_open", &[], breaker);
        for (connection, link) in [("commands", health.commands), ("inbox", health.inbox)] {
            let up = if link == LinkState::Up { 1.0 } else { 0.0 };
            set("stampede_guard_connected", &[("connection", connection)], up);
        }
        set("stampede_guard_open_connections", &[], health.open_connections as f64);
        set("stampede_guard_inbox_lag_seconds", &[], seconds(health.inbox_lag));
        set("stampede_guard_inbox_silence_seconds", &[], seconds(health.silent_for));
        set("stampede_guard_clock_ahead_seconds", &[], clock_ahead);
        set("stampede_guard_flights", &[], self.flights.len() as f64);
        set("stampede_guard_tasks", &[], self.tasks.count() as f64);
        set("stampede_guard_leases", &[], self.leases.count() as f64);
        set("stampede_guard_kept_invalidations", &[], self.retained.count() as f64);
        if let Some(local) = self.local.health() {
            set("stampede_guard_local_copies", &[], local.copies as f64);
            set("stampede_guard_local_bytes", &[], local.bytes as f64);
            set("stampede_guard_local_capacity_bytes", &[], local.capacity as f64);
            set("stampede_guard_local_lease_seconds", &[], local.lease_remaining.as_secs_f64());
        }
        self.publish_load_limits(set);
        let info = [("version", VERSION), ("topology", &*health.topology.to_string())];
        set("stampede_guard_info", &info, 1.0);
    }

    fn publish_load_limits(&self, set: impl Fn(&'static str, &[(&'static str, &str)], f64)) {
        for (name, queue) in self.load_queues.health() {
            let set = |metric, value| set(metric, &[("limit", &*name)], value);
            set("stampede_guard_loads_waiting", queue.waiting as f64);
            set("stampede_guard_load_permits", queue.held as f64);
            if let Some((limit, least)) = queue.limit {
                set("stampede_guard_load_limit", f64::from(limit.limit));
                set("stampede_guard_load_limit_min", f64::from(least));
                set("stampede_guard_load_limit_rising", f64::from(u8::from(limit.rises)));
                set("stampede_guard_load_limit_throughput", limit.throughput as f64 / 1e3);
            }
        }
    }
}

fn publish_policy(recorder: &dyn Recorder, policy: &PolicyCounters, publication: MetricPublication) {
    let name = || Label::new("policy", SharedString::from_shared(Arc::clone(&policy.name)));
    for (metric, label, counter) in policy.counts.all() {
        let labels = [name()].into_iter().chain(label.map(label_of));
        increment(recorder, metric, labels, counter.increment(publication));
    }
    let saved = policy.loads_saved.increment_of(policy.request_stats().loads_saved(), publication);
    increment(recorder, "stampede_guard_loads_saved_total", [name()], saved);
    publish_requests(recorder, &name(), SharedString::const_str(""), policy.requests(), publication);
    // An outcome of a route exists only once it has occurred: there are many.
    let occurred = MetricPublication { all: false, ..publication };
    policy.routes.each(|route, requests| {
        let route = SharedString::from_shared(Arc::clone(route));
        publish_requests(recorder, &name(), route, requests, occurred);
    });
}

fn publish_requests(
    recorder: &dyn Recorder,
    policy: &Label,
    route: SharedString,
    requests: &Requests,
    publication: MetricPublication,
) {
    for (outcome, count) in requests.increments(publication) {
        // A hit is labelled with its tier; the label is empty for all other outcomes.
        let tier = match outcome {
            Outcome::LocalHit => "local",
            Outcome::Hit => "store",
            _ => "",
        };
        let labels = [("tier", tier), ("outcome", outcome.as_str())].map(label_of);
        let labels = [policy.clone(), Label::new("route", route.clone())].into_iter().chain(labels);
        increment(recorder, "stampede_guard_requests_total", labels, count);
    }
}

fn label_of((name, value): (&'static str, &'static str)) -> Label {
    Label::from_static_parts(name, value)
}

/// Publishes an increment, if there is one. An increment of zero registers the counter.
fn increment(
    recorder: &dyn Recorder,
    metric: &'static str,
    labels: impl IntoIterator<Item = Label>,
    count: Option<u64>,
) {
    if let Some(count) = count {
        let key = Key::from_parts(metric, labels.into_iter().collect::<Vec<_>>());
        recorder.register_counter(&key, &METADATA).increment(count);
    }
}

/// Whether a recorder is installed. If none is, the facade passes a recorder that does nothing, and has no function that distinguishes
/// the two. But only a real gauge converts the number by which it is incremented.
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
        &self.counters.publishing
    }
}

async fn publish_task(task: TaskRef<GuardState>) {
    loop {
        sleep(PERIOD).await;
        let Some(state) = task.owner() else { return };
        state.publish();
    }
}
