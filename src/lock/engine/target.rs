//! [`LockTarget`]: what mutexes and permits have in common for the lock engine.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::registry::LockRegistry;
use super::wait_terms::WaitTerms;
use crate::lock::{Fairness, LockError, MutexOptions};
use crate::observe::log;
use crate::store::lock_store::{Create, Leave, MutexTaken, Offer, PermitFreed, Take, TakePermit, Taken};
use crate::store::names::LockName;
use crate::store::{StoreError, Token};

/// A lock that a token can hold.
pub(crate) trait LockTarget: fmt::Debug + Send + Sync + 'static {
    /// The answer to a release.
    type Freed: Send;

    /// Whether there is at most one holder.
    const IS_EXCLUSIVE: bool;

    fn home(&self) -> &Arc<LockRegistry>;

    fn name(&self) -> &LockName;

    /// The time to live of a hold; `None` for ever.
    fn ttl(&self) -> Option<Duration>;

    /// `instead` is the token that gives the lock up in the same command; only mutexes support that.
    fn take(
        &self,
        token: &Token,
        instead: Option<&Token>,
        queue: bool,
        within: Duration,
    ) -> impl LockReply<MutexTaken>;

    fn extend(&self, token: &Token, ttl: Option<Duration>, within: Duration) -> impl LockReply<bool>;

    fn free(&self, token: &Token, within: Duration) -> impl LockReply<Self::Freed>;

    /// Gives up a place in the queue, and a grant whose message did not arrive.
    fn leave(&self, token: &Token, within: Duration) -> impl LockReply<()>;

    /// Whether the token holds it, as the store sees it.
    fn is_holder(&self, token: &Token, within: Duration) -> impl LockReply<bool>;

    /// Converts a store's failure into the user's error.
    fn error(&self, doing: &str, error: StoreError) -> LockError {
        LockError::store(doing, self.name(), error)
    }
}

/// A command's eventual result.
pub(crate) trait LockReply<T>: Future<Output = Result<T, StoreError>> + Send {}

impl<T, F: Future<Output = Result<T, StoreError>> + Send> LockReply<T> for F {}

/// A mutex, as all clones of a handle see it.
#[derive(Debug)]
pub(crate) struct MutexTarget {
    pub(crate) home: Arc<LockRegistry>,
    pub(crate) name: LockName,
    pub(crate) options: MutexOptions,
}

impl MutexTarget {
    /// The terms of waiting that the options alone define.
    pub(crate) fn terms(&self) -> WaitTerms {
        let MutexOptions { waiting, acquire_timeout, retries, retry_interval, jitter, min_remaining, .. } =
            self.options;
        let fallback = (retry_interval, jitter);
        WaitTerms { waiting, fallback, retries, timeout: acquire_timeout, min_remaining }
    }
}

impl LockTarget for MutexTarget {
    type Freed = bool;

    const IS_EXCLUSIVE: bool = true;

    fn home(&self) -> &Arc<LockRegistry> {
        &self.home
    }

    fn name(&self) -> &LockName {
        &self.name
    }

    fn ttl(&self) -> Option<Duration> {
        self.options.ttl
    }

    async fn take(
        &self,
        token: &Token,
        instead: Option<&Token>,
        queue: bool,
        within: Duration,
    ) -> Result<MutexTaken, StoreError> {
        let barges = matches!(self.options.fairness, Fairness::Eventual(_));
        let ask = Take { token, ttl: self.options.ttl, queue, instead, barges };
        self.home.locks()?.take_mutex(&self.name, ask, within).await
    }

    async fn extend(
        &self,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Result<bool, StoreError> {
        self.home.locks()?.extend_mutex(&self.name, token, ttl, within).await
    }

    async fn free(&self, token: &Token, within: Duration) -> Result<bool, StoreError> {
        let (locks, ttl) = (self.home.last_locks(), self.options.ttl);
        match self.options.fairness {
            Fairness::Fifo => locks.free_mutex(&self.name, token, ttl, within).await,
            Fairness::Eventual(bound) => {
                locks.offer_mutex(&self.name, token, Offer { ttl, bound }, within).await
            }
        }
    }

    async fn leave(&self, token: &Token, within: Duration) -> Result<(), StoreError> {
        let bound = match self.options.fairness {
            Fairness::Fifo => None,
            Fairness::Eventual(bound) => Some(bound),
        };
        let leave = Leave { token, ttl: self.options.ttl, bound };
        self.home.last_locks().leave(&self.name, leave, within).await
    }

    async fn is_holder(&self, token: &Token, within: Duration) -> Result<bool, StoreError> {
        let holder = self.home.locks()?.look_at_mutex(&self.name, within).await?;
        Ok(holder.is_some_and(|holder| holder.token == token.as_str().as_bytes()))
    }
}

/// A semaphore, as all clones of a handle see it.
#[derive(Debug)]
pub(crate) struct SemaphoreTarget {
    pub(crate) home: Arc<LockRegistry>,
    pub(crate) name: LockName,
    pub(crate) create: Create,
    pub(crate) lease: Duration,
    /// Whether the warning was logged that the semaphore was created with another number of permits.
    pub(crate) warned: AtomicBool,
}

impl LockTarget for SemaphoreTarget {
    type Freed = PermitFreed;

    const IS_EXCLUSIVE: bool = false;

    fn home(&self) -> &Arc<LockRegistry> {
        &self.home
    }

    fn name(&self) -> &LockName {
        &self.name
    }

    fn ttl(&self) -> Option<Duration> {
        Some(self.lease)
    }

    async fn take(
        &self,
        token: &Token,
        _instead: Option<&Token>,
        queue: bool,
        within: Duration,
    ) -> Result<MutexTaken, StoreError> {
        let ask = TakePermit { token, lease: self.lease, semaphore: self.create, queue };
        let taken = self.home.locks()?.take_permit(&self.name, ask, within).await?;
        let (expected, actual) = (self.create.capacity, taken.created_with);
        if expected != actual && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: log::LOCK, expected, actual, "the semaphore was created with another number of permits");
        }
        let taken = match taken.granted {
            true => Taken::Granted { fence: 0 },
            false => Taken::Busy { remaining: taken.next_expiry },
        };
        Ok(MutexTaken { taken, was_held: false })
    }

    async fn extend(
        &self,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Result<bool, StoreError> {
        self.home.locks()?.refresh_permit(&self.name, token, ttl.unwrap_or(self.lease), within).await
    }

    async fn free(&self, token: &Token, within: Duration) -> Result<PermitFreed, StoreError> {
        self.home.last_locks().free_permit(&self.name, token, self.lease, within).await
    }

    async fn leave(&self, token: &Token, within: Duration) -> Result<(), StoreError> {
        let leave = Leave { token, ttl: Some(self.lease), bound: None };
        self.home.last_locks().leave(&self.name, leave, within).await
    }

    async fn is_holder(&self, token: &Token, within: Duration) -> Result<bool, StoreError> {
        let state = self.home.locks()?.look_at_semaphore(&self.name, within).await?;
        Ok(state.is_some_and(|state| state.holders.iter().any(|(holder, _)| holder == token)))
    }
}
