//! Counting what is there now, and waiting until nothing is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

/// How many of something there are now, and when the last one has gone.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    count: AtomicUsize,
    fell: Notify,
}

impl Gauge {
    /// One more, until the answer is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Present {
        self.count.fetch_add(1, Ordering::Relaxed);
        Present { gauge: Arc::clone(self) }
    }

    /// The same, unless there are `most` already.
    pub(crate) fn try_enter(self: &Arc<Self>, most: usize) -> Option<Present> {
        let room = |count| (count < most).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        Some(Present { gauge: Arc::clone(self) })
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Waits until there is none, at most until `deadline`; whether there is none.
    pub(crate) async fn empty(&self, deadline: Instant) -> bool {
        loop {
            // Registered before the count is read, or the last fall could come between the two.
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

/// Those who wait for something until they are sent away.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    present: Arc<Gauge>,
    sent_away: watch::Sender<bool>,
}

impl Waiters {
    /// One more, until the answer is dropped.
    pub(crate) fn enter(&self) -> Present {
        self.present.enter()
    }

    pub(crate) fn are_sent_away(&self) -> bool {
        *self.sent_away.borrow()
    }

    /// Resolves when they are.
    pub(crate) async fn sent_away(&self) {
        // The sender lives as long as this.
        let _ = self.sent_away.subscribe().wait_for(|sent_away| *sent_away).await;
    }

    /// For good; waits until all have gone, at most until `deadline`.
    pub(crate) async fn send_away(&self, deadline: Instant) {
        self.sent_away.send_replace(true);
        self.present.empty(deadline).await;
    }
}

/// One of what a [`Gauge`] counts.
#[derive(Debug)]
pub(crate) struct Present {
    gauge: Arc<Gauge>,
}

impl Drop for Present {
    fn drop(&mut self) {
        self.gauge.count.fetch_sub(1, Ordering::Release);
        self.gauge.fell.notify_waiters();
    }
}
