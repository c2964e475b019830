//! Replaces `publish` without the feature `metrics`: nothing is published.

use std::sync::Arc;

use super::GuardState;

impl GuardState {
    #[inline]
    pub(crate) fn publish_regularly(self: &Arc<Self>) {}

    pub(crate) fn publish(&self) {}
}
