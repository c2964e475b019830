//! [`MutexBuilder`]: settings of a mutex, checked when it is built.

use std::sync::Arc;
use std::time::Duration;

use super::engine::registry::LockRegistry;
use super::engine::target::MutexTarget;
use super::options::{MutexOptions, Waiting, check_auto_renew, check_pace, drift, held_ttl};
use super::{Fairness, LockError, Locks, Mutex, Scope};

/// Builds a [`Mutex`]; [`build`](Self::build) refuses settings that contradict each other.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_guard::lock::{Locks, LockError};
///
/// let locks = Locks::in_memory();
/// let build = || {
///     locks
///         .mutex(("market", 42))
///         .ttl(Duration::from_secs(10))
///         .acquire_timeout(Duration::from_millis(20))
///         .build()
/// };
/// let (one, other) = (build()?, build()?);
/// let _guard = one.lock().await?;
/// assert!(matches!(other.lock().await, Err(LockError::AcquireTimeout { attempts: 1, .. })));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct MutexBuilder {
    home: Arc<LockRegistry>,
    scope: Scope,
    options: MutexOptions,
    /// `None` until it is set, or implied by an interval.
    waiting: Option<Waiting>,
    paced: bool,
}

impl MutexBuilder {
    pub(super) fn new(home: Arc<LockRegistry>, scope: Scope) -> Self {
        Self { home, scope, options: MutexOptions::default(), waiting: None, paced: false }
    }

    /// The time to live: how long it is held if its holder neither unlocks nor extends it. This is how long a
    /// crashed holder blocks the others, and the longest that work may take under it. In whole milliseconds,
    /// rounded up; 3 ms to ten years. Defaults to 60 s.
    ///
    /// 1 % of it and 2 ms are kept back for the drift of clocks: [`Held::remaining`](super::Held::remaining) never
    /// counts on them, and nothing would remain of less than 3 ms.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = Some(ttl);
        self
    }

    /// Holds it until it is unlocked, however long that takes. If the holder dies, it stays locked until
    /// [`force_unlock`](Mutex::force_unlock).
    pub fn non_expiring(mut self) -> Self {
        self.options.ttl = None;
        self
    }

    /// How callers wait for it. Defaults to [`Waiting::Notify`].
    pub fn wait(mut self, waiting: Waiting) -> Self {
        self.waiting = Some(waiting);
        self
    }

    /// Which waiter gets it next. Defaults to [`Fairness::Fifo`].
    pub fn fairness(mut self, fairness: Fairness) -> Self {
        self.options.fairness = fairness;
        self
    }

    /// How long [`lock`](Mutex::lock) waits. The first attempt is always made, even with zero; `Duration::MAX`
    /// waits for ever. Defaults to 10 s. Not to be confused with the time to live, [`ttl`](Self::ttl).
    pub fn acquire_timeout(mut self, acquire_timeout: Duration) -> Self {
        self.options.acquire_timeout = Some(acquire_timeout).filter(|&timeout| timeout != Duration::MAX);
        self
    }

    /// How many attempts [`lock`](Mutex::lock) may make after its first; with 0 there is exactly one. Defaults to
    /// as many as the time allows.
    ///
    /// With polling, each attempt counts. With [`Waiting::Notify`], which hardly ever has to ask, each wake-up
    /// counts that did not bring the lock. An attempt does not count if it was needed only because the process had
    /// just begun to listen.
    pub fn retries(mut self, retries: u32) -> Self {
        self.options.retries = Some(retries);
        self
    }

    /// The pause between two attempts, 1 ms to a day. Setting it chooses [`Waiting::Poll`], unless
    /// [`wait`](Self::wait) chooses otherwise; [`Waiting::Keyspace`] uses it if it falls back to polling. Defaults
    /// to 10 ms.
    pub fn retry_interval(mut self, retry_interval: Duration) -> Self {
        self.options.retry_interval = retry_interval;
        self.paced = true;
        self
    }

    /// Lengthens each pause by a random part of up to this fraction of it, 0 to 1, so that callers that were
    /// refused together do not ask again together. Defaults to 0.1.
    pub fn jitter(mut self, fraction: f64) -> Self {
        self.options.jitter = fraction;
        self
    }

    /// How much of the time to live must remain when it is granted; otherwise it is given back, and the call fails
    /// with [`LockError::GrantedTooLate`]. For slow answers. Defaults to any time at all.
    pub fn min_remaining(mut self, min_remaining: Duration) -> Self {
        self.options.min_remaining = min_remaining;
        self
    }

    /// Whether it is extended in the background, at each third of its time to live, until it is unlocked or
    /// dropped. A process that dies still loses it within one time to live; a future that hangs keeps it. Defaults
    /// to false.
    pub fn auto_renew(mut self, auto_renew: bool) -> Self {
        self.options.auto_renew = auto_renew;
        self
    }

    /// Stores it under the bare key `<prefix><name>`, to exclude, and be excluded by, programs in other languages
    /// that `SET key token NX PX`. The namespace is not part of the key. The prefix has 1 to 64 bytes and no
    /// braces. Inside a part of the name, `:` is written `%3A`, so a key `lock:a:b` is the prefix `lock:` and the
    /// name `("a", "b")`. A name of more than 199 bytes ends in its digest, so no key is longer than 264.
    /// [`Mutex::key`] shows it. If the server's ACL restricts keys, the user needs the right to the prefix too. By
    /// default, the key is in this crate's own format.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.options.prefix = Some(prefix.into());
        self
    }

    /// Makes the mutex. Does no I/O and needs no runtime.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`], [`LockError::InvalidTtl`] and [`LockError::InvalidOption`].
    pub fn build(self) -> Result<Mutex, LockError> {
        let Self { home, scope, mut options, waiting, paced } = self;
        let name = scope.mutex(&home.namespace, options.prefix.as_deref())?;
        options.ttl = options.ttl.map(|ttl| held_ttl("ttl", ttl)).transpose()?;
        let polled = Waiting::Poll { interval: options.retry_interval, jitter: options.jitter };
        check_pace("retry_interval", polled)?;
        options.waiting = waiting.unwrap_or(if paced { polled } else { Waiting::Notify });
        check_pace("wait", options.waiting)?;
        options.fairness.check()?;
        match options.ttl {
            Some(ttl) if options.min_remaining > ttl.saturating_sub(drift(ttl)) => {
                let why = format!("it is {:?}, and a grant never has that of {ttl:?}", options.min_remaining);
                return Err(LockError::option("min_remaining", why));
            }
            _ => check_auto_renew(options.auto_renew, options.ttl)?,
        }
        Ok(Mutex::from_target(MutexTarget { home, name, options }))
    }
}

impl Locks {
    /// Starts a mutex named `name`.
    pub fn mutex(&self, name: impl Into<Scope>) -> MutexBuilder {
        MutexBuilder::new(Arc::clone(&self.home), name.into())
    }
}

impl Mutex {
    /// A mutex with the defaults that [`MutexBuilder`] names.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`] for an empty name.
    pub fn new(locks: &Locks, name: impl Into<Scope>) -> Result<Self, LockError> {
        locks.mutex(name).build()
    }

    /// Starts a mutex with other settings than the defaults; the same as [`Locks::mutex`].
    pub fn builder(locks: &Locks, name: impl Into<Scope>) -> MutexBuilder {
        locks.mutex(name)
    }
}
