//! For the store with injected faults: queries about lease waiters, and values that live as long as a registration.

use std::any::Any;

use super::{LeaseWaiters, LeaseWatch};
#[cfg(test)]
use crate::store::names::Token;

impl LeaseWaiters {
    /// Whether there is a waiter for `name`.
    pub(crate) fn any(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Whether there is a waiter with this token.
    #[cfg(test)]
    pub(crate) fn has(&self, token: &Token) -> bool {
        self.lock().values().flatten().any(|waiter| waiter.token == *token)
    }

    /// Whether there is no waiter.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }
}

impl LeaseWatch {
    /// Drops `companion` together with the registration.
    pub(crate) fn with(mut self, companion: impl Any + Send + Sync) -> Self {
        self.companion = Some(Box::new(companion));
        self
    }
}
