//! The metrics that the guard publishes through the [`metrics`](https://docs.rs/metrics) facade: names, labels, units, help texts,
//! and bounds of buckets.
//!
//! Install a recorder; nothing else needs to be called. A guard describes its metrics when it is made, and counts from zero on; a
//! recorder that is installed later receives all earlier counts. Counters and gauges are published once a second and
//! when the guard ends, histograms at each record.
//!
//! A histogram can be aggregated across replicas only if all have the same buckets. An exporter without buckets makes quantiles of a
//! histogram, which cannot be aggregated at all. So give the exporter these buckets:
//!
//! ```
//! # struct Builder;
//! # impl Builder { fn set_buckets(&mut self, _: &str, _: &[f64]) {} }
//! # let mut builder = Builder;
//! // With `metrics-exporter-prometheus`:
//! // builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)?
//! for (name, bounds) in stampede_guard::metrics::BUCKETS {
//!     builder.set_buckets(name, bounds);
//! }
//! ```
//!
//! The repository has a dashboard, alerts and a runbook for these metrics (`ops/`, `docs/metrics.md`, `docs/runbook.md`).

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A count that only grows, from zero on.
    Counter,
    /// A number that goes up and down.
    Gauge,
    /// A distribution, with the bounds of [`BUCKETS`].
    Histogram,
}

/// A metric of the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// The name of the metric, with unit and `_total` by the conventions of Prometheus and OpenTelemetry.
    pub name: &'static str,
    /// The kind of the metric.
    pub kind: Kind,
    /// The names of the metric's labels. No label holds a key.
    pub labels: &'static [&'static str],
    /// What the metric measures.
    pub help: &'static str,
}

const TIMES: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0];

/// The bounds for ages, from a second to a week.
const AGES: &[f64] =
    &[1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 10_800.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0];

/// The upper bounds of the buckets of each histogram.
pub const BUCKETS: &[(&str, &[f64])] = &[
    ("stampede_guard_audit_age_seconds", AGES),
    ("stampede_guard_load_seconds", TIMES),
    ("stampede_guard_permit_wait_seconds", TIMES),
    ("stampede_guard_wait_seconds", TIMES),
];

/// The metrics: kind, name after `stampede_guard_`, labels, and what it measures. A gauge is set by one guard, and a process may have
/// several: the label `namespace` distinguishes them.
macro_rules! metrics {
    ($($kind:ident $name:ident($($label:ident),*) $help:literal;)*) => {
        /// All metrics of the guard.
        pub const METRICS: &[Metric] = &[$(Metric {
            name: concat!("stampede_guard_", stringify!($name)),
            kind: Kind::$kind,
            labels: &[$(stringify!($label)),*],
            help: $help,
        }),*];
    };
}

