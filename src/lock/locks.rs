//! [`Locks`], the handle on a store that mutexes and semaphores are made from.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::Instant;

use super::{LockError, MutexBuilder, Scope, SemaphoreBuilder};
use crate::error::{Error, ErrorKind};
use crate::guard_state::Node;
use crate::key::escape_namespace;
use crate::store::backend::Backend;
use crate::store::lock_store::LockStore;
use crate::store::memory::MemoryStore;
use crate::store::names::LockName;
use crate::store::{NodeStore, StoreError, StoreErrorKind, Token};
use crate::tracker::{Gauge, Present, Waiters};

/// The locks of a store: cheap to clone, all clones share connections.
///
/// A service that has a guard takes [`StampedeGuard::locks`](crate::StampedeGuard::locks).
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use stampede_guard::lock::Locks;
///
/// // In production: Locks::new(redis::Client::open("redis://127.0.0.1/")?)
/// let locks = Locks::in_memory();
/// let nightly = locks.mutex("nightly").build()?;
/// if let Some(mut guard) = nightly.try_lock().await? {
///     // .. the one process that does it tonight
///     guard.unlock().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Locks {
    home: Arc<Home>,
}

/// Settings of [`Locks`]; [`build`](Self::build) checks them.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LocksBuilder {
    backend: Backend,
    namespace: String,
    command_timeout: Duration,
}

/// What all locks made from one [`Locks`] share.
pub(super) struct Home {
    pub(super) store: NodeStore,
    /// Escaped, as it stands in key names.
    pub(super) namespace: Box<str>,
    pub(super) command_timeout: Duration,
    /// Releases that nobody waits for. Of a guard it is the guard's own: there is a `Home` for each `guard.locks()` and
    /// each permit to load, and the guard's end has to wait for what all of them left behind.
    pub(super) background: Arc<Gauge>,
    waiters: Waiters,
    /// Whether it was said that the server announces no key events.
    pub(super) warned: AtomicBool,
    /// The guard whose connections these are. It closes them; without one, this does.
    guard: Option<Arc<Node>>,
}

/// A lock has nothing to fall back on: who is refused because the server paused for a moment does not do its
/// work. So this is longer than the guard's own deadline, which every hit may have to wait for, and short
/// enough that a dead server is an error while somebody is still there to read it.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1);

/// How long an end waits for what is released in the background: a store that can be asked needs a moment, and one that
/// can not be does not keep a process that wants to end.
pub(crate) const LAST_RELEASES: Duration = Duration::from_secs(2);

impl Locks {
    /// Locks in the namespace `default` of what converts into a [`Backend`]: a `redis::Client`, a [`MemoryStore`], with
    /// their features a `SentinelClient` or a `ClusterClient`.
    ///
    /// Does no I/O, cannot fail, and may be called outside a runtime: the connection is made by the
    /// first call that needs it, or by [`connect`](Self::connect). Two services on one Redis that are not to exclude
    /// each other need different [namespaces](LocksBuilder::namespace).
    ///
    /// A process that is forked before the first call excludes its parent like any other process. After that, make new locks in
    /// the child: two processes with one identity take each other's turns, and connections and tasks stay with the parent.
    pub fn new(backend: impl Into<Backend>) -> Self {
        Self::builder(backend).assemble()
    }

    /// Locks of one process, without a server.
    pub fn in_memory() -> Self {
        Self::new(MemoryStore::new())
    }

    /// Starts locks with settings of their own.
    pub fn builder(backend: impl Into<Backend>) -> LocksBuilder {
        LocksBuilder {
            backend: backend.into(),
            namespace: "default".to_owned(),
            command_timeout: COMMAND_TIMEOUT,
        }
    }

    /// Locks on the connections of a guard, in its namespace.
    pub(crate) fn of(guard: &Arc<Node>) -> Self {
        Self::with_timeout(guard, COMMAND_TIMEOUT)
    }

    /// The same, with another deadline of one command.
    pub(crate) fn with_timeout(guard: &Arc<Node>, command_timeout: Duration) -> Self {
        let (store, namespace) = (guard.store.clone(), guard.namespace.clone());
        Self { home: Arc::new(Home::new(store, namespace, command_timeout, Some(Arc::clone(guard)))) }
    }

    /// Starts a mutex named `name`.
    pub fn mutex(&self, name: impl Into<Scope>) -> MutexBuilder {
        MutexBuilder::new(Arc::clone(&self.home), name.into())
    }

    /// Starts a semaphore named `name`, with this many permits.
    pub fn semaphore(&self, name: impl Into<Scope>, permits: u32) -> SemaphoreBuilder {
        SemaphoreBuilder::new(Arc::clone(&self.home), name.into(), permits)
    }

    /// Opens the connections, so that the first lock does not pay for that.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if they are not up within the command timeout or one second, whichever is longer.
    /// They go on trying in the background.
    ///
    /// # Cancel safety
    ///
    /// Safe: connecting goes on in the background.
    pub async fn connect(&self) -> Result<(), LockError> {
        let within = self.home.command_timeout.max(Duration::from_secs(1));
        self.home.store.connect(within).await.map_err(|source| match source.kind {
            StoreErrorKind::Closed => LockError::Closed,
            _ => LockError::Store(Error::with_source(
                ErrorKind::Store,
                "connecting to the store failed",
                Arc::new(source),
            )),
        })
    }

