//! Background work: counts of tasks, leases and waiters, which can be awaited until they are zero, and the pauses between
//! attempts at an operation that fails.
#![cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only what speaks to a server tries again"))]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout_at};

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

/// A connection that broke sooner than this was never stable.
pub(crate) const STABLE: Duration = Duration::from_secs(1);

/// The pauses between attempts.
///
/// Full jitter, from the process's own random state: a fleet that lost its server at one moment must not
/// reconnect at one moment.
pub(crate) struct Backoff {
    first: Duration,
    last: Duration,
    cap: Duration,
}

impl Backoff {
    /// The pauses between attempts to connect.
    pub(crate) fn new() -> Self {
        Self::between(Duration::from_millis(20), Duration::from_millis(500))
    }

    /// Pauses below `first`, then below twice as much each time, up to `last`.
    pub(crate) fn between(first: Duration, last: Duration) -> Self {
        Self { first, last, cap: first }
    }

    pub(crate) async fn pause(&mut self) {
        sleep(self.next()).await;
    }

    /// The length of the next pause, for a caller that can be woken during it.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.cap.mul_f64(fastrand::f64());
        self.cap = (self.cap * 2).min(self.last);
        pause
    }

    /// Starts over if the connection was open for long enough: a connection that breaks again and again is not
    /// reopened at full speed.
    pub(crate) fn connected_for(&mut self, lifetime: Duration) {
        if lifetime >= STABLE {
            self.cap = self.first;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Checks each pause against its bound in milliseconds; the last bound holds for all later pauses.
    pub(crate) fn are_anywhere_below(backoff: impl Fn() -> Backoff, bounds: &[u64]) {
        let last = bounds.last().expect("a bound");
        for (before, most) in bounds.iter().chain([last; 5]).enumerate() {
            let most = Duration::from_millis(*most);
            let pauses: Vec<_> = (0..100)
                .map(|_| {
                    let mut backoff = backoff();
                    for _ in 0..before {
                        backoff.next();
                    }
                    backoff.next()
                })
                .collect();
            assert!(pauses.iter().all(|pause| *pause < most), "{pauses:?}");
            // Fails once in 2^100 runs.
            assert!(pauses.iter().any(|pause| *pause < most / 2), "{pauses:?}");
            assert!(pauses.iter().any(|pause| *pause > most / 2), "{pauses:?}");
        }
    }

    pub(crate) fn begins_anew_after_a_second(mut backoff: Backoff, first: u64, last: u64) {
        for _ in 0..9 {
            backoff.next();
        }
        backoff.connected_for(Duration::from_secs(1) - Duration::from_nanos(1));
        assert_eq!(backoff.cap, Duration::from_millis(last));
        backoff.connected_for(Duration::from_secs(1));
        assert_eq!(backoff.cap, Duration::from_millis(first));
    }

    #[test]
    fn pauses_between_attempts_to_connect_are_below_a_bound_that_doubles_up_to_half_a_second() {
        are_anywhere_below(Backoff::new, &[20, 40, 80, 160, 320, 500]);
    }

    #[test]
    fn a_connection_that_was_open_for_a_second_is_reopened_at_once() {
        begins_anew_after_a_second(Backoff::new(), 20, 500);
    }
}
