//! The setters of audits, and of a trial.

use std::time::Duration;

use serde::de::DeserializeOwned;

use super::PolicyBuilder;

impl PolicyBuilder {
    /// Audits this fraction of the hits: beside the caller, which already has its value, the value is loaded once more and compared
    /// with what the guard serves. Zero, the default, audits nothing.
    ///
    /// The guard counts values that match, values that differ, and audits that failed
    /// ([`Stats::audits_matched`](crate::Stats::audits_matched) and so on), records how old a differing value was, and logs one
    /// warning a minute with the digest of its key. A difference counts only if the guard still serves the same value after
    /// [`audit_grace`](Self::audit_grace).
    ///
    /// An audit is a load of the origin, with its permit under [`max_concurrent_loads`](Self::max_concurrent_loads); its result is
    /// not stored. A key is audited at most once a second, and each process runs at most eight audits at once. Over HTTP the
    /// status and the body are compared, of responses to unconditional requests for the whole that are stored under the resource's
    /// own key.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::Policy;
    ///
    /// // One of a thousand hits.
    /// let policy = Policy::builder().audit(0.001).build()?;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn audit(mut self, fraction: f64) -> Self {
        self.policy.audit.fraction = fraction;
        self
    }

    /// Tries the guard without trusting it: each caller is answered by its own load, as without a guard. Beside it the guard goes its
    /// way with what that load returns: it looks up, leads, waits and stores, and counts in [`Stats`](crate::Stats) how it would have
    /// answered. The load waits for the guard's look-up and lease, for 20 ms at most: only a load that began under its lease is stored.
    /// What it would have served is compared with what the caller has loaded, as an [`audit`](Self::audit) does, at most
    /// once a second and key. Defaults to `false`.
    ///
    /// [`get`](crate::StampedeGuard::get) still returns what is stored. Over HTTP the guard's own misses are further requests to the
    /// inner service, as many as it would send; it goes beside requests of axum's type (feature `axum`), and all others only pass.
    pub fn shadow(mut self, shadow: bool) -> Self {
        self.policy.shadow = shadow;
        self
    }

    /// For how long the guard may serve an older value after its origin has another one: the time that the program takes from
    /// its write to its invalidation. An audit waits for that long before it counts a difference. Defaults to 1 s.
    pub fn audit_grace(mut self, grace: Duration) -> Self {
        self.policy.audit.grace = grace;
        self
    }

    /// When an audited value counts as the same. Defaults to the same bytes, which is wrong for values that are encoded in varying
    /// order (a `HashMap`), or that hold the time of their load. Over HTTP the bodies are decoded as JSON.
    ///
    /// An audit of a value that is no `T` counts as failed.
    ///
    /// # Examples
    ///
    /// ```
    /// use serde::Deserialize;
    /// use stampede_guard::Policy;
    ///
    /// #[derive(Deserialize)]
    /// struct Price {
    ///     cents: u64,
    /// }
    ///
    /// // The time of the load, which is in the value too, does not matter.
    /// let policy = Policy::builder().audit(0.001).audit_by(|a: &Price, b: &Price| a.cents == b.cents).build()?;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn audit_by<T: DeserializeOwned + 'static>(
        mut self,
        is_same: impl Fn(&T, &T) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.policy.audit.compare_by(is_same);
        self
    }
}
