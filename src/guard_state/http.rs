//! The state that all clones of one guard share for the HTTP layer.

use std::sync::Arc;

use crate::observe::Outage;
use crate::tracker::Gauge;

#[derive(Debug, Default)]
pub(crate) struct HttpState {
    /// Limits warnings about responses that arrive older than their lifetimes. Never reset, so there is one warning only.
    pub(crate) too_old: Outage,
    /// Limits warnings about failed invalidations by unsafe requests.
    pub(crate) untold: Outage,
    /// Unsafe requests with a client that has hung up, and whose responses are awaited.
    pub(crate) unheard: Arc<Gauge>,
    /// Invalidations that are retried after their responses were sent, while the store is down.
    pub(crate) retold: Arc<Gauge>,
}
