//! [`Relay`]: a second path for messages to a memory store's waiters, on which messages can be lost. For
//! [`testing`](crate::testing).

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{OnceLock, Weak};

use crate::store::Token;
use crate::store::wake::lease_waiters::Hint;
use crate::store::wake::lock_waiters::LockHint;

/// The faults that tests inject into a store.
#[derive(Default)]
pub(crate) struct FaultInjection {
    /// Weak, because the relay's owner holds the store.
    pub(super) relay: OnceLock<Weak<dyn Relay>>,
    pub(super) ahead_ms: AtomicI64,
}

/// A second path for messages to waiters.
pub(crate) trait Relay: Send + Sync {
    /// As [`LeaseWaiters::notify`](crate::store::wake::lease_waiters::LeaseWaiters::notify).
    fn notify(&self, name: &str, hint: &Hint) -> bool;

    /// Whether a message to this waiter for a lock, or to this holder, arrives. `Break` if it gets lost, with whether
    /// the sender believes that it was received.
    fn way(&self, token: &Token) -> ControlFlow<bool>;

    /// Called after this waiter for a lock, or this holder, was notified.
    fn notify_lock(&self, token: &Token, hint: LockHint);
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

    pub(super) fn notify_lock(&self, token: &Token, hint: LockHint) {
        if let Some(relay) = self.relay.get().and_then(Weak::upgrade) {
            relay.notify_lock(token, hint);
        }
    }

    pub(super) fn ahead_ms(&self) -> i64 {
        self.ahead_ms.load(Ordering::Relaxed)
    }
}
