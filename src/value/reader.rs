//! What a caller wants of what is stored. Knows no Redis and no HTTP.

use std::any::Any;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use super::entry::Entry;
use super::freshness::Serves;

/// What the first of those who share a read has made of it, for the others.
pub(crate) type Opened = OnceLock<Box<dyn Any + Send + Sync>>;

/// What a caller wants of an entry.
pub(crate) trait Open {
    type Value;
    /// Where a read of the caller's own is kept.
    type Room: Room;

    /// Whether it may be served to this caller without a load, and how.
    fn serves(&self, entry: &Entry, now: u64) -> Serves {
        entry.serves(now)
    }

    /// The same of an entry that other callers are given at the same moment.
    fn serves_shared(&self, entry: &Entry, now: u64, _opened: &Opened) -> Serves {
        self.serves(entry, now)
    }

    /// Whether it may be served to this caller where a load fails.
    fn stands_in(&self, entry: &Entry, now: u64) -> bool {
        entry.times.stands_in(now)
    }

    /// Whether this caller loads for itself where others are content with what stands in for a value that could not be had.
    fn goes_on_alone(&self) -> bool {
        true
    }

    /// Whether others find by it what is there for them.
    fn leads_others(&self, _entry: &Entry) -> bool {
        false
    }

    /// Makes it of an entry that nobody else has, for a caller that came when the store's clock showed `now`.
    /// `None`, and the entry as it was, where it is not that.
    fn open(&self, entry: &mut Entry, now: u64) -> Option<Self::Value>;

    /// Makes it of an entry that other callers are given at the same moment.
    fn open_shared(&self, entry: &Entry, now: u64, _opened: &Opened) -> Option<Self::Value> {
        self.open(&mut entry.clone(), now)
    }

    /// Makes it of a value that is on its way.
    fn open_arriving(&self, _arriving: &Arc<dyn Any + Send + Sync>) -> Option<Self::Value> {
        None
    }
}

/// Where a caller keeps a read of its own while that is on its way.
pub(crate) trait Room {
    fn keep<F: Future + Send>(read: F) -> impl Future<Output = F::Output> + Send;
}

/// In the caller's future, for nothing.
pub(crate) struct InPlace;

/// On the heap, for callers that are boxed futures themselves: most callers of a hot key queue behind another's read, and
/// would allocate, move and free the room for one of their own.
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
