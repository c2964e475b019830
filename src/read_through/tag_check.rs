//! Checks whether a tag of an entry that an acquire has found was invalidated since.

use std::time::Duration;

use bytes::Bytes;

use crate::guard_state::{GuardState, Stored};
use crate::key::Key;
use crate::store::StoreError;
use crate::value::entry::{Entry, EntryKind};

/// Decodes an entry that an acquire or a plain GET has found, and reads its tags' ids, which were not read with it.
pub(crate) async fn current(
    state: &GuardState,
    raw: Bytes,
    key: &Key,
    tags: &[Key],
    within: Duration,
) -> Result<Stored, StoreError> {
    match Stored::decode(state, raw, key) {
        Stored::Entry(entry) => unless_invalidated(state, entry, key, tags, within).await,
        unreadable => Ok(unreadable),
    }
}

/// The entry, unless one of its tags was invalidated.
pub(crate) async fn unless_invalidated(
    state: &GuardState,
    entry: Entry,
    key: &Key,
    tags: &[Key],
    within: Duration,
) -> Result<Stored, StoreError> {
    if entry.kind != EntryKind::Value || (tags.is_empty() && entry.tags.is_empty()) {
        return Ok(Stored::Entry(entry));
    }
    // A caller that comes after this read of the ids may know of a later invalidation, so it must not join this flight.
    state.detach(key);
    let ids = match tags {
        [] => Vec::new(),
        tags => state.store.tags().present_ids(tags, within).await?,
    };
    state.unless_invalidated(key, entry, tags, &ids, within).await
}
