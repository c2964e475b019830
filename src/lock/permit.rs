//! A held permit: what gives it back, and views of it.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::LockError;
use super::engine::acquisition::Grip;
use super::engine::hold::Hold;
use super::engine::target::{SemaphoreTarget, Target as _};
use crate::store::lock_store::PermitFreed;

/// One of a semaphore's permits; dropped, it is released in the background.
///
/// It is a [`PermitView`], which says what is known of it. Dropping is as with
/// [`MutexGuard`](super::MutexGuard#dropping).
#[must_use = "the permit is released as soon as it is dropped"]
pub struct Permit {
    view: PermitView,
    hold: Hold<SemaphoreTarget>,
    /// What the last release said.
    available: u32,
}

/// One acquisition of a permit, as everyone sees it who works under it. It gives nothing back: that is the
/// [`Permit`]'s.
#[derive(Clone)]
pub struct PermitView {
    grip: Arc<Grip<SemaphoreTarget>>,
}

/// What came of releasing a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// Whether it was held until then: its lease had not ended, and it was not released before.
    pub was_held: bool,
    /// How many permits were free afterwards, and were not handed on to those who wait.
    pub available: u32,
}

impl From<PermitFreed> for Released {
    fn from(PermitFreed { was_held, available }: PermitFreed) -> Self {
        Self { was_held, available }
    }
}

impl Permit {
    pub(super) fn new(hold: Hold<SemaphoreTarget>) -> Self {
        Self { view: PermitView { grip: Arc::clone(&hold.grip) }, hold, available: 0 }
    }

    /// Gives it back, to the first of those who wait. A second time it was not held; then the store is not asked, and
    /// `available` is what it was.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked: then it may or may not be released, and this can be called
    /// again; nothing renews the permit any more.
    ///
    /// # Cancel safety
    ///
    /// Safe: dropped, it may or may not be done, and can be called again.
    pub async fn release(&mut self) -> Result<Released, LockError> {
        let freed = self.hold.free().await;
        let freed = freed.map_err(|error| self.view.grip.target.error("releasing a permit of", error))?;
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
    /// Which of the semaphore's permits this is: random, another one each time. With it,
    /// [`Semaphore::signal`](super::Semaphore::signal) releases the permit from anywhere.
    pub fn token(&self) -> &str {
        self.grip.token.as_str()
    }

    /// How often the store was asked for it: 1 when one was free, or was handed over in the queue.
    pub fn attempts(&self) -> u32 {
        self.grip.attempts
    }

    /// How long it was waited for.
    pub fn waited(&self) -> Duration {
        self.grip.waited
    }

    /// What is left of its lease, by this process's monotonic clock: counted from the moment the granting command was
    /// sent, less 1 % and 2 ms. Zero when it is over, was released or is lost.
    pub fn remaining(&self) -> Duration {
        self.grip.remaining().unwrap_or(Duration::MAX)
    }

    /// Asks the store whether the permit is still held. `false` without asking after its release.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] and [`LockError::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn is_held(&self) -> Result<bool, LockError> {
        self.grip.is_owned().await
    }

    /// Starts its lease anew; `false` if it is lost or was released: it is not acquired again.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have been refreshed.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may or may not be refreshed.
    pub async fn refresh(&self) -> Result<bool, LockError> {
        let target = &self.grip.target;
        let refreshed = self.grip.extend(target.ttl()).await;
        refreshed.map_err(|error| target.error("refreshing a permit of", error))
    }

    /// Resolves when [`remaining`](Self::remaining) is zero: its lease is over, it was released, or it is lost.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn expired(&self) -> impl Future<Output = ()> + Send + use<> {
        let grip = Arc::clone(&self.grip);
        async move { grip.expired().await }
    }

    /// Resolves when the permit is no longer known to be held although it was not released here: a refresh or renewal
    /// found it gone, or its lease is over. It stays lost. Never resolves once it was released.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let grip = Arc::clone(&self.grip);
        async move { grip.lost().await }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.view).finish()
    }
}

impl fmt::Debug for PermitView {
    /// Without the token: who knows it can release the permit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitView")
            .field("attempts", &self.grip.attempts)
            .field("waited", &self.grip.waited)
            .finish_non_exhaustive()
    }
}
