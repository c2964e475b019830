//! [`Condition`] of a replica: running, cut off, stopped or dead.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::sync::lock;

/// The condition of a replica. Shared by its handle and its lines.
#[derive(Debug, Default)]
pub(super) struct Condition {
    is: AtomicU8,
    changed: Notify,
    /// How much longer half a round trip takes than for other replicas.
    detour: Mutex<Duration>,
    /// Messages to it get lost one by one, and its subscription stays as it is.
    misses_messages: AtomicBool,
}

const RUNS: u8 = 0;
const CUT: u8 = 1;
const STOPPED: u8 = 2;
const DEAD: u8 = 3;

impl Condition {
    pub(super) fn is_cut(&self) -> bool {
        self.is.load(Ordering::Relaxed) == CUT
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is.load(Ordering::Relaxed) == DEAD
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is.load(Ordering::Relaxed) == STOPPED
    }

    pub(super) fn run(&self) {
        self.become_(RUNS);
    }

    pub(super) fn cut(&self) {
        self.become_(CUT);
    }

    pub(super) fn stop(&self) {
        self.become_(STOPPED);
    }

    pub(super) fn kill(&self) {
        self.become_(DEAD);
    }

    pub(super) fn move_away(&self, by: Duration) {
        *lock(&self.detour) = by / 2;
    }

    pub(super) fn detour(&self) -> Duration {
        *lock(&self.detour)
    }

    pub(super) fn misses_messages(&self) -> bool {
        self.misses_messages.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn miss_messages(&self, misses: bool) {
        self.misses_messages.store(misses, Ordering::Relaxed);
    }

    fn become_(&self, condition: u8) {
        // A dead replica stays dead.
        let _ = self
            .is
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |is| (is != DEAD).then_some(condition));
        self.changed.notify_waiters();
    }

    /// Waits until the replica can act: not at all unless it is stopped, for ever if it is dead.
    pub(super) async fn runs(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !self.is_stopped() && !self.is_dead() {
                return;
            }
            changed.await;
        }
    }
}
