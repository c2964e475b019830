//! A recorder that tests can read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

/// Keeps the value of each series, under its name and its labels in alphabetical order: `name{a=b,c=d}`. Empty labels are left out,
/// as Prometheus does.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorded(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    values: BTreeMap<String, Arc<Value>>,
    described: BTreeMap<String, (Option<Unit>, String)>,
}

#[derive(Debug, Default)]
struct Value {
    count: AtomicU64,
    gauge: Mutex<f64>,
}

impl CounterFn for Value {
    fn increment(&self, value: u64) {
        self.count.fetch_add(value, Ordering::Relaxed);
    }

    fn absolute(&self, _: u64) {
        unreachable!("the guard adds")
    }
}

impl GaugeFn for Value {
    fn increment(&self, value: f64) {
        *self.gauge.lock().expect("no panic") += value;
    }

    fn decrement(&self, value: f64) {
        *self.gauge.lock().expect("no panic") -= value;
    }

    fn set(&self, value: f64) {
        *self.gauge.lock().expect("no panic") = value;
    }
}

impl HistogramFn for Value {
    fn record(&self, _: f64) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Recorded {
    fn series(&self, key: &Key) -> Arc<Value> {
        let mut labels: Vec<_> = key
            .labels()
            .filter(|label| !label.value().is_empty())
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        labels.sort();
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        Arc::clone(self.0.lock().expect("no panic").values.entry(name).or_default())
    }

    fn describe(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        let described = (unit, help.into_owned());
        self.0.lock().expect("no panic").described.insert(name.as_str().to_owned(), described);
    }

    /// The names of all series that were requested.
    pub(super) fn names(&self) -> Vec<String> {
        self.0.lock().expect("no panic").values.keys().cloned().collect()
    }

    /// Unit and help text of each metric.
    pub(super) fn described(&self) -> BTreeMap<String, (Option<Unit>, String)> {
        self.0.lock().expect("no panic").described.clone()
    }

    /// The count of a series; of a histogram, how many samples it has.
    pub(super) fn count(&self, series: &str) -> Option<u64> {
        let state = self.0.lock().expect("no panic");
        state.values.get(series).map(|value| value.count.load(Ordering::Relaxed))
    }

    /// The sum of the counts of all series of a metric.
    pub(super) fn total(&self, metric: &str) -> u64 {
        let state = self.0.lock().expect("no panic");
        let of_metric = state.values.iter().filter(|(name, _)| name.split('{').next() == Some(metric));
        of_metric.map(|(_, value)| value.count.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn gauge(&self, series: &str) -> Option<f64> {
        let state = self.0.lock().expect("no panic");
        state.values.get(series).map(|value| *value.gauge.lock().expect("no panic"))
    }

    /// Runs `run` in virtual time with this recorder.
    pub(super) fn during(&self, run: impl Future<Output = ()>) {
        metrics::with_local_recorder(self, || virtual_time(run));
    }
}

/// Runs `run` on this thread in virtual time.
pub(super) fn virtual_time(run: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(run);
}

impl Recorder for Recorded {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(name, unit, help);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(name, unit, help);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(name, unit, help);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.series(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.series(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.series(key))
    }
}
