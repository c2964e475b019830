//! [`Semaphore`], the handle on a named number of permits, with its settings and its permits.
//!
//! [`SemaphoreBuilder`] checks the settings. [`Permit`] is one acquired permit, which it can release; [`PermitView`] is a
//! view of it.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::acquire::acquire;
use super::hold::{Hold, HoldState};
use super::options::{check_auto_renew, check_pace, held_ttl, whole_ttl};
use super::{
    LimitedLoad, LockError, LockRegistry, LockTarget as _, Locks, Scope, SemaphoreTarget, WaitTerms, Waiting,
};
use crate::policy::setters;
use crate::store::{Create, PermitFreed, SemaphoreChange, SemaphoreState, StoreError, StoreErrorKind, Token};

/// A number of permits for all processes together, granted in the order in which callers came.
///
/// One handle acquires any number of permits, from any number of tasks; a clone is the same handle. The first
/// acquisition creates the semaphore, with the number of permits of its handle. Handles with other numbers report
/// the difference, once per handle in the log and by [`ensure_created`](Self::ensure_created).
///
/// A permit that is not released becomes free when its lease ends; the next acquisition, or a waiter, recovers it.
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
    /// The caller waits until it is granted a permit.
    Forever,
    /// The caller does not wait: it takes a permit only if one is free and there are no waiters.
    Now,
    /// The caller waits for this long at most.
    For(Duration),
}

/// A present holder of a permit.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The permit's token.
    pub token: String,
    /// The remaining time of the permit's lease, by the server's clock.
    pub remaining: Duration,
}

impl Semaphore {
    /// Acquires a permit, after the callers that came earlier; `None` if no permit was free in time. Bind the permit to a
    /// name: dropping it releases it.
    ///
    /// # Errors
    ///
    /// [`LockError::Closed`] if the semaphore was deleted meanwhile; [`LockError::GrantedTooLate`];
    /// [`LockError::Store`].
    ///
    /// # Cancel safety
    ///
    /// Safe, but the caller loses its position in the queue. If dropped, the position, or a permit that may have been
    /// acquired, is released in the background.
    pub async fn acquire(&self, wait: Wait) -> Result<Option<Permit>, LockError> {
        let (retries, timeout) = match wait {
            Wait::Forever => (None, None),
            Wait::Now => (Some(0), None),
            Wait::For(duration) => (None, Some(duration)),
        };
        let fallback = (Duration::ZERO, 0.0);
        let terms =
            WaitTerms { waiting: self.waiting, fallback, retries, timeout, min_remaining: Duration::ZERO };
        match acquire(&self.target, &terms, None).await {
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
    /// The errors of [`acquire`](Self::acquire), before `work` is called; errors of `work` are in its value. If the
    /// release fails at the end, it is retried in the background.
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

    /// Takes back the permits with ended leases, hands them to waiters, and returns how many were taken back. Each
    /// acquisition does the same, and waiters trigger it too.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed, in which case it may or may not have been executed;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn release_stale(&self) -> Result<u32, LockError> {
        Ok(self.change(SemaphoreChange::Sweep).await?.map_or(0, |state| state.recovered))
    }

    /// Adds this many permits, creating the semaphore if needed, and returns the new total. They stay until the
    /// semaphore is deleted or its idle time has passed.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed, in which case it may or may not have been executed;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn add_permits(&self, permits: u32) -> Result<u32, LockError> {
        let create = self.target.create;
        let state = self.change(SemaphoreChange::Add { permits, semaphore: create }).await?;
        Ok(state.map_or(create.capacity, |state| state.capacity))
    }

    /// Creates the semaphore if it does not exist, and returns whether this call has created it.
    ///
    /// # Errors
    ///
    /// [`LockError::CapacityMismatch`] if the semaphore was created with another number of permits; [`LockError::Store`]
    /// and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn ensure_created(&self) -> Result<bool, LockError> {
        let expected = self.target.create.capacity;
        match self.change(SemaphoreChange::Ensure(self.target.create)).await? {
            Some(state) if state.created_with != expected => {
                Err(LockError::CapacityMismatch { expected, actual: state.created_with })
            }
            state => Ok(state.is_some_and(|state| state.created)),
        }
    }

    /// Removes the semaphore without a trace, and returns whether it existed. Its waiters fail with
    /// [`LockError::Closed`].
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed, in which case it may or may not have been executed;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn delete(&self) -> Result<bool, LockError> {
        Ok(self.change(SemaphoreChange::Delete).await?.is_some())
    }

    /// Releases the permit with this token, in whichever process it is held; `None` if it is not held. For example, a
    /// consumer releases the permit under which a producer began the work.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed, in which case it may or may not have been executed;
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not have happened.
    pub async fn signal(&self, token: &str) -> Result<Option<Released>, LockError> {
        let Some(token) = Token::parse(token.as_bytes()) else { return Ok(None) };
        let freed =
            self.target.registry.ask(&self.target.name, |within| self.target.free(&token, within)).await;
        let released = Released::from(freed.map_err(self.failed("releasing a permit of"))?);
        Ok(Some(released).filter(|released| released.was_held))
    }

    /// Like [`acquire`](Self::acquire), but fails at once if the store is known to be down.
    pub(crate) async fn acquire_unless_down(&self, wait: Wait) -> Result<Option<Permit>, LockError> {
        if self.target.registry.store.is_down(&self.target.name.key) {
            return Err(self.failed("acquiring")(StoreError::new(StoreErrorKind::Unavailable)));
        }
        self.acquire(wait).await
    }

    async fn look(&self) -> Result<Option<SemaphoreState>, LockError> {
        let SemaphoreTarget { registry, name, .. } = &*self.target;
        let state =
            registry.ask(name, async |within| registry.locks()?.look_at_semaphore(name, within).await);
        state.await.map_err(self.failed("looking at"))
    }

    async fn change(&self, change: SemaphoreChange) -> Result<Option<SemaphoreState>, LockError> {
        let SemaphoreTarget { registry, name, .. } = &*self.target;
        let state =
            registry.ask(name, async |within| registry.locks()?.change_semaphore(name, change, within).await);
        state.await.map_err(self.failed("changing"))
    }

    fn failed(&self, doing: &str) -> impl Fn(StoreError) -> LockError {
        move |error| self.target.error(doing, error)
    }
}

