//! A second way to tell a memory store's waiters, on which messages can be lost. For
//! [`testing`](crate::testing).

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{OnceLock, Weak};

use crate::store::Token;
use crate::store::wake::lease_waiters::Hint;
use crate::store::wake::lock_waiters::Tell;

/// The parts of a store that only tests change.
#[derive(Default)]
pub(crate) struct Meddling {
    pub(super) relay: OnceLock<Weak<dyn Relay>>,
    pub(super) ahead_ms: AtomicI64,
}

/// A second way to tell waiters. Weak, because its owner holds the store.
pub(crate) trait Relay: Send + Sync {
    /// As [`Watches::tell`](crate::store::wake::lease_waiters::Watches::tell).
    fn tell(&self, name: &str, hint: &Hint) -> bool;

    /// What happens to a message to this waiter for a lock, or to this holder.
    fn way(&self, token: &Token) -> Way;

    /// Called when this waiter for a lock, or this holder, was told.
    fn told(&self, token: &Token, tell: Tell);
}

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Open,
    /// It does not arrive, and its sender does not know.
    Lost,
    /// It has no receiver, and its sender knows.
    Gone,
}

impl Meddling {
    pub(super) fn relay(&self, name: &str, hint: &Hint) -> bool {
        self.relay.get().and_then(Weak::upgrade).is_some_and(|relay| relay.tell(name, hint))
    }

    pub(super) fn way(&self, token: &Token) -> Way {
        self.relay.get().and_then(Weak::upgrade).map_or(Way::Open, |relay| relay.way(token))
    }

    pub(super) fn told(&self, token: &Token, tell: Tell) {
        if let Some(relay) = self.relay.get().and_then(Weak::upgrade) {
            relay.told(token, tell);
        }
    }

    pub(super) fn ahead_ms(&self) -> i64 {
        self.ahead_ms.load(Ordering::Relaxed)
    }
}
