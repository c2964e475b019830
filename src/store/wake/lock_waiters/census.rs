//! The waiters of one lock in this process, for a store that is asked about all of them at once: which have a place in the
//! queue still, once messages may have been lost.
//!
//! The first of a lock's waiters is told to ask. Any other one with a place needs to do nothing: its grant will be heard. One
//! without was passed over, or was granted the lock unheard, and has to ask.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Grants;
use super::line::Line;
use super::waiter::{Told, Waiter};
use crate::store::names::{LockName, Token};
use crate::sync::lock;

/// The waiters of one lock, without the first; those that were found are taken out.
pub(crate) struct Census {
    pub(crate) name: LockName,
    waiters: HashMap<Token, Absent>,
}

/// A waiter that was not found in the queue.
pub(crate) struct Absent {
    waiter: Arc<Waiter>,
    /// How often it had asked before the queue was looked at.
    asked: u32,
}

impl Grants {
    /// The waiters of all locks, of which the store is to be asked.
    pub(crate) fn censuses(&self) -> Vec<Census> {
        lock(&self.registry).waiting.iter().map(|(key, line)| Census::of(key, line)).collect()
    }

    /// Those of the lock with this key; `None` if there is no other than the first.
    pub(crate) fn census(&self, key: &str) -> Option<Census> {
        let registry = lock(&self.registry);
        Some(Census::of(key, registry.waiting.get(key)?)).filter(|census| !census.is_empty())
    }
}

impl Census {
    fn of(key: &str, line: &Line) -> Self {
        let absent = |waiter: &Arc<Waiter>| {
            let asked = waiter.asked.load(Ordering::Relaxed);
            // One that has not asked yet has no place to lose.
            (asked > 0).then(|| (waiter.token.clone(), Absent { waiter: Arc::clone(waiter), asked }))
        };
        Self { name: LockName::of_key(key), waiters: line.all().skip(1).filter_map(absent).collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// This one has a place in the queue.
    pub(crate) fn found(&mut self, token: &Token) {
        self.waiters.remove(token);
    }

    /// Has the waiter with this token ask, if it is one of them.
    pub(crate) fn tell(&self, token: &Token) {
        if let Some(absent) = self.waiters.get(token) {
            absent.tell();
        }
    }

    /// Those that were not found, in the order in which they have come.
    pub(crate) fn absent(self) -> Vec<Absent> {
        let mut absent: Vec<_> = self.waiters.into_values().collect();
        absent.sort_unstable_by_key(|absent| absent.waiter.number);
        absent
    }
}

impl Absent {
    /// Has it ask, unless it has asked meanwhile.
    pub(crate) fn tell(&self) {
        let waiter = &self.waiter;
        // One whose last take was answered before has no place, and none to be looked for.
        let was_answered = self.asked % 2 == 1;
        if was_answered
            && waiter.asked.compare_exchange(self.asked, 0, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        waiter.tell(Told::hear_nothing);
    }
}
