//! A caller's look-up, step 2, and its decision what may be served. Knows no Redis and no HTTP.
//!
//! A fresh copy in this process's memory is served without a request to the store. [`look`] reads one key; [`look_many`] makes one read
//! for all keys of a caller that need one.

use std::ops::ControlFlow;
use std::sync::Arc;

use tokio::time::Instant;

use super::batch::BatchMember;
use super::call::{Call, CallState, LookUpState};
use super::permits::has_short_queue;
use super::read::read_many;
use crate::error::{Error, Failure};
use crate::guard_state::{GuardState, ReadResult};
use crate::key::{CacheKey, FlightKey, Key, LoadMode};
use crate::loader::LoadScope;
use crate::local::LocalCopy;
use crate::policy::{OnStoreDown, Policy};
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::value::entry::{Entry, EntryKind, Freshness, Unreadable};
use crate::value::{EntryReader, StoredEntry};

/// The result of step 2.
pub(crate) enum Lookup<'a, V> {
    /// A copy in this process's memory has the value: step 8 follows.
    LocalHit(V),
    /// The store has the value: step 8 follows. If a background load is due, `refresh` takes the caller's loader.
    Hit { value: V, stale: bool, refresh: Option<Box<CallState<'a>>> },
    /// There is nothing to serve: the caller needs its loader.
    Miss(Box<CallState<'a>>),
    /// There is no value, and the caller may not load one.
    Failed(Failure),
}

impl<V> Lookup<'_, V> {
    /// Makes this key load together with the other keys of the member's batch.
    pub(crate) fn join_batch(&mut self, member: &BatchMember) {
        match self {
            Self::Miss(caller) => caller.batch = Some(Box::new(member.attempt())),
            Self::Hit { refresh: Some(caller), .. } => caller.batch = Some(Box::new(member.attempt())),
            Self::LocalHit(_) | Self::Hit { refresh: None, .. } | Self::Failed(_) => {}
        }
    }
}

/// Step 2: looks for a value to serve. Sends no read to the store if a local copy can be served, if the key has a flight to join, or
/// after a shutdown.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look<'a, R: EntryReader>(call: Call<'a>, reader: &R) -> Lookup<'a, R::Value> {
    let due_early = match before_read(call, reader) {
        ControlFlow::Continue(due_early) => due_early,
        ControlFlow::Break(lookup) => return lookup,
    };
    let mut caller = CallState { due_early, ..CallState::new(call) };
    let read = caller.read(false).await;
    caller.after_read(read, reader)
}

/// The part of step 2 before the read: `Break` with the answer of a caller that needs no read. `Continue` has the time at which the caller's
/// copy was stored, if there is one and it is due for an early refresh.
fn before_read<'a, R: EntryReader>(
    call: Call<'a>,
    reader: &R,
) -> ControlFlow<Lookup<'a, R::Value>, Option<u64>> {
    let Call { state, key, .. } = call;
    if is_reentrant(call) {
        return ControlFlow::Break(Lookup::Failed(Failure::Guard(Error::reentrant(key))));
    }
    let due_early = match look_for_copy(call, reader) {
        Ok(value) => return ControlFlow::Break(Lookup::LocalHit(value)),
        Err(due_early) => due_early,
    };
    let flight = || FlightKey { key: key.clone(), mode: LoadMode::Leased };
    // After a shutdown no look-up is sent to the store any more.
    let joins_at_once = state.is_closed() || state.flights.any() && state.flights.has_connected(&flight());
    if joins_at_once {
        return ControlFlow::Break(Lookup::Miss(Box::new(CallState { due_early, ..CallState::new(call) })));
    }
    ControlFlow::Continue(due_early)
}

/// Step 2 for a caller that loads a new value, whatever is stored. The entry is read, but never served.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look_past(call: Call<'_>) -> Result<Box<CallState<'_>>, Failure> {
    let Call { state, policy, key } = call;
    let mut caller = Box::new(CallState::new(call));
    if is_reentrant(call) {
        return Err(Failure::Guard(Error::reentrant(key)));
    }
    if state.is_closed() {
        return Ok(caller);
    }
    match caller.read(false).await {
        ReadResult::Failed(error) if policy.on_store_down == OnStoreDown::FailClosed => {
            return Err(Failure::Guard(Error::store("looking up the entry", key, error)));
        }
        ReadResult::Failed(_) => caller.look_up = LookUpState::Failed,
        ReadResult::Found(found) => {
            (caller.look_up, caller.rejected) = (LookUpState::Answered, Some(found.into()))
        }
        ReadResult::Nothing => caller.look_up = LookUpState::Answered,
        ReadResult::Skipped => {}
    }
    caller.budget.spend(caller.started);
    caller.mode = caller.mode_to_join(|_| false);
    Ok(caller)
}

