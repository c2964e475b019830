//! How one caller judges a stored entry and turns it into its value. Knows no Redis and no HTTP.

use std::any::Any;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use super::entry::Entry;
use super::freshness::Freshness;

/// The value that the first caller of a shared read has made of the entry, kept for the others.
pub(crate) type SharedValue = OnceLock<Box<dyn Any + Send + Sync>>;

/// How one caller turns a stored entry into its value, and whether it accepts it.
pub(crate) trait EntryReader {
    type Value;
    /// Where the future of the caller's own read is placed.
    type Room: Room;

    /// Whether the entry may be served to this caller without a load, and how.
    fn serves(&self, entry: &Entry, now: u64) -> Freshness {
        entry.serves(now)
    }

    /// As [`serves`](Self::serves), for an entry that a shared read has found.
    fn serves_shared(&self, entry: &Entry, now: u64, _opened: &SharedValue) -> Freshness {
        self.serves(entry, now)
    }

    /// Whether the entry may be served to this caller if a load fails.
    fn stands_in(&self, entry: &Entry, now: u64) -> bool {
        entry.expiry.stands_in(now)
    }

    /// Whether this caller loads for itself if it does not accept the older value that stands in for a failed load.
    fn goes_on_alone(&self) -> bool {
        true
    }

    /// Whether other callers find their own values through this entry.
    fn leads_others(&self, _entry: &Entry) -> bool {
        false
    }

    /// Makes the value of an entry that no other caller holds, for a caller that came at `now` on the store's clock.
    /// `None` if the entry holds no such value; it is then unchanged.
    fn open(&self, entry: &mut Entry, now: u64) -> Option<Self::Value>;

    /// As [`open`](Self::open), for an entry that a shared read has found.
    fn open_shared(&self, entry: &Entry, now: u64, _opened: &SharedValue) -> Option<Self::Value> {
        self.open(&mut entry.clone(), now)
    }

    /// Makes the value of one that is still arriving.
    fn open_arriving(&self, _arriving: &Arc<dyn Any + Send + Sync>) -> Option<Self::Value> {
        None
    }
}

/// Where a caller places the future of its own read.
pub(crate) trait Room {
    fn keep<F: Future + Send>(read: F) -> impl Future<Output = F::Output> + Send;
}

/// In the caller's future, without an allocation.
pub(crate) struct InPlace;

/// On the heap, for callers that are boxed futures themselves: most callers of a hot key queue behind another caller's read,
/// and would otherwise allocate, move and free space for a read of their own that never runs.
pub(crate) struct Boxed;

impl Room for InPlace {
    fn keep<F: Future + Send>(read: F) -> impl Future<Output = F::Output> + Send {
        read
    }
}

impl Room for Boxed {
    fn keep<F: Future + Send>(read: F) -> impl Future<Output = F::Output> + Send {
        Box::pin(read)
    }
}
