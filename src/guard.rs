//! [`StampedeGuard`], the handle that everything is reached through.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};

use crate::backend::Backend;
use crate::builder::StampedeGuardBuilder;
use crate::entry::{Entry, Kind};
use crate::error::{Error, ErrorKind, Failure, LoadError, panic_text};
use crate::key::{CacheKey, Key};
use crate::lock::Locks;
use crate::memoize::MemoizeLayer;
use crate::node::{Loader, Loading, Mode, Node};
use crate::observe::{Count, Outcome, Stats};
use crate::policy::Policy;
use crate::read_through::{Answer, Ask, Looked, look, peek};
use crate::store::memory::MemoryStore;
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;
use crate::typed::{Decode, Own, loader};

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
    /// Loads that were still running at the deadline; their leases were handed over or freed.
    pub handed_over: usize,
}

impl StampedeGuard {
    /// A guard with the default [`Policy`] and the namespace `default`.
    ///
    /// Takes a `redis::Client` or a [`MemoryStore`]. Does no I/O, cannot fail, and may be
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

    /// Starts a guard with settings of its own.
    pub fn builder(backend: impl Into<Backend>) -> StampedeGuardBuilder {
        StampedeGuardBuilder::new(backend.into())
    }

    pub(crate) fn from_parts(node: Arc<Node>, policy: Arc<Policy>) -> Self {
        Self { node, policy }
    }

    /// The same guard with another policy: connections, running loads and counters are shared.
    ///
    /// Where two policies meet on one load, the leader's decides how it is led and stored.
    #[must_use]
    pub fn with_policy(&self, policy: Policy) -> Self {
        Self { node: Arc::clone(&self.node), policy: Arc::new(policy) }
    }

    /// Opens the connections, so that the first request does not pay for it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Store`] if they are not up within the policy's coordination budget or one second,
    /// whichever is longer. The guard goes on trying in the background.
    ///
    /// # Cancel safety
    ///
    /// Safe: connecting goes on in the background.
    pub async fn connect(&self) -> Result<(), Error> {
        let within = self.policy.coordination_budget.max(Duration::from_secs(1));
        self.node.store.connect(within).await.map_err(|source| {
            Error::with_source(ErrorKind::Store, "connecting to the store failed", Arc::new(source))
        })
    }

