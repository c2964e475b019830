//! [`SemaphoreBuilder`]: settings of a semaphore, checked when it is built.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::engine::registry::LockRegistry;
use super::engine::target::SemaphoreTarget;
use super::options::{Waiting, check_auto_renew, check_pace, held_ttl, whole_ttl};
use super::{LockError, Locks, Scope, Semaphore};
use crate::store::lock_store::Create;

/// Builds a [`Semaphore`]; [`build`](Self::build) refuses settings that contradict each other.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct SemaphoreBuilder {
    home: Arc<LockRegistry>,
    scope: Scope,
    permits: u32,
    lease: Duration,
    idle_ttl: Duration,
    auto_renew: bool,
    waiting: Waiting,
}

impl SemaphoreBuilder {
    pub(super) fn new(home: Arc<LockRegistry>, scope: Scope, permits: u32) -> Self {
        Self {
            home,
            scope,
            permits,
            // As for a mutex: a forgotten permit becomes free by itself.
            lease: Duration::from_secs(60),
            // Longer than any pause of a service that is in use; an abandoned semaphore is gone the next day.
            idle_ttl: Duration::from_secs(86_400),
            auto_renew: false,
            waiting: Waiting::Notify,
        }
    }

    /// How long a permit is held if it is neither released nor refreshed. In whole milliseconds, rounded up; 3 ms
    /// to ten years: 1 % and 2 ms are kept back, as for a mutex. Defaults to 60 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long the semaphore, with the permits added to it, outlives its last use; never less than its longest
    /// lease. Defaults to a day.
    pub fn idle_ttl(mut self, idle_ttl: Duration) -> Self {
        self.idle_ttl = idle_ttl;
        self
    }

    /// Whether a permit is refreshed in the background, at each third of its lease, until it is released or
    /// dropped. Defaults to false.
    pub fn auto_renew(mut self, auto_renew: bool) -> Self {
        self.auto_renew = auto_renew;
        self
    }

    /// How callers wait for permits: [`Waiting::Notify`] or [`Waiting::Poll`]. Defaults to `Notify`.
    pub fn waiting(mut self, waiting: Waiting) -> Self {
        self.waiting = waiting;
        self
    }

    /// Makes the handle. Does no I/O and needs no runtime.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidKey`], [`LockError::InvalidTtl`], and [`LockError::InvalidOption`], also for zero
    /// permits and for [`Waiting::Keyspace`]: no other program knows the keys.
    pub fn build(self) -> Result<Semaphore, LockError> {
        let Self { home, scope, permits, lease, idle_ttl, auto_renew, waiting } = self;
        let name = scope.semaphore(&home.namespace)?;
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
        let warned = AtomicBool::new(false);
        let target = SemaphoreTarget { home, name, create, lease, warned };
        Ok(Semaphore::from_target(target, auto_renew, waiting))
    }
}

impl Locks {
    /// Starts a semaphore named `name`, with this many permits.
    pub fn semaphore(&self, name: impl Into<Scope>, permits: u32) -> SemaphoreBuilder {
        SemaphoreBuilder::new(Arc::clone(&self.home), name.into(), permits)
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
