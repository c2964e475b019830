//! One caller's state, its look-up, and how it judges the result. Step 2. Knows no Redis and no HTTP.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::queued_read::{FirstRead, SharedLookUp, read};
use crate::error::Error;
use crate::flight::order::Arrival;
use crate::guard_state::{GuardState, ReadResult, RejectedEntry, SharedRead, Stored};
use crate::key::Key;
use crate::key::flight::{FlightKey, LoadMode};
use crate::policy::budget::Budget;
use crate::policy::{OnStoreDown, Policy};
use crate::store::{StoreError, StoreErrorKind};
use crate::value::entry::{Entry, EntryKind};
use crate::value::freshness::Freshness;
use crate::value::reader::{Boxed, EntryReader, Room};

/// One caller's inputs: guard state, policy, key.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) state: &'a Arc<GuardState>,
    pub(crate) policy: &'a Arc<Policy>,
    pub(crate) key: &'a Key,
}

/// An [`Call`] plus its start time, remaining budget and the entry that it has rejected.
pub(crate) struct CallState<'a> {
    pub(crate) ask: Call<'a>,
    pub(crate) started: Instant,
    pub(crate) came: Arrival,
    pub(crate) budget: Budget,
    /// The entry that this caller has read and will not serve as it is.
    /// Boxed, because a caller is moved several times on each hit.
    pub(crate) rejected: Option<Box<RejectedEntry>>,
    /// Whether the store has answered its look-up.
    pub(crate) looked: bool,
}

/// What a read found: for this caller alone, or for all callers of its queue.
pub(crate) enum Read {
    Own(Result<Option<Stored>, StoreError>),
    Shared(Result<Option<Arc<SharedRead>>, StoreError>),
    LeftOut,
}

impl Read {
    /// The store's error, if it did not answer.
    pub(crate) fn error(&self) -> Option<&StoreError> {
        match self {
            Self::Own(read) => read.as_ref().err(),
            Self::Shared(read) => read.as_ref().err(),
            Self::LeftOut => None,
        }
    }

    /// Whether the store has answered.
    pub(crate) fn is_answered(&self) -> bool {
        !matches!(self, Self::LeftOut) && self.error().is_none()
    }

    /// The entry that was found, as a rejected one.
    pub(crate) fn into_seen(self, key: &Key) -> Option<RejectedEntry> {
        match self {
            Self::Own(Ok(Some(stored))) => Some(RejectedEntry::of(stored, key)),
            Self::Shared(Ok(Some(shared))) => Some(RejectedEntry::of(shared.stored.clone(), key)),
            Self::Own(Ok(None) | Err(_)) | Self::Shared(Ok(None) | Err(_)) | Self::LeftOut => None,
        }
    }
}

/// How this caller judges the result of its look-up.
pub(crate) enum Judged<V> {
    Hit {
        value: V,
        stale: bool,
        refresh: bool,
    },
    Miss,
    /// The store did not answer.
    Unread,
    Marked,
    Down(Error),
}

/// How a caller whose look-up failed treats an older entry that is returned later.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unread {
    /// The look-up has not failed.
    No,
    /// The caller judges the entry as its look-up would have.
    Unjudged,
    /// The caller wants a new load whatever the entry is.
    Unwanted,
}

impl<'a> CallState<'a> {
    pub(crate) fn new(ask: Call<'a>) -> Self {
        let (started, came, budget) = (Instant::now(), Arrival::now(), ask.policy.budget());
        Self { ask, started, came, budget, rejected: None, looked: false }
    }

    /// The store's clock when this caller came: one look at a clock per hit is enough.
    pub(crate) fn now(&self) -> u64 {
        self.ask.state.store.clock_at(self.started)
    }

    pub(crate) fn flight(&self, mode: LoadMode) -> FlightKey {
        FlightKey { key: self.ask.key.clone(), mode }
    }

    /// Step 2 for a caller that joins a flight if there is one, and then need not read.
    pub(crate) fn look_up<R: Room>(&self) -> impl Future<Output = (Read, Option<FirstRead<'a>>)> {
        self.look_up_past::<R>(false)
    }

    /// Step 2 for a caller that wants to know what is stored, also during a load.
    pub(crate) async fn look_up_anyway<R: Room>(&self) -> Read {
        let (read_for_all, _first) = self.look_up_past::<R>(true).await;
        let Call { state, policy, key } = self.ask;
        match (read_for_all, self.budget.next()) {
            // The reader of the queue skipped the read, because its callers join a flight.
            (Read::LeftOut, Some(within)) => {
                let tags = policy.tag_keys(&state.namespace);
                Read::Own(Box::pin(read(state, key, &tags, within)).await)
            }
            (read, _) => read,
        }
    }

