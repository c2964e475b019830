//! The metrics that the guard publishes through the [`metrics`](https://docs.rs/metrics) facade: names, labels, units, help texts,
//! and bounds of buckets.
//!
//! Install a recorder; nothing else needs to be called. A guard describes its metrics when it is made, and counts from zero on; a
//! recorder that is installed later receives all earlier counts. Counters and gauges are published once a second and
//! when the guard ends, histograms at each record.
//!
//! A histogram can be aggregated across replicas only if all have the same buckets, and exporters without buckets make quantiles of
//! them, which can not be aggregated at all. So give the exporter these:
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
//! The repository has a dashboard, alerts and a runbook for them (`ops/`, `docs/metrics.md`, `docs/runbook.md`).

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// It only grows, from zero on.
    Counter,
    /// It goes up and down.
    Gauge,
    /// A distribution, with the bounds of [`BUCKETS`].
    Histogram,
}

/// A metric of the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// Its name, with unit and `_total` by the conventions of Prometheus and OpenTelemetry.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// The names of its labels. No label holds a key.
    pub labels: &'static [&'static str],
    /// What it measures.
    pub help: &'static str,
}

const TIMES: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0];

/// From a moment to a week.
const AGES: &[f64] =
    &[1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 10_800.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0];

/// The upper bounds of the buckets of each histogram.
pub const BUCKETS: &[(&str, &[f64])] = &[
    ("stampede_guard_audit_age_seconds", AGES),
    ("stampede_guard_load_seconds", TIMES),
    ("stampede_guard_wait_seconds", TIMES),
];

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, labels, help }
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, help }
}

const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Histogram, labels, help }
}

const POLICY: &[&str] = &["policy"];
/// A gauge is set by one guard, and a process may have several: the namespace distinguishes them.
const GUARD: &[&str] = &["namespace"];

