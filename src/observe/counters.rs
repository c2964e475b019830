//! All counters of one guard.
//!
//! Counting is all that a request pays for: the counts become metrics once a second (`guard_state/publish.rs`), so that a hit looks
//! up no handle of a recorder.

use std::sync::{Arc, Mutex};

#[cfg(feature = "metrics")]
use super::counter::Counter;
use super::counts::{GuardCount, GuardCounts, Stats};
use super::policy_counters::PolicyCounters;
use crate::sync::lock;

/// All counters of one guard.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) guard: GuardCounts,
    policies: Mutex<Vec<Arc<PolicyCounters>>>,
    /// How many outages of the store a recorder was told of.
    #[cfg(feature = "metrics")]
    pub(crate) outages: Counter,
    /// How many failures of the provider of credentials a recorder was told of.
    #[cfg(feature = "metrics")]
    pub(crate) credential_failures: Counter,
}

/// The most names of policies that a guard tells apart.
const MOST_POLICIES: usize = 100;
/// The name for all further ones.
const OTHER: &str = "other";

impl Counters {
    pub(crate) fn add(&self, count: GuardCount) {
        self.guard.add(count);
    }

    /// Where the policies of this name count, and whether that is new.
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

    pub(crate) fn snapshot(&self, [flights, tasks, kept_invalidations]: [usize; 3]) -> Stats {
        let [flights, tasks, kept_invalidations] =
            [flights, tasks, kept_invalidations].map(|count| count as u64);
        let mut stats = Stats { flights, tasks, kept_invalidations, ..Stats::default() };
        for policy in self.policies() {
            stats.add_policy(&policy.counts);
            policy.each_requests(|requests| stats.add_requests(requests));
        }
        stats.add_guard(&self.guard);
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "metrics")]
    use crate::observe::counts::PolicyCounts;
    use crate::observe::outcome::Outcome;

    #[cfg(feature = "metrics")]
    #[test]
    fn each_count_belongs_to_a_metric_and_to_a_label_of_it() {
        let (policy, guard) = (PolicyCounts::default(), GuardCounts::default());
        for (series, _) in policy.all().chain(guard.all()) {
            let metric = crate::metrics::METRICS.iter().find(|metric| metric.name == series.metric);
            let metric = metric.unwrap_or_else(|| panic!("{} is not described", series.metric));
            let label = series.label.map(|(name, _)| name);
            assert!(label.is_none_or(|name| metric.labels.contains(&name)), "{series:?}");
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