debug_as!(self: Semaphore {
    permits: self.target.create.capacity,
    lease: self.target.lease,
    idle_ttl: self.target.create.idle_ttl,
    auto_renew: self.auto_renew,
    waiting: self.waiting
});

// The token is left out: with it, any client could release the permit.
debug_as!(self: Holder { remaining: self.remaining });

/// Builds a [`Semaphore`]; [`build`](Self::build) refuses settings that contradict each other.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct SemaphoreBuilder {
    registry: Arc<LockRegistry>,
    scope: Scope,
    permits: u32,
    lease: Duration,
    idle_ttl: Duration,
    auto_renew: bool,
    waiting: Waiting,
    load: Option<LimitedLoad>,
}

impl SemaphoreBuilder {
    /// Makes the handle for one permit of an adaptive load limit, which this load takes.
    pub(crate) fn for_load(mut self, load: LimitedLoad) -> Self {
        self.load = Some(load);
        self
    }
}

setters! { SemaphoreBuilder:
    /// How long a permit is held if it is neither released nor refreshed. In whole milliseconds, rounded up; 3 ms
    /// to ten years: 1 % and 2 ms are reserved for clock drift, as for a mutex. Defaults to 60 s.
    lease(lease: Duration => lease);

    /// How long the semaphore, with the permits added to it, outlives its last use; never less than its longest
    /// lease. Defaults to a day.
    idle_ttl(idle_ttl: Duration => idle_ttl);

    /// Whether a permit is refreshed in the background, at each third of its lease, until it is released or
    /// dropped. Defaults to false.
    auto_renew(auto_renew: bool => auto_renew);

    /// How callers wait for permits: [`Waiting::Notify`] or [`Waiting::Poll`]. Defaults to `Notify`.
    waiting(waiting: Waiting => waiting);
}

impl SemaphoreBuilder {
    /// Makes the handle. Does no I/O and needs no runtime.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`], [`LockError::InvalidTtl`], and [`LockError::InvalidOption`], also for zero
    /// permits and for [`Waiting::Keyspace`]: no other program knows the keys.
    pub fn build(self) -> Result<Semaphore, LockError> {
        let Self { registry, scope, permits, lease, idle_ttl, auto_renew, waiting, load } = self;
        let name = scope.semaphore(&registry.namespace)?;
        if permits == 0 {
            return Err(LockError::option("permits", "it is 0, so no caller would ever get one"));
        }
        if waiting == Waiting::Keyspace {
            return Err(LockError::option("waiting", "no other programs release permits: choose Notify"));
        }
        check_pace("waiting", waiting)?;
        let lease = held_ttl("lease", lease)?;
        check_auto_renew(auto_renew, Some(lease))?;
        let create = Create { capacity: permits, idle_ttl: whole_ttl(idle_ttl)?.max(lease) };
        // A load limit changes, and `permits` is only its start: another number is no reason to warn.
        let warned = AtomicBool::new(load.is_some());
        let target = Arc::new(SemaphoreTarget { registry, name, create, lease, warned, load });
        Ok(Semaphore { target, auto_renew, waiting })
    }
}

impl Locks {
    /// Starts a semaphore named `name`, with this many permits.
    pub fn semaphore(&self, name: impl Into<Scope>, permits: u32) -> SemaphoreBuilder {
        SemaphoreBuilder {
            registry: Arc::clone(&self.registry),
            scope: name.into(),
            permits,
            // The same time as for a mutex: a permit that is never released becomes free by itself.
            lease: Duration::from_secs(60),
            // Longer than any pause of a service that is in use; an abandoned semaphore expires after a day.
            idle_ttl: Duration::from_secs(86_400),
            auto_renew: false,
            waiting: Waiting::Notify,
            load: None,
        }
    }
}

