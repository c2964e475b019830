//! A recorder of the `metrics` facade that records with an OpenTelemetry meter: names, units, help texts and the guard's bounds of
//! buckets go along.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use opentelemetry::KeyValue;
use opentelemetry::metrics::Meter;
use stampede_guard::metrics::BUCKETS;

/// Records what is recorded through the facade with this meter.
#[derive(Debug)]
pub struct MeterRecorder {
    meter: Meter,
    described: Mutex<HashMap<String, (Option<Unit>, String)>>,
}

impl MeterRecorder {
    /// A recorder for `metrics::set_global_recorder`.
    pub fn new(meter: Meter) -> Self {
        Self { meter, described: Mutex::default() }
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>, help: &SharedString) {
        let mut described = self.described.lock().unwrap_or_else(PoisonError::into_inner);
        described.insert(name.as_str().to_owned(), (unit, help.to_string()));
    }

    /// Name, unit and help text of a metric. OpenTelemetry's names have no `_total` and no unit: an exporter for Prometheus adds them.
    fn described(&self, key: &Key) -> (String, &'static str, String) {
        let described = self.described.lock().unwrap_or_else(PoisonError::into_inner);
        let (unit, help) = described.get(key.name()).cloned().unwrap_or_default();
        let (unit, suffix) = match unit {
            Some(Unit::Seconds) => ("s", "_seconds"),
            Some(Unit::Bytes) => ("By", "_bytes"),
            _ => ("1", ""),
        };
        let name = key.name().trim_end_matches("_total").trim_end_matches(suffix);
        (name.to_owned(), unit, help)
    }
}

fn labels(key: &Key) -> Vec<KeyValue> {
    // An empty label means that there is none.
    let labels = key.labels().filter(|label| !label.value().is_empty());
    labels.map(|label| KeyValue::new(label.key().to_owned(), label.value().to_owned())).collect()
}

struct Labelled<I>(I, Vec<KeyValue>);

impl CounterFn for Labelled<opentelemetry::metrics::Counter<u64>> {
    fn increment(&self, value: u64) {
        self.0.add(value, &self.1);
    }

    fn absolute(&self, _: u64) {
        // A meter's counter only adds, and the guard asks for nothing else.
    }
}

impl GaugeFn for Labelled<opentelemetry::metrics::Gauge<f64>> {
    fn increment(&self, _: f64) {
        // A meter's gauge is only set, and the guard asks for nothing else.
    }

    fn decrement(&self, _: f64) {}

    fn set(&self, value: f64) {
        self.0.record(value, &self.1);
    }
}

impl HistogramFn for Labelled<opentelemetry::metrics::Histogram<f64>> {
    fn record(&self, value: f64) {
        self.0.record(value, &self.1);
    }
}

impl Recorder for MeterRecorder {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(&name, unit, &help);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(&name, unit, &help);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.describe(&name, unit, &help);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let (name, unit, help) = self.described(key);
        let counter = self.meter.u64_counter(name).with_unit(unit).with_description(help).build();
        Counter::from_arc(Arc::new(Labelled(counter, labels(key))))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let (name, unit, help) = self.described(key);
        let gauge = self.meter.f64_gauge(name).with_unit(unit).with_description(help).build();
        Gauge::from_arc(Arc::new(Labelled(gauge, labels(key))))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let (name, unit, help) = self.described(key);
        let mut histogram = self.meter.f64_histogram(name).with_unit(unit).with_description(help);
        if let Some((_, bounds)) = BUCKETS.iter().find(|(metric, _)| *metric == key.name()) {
            histogram = histogram.with_boundaries(bounds.to_vec());
        }
        Histogram::from_arc(Arc::new(Labelled(histogram.build(), labels(key))))
    }
}
