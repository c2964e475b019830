//! The metrics of a replica's process in Prometheus' text format (feature `metrics`).
//!
//! A service uses `metrics-exporter-prometheus` for this. The lab does without it, so that the other examples do not compile it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use stampede_guard::metrics::BUCKETS;

static REGISTRY: OnceLock<Registry> = OnceLock::new();

/// Begins to record.
pub(crate) fn install() {
    // Fails if there is a recorder already, which then is this one.
    let _ = metrics::set_global_recorder(REGISTRY.get_or_init(Registry::default));
}

/// All metrics.
pub(crate) fn render() -> Option<String> {
    REGISTRY.get().map(Registry::render)
}

#[derive(Default)]
struct Registry {
    families: Mutex<BTreeMap<String, Family>>,
}

/// All series of one name.
struct Family {
    kind: &'static str,
    help: String,
    /// By labels, as they are written.
    series: BTreeMap<String, Series>,
}

#[derive(Clone)]
enum Series {
    Counter(Arc<AtomicU64>),
    Gauge(Arc<AtomicU64>),
    Histogram(Arc<Buckets>),
}

struct Buckets {
    /// Upper bounds. They are the same in each replica, so sums of the replicas' buckets are exact.
    bounds: &'static [f64],
    /// The last one counts values beyond all bounds.
    counts: Vec<AtomicU64>,
    sum: Mutex<f64>,
}

impl Buckets {
    /// With the bounds that the guard recommends for this metric.
    fn of(name: &str) -> Self {
        let known = BUCKETS.iter().find(|(metric, _)| *metric == name);
        let bounds = known.map_or(&[][..], |(_, bounds)| *bounds);
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: Mutex::default(),
        }
    }
}

impl HistogramFn for Buckets {
    fn record(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner) += value;
    }
}

impl Registry {
    fn families(&self) -> MutexGuard<'_, BTreeMap<String, Family>> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn describe(&self, name: &KeyName, kind: &'static str, help: &SharedString) {
        let families = &mut *self.families();
        let new = || Family { kind, help: String::new(), series: BTreeMap::new() };
        families.entry(name.as_str().to_owned()).or_insert_with(new).help = help.to_string();
    }

    fn series(&self, key: &Key, kind: &'static str, new: impl FnOnce() -> Series) -> Series {
        let labels = key.labels().map(|label| format!("{}=\"{}\"", label.key(), escaped(label.value())));
        let labels = labels.collect::<Vec<_>>().join(",");
        let families = &mut *self.families();
        let family = families.entry(key.name().to_owned());
        let family = family.or_insert_with(|| Family { kind, help: String::new(), series: BTreeMap::new() });
        family.series.entry(labels).or_insert_with(new).clone()
    }

    fn render(&self) -> String {
        let mut text = String::new();
        for (name, family) in &*self.families() {
            if !family.help.is_empty() {
                let _ = writeln!(text, "# HELP {name} {}", family.help.replace('\n', " "));
            }
            let _ = writeln!(text, "# TYPE {name} {}", family.kind);
            for (labels, series) in &family.series {
                series.render(&mut text, name, labels);
            }
        }
        text
    }
}

impl Series {
    fn render(&self, text: &mut String, name: &str, labels: &str) {
        let braced = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        // Writing to a text does not fail.
        let _ = match self {
            Self::Counter(value) => writeln!(text, "{name}{braced} {}", value.load(Ordering::Acquire)),
            Self::Gauge(value) => {
                writeln!(text, "{name}{braced} {}", f64::from_bits(value.load(Ordering::Acquire)))
            }
            Self::Histogram(buckets) => {
                let comma = if labels.is_empty() { "" } else { "," };
                let mut sum = 0;
                for (at, count) in buckets.counts.iter().enumerate() {
                    sum += count.load(Ordering::Relaxed);
                    let bound = buckets.bounds.get(at).map_or_else(|| "+Inf".to_owned(), f64::to_string);
                    let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {sum}");
                }
                let total = *buckets.sum.lock().unwrap_or_else(PoisonError::into_inner);
                writeln!(text, "{name}_sum{braced} {total}\n{name}_count{braced} {sum}")
            }
        };
    }
}

/// A label's value as the text format has it.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

impl Recorder for Registry {
    fn describe_counter(&self, name: KeyName, _unit: Option<Unit>, help: SharedString) {
        self.describe(&name, "counter", &help);
    }

    fn describe_gauge(&self, name: KeyName, _unit: Option<Unit>, help: SharedString) {
        self.describe(&name, "gauge", &help);
    }

    fn describe_histogram(&self, name: KeyName, _unit: Option<Unit>, help: SharedString) {
        self.describe(&name, "histogram", &help);
    }

    fn register_counter(&self, key: &Key, _metadata: &Metadata<'_>) -> Counter {
        match self.series(key, "counter", || Series::Counter(Arc::default())) {
            Series::Counter(value) => Counter::from_arc(value),
            _ => Counter::noop(),
        }
    }

    fn register_gauge(&self, key: &Key, _metadata: &Metadata<'_>) -> Gauge {
        match self.series(key, "gauge", || Series::Gauge(Arc::default())) {
            Series::Gauge(value) => Gauge::from_arc(value),
            _ => Gauge::noop(),
        }
    }

    fn register_histogram(&self, key: &Key, _metadata: &Metadata<'_>) -> Histogram {
        match self.series(key, "histogram", || Series::Histogram(Arc::new(Buckets::of(key.name())))) {
            Series::Histogram(buckets) => Histogram::from_arc(buckets),
            _ => Histogram::noop(),
        }
    }
}
