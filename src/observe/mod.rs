//! Counters and log events of the guard; [`Stats`], metrics, logs and tests use the same names.
//!
//! Labels and fields never carry a key's text or a value: keys appear as a digest.

mod counter;
mod counters;
mod counts;
mod links;
mod outcome;
mod policy_counters;
mod requests;
mod routes;
mod spread;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Span;
use tracing::field::Empty;

#[cfg(feature = "metrics")]
pub(crate) use counter::Series;
pub(crate) use counters::Counters;
pub use counts::Stats;
pub(crate) use counts::{Count, GuardCount};
pub use links::{FlightId, SpanLinks};
pub use outcome::Outcome;
pub(crate) use policy_counters::PolicyCounters;
pub(crate) use requests::Requests;

use crate::key::Key;
use crate::sync::lock;

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
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

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

/// The spans of loads and waits, and the user's links between them.
#[derive(Clone, Default)]
pub(crate) struct Spans(Option<Arc<dyn SpanLinks>>);

impl Spans {
    pub(crate) fn linked_by(links: impl SpanLinks) -> Self {
        Self(Some(Arc::new(links)))
    }

    /// Whether a subscriber may want the spans of waits. (Without one, finding out for whom a caller waited is work for nothing.)
    pub(crate) fn are_wanted(&self) -> bool {
        tracing::enabled!(target: log::GUARD, tracing::Level::DEBUG)
    }

    /// The span of a load, inside the span of the request that began it; the request's span itself if no subscriber enables the load's.
    pub(crate) fn load(&self, parent: &Span, key: &Key, flight: impl FnOnce() -> FlightId) -> Span {
        let span = tracing::debug_span!(target: log::GUARD, parent: parent, "stampede_guard.load", ?key, flight = Empty);
        if span.is_disabled() {
            return parent.clone();
        }
        let flight = flight();
        span.record("flight", tracing::field::display(flight));
        if let Some(links) = &self.0 {
            links.load(&span, parent, flight);
        }
        span
    }

    /// The span of a wait for another caller's load.
    pub(crate) fn wait(&self, parent: &Span, key: &Key) -> Span {
        tracing::debug_span!(target: log::GUARD, parent: parent, "stampede_guard.wait", ?key, flight = Empty)
    }

    /// Tells which load was waited for.
    pub(crate) fn waited(&self, span: &Span, flight: FlightId) {
        if !span.is_disabled() {
            span.record("flight", tracing::field::display(flight));
            if let Some(links) = &self.0 {
                links.wait(span, flight);
            }
        }
    }
}

impl fmt::Debug for Spans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spans").field("linked", &self.0.is_some()).finish()
    }
}

/// Logs the decision about a response, and the rule that made it.
#[cfg(feature = "http")]
pub(crate) fn judged(decision: &'static str, rule: &dyn std::fmt::Display) {
    tracing::debug!(target: log::HTTP, decision, %rule, "stampede_guard.judged");
}

/// Runs a load and records how long it took.
pub(crate) async fn timed<T>(counters: &PolicyCounters, load: impl Future<Output = T>) -> (T, Duration) {
    let started = Instant::now();
    let done = load.await;
    let took = started.elapsed();
    counters.loaded(took);
    (done, took)
}
