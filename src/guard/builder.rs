//! [`StampedeGuardBuilder`]: the settings of a guard that hold for all its policies.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::guard::{DEFAULT_NAMESPACE, StampedeGuard};
use crate::guard_state::GuardState;
use crate::guard_state::retained::DEFAULT_MOST_RETAINED;
use crate::key::{escape_namespace, unusable_namespace};
use crate::local::{DEFAULT_CAPACITY, DEFAULT_TERM};
use crate::observe::{SpanLinks, Spans};
use crate::policy::{Policy, setters};
use crate::store::ConnectionSettings;
use crate::store::backend::{Backend, IntoBackend};
use crate::store::memory::MemoryStore;

/// The bounds of `local_term`: a shorter term may end during a scheduler's pause, a longer one makes invalidations wait for too long.
const SHORTEST_TERM: Duration = Duration::from_millis(200);
const LONGEST_TERM: Duration = Duration::from_secs(60);
/// The least `local_capacity` under a policy with copies: a smaller one hardly has room for one copy.
const LEAST_CAPACITY: u64 = 64 * 1024;

/// The bound of `scrape_interval`: for this long a graph would show nothing after each deployment.
const LONGEST_SCRAPE_INTERVAL: Duration = Duration::from_secs(3600);

/// The most connections for commands: a server has one thread for all.
const MOST_CONNECTIONS: usize = 64;

/// Settings of a [`StampedeGuard`]; [`build`](Self::build) checks them.
///
/// A clone makes another guard, in another namespace, say. All guards that are made from one builder and its clones share the switch of
/// [`set_bypass`](StampedeGuard::set_bypass).
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct StampedeGuardBuilder {
    backend: Backend,
    namespace: String,
    policy: Policy,
    max_flights: usize,
    most_kept_invalidations: usize,
    local_capacity: u64,
    local_term: Duration,
    connections: usize,
    scrape_interval: Duration,
    spans: Spans,
    bypass: Arc<AtomicBool>,
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
    pub fn new(backend: impl IntoBackend) -> Self {
        StampedeGuardBuilder::new(backend.into()).assemble()
    }

    /// A guard on the server at this URL, or with this `redis::ConnectionInfo`: [`new`](Self::new) without a client. Does no I/O.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidAddress`] if the address is malformed, or names a kind of server that is not supported.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::StampedeGuard;
    ///
    /// let guard = StampedeGuard::open("redis://127.0.0.1/")?;
    /// assert!(StampedeGuard::open("127.0.0.1:6379").is_err(), "without redis://");
    /// # let _ = guard;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    #[cfg(feature = "redis")]
    pub fn open<A>(address: A) -> Result<Self, Error>
    where
        A: TryInto<Backend>,
        A::Error: std::error::Error + Send + Sync + 'static,
    {
        let backend = address.try_into().map_err(|error| {
            // The text has no part of the address, which may have a password.
            let text = "this is no address of a Redis server: write redis://user:password@host:port/database, rediss:// for TLS \
                        (feature `tls`), or unix:///path/to/socket";
            Error::with_source(ErrorKind::InvalidAddress, text, Arc::new(error))
        })?;
        Ok(Self::new(backend))
    }

    /// A guard for one process, without a server.
    pub fn in_memory() -> Self {
        Self::new(MemoryStore::new())
    }

    /// Starts to build a guard with other settings.
    pub fn builder(backend: impl IntoBackend) -> StampedeGuardBuilder {
        StampedeGuardBuilder::new(backend.into())
    }
}

setters! { StampedeGuardBuilder:
    /// A part of every key name in the store (`sg1:e:{namespace:key}`); services that share a store need different namespaces.
    /// 1 to 64 characters. Defaults to `default`.
    namespace(namespace: impl Into<String> => namespace);

    /// Lifetimes of values and limits of loads. Defaults to [`Policy::default`].
    policy(policy: Policy => policy);

    /// How many keys may be loaded at once in this process; callers of further keys load for themselves and
    /// are counted as bypassed. Under [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) such a load would have
    /// no permit: with [`OnOverload::Shed`](crate::OnOverload::Shed) these callers receive a stale value if one may
    /// stand in, else [`ErrorKind::Overloaded`]. Defaults to 50,000.
    max_flights(max_flights: usize => max_flights);

    /// How many invalidations the guard retains that the store has not confirmed, each key and each tag once. They are sent as soon as
    /// the store answers, and until then this process serves nothing that they invalidate. Beyond the bound one invalidation of everything
    /// in the namespace replaces them: the one of [`invalidate_all`](StampedeGuard::invalidate_all), which reaches the values that are
    /// stored under a policy with [`PolicyBuilder::invalidate_all`](crate::PolicyBuilder::invalidate_all). Values without that tag are
    /// not served by this process if they may have been stored before the end of the outage, and an error is logged, because
    /// other processes may serve them until they expire. Defaults to 10,000.
    most_kept_invalidations(most: usize => most_kept_invalidations);

    /// How many bytes of copies the process keeps in its memory, if a policy has
    /// [`local_for`](crate::PolicyBuilder::local_for). The count includes the values, an estimate of their decoded forms, and the maps'
    /// overhead. The memory is allocated as it is used; copies that are seldom read are removed first. Once a thread serves some response often,
    /// an eighth is for the threads' own copies of such responses. Defaults to 64 MiB.
    local_capacity(bytes: u64 => local_capacity);

    /// How long a volume lease lasts: the longest time that an invalidation waits for a process that has local copies and is dead, hung,
    /// paused or cut off. While copies are read, the lease is renewed at each third of this time. 200 ms to one minute; defaults to 2 s.
    ///
    /// All processes of a namespace should have the same term. If they differ, invalidations wait for the longest.
    local_term(term: Duration => local_term);

    /// How many connections carry commands to each server, 1 to 64. Defaults to 1. One connection is driven by one task, which is the limit
    /// of a process with many threads that mostly reads the store: with two to four connections the server's one thread is the limit.
    ///
    /// The commands of one key share a connection. All connections are opened together and lost together; over TLS there is one. The
    /// first guard or `Locks` of a [`Backend`] decides for all that share its connections. The gauge `stampede_guard_open_connections`
    /// shows how many are open.
    connections(connections: usize => connections);

    /// Publishes the counters of a policy only from its first use on, for a recorder that is scraped in this interval, at most one hour.
    /// Defaults to zero: all counters exist from the start, also those of policies that this process never uses.
    ///
    /// A rate is computed from two scrapes, so a counter that appears with its first count would hide that count. The counters of a policy
    /// therefore appear as zeros when it is first used, and stay at zero for this interval; then all that was counted meanwhile is
    /// published. So nothing is lost, but a graph shows the first counts of each policy, and of each outcome of a route, one interval
    /// late. [`StampedeGuard::stats`] is never late. Counters of the guard, gauges and histograms are not withheld.
    scrape_interval(interval: Duration => scrape_interval);
}

