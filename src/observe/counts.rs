//! The list of what is counted: per policy, and per guard. [`Stats`] sums it up.

use super::counter::Counter;
#[cfg(feature = "metrics")]
use super::counter::Series;
use super::outcome::Outcome;
use super::requests::Requests;

#[cfg(feature = "metrics")]
macro_rules! series {
    ($metric:literal) => {
        Series { metric: $metric, label: None }
    };
    ($metric:literal, $label:ident = $value:literal) => {
        Series { metric: $metric, label: Some((stringify!($label), $value)) }
    };
}

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
            /// Keys and tags with an invalidation that the store has not confirmed. It is sent as soon as the store answers.
            pub kept_invalidations: u64,
        }

        counters!(@one $(#[$of_policy_doc])* $of_policy of $PolicyCounts { $($policy => [$($policy_series)*],)* });
        counters!(@one $(#[$of_guard_doc])* $of_guard of $GuardCounts { $($guard => [$($guard_series)*],)* });

        impl Stats {
            pub(super) fn add_policy(&mut self, counts: &$PolicyCounts) {
                $(self.$policy += counts.$policy.get();)*
            }

            pub(super) fn add_guard(&mut self, counts: &$GuardCounts) {
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

            /// All counts with their metrics.
            #[cfg(feature = "metrics")]
            pub(crate) fn all(&self) -> impl Iterator<Item = (Series, &Counter)> {
                [$((series!($($series)*), &self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// What is counted per policy.
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
        /// Leases that ended with their holder: it neither ended nor renewed them, and this process, which waited, loads instead.
        leases_expired => ["stampede_guard_leases_expired_total"],
        /// Requests for which the coordination budget was used up: they went on without the store, or were answered before it had
        /// confirmed the commit.
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
        /// Loads that went on with another caller's loader after the first one vanished.
        takeovers => ["stampede_guard_takeovers_total"],
        /// Values of loaders that were not shared because they are longer than `max_body` or cannot be encoded, and HTTP
        /// responses with a body longer than that: each caller loads them for itself.
        unshareable => ["stampede_guard_unshareable_total"],
        /// Audits that found the served value at the origin, or another value that was served a moment later.
        audits_matched => ["stampede_guard_audits_total", result = "match"],
        /// Audits that found another value at the origin than the guard serves.
        audits_differed => ["stampede_guard_audits_total", result = "differs"],
        /// Audits that could not tell: the load failed, or its value cannot be compared.
        audits_failed => ["stampede_guard_audits_total", result = "failed"],
    }
    /// What is counted per guard.
    GuardCount of GuardCounts {
        /// Commands that the store did not execute.
        store_errors => ["stampede_guard_store_errors_total"],
        /// Stored bytes that were no readable entry: damaged, of another version, or not of the requested type.
        unreadable => ["stampede_guard_unreadable_total"],
        /// Confirmed invalidations, of keys, of tags, and by storing directly.
        invalidations => ["stampede_guard_invalidations_total"],
        /// Invalidations, and values stored directly, that were not confirmed: by the store, by its replicas where the policy waits for
        /// them, or by the processes with copies; or whose caller gave up before.
        invalidations_unconfirmed => ["stampede_guard_invalidations_unconfirmed_total"],
        /// Kept invalidations that were confirmed later.
        invalidations_resent => ["stampede_guard_invalidations_resent_total"],
        /// Times that so many invalidations were kept that one invalidation of everything took their place.
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
    /// Requests that were answered without a load of their own, which the origin was spared. (Requests that were given a stale
    /// value because their own load failed are included.)
    pub const fn loads_saved(&self) -> u64 {
        self.hits + self.local_hits + self.stale + self.coalesced
    }

    pub(super) fn add_requests(&mut self, requests: &Requests) {
        self.local_hits += requests.local_hits();
        for (outcome, counter) in requests.answered() {
            let sum = match outcome {
                Outcome::Hit => &mut self.hits,
                Outcome::LocalHit => &mut self.local_hits,
                Outcome::Stale => &mut self.stale,
                Outcome::Led => &mut self.led,
                Outcome::Coalesced => &mut self.coalesced,
                Outcome::Bypassed => &mut self.bypassed,
                Outcome::Failed => &mut self.failed,
            };
            *sum += counter.get();
        }
    }
}
