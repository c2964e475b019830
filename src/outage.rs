//! What an operator is told once, and not for each request that meets it.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether something is failing.
#[derive(Debug, Default)]
pub(crate) struct Outage(AtomicBool);

impl Outage {
    /// It has failed. Whether that is news: the first time since it has last succeeded.
    pub(crate) fn goes_on(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }

    /// It has succeeded.
    pub(crate) fn is_over(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
