//! Counters and log events of the guard; [`Stats`], metrics, logs and tests use the same names.
//!
//! The texts of failures are made here, too: of a loader's error or panic, which other processes receive, and of an error with its causes.
//!
//! Labels and fields never carry a key's text or a value: keys appear as a digest.
//!
//! [`FlightId`] identifies a load in traces. [`SpanLinks`] is the hook that links a load's span with those of its waiters, across
//! processes.

pub(crate) mod counts;
pub(crate) mod hot_keys;

use std::any::Any;
use std::fmt;
use std::iter::successors;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tracing::Span;
use tracing::field::Empty;

pub(crate) use self::counts::{Count, Counters, GuardCount, PolicyCounters, Requests};
pub use self::counts::{Outcome, Stats};
use crate::key::Key;
use crate::sync::lock;

/// The targets of spans and events. They name a part of the crate and not a module, so that moved code does not break users' filters.
pub(crate) mod log {
    pub(crate) const GUARD: &str = "stampede_guard";
    pub(crate) const HTTP: &str = "stampede_guard::http";
    pub(crate) const LOCK: &str = "stampede_guard::lock";
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

/// Whether an operation is failing, so that the failure is reported once per outage.
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

/// Limits a warning whose cause recurs with each load to one a minute: when the warning was last logged.
#[derive(Debug, Default)]
pub(crate) struct LogEveryMinute(Mutex<Option<Instant>>);

impl LogEveryMinute {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether to warn now: true at most once a minute.
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

    /// Whether a subscriber may use the spans of waits. (Without one, finding out which load a caller waited for would be wasted work.)
    pub(crate) fn are_enabled(&self) -> bool {
        tracing::enabled!(target: log::GUARD, tracing::Level::DEBUG)
    }

    /// The span of a load, inside the span of the request that began it. If no subscriber enables that, the request's span itself.
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

    /// Records which load the caller waited for.
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
pub(crate) fn log_decision(decision: &'static str, rule: &dyn std::fmt::Display) {
    tracing::debug!(target: log::HTTP, decision, %rule, "stampede_guard.judged");
}

/// Runs a load and records how long it took.
pub(crate) async fn timed<T>(counters: &PolicyCounters, load: impl Future<Output = T>) -> (T, Duration) {
    let started = Instant::now();
    let done = load.await;
    let took = started.elapsed();
    counters.record("stampede_guard_load_seconds", took);
    (done, took)
}

/// The text of a loader's error, cut at a character boundary to the length that is sent between processes. Includes the
/// causes if the error prints them with `{:#}` (`anyhow` does), because the receiver has no other access to them.
pub(crate) fn failure_text(error: &dyn fmt::Display) -> Arc<str> {
    const LONGEST: usize = 1024;
    let mut text = format!("{error:#}");
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
    }
    text.into()
}

/// The text of an error and of its causes. If an error's text ends with the text of its cause, the cause is not appended again.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in successors(error.source(), |&cause| cause.source()).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// The message of a caught panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> Arc<str> {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    failure_text(&text.unwrap_or("no message"))
}

/// The identity of a load in traces: all processes of the fleet that wait for the load know the same id.
///
/// The id is the field `flight` of the span `stampede_guard.load` and of each span `stampede_guard.wait` that waited for that load, so a
/// search for the id finds both. [`SpanLinks`] makes links of it. It is a digest of the load's lease and reveals nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlightId([u8; 16]);

impl FlightId {
    /// The identity of the load under the lease with this token. A digest, because any process that knows a token can end its lease.
    pub(crate) fn of(token: &str) -> Self {
        let digest: [u8; 32] = Sha256::digest(format!("stampede-guard flight {token}")).into();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        Self(id)
    }

    /// The identity of a load without a lease, for which no other process waits.
    pub(crate) fn random() -> Self {
        Self(*uuid::Uuid::new_v4().as_bytes())
    }

    /// The 16 bytes of the id, as evenly distributed as those of a trace's id.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for FlightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for FlightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlightId({self})")
    }
}

/// Links the spans of loads and of the callers that waited for them, in whatever way a tracing system has links.
///
/// A `tracing` span can follow only from another span of its own process, and most waiters are in other processes. So the guard passes the
/// [`FlightId`] to both sides, and an implementation that derives the ids of a load's trace and span from the `FlightId` needs nothing
/// from the wire: `ops/otlp` of the repository has such an implementation for OpenTelemetry.
///
/// Both methods are called on the data path of a miss, never of a hit: they should be brief, and must not block.
pub trait SpanLinks: Send + Sync + 'static {
    /// A load begins: `span` was made for it, inside `request`, the span of the request that leads it, and was not entered yet.
    fn load(&self, span: &Span, request: &Span, flight: FlightId);

    /// A caller waits, or has waited, for this load, here or in another process. `span` is the span of that wait, inside the span of the
    /// caller's request.
    fn wait(&self, span: &Span, flight: FlightId);
}
