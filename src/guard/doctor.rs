//! A guard's reports on itself: [`health`](StampedeGuard::health) from memory, [`doctor`](StampedeGuard::doctor) with commands to the
//! server.

use uuid::Uuid;

use super::StampedeGuard;
use super::builder::StampedeGuardBuilder;
use crate::health::{Finding, Health, LocalTierHealth, Report};
use crate::key::{CacheKey, Key};
use crate::store::Examine;

impl StampedeGuard {
    /// The state of the store as this guard knows it. Sends nothing, does not wait, may be called outside a
    /// runtime.
    ///
    /// A guard whose store is down still answers, with one load per process and key: do not take a process out of service
    /// because of that.
    pub fn health(&self) -> Health {
        Health { local: self.state.local.health(), ..self.state.store.health() }
    }

    /// Examines the deployment: connection, version, rights, notifications, clock, latency, memory, eviction, replicas,
    /// persistence, and this guard's settings against them.
    ///
    /// On Redis it opens two extra connections for a moment, so that it does not disturb the guard's. It
    /// uses one key of this guard's namespace, and removes it before it returns. It works with the rights that its user has: for the
    /// documented minimal user `INFO` and `CONFIG` are refused (a line each in the server's `ACL LOG`), and the checks that
    /// need them are reported as not permitted. It never fails: a server that cannot be reached is a finding. It
    /// takes ten seconds at the most; on a sound server, milliseconds.
    ///
    /// # Cancel safety
    ///
    /// Safe: its connections are closed, its key expires by itself.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use stampede_guard::StampedeGuard;
    ///
    /// let report = StampedeGuard::in_memory().doctor().await;
    /// println!("{report}");
    /// assert!(report.is_healthy());
    /// # }
    /// ```
    pub async fn doctor(&self) -> Report {
        let policy = self.policy();
        let mut findings = self
            .state
            .store
            .examine(Examine {
                key: self.unused_key("doctor"),
                coordination_budget: policy.coordination_budget,
                lease: policy.lease,
                replicas: policy.replicas.map_or(0, |(replicas, _)| replicas),
            })
            .await;
        findings.push(self.namespace());
        findings.extend(self.local_tier());
        findings.extend(self.unusable_entries());
        if self.state.is_closed() {
            let found = Finding::problem("guard", "it was shut down");
            findings.push(found.cost("every call loads for itself").advice("make a new guard"));
        }
        Report::new(findings)
    }

    /// An unused key of this guard's namespace.
    pub(super) fn unused_key(&self, purpose: &str) -> Key {
        let name = CacheKey::from(format!("{purpose}-{}", Uuid::new_v4().simple()));
        Key::new(&self.state.namespace, &name)
    }

    /// The finding about the local tier, if a policy of this guard uses it.
    fn local_tier(&self) -> Option<Finding> {
        let LocalTierHealth { copies, bytes, lease_remaining, .. } = self.state.local.health()?;
        let found = format!("{copies} copies in {bytes} bytes");
        Some(if lease_remaining.is_zero() {
            Finding::note("local tier", format!("{found}; no lease at present"))
                .cost("hits are read from the store")
                .advice("none where no caller has asked lately; else see the findings about the connection and the rights")
        } else {
            Finding::ok("local tier", found)
        })
    }

    /// The finding about entries that this process could not use: this process and others may replace each other's entries.
    fn unusable_entries(&self) -> Option<Finding> {
        let reasons = self.state.unusable.reasons();
        let (_, _, advice) = reasons.iter().max_by_key(|(count, ..)| *count)?;
        let found: Vec<_> = reasons.iter().map(|(count, what, _)| format!("{count} {what}")).collect();
        let found = format!("reads of entries that this process can not use: {}", found.join(", "));
        let cost = "each is a load, and may replace what other processes read";
        Some(Finding::warning("entries", found).cost(cost).advice(*advice))
    }

    fn namespace(&self) -> Finding {
        let namespace = &self.state.namespace;
        if **namespace == *StampedeGuardBuilder::DEFAULT_NAMESPACE {
            Finding::note("namespace", format!("`{namespace}`, the default"))
                .cost("two services that share this store would be given each other's values")
                .advice("StampedeGuard::builder(..).namespace(\"your service\")")
        } else {
            Finding::ok("namespace", format!("`{namespace}`"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::health::{Breaker, LinkState, Severity, Topology};

    #[tokio::test]
    async fn an_in_memory_guard_is_healthy_and_reports_that_there_is_no_fleet() {
        let guard = StampedeGuard::in_memory();
        let health = guard.health();
        assert_eq!((health.commands, health.inbox), (LinkState::Up, LinkState::Up));
        assert_eq!((health.topology, health.breaker), (Topology::Memory, Breaker::Closed));
        assert_eq!((health.clock, health.silent_for, health.reason), (None, None, None));
        let report = guard.doctor().await;
        assert!(report.is_healthy() && report.worst() == Severity::Note, "{report}");
        assert!(report.to_string().contains("no fleet"), "{report}");
    }

    #[tokio::test]
    async fn a_guard_that_was_shut_down_reports_it() {
        let guard = StampedeGuard::in_memory();
        guard.shutdown(Duration::ZERO).await;
        assert_eq!(guard.health().commands, LinkState::Closed);
        assert_eq!(guard.health().breaker, Breaker::Open);
        let report = guard.doctor().await;
        assert!(!report.is_healthy() && report.to_string().contains("shut down"), "{report}");
    }

    #[tokio::test]
    async fn a_namespace_other_than_the_default_is_ok() {
        let guard =
            StampedeGuard::builder(crate::MemoryStore::new()).namespace("shop").build().expect("valid");
        let report = guard.doctor().await;
        let namespace =
            report.findings.iter().find(|finding| finding.check == "namespace").expect("it is looked at");
        assert_eq!(namespace.severity, Severity::Ok);
    }
}
