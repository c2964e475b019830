//! [`Mutex`], the handle on one named lock, with its settings and its acquisitions.
//!
//! [`MutexBuilder`] checks the settings. [`MutexGuard`] is an acquisition, which it can release; [`Held`] is a view of it.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use super::acquire::acquire;
use super::hold::{Hold, HoldState};
use super::options::{Waiting, check_auto_renew, check_pace, drift, held_ttl};
use super::{LockError, LockRegistry, LockTarget as _, Locks, MutexOptions, MutexTarget, Scope, WaitTerms};
use crate::policy::setters;
use crate::store::{KeyspaceAnswer, MutexHolder, StoreError};

/// A lock with at most one holder among all processes.
///
/// A handle holds the lock at most once: a second acquisition while its guard lives is [`LockError::AlreadyAcquired`],
/// not a deadlock. A clone is another handle on the same lock: it holds nothing and waits like any other process.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use stampede_guard::lock::{LockError, Locks, Mutex};
///
/// let mutex = Mutex::new(&Locks::in_memory(), ("account", 7))?;
/// let mut guard = mutex.lock().await?;
/// assert!(mutex.is_held());
/// assert!(matches!(mutex.try_lock().await, Err(LockError::AlreadyAcquired)));
/// assert!(mutex.clone().try_lock().await?.is_none());
/// assert!(guard.unlock().await?);
/// # Ok(()) }
/// ```
pub struct Mutex {
    target: Arc<MutexTarget>,
    state: Arc<AtomicU8>,
}

/// The result of [`Mutex::synchronize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "`value` is the result of the work, possibly an error, and `still_held` tells whether it was alone"]
#[non_exhaustive]
pub struct Synchronized<T> {
    /// What the closure returned.
    pub value: T,
    /// How many attempts the caller made.
    pub attempts: u32,
    /// Whether the lock was held to the end. If not, another process may have worked at the same time.
    pub still_held: bool,
}