impl Semaphore {
    /// A semaphore with the defaults that [`SemaphoreBuilder`] names.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`] for an empty name, [`LockError::InvalidOption`] for no permits.
    pub fn new(locks: &Locks, name: impl Into<Scope>, permits: u32) -> Result<Self, LockError> {
        locks.semaphore(name, permits).build()
    }

    /// Starts a semaphore with other settings than the defaults; the same as [`Locks::semaphore`].
    pub fn builder(locks: &Locks, name: impl Into<Scope>, permits: u32) -> SemaphoreBuilder {
        locks.semaphore(name, permits)
    }
}

/// One of a semaphore's permits. Dropping the permit releases it in the background.
///
/// It dereferences to [`PermitView`], which describes the acquisition. Dropping works as with
/// [`MutexGuard`](super::MutexGuard#dropping).
#[must_use = "the permit is released as soon as it is dropped"]
pub struct Permit {
    view: PermitView,
    hold: Hold<SemaphoreTarget>,
    /// The number of free permits that the last release returned.
    available: u32,
}

/// One acquisition of a permit, as seen by all code that works under it. Cannot release the permit: only the
/// [`Permit`] can.
#[derive(Clone)]
pub struct PermitView {
    hold_state: Arc<HoldState<SemaphoreTarget>>,
}

/// The result of releasing a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// Whether the permit was still held: its lease had not ended, and it was not released before.
    pub was_held: bool,
    /// How many permits were free after the release and after its grants to waiters.
    pub available: u32,
}

impl From<PermitFreed> for Released {
    fn from(PermitFreed { was_held, available }: PermitFreed) -> Self {
        Self { was_held, available }
    }
}

impl Permit {
    fn new(hold: Hold<SemaphoreTarget>) -> Self {
        Self { view: PermitView { hold_state: Arc::clone(&hold.hold_state) }, hold, available: 0 }
    }

    /// Releases the permit, to the first waiter if there is one. A second call reports that it was not held, without
    /// asking the store, and repeats the first `available`.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed: then the permit may or may not be released, and this can be called
    /// again; the renewal has stopped.
    ///
    /// # Cancel safety
    ///
    /// Safe: if dropped, the permit may or may not be released, and this can be called again.
    pub async fn release(&mut self) -> Result<Released, LockError> {
        let freed = self.hold.free().await;
        let freed =
            freed.map_err(|error| self.view.hold_state.target.error("releasing a permit of", error))?;
        let released = freed.map(Released::from);
        self.available = released.map_or(self.available, |released| released.available);
        Ok(released.unwrap_or(Released { was_held: false, available: self.available }))
    }
}

impl Deref for Permit {
    type Target = PermitView;

    fn deref(&self) -> &PermitView {
        &self.view
    }
}

impl PermitView {
    /// The permit's token: random, different for each acquisition. With it,
    /// [`Semaphore::signal`](super::Semaphore::signal) releases the permit from anywhere.
    pub fn token(&self) -> &str {
        self.hold_state.token.as_str()
    }

    /// How many attempts the caller made: 1 if a permit was free, or was handed over in the queue.
    pub fn attempts(&self) -> u32 {
        self.hold_state.grant.attempts
    }

    /// How long the caller waited for the permit.
    pub fn waited(&self) -> Duration {
        self.hold_state.grant.waited
    }

    /// The remaining time of the permit's lease, by this process's monotonic clock: measured from the moment the granting
    /// command was sent, less 1 % and 2 ms. Zero once the lease has ended or the permit was released or lost.
    pub fn remaining(&self) -> Duration {
        self.hold_state.remaining().unwrap_or(Duration::MAX)
    }

    /// Asks the store whether the permit is still held. `false` without asking, after its release.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn is_held(&self) -> Result<bool, LockError> {
        self.hold_state.is_owned().await
    }

    /// Restarts the permit's lease; `false` if the permit is lost or was released. It is not acquired again.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the command failed, in which case the lease may or may not have been restarted.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lease may or may not be restarted.
    pub async fn refresh(&self) -> Result<bool, LockError> {
        let target = &self.hold_state.target;
        let refreshed = self.hold_state.extend(target.ttl()).await;
        refreshed.map_err(|error| target.error("refreshing a permit of", error))
    }

    /// Resolves when [`remaining`](Self::remaining) is zero: the permit's lease has ended, or the permit was released or lost.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn expired(&self) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.hold_state).expired()
    }

    /// Resolves when the permit is no longer known to be held although it was not released here: a refresh or
    /// renewal was refused, or its lease has ended. A lost permit stays lost. Never resolves once it was
    /// released.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        Arc::clone(&self.hold_state).lost()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.view).finish()
    }
}

// The token is left out: with it, any client could release the permit.
debug_as!(self: PermitView { attempts: self.attempts(), waited: self.waited() });
