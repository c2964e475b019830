//! Step 2 from this process's memory: a copy that may be served without a question to the store.

use tokio::time::Instant;

use super::call::Call;
use crate::guard_state::GuardState;
use crate::key::CacheKey;
use crate::loader::nesting::LoadScope;
use crate::local::LocalCopy;
use crate::policy::Policy;
use crate::value::freshness::Freshness;
use crate::value::reader::EntryReader;
use crate::value::stored::StoredEntry;

/// What a caller finds among the copies.
pub(super) enum CopyLookup<V> {
    /// A fresh value.
    Fresh(V),
    /// The copy is fresh, and its new load is due: the store may have a newer value. It was stored at this time.
    DueEarly(u64),
    Nothing,
}

/// Looks for a copy that this caller may be served. An aging copy is none: the fleet may have a newer value.
pub(super) fn look_for_copy<R: EntryReader>(call: Call<'_>, reader: &R) -> CopyLookup<R::Value> {
    let Call { state, policy, key } = call;
    if policy.local_for.is_zero() {
        return CopyLookup::Nothing;
    }
    match state.local.copy(key, policy.local_for) {
        Some((copy, at)) if has_checked_tags(call, &copy.entry) => judge(state, policy, &copy, at, reader),
        _ => CopyLookup::Nothing,
    }
}

/// A hit from memory before anything else is done: no key is made and no future. Finds less than a look-up does: nothing inside a
/// load, and nothing under policies whose copies need a closer look.
#[inline]
pub(crate) fn hit_at_once<R: EntryReader>(
    state: &GuardState,
    policy: &Policy,
    key: &CacheKey,
    reader: &R,
) -> Option<R::Value> {
    if !may_hit_at_once(policy) || state.is_bypassed() {
        return None;
    }
    let probe = state.prober.probe(key);
    let (copy, at) = state.local.find(probe, policy.local_for)?;
    let CopyLookup::Fresh(value) = judge(state, policy, &copy, at, reader) else { return None };
    state.hit_at_once(&policy.counters, probe);
    Some(value)
}

/// The same for a caller that has made its key and counts its hit.
#[cfg(feature = "http")]
#[inline]
pub(crate) fn hit_at_once_by_key<R: EntryReader>(call: Call<'_>, reader: &R) -> Option<R::Value> {
    match may_hit_at_once(call.policy).then(|| look_for_copy(call, reader)) {
        Some(CopyLookup::Fresh(value)) => Some(value),
        Some(CopyLookup::DueEarly(_) | CopyLookup::Nothing) | None => None,
    }
}

#[inline]
fn may_hit_at_once(policy: &Policy) -> bool {
    !(policy.local_for.is_zero()
        || policy.shadow
        || policy.is_tagged()
        || policy.refreshes_early()
        || LoadScope::is_inside())
}

#[inline]
fn judge<R: EntryReader>(
    state: &GuardState,
    policy: &Policy,
    copy: &LocalCopy,
    at: Instant,
    reader: &R,
) -> CopyLookup<R::Value> {
    let copy = &copy.entry;
    let Ok(entry) = &copy.content else { return CopyLookup::Nothing };
    let (now, shared) = (state.store.clock_at(at), copy.shared.as_ref());
    if reader.serves(entry, now, shared) != Freshness::Fresh {
        return CopyLookup::Nothing;
    }
    if policy.is_due_early(entry.stored_at, &entry.expiry, now) {
        return CopyLookup::DueEarly(entry.stored_at);
    }
    reader.open(entry, now, shared).map_or(CopyLookup::Nothing, CopyLookup::Fresh)
}

/// A copy was checked for the tags of the policy that it was read under.
#[inline]
fn has_checked_tags(call: Call<'_>, copy: &StoredEntry) -> bool {
    let Call { state, policy, key } = call;
    !policy.is_tagged() || policy.tag_keys(&state.namespace, key).iter().all(|tag| copy.checked.contains(tag))
}

/// The copy that is served while the store does not answer.
pub(super) fn copy_while_down<R: EntryReader>(call: Call<'_>, reader: &R) -> Option<R::Value> {
    let Call { state, policy, key } = call;
    if policy.local_while_down.is_zero() {
        return None;
    }
    let copy = &state.local.copy_while_down(key, policy.local_for, policy.local_while_down)?.entry;
    let entry = copy.content.as_ref().ok().filter(|_| has_checked_tags(call, copy))?;
    let (now, shared) = (state.store.now(), copy.shared.as_ref());
    let is_served = reader.serves(entry, now, shared).is_at_once();
    is_served.then(|| reader.open(entry, now, shared)).flatten()
}