impl Mutex {
    /// Acquires the mutex if it is free and no live caller waits; `None` if not, so check the result before you go on.
    /// Waits for the store only, never for another holder.
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyAcquired`] if this handle holds the mutex or is acquiring it, without asking the store;
    /// [`LockError::GrantedTooLate`]; [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe: a lock that may have been acquired is released in the background.
    pub async fn try_lock(&self) -> Result<Option<MutexGuard>, LockError> {
        let terms = WaitTerms { retries: Some(0), timeout: None, ..self.target.terms() };
        match self.acquire(&terms).await {
            Ok(guard) => Ok(Some(guard)),
            Err(error) if error.is_busy() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires the mutex, after the callers that came earlier.
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyAcquired`], without asking the store; [`LockError::AcquireTimeout`] and
    /// [`LockError::TooManyAttempts`] if the mutex was busy all the time; [`LockError::GrantedTooLate`];
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe, but the caller loses its position in the queue. If dropped, the position, or a lock that may have been
    /// acquired, is released in the background.
    pub async fn lock(&self) -> Result<MutexGuard, LockError> {
        self.acquire(&self.target.terms()).await
    }

    /// Runs `work` under the lock, in the caller's task, and unlocks when `work` has ended or panicked, or when
    /// this future is dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`lock`](Self::lock), before `work` is called; errors of `work` are in its value. If the release
    /// fails at the end, the value is still returned, [`still_held`](Synchronized::still_held) is false, and the release
    /// is retried in the background.
    ///
    /// # Cancel safety
    ///
    /// If dropped, `work` ends where it is, and the lock is released in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::lock::{Locks, Mutex};
    ///
    /// let mutex = Mutex::new(&Locks::in_memory(), "counter")?;
    /// let done = mutex.synchronize(|held| async move { held.attempts() + 41 }).await?;
    /// assert_eq!((done.value, done.attempts, done.still_held), (42, 1, true));
    /// # Ok(()) }
    /// ```
    pub async fn synchronize<T, F, Fut>(&self, work: F) -> Result<Synchronized<T>, LockError>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future<Output = T>,
    {
        let mut guard = self.lock().await?;
        let attempts = guard.attempts();
        let value = work(Held::clone(&guard)).await;
        let still_held = guard.unlock().await.unwrap_or(false);
        Ok(Synchronized { value, attempts, still_held })
    }

    /// Whether any process holds the mutex, including programs in other languages.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn is_locked(&self) -> Result<bool, LockError> {
        Ok(self.look().await?.is_some())
    }

    /// Whether this handle holds the mutex, without asking the store: from the acquisition until the guard is unlocked or
    /// dropped, even after the time to live has ended, and while [`bump`](MutexGuard::bump) waits.
    pub fn is_held(&self) -> bool {
        self.state.load(Ordering::Acquire) == HELD
    }

    /// The remaining time to live of the present holder, in any process, as the store says; `None` if the lock is
    /// free, `Duration::MAX` if the holder has no time to live.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn remaining(&self) -> Result<Option<Duration>, LockError> {
        let holder = self.look().await?;
        Ok(holder.map(|holder| holder.remaining.unwrap_or(Duration::MAX)))
    }

    /// Takes the mutex from its present holder, notifies that holder ([`Held::lost`]), and hands the mutex to the next
    /// waiter in the queue. Returns whether it was held. For operators: the holder may be in the middle of its work.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed, in which case it may or may not have been executed;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn force_unlock(&self) -> Result<bool, LockError> {
        let MutexTarget { registry, name, .. } = &*self.target;
        let broken = registry.ask(name, async |within| registry.locks()?.break_mutex(name, within).await);
        broken.await.map_err(self.failed("unlocking"))
    }

    /// Asks the server to announce events of this mutex's key, as [`Waiting::Keyspace`](super::Waiting::Keyspace)
    /// does, but fails if the server does not, where waiting would fall back to polling.
    ///
    /// # Errors
    ///
    /// [`LockError::NotificationsUnavailable`]; [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn check_keyspace(&self) -> Result<(), LockError> {
        let MutexTarget { registry, name, .. } = &*self.target;
        let announced =
            registry.ask(name, async |within| registry.locks()?.announce_key_changes(name, within).await);
        match announced.await.map_err(self.failed("asking for the events of"))? {
            KeyspaceAnswer::Yes => Ok(()),
            KeyspaceAnswer::No { why } => Err(LockError::NotificationsUnavailable { why }),
        }
    }

    /// The mutex's key in the store.
    pub fn key(&self) -> &str {
        &self.target.name.key
    }

    /// The settings of the mutex.
    pub fn options(&self) -> &MutexOptions {
        &self.target.options
    }

    #[cfg(test)]
    pub(super) fn target(&self) -> &MutexTarget {
        &self.target
    }

    async fn acquire(&self, terms: &WaitTerms) -> Result<MutexGuard, LockError> {
        let claim = Claim::try_claim(&self.state)?;
        let hold = acquire(&self.target, terms, None).await?;
        claim.held();
        Ok(MutexGuard::new(hold, claim))
    }

    async fn look(&self) -> Result<Option<MutexHolder>, LockError> {
        let MutexTarget { registry, name, .. } = &*self.target;
        let holder = registry.ask(name, async |within| registry.locks()?.look_at_mutex(name, within).await);
        holder.await.map_err(self.failed("looking at"))
    }

    fn failed(&self, doing: &str) -> impl Fn(StoreError) -> LockError {
        move |error| self.target.error(doing, error)
    }
}

impl Clone for Mutex {
    /// Another handle on the same lock, which holds nothing.
    fn clone(&self) -> Self {
        Self { target: Arc::clone(&self.target), state: Arc::default() }
    }
}

debug_as!(self: Mutex { held: self.is_held(), options: self.target.options });

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
    registry: Arc<LockRegistry>,
    scope: Scope,
    options: MutexOptions,
    /// `None` until [`wait`](Self::wait) sets it.
    waiting: Option<Waiting>,
    paced: bool,
}

setters! { MutexBuilder:
    /// The time to live: how long the mutex is held if its holder neither unlocks nor extends it. This is how long a
    /// crashed holder blocks the others, and the longest that work under the mutex may take. In whole milliseconds,
    /// rounded up; 3 ms to ten years. Defaults to 60 s.
    ///
    /// 1 % of it and 2 ms are reserved for clock drift: [`Held::remaining`](super::Held::remaining) leaves them out, and
    /// nothing would remain of less than 3 ms.
    ttl(ttl: Duration => options.ttl);

    /// How callers wait for the mutex. Defaults to [`Waiting::Notify`].
    wait(waiting: Waiting => waiting);

    /// How many attempts [`lock`](Mutex::lock) may make after its first; with 0 there is exactly one. Defaults to
    /// as many as the time allows.
    ///
    /// With polling, each attempt counts. With [`Waiting::Notify`], which seldom has to ask, each wake-up without a
    /// grant counts. An attempt does not count if it was needed only because the process had just begun to listen.
    retries(retries: u32 => options.retries);

    /// Lengthens each pause by a random part of up to this fraction of it, 0 to 1, so that callers that were
    /// refused together do not ask again together. Defaults to 0.1.
    jitter(fraction: f64 => options.jitter);

    /// How much of the time to live must remain when the mutex is granted; otherwise it is released, and the call
    /// fails with [`LockError::GrantedTooLate`]. For slow replies. Defaults to zero: any remaining time is enough.
    min_remaining(min_remaining: Duration => options.min_remaining);

    /// Whether the mutex is extended in the background, at each third of its time to live, until its guard is unlocked or
    /// dropped. A process that dies still loses the mutex within one time to live; a future that hangs keeps it. Defaults
    /// to false.
    auto_renew(auto_renew: bool => options.auto_renew);
}

