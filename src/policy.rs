//! How long values live and how far the guard goes for them: valid by construction.
//!
//! Every default stands here once, with its reason.

use std::time::Duration;

use crate::codec::Codec;
use crate::error::{Error, ErrorKind};
use crate::node::Budget;

/// What happens to a caller that has waited [`wait_timeout`](PolicyBuilder::wait_timeout) for
/// somebody else's load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnWaitTimeout {
    /// Load outside the lease, once per process for all who waited there.
    #[default]
    Load,
    /// Fail with [`ErrorKind::Timeout`]; over HTTP, 504.
    Fail,
}

/// What happens while the store can not be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnStoreDown {
    /// Load without the fleet, still once per process and key.
    #[default]
    FailOpen,
    /// Fail with [`ErrorKind::Store`]; over HTTP, 503 with `Retry-After`. For origins that would
    /// rather be asked by nobody than by every replica.
    FailClosed,
}

/// Lifetimes, bounds and what to do when they pass; made by [`Policy::builder`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use stampede_guard::Policy;
///
/// let policy = Policy::builder()
///     .fresh_for(Duration::from_secs(300))
///     .load_timeout(Duration::from_secs(10))
///     .build()?;
/// assert_eq!(policy, policy.clone());
/// # Ok::<(), stampede_guard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    pub(crate) fresh_for: Duration,
    pub(crate) ttl_jitter: f64,
    pub(crate) lease: Duration,
    pub(crate) load_timeout: Duration,
    pub(crate) wait_timeout: Duration,
    pub(crate) on_wait_timeout: OnWaitTimeout,
    pub(crate) coordination_budget: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) on_store_down: OnStoreDown,
    pub(crate) error_for: Duration,
    pub(crate) codec: Codec,
    pub(crate) max_body: usize,
    #[cfg(feature = "http")]
    pub(crate) http: crate::http::HttpPolicy,
}

impl Policy {
    /// Starts from the defaults.
    pub fn builder() -> PolicyBuilder {
        PolicyBuilder::default()
    }

    /// How long a value that is fresh for `lifetime` is stored: shortened by the jitter.
    pub(crate) fn stored_for(&self, lifetime: Duration) -> Duration {
        lifetime.mul_f64(1.0 - self.ttl_jitter * fastrand::f64())
    }

    /// What the store may add to one request.
    pub(crate) fn budget(&self) -> Budget {
        Budget::new(self.coordination_budget, self.command_timeout)
    }
}

impl Default for Policy {
    /// The defaults that [`PolicyBuilder`]'s methods name.
    fn default() -> Self {
        const DEFAULT_LEASE: Duration = Duration::from_secs(2);
        const DEFAULT_LOAD_TIMEOUT: Duration = Duration::from_secs(30);
        Self {
            // Long enough to take the load off an origin, short enough that a forgotten
            // invalidation is a minute's problem.
            fresh_for: Duration::from_secs(60),
            // Keys stored together would expire together, and load together, for ever after.
            ttl_jitter: 0.1,
            // What a dead leader costs its waiters. Renewed each third while the load runs, so it
            // does not bound the load; two renewals may be lost before the lease is.
            lease: DEFAULT_LEASE,
            // A load without an end would be renewed for ever. Beyond the usual HTTP timeouts.
            load_timeout: DEFAULT_LOAD_TIMEOUT,
            // The longest that a live leader can take, and the lease of one that just died.
            wait_timeout: DEFAULT_LOAD_TIMEOUT.saturating_add(DEFAULT_LEASE),
            on_wait_timeout: OnWaitTimeout::Load,
            // What a request may lose to a Redis that is hung: unpleasant, not an outage.
            coordination_budget: Duration::from_millis(100),
            // Two commands are lost before the connection is given up; together, the budget.
            command_timeout: Duration::from_millis(50),
            // The guard protects the origin; it is not there to take the service down.
            on_store_down: OnStoreDown::FailOpen,
            // A failure is told to those who waited for it; the next caller deserves a try.
            error_for: Duration::ZERO,
            codec: Codec::MessagePack,
            // Larger bodies block the shared connection: 16 MiB delay every other command by 34 ms.
            max_body: 1024 * 1024,
            #[cfg(feature = "http")]
            http: crate::http::HttpPolicy::default(),
        }
    }
}

/// Builds a [`Policy`]; [`build`](Self::build) refuses settings that contradict each other.
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct PolicyBuilder {
    policy: Policy,
    /// `None` follows `load_timeout` and `lease`.
    wait_timeout: Option<Duration>,
    /// `None` follows `coordination_budget`.
    command_timeout: Option<Duration>,
}

