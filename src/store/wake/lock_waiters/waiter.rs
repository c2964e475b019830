//! One waiter for a lock: what it was told, and how it is woken.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use uuid::Uuid;

use crate::store::names::Token;
use crate::sync::lock;

/// What a waiter was told since it last looked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// The lock is this waiter's, with this fence (0 for a permit).
    pub(crate) granted: Option<u64>,
    /// The semaphore was deleted, or the store closed.
    pub(crate) closed: bool,
    /// The mutex was taken away by force.
    pub(crate) broken: bool,
    /// Something may have been missed, or has changed: take again.
    pub(crate) missed: bool,
    /// That is because nothing was heard for a time.
    pub(crate) unheard: bool,
    /// What this waiter has to do by the clock has changed: it has become the first of its lock in this process, or the
    /// time to watch is over sooner.
    pub(crate) first: bool,
}

impl Told {
    #[cfg(any(feature = "redis", feature = "testing"))]
    pub(super) fn hear_nothing(&mut self) {
        (self.missed, self.unheard) = (true, true);
    }
}

/// One thing a store tells one waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    Granted { fence: u64 },
    Closed,
    Broken,
}

#[derive(Debug)]
pub(super) struct Waiter {
    /// Its place among all who have registered.
    pub(super) number: u64,
    pub(super) key: Arc<str>,
    pub(super) token: Token,
    pub(super) told: Mutex<Told>,
    /// Whether it was told that the lock is its own, and has other things to do than to ask for it.
    pub(super) granted: AtomicBool,
    /// Twice the number of takes that were sent for it, each of which may have queued it, and one more once the last was
    /// answered.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "a memory store looks into its queue"))]
    pub(super) asked: AtomicU32,
    pub(super) woken: Notify,
}

impl Waiter {
    /// Those of this node.
    pub(super) fn of(node: Uuid) -> impl Fn(&Self) -> bool {
        let node = node.simple().to_string();
        move |waiter| waiter.token.node() == node
    }

    pub(super) fn tell(&self, enter: impl FnOnce(&mut Told)) {
        enter(&mut lock(&self.told));
        self.woken.notify_one();
    }
}

/// Wakes waiters when it is dropped. Entering what a waiter is told can thus be part of a step under a
/// store's own lock, and waking it, which runs somebody else's code, come after.
#[derive(Debug)]
#[must_use = "what was told is heard when this is dropped, which must not be under a lock"]
pub(crate) struct Wake(pub(super) Vec<Arc<Waiter>>);

impl Wake {
    pub(super) fn and(waiter: Arc<Waiter>, others: Option<Self>) -> Self {
        let mut wake = others.unwrap_or_else(|| Self(Vec::new()));
        wake.0.push(waiter);
        wake
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        for waiter in &self.0 {
            waiter.woken.notify_one();
        }
    }
}
