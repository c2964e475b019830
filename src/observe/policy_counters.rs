//! The counters of one policy: its loads, and its requests by outcome, over HTTP also by route.

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::Outcome;
#[cfg(feature = "metrics")]
use super::counters::untold;
use super::counters::{Count, Counter, PolicyCounts};
use super::routes::Routes;
use super::spread::SpreadCounter;

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

/// How requests were answered.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    hits: Counter,
    stale: Counter,
    led: Counter,
    coalesced: Counter,
    bypassed: Counter,
    failed: Counter,
    local_hits: SpreadCounter,
    #[cfg(feature = "metrics")]
    local_hits_told: AtomicU64,
}

impl Requests {
    /// Counts a hit from memory.
    #[inline]
    pub(crate) fn local_hit(&self) {
        self.local_hits.add();
    }

    pub(crate) fn add(&self, outcome: Outcome) {
        let counter = match outcome {
            Outcome::LocalHit => return self.local_hit(),
            Outcome::Hit => &self.hits,
            Outcome::Stale => &self.stale,
            Outcome::Led => &self.led,
            Outcome::Coalesced => &self.coalesced,
            Outcome::Bypassed => &self.bypassed,
            Outcome::Failed => &self.failed,
        };
        counter.add();
    }

    pub(super) fn local_hits(&self) -> u64 {
        self.local_hits.sum()
    }

    /// The requests of each outcome but local hits.
    pub(crate) fn answered(&self) -> [(Outcome, &Counter); 6] {
        [
            (Outcome::Hit, &self.hits),
            (Outcome::Stale, &self.stale),
            (Outcome::Led, &self.led),
            (Outcome::Coalesced, &self.coalesced),
            (Outcome::Bypassed, &self.bypassed),
            (Outcome::Failed, &self.failed),
        ]
    }

    /// As [`Counter::untold`], for each outcome.
    #[cfg(feature = "metrics")]
    pub(crate) fn untold(&self) -> impl Iterator<Item = (Outcome, u64)> {
        let local = untold(self.local_hits(), &self.local_hits_told);
        let stored = self.answered().map(|(outcome, counter)| (outcome, counter.untold()));
        std::iter::once((Outcome::LocalHit, local)).chain(stored)
    }
}
