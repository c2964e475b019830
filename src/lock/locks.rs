//! [`Locks`], the handle on a store that mutexes and semaphores are made from.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::LockError;
use super::engine::home::Home;
use crate::error::{Error, ErrorKind};
use crate::guard_state::Node;
use crate::key::escape_namespace;
use crate::store::StoreErrorKind;
use crate::store::backend::Backend;
use crate::store::memory::MemoryStore;

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
    pub(super) home: Arc<Home>,
}

/// Settings of [`Locks`]; [`build`](Self::build) checks them.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LocksBuilder {
    backend: Backend,
    namespace: String,
    command_timeout: Duration,
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

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Locks").field(&self.home).finish()
    }
}
