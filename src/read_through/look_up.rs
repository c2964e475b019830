//! A caller's look-up, and how the caller judges the result. Step 2. Knows no Redis and no HTTP.

use std::sync::Arc;

use super::batch::Member;
use super::call::{Call, CallState, LookUpState};
use super::local::{CopyLookup, copy_while_down, look_for_copy};
use crate::error::{Error, Failure};
use crate::guard_state::ReadResult;
use crate::key::flight::LoadMode;
use crate::loader::nesting::LoadScope;
use crate::policy::OnStoreDown;
use crate::store::StoreError;
use crate::value::entry::{Entry, EntryKind, Unreadable};
use crate::value::freshness::Freshness;
use crate::value::reader::EntryReader;
use crate::value::stored::StoredEntry;

/// The result of step 2.
pub(crate) enum Lookup<'a, V> {
    /// Step 8 from this process's memory.
    LocalHit(V),
    /// Step 8 from the store. If a background load is due, the caller brings a loader for `refresh`.
    Hit { value: V, stale: bool, refresh: Option<Box<CallState<'a>>> },
    /// There is nothing to serve: the caller brings a loader.
    Miss(CallState<'a>),
    /// There is no value, and the caller may not load one.
    Failed(Failure),
}

impl<V> Lookup<'_, V> {
    /// Loads this key together with those of the member's batch.
    pub(crate) fn join_batch(&mut self, member: &Member) {
        match self {
            Self::Miss(caller) => caller.batch = Some(Box::new(member.attempt())),
            Self::Hit { refresh: Some(caller), .. } => caller.batch = Some(Box::new(member.attempt())),
            Self::LocalHit(_) | Self::Hit { refresh: None, .. } | Self::Failed(_) => {}
        }
    }
}

/// Step 2: is there something to serve? Skips the look-up if the key has a flight to join.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look<'a, R: EntryReader>(call: Call<'a>, reader: &R) -> Lookup<'a, R::Value> {
    let mut caller = match before_read(call, reader) {
        BeforeRead::Reads(caller) => caller,
        BeforeRead::Done(looked) => return looked,
    };
    let read = caller.read().await;
    caller.after_read(read, reader)
}

/// Step 2 before its read.
pub(super) enum BeforeRead<'a, A> {
    /// The answer, without a read.
    Done(A),
    Reads(CallState<'a>),
}

/// The part of step 2 before the read.
pub(super) fn before_read<'a, R: EntryReader>(
    call: Call<'a>,
    reader: &R,
) -> BeforeRead<'a, Lookup<'a, R::Value>> {
    let Call { state, key, .. } = call;
    if is_reentrant(call) {
        return BeforeRead::Done(Lookup::Failed(Failure::Guard(Error::reentrant(key))));
    }
    let due_early = match look_for_copy(call, reader) {
        CopyLookup::Fresh(value) => return BeforeRead::Done(Lookup::LocalHit(value)),
        CopyLookup::DueEarly(stored_at) => Some(stored_at),
        CopyLookup::Nothing => None,
    };
    let caller = CallState { due_early, ..CallState::new(call) };
    // A guard that is shut down sends the store no more look-ups.
    let joins_at_once = state.is_closed()
        || state.flights.any() && state.flights.has_connected(&caller.flight(LoadMode::Leased));
    if joins_at_once { BeforeRead::Done(Lookup::Miss(caller)) } else { BeforeRead::Reads(caller) }
}

