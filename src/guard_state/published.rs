//! What a guard has published through the `metrics` facade.

use std::sync::atomic::AtomicBool;

use crate::task::OwnedTask;

/// The state of a guard's publishing.
#[derive(Debug, Default)]
pub(crate) struct Published {
    /// Publishes regularly.
    pub(super) task: OwnedTask,
    /// Whether the metrics were described to a recorder.
    pub(super) described: AtomicBool,
    /// Whether all counters of the guard were registered with a recorder.
    pub(super) registered: AtomicBool,
}