/// All metrics of the guard.
pub const METRICS: &[Metric] = &[
    counter(
        "stampede_guard_requests_total",
        &["policy", "route", "outcome", "tier"],
        "Requests by how they were answered; a hit has a tier.",
    ),
    counter(
        "stampede_guard_loads_saved_total",
        POLICY,
        "Requests that were answered without a load of their own: hits, stale values, shared loads.",
    ),
    counter("stampede_guard_loads_total", POLICY, "Loads that were started, of every kind."),
    counter("stampede_guard_load_failures_total", &["policy", "reason"], "Loads that ended without a value."),
    counter("stampede_guard_refreshes_total", POLICY, "Background loads that this process tried to begin."),
    counter("stampede_guard_early_refreshes_total", POLICY, "Background loads for a value that was fresh."),
    counter(
        "stampede_guard_fail_open_loads_total",
        POLICY,
        "Loads that ran without the fleet because the store could not be asked.",
    ),
    counter(
        "stampede_guard_commits_refused_total",
        POLICY,
        "Loads whose value was not stored because their lease was gone.",
    ),
    counter("stampede_guard_leases_lost_total", POLICY, "Leases that were lost while their load ran here."),
    counter(
        "stampede_guard_leases_expired_total",
        POLICY,
        "Leases that ended with their holder: it did not renew them, and this process, which waited, loads instead.",
    ),
    counter(
        "stampede_guard_budget_exceeded_total",
        POLICY,
        "Requests that went on without the store because their coordination budget was used up.",
    ),
    counter(
        "stampede_guard_long_waits_total",
        POLICY,
        "Waits for another caller's load that took at least four fifths of wait_timeout.",
    ),
    counter("stampede_guard_stand_ins_total", POLICY, "Failed loads for which an older value stood in."),
    counter(
        "stampede_guard_soft_timeouts_total",
        POLICY,
        "Requests that were given an older value because the load was slow.",
    ),
    counter("stampede_guard_negatives_total", POLICY, "Loaded values that say that there is nothing."),
    counter("stampede_guard_overloaded_total", POLICY, "Loads and callers beyond a bound of the policy."),
    counter(
        "stampede_guard_takeovers_total",
        POLICY,
        "Loads that went on with another caller's loader after the first one vanished.",
    ),
    counter(
        "stampede_guard_unshareable_total",
        POLICY,
        "Values that could not be shared: too long, or not encodable. Each caller loads them for itself.",
    ),
    counter(
        "stampede_guard_audits_total",
        &["policy", "result"],
        "Hits whose value was compared with the origin's: match, differs, failed.",
    ),
    counter("stampede_guard_store_errors_total", &[], "Commands that the store did not execute."),
    counter("stampede_guard_unreadable_total", &[], "Stored bytes that were no readable entry."),
    counter("stampede_guard_invalidations_total", &[], "Confirmed invalidations."),
    counter(
        "stampede_guard_invalidations_unconfirmed_total",
        &[],
        "Invalidations that were not confirmed in time, or before their caller gave up.",
    ),
    counter(
        "stampede_guard_invalidations_resent_total",
        &[],
        "Unconfirmed invalidations that were kept and confirmed later.",
    ),
    counter(
        "stampede_guard_invalidations_overflowed_total",
        &[],
        "Times that too many invalidations were kept, so that everything was invalidated instead.",
    ),
    counter("stampede_guard_local_fills_total", &[], "Copies that were made in this process's memory."),
    counter(
        "stampede_guard_local_drops_total",
        &[],
        "Keys and tags whose copies were dropped because of a change.",
    ),
    counter(
        "stampede_guard_local_lapses_total",
        &[],
        "Times that the lease on copies was not renewed in time, so that nothing was served from memory.",
    ),
    counter(
        "stampede_guard_local_waits_total",
        &[],
        "Changes that waited for a silent process until its lease on copies had ended.",
    ),
    counter(
        "stampede_guard_breaker_opened_total",
        GUARD,
        "Times that the breaker has opened: commands could not be sent any more.",
    ),
    counter(
        "stampede_guard_credential_failures_total",
        GUARD,
        "Times that the provider of credentials has failed, or that the server has refused what it gave.",
    ),
    gauge(
        "stampede_guard_breaker_open",
        GUARD,
        "1 while the breaker is open, so that no command is sent; 0.5 if it is open for some masters of a cluster.",
    ),
    gauge("stampede_guard_connected", &["namespace", "connection"], "1 while the connection is up, else 0."),
    gauge(
        "stampede_guard_inbox_lag_seconds",
        GUARD,
        "How long the latest ping of the inbox took, or has taken so far; 0 while it is not connected.",
    ),
    gauge(
        "stampede_guard_inbox_silence_seconds",
        GUARD,
        "Time since the inbox last heard from the server; 0 before it was first connected.",
    ),
    gauge(
        "stampede_guard_clock_ahead_seconds",
        GUARD,
        "How far the server's clock is ahead of this host's; 0 before it was read.",
    ),
    gauge("stampede_guard_flights", GUARD, "Flights that can be joined."),
    gauge("stampede_guard_tasks", GUARD, "Tasks of flights that run, detached ones included."),
    gauge("stampede_guard_leases", GUARD, "Leases that this process holds."),
    gauge(
        "stampede_guard_kept_invalidations",
        GUARD,
        "Keys and tags with an invalidation that the store has not confirmed yet.",
    ),
    gauge("stampede_guard_local_copies", GUARD, "Copies in this process's memory."),
    gauge("stampede_guard_local_bytes", GUARD, "Bytes that these copies take, by estimate."),
    gauge("stampede_guard_local_capacity_bytes", GUARD, "Bytes that these copies may take."),
    gauge(
        "stampede_guard_local_lease_seconds",
        GUARD,
        "How long this process may still serve from memory unless its lease is renewed.",
    ),
    gauge("stampede_guard_info", &["namespace", "version", "topology"], "Always 1."),
    histogram(
        "stampede_guard_wait_seconds",
        POLICY,
        "How long requests waited for another caller's load, however the wait ended.",
    ),
    histogram(
        "stampede_guard_audit_age_seconds",
        POLICY,
        "How old a value was that an audit found to differ.",
    ),
    histogram("stampede_guard_load_seconds", POLICY, "How long loads took, however they ended."),
];

impl Metric {
    /// Its unit, by its name: `seconds`, `bytes`, or none.
    pub fn unit(&self) -> Option<&'static str> {
        let name = self.name.strip_suffix("_total").unwrap_or(self.name);
        ["seconds", "bytes"].into_iter().find(|unit| name.ends_with(unit))
    }
}
