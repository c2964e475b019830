//! Counters, metrics and log events of the guard; [`Stats`], metrics, logs and tests use the same names.
//!
//! Labels and fields never carry a key's text or a value: keys appear as a digest.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::key::Key;
use crate::sync::lock;

/// How one request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// From the store.
    Hit,
    /// From this process's memory.
    LocalHit,
    /// With a stale value from the store. Its new load runs in the background, has failed, or takes long.
    Stale,
    /// By the load that this request led.
    Led,
    /// By a load that another request led, here or in another process.
    Coalesced,
    /// By its own load or pass-through, outside the guard's protocol.
    Bypassed,
    /// With an error.
    Failed,
}

impl Outcome {
    /// The word used in metrics and logs.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Hit | Self::LocalHit => "hit",
            Self::Stale => "stale",
            Self::Led => "led",
            Self::Coalesced => "coalesced",
            Self::Bypassed => "bypassed",
            Self::Failed => "failed",
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident => $metric:literal,)*) => {
        /// A snapshot of a guard's counters since it was made; all its clones and policies share them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Requests answered from this process's memory, which are not among `hits`.
            pub local_hits: u64,
            /// Flights that can be joined now.
            pub flights: u64,
            /// Tasks of flights that run now, detached ones included.
            pub tasks: u64,
        }

        /// The live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($name: AtomicU64,)*
            local_hits: SpreadCounter,
        }

        /// What is counted.
        #[derive(Clone, Copy, Debug)]
        #[allow(non_camel_case_types, reason = "one list names fields and variants")]
        pub(crate) enum Count { $($name,)* }

        impl Counters {
            pub(crate) fn add(&self, count: Count) {
                let (counter, metric) = match count {
                    $(Count::$name => (&self.$name, $metric),)*
                };
                counter.fetch_add(1, Ordering::Relaxed);
                publish(metric);
            }

            pub(crate) fn snapshot(&self, flights: usize, tasks: usize) -> Stats {
                Stats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    local_hits: self.local_hits.sum(),
                    flights: flights as u64,
                    tasks: tasks as u64,
                }
            }
        }
    };
}

counters! {
    /// Requests answered from the store.
    hits => "hit",
    /// Requests answered with a stale value.
    stale => "stale",
    /// Requests answered by the load that they led.
    led => "led",
    /// Requests answered by a load that another request led, here or in another process.
    coalesced => "coalesced",
    /// Requests that ran their own load, or passed through, outside the protocol.
    bypassed => "bypassed",
    /// Requests answered with an error.
    failed => "failed",
    /// Loads started by this guard, of every kind.
    loads => "stampede_guard_loads_total",
    /// Background loads that this process started, including those that ended because another process was refreshing.
    refreshes => "stampede_guard_refreshes_total",
    /// Loads that ran without a lease because the store could not be reached.
    fail_open_loads => "stampede_guard_fail_open_loads_total",
    /// Commits that the store refused, because this process held the lease no longer.
    commits_refused => "stampede_guard_commits_refused_total",
    /// Leases that were lost while their load ran.
    leases_lost => "stampede_guard_leases_lost_total",
    /// Commands that the store did not execute.
    store_errors => "stampede_guard_store_errors_total",
    /// Requests for which the coordination budget was used up: they went on without the store, or were answered before it had
    /// confirmed the commit.
    budget_exceeded => "stampede_guard_budget_exceeded_total",
    /// Stored bytes that were no readable entry: damaged, of another version, or not of the requested type.
    unreadable => "stampede_guard_unreadable_total",
    /// Background loads (`refreshes`) for a value that was still fresh.
    early_refreshes => "stampede_guard_early_refreshes_total",
    /// Failed loads for which an older value stood in.
    stand_ins => "stampede_guard_stand_ins_total",
    /// Requests answered with an older value because a load took longer than the soft timeout.
    soft_timeouts => "stampede_guard_soft_timeouts_total",
    /// Loaded values that say that there is nothing.
    negatives => "stampede_guard_negatives_total",
    /// Confirmed invalidations, of keys, of tags, and by storing directly.
    invalidations => "stampede_guard_invalidations_total",
    /// Loads that got no permit in time or exceeded the limit without the store; callers beyond the limit on waiters or on
    /// flights.
    overloaded => "stampede_guard_overloaded_total",
    /// Loads that went on with another caller's loader after the first one vanished.
    takeovers => "stampede_guard_takeovers_total",
    /// Values of loaders that were not shared because they are longer than `max_body` or cannot be encoded, and HTTP
    /// responses with a body longer than that: each caller loads them for itself.
    unshareable => "stampede_guard_unshareable_total",
    /// Audits that found the served value at the origin, or another value that was served a moment later.
    audits_matched => "audit_match",
    /// Audits that found another value at the origin than the guard serves.
    audits_differed => "audit_differs",
    /// Audits that could not tell: the load failed, or its value cannot be compared.
    audits_failed => "audit_failed",
    /// Copies that were made in this process's memory.
    local_fills => "stampede_guard_local_fills_total",
    /// Keys and tags whose copies were dropped because of a change, here or in another process.
    local_drops => "stampede_guard_local_drops_total",
    /// Times that the volume lease was not renewed in time, so that nothing was served from memory.
    local_lapses => "stampede_guard_local_lapses_total",
    /// Changes for which another process stayed silent until its lease had ended.
    local_waits => "stampede_guard_local_waits_total",
}

impl Counters {
    /// Counts a hit from memory.
    #[inline]
    pub(crate) fn local_hit(&self) {
        self.local_hits.add();
        publish("local_hit");
    }

