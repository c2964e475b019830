//! The counters of a guard, per policy and per guard, each with the metric that it belongs to. [`Stats`] sums them up.
//!
//! Counting is all that a request pays for: the counts become metrics once a second (`guard_state/publish.rs`), so that a hit looks
//! up no handle of a recorder. Each counter knows how much of it was published. Requests are counted by [`Outcome`], over HTTP also by
//! route.

#![cfg_attr(
    not(all(feature = "http", feature = "metrics")),
    allow(dead_code, reason = "only HTTP requests have routes, and without metrics nothing is published")
)]

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::{lock, read, write};
use crate::task::OwnedTask;

/// Counters, each with its metric and the label that distinguishes it from others of that metric.
macro_rules! counters {
    (
        $(#[$of_policy_doc:meta])*
        $of_policy:ident of $PolicyCounts:ident {
            $($(#[$policy_doc:meta])* $policy:ident => [$($policy_series:tt)*],)*
        }
        $(#[$of_guard_doc:meta])*
        $of_guard:ident of $GuardCounts:ident {
            $($(#[$guard_doc:meta])* $guard:ident => [$($guard_series:tt)*],)*
        }
    ) => {
        /// A snapshot of a guard's counters since it was made; all its clones and policies share them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            /// Requests answered from the store.
            pub hits: u64,
            /// Requests answered from this process's memory, which are not among `hits`.
            pub local_hits: u64,
            /// Requests answered with a stale value.
            pub stale: u64,
            /// Requests answered by the load that they led.
            pub led: u64,
            /// Requests answered by a load that another request led, here or in another process.
            pub coalesced: u64,
            /// Requests that ran their own load, or passed through, outside the protocol.
            pub bypassed: u64,
            /// Requests answered with an error.
            pub failed: u64,
            $($(#[$policy_doc])* pub $policy: u64,)*
            $($(#[$guard_doc])* pub $guard: u64,)*
            /// Flights that can be joined now.
            pub flights: u64,
            /// Tasks of flights that run now, detached ones included.
            pub tasks: u64,
            /// Keys and tags with an invalidation that the store has not confirmed; these are sent as soon as the store answers.
            pub kept_invalidations: u64,
        }

        counters!(@one $(#[$of_policy_doc])* $of_policy of $PolicyCounts { $($policy => [$($policy_series)*],)* });
        counters!(@one $(#[$of_guard_doc])* $of_guard of $GuardCounts { $($guard => [$($guard_series)*],)* });

        impl Stats {
            fn add_policy(&mut self, counts: &$PolicyCounts) {
                $(self.$policy += counts.$policy.get();)*
            }

            /// All counts, with the names of their fields.
            pub(crate) fn named(&self) -> Vec<(&'static str, u64)> {
                let others = [
                    $((stringify!($policy), self.$policy),)*
                    $((stringify!($guard), self.$guard),)*
                    ("flights", self.flights),
                    ("tasks", self.tasks),
                    ("kept_invalidations", self.kept_invalidations),
                ];
                self.requests_named().into_iter().chain(others).collect()
            }

            fn add_guard(&mut self, counts: &$GuardCounts) {
                $(self.$guard += counts.$guard.get();)*
            }
        }
    };
    (@one $(#[$doc:meta])* $Count:ident of $Counts:ident { $($name:ident => [$($series:tt)*],)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[allow(non_camel_case_types, reason = "one list names fields and variants")]
        pub(crate) enum $Count { $($name,)* }

        #[derive(Debug, Default)]
        pub(crate) struct $Counts { $($name: Counter,)* }

        impl $Counts {
            pub(crate) fn add(&self, count: $Count) {
                match count {
                    $($Count::$name => self.$name.add(),)*
                }
            }

            /// All counters, with the names and labels of their metrics.
            pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, Option<MetricLabel>, &Counter)> {
                [$(counters!(@series &self.$name, $($series)*),)*].into_iter()
            }
        }
    };
    (@series $counter:expr, $metric:literal) => {
        ($metric, None, $counter)
    };
    (@series $counter:expr, $metric:literal, $label:ident = $value:literal) => {
        ($metric, Some((stringify!($label), $value)), $counter)
    };
}

/// The name and the value of a metric's label.
type MetricLabel = (&'static str, &'static str);

counters! {
    /// The counters of a policy.
    Count of PolicyCounts {
        /// Loads started by this guard, of every kind.
        loads => ["stampede_guard_loads_total"],
        /// Loads that returned an error, or over HTTP a response with a status of 5xx.
        load_errors => ["stampede_guard_load_failures_total", reason = "error"],
        /// Loads that `load_timeout` has ended.
        load_timeouts => ["stampede_guard_load_failures_total", reason = "timeout"],
        /// Loads that panicked, or whose runtime has dropped them.
        loads_vanished => ["stampede_guard_load_failures_total", reason = "vanished"],
        /// Background loads that this process started, including those that ended because another process was refreshing.
        refreshes => ["stampede_guard_refreshes_total"],
        /// Background loads (`refreshes`) for a value that was still fresh.
        early_refreshes => ["stampede_guard_early_refreshes_total"],
        /// Loads that ran without a lease because the store could not be reached.
        fail_open_loads => ["stampede_guard_fail_open_loads_total"],
        /// Commits that the store refused, because this process held the lease no longer.
        commits_refused => ["stampede_guard_commits_refused_total"],
        /// Leases that were lost while their load ran.
        leases_lost => ["stampede_guard_leases_lost_total"],
        /// Leases that expired because their holder neither ended nor renewed them, so that this process, which waited, loads instead.
        leases_expired => ["stampede_guard_leases_expired_total"],
        /// Requests for which the coordination budget was used up: they went on without the store, or were answered before the store
        /// had confirmed the commit.
        budget_exceeded => ["stampede_guard_budget_exceeded_total"],
        /// Waits for another caller's load that took at least four fifths of `wait_timeout`.
        long_waits => ["stampede_guard_long_waits_total"],
        /// Failed loads for which an older value stood in.
        stand_ins => ["stampede_guard_stand_ins_total"],
        /// Requests answered with an older value because a load took longer than the soft timeout.
        soft_timeouts => ["stampede_guard_soft_timeouts_total"],
        /// Loaded values that say that there is nothing.
        negatives => ["stampede_guard_negatives_total"],
        /// Loads that got no permit in time or exceeded the limit without the store; callers beyond the limit on waiters or on
        /// flights.
        overloaded => ["stampede_guard_overloaded_total"],
        /// Loads that all callers had left before they got a permit: they did not run.
        loads_left => ["stampede_guard_loads_left_total"],
        /// Loads that went on with another caller's loader after the first one vanished.
        takeovers => ["stampede_guard_takeovers_total"],
        /// Values of loaders that were not shared because they are longer than `max_body` or cannot be encoded, and HTTP
        /// responses with a body longer than that: each caller loads them for itself.
        unshareable => ["stampede_guard_unshareable_total"],
        /// Audits that found the served value at the origin, or another value, if the served one was gone or replaced a moment later.
        audits_matched => ["stampede_guard_audits_total", result = "match"],
        /// Audits that found another value at the origin than the guard serves.
        audits_differed => ["stampede_guard_audits_total", result = "differs"],
        /// Audits without a result: the load failed, or its value could not be compared.
        audits_failed => ["stampede_guard_audits_total", result = "failed"],
    }
    /// The counters of a guard.
    GuardCount of GuardCounts {
        /// Commands that failed: the store could not be reached, refused them, or did not answer in time.
        store_errors => ["stampede_guard_store_errors_total"],
        /// Stored bytes that were no readable entry: damaged, of another version, or not of the requested type.
        unreadable => ["stampede_guard_unreadable_total"],
        /// Changes that the store has confirmed: invalidations of keys and tags, and values stored directly.
        invalidations => ["stampede_guard_invalidations_total"],
        /// Invalidations, and values stored directly, that were not confirmed: by the store, by its replicas where the policy waits for
        /// them, or by the processes with copies; or whose callers gave up before the confirmation.
        invalidations_unconfirmed => ["stampede_guard_invalidations_unconfirmed_total"],
        /// Retained invalidations that were confirmed later.
        invalidations_resent => ["stampede_guard_invalidations_resent_total"],
        /// Times that so many invalidations were retained that one invalidation of everything replaced them.
        invalidations_overflowed => ["stampede_guard_invalidations_overflowed_total"],
        /// Copies that were made in this process's memory.
        local_fills => ["stampede_guard_local_fills_total"],
        /// Keys and tags whose copies were dropped because of a change, here or in another process.
        local_drops => ["stampede_guard_local_drops_total"],
        /// Times that the volume lease was not renewed in time, so that nothing was served from memory.
        local_lapses => ["stampede_guard_local_lapses_total"],
        /// Changes for which another process stayed silent until its lease had ended.
        local_waits => ["stampede_guard_local_waits_total"],
    }
}

impl Stats {
    /// Requests that were answered without a load of their own, so that the origin had fewer loads. (Includes requests that received
    /// a stale value because their own load failed.)
    pub const fn loads_saved(&self) -> u64 {
        self.hits + self.local_hits + self.stale + self.coalesced
    }

    /// The counts of requests, with the names of their fields.
    pub(crate) fn requests_named(&self) -> [(&'static str, u64); Outcome::ALL.len()] {
        [
            ("hits", self.hits),
            ("local_hits", self.local_hits),
            ("stale", self.stale),
            ("led", self.led),
            ("coalesced", self.coalesced),
            ("bypassed", self.bypassed),
            ("failed", self.failed),
        ]
    }

    fn add_requests(&mut self, requests: &Requests) {
        self.hits += requests.count(Outcome::Hit);
        self.local_hits += requests.count(Outcome::LocalHit);
        self.stale += requests.count(Outcome::Stale);
        self.led += requests.count(Outcome::Led);
        self.coalesced += requests.count(Outcome::Coalesced);
        self.bypassed += requests.count(Outcome::Bypassed);
        self.failed += requests.count(Outcome::Failed);
    }
}

/// One count, and how much of it was published as a metric.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    count: AtomicU64,
    published: AtomicU64,
    /// When its series was registered, at zero.
    registered: OnceLock<Instant>,
}

impl Counter {
    fn add(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// By how much the series of this counter is incremented now; `None` if there is nothing to publish.
    pub(crate) fn increment(&self, publication: MetricPublication) -> Option<u64> {
        self.increment_of(self.get(), publication)
    }

    /// Like [`increment`](Self::increment), of a count that is stored elsewhere. Two tasks that publish at once publish no part of the
    /// count twice.
    pub(crate) fn increment_of(&self, count: u64, publication: MetricPublication) -> Option<u64> {
        if count == 0 && !publication.all {
            return None;
        }
        let mut is_new = false;
        let registered = *self.registered.get_or_init(|| {
            is_new = true;
            publication.now
        });
        let is_withheld = publication.now.saturating_duration_since(registered) < publication.withhold;
        let published = if is_withheld { count } else { self.published.fetch_max(count, Ordering::Relaxed) };
        let increment = count.saturating_sub(published);
        (is_new || increment > 0).then_some(increment)
    }
}

/// How counters are published at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricPublication {
    pub(crate) now: Instant,
    /// How long a series stays at zero after it was registered, so that a scrape sees the zero and a rate includes the first count.
    pub(crate) withhold: Duration,
    /// Whether counters that have counted nothing are registered as well.
    pub(crate) all: bool,
}

/// All counters of one guard.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) guard: GuardCounts,
    policies: Mutex<Vec<Arc<PolicyCounters>>>,
    /// How many outages of the store were published.
    pub(crate) outages: Counter,
    /// How many failures of the provider of credentials were published.
    pub(crate) credential_failures: Counter,
    /// The task that publishes these counters regularly.
    pub(crate) publishing: OwnedTask,
    /// Whether the metrics were described to a recorder.
    pub(crate) is_described: AtomicBool,
    /// Set by [`StampedeGuardBuilder::scrape_interval`](crate::StampedeGuardBuilder::scrape_interval).
    pub(crate) scrape_interval: Duration,
}

/// The most names of policies that a guard distinguishes.
const MOST_POLICIES: usize = 100;
/// The name under which all policies and routes beyond these bounds are counted.
const OTHER: &str = "other";

impl Counters {
    pub(crate) fn new(scrape_interval: Duration) -> Self {
        Self { scrape_interval, ..Self::default() }
    }

    /// The counters of the policies of this name, and whether they are new.
    pub(crate) fn of_policy(&self, name: &Arc<str>) -> (Arc<PolicyCounters>, bool) {
        let mut policies = lock(&self.policies);
        let known = |name: &str| policies.iter().find(|counters| *counters.name == *name).cloned();
        if let Some(counters) = known(name) {
            return (counters, false);
        }
        let name: Arc<str> = if policies.len() < MOST_POLICIES { Arc::clone(name) } else { OTHER.into() };
        if let Some(counters) = known(&name) {
            return (counters, false);
        }
        let counters = Arc::new(PolicyCounters::new(name));
        policies.push(Arc::clone(&counters));
        (counters, true)
    }

    pub(crate) fn policies(&self) -> Vec<Arc<PolicyCounters>> {
        lock(&self.policies).clone()
    }

    pub(crate) fn snapshot(&self, [flights, tasks, retained]: [usize; 3]) -> Stats {
        let [flights, tasks, retained] = [flights, tasks, retained].map(|count| count as u64);
        let mut stats = Stats { flights, tasks, kept_invalidations: retained, ..Stats::default() };
        for policy in self.policies() {
            stats.add_policy(&policy.counts);
            policy.each_requests(|requests| stats.add_requests(requests));
        }
        stats.add_guard(&self.guard);
        stats
    }
}

/// The counters of the requests and loads of all policies of one name.
#[derive(Default)]
pub(crate) struct PolicyCounters {
    pub(crate) name: Arc<str>,
    pub(crate) counts: PolicyCounts,
    /// Requests without a route.
    requests: Arc<Requests>,
    pub(crate) routes: Routes,
    /// How many of the requests that were answered without a load of their own were published.
    pub(crate) loads_saved: Counter,
    /// Whether a load has added tags to its value.
    tags: AtomicBool,
    /// How many loads have entered the journal of tags and ended without adding any, before one has added some.
    untagged: AtomicU8,
}

impl PolicyCounters {
    fn new(name: Arc<str>) -> Self {
        Self { name, ..Self::default() }
    }

    /// Whether a load that begins now enters the journal of tags, in case it adds tags to its value. The first loads do, and all loads once
    /// one has added tags: a fleet without such tags does not pay for them. The first are those that begin before 16 have ended, because a
    /// new process begins many loads at once.
    pub(crate) fn expects_tags(&self) -> bool {
        const FIRST_LOADS: u8 = 16;
        self.tags.load(Ordering::Relaxed) || self.untagged.load(Ordering::Relaxed) < FIRST_LOADS
    }

    /// Called when a load that has entered the journal of tags has ended without adding any.
    pub(crate) fn added_no_tags(&self) {
        let one_more = |ended: u8| ended.checked_add(1);
        let _ = self.untagged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
    }

    /// Called when a load has added tags to its value.
    pub(crate) fn added_tags(&self) {
        self.tags.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn add(&self, count: Count) {
        self.counts.add(count);
    }

    /// The counters of requests without a route.
    pub(crate) fn requests(&self) -> &Arc<Requests> {
        &self.requests
    }

    /// Whether anything was counted.
    pub(crate) fn is_used(&self) -> bool {
        self.counts.all().any(|(.., counter)| counter.get() > 0)
            || self.request_stats().requests_named().into_iter().any(|(_, count)| count > 0)
    }

    /// The counts of all requests of this policy, with and without a route.
    pub(crate) fn request_stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.each_requests(|requests| stats.add_requests(requests));
        stats
    }

    fn each_requests(&self, mut each: impl FnMut(&Requests)) {
        each(&self.requests);
        self.routes.each(|_, requests| each(requests));
    }

    /// Records a time in a histogram.
    #[cfg_attr(
        not(feature = "metrics"),
        allow(unused_variables, reason = "without metrics nothing is recorded")
    )]
    pub(crate) fn record(&self, metric: &'static str, time: Duration) {
        #[cfg(feature = "metrics")]
        metrics::histogram!(metric, "policy" => metrics::SharedString::from_shared(Arc::clone(&self.name)))
            .record(time.as_secs_f64());
    }
}

/// Policies are compared by their settings. The counters belong to the guard that uses a policy.
impl PartialEq for PolicyCounters {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl fmt::Debug for PolicyCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyCounters").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How requests were answered.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// A counter for each [`Outcome`]. `local_hits` counts local hits, spread over several cache lines, because they are the most
    /// frequent: their counter here only records how many have become metrics.
    by_outcome: [Counter; Outcome::ALL.len()],
    local_hits: SpreadCounter,
}

impl Requests {
    /// Counts a hit from memory.
    #[inline]
    pub(crate) fn local_hit(&self) {
        self.local_hits.add();
    }

    pub(crate) fn add(&self, outcome: Outcome) {
        match outcome {
            Outcome::LocalHit => self.local_hit(),
            _ => self.by_outcome[outcome as usize].add(),
        }
    }

    /// The counts of these requests.
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        stats.add_requests(self);
        stats
    }

    fn count(&self, outcome: Outcome) -> u64 {
        match outcome {
            Outcome::LocalHit => self.local_hits.sum(),
            _ => self.by_outcome[outcome as usize].get(),
        }
    }

    /// Like [`Counter::increment`], for each outcome.
    pub(crate) fn increments(
        &self,
        publication: MetricPublication,
    ) -> impl Iterator<Item = (Outcome, Option<u64>)> {
        let counters = Outcome::ALL.into_iter().zip(&self.by_outcome);
        counters
            .map(move |(outcome, counter)| (outcome, counter.increment_of(self.count(outcome), publication)))
    }
}

/// The most routes that a policy distinguishes. Most routers have their routes from code; the bound is for routers that make routes from
/// requests.
const MOST_ROUTES: usize = 200;

/// The requests of a policy by the route that matched them. Bounded: a label must not grow with what clients send.
#[derive(Debug, Default)]
pub(crate) struct Routes(RwLock<HashMap<Arc<str>, Arc<Requests>>>);

impl Routes {
    /// The counters of the requests of this route.
    pub(crate) fn of(&self, route: &str) -> Arc<Requests> {
        if let Some(requests) = read(&self.0).get(route) {
            return Arc::clone(requests);
        }
        let mut routes = write(&self.0);
        let route = if routes.len() < MOST_ROUTES { route } else { OTHER };
        Arc::clone(routes.entry(route.into()).or_default())
    }

    pub(crate) fn each(&self, mut each: impl FnMut(&Arc<str>, &Requests)) {
        for (route, requests) in &*read(&self.0) {
            each(route, requests);
        }
    }
}

/// A counter that many threads add to at once, each to a slot in a separate cache line.
#[derive(Debug, Default)]
struct SpreadCounter([CounterSlot; SLOTS]);

const SLOTS: usize = 16;

#[derive(Debug, Default)]
#[repr(align(128))]
struct CounterSlot(AtomicU64);

thread_local! {
    /// The index of this thread's slot.
    static SLOT: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS
    };
}

impl SpreadCounter {
    #[inline]
    fn add(&self) {
        // A thread whose thread-locals were dropped already adds to the first slot.
        let index = SLOT.try_with(|index| *index).unwrap_or_default();
        self.0[index].0.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|slot| slot.0.load(Ordering::Relaxed)).sum()
    }
}

/// How one request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The caller received a fresh value from the store.
    Hit,
    /// The caller received a fresh value from this process's memory.
    LocalHit,
    /// The caller received a stale value, because the new load runs in the background, has failed, or takes long; or a copy from memory
    /// while the store is away.
    Stale,
    /// The caller received the value of the load that it led.
    Led,
    /// The caller received the value of a load that another request led, here or in another process.
    Coalesced,
    /// The caller ran its own load, or its request passed through, outside the guard's protocol.
    Bypassed,
    /// The caller received an error.
    Failed,
}

impl Outcome {
    /// All outcomes, in the order of their declaration.
    const ALL: [Self; 7] =
        [Self::Hit, Self::LocalHit, Self::Stale, Self::Led, Self::Coalesced, Self::Bypassed, Self::Failed];

    /// The word used in metrics and logs; a hit from memory is a `hit` there, with another `tier`.
    pub const fn as_str(self) -> &'static str {
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

#[cfg(test)]
mod counters_tests {
    use super::*;

    #[cfg(feature = "metrics")]
    #[test]
    fn each_count_belongs_to_a_metric_and_to_a_label_of_it() {
        let (policy, guard) = (PolicyCounts::default(), GuardCounts::default());
        for (name, label, _) in policy.all().chain(guard.all()) {
            let metric = crate::metrics::METRICS.iter().find(|metric| metric.name == name);
            let metric = metric.unwrap_or_else(|| panic!("{name} is not described"));
            assert!(label.is_none_or(|(label, _)| metric.labels.contains(&label)), "{name} {label:?}");
        }
    }

    #[test]
    fn further_names_of_policies_are_counted_as_other() {
        let counters = Counters::default();
        for n in 0..MOST_POLICIES + 5 {
            counters.of_policy(&format!("p{n}").into()).0.requests().add(Outcome::Hit);
        }
        counters.of_policy(&"p3".into()).0.requests().add(Outcome::Hit);
        let names: Vec<_> = counters.policies().iter().map(|policy| policy.name.to_string()).collect();
        assert_eq!((names.len(), names.last().map(String::as_str)), (MOST_POLICIES + 1, Some(OTHER)));
        assert_eq!(counters.snapshot([0; 3]).hits, MOST_POLICIES as u64 + 6);
    }
}

#[cfg(test)]
mod routes_tests {
    use super::*;

    #[test]
    fn further_routes_are_counted_as_other() {
        let routes = Routes::default();
        for n in 0..MOST_ROUTES + 5 {
            routes.of(&format!("/r{n}")).add(Outcome::Hit);
        }
        routes.of("/r3").add(Outcome::Hit);
        let mut seen = Vec::new();
        routes.each(|route, requests| seen.push((route.to_string(), requests.count(Outcome::Hit))));
        seen.sort();
        assert_eq!(seen.len(), MOST_ROUTES + 1);
        assert_eq!(seen.iter().find(|(route, _)| route == OTHER), Some(&(OTHER.to_owned(), 5)));
        assert_eq!(seen.iter().find(|(route, _)| route == "/r3"), Some(&("/r3".to_owned(), 2)));
    }
}