impl StampedeGuardBuilder {
    fn new(backend: Backend) -> Self {
        let namespace = DEFAULT_NAMESPACE.to_owned();
        Self {
            backend,
            namespace,
            policy: Policy::default(),
            max_flights: Self::DEFAULT_MAX_FLIGHTS,
            most_kept_invalidations: DEFAULT_MOST_RETAINED,
            local_capacity: DEFAULT_CAPACITY,
            local_term: DEFAULT_TERM,
            connections: 1,
            scrape_interval: Duration::ZERO,
            spans: Spans::default(),
            bypass: Arc::default(),
        }
    }

    /// Makes the guard. The settings must be valid: the defaults, or settings that `build` has checked.
    fn assemble(self) -> StampedeGuard {
        let Self { backend, namespace, policy, max_flights, local_capacity, local_term, spans, .. } = self;
        let retained = self.most_kept_invalidations;
        let connections = self.connections;
        let store = backend.node(ConnectionSettings { command_timeout: policy.command_timeout, connections });
        let (namespace, local) = (escape_namespace(&namespace).into(), (local_capacity, local_term));
        let observation = (spans, self.scrape_interval);
        let state = GuardState::new(store, namespace, max_flights, retained, local, observation, self.bypass);
        StampedeGuard::from_parts(Arc::new(state), policy)
    }

    /// With more flights at once, memory becomes the limit: a caller and its flight take some 18 kB.
    const DEFAULT_MAX_FLIGHTS: usize = 50_000;

    /// Links the spans of loads and of the callers that wait for them, across processes. Defaults to no links; the spans have the
    /// field `flight` in any case.
    pub fn span_links(mut self, links: impl SpanLinks) -> Self {
        self.spans = Spans::linked_by(links);
        self
    }

    /// Makes the guard. Does no I/O and needs no runtime.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`] for an empty or overlong namespace, no flights or no retained invalidations at all, `connections`,
    /// a `scrape_interval` or a `local_term` out of its range, or a `local_capacity` without room for a copy where the policy has a `local_for`.
    pub fn build(self) -> Result<StampedeGuard, Error> {
        match self.refusal() {
            Some(text) => Err(Error::new(ErrorKind::InvalidPolicy, text)),
            None => Ok(self.assemble()),
        }
    }

    fn refusal(&self) -> Option<String> {
        let (term, capacity, local_for) = (self.local_term, self.local_capacity, self.policy.local_for);
        if let Some(why) = unusable_namespace(&self.namespace) {
            return Some(format!("namespace {why}"));
        }
        for (setting, most) in
            [("max_flights", self.max_flights), ("most_kept_invalidations", self.most_kept_invalidations)]
        {
            if most == 0 {
                return Some(format!("{setting} is 0: choose at least 1"));
            }
        }
        let connections = self.connections;
        if !(1..=MOST_CONNECTIONS).contains(&connections) {
            return Some(format!("connections is {connections}: choose from 1 to {MOST_CONNECTIONS}"));
        }
        if self.scrape_interval > LONGEST_SCRAPE_INTERVAL {
            let interval = self.scrape_interval;
            return Some(format!(
                "scrape_interval is {interval:?}: choose at most {LONGEST_SCRAPE_INTERVAL:?}"
            ));
        }
        if !(SHORTEST_TERM..=LONGEST_TERM).contains(&term) {
            return Some(format!(
                "local_term is {term:?}: choose from {SHORTEST_TERM:?} to {LONGEST_TERM:?}"
            ));
        }
        let has_no_room = capacity < LEAST_CAPACITY && !local_for.is_zero();
        has_no_room.then(|| {
            format!(
                "local_capacity ({capacity} bytes) and local_for ({local_for:?}) contradict each other: choose a capacity of at \
                 least {LEAST_CAPACITY} bytes, or no local_for"
            )
        })
    }
}
