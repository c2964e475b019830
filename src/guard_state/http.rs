//! What all clones of one guard share for the HTTP layer.

use std::sync::Arc;

use crate::observe::Outage;
use crate::tracker::Gauge;

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Of responses that are older than their lifetimes when they come; it never ends, so it is told once.
    pub(crate) too_old: Outage,
    /// Of invalidations that unsafe requests ask for.
    pub(crate) untold: Outage,
    /// Unsafe requests whose clients have hung up, and whose answers are waited for.
    pub(crate) unheard: Arc<Gauge>,
    /// Those that are tried behind their responses, while the store is away.
    pub(crate) retold: Arc<Gauge>,
}