/// Step 2 for a caller that wants a load whatever is stored.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look_past(call: Call<'_>) -> Result<CallState<'_>, Failure> {
    let Call { state, policy, key } = call;
    let mut caller = CallState::new(call);
    if is_reentrant(call) {
        return Err(Failure::Guard(Error::reentrant(key)));
    }
    if state.is_closed() {
        return Ok(caller);
    }
    match caller.read().await {
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
pub(crate) async fn read_entry(call: Call<'_>) -> Result<Option<Arc<StoredEntry>>, StoreError> {
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
pub(crate) async fn peek<R: EntryReader>(call: Call<'_>, reader: &R) -> Result<Option<R::Value>, StoreError> {
    if let Some(value) = copied(call, reader) {
        return Ok(Some(value));
    }
    let mut caller = CallState::new(call);
    let read = caller.read_anyway().await;
    peeked(caller, read, reader)
}

/// The fresh value of a copy.
pub(super) fn copied<R: EntryReader>(call: Call<'_>, reader: &R) -> Option<R::Value> {
    match look_for_copy(call, reader) {
        CopyLookup::Fresh(value) => Some(value),
        CopyLookup::DueEarly(_) | CopyLookup::Nothing => None,
    }
}

/// What a caller without a loader makes of its read.
pub(super) fn peeked<R: EntryReader>(
    caller: CallState<'_>,
    read: ReadResult,
    reader: &R,
) -> Result<Option<R::Value>, StoreError> {
    if let ReadResult::Failed(error) = read {
        return copy_while_down(caller.call, reader).map(Some).ok_or(error);
    }
    match caller.judge(read, reader) {
        Lookup::Hit { value, .. } | Lookup::LocalHit(value) => Ok(Some(value)),
        Lookup::Miss(_) | Lookup::Failed(_) => Ok(None),
    }
}

/// Whether the caller runs inside a load of the same key.
fn is_reentrant(Call { state, key, .. }: Call<'_>) -> bool {
    LoadScope::current().is_some_and(|scope| scope.includes(state.store.place(), key))
}

impl<'a> CallState<'a> {
    /// The part of step 2 after the read.
    pub(super) fn after_read<R: EntryReader>(self, read: ReadResult, reader: &R) -> Lookup<'a, R::Value> {
        if matches!(read, ReadResult::Failed(_))
            && let Some(value) = copy_while_down(self.call, reader)
        {
            return Lookup::Hit { value, stale: true, refresh: None };
        }
        self.judge(read, reader)
    }

    fn judge<R: EntryReader>(mut self, read: ReadResult, reader: &R) -> Lookup<'a, R::Value> {
        let Call { state, policy, key } = self.call;
        let found = match read {
            ReadResult::Found(found) => found,
            ReadResult::Failed(error) if policy.on_store_down == OnStoreDown::FailClosed => {
                return Lookup::Failed(Failure::Guard(Error::store("looking up the entry", key, error)));
            }
            ReadResult::Failed(_) => return self.missed(LookUpState::Failed),
            ReadResult::Skipped => return self.missed(LookUpState::NotMade),
            ReadResult::Nothing => return self.missed(LookUpState::Answered),
        };
        let Ok(entry) = &found.content else {
            self.rejected = Some(found.into());
            return self.missed(LookUpState::Answered);
        };
        let (now, shared) = (self.now(), found.shared.as_ref());
        let freshness = reader.serves(entry, now, shared);
        if freshness.is_at_once() {
            let stale = freshness != Freshness::Fresh;
            if let Some(value) = reader.open(entry, now, shared) {
                let refresh = self.is_refresh_due(freshness, entry, now).then(|| {
                    (self.look_up, self.rejected) = (LookUpState::Answered, Some(found.into()));
                    Box::new(self)
                });
                return Lookup::Hit { value, stale, refresh };
            }
        }
        if entry.kind == EntryKind::Marker && entry.is_fresh(now) {
            (self.look_up, self.mode, self.rejected) =
                (LookUpState::Answered, LoadMode::Probe, Some(found.into()));
            return Lookup::Miss(self);
        }
        if freshness.is_at_once() {
            state.unreadable(key, &Unreadable::OtherType);
        }
        self.rejected = Some(found.into());
        self.mode = self.mode_to_join(|entry| reader.leads_others(entry));
        self.missed(LookUpState::Answered)
    }

    fn missed<V>(mut self, look_up: LookUpState) -> Lookup<'a, V> {
        self.look_up = look_up;
        self.budget.spend(self.started);
        Lookup::Miss(self)
    }

    /// Whether an entry that is served should be loaded anew.
    fn is_refresh_due(&self, freshness: Freshness, entry: &Entry, now: u64) -> bool {
        let Call { state, policy, .. } = self.call;
        let is_due = match freshness {
            Freshness::Fresh => {
                self.due_early == Some(entry.stored_at)
                    || policy.is_due_early(entry.stored_at, &entry.expiry, now)
            }
            Freshness::Stale => true,
            Freshness::BackingOff | Freshness::StaleIfError | Freshness::Expired => false,
        };
        let refresh = || self.flight(LoadMode::BackgroundRefresh);
        is_due && !state.flights.has_younger(&refresh(), policy.longest_load())
    }
}