/// Step 2 alone: the entry, even if it may not be served; `None` also if it is unreadable.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn read_entry(call: Call<'_>) -> StoreResult<Option<Arc<StoredEntry>>> {
    match CallState::new(call).read_anyway().await {
        ReadResult::Failed(error) => Err(error),
        ReadResult::Found(found) => {
            Ok(Some(found.into()).filter(|found: &Arc<StoredEntry>| found.value().is_some()))
        }
        ReadResult::Nothing | ReadResult::Skipped => Ok(None),
    }
}

/// Step 2 alone: the value, if there is one to serve.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn peek<R: EntryReader>(call: Call<'_>, reader: &R) -> StoreResult<Option<R::Value>> {
    if let Ok(value) = look_for_copy(call, reader) {
        return Ok(Some(value));
    }
    let mut caller = CallState::new(call);
    let read = caller.read_anyway().await;
    peeked(caller, read, reader)
}

/// The answer of a read to a caller without a loader.
fn peeked<R: EntryReader>(
    caller: CallState<'_>,
    read: ReadResult,
    reader: &R,
) -> StoreResult<Option<R::Value>> {
    if let ReadResult::Failed(error) = read {
        return copy_while_down(caller.call, reader).map(Some).ok_or(error);
    }
    match caller.after_read(read, reader) {
        Lookup::Hit { value, .. } | Lookup::LocalHit(value) => Ok(Some(value)),
        Lookup::Miss(_) | Lookup::Failed(_) => Ok(None),
    }
}

/// Whether the caller runs inside a load of the same key.
fn is_reentrant(Call { state, key, .. }: Call<'_>) -> bool {
    LoadScope::current().is_some_and(|scope| scope.includes(state.store.store_id(), key))
}

impl<'a> CallState<'a> {
    /// The part of step 2 after the read.
    #[inline]
    pub(super) fn after_read<R: EntryReader>(self, read: ReadResult, reader: &R) -> Lookup<'a, R::Value> {
        // Most reads find a value to serve, and neither the caller nor the entry, which are large, is moved for it.
        match self.serve(&read, reader) {
            (freshness, Some((value, false))) => {
                Lookup::Hit { value, stale: freshness != Freshness::Fresh, refresh: None }
            }
            (freshness, value) => {
                self.after_other_read(read, freshness, value.map(|(value, _)| value), reader)
            }
        }
    }

    /// As [`after_read`](Self::after_read), where the read found nothing to serve, or a `value` that is due for a load in the background.
    #[inline(never)]
    fn after_other_read<R: EntryReader>(
        mut self,
        read: ReadResult,
        freshness: Freshness,
        value: Option<R::Value>,
        reader: &R,
    ) -> Lookup<'a, R::Value> {
        let Call { state, policy, key } = self.call;
        let found = match read {
            ReadResult::Found(found) => found,
            ReadResult::Failed(error) => {
                return match copy_while_down(self.call, reader) {
                    Some(value) => Lookup::Hit { value, stale: true, refresh: None },
                    None if policy.on_store_down == OnStoreDown::FailClosed => {
                        Lookup::Failed(Failure::Guard(Error::store("looking up the entry", key, error)))
                    }
                    None => self.missed(LookUpState::Failed),
                };
            }
            ReadResult::Skipped => return self.missed(LookUpState::NotMade),
            ReadResult::Nothing => return self.missed(LookUpState::Answered),
        };
        let Ok(entry) = &found.content else {
            self.rejected = Some(found.into());
            return self.missed(LookUpState::Answered);
        };
        if let Some(value) = value {
            (self.look_up, self.rejected) = (LookUpState::Answered, Some(found.into()));
            return Lookup::Hit {
                value,
                stale: freshness != Freshness::Fresh,
                refresh: Some(Box::new(self)),
            };
        }
        if entry.kind == EntryKind::Marker && entry.is_fresh(self.now()) {
            (self.look_up, self.mode, self.rejected) =
                (LookUpState::Answered, LoadMode::Probe, Some(found.into()));
            return Lookup::Miss(Box::new(self));
        }
        if freshness.is_at_once() {
            state.unreadable(key, &Unreadable::OtherType);
        }
        self.rejected = Some(found.into());
        self.mode = self.mode_to_join(|entry| reader.leads_others(entry));
        self.missed(LookUpState::Answered)
    }

    /// Whether the entry of this read may be served; its value, if it may be served at once and can be decoded; and whether a load in the
    /// background is due then.
    fn serve<R: EntryReader>(&self, read: &ReadResult, reader: &R) -> (Freshness, Option<(R::Value, bool)>) {
        let ReadResult::Found(found) = read else { return (Freshness::Expired, None) };
        let Ok(entry) = &found.content else { return (Freshness::Expired, None) };
        let now = self.now();
        let (freshness, value) = reader.read(entry, now, found.shared.as_ref(), Freshness::is_at_once);
        (freshness, value.map(|value| (value, self.is_refresh_due(freshness, entry, now))))
    }

    fn missed<V>(mut self, look_up: LookUpState) -> Lookup<'a, V> {
        self.look_up = look_up;
        self.budget.spend(self.started);
        Lookup::Miss(Box::new(self))
    }

    /// Whether an entry that is served is to be loaded anew in the background: it is stale or due for an early refresh, no recent refresh of
    /// it runs, and not too many loads wait for a permit.
    fn is_refresh_due(&self, freshness: Freshness, entry: &Entry, now: u64) -> bool {
        let Call { state, policy, .. } = self.call;
        let is_due = match freshness {
            Freshness::Fresh => {
                self.due_early == Some(entry.stored_at)
                    || policy.is_due_early(entry.stored_at, &entry.times(), now)
            }
            Freshness::Stale => true,
            Freshness::BackingOff | Freshness::StaleIfError | Freshness::Expired => false,
        };
        let refresh = || self.flight(LoadMode::BackgroundRefresh);
        is_due
            && !state.flights.has_younger(&refresh(), policy.longest_load())
            && has_short_queue(state, policy)
    }
}