    /// Sends those away who wait, waits until what was released in the background is released, two seconds at most, then
    /// ends the connections. Those of a guard stay: [`shutdown`](crate::StampedeGuard::shutdown) ends them. All handles on a
    /// guard's locks have one background.
    ///
    /// What is held still stays so until its time to live is over, or, of a guard's locks, until it is given back. All other
    /// calls fail with [`LockError::Closed`], those that wait at once.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the connections stay.
    pub async fn close(&self) {
        let deadline = Instant::now() + LAST_RELEASES;
        // First, so that what those leave behind who wait is waited for as well.
        self.home.waiters.send_away(deadline).await;
        self.home.background.empty(deadline).await;
        self.home.close();
    }
}

impl LocksBuilder {
    /// A part of every key name in the store, as a guard has one; locks of different namespaces do not exclude
    /// each other. 1 to 64 characters. Defaults to `default`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// How long one command may take, including a connection that is being made again. It bounds how long a call may hang
    /// on a server that is down, not how long a lock is waited for. Defaults to 1 s: a lock has nothing to fall back on, so it rather waits
    /// out a pause of the server.
    pub fn command_timeout(mut self, command_timeout: Duration) -> Self {
        self.command_timeout = command_timeout;
        self
    }

    /// Makes the handle. No I/O, no runtime needed.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOption`] for a namespace or a timeout out of range.
    pub fn build(self) -> Result<Locks, LockError> {
        let length = escape_namespace(&self.namespace).len();
        if !(1..=64).contains(&length) {
            let why = format!("it has {length} characters: choose 1 to 64 (an escape counts as three)");
            return Err(LockError::option("namespace", why));
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(86_400));
        if !(least..=most).contains(&self.command_timeout) {
            let why = format!("it is {:?}: choose from {least:?} to {most:?}", self.command_timeout);
            return Err(LockError::option("command_timeout", why));
        }
        Ok(self.assemble())
    }

    /// The handle, with settings that are known to be sound.
    fn assemble(self) -> Locks {
        let Self { backend, namespace, command_timeout } = self;
        let store = backend.into_store(command_timeout);
        let namespace = escape_namespace(&namespace).into();
        Locks { home: Arc::new(Home::new(store, namespace, command_timeout, None)) }
    }
}

impl Home {
    fn new(
        store: NodeStore,
        namespace: Box<str>,
        command_timeout: Duration,
        guard: Option<Arc<Node>>,
    ) -> Self {
        let background = guard.as_ref().map(|guard| Arc::clone(&guard.background)).unwrap_or_default();
        Self {
            store,
            namespace,
            command_timeout,
            background,
            waiters: Waiters::default(),
            warned: AtomicBool::new(false),
            guard,
        }
    }

    /// The store's half of the toolkit, until this is closed.
    pub(super) fn locks(&self) -> Result<&dyn LockStore, StoreError> {
        match self.is_closed() {
            true => Err(StoreError::new(StoreErrorKind::Closed)),
            false => Ok(self.last_locks()),
        }
    }

    /// The same for what gives back, which is welcome as long as there are connections: a guard's outlive this.
    pub(super) fn last_locks(&self) -> &dyn LockStore {
        &**self.store.locks()
    }

    /// A guard's connections outlive its locks, and a memory store has none; so this is not known by them.
    pub(super) fn is_closed(&self) -> bool {
        self.waiters.are_sent_away() || self.guard.as_ref().is_some_and(|guard| guard.waiters.are_sent_away())
    }

    /// Resolves when this is closed, or the guard shuts down.
    pub(super) async fn closed(&self) {
        let Some(guard) = &self.guard else { return self.waiters.sent_away().await };
        tokio::select! {
            biased;
            () = self.waiters.sent_away() => {}
            () = guard.waiters.sent_away() => {}
        }
    }

    /// Somebody waits for a lock, until the answer is dropped.
    pub(super) fn wait(&self) -> (Present, Option<Present>) {
        (self.waiters.enter(), self.guard.as_ref().map(|guard| guard.waiters.enter()))
    }

    /// Sends a command about this lock, waiting within its timeout for a connection that is being made again: a lock has nothing to
    /// fall back on. Not for what was sent and not answered; that may have been done.
    pub(super) async fn ask<T, F>(
        &self,
        name: &LockName,
        send: impl Fn(Duration) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let started = Instant::now();
        let answer = send(self.command_timeout).await;
        let Err(StoreError { kind: StoreErrorKind::Unavailable, .. }) = answer else { return answer };
        let left = || self.command_timeout.saturating_sub(started.elapsed());
        if left().is_zero() || self.store.reach(&name.key, left()).await.is_err() {
            return answer;
        }
        send(left()).await
    }

    /// A token of one that wants a lock for so long; `None` for ever.
    pub(super) fn mint(&self, ttl: Option<Duration>) -> Token {
        let node = self.store.node();
        ttl.map_or_else(|| Token::mint(node), |ttl| Token::mint_for(node, ttl))
    }

    fn close(&self) {
        if self.guard.is_none() {
            self.store.close();
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Locks").field(&self.home).finish()
    }
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store: _, namespace, command_timeout, background: _, waiters: _, warned: _, guard } = self;
        f.debug_struct("Home")
            .field("namespace", namespace)
            .field("command_timeout", command_timeout)
            .field("of_guard", &guard.is_some())
            .finish_non_exhaustive()
    }
}
