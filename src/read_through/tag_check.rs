//! Reads stored entries, and checks whether one of their tags was invalidated since they were loaded.

use std::time::Duration;

use bytes::Bytes;

use crate::guard_state::GuardState;
use crate::guard_state::kept::Servable;
use crate::key::Key;
use crate::local::Ticket;
use crate::store::StoreError;
use crate::value::entry::{Entry, EntryKind};

/// Reads the entry, and in the same trip the ids of the tags that it must have. `Err` inside: bytes that are no usable entry.
/// Adds the entry's other tags to the ticket.
///
/// The futures that concern tags are boxed, because they would enlarge the future of every hit.
pub(super) async fn read_checked(
    state: &GuardState,
    key: &Key,
    tags: &[Key],
    ticket: &mut Option<Ticket>,
    within: Duration,
) -> Result<Option<Result<Entry, Bytes>>, StoreError> {
    let servable = state.kept.servable(key, tags);
    let (raw, ids) = match tags {
        [] => (state.store.look_up(key, within).await?, Vec::new()),
        tags => {
            let (mut entry, ids) =
                state.store.tags().look_up_tagged(std::slice::from_ref(key), tags, within).await?;
            (entry.pop().flatten(), ids)
        }
    };
    checked(state, key, raw, (tags, &ids, servable), ticket, within).await
}

/// As [`read_checked`], for the bytes that a read has found with `ids`, the ids of `tags`. `servable` was asked before it was sent.
pub(super) async fn checked(
    state: &GuardState,
    key: &Key,
    raw: Option<Bytes>,
    (tags, ids, servable): (&[Key], &[Option<u64>], Servable),
    ticket: &mut Option<Ticket>,
    within: Duration,
) -> Result<Option<Result<Entry, Bytes>>, StoreError> {
    let Some(raw) = raw else { return Ok(None) };
    match decode(state, raw, key) {
        Ok(entry) if !state.kept.may_serve(servable, &entry) => Ok(Some(Err(entry.encode(key)))),
        Ok(entry) if has_tags(&entry, tags) => {
            Box::pin(check(state, key, entry, (tags, ids), ticket, within)).await.map(Some)
        }
        content => Ok(Some(content)),
    }
}

/// Decodes an entry that an acquire or a plain GET has found, and reads its tags' ids, which were not read with it. `servable` was
/// asked before that command was sent.
pub(crate) async fn current(
    state: &GuardState,
    raw: Bytes,
    key: &Key,
    (tags, servable): (&[Key], Servable),
    within: Duration,
) -> Result<Result<Entry, Bytes>, StoreError> {
    match decode(state, raw, key) {
        Ok(entry) => unless_invalidated(state, entry, key, (tags, servable), within).await,
        unusable => Ok(unusable),
    }
}

/// The entry, unless it or one of its tags was invalidated.
pub(crate) async fn unless_invalidated(
    state: &GuardState,
    entry: Entry,
    key: &Key,
    (tags, servable): (&[Key], Servable),
    within: Duration,
) -> Result<Result<Entry, Bytes>, StoreError> {
    if !state.kept.may_serve(servable, &entry) {
        return Ok(Err(entry.encode(key)));
    }
    if !has_tags(&entry, tags) {
        return Ok(Ok(entry));
    }
    // A caller that comes after this read of the ids may know of a later invalidation, so it must not join this flight.
    state.detach(key);
    let ids = match tags {
        [] => Vec::new(),
        tags => state.store.tags().present_ids(tags, within).await?,
    };
    check(state, key, entry, (tags, &ids), &mut None, within).await
}

/// Decodes the bytes stored under `key`; counts and logs unreadable ones.
fn decode(state: &GuardState, raw: Bytes, key: &Key) -> Result<Entry, Bytes> {
    Entry::decode(raw, key, state.longest_payload()).map_err(|(reason, raw)| {
        state.unreadable(key, &reason);
        raw
    })
}

fn has_tags(entry: &Entry, tags: &[Key]) -> bool {
    entry.kind == EntryKind::Value && !(tags.is_empty() && entry.tags.is_empty())
}

/// `entry`, unless one of its tags was invalidated since it was loaded. `ids` are those of `tags`, read together with the
/// entry; the ids of its other tags are read now. An entry that lacks one of `tags` was stored under a policy without that
/// tag, so an invalidation would not show; it counts as invalidated.
async fn check(
    state: &GuardState,
    key: &Key,
    entry: Entry,
    (tags, ids): (&[Key], &[Option<u64>]),
    ticket: &mut Option<Ticket>,
    within: Duration,
) -> Result<Result<Entry, Bytes>, StoreError> {
    let same = |(tag, id): (&Key, &Option<u64>)| id.is_some() && entry.tags.id_of(tag) == *id;
    if !tags.iter().zip(ids).all(same) {
        return Ok(Err(entry.encode(key)));
    }
    let known = |name: &str| tags.iter().any(|tag| tag.name() == name);
    let others: Vec<_> =
        entry.tags.iter().filter(|(name, _)| !known(name)).map(|(name, _)| Key::of_name(name)).collect();
    if !others.is_empty() {
        if let Some(ticket) = ticket {
            state.local.add_tags(ticket, &others);
        }
        if state.kept.has_tag(&others) {
            return Ok(Err(entry.encode(key)));
        }
        let ids = state.store.tags().present_ids(&others, within).await?;
        if !others.iter().zip(&ids).all(same) {
            return Ok(Err(entry.encode(key)));
        }
    }
    Ok(Ok(entry))
}