metrics! {
    Counter requests_total(policy, route, outcome, tier) "Requests by how they were answered; a hit has a tier.";
    Counter loads_saved_total(policy) "Requests that were answered without a load of their own: hits, stale values, shared loads.";
    Counter loads_total(policy) "Loads that were started, of every kind.";
    Counter load_failures_total(policy, reason) "Loads that ended without a value.";
    Counter refreshes_total(policy) "Background loads that this process tried to begin.";
    Counter early_refreshes_total(policy) "Background loads for a value that was fresh.";
    Counter fail_open_loads_total(policy) "Loads that ran without the fleet because the store could not be asked.";
    Counter commits_refused_total(policy) "Loads whose value was not stored because their lease was gone.";
    Counter leases_lost_total(policy) "Leases that were lost while their load ran here.";
    Counter leases_expired_total(policy)
        "Leases that ended with their holder: it did not renew them, and this process, which waited, loads instead.";
    Counter budget_exceeded_total(policy) "Requests that went on without the store because their coordination budget was used up.";
    Counter long_waits_total(policy) "Waits for another caller's load that took at least four fifths of wait_timeout.";
    Counter stand_ins_total(policy) "Failed loads for which an older value stood in.";
    Counter soft_timeouts_total(policy) "Requests that were given an older value because the load was slow.";
    Counter negatives_total(policy) "Loaded values that say that there is nothing.";
    Counter overloaded_total(policy) "Loads and callers beyond a bound of the policy.";
    Counter loads_left_total(policy) "Loads that all callers had left before they got a permit, so that they did not run.";
    Counter takeovers_total(policy) "Loads that went on with another caller's loader after the first one vanished.";
    Counter unshareable_total(policy) "Values that could not be shared: too long, or not encodable. Each caller loads them for itself.";
    Counter audits_total(policy, result) "Hits whose value was compared with the origin's: match, differs, failed.";
    Counter store_errors_total() "Commands that failed, or were not answered in time.";
    Counter unreadable_total() "Stored bytes that were no readable entry.";
    Counter invalidations_total() "Confirmed invalidations.";
    Counter invalidations_unconfirmed_total() "Invalidations that were not confirmed in time, or before their caller gave up.";
    Counter invalidations_resent_total() "Unconfirmed invalidations that were kept and confirmed later.";
    Counter invalidations_overflowed_total() "Times that too many invalidations were kept, so that everything was invalidated instead.";
    Counter local_fills_total() "Copies that were made in this process's memory.";
    Counter local_drops_total() "Keys and tags whose copies were dropped because of a change.";
    Counter local_lapses_total() "Times that the lease on copies was not renewed in time, so that nothing was served from memory.";
    Counter local_waits_total() "Changes that waited for a silent process until its lease on copies had ended.";
    Counter breaker_opened_total(namespace) "Times that the breaker has opened: commands could not be sent any more.";
    Counter credential_failures_total(namespace)
        "Times that the provider of credentials has failed, or that the server has refused what it gave.";
    Gauge breaker_open(namespace)
        "1 while the breaker is open, so that no command is sent; 0.5 if it is open for some masters of a cluster.";
    Gauge connected(namespace, connection) "1 while the connection is up, else 0.";
    Gauge open_connections(namespace) "Open connections for commands; in a cluster those to all masters together.";
    Gauge inbox_lag_seconds(namespace) "How long the latest ping of the inbox took, or has taken so far; 0 while it is not connected.";
    Gauge inbox_silence_seconds(namespace) "Time since the inbox last heard from the server; 0 before it was first connected.";
    Gauge clock_ahead_seconds(namespace) "How far the server's clock is ahead of this host's; 0 before it was read.";
    Gauge flights(namespace) "Flights that can be joined.";
    Gauge tasks(namespace) "Tasks of flights that run, detached ones included.";
    Gauge leases(namespace) "Leases that this process holds.";
    Gauge kept_invalidations(namespace) "Keys and tags with an invalidation that the store has not confirmed yet.";
    Gauge local_copies(namespace) "Copies in this process's memory.";
    Gauge local_bytes(namespace) "Bytes that these copies take, by estimate.";
    Gauge local_capacity_bytes(namespace) "Bytes that these copies may take.";
    Gauge local_lease_seconds(namespace) "How long this process may still serve from memory unless its lease is renewed.";
    Gauge loads_waiting(namespace, limit) "Loads of this process that wait for a permit of this limit.";
    Gauge load_permits(namespace, limit) "Permits of this limit that loads of this process hold.";
    Gauge load_limit(namespace, limit) "How many loads the whole fleet may run at once by an adaptive limit, as this process last saw it.";
    Gauge load_limit_min(namespace, limit) "The least value of an adaptive limit.";
    Gauge load_limit_rising(namespace, limit) "1 if the next step of an adaptive limit is upwards, else 0.";
    Gauge load_limit_throughput(namespace, limit)
        "Loads per second of the fleet that succeeded in the last window in which they needed the whole adaptive limit, else 0.";
    Gauge info(namespace, version, topology) "Always 1.";
    Histogram wait_seconds(policy) "How long requests waited for another caller's load, however the wait ended.";
    Histogram permit_wait_seconds(policy) "How long loads waited for a permit, however the wait ended.";
    Histogram audit_age_seconds(policy) "How old a value was that an audit found to differ.";
    Histogram load_seconds(policy) "How long loads took, however they ended.";
}

impl Metric {
    /// The unit of the metric, by its name: `seconds`, `bytes`, or none.
    pub fn unit(&self) -> Option<&'static str> {
        let name = self.name.strip_suffix("_total").unwrap_or(self.name);
        ["seconds", "bytes"].into_iter().find(|unit| name.ends_with(unit))
    }
}