    /// Returns the stored value of `key`, or loads it: once in the whole fleet, however many callers ask at
    /// once.
    ///
    /// One caller's `load` runs, in a task of its own; all others, in every process, are given its value,
    /// or its failure. They keep their own `load` for when it is needed: the first one's process dies, it
    /// panics, [`wait_timeout`](crate::PolicyBuilder::wait_timeout) passes.
    ///
    /// The value is stored for the policy's [`fresh_for`](crate::PolicyBuilder::fresh_for). `None`, `()` and
    /// `false` are values like any other.
    ///
    /// # Errors
    ///
    /// [`LoadError::Loader`] and [`LoadError::Remote`] if the load failed, here or in another process;
    /// [`LoadError::Panicked`]; [`LoadError::Guard`] for an empty key, a bound on time, a load that asks for
    /// its own key, and, with [`OnStoreDown::FailClosed`](crate::OnStoreDown), a store that is down.
    ///
    /// # Cancel safety
    ///
    /// Dropping this takes only this caller away. A load that has begun goes on and is stored; one that
    /// has not begun is led by another caller, if there is one.
    ///
    /// # Consistency
    ///
    /// The lease is for efficiency: when it is lost (its holder paused for longer, the server failed
    /// over) two loads may run, and only the one that still holds it is stored.
    pub async fn get_or_load<T, E, F, Fut>(
        &self,
        key: impl Into<CacheKey>,
        load: F,
    ) -> Result<T, LoadError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: fmt::Display + fmt::Debug + Send + Sync + 'static,
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let key = self.key(key)?;
        let open = Decode::new(&self.policy);
        let ask = Ask { node: &self.node, policy: &self.policy, key: &key };
        let (outcome, result) = match look(ask, &open).await {
            Looked::Hit(value) => (Outcome::Hit, Ok(value)),
            Looked::Failed(failure) => (Outcome::Failed, Err(failure.into_load_error())),
            Looked::Missing(missing) => {
                let own = Own::default();
                let answer = missing.load(&open, loader(load, &self.policy, &own)).await;
                self.conclude(&key, answer, &own).await
            }
        };
        let outcome = if result.is_ok() { outcome } else { Outcome::Failed };
        self.node.answered(&key, outcome);
        result
    }

    /// Step 8 for a caller that brought its loader.
    async fn conclude<T, E>(
        &self,
        key: &Key,
        answer: Answer<T>,
        own: &Own<T, E>,
    ) -> (Outcome, Result<T, LoadError<E>>)
    where
        E: Send + Sync + 'static,
    {
        let own = || lock(own).take();
        match answer {
            Answer::Coalesced(value) => (Outcome::Coalesced, Ok(value)),
            Answer::Failed(failure) => (Outcome::Failed, Err(failure.into_load_error())),
            Answer::Led(ending) => {
                (Outcome::Led, own().unwrap_or_else(|| Err(ending.into_failure().into_load_error())))
            }
            Answer::Alone(loader) => {
                let ran = self.run_alone(key, loader).await;
                let result = own()
                    .unwrap_or_else(|| Err(ran.err().unwrap_or_else(Failure::vanished).into_load_error()));
                (Outcome::Bypassed, result)
            }
        }
    }

    /// Runs a caller's own load outside the protocol, with the same bound and the same care for panics.
    async fn run_alone(&self, key: &Key, loader: Loader) -> Result<(), Failure> {
        self.node.count(Count::loads);
        let Loader { run, span: _, within } = loader;
        let load = Loading::scope(&self.node, key, within, async move { run(Mode::Alone).await });
        match timeout(self.policy.load_timeout, AssertUnwindSafe(load).catch_unwind()).await {
            Ok(Ok(loaded)) => {
                loaded.settle();
                Ok(())
            }
            Ok(Err(panic)) => Err(Failure::Panicked(panic_text(&*panic))),
            Err(_) => Err(Failure::Guard(Error::load_timeout(key, self.policy.load_timeout))),
        }
    }

    /// Returns the stored value of `key`; never loads. `None` if there is none, or none that is fresh and a
    /// `T`.
    ///
    /// # Errors
    ///
    /// An empty key, or a store that did not answer within the coordination budget.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn get<T>(&self, key: impl Into<CacheKey>) -> Result<Option<T>, Error>
    where
        T: DeserializeOwned + 'static,
    {
        let key = self.key(key)?;
        let ask = Ask { node: &self.node, policy: &self.policy, key: &key };
        peek(ask, &Decode::new(&self.policy))
            .await
            .map_err(|error| Error::store("looking up the entry", &key, error))
    }

    /// Stores `value` under `key` now. Like [`invalidate`](Self::invalidate), it wins over loads that are
    /// running: what they load is not stored.
    ///
    /// # Errors
    ///
    /// An empty key; a value that can not be encoded, or is longer than `max_body`; a store that did not
    /// confirm it within two seconds, in which case it may or may not have happened.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may or may not have happened.
    pub async fn insert<T>(&self, key: impl Into<CacheKey>, value: &T) -> Result<(), Error>
    where
        T: Serialize + Sync + 'static,
    {
        let key = self.key(key)?;
        let (encoding, payload) = self.policy.codec.encode(value)?;
        if payload.len() > self.policy.max_body {
            return Err(Error::new(
                ErrorKind::Encode,
                format!(
                    "the value has {} bytes, more than max_body ({})",
                    payload.len(),
                    self.policy.max_body
                ),
            ));
        }
        let keep = self.policy.stored_for(self.policy.fresh_for);
        let now = self.node.store.now();
        let fresh_until = now.saturating_add(keep.as_millis() as u64);
        let entry = Entry { kind: Kind::Value, encoding, stored_at: now, fresh_until, payload };
        self.replace(&key, Some((entry.encode(&key), keep))).await
    }

    /// Removes `key`, also against loads that are running: what they load is not stored.
    ///
    /// # Errors
    ///
    /// An empty key, or a store that did not confirm it within two seconds, in which case it may or may not
    /// have happened.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may or may not have happened in the store; in this process running loads are detached
    /// at once.
    ///
    /// # Consistency
    ///
    /// Once it returned, no later caller in this process is given what was loaded before. In other processes
    /// no later caller is, once they were told: about a round trip later, or, if that message is
    /// lost, at the next renewal of the lease.
    pub async fn invalidate(&self, key: impl Into<CacheKey>) -> Result<(), Error> {
        let key = self.key(key)?;
        self.replace(&key, None).await
    }

    /// INVALIDATE and INSERT: retried past the coordination budget, because the caller asked for this and for
    /// nothing else.
    async fn replace(&self, key: &Key, entry: Option<(bytes::Bytes, Duration)>) -> Result<(), Error> {
        const LONGEST: Duration = Duration::from_secs(2);
        let deadline = Instant::now() + LONGEST;
        self.node.detach(key);
        let mut tried = StoreError::new(StoreErrorKind::Unavailable);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::store("not confirmed: replacing the entry", key, tried));
            }
            // A connection that is being made again is worth the wait here.
            let done = match self.node.store.connect(left).await {
                Ok(()) => self.node.store.invalidate(key, entry.clone(), left.min(LONGEST / 4)).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(()) => {
                    // A flight that began before the store was told may hold what was read before.
                    self.node.detach(key);
                    return Ok(());
                }
                Err(error) => {
                    self.node.count(Count::store_errors);
                    if matches!(error.kind, StoreErrorKind::Refused | StoreErrorKind::Closed) {
                        return Err(Error::store("replacing the entry", key, error));
                    }
                    tried = error;
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(5..50)).min(left)).await;
                }
            }
        }
    }

    /// Mutexes and semaphores on this guard's connections, in its namespace.
    pub fn locks(&self) -> Locks {
        Locks::of(&self.node)
    }

    /// Memoizes any tower service: `key` says what a request's response is cached under.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{CacheKey, StampedeGuard};
    /// use tower::{ServiceBuilder, ServiceExt as _};
    ///
    /// let square = tower::service_fn(|n: u64| async move { Ok::<u64, std::io::Error>(n * n) });
    /// let service = ServiceBuilder::new()
    ///     .layer(StampedeGuard::in_memory().memoize(|n: &u64| CacheKey::from(("square", n))))
    ///     .service(square);
    /// assert_eq!(service.oneshot(12).await?, 144);
    /// # Ok(()) }
    /// ```
    pub fn memoize<K>(&self, key: K) -> MemoizeLayer<K> {
        MemoizeLayer::new(self.clone(), key)
    }

    /// What this guard and its clones have counted so far.
    pub fn stats(&self) -> Stats {
        self.node.counters.snapshot(self.node.flights.len(), self.node.tasks.count())
    }

    /// Ends the guard: later calls load for themselves and count as bypassed; loads that are running are waited
    /// for until `deadline` from now, then their leases are handed to other processes, or freed.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the guard stays as far shut down as it was.
    pub async fn shutdown(&self, deadline: Duration) -> Shutdown {
        self.node.close();
        let finished = self.node.tasks.empty(Instant::now() + deadline).await;
        let handed_over = if finished { 0 } else { self.hand_over_all().await };
        self.node.store.close();
        Shutdown { finished, handed_over }
    }

    async fn hand_over_all(&self) -> usize {
        let held = self.node.leases.count();
        self.node.leaving.send_replace(true);
        // One script each; bounded, because the process wants to end.
        self.node.leases.empty(Instant::now() + Duration::from_secs(1)).await;
        held
    }

    /// The parts that the HTTP layer works with.
    #[cfg(feature = "http")]
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
