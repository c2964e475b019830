//! How one caller judges a stored entry and turns it into its value. Knows no Redis and no HTTP.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use super::entry::Entry;
use super::freshness::Freshness;

/// The value that the first caller of a shared read has made of the entry, kept for the others.
pub(crate) type SharedValue = OnceLock<Arc<dyn Any + Send + Sync>>;

/// How one caller turns a stored entry into its value, and whether it accepts it.
///
/// `shared` is present if other callers share the read that found the entry.
pub(crate) trait EntryReader {
    type Value;

    /// Whether the entry may be served to this caller without a load, and how.
    fn serves(&self, entry: &Entry, now: u64, _shared: Option<&SharedValue>) -> Freshness {
        entry.serves(now)
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

    /// Makes the value of an entry, for a caller that came at `now` on the store's clock. `None` if the entry holds no such value.
    fn open(&self, entry: &Entry, now: u64, shared: Option<&SharedValue>) -> Option<Self::Value>;

    /// Makes the value of one that is still arriving.
    fn open_arriving(&self, _arriving: &Arc<dyn Any + Send + Sync>) -> Option<Self::Value> {
        None
    }
}
