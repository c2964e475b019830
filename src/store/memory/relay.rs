//! A second way to tell a memory store's waiters, on which messages can be lost. For
//! [`testing`](crate::testing).

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{OnceLock, Weak};

use crate::store::Token;
use crate::store::wake::lease_waiters::Hint;
use crate::store::wake::lock_waiters::LockHint;

/// What is done to a store from outside. Nothing is, but in tests.
#[derive(Default)]
pub(crate) struct FaultInjection {
    pub(super) relay: OnceLock<Weak<dyn Relay>>,
    pub(super) ahead_ms: AtomicI64,
}

/// A second way to tell waiters. Weak, because its owner holds the store.
pub(crate) trait Relay: Send + Sync {
    /// As [`Watches::notify`](crate::store::wake::lease_waiters::Watches::notify).
    fn notify(&self, name: &str, hint: &Hint) -> bool;

    /// Whether something that is said to this waiter for a lock, or to this holder, arrives. `Break` where it does not: with
    /// whether the one that says it takes it for heard.
    fn way(&self, token: &Token) -> ControlFlow<bool>;

    /// Called when this waiter for a lock, or this holder, was told.
    fn notify_lock(&self, token: &Token, notify: LockHint);
}

impl FaultInjection {
    pub(super) fn relay(&self, name: &str, hint: &Hint) -> bool {
        self.relay.get().and_then(Weak::upgrade).is_some_and(|relay| relay.notify(name, hint))
    }

    pub(super) fn is_relayed(&self) -> bool {
        self.relay.get().is_some()
    }

    pub(super) fn way(&self, token: &Token) -> ControlFlow<bool> {
        self.relay.get().and_then(Weak::upgrade).map_or(ControlFlow::Continue(()), |relay| relay.way(token))
    }

    pub(super) fn notify_lock(&self, token: &Token, notify: LockHint) {
        if let Some(relay) = self.relay.get().and_then(Weak::upgrade) {
            relay.notify_lock(token, notify);
        }
    }

    pub(super) fn ahead_ms(&self) -> i64 {
        self.ahead_ms.load(Ordering::Relaxed)
    }
}