impl MutexBuilder {
    /// Holds the mutex until it is unlocked, however long that takes. If the holder dies, the mutex stays locked until
    /// [`force_unlock`](Mutex::force_unlock).
    pub fn non_expiring(mut self) -> Self {
        self.options.ttl = None;
        self
    }

    /// How long [`lock`](Mutex::lock) waits. The first attempt is always made, even with zero; `Duration::MAX`
    /// waits for ever. Defaults to 10 s. Not to be confused with the time to live, [`ttl`](Self::ttl).
    pub fn acquire_timeout(mut self, acquire_timeout: Duration) -> Self {
        self.options.acquire_timeout = Some(acquire_timeout).filter(|&timeout| timeout != Duration::MAX);
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

    /// Stores the mutex under the bare key `<prefix><name>`, to exclude, and be excluded by, programs in other languages
    /// that send `SET key token NX PX`. The namespace is not part of the key. The prefix has 1 to 64 bytes and no
    /// braces. Inside a part of the name, `:` is written `%3A`, so a key `lock:a:b` is the prefix `lock:` and the
    /// name `("a", "b")`. A name of more than 199 bytes ends in its digest, so no key is longer than 264.
    /// [`Mutex::key`] returns the key. If the server's ACL restricts keys, the user needs the right to the prefix too. By
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
        let Self { registry, scope, mut options, waiting, paced } = self;
        let name = scope.mutex(&registry.namespace, options.prefix.as_deref())?;
        options.ttl = options.ttl.map(|ttl| held_ttl("ttl", ttl)).transpose()?;
        let polled = Waiting::Poll { interval: options.retry_interval, jitter: options.jitter };
        check_pace("retry_interval", polled)?;
        options.waiting = waiting.unwrap_or(if paced { polled } else { Waiting::Notify });
        check_pace("wait", options.waiting)?;
        match options.ttl {
            Some(ttl) if options.min_remaining > ttl.saturating_sub(drift(ttl)) => {
                let why = format!("it is {:?}, and a grant never has that of {ttl:?}", options.min_remaining);
                return Err(LockError::option("min_remaining", why));
            }
            _ => check_auto_renew(options.auto_renew, options.ttl)?,
        }
        let target = Arc::new(MutexTarget { registry, name, options });
        Ok(Mutex { target, state: Arc::default() })
    }
}

impl Locks {
    /// Starts a mutex named `name`.
    pub fn mutex(&self, name: impl Into<Scope>) -> MutexBuilder {
        let (registry, scope) = (Arc::clone(&self.registry), name.into());
        MutexBuilder { registry, scope, options: MutexOptions::default(), waiting: None, paced: false }
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

/// A mutex that this process holds. Dropping the guard unlocks it in the background.
///
/// It dereferences to [`Held`], which describes the acquisition. `Held::clone(&guard)` makes a view for other
/// tasks.
///
/// # Dropping
///
/// Never panics and never blocks. In a runtime (the current one, or the one it was acquired in) a task sends the
/// release and retries until it is answered; outside of any runtime, the mutex stays locked until its time to live
/// ends. [`unlock`](Self::unlock) reports the result, and the release is done when it returns. Dropping is cheaper
/// if the result is not needed, because the caller's next command can travel with the release.
#[must_use = "the mutex is unlocked as soon as its guard is dropped"]
pub struct MutexGuard {
    held: Held,
    hold: Hold<MutexTarget>,
    claim: Option<Claim>,
}

/// One acquisition of a mutex, as seen by all code that works under it.
///
/// Cannot release the mutex: only the [`MutexGuard`] can. All clones see the same acquisition, also after its end.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_guard::lock::{Held, Locks};
///
/// let mutex = Locks::in_memory().mutex("import").ttl(Duration::from_secs(2)).auto_renew(true).build()?;
/// let mut guard = mutex.lock().await?;
/// let held = Held::clone(&guard);
/// let work = async { 42 };
/// let result = tokio::select! {
///     result = work => Some(result),
///     // Another process may hold the mutex by now.
///     () = held.lost() => None,
/// };
/// guard.unlock().await?;
/// assert_eq!(result, Some(42));
/// assert_eq!(held.remaining(), Some(Duration::ZERO));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Held {
    hold_state: Arc<HoldState<MutexTarget>>,
}

impl MutexGuard {
    fn new(hold: Hold<MutexTarget>, claim: Claim) -> Self {
        let hold = renewed(hold);
        let held = Held { hold_state: Arc::clone(&hold.hold_state) };
        Self { held, hold, claim: Some(claim) }
    }

