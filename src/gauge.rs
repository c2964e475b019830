//! Counting what is there now, and waiting until nothing is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;
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
