//! [`Semaphore`], the handle on a named number of permits.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::engine::target::{LockTarget as _, SemaphoreTarget};
use super::engine::wait::acquire;
use super::engine::wait_terms::WaitTerms;
use super::{LockError, Permit, PermitView, Released, Waiting};
use crate::store::lock_store::{Change, SemaphoreState};
use crate::store::{StoreError, StoreErrorKind, Token};

/// A number of permits for all processes together, handed out in the order in which callers asked.
///
/// One handle acquires any number of permits, from any number of tasks; a clone is the same handle. The first
/// acquisition creates the semaphore, with the number of permits of its handle. Handles with other numbers report
/// the difference, once per handle in the log and by [`ensure_created`](Self::ensure_created).
///
/// A permit that is not released becomes free when its lease ends; the next caller that asks, or a waiter, notices.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_guard::lock::{Locks, Semaphore, Wait};
///
/// let origin = Semaphore::new(&Locks::in_memory(), "origin", 2)?;
/// let one = origin.acquire(Wait::Forever).await?.expect("waits until there is one");
/// let mut other = origin.acquire(Wait::For(Duration::from_secs(1))).await?.expect("there are two");
/// assert!(origin.acquire(Wait::Now).await?.is_none());
///
/// let released = other.release().await?;
/// assert!(released.was_held);
/// assert_eq!(released.available, 1);
/// # drop(one);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Semaphore {
    target: Arc<SemaphoreTarget>,
    auto_renew: bool,
    waiting: Waiting,
}

/// How long a caller waits for a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Until a permit is free.
    Forever,
    /// Not at all: takes a permit only if one is free and there are no waiters.
    Now,
    /// For this long.
    For(Duration),
}

/// A holder of a permit at present.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The permit's token.
    pub token: String,
    /// The remaining time of its lease, by the server's clock.
    pub remaining: Duration,
}

impl Semaphore {
    pub(super) fn from_target(target: SemaphoreTarget, auto_renew: bool, waiting: Waiting) -> Self {
        Self { target: Arc::new(target), auto_renew, waiting }
    }

    /// Acquires a permit, after the callers that asked before; `None` if there was none in time. Bind it to a name:
    /// it is given back where it is dropped.
    ///
    /// # Errors
    ///
    /// [`LockError::Closed`] if the semaphore was deleted meanwhile; [`LockError::GrantedTooLate`];
    /// [`LockError::Store`].
    ///
    /// # Cancel safety
    ///
    /// Safe, but the place in the queue is lost: if dropped, the place, or a permit that may have been acquired, is
    /// given up in the background.
    pub async fn acquire(&self, wait: Wait) -> Result<Option<Permit>, LockError> {
        let (retries, timeout) = match wait {
            Wait::Forever => (None, None),
            Wait::Now => (Some(0), None),
            Wait::For(duration) => (None, Some(duration)),
        };
        let fallback = (Duration::ZERO, 0.0);
        let terms =
            WaitTerms { waiting: self.waiting, fallback, retries, timeout, min_remaining: Duration::ZERO };
        match acquire(&self.target, &terms).await {
            Ok(hold) if self.auto_renew => Ok(Some(Permit::new(hold.renew()))),
            Ok(hold) => Ok(Some(Permit::new(hold))),
            Err(error) if error.is_busy() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Runs `work` with a permit, in the caller's task, and releases the permit when `work` has ended or panicked,
    /// or when this future is dropped. `None`, without calling `work`, if there was no permit in time.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), before `work` is called; errors of `work` are in its value. If the store
    /// cannot be asked at the end, the release is retried in the background.
    ///
    /// # Cancel safety
    ///
    /// If dropped, `work` ends where it is, and the permit is released in the background.
    pub async fn with_permit<T, F, Fut>(&self, wait: Wait, work: F) -> Result<Option<T>, LockError>
    where
        F: FnOnce(PermitView) -> Fut,
        Fut: Future<Output = T>,
    {
        let Some(mut permit) = self.acquire(wait).await? else { return Ok(None) };
        let value = work(PermitView::clone(&permit)).await;
        let _ = permit.release().await;
        Ok(Some(value))
    }

    /// How many permits are free; all of them, if the semaphore does not exist. Creates nothing.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn available_permits(&self) -> Result<u32, LockError> {
        Ok(self.look().await?.map_or(self.target.create.capacity, |state| state.available))
    }

    /// How many permits there are in all, including those of [`add_permits`](Self::add_permits).
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn capacity(&self) -> Result<u32, LockError> {
        Ok(self.look().await?.map_or(self.target.create.capacity, |state| state.capacity))
    }

    /// The holders of permits, ordered by the end of their leases.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn holders(&self) -> Result<Vec<Holder>, LockError> {
        let holders = self.look().await?.map(|state| state.holders).unwrap_or_default();
        let holder = |(token, remaining): (Token, _)| Holder { token: token.as_str().to_owned(), remaining };
        Ok(holders.into_iter().map(holder).collect())
    }

