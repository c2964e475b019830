//! A held permit: [`Permit`], which gives it back, and [`PermitView`], a view of it.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::LockError;
use super::engine::acquisition::HoldState;
use super::engine::hold::Hold;
use super::engine::target::{LockTarget as _, SemaphoreTarget};
use crate::store::lock_store::PermitFreed;

/// One of a semaphore's permits. Dropping it releases it in the background.
///
/// It dereferences to [`PermitView`], which describes it. Dropping works as with
/// [`MutexGuard`](super::MutexGuard#dropping).
#[must_use = "the permit is released as soon as it is dropped"]
pub struct Permit {
    view: PermitView,
    hold: Hold<SemaphoreTarget>,
    /// The count that the last release returned.
    available: u32,
}

/// One acquisition of a permit, as seen by all code that works under it. Cannot release the permit: only the
/// [`Permit`] can.
#[derive(Clone)]
pub struct PermitView {
    grip: Arc<HoldState<SemaphoreTarget>>,
}

/// The result of releasing a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// Whether it was still held: its lease had not ended, and it was not released before.
    pub was_held: bool,
    /// How many permits were free afterwards, not handed on to waiters.
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

    /// Gives it back, to the first waiter if there is one. A second call reports that it was not held, without
    /// asking the store, and repeats the first `available`.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked: then it may or may not be released, and this can be
    /// called again; the renewal has stopped.
    ///
    /// # Cancel safety
    ///
    /// Safe: if dropped, it may or may not be released, and this can be called again.
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
    /// The permit's token: random, different for each acquisition. With it,
    /// [`Semaphore::signal`](super::Semaphore::signal) releases the permit from anywhere.
    pub fn token(&self) -> &str {
        self.grip.token.as_str()
    }

    /// How often the caller asked the store: 1 when a permit was free, or was handed over in the queue.
    pub fn attempts(&self) -> u32 {
        self.grip.attempts
    }

    /// How long the caller waited.
    pub fn waited(&self) -> Duration {
        self.grip.waited
    }

    /// The remaining time of its lease, by this process's monotonic clock: counted from the moment the granting
    /// command was sent, less 1 % and 2 ms. Zero after it ended, was released or lost.
    pub fn remaining(&self) -> Duration {
        self.grip.remaining().unwrap_or(Duration::MAX)
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
        self.grip.is_owned().await
    }

    /// Restarts its lease; `false` if it is lost or was released. It is not acquired again.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be asked, in which case it may or may not have been refreshed.
    ///
    /// # Cancel safety
    ///
    /// If dropped, it may or may not be refreshed.
    pub async fn refresh(&self) -> Result<bool, LockError> {
        let target = &self.grip.target;
        let refreshed = self.grip.extend(target.ttl()).await;
        refreshed.map_err(|error| target.error("refreshing a permit of", error))
    }

    /// Resolves when [`remaining`](Self::remaining) is zero: its lease has ended, or it was released or lost.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub fn expired(&self) -> impl Future<Output = ()> + Send + use<> {
        let grip = Arc::clone(&self.grip);
        async move { grip.expired().await }
    }

    /// Resolves when the permit is no longer known to be held although it was not released here: a refresh or
    /// renewal found it gone, or its lease has ended. A lost permit stays lost. Never resolves once it was
    /// released.
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
    /// Omits the token, with which any client could release the permit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitView")
            .field("attempts", &self.grip.attempts)
            .field("waited", &self.grip.waited)
            .finish_non_exhaustive()
    }
}
