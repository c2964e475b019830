//! Which flight of a key.

use super::Key;

/// What a flight is about: a key may have one of each lane at a time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlightKey {
    pub(crate) key: Key,
    pub(crate) lane: Lane,
}

/// How a flight goes about its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// Under the fleet's lease. The normal one.
    Lease,
    /// Outside it, for those who have waited too long.
    Beside,
    /// Under the lease only if it is free, with nobody following: to find out whether a resource
    /// that was uncacheable still is.
    Heal,
    /// Under the lease only if it is free, with nobody following: everyone is served what there is.
    Refresh,
    /// Under the fleet's lease, for those who will not have what there is, while others are served it.
    Anew,
}
