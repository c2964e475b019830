//! Counts of tasks, leases and waiters, which can be awaited until they are zero.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

/// A count that can be awaited until it is zero.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    count: AtomicUsize,
    fell: Notify,
}

impl Tracker {
    /// Counts one more, until the guard that is returned is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Tracked {
        self.count.fetch_add(1, Ordering::Relaxed);
        Tracked { gauge: Arc::clone(self) }
    }

    /// As [`enter`](Self::enter), unless the count is `most` already.
    pub(crate) fn try_enter(self: &Arc<Self>, most: usize) -> Option<Tracked> {
        let room = |count| (count < most).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        Some(Tracked { gauge: Arc::clone(self) })
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Waits until the count is zero, at most until `deadline`; returns whether it is.
    pub(crate) async fn empty(&self, deadline: Instant) -> bool {
        loop {
            // Registered before the count is read; otherwise the last decrement could come between the two.
            let fell = self.fell.notified();
            tokio::pin!(fell);
            fell.as_mut().enable();
            if self.count() == 0 {
                return true;
            }
            if timeout_at(deadline, fell).await.is_err() {
                return self.count() == 0;
            }
        }
    }
}

/// A count of waiters, which can be made to stop waiting.
#[derive(Debug, Default)]
pub(crate) struct StoppableWaiters {
    present: Arc<Tracker>,
    sent_away: watch::Sender<bool>,
}

impl StoppableWaiters {
    /// Counts one more, until the guard that is returned is dropped.
    pub(crate) fn enter(&self) -> Tracked {
        self.present.enter()
    }

    pub(crate) fn are_sent_away(&self) -> bool {
        *self.sent_away.borrow()
    }

    /// Resolves when the waiters are sent away.
    pub(crate) async fn sent_away(&self) {
        // Cannot fail: the sender lives as long as `self`.
        let _ = self.sent_away.subscribe().wait_for(|sent_away| *sent_away).await;
    }

    /// Sends all present and later waiters away; waits until none is left, at most until `deadline`.
    pub(crate) async fn send_away(&self, deadline: Instant) {
        self.sent_away.send_replace(true);
        self.present.empty(deadline).await;
    }
}

/// One task, lease or waiter that a [`Tracker`] counts until this is dropped.
#[derive(Debug)]
pub(crate) struct Tracked {
    gauge: Arc<Tracker>,
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.gauge.count.fetch_sub(1, Ordering::Release);
        self.gauge.fell.notify_waiters();
    }
}
