//! The state that all clones of one guard share for the HTTP layer.

use std::sync::Arc;

use crate::observe::LogOnce;
use crate::task::Tracker;

#[derive(Debug, Default)]
pub(crate) struct HttpState {
    /// Limits warnings about responses that arrive older than their lifetimes. Never reset, so there is one warning only.
    pub(crate) too_old_log: LogOnce,
    /// Limits warnings about failed invalidations by unsafe requests.
    pub(crate) invalidation_log: LogOnce,
    /// Unsafe requests whose client has disconnected and whose responses are still awaited.
    pub(crate) abandoned_unsafe_requests: Arc<Tracker>,
}
