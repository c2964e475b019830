//! The counters of one policy: its loads, and its requests by outcome, over HTTP also by route.

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::counts::{Count, PolicyCounts};
use super::requests::Requests;
use super::routes::Routes;

/// Where the requests and loads of all policies of one name are counted.
#[derive(Default)]
pub(crate) struct PolicyCounters {
    pub(crate) name: Arc<str>,
    pub(crate) counts: PolicyCounts,
    /// Requests without a route.
    requests: Arc<Requests>,
    pub(crate) routes: Routes,
    /// A recorder knows these counters.
    #[cfg(feature = "metrics")]
    told: AtomicBool,
}

impl PolicyCounters {
    pub(crate) fn new(name: Arc<str>) -> Self {
        Self { name, ..Self::default() }
    }

    #[inline]
    pub(crate) fn add(&self, count: Count) {
        self.counts.add(count);
    }

    #[inline]
    pub(crate) fn local_hit(&self) {
        self.requests.local_hit();
    }

    /// Where requests without a route are counted.
    pub(crate) fn requests(&self) -> &Arc<Requests> {
        &self.requests
    }

    /// Whether no recorder was told of these counters yet. It knows them from now on.
    #[cfg(feature = "metrics")]
    pub(crate) fn is_first_told(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn each_requests(&self, mut each: impl FnMut(&Requests)) {
        each(&self.requests);
        self.routes.each(|_, requests| each(requests));
    }

    /// Records how long a request waited for another caller's load.
    pub(crate) fn waited(&self, wait: Duration) {
        self.record("stampede_guard_wait_seconds", wait);
    }

    /// Records how long a load took.
    pub(crate) fn loaded(&self, took: Duration) {
        self.record("stampede_guard_load_seconds", took);
    }

    /// Records how old a value was that an audit found to differ.
    pub(crate) fn audit_differed(&self, age: Duration) {
        self.record("stampede_guard_audit_age_seconds", age);
    }

    #[cfg(feature = "metrics")]
    fn record(&self, metric: &'static str, time: Duration) {
        let policy = metrics::SharedString::from_shared(Arc::clone(&self.name));
        metrics::histogram!(metric, "policy" => policy).record(time.as_secs_f64());
    }

    #[cfg(not(feature = "metrics"))]
    fn record(&self, _: &'static str, _: Duration) {}
}

impl fmt::Debug for PolicyCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyCounters").field("name", &self.name).finish_non_exhaustive()
    }
}