    /// Callers that ask at the same moment share a read. A lone caller also gets a [`FirstRead`], which holds back the callers
    /// that queue behind it until it is dropped.
    async fn look_up_past<R: Room>(&self, past_flights: bool) -> (Read, Option<FirstRead<'a>>) {
        let Call { state, policy, key } = self.ask;
        let Some(within) = self.budget.next() else {
            return (Read::Own(Err(StoreError::new(StoreErrorKind::TimedOut))), None);
        };
        let tags = policy.tag_keys(&state.namespace);
        let shared = SharedLookUp { state, key, tags: &tags, past_flights };
        match shared.queue_up(within) {
            Ok(first) => (Read::Own(R::keep(read(state, key, &tags, within)).await), Some(first)),
            Err((queued, is_elsewhere)) => {
                let nothing = || ReadResult::Read(Err(StoreError::new(StoreErrorKind::Unavailable)));
                // A timer is needed if callers with another policy wait longer than this one, if the budget does not cover the
                // lone read and the queue's own read, or if the reader's runtime may stand still. (Only then: a timer costs time.)
                let twice = policy.command_timeout.saturating_mul(2);
                let read = if policy.command_timeout < state.longest_command()
                    || twice > policy.coordination_budget
                    || is_elsewhere
                {
                    Box::pin(shared.wait_for_reader(queued, is_elsewhere, self.budget.left())).await
                } else {
                    queued.await
                };
                let read = match read.unwrap_or_else(nothing) {
                    ReadResult::Read(read) => Read::Shared(read),
                    ReadResult::LeftOut => Read::LeftOut,
                };
                match policy.is_tagged() {
                    true => (Box::pin(self.read_with_tags(read, &tags, within)).await, None),
                    false => (read, None),
                }
            }
        }
    }

    /// Reads again if the shared read did not check all tags of this caller's policy.
    async fn read_with_tags(&self, shared: Read, tags: &[Key], within: Duration) -> Read {
        let Call { state, key, .. } = self.ask;
        let fits = |shared: &SharedRead| tags.iter().all(|tag| shared.tags.contains(tag));
        match &shared {
            Read::Shared(Ok(Some(found))) if !fits(found) => Read::Own(read(state, key, tags, within).await),
            _ => shared,
        }
    }

    pub(crate) fn judge<O: EntryReader>(&mut self, read: Read, open: &O) -> Judged<O::Value> {
        let Call { state, policy, key } = self.ask;
        let now = self.now();
        self.looked = read.is_answered();
        let (entry, opened) = match read {
            Read::Own(Ok(Some(Stored::Entry(mut entry)))) => {
                let (stale, refresh) = self.serving(open.serves(&entry, now), &entry, now);
                if refresh {
                    self.rejected = Some(Box::new(RejectedEntry::entry(entry.clone(), key)));
                }
                match stale.and_then(|stale| Some((open.open(&mut entry, now)?, stale))) {
                    Some((value, stale)) => return Judged::Hit { value, stale, refresh },
                    None => (entry, stale.is_some()),
                }
            }
            Read::Shared(Ok(Some(shared))) => match &shared.stored {
                Stored::Entry(entry) => {
                    let serves = open.serves_shared(entry, now, &shared.opened);
                    let (stale, refresh) = self.serving(serves, entry, now);
                    if refresh {
                        self.rejected = Some(Box::new(RejectedEntry::entry(entry.clone(), key)));
                    }
                    let value =
                        stale.and_then(|stale| Some((open.open_shared(entry, now, &shared.opened)?, stale)));
                    match value {
                        Some((value, stale)) => return Judged::Hit { value, stale, refresh },
                        None => (entry.clone(), stale.is_some()),
                    }
                }
                unusable => return self.missed(Some(RejectedEntry::of(unusable.clone(), key))),
            },
            Read::Own(Ok(Some(unusable))) => return self.missed(Some(RejectedEntry::of(unusable, key))),
            Read::Own(Ok(None)) | Read::Shared(Ok(None)) | Read::LeftOut => return self.missed(None),
            Read::Own(Err(error)) | Read::Shared(Err(error)) => {
                if policy.on_store_down == OnStoreDown::FailClosed {
                    return Judged::Down(Error::store("looking up the entry", key, error));
                }
                self.budget.spend(self.started);
                return Judged::Unread;
            }
        };
        let marked = entry.kind == EntryKind::Marker && entry.is_fresh(now);
        self.rejected = Some(Box::new(RejectedEntry::entry(entry, key)));
        if marked {
            return Judged::Marked;
        }
        if opened {
            state.unreadable(key, &"sound, and not what is asked for");
        }
        self.budget.spend(self.started);
        Judged::Miss
    }

