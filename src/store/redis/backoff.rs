//! How long is waited before connecting is tried again.

use std::time::Duration;

use tokio::time::sleep;

/// A connection that broke sooner than this was never really there.
pub(super) const STABLE: Duration = Duration::from_secs(1);

/// The pauses between attempts to connect.
///
/// Full jitter, from the process's own random state: a fleet that lost its server at one moment
/// must not return to it at one moment.
pub(super) struct Backoff {
    cap: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(20);
    const LAST: Duration = Duration::from_millis(500);

    pub(super) fn new() -> Self {
        Self { cap: Self::FIRST }
    }

    pub(super) async fn pause(&mut self) {
        let pause = self.cap.mul_f64(fastrand::f64());
        self.cap = (self.cap * 2).min(Self::LAST);
        sleep(pause).await;
    }

    /// Starts over, if the connection lived for a while: one that breaks again and again is not
    /// reconnected at full speed.
    pub(super) fn lived(&mut self, lifetime: Duration) {
        if lifetime >= STABLE {
            self.cap = Self::FIRST;
        }
    }
}
