//! The deadline of a call that makes many changes.

use std::sync::Mutex;

use tokio::time::Instant;

use super::entries::LONGEST;
use crate::error::Error;
use crate::policy::Policy;
use crate::sync::lock;

/// How many changes of one call are under way at once. Hits of other callers wait behind so many commands.
pub(super) const CHANGES: usize = 32;

/// Until when the changes of one call are repeated. While the store is away, all of them together take no longer than one.
pub(super) struct SharedDeadline {
    /// A change that the store has made may fail later, because replicas lack it: such a failure says nothing about the store.
    asks_replicas: bool,
    state: Mutex<DeadlineState>,
}

struct DeadlineState {
    /// Moved on by each change that succeeds, or fails before it.
    until: Instant,
    /// A change has failed after it.
    has_passed: bool,
}

impl SharedDeadline {
    pub(super) fn new(policy: &Policy) -> Self {
        let state = DeadlineState { until: Instant::now() + LONGEST, has_passed: false };
        Self { asks_replicas: policy.replicas.is_some(), state: Mutex::new(state) }
    }

    /// Makes a change, given its deadline. `is_down`: its server is known to be down.
    pub(super) async fn holds(
        &self,
        is_down: bool,
        change: impl AsyncFnOnce(Instant) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let until = {
            let (state, now) = (lock(&self.state), Instant::now());
            match state.has_passed && is_down {
                true => now,
                false if self.asks_replicas => now + LONGEST,
                false => state.until,
            }
        };
        let changed = change(until).await;
        let (mut state, now) = (lock(&self.state), Instant::now());
        if changed.is_ok() || now < until {
            state.until = now + LONGEST;
        } else {
            state.has_passed = true;
        }
        drop(state);
        changed
    }
}
