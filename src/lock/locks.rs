//! [`Locks`], the handle on a store from which mutexes and semaphores are made; and [`Scope`], the name of a lock, with the
//! store keys made from it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{LockError, LockRegistry};
use crate::error::Error;
use crate::guard_state::GuardState;
use crate::key::{CacheKey, Key, escape_namespace, unusable_namespace};
use crate::policy::setters;
use crate::store::backend::{Backend, IntoBackend};
use crate::store::memory::MemoryStore;
use crate::store::{LockName, StoreErrorKind};

/// The locks of a store: cheap to clone, and all clones share connections.
///
/// If the service has a guard, use [`StampedeGuard::locks`](crate::StampedeGuard::locks).
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
///     // .. only one process gets here tonight
///     guard.unlock().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Locks {
    pub(super) registry: Arc<LockRegistry>,
}

/// Settings of [`Locks`]; [`build`](Self::build) checks them.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LocksBuilder {
    backend: Backend,
    namespace: String,
    command_timeout: Duration,
}

/// The default of `command_timeout`. A lock has nothing to fall back on: a caller that is refused because the server paused
/// for a moment does not do its work. So this is longer than the guard's own deadline, which every hit may have to wait
/// for, and short enough that a watching operator still sees the error of a dead server.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a shutdown waits at most for background releases: a reachable store needs a moment, and an unreachable store
/// must not keep the process from ending.
pub(crate) const LAST_RELEASES: Duration = Duration::from_secs(2);

impl Locks {
    /// Locks in the namespace `default`, on anything that converts into a [`Backend`]: a `redis::Client`, a
    /// [`MemoryStore`], and with their features a `SentinelClient` or a `ClusterClient`.
    ///
    /// Does no I/O, cannot fail, and may be called outside a runtime: the connection is made by the first call that
    /// needs it, or by [`connect`](Self::connect). Two services on one Redis with locks that must not exclude each other
    /// need different [namespaces](LocksBuilder::namespace).
    ///
    /// A process that is forked before the first call excludes its parent like any other process. After that, make
    /// new locks in the child: two processes with one identity take each other's turns, and connections and tasks
    /// stay with the parent.
    pub fn new(backend: impl IntoBackend) -> Self {
        Self::builder(backend).assemble()
    }

    /// Locks of one process, without a server.
    pub fn in_memory() -> Self {
        Self::new(MemoryStore::new())
    }

    /// Starts locks with other settings than the defaults.
    pub fn builder(backend: impl IntoBackend) -> LocksBuilder {
        LocksBuilder {
            backend: backend.into(),
            namespace: "default".to_owned(),
            command_timeout: COMMAND_TIMEOUT,
        }
    }

    /// Locks on the connections of a guard, in its namespace.
    pub(crate) fn of(guard: &Arc<GuardState>) -> Self {
        Self::with_timeout(guard, COMMAND_TIMEOUT)
    }

    /// Locks on the connections of a guard, with another timeout of one command.
    pub(crate) fn with_timeout(guard: &Arc<GuardState>, command_timeout: Duration) -> Self {
        let (store, namespace) = (guard.store.clone(), guard.namespace.clone());
        Self {
            registry: Arc::new(LockRegistry::new(store, namespace, command_timeout, Some(Arc::clone(guard)))),
        }
    }

    /// Opens the connections, so that the first lock does not wait for them.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the connections are not up within the command timeout or one second, whichever is longer.
    /// Connecting goes on in the background.
    ///
    /// # Cancel safety
    ///
    /// Safe: connecting goes on in the background.
    pub async fn connect(&self) -> Result<(), LockError> {
        let within = self.registry.command_timeout.max(Duration::from_secs(1));
        self.registry.store.connect(within).await.map_err(|source| match source.kind {
            StoreErrorKind::Closed => LockError::Closed,
            _ => LockError::Store(Error::unusable("connecting to the store failed", source)),
        })
    }

    /// Ends all waits, waits for the releases in the background for at most two seconds, then closes the
    /// connections. A guard's connections stay: [`shutdown`](crate::StampedeGuard::shutdown) closes them. All lock
    /// handles of one guard share their background releases.
    ///
    /// Locks that are still held stay held until their time to live ends or, for a guard's locks, until they are
    /// released. All other calls fail with [`LockError::Closed`]; calls that wait fail at once.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the connections stay open.
    pub async fn close(&self) {
        let deadline = Instant::now() + LAST_RELEASES;
        // Cancel waiters first, so that the releases they spawn are awaited below.
        self.registry.waiters.send_away(deadline).await;
        self.registry.background.empty(deadline).await;
        self.registry.close();
    }
}

