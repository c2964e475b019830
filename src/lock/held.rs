//! A held mutex: the guard that gives it back, and views of it.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use super::LockError;
use super::engine::acquisition::Grip;
use super::engine::hold::Hold;
use super::engine::target::{MutexTarget, Target as _};
use super::engine::wait::acquire_instead;
use super::options::{check_auto_renew, held_ttl};

/// A mutex that this process holds; dropped, it is unlocked in the background.
///
/// It is a [`Held`], which says what is known of the acquisition. `Held::clone(&guard)` is a view that other tasks can
/// have.
///
/// # Dropping
///
/// Never panics and never blocks. In a runtime (the current one, or the one it was acquired in) a task sends
/// the release and sees to it that it arrives; outside of any, the mutex stays locked until its time to live
/// is over. [`unlock`](Self::unlock) tells more, and is done when it returns; dropping is cheaper where the
/// answer is not wanted, because whatever is asked next can travel with the release.
#[must_use = "the mutex is unlocked as soon as its guard is dropped"]
pub struct MutexGuard {
    held: Held,
    hold: Hold<MutexTarget>,
    claim: Option<Claim>,
}

/// One acquisition of a mutex, as everyone sees it who works under it.
///
/// It gives nothing back: that is the [`MutexGuard`]'s. All clones see the same acquisition, also after its end.
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
///     // Somebody else may be at it by now.
///     () = held.lost() => None,
/// };
/// guard.unlock().await?;
/// assert_eq!(result, Some(42));
/// assert_eq!(held.remaining(), Some(Duration::ZERO));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Held {
    grip: Arc<Grip<MutexTarget>>,
}

impl MutexGuard {
    pub(super) fn new(hold: Hold<MutexTarget>, claim: Claim) -> Self {
        let hold = renewed(hold);
        let held = Held { grip: Arc::clone(&hold.grip) };
        Self { held, hold, claim: Some(claim) }
    }

    /// Unlocks; whether the mutex was still held. `false` without asking when that was done before.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked: then it may or may not be unlocked, the guard still
    /// counts as held and this can be called again; nothing renews the mutex any more.
    ///
    /// # Cancel safety
    ///
    /// Safe: dropped, it may or may not be done, and can be called again.
    pub async fn unlock(&mut self) -> Result<bool, LockError> {
        let freed = self.hold.free().await;
        let freed = freed.map_err(|error| self.held.grip.target.error("unlocking", error))?;
        self.claim = None;
        Ok(freed.unwrap_or(false))
    }

    /// Gives way to those who wait: unlocks for the first of them and queues again behind the last, both in one
    /// command; returns when this guard holds the mutex again. Where nobody waits, it is locked anew at once.
    /// Whether it was still held until then; `false` too where an answer was lost on the way.
    ///
    /// In either case this is a new acquisition, with another token, a greater [fence](Held::fence) and the full time
    /// to live; the earlier one has ended, as [`Held`]s that were cloned from it say.
    ///
    /// For a loop that works in steps under one mutex this is `unlock` and `lock` at half the cost. Who waits by
    /// [`Poll`](super::Waiting::Poll) is not known to wait, and not given way to.
    ///
    /// # Errors
    ///
    /// [`LockError::NotHeld`] after unlocking. [`LockError::Store`] if the store could not be asked: then the guard
    /// may or may not hold it, counts as holding it, and this or [`unlock`](Self::unlock) can be called again; nothing
    /// renews the mutex any more. Where it is the waiting that fails, with the errors of
    /// [`Mutex::lock`](super::Mutex::lock), the guard holds nothing, as after unlocking.
    ///
    /// # Cancel safety
    ///
    /// Safe, but the place in the queue is lost. Dropped, the mutex may or may not be unlocked;
    /// [`unlock`](Self::unlock) or dropping the guard makes sure.
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
    ///     // Others had their turn in between.
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

/// Renews it from now on, if the mutex's options say so.
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
    /// What stands in the mutex's key: random, another one for each acquisition. Who knows it can end the
    /// acquisition.
    pub fn token(&self) -> &str {
        self.grip.token.as_str()
    }

    /// The fencing token: greater than those of all earlier holders of this mutex. Handed along with what is
    /// written, it lets the written-to side refuse a holder who comes after the next one.
    ///
    /// # Consistency
    ///
    /// The server's clock in microseconds, or one more than the last, so that nothing has to be stored for ever. It grows
    /// over a clock that is set back, and over a failover or a restart that forgets the latest holders. Only both together,
    /// a server that forgot and whose clock is behind that of the one before, give smaller ones.
    pub fn fence(&self) -> u64 {
        self.grip.fence
    }

    /// How often the store was asked for it: 1 when it was free, or was handed over in its queue.
    pub fn attempts(&self) -> u32 {
        self.grip.attempts
    }

    /// How long it was waited for.
    pub fn waited(&self) -> Duration {
        self.grip.waited
    }

    /// What is left of its time to live, by this process's monotonic clock: counted from the moment the granting
    /// command was sent, less 1 % and 2 ms. Zero when it is over, was given back or is lost; `None` if it does not
    /// expire.
    pub fn remaining(&self) -> Option<Duration> {
        self.grip.remaining()
    }

    /// Asks the store whether this acquisition still holds the mutex. `false` without asking after unlocking.
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

    /// Goes on only if the store says that this acquisition still holds the mutex.
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

    /// Starts the time to live anew, with `ttl` from now: not added to what is left, and shorter if it says so.
    /// `false` if the mutex is lost or was unlocked: it is not acquired again. With
    /// [`auto_renew`](super::MutexBuilder::auto_renew), `ttl` is what it is renewed by from now on.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidTtl`] and [`LockError::InvalidOption`] for a `ttl` that
    /// [`build`](super::MutexBuilder::build) refuses: of less than 3 ms, or of less than 30 ms where it is renewed; then
    /// nothing has changed. [`LockError::Store`] if the store could not be asked, in which case it may or may
    /// not have been extended.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may or may not be extended; [`remaining`](Self::remaining) counts on the shorter time.
    pub async fn extend(&self, ttl: Duration) -> Result<bool, LockError> {
        let ttl = held_ttl("ttl", ttl)?;
        check_auto_renew(self.grip.target.options.auto_renew, Some(ttl))?;
        self.grip.extend(Some(ttl)).await.map_err(|error| self.grip.target.error("extending", error))
    }

    /// Resolves when [`remaining`](Self::remaining) is zero: its time is over, it was unlocked, or it is lost.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn expired(&self) -> impl Future<Output = ()> + Send + use<> {
        let grip = Arc::clone(&self.grip);
        async move { grip.expired().await }
    }

    /// Resolves when the mutex is no longer known to be this acquisition's although nobody unlocked it here: it was
    /// unlocked by force, an extension or renewal found it to be another's, or its time is over. It stays lost,
    /// even if the store has it a moment longer. Never resolves once it was unlocked.
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
    /// Without the token: who knows it can end the acquisition.
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

/// A handle's one acquisition; dropped, it may try again.
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
