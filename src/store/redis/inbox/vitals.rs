//! What the inbox knows about itself.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Inbox, Status};
use crate::health::LinkState;

impl Inbox {
    /// How the subscription stands.
    pub(in crate::store::redis) fn link(&self) -> LinkState {
        if self.task().closed {
            return LinkState::Closed;
        }
        match *self.status.borrow() {
            Status::Confirmed => LinkState::Up,
            Status::Refused => LinkState::Refused,
            Status::Shut if self.last_heard().is_some() => LinkState::Down,
            Status::Shut if !self.running.load(Ordering::Acquire) => LinkState::Idle,
            Status::Shut if self.commands.down().is_some() => LinkState::Down,
            Status::Shut => LinkState::Connecting,
        }
    }

    /// How long ago anything was heard: a message, or the answer to a ping.
    pub(in crate::store::redis) fn last_heard(&self) -> Option<Duration> {
        let heard_at = self.heard_at.load(Ordering::Relaxed);
        let since = self.born.elapsed().saturating_sub(Duration::from_millis(heard_at));
        (heard_at != 0).then_some(since)
    }

    pub(super) fn heard(&self) {
        let at = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_at.store(at.max(1), Ordering::Relaxed);
    }
}
