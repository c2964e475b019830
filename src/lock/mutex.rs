//! [`Mutex`], the handle on one named lock.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use super::engine::target::{MutexTarget, Target as _};
use super::engine::terms::Terms;
use super::engine::wait::acquire;
use super::held::{Claim, HELD};
use super::{Held, LockError, MutexGuard, MutexOptions};
use crate::store::StoreError;
use crate::store::lock_store::{Announced, MutexHolder};

/// A lock that one holder among all processes has at a time.
///
/// A handle holds it at most once: a second acquisition while its guard lives is
/// [`LockError::AlreadyAcquired`], not a deadlock. A clone is another handle on the same lock, which holds
/// nothing and waits like a stranger.
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

/// What came of [`Mutex::synchronize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "`value` is what the work returned, an error too, and `still_held` whether it was alone"]
#[non_exhaustive]
pub struct Synchronized<T> {
    /// What the closure returned.
    pub value: T,
    /// How often the store was asked for the lock.
    pub attempts: u32,
    /// Whether it was known to be held to the end. If not, somebody else may have been at it too.
    pub still_held: bool,
}

impl Mutex {
    pub(super) fn from_target(target: MutexTarget) -> Self {
        Self { target: Arc::new(target), state: Arc::default() }
    }

    /// Acquires it if it is free and nobody is before this caller; `None` if not, so check the answer before you go on.
    /// Never waits for anybody but the store.
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyAcquired`], without asking the store; [`LockError::GrantedTooLate`];
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe: what may have been acquired is released in the background.
    pub async fn try_lock(&self) -> Result<Option<MutexGuard>, LockError> {
        let terms = Terms { retries: Some(0), timeout: None, ..self.target.terms() };
        match self.acquire(&terms).await {
            Ok(guard) => Ok(Some(guard)),
            Err(error) if error.is_busy() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires it, waiting for those who were there before.
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyAcquired`], without asking the store; [`LockError::AcquireTimeout`] and
    /// [`LockError::TooManyAttempts`] if it was busy all the time; [`LockError::GrantedTooLate`];
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe, but the place in the queue is lost: dropped, it is given up in the background, and so is what may have
    /// been acquired.
    pub async fn lock(&self) -> Result<MutexGuard, LockError> {
        self.acquire(&self.target.terms()).await
    }

    /// Runs `work` under the lock, in the caller's task, and unlocks: when it has ended, or panicked, or when this
    /// future is dropped.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), before `work` was called; errors of `work` are in its value. If the
    /// store can not be asked at the end, the value is kept, [`still_held`](Synchronized::still_held) is false,
    /// and the release is retried in the background.
    ///
    /// # Cancel safety
    ///
    /// Dropped, `work` ends where it is, and the lock is released in the background.
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

    /// Whether anybody holds it, programs in other languages included.
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

    /// Whether this handle holds it, without asking anybody: from the acquisition until it is unlocked or dropped,
    /// also when its time to live is over, and while [`bump`](MutexGuard::bump) waits.
    pub fn is_held(&self) -> bool {
        self.state.load(Ordering::Acquire) == HELD
    }

    /// What the store says is left of the present holder's time, whoever that is; `None` if it is free,
    /// `Duration::MAX` if it does not expire.
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

    /// Takes it from whoever holds it, tells the holder ([`Held::lost`]), and hands it to the next in the queue.
    /// Whether anybody held it. For operators: the holder may be in the middle of something.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have happened;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may or may not have happened.
    pub async fn force_unlock(&self) -> Result<bool, LockError> {
        let MutexTarget { home, name, .. } = &*self.target;
        let broken = home.ask(name, async |within| home.locks()?.break_mutex(name, within).await);
        broken.await.map_err(self.failed("unlocking"))
    }

    /// Has the server announce what happens to this mutex's key, as [`Waiting::Keyspace`](super::Waiting::Keyspace)
    /// does, and says if it does not, where waiting would fall back to polling.
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
            Announced::Yes => Ok(()),
            Announced::No { why } => Err(LockError::NotificationsUnavailable { why }),
        }
    }

    /// The key that stands for it in the store.
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

    async fn acquire(&self, terms: &Terms) -> Result<MutexGuard, LockError> {
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
