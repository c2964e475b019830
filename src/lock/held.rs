//! A held mutex: [`MutexGuard`], which gives it back, and [`Held`], a view of it.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use super::LockError;
use super::engine::acquisition::HoldState;
use super::engine::hold::Hold;
use super::engine::target::{LockTarget as _, MutexTarget};
use super::engine::wait::acquire_instead;
use super::options::{check_auto_renew, held_ttl};

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
    grip: Arc<HoldState<MutexTarget>>,
}

impl MutexGuard {
    pub(super) fn new(hold: Hold<MutexTarget>, claim: Claim) -> Self {
        let hold = renewed(hold);
        let held = Held { grip: Arc::clone(&hold.grip) };
        Self { held, hold, claim: Some(claim) }
    }

    /// Unlocks, and answers whether the mutex was still held. `false` without asking the store if it was unlocked
    /// before.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked: then the mutex may or may not be unlocked, the guard
    /// still counts as held, and this can be called again; the renewal has stopped.
    ///
    /// # Cancel safety
    ///
    /// Safe: if dropped, the mutex may or may not be unlocked, and this can be called again.
    pub async fn unlock(&mut self) -> Result<bool, LockError> {
        let freed = self.hold.free().await;
        let freed = freed.map_err(|error| self.held.grip.target.error("unlocking", error))?;
        self.claim = None;
        Ok(freed.unwrap_or(false))
    }

    /// Gives way to the waiters: unlocks for the first of them and queues again behind the last, both in one
    /// command. Returns when this guard holds the mutex again, at once if there are no waiters. Answers whether the
    /// mutex was still held when it was given up; also `false` if that answer was lost on the way.
    ///
    /// In either case this is a new acquisition, with another token, a greater [fence](Held::fence) and the full
    /// time to live. The earlier acquisition has ended, and the [`Held`]s that were cloned from it say so.
    ///
    /// For a loop that works in steps under one mutex this is `unlock` and `lock` at half the cost. Callers that
    /// wait by [`Poll`](super::Waiting::Poll) are not in the queue, so this does not give way to them.
    ///
    /// # Errors
    ///
    /// [`LockError::NotHeld`] after unlocking. [`LockError::Store`] if the store could not be asked: then the guard
    /// may or may not hold the mutex, counts as holding it, and this or [`unlock`](Self::unlock) can be called
    /// again; the renewal has stopped. If waiting fails, with the errors of [`Mutex::lock`](super::Mutex::lock),
    /// the guard holds nothing, as after unlocking.
    ///
    /// # Cancel safety
    ///
    /// Safe, but the place in the queue is lost. If dropped, the mutex may or may not be unlocked;
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
        if self.hold.is_freed() {
            return Err(LockError::NotHeld);
        }
        self.hold.stop_renewing().await;
        let terms = self.held.grip.target.terms();
        match acquire_instead(&mut self.hold, &terms).await {
            Ok(hold) => {
                let was_held = self.hold.was_held();
                self.hold = renewed(hold);
                self.held = Held { grip: Arc::clone(&self.hold.grip) };
                Ok(was_held)
            }
            Err(error) => {
                if self.hold.is_freed() {
                    self.claim = None;
                }
                Err(error)
            }
        }
    }
}

/// Starts the renewal, if the mutex's options say so.
fn renewed(hold: Hold<MutexTarget>) -> Hold<MutexTarget> {
    if hold.grip.target.options.auto_renew { hold.renew() } else { hold }
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
        self.grip.token.as_str()
    }

    /// The fencing token: greater than those of all earlier holders of this mutex. Send it along with each write
    /// outside the store, so that the receiving side can refuse a write of an earlier holder.
    ///
    /// # Consistency
    ///
    /// The server's clock in microseconds, or one more than the last fence, so that nothing has to be stored for
    /// ever. It grows even if the clock is set back, and even over a failover or a restart that forgets the latest
    /// holders. Only both together can lower it: a server that forgot the holders and with a clock behind that of
    /// its predecessor.
    pub fn fence(&self) -> u64 {
        self.grip.fence
    }

    /// How often the caller asked the store: 1 when the mutex was free, or was handed over in its queue.
    pub fn attempts(&self) -> u32 {
        self.grip.attempts
    }

    /// How long the caller waited.
    pub fn waited(&self) -> Duration {
        self.grip.waited
    }

    /// The remaining time to live, by this process's monotonic clock: counted from the moment the granting command
    /// was sent, less 1 % and 2 ms. Zero after it ended, was unlocked or lost; `None` if it does not expire.
    pub fn remaining(&self) -> Option<Duration> {
        self.grip.remaining()
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
        self.grip.is_owned().await
    }

    /// Like [`is_owned`](Self::is_owned), but a mutex that is not held any more is an error.
    ///
    /// # Errors
    ///
    /// [`LockError::NotHeld`] if it does not; [`LockError::Store`] and [`LockError::Closed`].
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
    /// [`build`](super::MutexBuilder::build) refuses: of less than 3 ms, or of less than 30 ms if it is renewed;
    /// then nothing has changed. [`LockError::Store`] if the store could not be asked, in which case it may or may
    /// not have been extended.
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not be extended; [`remaining`](Self::remaining) counts on the shorter time.
    pub async fn extend(&self, ttl: Duration) -> Result<bool, LockError> {
        let ttl = held_ttl("ttl", ttl)?;
        check_auto_renew(self.grip.target.options.auto_renew, Some(ttl))?;
        self.grip.extend(Some(ttl)).await.map_err(|error| self.grip.target.error("extending", error))
    }

    /// Resolves when [`remaining`](Self::remaining) is zero: the time to live has ended, or the mutex was unlocked
    /// or lost.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn expired(&self) -> impl Future<Output = ()> + Send + use<> {
        let grip = Arc::clone(&self.grip);
        async move { grip.expired().await }
    }

    /// Resolves when the mutex is no longer known to be this acquisition's although the guard did not unlock it: it
    /// was unlocked by force, an extension or renewal found another holder, or its time to live has ended. A lost
    /// acquisition stays lost, even if the store keeps it a moment longer. Never resolves once it was unlocked.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let grip = Arc::clone(&self.grip);
        async move { grip.lost().await }
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MutexGuard").field(&self.held).finish()
    }
}

impl fmt::Debug for Held {
    /// Omits the token, with which any client could end the acquisition.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("fence", &self.grip.fence)
            .field("attempts", &self.grip.attempts)
            .field("waited", &self.grip.waited)
            .finish_non_exhaustive()
    }
}

pub(super) const FREE: u8 = 0;
pub(super) const TRYING: u8 = 1;
pub(super) const HELD: u8 = 2;

/// A handle's one acquisition; after it is dropped, the handle may acquire again.
pub(super) struct Claim {
    state: Arc<AtomicU8>,
}

impl Claim {
    pub(super) fn stake(state: &Arc<AtomicU8>) -> Result<Self, LockError> {
        match state.compare_exchange(FREE, TRYING, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(Self { state: Arc::clone(state) }),
            Err(_) => Err(LockError::AlreadyAcquired),
        }
    }

    pub(super) fn held(&self) {
        self.state.store(HELD, Ordering::Release);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.state.store(FREE, Ordering::Release);
    }
}
