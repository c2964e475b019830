//! [`Mutex`], the handle on one named lock.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use super::engine::target::{LockTarget as _, MutexTarget};
use super::engine::wait::acquire;
use super::engine::wait_terms::WaitTerms;
use super::held::{Claim, HELD};
use super::{Held, LockError, MutexGuard, MutexOptions};
use crate::store::StoreError;
use crate::store::lock_store::{KeyspaceAnswer, MutexHolder};

/// A lock with at most one holder among all processes.
///
/// A handle holds it at most once: a second acquisition while its guard lives is [`LockError::AlreadyAcquired`],
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
    /// How often the caller asked the store for the lock.
    pub attempts: u32,
    /// Whether the lock was held to the end. If not, another process may have worked at the same time.
    pub still_held: bool,
}

impl Mutex {
    pub(super) fn from_target(target: MutexTarget) -> Self {
        Self { target: Arc::new(target), state: Arc::default() }
    }

    /// Acquires it if it is free and no live caller waits; with [`Fairness::Eventual`](crate::lock::Fairness::Eventual) it may overtake
    /// waiters. `None` if not, so check the answer before you go on. Waits for the store only, never for another holder.
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyAcquired`] if this handle holds it or is acquiring it, without asking the store;
    /// [`LockError::GrantedTooLate`];
    /// [`LockError::Store`] and [`LockError::Closed`].
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

    /// Acquires it, after the callers that asked before; with [`Fairness::Eventual`](crate::lock::Fairness::Eventual) it may overtake them
    /// for as long as that allows.
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyAcquired`], without asking the store; [`LockError::AcquireTimeout`] and
    /// [`LockError::TooManyAttempts`] if it was busy all the time; [`LockError::GrantedTooLate`];
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe, but the place in the queue is lost: if dropped, the place, or a lock that may have been acquired, is
    /// given up in the background.
    pub async fn lock(&self) -> Result<MutexGuard, LockError> {
        self.acquire(&self.target.terms()).await
    }

    /// Runs `work` under the lock, in the caller's task, and unlocks when `work` has ended or panicked, or when
    /// this future is dropped.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), before `work` is called; errors of `work` are in its value. If the store cannot be
    /// asked at the end, the value is kept, [`still_held`](Synchronized::still_held) is false, and the release is
    /// retried in the background.
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

    /// Whether any process holds it, including programs in other languages.
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

    /// Whether this handle holds it, without asking the store: from the acquisition until it is unlocked or
    /// dropped, even after its time to live has ended, and while [`bump`](MutexGuard::bump) waits.
    pub fn is_held(&self) -> bool {
        self.state.load(Ordering::Acquire) == HELD
    }

    /// The remaining time to live of the present holder, in any process, as the store says; `None` if the lock is
    /// free, `Duration::MAX` if it does not expire.
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

    /// Takes it from its present holder, tells that holder ([`Held::lost`]), and hands it to the next in the queue.
    /// Answers whether it was held. For operators: the holder may be in the middle of its work.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have happened;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn force_unlock(&self) -> Result<bool, LockError> {
        let MutexTarget { home, name, .. } = &*self.target;
        let broken = home.ask(name, async |within| home.locks()?.break_mutex(name, within).await);
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
        let MutexTarget { home, name, .. } = &*self.target;
        let announced = home.ask(name, async |within| home.locks()?.announce(name, within).await);
        match announced.await.map_err(self.failed("asking for the events of"))? {
            KeyspaceAnswer::Yes => Ok(()),
            KeyspaceAnswer::No { why } => Err(LockError::NotificationsUnavailable { why }),
        }
    }

    /// The lock's key in the store.
    pub fn key(&self) -> &str {
        &self.target.name.key
    }

    /// Its settings.
    pub fn options(&self) -> &MutexOptions {
        &self.target.options
    }

    #[cfg(test)]
    pub(super) fn target(&self) -> &MutexTarget {
        &self.target
    }

    async fn acquire(&self, terms: &WaitTerms) -> Result<MutexGuard, LockError> {
        let claim = Claim::stake(&self.state)?;
        let hold = acquire(&self.target, terms).await?;
        claim.held();
        Ok(MutexGuard::new(hold, claim))
    }

    async fn look(&self) -> Result<Option<MutexHolder>, LockError> {
        let MutexTarget { home, name, .. } = &*self.target;
        let holder = home.ask(name, async |within| home.locks()?.look_at_mutex(name, within).await);
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

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex")
            .field("held", &self.is_held())
            .field("options", &self.target.options)
            .finish_non_exhaustive()
    }
}
