//! The waiters of one lock in this process that must be looked up in the lock's queue, because messages may have been
//! lost.
//!
//! The first waiter of each lock is notified to ask. Any other waiter that is in the queue needs to do nothing, because
//! it will receive its grant. A waiter that is not in the queue was passed over, or its grant was lost, and it must ask.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::LockWaiters;
use super::WaitLine;
use super::{LockHints, RegisteredLockWaiter};
use crate::store::{LockName, Token};
use crate::sync::lock;

/// The waiters of one lock except the first; those that are found in the queue are removed.
pub(crate) struct AbsentWaiters {
    pub(crate) name: LockName,
    waiters: HashMap<Token, Absent>,
}

/// A waiter that was not found in the queue.
pub(crate) struct Absent {
    waiter: Arc<RegisteredLockWaiter>,
    /// The waiter's counter of takes before the queue was read.
    takes: u32,
}

impl LockWaiters {
    /// The waiters of all locks that must be looked up in their queues.
    pub(crate) fn all_absent_waiters(&self) -> Vec<AbsentWaiters> {
        lock(&self.registry).waiting.iter().map(|(key, line)| AbsentWaiters::of(key, line)).collect()
    }

    /// The waiters of the lock with this key that must be looked up; `None` if there are none.
    pub(crate) fn absent_waiters(&self, key: &str) -> Option<AbsentWaiters> {
        let registry = lock(&self.registry);
        Some(AbsentWaiters::of(key, registry.waiting.get(key)?))
            .filter(|absent_waiters| !absent_waiters.is_empty())
    }
}

impl AbsentWaiters {
    fn of(key: &str, line: &WaitLine) -> Self {
        let absent = |waiter: &Arc<RegisteredLockWaiter>| {
            let takes = waiter.asked.load(Ordering::Relaxed);
            // A waiter that has not sent a take yet cannot have lost its position in the queue.
            (takes > 0).then(|| (waiter.token.clone(), Absent { waiter: Arc::clone(waiter), takes }))
        };
        Self { name: LockName::of_key(key), waiters: line.all().skip(1).filter_map(absent).collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Removes a waiter that is in the queue.
    pub(crate) fn found(&mut self, token: &Token) {
        self.waiters.remove(token);
    }

    /// Notifies the waiter with this token to ask, if it is one of these waiters.
    pub(crate) fn notify(&self, token: &Token) {
        if let Some(absent) = self.waiters.get(token) {
            absent.notify();
        }
    }

    /// The waiters that were not found, in the order of their registration.
    pub(crate) fn absent(self) -> Vec<Absent> {
        let mut absent: Vec<_> = self.waiters.into_values().collect();
        absent.sort_unstable_by_key(|absent| absent.waiter.number);
        absent
    }
}

impl Absent {
    /// Notifies the waiter to ask, unless it has sent a take meanwhile.
    pub(crate) fn notify(&self) {
        let waiter = &self.waiter;
        // If its last take was answered before the queue was read, it is not in the queue: with 0 its next take does not
        // search the queue for it.
        let was_answered = self.takes % 2 == 1;
        if was_answered
            && waiter.asked.compare_exchange(self.takes, 0, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        waiter.notify(LockHints::mark_silent);
    }
}