    /// Unlocks, and returns whether the mutex was still held. `false` without asking the store if it was unlocked
    /// before.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed: then the mutex may or may not be unlocked, the guard still counts as
    /// held, and this can be called again; the renewal has stopped.
    ///
    /// # Cancel safety
    ///
    /// Safe: if dropped, the mutex may or may not be unlocked, and this can be called again.
    pub async fn unlock(&mut self) -> Result<bool, LockError> {
        let freed = self.hold.free().await;
        let freed = freed.map_err(|error| self.held.hold_state.target.error("unlocking", error))?;
        self.claim = None;
        Ok(freed.unwrap_or(false))
    }

    /// Gives way to the waiters: unlocks for the first of them and queues again behind the last, both in one
    /// command. Returns when this guard holds the mutex again, at once if there are no waiters. The result is whether
    /// the mutex was still held when it was released; also `false` if the reply to that was lost.
    ///
    /// In either case this is a new acquisition, with another token, a greater [fence](Held::fence) and the full
    /// time to live. The earlier acquisition has ended, and the [`Held`]s that were cloned from it say so.
    ///
    /// For a loop that works in steps under one mutex this is `unlock` and `lock` at half the cost. Callers that
    /// wait by [`Poll`](super::Waiting::Poll) are not in the queue, so this does not give way to them.
    ///
    /// # Errors
    ///
    /// [`LockError::NotHeld`] after unlocking. [`LockError::Store`] if the command failed: then the guard may or may not
    /// hold the mutex, counts as holding it, and this or [`unlock`](Self::unlock) can be called again; the renewal has
    /// stopped. If waiting fails, with the errors of [`Mutex::lock`](super::Mutex::lock),
    /// the guard holds nothing, as after unlocking.
    ///
    /// # Cancel safety
    ///
    /// Safe, but the position in the queue is lost. If dropped, the mutex may or may not be unlocked;
    /// [`unlock`](Self::unlock) or dropping the guard unlocks it.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::lock::{Locks, Mutex};
    ///
    /// let mutex = Mutex::new(&Locks::in_memory(), "import")?;
    /// let mut guard = mutex.lock().await?;
    /// for _page in 0..3 {
    ///     let before = guard.fence();
    ///     // The waiters had their turn in between.
    ///     assert!(guard.bump().await?);
    ///     assert!(guard.fence() > before);
    /// }
    /// assert!(guard.unlock().await?);
    /// # Ok(()) }
    /// ```
    pub async fn bump(&mut self) -> Result<bool, LockError> {
        if self.hold.freed {
            return Err(LockError::NotHeld);
        }
        self.hold.stop_renewing().await;
        let target = Arc::clone(&self.held.hold_state.target);
        match acquire(&target, &target.terms(), Some(&mut self.hold)).await {
            Ok(hold) => {
                let was_held = self.hold.was_held;
                self.hold = renewed(hold);
                self.held = Held { hold_state: Arc::clone(&self.hold.hold_state) };
                Ok(was_held)
            }
            Err(error) => {
                if self.hold.freed {
                    self.claim = None;
                }
                Err(error)
            }
        }
    }
}

/// Starts the renewal, if the mutex's options say so.
fn renewed(hold: Hold<MutexTarget>) -> Hold<MutexTarget> {
    if hold.hold_state.target.options.auto_renew { hold.renew() } else { hold }
}

impl Deref for MutexGuard {
    type Target = Held;

