//! [`StampedeGuard`], the handle that everything is reached through.

pub(crate) mod builder;
pub(crate) mod load_context;
pub(crate) mod memoize;
pub(crate) mod typed;

mod confirmed;
mod doctor;
mod entries;
mod load;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::Error;
use crate::guard_state::Node;
use crate::key::{CacheKey, Key};
use crate::lock::{LAST_RELEASES, Locks};
use crate::observe::Stats;
use crate::policy::Policy;
use crate::store::StoreError;

/// Cache-stampede protection for a whole fleet: one load per cold key across all processes that share a
/// store.
///
/// It is a handle: cheap to clone, all clones share connections, running loads and counters. It is
/// a [`tower_layer::Layer`] for HTTP services and clients (feature `http`), wraps any tower service through
/// [`memoize`](Self::memoize), and any async function through [`get_or_load`](Self::get_or_load).
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use stampede_guard::StampedeGuard;
///
/// // In production: StampedeGuard::new(redis::Client::open("redis://127.0.0.1/")?)
/// let guard = StampedeGuard::in_memory();
/// let id = 7;
/// let name: String = guard
///     .get_or_load(("user", id), move || async move { Ok::<_, std::io::Error>(format!("user {id}")) })
///     .await?;
/// assert_eq!(name, "user 7");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct StampedeGuard {
    node: Arc<Node>,
    policy: Arc<Policy>,
}

/// What a [`shutdown`](StampedeGuard::shutdown) came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Whether every load ended before the deadline.
    pub finished: bool,
    /// Leases of loads that were still running at the deadline and that another process, or nobody, has now.
    pub handed_over: usize,
    /// Leases for which the store has not confirmed that within the second after the deadline, or after the load's own
    /// end, and those that this process may hold without knowing. Whoever waits for one of them in another process does
    /// so until its time to live is over.
    pub abandoned: usize,
}

impl StampedeGuard {
    pub(crate) fn from_parts(node: Arc<Node>, policy: Arc<Policy>) -> Self {
        node.note_command_timeout(policy.command_timeout);
        Self { node, policy }
    }

    /// The policy that it goes by.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The same guard with another policy: connections, running loads and counters are shared.
    ///
    /// Nothing of the old one stays, what keeps one user's answers from others included: for a change of some settings begin
    /// with [`policy().to_builder()`](Policy::to_builder).
    ///
    /// Where two policies meet on one load, the leader's decides how it is led and stored. The connections keep to
    /// the policy that the guard was [built](Self::builder) with: after two commands without an answer within its
    /// [`command_timeout`](crate::PolicyBuilder::command_timeout) they are opened anew.
    #[must_use]
    pub fn with_policy(&self, policy: Policy) -> Self {
        Self::from_parts(Arc::clone(&self.node), Arc::new(policy))
    }

    /// Opens the connections, so that the first request does not pay for that, and tries whether the server does what loads
    /// need, by a script that leaves no key behind.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) after [`shutdown`](Self::shutdown).
    ///
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) if they are not up within the policy's coordination budget or one second,
    /// whichever is longer: the guard goes on trying in the background. The same if the server runs no scripts, or if it lacks a
    /// command that loads are made of, or this user lacks the right to one; the causes name those. (On a cluster each master that
    /// can be reached is tried; if all of them say that the cluster is down, that is an error too, as a single server that is
    /// loading or busy is not up either.) The guard then behaves as while the store is [down](crate::PolicyBuilder::on_store_down). What
    /// [`doctor`](Self::doctor) examines beyond that is no error here.
    ///
    /// # Cancel safety
    ///
    /// Safe: connecting goes on in the background.
    pub async fn connect(&self) -> Result<(), Error> {
        let within = self.policy.coordination_budget.max(Duration::from_secs(1));
        let began = Instant::now();
        let failed = |what: &'static str| {
            move |source: StoreError| Error::with_source(Error::kind_of(&source), what, Arc::new(source))
        };
        let (store, key) = (&self.node.store, self.unused_key("connect"));
        store.connect(within).await.map_err(failed("connecting to the store failed"))?;
        store
            .probe(&key, within.saturating_sub(began.elapsed()))
            .await
            .map_err(failed("the store does not do what loads need"))
    }

    /// Mutexes and semaphores on this guard's connections, in its namespace.
    pub fn locks(&self) -> Locks {
        Locks::of(&self.node)
    }

    /// What this guard and its clones have counted so far.
    pub fn stats(&self) -> Stats {
        self.node.counters.snapshot(self.node.flights.len(), self.node.tasks.count())
    }

    /// Ends the guard: later calls ask the store nothing and share one load of their key in this process; loads that are running are
    /// waited for until `deadline` from now, then their leases are handed to other processes, or freed, which takes a round trip
    /// each, and at most one second more than `deadline`. Where all end before that, it waits for leases that were acquired without
    /// an answer to be given back, for two seconds at most and within the deadline. Then whoever waits for one of its
    /// [`locks`](Self::locks) is sent away, and it waits for what they release in the background: within the
    /// deadline and for two seconds at most, or within that second. Locks that are still held stay so until their time to live is over.
    /// Calls without a loader fail then, with [`ErrorKind::Closed`](crate::ErrorKind::Closed); a store in memory, which has no
    /// connections to end, answers them as before.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the guard stays as far shut down as it was.
    pub async fn shutdown(&self, deadline: Duration) -> Shutdown {
        self.node.close();
        // Who waits for ever waits for a year.
        let deadline = Instant::now() + deadline.min(Duration::from_secs(365 * 86_400));
        let finished = self.node.tasks.empty(deadline).await;
        let held = self.node.leases.count();
        let end = if finished {
            // Nothing but its time to live would end what was not released before the store is closed.
            deadline.min(Instant::now() + LAST_RELEASES)
        } else {
            self.node.leave();
            // One script for each lease; bounded, because the process wants to end. The loads that end here leave their
            // permits to the background, which has what is left of the same second.
            Instant::now() + Duration::from_secs(1)
        };
        self.free_leases(end).await;
        self.end_locks(end).await;
        let (still_held, doubtful) = (self.node.leases.count(), self.node.doubtful.count());
        self.node.store.close();
        Shutdown {
            finished,
            handed_over: if finished { 0 } else { held.saturating_sub(still_held) },
            abandoned: still_held + doubtful,
        }
    }

    /// First those that flights may have without knowing it: what turns out to be theirs is held from then on.
    async fn free_leases(&self, end: Instant) {
        self.node.doubtful.empty(end).await;
        self.node.leases.empty(end).await;
    }

    /// After the loads, which may wait for some. A place that stays in a queue costs those behind it a time to live.
    async fn end_locks(&self, end: Instant) {
        self.node.waiters.send_away(end).await;
        self.node.background.empty(end).await;
    }

    /// The parts that the HTTP layer works with.
    #[cfg(any(feature = "http", all(test, feature = "testing")))]
    pub(crate) fn parts(&self) -> (&Arc<Node>, &Arc<Policy>) {
        (&self.node, &self.policy)
    }

    pub(crate) fn key(&self, key: impl Into<CacheKey>) -> Result<Key, Error> {
        let key = key.into();
        if key.is_empty() {
            return Err(Error::empty_key());
        }
        Ok(Key::new(&self.node.namespace, &key))
    }
}

impl fmt::Debug for StampedeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StampedeGuard")
            .field("namespace", &self.node.namespace)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}