setters! { LocksBuilder:
    /// A part of every key name in the store, like a guard's namespace; locks of different namespaces do not
    /// exclude each other. 1 to 64 characters. Defaults to `default`.
    namespace(namespace: impl Into<String> => namespace);

    /// How long one command may take, including the wait for a reconnection. It bounds how long a call may hang on
    /// a server that is down, not how long a caller waits for a lock. Defaults to 1 s: a lock has nothing to fall
    /// back on, so it should outlast a pause of the server.
    command_timeout(command_timeout: Duration => command_timeout);
}

impl LocksBuilder {
    /// Makes the handle. Does no I/O and needs no runtime.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOption`] for a namespace or a timeout out of range.
    pub fn build(self) -> Result<Locks, LockError> {
        if let Some(why) = unusable_namespace(&self.namespace) {
            return Err(LockError::option("namespace", format!("it {why}")));
        }
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(86_400));
        if !(least..=most).contains(&self.command_timeout) {
            let why = format!("it is {:?}: choose from {least:?} to {most:?}", self.command_timeout);
            return Err(LockError::option("command_timeout", why));
        }
        Ok(self.assemble())
    }

    /// Makes the handle from valid settings.
    fn assemble(self) -> Locks {
        let Self { backend, namespace, command_timeout } = self;
        let store = backend.node(command_timeout);
        let namespace = escape_namespace(&namespace).into();
        Locks { registry: Arc::new(LockRegistry::new(store, namespace, command_timeout, None)) }
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Locks").field(&self.registry).finish()
    }
}

/// The name of a lock: a global scope and, inside it, a local one.
///
/// Parts are joined like the parts of a [`CacheKey`]: unambiguously, with any bytes, long names by their digest. Any value
/// that converts into a `CacheKey` converts into the scope of exactly that name.
///
/// # Examples
///
/// ```
/// use stampede_guard::lock::Scope;
///
/// let one_server = Scope::new("server_access").local(7);
/// assert_eq!(one_server, Scope::from(("server_access", 7)));
/// assert_eq!(Scope::new("server_access"), Scope::from(("server_access", "global")));
/// assert_ne!(Scope::new("a.b").local("c"), Scope::new("a").local("b.c"));
/// assert_eq!(Scope::from("nightly").to_string(), "nightly");
/// ```
#[derive(Clone)]
pub struct Scope {
    named: CacheKey,
    /// Whether there is no local part, so that `global` is its local part.
    global: bool,
}

impl Scope {
    /// A global scope. Without a [`local`](Self::local) part, its local part is `global`.
    pub fn new(global: impl fmt::Display) -> Self {
        Self { named: CacheKey::from((global,)), global: true }
    }

    /// A local scope inside this scope.
    #[must_use]
    pub fn local(&self, local: impl fmt::Display) -> Self {
        Self { named: join(&self.named, &local.to_string()), global: false }
    }

    /// The whole name: the global part and the local part.
    fn key(&self) -> CacheKey {
        if self.global { join(&self.named, "global") } else { self.named.clone() }
    }

    fn checked(&self) -> Result<CacheKey, LockError> {
        if self.named.is_empty() { Err(LockError::InvalidKey) } else { Ok(self.key()) }
    }

    /// The key of a mutex of this name: in `namespace`, or exactly `<prefix><name>` if there is a prefix.
    pub(super) fn mutex(&self, namespace: &str, prefix: Option<&str>) -> Result<LockName, LockError> {
        let name = self.checked()?;
        let Some(prefix) = prefix else {
            return Ok(LockName::mutex(Key::new(namespace, &name).name()));
        };
        if prefix.is_empty() || prefix.len() > LONGEST_PREFIX || prefix.contains(['{', '}']) {
            return Err(LockError::InvalidKey);
        }
        // The bound on a name's length includes its namespace and the colon after it; here the namespace is empty.
        let bounded = Key::new("", &name);
        let name = bounded.name().strip_prefix(':').unwrap_or_default();
        Ok(LockName::prefixed(&format!("{prefix}{name}")))
    }

    /// The key of a semaphore of this name.
    pub(super) fn semaphore(&self, namespace: &str) -> Result<LockName, LockError> {
        Ok(LockName::semaphore(Key::new(namespace, &self.checked()?).name()))
    }
}

const LONGEST_PREFIX: usize = 64;

/// The name of `part` inside the scope `head`.
fn join(head: &CacheKey, part: &str) -> CacheKey {
    CacheKey::from_texts(&head.to_string(), &[part])
}

impl<K: Into<CacheKey>> From<K> for Scope {
    /// The scope of exactly this name.
    fn from(named: K) -> Self {
        Self { named: named.into(), global: false }
    }
}

impl PartialEq for Scope {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Scope {}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key().fmt(f)
    }
}

debug_as!(self: Scope => "Scope({})", self.key());
