//! What was published of a guard.

use std::sync::atomic::AtomicBool;

/// What a guard has published.
#[derive(Debug, Default)]
pub(crate) struct Published {
    /// There is a task that publishes.
    pub(super) runs: AtomicBool,
    /// A recorder was told what the metrics mean.
    pub(super) described: AtomicBool,
    /// A recorder knows all counters of the guard.
    pub(super) registered: AtomicBool,
}