/// Step 2 for the calls of one caller, which have the same guard and policy. Returns the look-ups in the order of the calls.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look_many<'a, R: EntryReader>(
    calls: Vec<Call<'a>>,
    reader: &R,
) -> Vec<Lookup<'a, R::Value>> {
    let begin = |call| {
        before_read(call, reader).map_continue(|due_early| CallState { due_early, ..CallState::new(call) })
    };
    let begun: Vec<_> = calls.into_iter().map(begin).collect();
    let mut reads = read_for(&begun).await.into_iter();
    let lookups = begun.into_iter().map(|begun| match begun {
        ControlFlow::Continue(caller) => match caller.after_read(next(&mut reads), reader) {
            // This key's own commands begin now, with a whole budget: it does not pay for the reads of the other keys.
            Lookup::Miss(mut caller) if caller.look_up == LookUpState::Answered => {
                caller.budget = caller.call.policy.budget();
                Lookup::Miss(caller)
            }
            lookup => lookup,
        },
        ControlFlow::Break(lookup) => lookup,
    });
    lookups.collect()
}

/// Step 2 alone for many calls: the values that may be served, in the order of the calls.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn peek_many<'a, R: EntryReader>(
    calls: Vec<Call<'a>>,
    reader: &R,
) -> Vec<StoreResult<Option<R::Value>>> {
    let begin = |call| match look_for_copy(call, reader) {
        Ok(copy) => ControlFlow::Break(copy),
        Err(_) => ControlFlow::Continue(CallState::new(call)),
    };
    let begun: Vec<_> = calls.into_iter().map(begin).collect();
    let mut reads = read_for(&begun).await.into_iter();
    let peeked = begun.into_iter().map(|begun| match begun {
        ControlFlow::Continue(caller) => peeked(caller, next(&mut reads), reader),
        ControlFlow::Break(copy) => Ok(Some(copy)),
    });
    peeked.collect()
}