    /// Whether `entry` may be served at once, stale or not, and whether it should then be loaded anew.
    fn serving(&self, serves: Freshness, entry: &Entry, now: u64) -> (Option<bool>, bool) {
        let Call { state, policy, .. } = self.ask;
        let (stale, due) = match serves {
            Freshness::Fresh => (false, policy.is_due_early(entry.stored_at, &entry.expiry, now)),
            Freshness::Stale => (true, true),
            Freshness::BackingOff => (true, false),
            Freshness::StaleIfError | Freshness::Expired => return (None, false),
        };
        let is_refreshed =
            || state.flights.has_younger(&self.flight(LoadMode::BackgroundRefresh), policy.longest_load());
        (Some(stale), due && !is_refreshed())
    }

    /// The older value that may be served because no current one can be had.
    pub(crate) fn stand_in<O: EntryReader>(&self, open: &O) -> Option<O::Value> {
        let now = self.ask.state.store.now();
        let value = self.rejected.as_ref()?.value.as_ref().filter(|value| open.stands_in(value, now))?;
        open.open(&mut value.clone(), now)
    }

    /// As [`stand_in`](Self::stand_in). A caller that joined a flight without a look-up makes it now; such callers share one read.
    pub(crate) async fn find_stand_in<O: EntryReader>(&self, open: &O) -> Option<O::Value> {
        if self.rejected.is_some() {
            return self.stand_in(open);
        }
        let mut caller = Self { rejected: None, ..*self };
        caller.see().await;
        caller.stand_in(open)
    }

    /// Reads the stored entry if this caller has not done so: it may stand in, and a load may revalidate it.
    pub(crate) async fn see(&mut self) {
        if self.rejected.is_none() && !self.looked {
            let read = self.look_up_anyway::<Boxed>().await;
            self.rejected = read.into_seen(self.ask.key).map(Box::new);
        }
    }

    /// Returns the older value once `soft_timeout` has passed; pending for ever if there is no such value or timeout.
    pub(crate) async fn soft_timeout<O: EntryReader>(&self, open: &O) -> O::Value {
        if let Some(soft_timeout) = self.ask.policy.soft_timeout {
            sleep_until(self.started + soft_timeout).await;
            if let Some(value) = self.find_stand_in(open).await {
                return value;
            }
        }
        std::future::pending().await
    }

    /// The mode to join. A caller that rejects a value which others are served, or which leads them to a value, loads in
    /// [`LoadMode::ForcedReload`], so that those others do not wait for this load.
    pub(crate) fn mode(&self, leads_others: impl FnOnce(&Entry) -> bool) -> LoadMode {
        let Some(value) = self.rejected.as_ref().and_then(|seen| seen.value.as_ref()) else {
            return LoadMode::Leased;
        };
        let is_served = value.serves(self.now()).is_at_once();
        if is_served || leads_others(value) { LoadMode::ForcedReload } else { LoadMode::Leased }
    }

    /// Whether this caller's failed look-up would have found and rejected this entry.
    pub(crate) fn would_have_passed<O: EntryReader>(&self, open: &O, entry: &Entry, unread: Unread) -> bool {
        let now = self.now();
        let wants_it = || unread == Unread::Unjudged && open.serves(entry, now) != Freshness::Expired;
        unread != Unread::No && entry.stored_at < now && !wants_it()
    }

    /// Whether this caller accepts this entry in place of a value that could not be had.
    pub(crate) fn takes<O: EntryReader>(&self, open: &O, entry: &Entry) -> bool {
        open.stands_in(entry, self.now()) || open.serves(entry, self.now()) != Freshness::Expired
    }

    fn missed<V>(&mut self, seen: Option<RejectedEntry>) -> Judged<V> {
        self.rejected = seen.map(Box::new);
        self.budget.spend(self.started);
        Judged::Miss
    }
}
