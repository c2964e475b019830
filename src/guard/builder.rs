//! Settings that are made once for a guard and all its policies.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::guard::StampedeGuard;
use crate::guard_state::GuardState;
use crate::key::escape_namespace;
use crate::policy::Policy;
use crate::store::backend::Backend;
use crate::store::memory::MemoryStore;

/// Settings of a [`StampedeGuard`]; [`build`](Self::build) checks them.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct StampedeGuardBuilder {
    backend: Backend,
    namespace: String,
    policy: Policy,
    max_flights: usize,
}

impl StampedeGuard {
    /// A guard with the default [`Policy`] and the namespace `default`.
    ///
    /// A process that is forked before the first call can use the guard like any other process. After that, make a new guard in the
    /// child: two processes with one identity take each other's leases, and connections and tasks stay with the parent.
    ///
    /// Takes any type that converts into a [`Backend`]: a `redis::Client`, a [`MemoryStore`], with their features a
    /// `SentinelClient` or a `ClusterClient`. Does no I/O, cannot fail, and may be
    /// called outside a runtime: the connection is made by the first call that needs it, or by
    /// [`connect`](Self::connect). Two services on one Redis must each set their own
    /// [`namespace`](StampedeGuardBuilder::namespace).
    pub fn new(backend: impl Into<Backend>) -> Self {
        StampedeGuardBuilder::new(backend.into()).assemble()
    }

    /// A guard for one process, without a server.
    pub fn in_memory() -> Self {
        Self::new(MemoryStore::new())
    }

    /// Starts to build a guard with other settings.
    pub fn builder(backend: impl Into<Backend>) -> StampedeGuardBuilder {
        StampedeGuardBuilder::new(backend.into())
    }
}

impl StampedeGuardBuilder {
    pub(crate) fn new(backend: Backend) -> Self {
        let namespace = Self::DEFAULT_NAMESPACE.to_owned();
        Self { backend, namespace, policy: Policy::default(), max_flights: Self::DEFAULT_MAX_FLIGHTS }
    }

    /// The guard, with valid settings: the defaults, or those that `build` has checked.
    pub(crate) fn assemble(self) -> StampedeGuard {
        let Self { backend, namespace, policy, max_flights } = self;
        let store = backend.into_store(policy.command_timeout);
        let state = GuardState::new(store, escape_namespace(&namespace).into(), max_flights);
        StampedeGuard::from_parts(Arc::new(state), Arc::new(policy))
    }

    pub(crate) const DEFAULT_NAMESPACE: &str = "default";
    /// Beyond this many different cold keys at once the guard's own memory is the problem.
    const DEFAULT_MAX_FLIGHTS: usize = 10_000;

    /// A part of every key name in the store (`sg1:e:{namespace:key}`); services that share a store need different ones.
    /// 1 to 64 characters. Defaults to `default`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Lifetimes of values and limits of loads. Defaults to [`Policy::default`].
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// How many keys may be loaded at once in this process; callers of further keys load for themselves and
    /// are counted as bypassed. Under [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) such a load would have
    /// no permit: with [`OnOverload::Shed`](crate::OnOverload::Shed) these callers are given a stale value if one may
    /// stand in, else [`ErrorKind::Overloaded`]. Defaults to 10,000.
    pub fn max_flights(mut self, max_flights: usize) -> Self {
        self.max_flights = max_flights;
        self
    }

    /// Makes the guard. No I/O, no runtime needed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`] for an empty or overlong namespace, or no flights at all.
    pub fn build(self) -> Result<StampedeGuard, Error> {
        let length = escape_namespace(&self.namespace).len();
        if !(1..=64).contains(&length) {
            let text =
                format!("namespace has {length} characters: choose 1 to 64 (an escape counts as three)");
            return Err(Error::new(ErrorKind::InvalidPolicy, text));
        }
        if self.max_flights == 0 {
            return Err(Error::new(ErrorKind::InvalidPolicy, "max_flights is 0: choose at least 1"));
        }
        Ok(self.assemble())
    }
}