    fn deref(&self) -> &Held {
        &self.held
    }
}

impl Held {
    /// The value in the mutex's key: random, different for each acquisition. Keep it secret: any client that knows
    /// it can end the acquisition.
    pub fn token(&self) -> &str {
        self.hold_state.token.as_str()
    }

    /// The fencing token: greater than those of all earlier holders of this mutex. Send it along with each write
    /// outside the store, so that the receiving side can refuse a write of an earlier holder.
    ///
    /// # Consistency
    ///
    /// The fence is the server's clock in microseconds, or one more than the last fence, so that nothing has to be stored
    /// for ever. It grows even if the clock is set back, and even over a failover or a restart that loses the latest
    /// holders. Only both together can lower it: a server that has lost the holders, with a clock that is behind that of
    /// its predecessor.
    pub fn fence(&self) -> u64 {
        self.hold_state.grant.fence
    }

    /// How many attempts the caller made: 1 if the mutex was free, or was handed over in its queue.
    pub fn attempts(&self) -> u32 {
        self.hold_state.grant.attempts
    }

    /// How long the caller waited for the mutex.
    pub fn waited(&self) -> Duration {
        self.hold_state.grant.waited
    }

    /// The remaining time to live, by this process's monotonic clock: measured from the moment the granting command
    /// was sent, less 1 % and 2 ms. Zero once that time has ended or the mutex was unlocked or lost; `None` if the mutex has no time
    /// to live.
    pub fn remaining(&self) -> Option<Duration> {
        self.hold_state.remaining()
    }

    /// Asks the store whether this acquisition still holds the mutex. `false` without asking, after unlocking.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn is_owned(&self) -> Result<bool, LockError> {
        self.hold_state.is_owned().await
    }

    /// Like [`is_owned`](Self::is_owned), but a mutex that is not held any more is an error.
    ///
    /// # Errors
    ///
    /// [`LockError::NotHeld`] if the mutex is not held any more; [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn ensure(&self) -> Result<(), LockError> {
        if self.is_owned().await? { Ok(()) } else { Err(LockError::NotHeld) }
    }

    /// Restarts the time to live: `ttl` from now, not added to the remaining time, and possibly shorter than it.
    /// `false` if the mutex is lost or was unlocked; it is not acquired again. With
    /// [`auto_renew`](super::MutexBuilder::auto_renew), later renewals use this `ttl`.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidTtl`] and [`LockError::InvalidOption`] for a `ttl` that
    /// [`build`](super::MutexBuilder::build) refuses: of less than 3 ms, or of less than 30 ms if the mutex is renewed;
    /// then nothing has changed. [`LockError::Store`] if the command failed, in which case the time may or may not have
    /// been extended.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the time may or may not be extended; [`remaining`](Self::remaining) counts on the shorter time.
    pub async fn extend(&self, ttl: Duration) -> Result<bool, LockError> {
        let ttl = held_ttl("ttl", ttl)?;
        check_auto_renew(self.hold_state.target.options.auto_renew, Some(ttl))?;
        self.hold_state
            .extend(Some(ttl))
            .await
            .map_err(|error| self.hold_state.target.error("extending", error))
    }

    /// Resolves when [`remaining`](Self::remaining) is zero: the time to live has ended, or the mutex was unlocked
    /// or lost.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn expired(&self) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.hold_state).expired()
    }

    /// Resolves when the mutex is no longer known to be this acquisition's although the guard did not unlock it: it
    /// was unlocked by force, an extension or renewal found another holder, or its time to live has ended. A lost
    /// acquisition stays lost, even if the store keeps it a moment longer. Never resolves once the guard was unlocked.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.hold_state).lost()
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MutexGuard").field(&self.held).finish()
    }
}

// The token is left out: with it, any client could end the acquisition.
debug_as!(self: Held { fence: self.fence(), attempts: self.attempts(), waited: self.waited() });

const FREE: u8 = 0;
const TRYING: u8 = 1;
const HELD: u8 = 2;

/// A handle's one acquisition; after it is dropped, the handle may acquire again.
struct Claim {
    state: Arc<AtomicU8>,
}

impl Claim {
    fn try_claim(state: &Arc<AtomicU8>) -> Result<Self, LockError> {
        match state.compare_exchange(FREE, TRYING, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(Self { state: Arc::clone(state) }),
            Err(_) => Err(LockError::AlreadyAcquired),
        }
    }

    fn held(&self) {
        self.state.store(HELD, Ordering::Release);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.state.store(FREE, Ordering::Release);
    }
}
