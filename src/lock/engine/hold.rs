//! The duty to give an acquisition back, and its renewal until then.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::acquisition::{AcquisitionState, HoldState};
use super::release::{Release, stop};
use super::target::LockTarget;
use super::wait_terms::{from_now, later};
use crate::observe::log;
use crate::store::StoreError;

/// The duty to give an acquisition back. Dropping this gives it back in the background.
pub(crate) struct Hold<T: LockTarget> {
    pub(crate) grip: Arc<HoldState<T>>,
    watchdog: Option<JoinHandle<()>>,
    runtime: Option<Handle>,
    /// Whether a TAKE of this token may still be executed, even after the lock was given back.
    straggler: bool,
    freed: bool,
    /// Whether it was held until it was given back.
    was_held: bool,
}

impl<T: LockTarget> Hold<T> {
    pub(crate) fn new(grip: Arc<HoldState<T>>, runtime: Option<Handle>, straggler: bool) -> Self {
        Self { grip, watchdog: None, runtime, straggler, freed: false, was_held: false }
    }

    /// Starts the renewal, at each third of the time to live.
    pub(crate) fn renew(mut self) -> Self {
        if let Some(runtime) = &self.runtime {
            self.watchdog = Some(runtime.spawn(renew(Arc::clone(&self.grip))));
        }
        self
    }

    /// Gives it back; `None` if that was done before. After an error it can be called again, but the renewal has
    /// stopped.
    pub(crate) async fn free(&mut self) -> Result<Option<T::Freed>, StoreError> {
        if self.freed {
            return Ok(None);
        }
        self.stop_renewing().await;
        let target = &self.grip.target;
        let freed = target.home().ask(target.name(), |within| target.free(&self.grip.token, within)).await?;
        self.end();
        Ok(Some(freed))
    }

    pub(crate) async fn stop_renewing(&mut self) {
        stop(&mut self.watchdog, self.grip.target.home().command_timeout).await;
    }

    /// Records that another command than that of [`free`](Self::free) gave it back, and whether that command found
    /// it still held.
    pub(crate) fn given_back(&mut self, was_held: bool) {
        self.was_held = was_held;
        self.end();
    }

    pub(crate) fn is_freed(&self) -> bool {
        self.freed
    }

    pub(crate) fn was_held(&self) -> bool {
        self.was_held
    }

    fn end(&mut self) {
        self.freed = true;
        self.grip.end();
        if self.straggler {
            self.release();
        }
    }

    fn release(&mut self) {
        let mut until = self.grip.may_be_kept_until();
        if self.straggler {
            // A TAKE that is executed late restarts the lease, with the time to live that it was sent with.
            until = later(until, from_now(self.grip.target.ttl()));
        }
        let release = Release {
            target: Arc::clone(&self.grip.target),
            token: self.grip.token.clone(),
            until,
            waits: false,
            straggler: self.straggler,
            watchdog: self.watchdog.take(),
        };
        release.later(self.runtime.as_ref());
    }
}

impl<T: LockTarget> Drop for Hold<T> {
    fn drop(&mut self) {
        if !self.freed {
            self.grip.end();
            self.release();
        }
    }
}

/// Renews an acquisition until it is given back or lost.
async fn renew<T: LockTarget>(grip: Arc<HoldState<T>>) {
    /// The pause after a renewal without an answer.
    const AGAIN: Duration = Duration::from_millis(50);
    let mut lease = grip.lease();
    let mut failed = None;
    loop {
        let now = *lease.borrow_and_update();
        let (AcquisitionState::Held, Some(ttl), Some(until)) = (now.state, now.ttl, now.until()) else {
            return;
        };
        let due = failed.map_or(now.since + ttl / 3, |failed: Instant| failed + AGAIN.min(ttl / 10));
        tokio::select! {
            biased;
            _ = lease.changed() => continue,
            () = sleep_until(due.min(until)) => {}
        }
        if Instant::now() >= until {
            return grip.lose("it could not be renewed in time");
        }
        match grip.extend(Some(ttl)).await {
            Ok(_) => failed = None,
            Err(error) => {
                tracing::debug!(target: log::LOCK, %error, "a lock was not renewed");
                failed = Some(Instant::now());
            }
        }
    }
}
