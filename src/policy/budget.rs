//! The time that the store may add to one request.

use std::time::Duration;

use tokio::time::Instant;

/// The time that the store's round trips may still add to one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: Duration,
    command: Duration,
}

impl Budget {
    pub(crate) fn new(total: Duration, command: Duration) -> Self {
        Self { left: total, command }
    }

    /// The rest of the budget.
    pub(crate) fn left(&self) -> Duration {
        self.left
    }

    /// The deadline of the next command; `None` when nothing is left.
    pub(crate) fn next(&self) -> Option<Duration> {
        (!self.left.is_zero()).then(|| self.left.min(self.command))
    }

    pub(crate) fn spend(&mut self, since: Instant) {
        self.left = self.left.saturating_sub(since.elapsed());
    }
}