    pub(crate) fn request(&self, outcome: Outcome) {
        self.add(match outcome {
            Outcome::LocalHit => return self.local_hit(),
            Outcome::Hit => Count::hits,
            Outcome::Stale => Count::stale,
            Outcome::Led => Count::led,
            Outcome::Coalesced => Count::coalesced,
            Outcome::Bypassed => Count::bypassed,
            Outcome::Failed => Count::failed,
        });
    }
}

/// A counter that many threads add to at once: each to a place in a cache line of its own.
#[derive(Debug, Default)]
struct SpreadCounter([CounterPlace; PLACES]);

const PLACES: usize = 16;

#[derive(Debug, Default)]
#[repr(align(128))]
struct CounterPlace(AtomicU64);

thread_local! {
    /// The place of this thread.
    static PLACE: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % PLACES
    };
}

impl SpreadCounter {
    #[inline]
    fn add(&self) {
        // A thread that is being ended adds to the first place.
        let place = PLACE.try_with(|place| *place).unwrap_or_default();
        self.0[place].0.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|place| place.0.load(Ordering::Relaxed)).sum()
    }
}

impl Stats {
    /// Requests that were answered without a load of their own, which the origin was spared. (Requests that were given a stale
    /// value because their own load failed are included.)
    pub const fn loads_saved(&self) -> u64 {
        self.hits + self.local_hits + self.stale + self.coalesced
    }
}

/// Request outcomes share one counter with a label; the rest have one each.
#[cfg(feature = "metrics")]
fn publish(metric: &'static str) {
    if metric.starts_with("stampede_guard_") {
        metrics::counter!(metric).increment(1);
    } else if let Some(result) = metric.strip_prefix("audit_") {
        metrics::counter!("stampede_guard_audits_total", "result" => result).increment(1);
    } else {
        // A hit says which tier it came from; the label is empty for all other outcomes.
        let (outcome, tier) = match metric {
            "hit" => ("hit", "store"),
            "local_hit" => ("hit", "local"),
            outcome => (outcome, ""),
        };
        metrics::counter!("stampede_guard_requests_total", "outcome" => outcome, "tier" => tier).increment(1);
        if matches!(outcome, "hit" | "stale" | "coalesced") {
            metrics::counter!("stampede_guard_loads_saved_total").increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
fn publish(_: &'static str) {}

/// The targets of spans and events. They name a part of the crate and not a module, so that moved code does not break users' filters.
pub(crate) mod log {
    pub(crate) const GUARD: &str = "stampede_guard";
    #[cfg(feature = "http")]
    pub(crate) const HTTP: &str = "stampede_guard::http";
    pub(crate) const LOCK: &str = "stampede_guard::lock";
    #[cfg(feature = "redis")]
    pub(crate) const REDIS: &str = "stampede_guard::redis";
}

/// WARN if this is news, DEBUG otherwise: a warning for each request would bury all others.
macro_rules! warn_if {
    ($log:expr, $is_news:expr, $($event:tt)+) => {
        if $is_news {
            tracing::warn!(target: $log, $($event)+)
        } else {
            tracing::debug!(target: $log, $($event)+)
        }
    };
}
pub(crate) use warn_if;

/// Whether an operation is failing, so that it is reported once per outage.
#[derive(Debug, Default)]
pub(crate) struct LogOnce(AtomicBool);

impl LogOnce {
    /// Records a failure. Returns whether it is news: the first failure since the last success.
    pub(crate) fn goes_on(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }

    /// Records a success.
    pub(crate) fn is_over(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// When a warning was last logged whose cause recurs with each load.
#[derive(Debug, Default)]
pub(crate) struct LogEveryMinute(Mutex<Option<Instant>>);

impl LogEveryMinute {
    /// Whether to warn again: once a minute.
    pub(crate) fn is_due(&self) -> bool {
        const PAUSE: Duration = Duration::from_secs(60);
        let (mut last, now) = (lock(&self.0), Instant::now());
        let is_due = last.is_none_or(|last| now - last >= PAUSE);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

/// The span of a load, inside the span of the request that began it; the request's span itself if no subscriber enables the load's.
pub(crate) fn load_span(parent: &tracing::Span, key: &Key) -> tracing::Span {
    let span = tracing::debug_span!(target: log::GUARD, parent: parent, "stampede_guard.load", ?key);
    if span.is_disabled() { parent.clone() } else { span }
}

/// Records how long a request waited for another caller's load.
pub(crate) fn waited(wait: Duration) {
    #[cfg(feature = "metrics")]
    metrics::histogram!("stampede_guard_wait_seconds").record(wait.as_secs_f64());
    #[cfg(not(feature = "metrics"))]
    let _ = wait;
}

/// Records how old a value was that an audit found to differ.
pub(crate) fn audit_differed(age: Duration) {
    #[cfg(feature = "metrics")]
    metrics::histogram!("stampede_guard_audit_age_seconds").record(age.as_secs_f64());
    #[cfg(not(feature = "metrics"))]
    let _ = age;
}

/// Logs the decision about a response, and the rule that made it.
#[cfg(feature = "http")]
pub(crate) fn judged(decision: &'static str, rule: &dyn std::fmt::Display) {
    tracing::debug!(target: log::HTTP, decision, %rule, "stampede_guard.judged");
}

/// Runs a load and reports how long it took.
pub(crate) async fn timed<T>(load: impl Future<Output = T>) -> (T, Duration) {
    let started = Instant::now();
    let done = load.await;
    let took = started.elapsed();
    #[cfg(feature = "metrics")]
    metrics::histogram!("stampede_guard_load_seconds").record(took.as_secs_f64());
    (done, took)
}
