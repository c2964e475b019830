//! Background work: the one task of an owner, counts of tasks, leases and waiters, which can be awaited until they are zero,
//! and the pauses between attempts at an operation that fails.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

use crate::sync::{lock, until};

/// Boxes the future that `make` builds. Unlike `Box::pin(make())`, which builds the future and then moves it, this takes the memory first,
/// so that an optimised build makes the future in it. That pays for futures of kilobytes, such as those of loads.
#[inline]
pub(crate) fn box_future<F: Future>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    Box::into_pin(Box::write(Box::new_uninit(), make()))
}

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

    /// Like [`enter`](Self::enter), unless the count is `most` already.
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
        let is_empty = || self.count() == 0;
        timeout_at(deadline, until(&self.fell, is_empty)).await.is_ok() || is_empty()
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

/// The one background task of an owner. It runs in the runtime of the caller that has started it; when it has ended, with that
/// runtime or by a panic, the next caller starts another. It holds a weak reference, so it ends when its owner is dropped.
#[derive(Debug, Default)]
pub(crate) struct OwnedTask {
    /// Whether there is a task; outside the lock, because callers on the path of a hit check it.
    running: AtomicBool,
    latest: Mutex<LatestTask>,
}

#[derive(Debug, Default)]
struct LatestTask {
    /// A task with a lower number must not change the owner's state any more.
    number: u64,
    handle: Option<AbortHandle>,
    closed: bool,
}

pub(crate) trait TaskOwner: Send + Sync + 'static {
    fn owned_task(&self) -> &OwnedTask;

    /// Called when the task has ended without `close` or `end_if`: it returned, it panicked, or its runtime was shut down. No other task
    /// starts before `ended` is dropped.
    fn task_ended(&self, ended: EndedTask<'_>) {
        drop(ended);
    }
}

impl OwnedTask {
    pub(crate) fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.latest).closed
    }

    /// Starts the task that `run` returns, unless a task runs, or the owner is closed, or the caller is in no runtime. Returns whether
    /// the task was started. `run` is called under the lock: it must not start or close the task.
    pub(crate) fn start<T: TaskOwner, F>(&self, owner: &Arc<T>, run: impl FnOnce(TaskRef<T>) -> F) -> bool
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else { return false };
        let (number, task) = {
            let mut latest = lock(&self.latest);
            if latest.closed || self.running.swap(true, Ordering::AcqRel) {
                return false;
            }
            latest.number += 1;
            (latest.number, run(TaskRef { owner: Arc::downgrade(owner), number: latest.number }))
        };
        // Outside the lock: a runtime that is being shut down drops the task inside `spawn`, and that drop takes the lock.
        let handle = runtime.spawn(task).abort_handle();
        let mut latest = lock(&self.latest);
        if latest.number == number && !latest.closed {
            latest.handle = Some(handle);
        } else {
            handle.abort();
        }
        true
    }

    /// Ends the task for good: no other task can be started.
    pub(crate) fn close(&self) {
        let handle = {
            let mut latest = lock(&self.latest);
            latest.closed = true;
            latest.handle.take()
        };
        if let Some(handle) = handle {
            handle.abort();
        }
    }
}

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.close();
    }
}

/// A task's reference to its owner. The task must not hold a strong reference across an await: otherwise a dropped owner would
/// live as long as the task.
pub(crate) struct TaskRef<T: TaskOwner> {
    owner: Weak<T>,
    number: u64,
}

impl<T: TaskOwner> TaskRef<T> {
    pub(crate) fn owner(&self) -> Option<Arc<T>> {
        self.owner.upgrade()
    }

    /// Changes the owner's state, unless the owner was dropped or closed or has another task. `act` is called under the lock: it
    /// must not start or close the task.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&T) -> R) -> Option<R> {
        let owner = self.owner()?;
        let latest = lock(&owner.owned_task().latest);
        (latest.number == self.number && !latest.closed).then(|| act(&owner))
    }

    /// Ends the task if `is_done`, so that the next caller starts another. Returns whether the task must end.
    pub(crate) fn end_if(&self, is_done: impl FnOnce(&T) -> bool) -> bool {
        let Some(owner) = self.owner() else { return true };
        let task = owner.owned_task();
        let mut latest = lock(&task.latest);
        if latest.number != self.number || latest.closed {
            return true;
        }
        let ends = is_done(&owner);
        if ends {
            latest.number += 1;
            latest.handle = None;
            task.running.store(false, Ordering::Release);
        }
        ends
    }
}

impl<T: TaskOwner> Drop for TaskRef<T> {
    fn drop(&mut self) {
        let Some(owner) = self.owner() else { return };
        let task = owner.owned_task();
        let is_closed = {
            let latest = lock(&task.latest);
            if latest.number != self.number {
                return;
            }
            latest.closed
        };
        let ended = EndedTask(task);
        if !is_closed {
            owner.task_ended(ended);
        }
    }
}

/// A task that has ended. Until this is dropped, no other task is started.
pub(crate) struct EndedTask<'a>(&'a OwnedTask);

impl Drop for EndedTask<'_> {
    fn drop(&mut self) {
        lock(&self.0.latest).handle = None;
        self.0.running.store(false, Ordering::Release);
    }
}

#[cfg(test)]
impl<T: TaskOwner> TaskRef<T> {
    /// The reference of a task that was started `later` tasks after the latest.
    pub(crate) fn of_task(owner: &Arc<T>, later: u64) -> Self {
        let number = lock(&owner.owned_task().latest).number + later;
        Self { owner: Arc::downgrade(owner), number }
    }
}

#[cfg(test)]
impl OwnedTask {
    /// The number of the latest task, which [`TaskRef::end_if`] also increases.
    pub(crate) fn started(&self) -> u64 {
        lock(&self.latest).number
    }

    pub(crate) fn pretend_running(&self) {
        self.running.store(true, Ordering::Release);
    }
}

/// The pauses between attempts at an operation that fails.
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