/// Reads for the callers that need a read, and returns the reads in the order of these callers. All have one guard and policy.
async fn read_for<A>(callers: &[ControlFlow<A, CallState<'_>>]) -> Vec<ReadResult> {
    let mut keys = Vec::with_capacity(callers.len());
    let mut terms = None;
    for caller in callers {
        if let ControlFlow::Continue(CallState { call: Call { state, policy, key }, budget, .. }) = caller {
            terms.get_or_insert_with(|| (*state, *policy, budget.next()));
            keys.push(Key::clone(key));
        }
    }
    let Some((state, policy, within)) = terms else { return Vec::new() };
    match within {
        Some(within) => read_many(state, policy, &keys, within).await,
        None => keys.iter().map(|_| timed_out()).collect(),
    }
}

/// The read of the next caller; there are as many reads as callers.
fn next(reads: &mut impl Iterator<Item = ReadResult>) -> ReadResult {
    reads.next().unwrap_or_else(timed_out)
}

fn timed_out() -> ReadResult {
    ReadResult::Failed(StoreError::new(StoreErrorKind::TimedOut))
}

/// The fresh value of a copy. If there is none to serve, the `Err` is when the copy was stored, if it is due for an early refresh: it is
/// not served, because the fleet may have a newer value.
type CopyLookup<V> = Result<V, Option<u64>>;

/// Looks for a copy that may be served to this caller.
fn look_for_copy<R: EntryReader>(call: Call<'_>, reader: &R) -> CopyLookup<R::Value> {
    let Call { state, policy, key } = call;
    if !policy.has_copies() {
        return Err(None);
    }
    match state.local.copy(key, policy.local_for) {
        Some((copy, at)) if has_checked_tags(call, &copy.entry) => decide(state, policy, &copy, at, reader),
        _ => Err(None),
    }
}

/// A hit from memory on the fast path, which makes no key and no future. Finds less than a look-up does: nothing inside a load, and
/// nothing under policies whose copies need more checks (tags, early refreshes, trials).
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
    let (copy, at) = state.local.copy(&probe, policy.local_for)?;
    let value = decide(state, policy, &copy, at, reader).ok()?;
    state.hit_at_once(&policy.counters, probe);
    Some(value)
}

/// Like [`hit_at_once`], for a caller that already has its key and counts the hit itself.
#[inline]
pub(crate) fn hit_at_once_by_key<R: EntryReader>(call: Call<'_>, reader: &R) -> Option<R::Value> {
    let Call { state, policy, key } = call;
    if !may_hit_at_once(policy) || policy.has_tags(key) {
        return None;
    }
    let (copy, at) = state.local.copy(key, policy.local_for)?;
    decide(state, policy, &copy, at, reader).ok()
}

#[inline]
fn may_hit_at_once(policy: &Policy) -> bool {
    policy.has_copies()
        && !(policy.shadow || policy.is_tagged() || policy.refreshes_early() || LoadScope::is_inside())
}

#[inline]
fn decide<R: EntryReader>(
    state: &GuardState,
    policy: &Policy,
    copy: &LocalCopy,
    at: Instant,
    reader: &R,
) -> CopyLookup<R::Value> {
    let copy = &copy.entry;
    let Ok(entry) = &copy.content else { return Err(None) };
    let (now, shared) = (state.store.clock_at(at), copy.shared.as_ref());
    let mut is_due_early = false;
    let (_, value) = reader.read(entry, now, shared, |freshness| {
        is_due_early =
            freshness == Freshness::Fresh && policy.is_due_early(entry.stored_at, &entry.times(), now);
        freshness == Freshness::Fresh && !is_due_early
    });
    value.ok_or_else(|| is_due_early.then_some(entry.stored_at))
}

/// Whether the copy was checked for all tags of this caller's policy. It was checked for the tags of the policy that it was read under.
#[inline]
fn has_checked_tags(call: Call<'_>, copy: &StoredEntry) -> bool {
    call.tag_keys().iter().all(|tag| copy.checked.contains(tag))
}

/// A copy that may be served while the store does not answer.
fn copy_while_down<R: EntryReader>(call: Call<'_>, reader: &R) -> Option<R::Value> {
    let Call { state, policy, key } = call;
    if policy.local_while_down.is_zero() {
        return None;
    }
    let copy = &state.local.copy_while_down(key, policy.local_for, policy.local_while_down)?.entry;
    let entry = copy.content.as_ref().ok().filter(|_| has_checked_tags(call, copy))?;
    let (now, shared) = (state.store.now(), copy.shared.as_ref());
    reader.read(entry, now, shared, Freshness::is_at_once).1
}
