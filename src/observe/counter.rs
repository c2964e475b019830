//! One count, and the metric that it belongs to.

use std::sync::atomic::{AtomicU64, Ordering};

/// One count, and how much of it a recorder was told.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    count: AtomicU64,
    #[cfg(feature = "metrics")]
    told: AtomicU64,
}

impl Counter {
    pub(crate) fn add(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// What a recorder was not told yet. It counts as told from now on.
    #[cfg(feature = "metrics")]
    pub(crate) fn untold(&self) -> u64 {
        self.untold_of(self.get())
    }

    /// The same, of a count that is kept elsewhere.
    #[cfg(feature = "metrics")]
    pub(crate) fn untold_of(&self, count: u64) -> u64 {
        untold(count, &self.told)
    }
}

/// The part of `count` that `told` does not have, which has it from now on. Two tasks that publish at once do not tell a part twice.
#[cfg(feature = "metrics")]
pub(crate) fn untold(count: u64, told: &AtomicU64) -> u64 {
    count.saturating_sub(told.fetch_max(count, Ordering::Relaxed))
}

/// A metric, and the label that tells this count from others of that metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code, reason = "no metrics are published"))]
pub(crate) struct Series {
    pub(crate) metric: &'static str,
    pub(crate) label: Option<(&'static str, &'static str)>,
}
