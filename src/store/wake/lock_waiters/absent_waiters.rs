//! The waiters of one lock in this process whose places must be looked for in the queue, because messages may have been
//! lost.
//!
//! The first waiter of each lock is told to ask. Any other waiter with a place needs to do nothing, because it will
//! receive its grant. A waiter without a place was passed over, or its grant was lost, and it must ask.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::LockWaiters;
use super::WaitLine;
use super::{LockHints, RegisteredLockWaiter};
use crate::store::names::{LockName, Token};
use crate::sync::lock;

/// The waiters of one lock except the first; those that are found in the queue are removed.
pub(crate) struct AbsentWaiters {
    pub(crate) name: LockName,
    waiters: HashMap<Token, Absent>,
}

/// A waiter that was not found in the queue.
pub(crate) struct Absent {
    waiter: Arc<RegisteredLockWaiter>,
    /// Its value of `asked` before the queue was read.
    asked: u32,
}

impl LockWaiters {
    /// The waiters of all locks whose places must be looked for.
    pub(crate) fn all_absent_waiters(&self) -> Vec<AbsentWaiters> {
        lock(&self.registry).waiting.iter().map(|(key, line)| AbsentWaiters::of(key, line)).collect()
    }

    /// The waiters of the lock with this key; `None` if there is none but the first.
    pub(crate) fn absent_waiters(&self, key: &str) -> Option<AbsentWaiters> {
        let registry = lock(&self.registry);
        Some(AbsentWaiters::of(key, registry.waiting.get(key)?))
            .filter(|absent_waiters| !absent_waiters.is_empty())
    }
}

impl AbsentWaiters {
    fn of(key: &str, line: &WaitLine) -> Self {
        let absent = |waiter: &Arc<RegisteredLockWaiter>| {
            let asked = waiter.asked.load(Ordering::Relaxed);
            // A waiter that has not asked yet has no place to lose.
            (asked > 0).then(|| (waiter.token.clone(), Absent { waiter: Arc::clone(waiter), asked }))
        };
        Self { name: LockName::of_key(key), waiters: line.all().skip(1).filter_map(absent).collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Removes a waiter that has a place in the queue.
    pub(crate) fn found(&mut self, token: &Token) {
        self.waiters.remove(token);
    }

    /// Tells the waiter with this token to ask, if it is in this census.
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
    /// Tells the waiter to ask, unless it has asked meanwhile.
    pub(crate) fn notify(&self) {
        let waiter = &self.waiter;
        // If its last take was answered before the queue was read, it has no place: 0 keeps its next take from looking for
        // one.
        let was_answered = self.asked % 2 == 1;
        if was_answered
            && waiter.asked.compare_exchange(self.asked, 0, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        waiter.notify(LockHints::hear_nothing);
    }
}
