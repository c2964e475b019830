//! The identity of a flight: a key and a mode.

use super::Key;

/// Identifies a flight: a key has at most one joinable flight per mode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlightKey {
    pub(crate) key: Key,
    pub(crate) mode: LoadMode,
}

/// How a flight obtains the right to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoadMode {
    /// Under the fleet's lease. The normal one.
    Leased,
    /// Outside the lease, for callers whose `wait_timeout` has passed.
    Unleased,
    /// Under the lease only if it is free, and without waiters: to find out whether a resource
    /// that was uncacheable still is.
    Probe,
    /// Under the lease only if it is free, and without waiters: all callers are served the stored value.
    BackgroundRefresh,
    /// Under the fleet's lease, for callers that reject the stored value while others are served it.
    ForcedReload,
}