impl PolicyBuilder {
    /// How long a value is served before it is loaded again. Over HTTP, for responses that do not
    /// say themselves. Defaults to 60 s.
    pub fn fresh_for(mut self, fresh_for: Duration) -> Self {
        self.policy.fresh_for = fresh_for;
        self
    }

    /// Shortens each stored lifetime by a random part of up to this fraction, so that values stored
    /// together do not expire together. Zero turns it off. Defaults to 0.1.
    pub fn ttl_jitter(mut self, fraction: f64) -> Self {
        self.policy.ttl_jitter = fraction;
        self
    }

    /// How long the fleet waits for a leader that gives no sign of life. It is renewed at each third
    /// while the load runs, so loads may take longer. A shorter lease finds a dead leader sooner and is
    /// lost sooner by a slow one. Defaults to 2 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.policy.lease = lease;
        self
    }

    /// Ends a load that takes longer; all who wait are told [`ErrorKind::Timeout`]. Defaults to 30 s.
    pub fn load_timeout(mut self, load_timeout: Duration) -> Self {
        self.policy.load_timeout = load_timeout;
        self
    }

    /// How long a caller waits for somebody else's load, and what then. Defaults to `load_timeout` plus
    /// `lease`, which no live leader exceeds, and to [`OnWaitTimeout::Load`].
    pub fn wait_timeout(mut self, wait_timeout: Duration, then: OnWaitTimeout) -> Self {
        self.wait_timeout = Some(wait_timeout);
        self.policy.on_wait_timeout = then;
        self
    }

    /// How much time the store's round trips may add to one request, connecting included. Waiting for a
    /// live leader is not part of it. When it is used up the request goes on without the store.
    /// Defaults to 100 ms.
    pub fn coordination_budget(mut self, budget: Duration) -> Self {
        self.policy.coordination_budget = budget;
        self
    }

    /// The deadline of one command to the store. Two of them without any answer, and the connection is
    /// given up. Of the policy that the guard is built with. Defaults to half the coordination budget.
    pub fn command_timeout(mut self, command_timeout: Duration) -> Self {
        self.command_timeout = Some(command_timeout);
        self
    }

    /// What happens while the store can not be asked. Defaults to [`OnStoreDown::FailOpen`].
    pub fn on_store_down(mut self, then: OnStoreDown) -> Self {
        self.policy.on_store_down = then;
        self
    }

    /// How long a failure is also told to callers that come after it, in the whole fleet. Zero tells
    /// only those who waited for the load that failed. Defaults to zero.
    pub fn error_for(mut self, error_for: Duration) -> Self {
        self.policy.error_for = error_for;
        self
    }

    /// How values of loaders are encoded. Defaults to [`Codec::MessagePack`].
    pub fn codec(mut self, codec: Codec) -> Self {
        self.policy.codec = codec;
        self
    }

    /// The longest value or response body, in bytes, that is stored and shared. A longer response
    /// streams through to its own client; a longer value goes to its own caller. Defaults to 1 MiB.
    pub fn max_body(mut self, bytes: usize) -> Self {
        self.policy.max_body = bytes;
        self
    }

    /// What the HTTP layer shares, with whom, and for how long. Replaces what [`scheme`](Self::scheme) and
    /// [`credential_headers`](Self::credential_headers) have set before; they change it when they come
    /// after. Defaults to [`HttpPolicy::default`](crate::http::HttpPolicy::default).
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn http(mut self, http: crate::http::HttpPolicy) -> Self {
        self.policy.http = http;
        self
    }

    /// The scheme of keys for requests whose URI has none, as servers receive them. Two services that
    /// share a namespace and are reached by different schemes set it. Defaults to `http`.
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn scheme(mut self, scheme: http::uri::Scheme) -> Self {
        self.policy.http.requests.scheme = scheme;
        self
    }

    /// Request headers that mark an answer as one user's: a request with any of them bypasses the
    /// cache. Defaults to `Authorization`, `Proxy-Authorization`, `Cookie`, `X-Api-Key`,
    /// `X-Auth-Token` and `X-Amz-Security-Token`. Name your own here as well: this list replaces
    /// the default one.
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn credential_headers(mut self, names: impl IntoIterator<Item = http::HeaderName>) -> Self {
        self.policy.http.requests.credentials = names.into_iter().collect();
        self
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`], naming the settings that do not fit and what would.
    pub fn build(self) -> Result<Policy, Error> {
        let Self { mut policy, wait_timeout, command_timeout } = self;
        policy.command_timeout = command_timeout.unwrap_or(policy.coordination_budget / 2);
        policy.wait_timeout =
            wait_timeout.unwrap_or_else(|| policy.load_timeout.saturating_add(policy.lease));

        let day = Duration::from_secs(86_400);
        in_range("fresh_for", policy.fresh_for, MILLISECOND, day * 3650)?;
        in_range("lease", policy.lease, MILLISECOND * 100, day)?;
        in_range("load_timeout", policy.load_timeout, MILLISECOND, day)?;
        in_range("wait_timeout", policy.wait_timeout, MILLISECOND, day * 2)?;
        in_range("coordination_budget", policy.coordination_budget, MILLISECOND * 2, day)?;
        in_range("command_timeout", policy.command_timeout, MILLISECOND, day)?;
        in_range("error_for", policy.error_for, Duration::ZERO, day)?;
        if !(0.0..=0.9).contains(&policy.ttl_jitter) {
            return Err(refused(format!("ttl_jitter is {}: choose from 0 to 0.9", policy.ttl_jitter)));
        }
        if policy.max_body == 0 || policy.max_body > 256 * 1024 * 1024 {
            return Err(refused(format!("max_body is {}: choose from 1 to 256 MiB", policy.max_body)));
        }
        #[cfg(feature = "http")]
        if let Some(text) = policy.http.refusal() {
            return Err(refused(text));
        }
        let contradiction = |left: &str, a: Duration, right: &str, b: Duration, advice: &str| {
            Err(refused(format!("{left} ({a:?}) and {right} ({b:?}) contradict each other: {advice}")))
        };
        if policy.command_timeout > policy.coordination_budget {
            return contradiction(
                "command_timeout",
                policy.command_timeout,
                "coordination_budget",
                policy.coordination_budget,
                "one command may not take longer than all of them",
            );
        }
        if policy.lease < policy.command_timeout * 4 {
            return contradiction(
                "lease",
                policy.lease,
                "command_timeout",
                policy.command_timeout,
                "a lease must outlast a renewal that is late by one command; make it at least four times as long",
            );
        }
        if policy.load_timeout.saturating_add(policy.lease) < policy.error_for {
            return contradiction(
                "error_for",
                policy.error_for,
                "load_timeout",
                policy.load_timeout,
                "a failure may not be replayed for longer than one try takes (load_timeout plus lease)",
            );
        }
        Ok(policy)
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

fn in_range(name: &str, value: Duration, least: Duration, most: Duration) -> Result<(), Error> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(refused(format!("{name} is {value:?}: choose from {least:?} to {most:?}")))
}

fn refused(text: String) -> Error {
    Error::new(ErrorKind::InvalidPolicy, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn refusal(builder: PolicyBuilder) -> String {
        let error = builder.build().expect_err("contradiction");
        assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
        error.to_string()
    }

    #[test]
    fn the_defaults_are_a_valid_policy() {
        assert_eq!(Policy::builder().build().expect("valid"), Policy::default());
    }

    #[test]
    fn a_lease_of_one_second_is_accepted() {
        Policy::builder().lease(ms(1000)).build().expect("valid");
    }

    #[test]
    fn wait_timeout_follows_load_timeout_and_lease() {
        let policy = Policy::builder().load_timeout(ms(5000)).lease(ms(1000)).build().expect("valid");
        assert_eq!(policy.wait_timeout, ms(6000));
    }

    #[test]
    fn contradictions_name_both_settings() {
        let text = refusal(Policy::builder().lease(ms(150)));
        assert!(text.contains("lease (150ms)") && text.contains("command_timeout (50ms)"), "{text}");
        let text = refusal(Policy::builder().command_timeout(ms(500)));
        assert!(
            text.contains("command_timeout (500ms)") && text.contains("coordination_budget (100ms)"),
            "{text}"
        );
        let text = refusal(Policy::builder().error_for(ms(60_000)));
        assert!(text.contains("error_for (60s)") && text.contains("load_timeout (30s)"), "{text}");
    }

    #[test]
    fn zero_and_nonsense_are_refused() {
        assert!(refusal(Policy::builder().fresh_for(Duration::ZERO)).contains("fresh_for"));
        assert!(refusal(Policy::builder().lease(Duration::ZERO)).contains("lease"));
        assert!(refusal(Policy::builder().load_timeout(Duration::ZERO)).contains("load_timeout"));
        assert!(refusal(Policy::builder().ttl_jitter(f64::NAN)).contains("ttl_jitter"));
        assert!(refusal(Policy::builder().ttl_jitter(-0.1)).contains("ttl_jitter"));
        assert!(refusal(Policy::builder().max_body(0)).contains("max_body"));
        assert!(refusal(Policy::builder().fresh_for(Duration::MAX)).contains("fresh_for"));
    }
}
