//! One waiter for a lock: its messages, and how it is woken.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use uuid::Uuid;

use crate::store::names::Token;
use crate::sync::lock;

/// What a waiter was told since its last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LockHints {
    /// This waiter holds the lock, with this fence (0 for a permit).
    pub(crate) granted: Option<u64>,
    /// The semaphore was deleted, or the store closed.
    pub(crate) closed: bool,
    /// The mutex was broken: taken away from its holder.
    pub(crate) broken: bool,
    /// A message may have been missed, or the lock's time has changed: take again.
    pub(crate) missed: bool,
    /// `missed`, because no messages arrived for a time.
    pub(crate) unheard: bool,
    /// What this waiter must do by the clock has changed: it has become the first of its lock in this process, or the
    /// time to watch ends sooner.
    pub(crate) first: bool,
}

impl LockHints {
    #[cfg(any(feature = "redis", feature = "testing"))]
    pub(super) fn hear_nothing(&mut self) {
        (self.missed, self.unheard) = (true, true);
    }
}

/// One message from a store to one waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockHint {
    Granted { fence: u64 },
    Closed,
    Broken,
}

#[derive(Debug)]
pub(super) struct RegisteredLockWaiter {
    /// Its rank among all waiters that have registered.
    pub(super) number: u64,
    pub(super) key: Arc<str>,
    pub(super) token: Token,
    pub(super) told: Mutex<LockHints>,
    /// Whether it was granted the lock, so that it need not be told to ask.
    pub(super) granted: AtomicBool,
    /// Twice the number of takes that were sent for it, each of which may have queued it, plus one if the last was
    /// answered.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "a memory store looks into its queue"))]
    pub(super) asked: AtomicU32,
    pub(super) woken: Notify,
}

impl RegisteredLockWaiter {
    /// Selects the waiters of this node.
    pub(super) fn of(node: Uuid) -> impl Fn(&Self) -> bool {
        let node = node.simple().to_string();
        move |waiter| waiter.token.node() == node
    }

    pub(super) fn tell(&self, enter: impl FnOnce(&mut LockHints)) {
        enter(&mut lock(&self.told));
        self.woken.notify_one();
    }
}

/// Wakes waiters when it is dropped. So a message can be recorded in a step under the store's lock, while waking, which
/// runs foreign code, comes after the lock.
#[derive(Debug)]
#[must_use = "what was told is heard when this is dropped, which must not be under a lock"]
pub(crate) struct Wake(pub(super) Vec<Arc<RegisteredLockWaiter>>);

impl Wake {
    pub(super) fn and(waiter: Arc<RegisteredLockWaiter>, others: Option<Self>) -> Self {
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