    /// Whether a permit with this token is held.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn holds(&self, token: &str) -> Result<bool, LockError> {
        let state = self.look().await?;
        Ok(state.is_some_and(|state| state.holders.iter().any(|(holder, _)| holder.as_str() == token)))
    }

    /// How many waiters are in the queue.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn waiting(&self) -> Result<u32, LockError> {
        Ok(self.look().await?.map_or(0, |state| state.waiting))
    }

    /// Whether the semaphore exists: it was created, not deleted, and used within its idle time.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn exists(&self) -> Result<bool, LockError> {
        Ok(self.look().await?.is_some())
    }

    /// Takes back the permits with ended leases, hands them to waiters, and returns how many there were. Each
    /// acquisition does the same, and waiters trigger it too.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have happened;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn release_stale(&self) -> Result<u32, LockError> {
        Ok(self.change(Change::Sweep).await?.map_or(0, |state| state.recovered))
    }

    /// Adds this many permits, creating the semaphore if needed, and returns the new total. They stay until the
    /// semaphore is deleted or its idle time has passed.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have happened;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn add_permits(&self, permits: u32) -> Result<u32, LockError> {
        let create = self.target.create;
        let state = self.change(Change::Add { permits, semaphore: create }).await?;
        Ok(state.map_or(create.capacity, |state| state.capacity))
    }

    /// Creates the semaphore if it does not exist, and returns whether this call did.
    ///
    /// # Errors
    ///
    /// [`LockError::CapacityMismatch`] if it was created with another number of permits; [`LockError::Store`] and
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn ensure_created(&self) -> Result<bool, LockError> {
        let expected = self.target.create.capacity;
        match self.change(Change::Ensure(self.target.create)).await? {
            Some(state) if state.created_with != expected => {
                Err(LockError::CapacityMismatch { expected, actual: state.created_with })
            }
            state => Ok(state.is_some_and(|state| state.created)),
        }
    }

    /// Removes the semaphore without a trace, and returns whether there was one. Its waiters fail with
    /// [`LockError::Closed`].
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have happened;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn delete(&self) -> Result<bool, LockError> {
        Ok(self.change(Change::Delete).await?.is_some())
    }

    /// Releases the permit with this token, in whichever process it is held; `None` if it is not held. For a
    /// consumer that ends the work that a producer began.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have happened;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn signal(&self, token: &str) -> Result<Option<Released>, LockError> {
        let Some(token) = Token::parse(token.as_bytes()) else { return Ok(None) };
        let freed = self.target.home.ask(&self.target.name, |within| self.target.free(&token, within)).await;
        let released = Released::from(freed.map_err(self.failed("releasing a permit of"))?);
        Ok(Some(released).filter(|released| released.was_held))
    }

    /// As [`acquire`](Self::acquire), but fails at once if the store is known to be down.
    pub(crate) async fn acquire_unless_down(&self, wait: Wait) -> Result<Option<Permit>, LockError> {
        if self.target.home.store.is_down(&self.target.name.key) {
            return Err(self.failed("acquiring")(StoreError::new(StoreErrorKind::Unavailable)));
        }
        self.acquire(wait).await
    }

    async fn look(&self) -> Result<Option<SemaphoreState>, LockError> {
        let SemaphoreTarget { home, name, .. } = &*self.target;
        let state = home.ask(name, async |within| home.locks()?.look_at_semaphore(name, within).await);
        state.await.map_err(self.failed("looking at"))
    }

    async fn change(&self, change: Change) -> Result<Option<SemaphoreState>, LockError> {
        let SemaphoreTarget { home, name, .. } = &*self.target;
        let state = home.ask(name, async |within| home.locks()?.change_semaphore(name, change, within).await);
        state.await.map_err(self.failed("changing"))
    }

    fn failed(&self, doing: &str) -> impl Fn(StoreError) -> LockError {
        move |error| self.target.error(doing, error)
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SemaphoreTarget { create, lease, .. } = &*self.target;
        f.debug_struct("Semaphore")
            .field("permits", &create.capacity)
            .field("lease", lease)
            .field("idle_ttl", &create.idle_ttl)
            .field("auto_renew", &self.auto_renew)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Holder {
    /// Omits the token, with which any client could release the permit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder").field("remaining", &self.remaining).finish_non_exhaustive()
    }
}
