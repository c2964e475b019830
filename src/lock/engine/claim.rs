//! What a waiting token may have at the store, and its release if the wait ends without a hold.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::acquisition::{HoldState, LockGrant};
use super::hold::Hold;
use super::release::Release;
use super::target::LockTarget;
use super::wait_terms::from_now;
use crate::lock::Waiting;
use crate::store::lock_store::{MutexTaken, Taken};
use crate::store::wake::lock_waiters::LockWaiter;
use crate::store::{StoreError, Token};

/// A token that waits, or holds the lock without knowing it yet.
pub(crate) struct PendingClaim<T: LockTarget> {
    /// Dropped first: the connection task that receives a later grant then gives it back.
    pub(crate) heard: LockWaiter,
    pub(crate) duty: ReleaseOnDrop<T>,
}

/// What has to be taken back if no hold comes of it. Dropping this takes it back in the background.
pub(crate) struct ReleaseOnDrop<T: LockTarget> {
    pub(crate) target: Arc<T>,
    token: Token,
    /// Whether the token may have a place in the queue, or the lock.
    pub(crate) queued: bool,
    /// Whether a TAKE is under way.
    asking: bool,
    /// Whether a TAKE ended without an answer: it may still be executed.
    straggler: bool,
    runtime: Option<Handle>,
}

impl<T: LockTarget> PendingClaim<T> {
    /// Registers before the first TAKE: invariant 4 of [`lock_store`](crate::store::lock_store).
    pub(crate) fn new(target: Arc<T>, waiting: Waiting) -> Self {
        let token = target.home().mint(target.ttl());
        let heard = target.home().store.locks().await_grant(target.name(), &token);
        if matches!(waiting, Waiting::Poll { .. }) {
            // A polling waiter asks at its own times, whatever it is told. As the first in line it would not watch
            // the clock for the other waiters, so it leaves the line.
            heard.hold();
        }
        let runtime = Handle::try_current().ok();
        Self {
            heard,
            duty: ReleaseOnDrop { target, token, queued: false, asking: false, straggler: false, runtime },
        }
    }

    pub(crate) async fn take(
        &mut self,
        instead: Option<&Token>,
        queue: bool,
        within: Duration,
    ) -> Result<MutexTaken, StoreError> {
        let duty = &mut self.duty;
        duty.asking = true;
        let taken = duty.target.take(&duty.token, instead, queue, within).await;
        duty.asking = false;
        match &taken {
            Ok(MutexTaken { taken, .. }) => duty.queued |= queue || matches!(taken, Taken::Granted { .. }),
            Err(error) => duty.straggler |= error.kind.is_ambiguous(),
        }
        taken
    }

    /// Turns the place into a hold.
    pub(crate) fn hold(self, granted: LockGrant, since: Instant) -> Hold<T> {
        let Self { heard, mut duty } = self;
        let (target, token, runtime) = (Arc::clone(&duty.target), duty.token.clone(), duty.runtime.take());
        let straggler = std::mem::take(&mut duty.straggler);
        duty.queued = false;
        Hold::new(HoldState::new(target, token, heard, granted, since), runtime, straggler)
    }
}

impl<T: LockTarget> Drop for ReleaseOnDrop<T> {
    fn drop(&mut self) {
        let straggler = self.straggler || self.asking;
        if self.queued || straggler {
            let (target, token) = (Arc::clone(&self.target), self.token.clone());
            // A grant without a message was made before now, so it ends by then.
            let until = from_now(target.ttl());
            Release { target, token, until, waits: true, straggler, watchdog: None }
                .later(self.runtime.as_ref());
        }
    }
}
