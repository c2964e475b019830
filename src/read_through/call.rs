//! One caller: its inputs, and its state on the way through the steps. Knows no Redis and no HTTP.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::batch::Attempt;
use crate::flight::CallerOrder;
use crate::guard_state::{GuardState, ReadResult, SoloRead};
use crate::key::{FlightKey, Key, LoadMode};
use crate::observe::Outcome;
use crate::policy::{Budget, Policy};
use crate::value::entry::{Entry, Freshness};
use crate::value::{EntryReader, StoredEntry};

/// One caller's inputs: guard state, policy, key.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) state: &'a Arc<GuardState>,
    pub(crate) policy: &'a Arc<Policy>,
    pub(crate) key: &'a Key,
}

/// Whether each caller receives the value of its own load: on trial, or while the guard is bypassed.
pub(crate) fn passes_by(state: &GuardState, policy: &Policy) -> bool {
    policy.shadow || state.is_bypassed()
}

impl Call<'_> {
    /// The tags that an entry of this caller must have.
    #[inline]
    pub(crate) fn tag_keys(self) -> Vec<Key> {
        self.policy.tag_keys(&self.state.namespace, self.key)
    }

    /// Counts and logs how the caller was answered.
    pub(crate) fn count_answer(self, outcome: Outcome) {
        self.state.answered(self.policy.counters.requests(), self.key, outcome);
    }
}

/// A [`Call`] on its way through the steps: its start time, remaining budget, look-up, and the entry that it has rejected.
pub(crate) struct CallState<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) started: Instant,
    pub(crate) came: CallerOrder,
    pub(crate) budget: Budget,
    pub(crate) look_up: LookUpState,
    /// The entry that this caller has read and does not serve as it is.
    pub(crate) rejected: Option<Arc<StoredEntry>>,
    /// Held until this caller has tried to join a flight, so that the callers queued behind its read find the flight.
    pub(super) solo_read: Option<SoloRead<'a>>,
    /// The kind of flight to join.
    pub(crate) mode: LoadMode,
    /// This key's attempt in the batch, if the caller loads several keys together.
    pub(crate) batch: Option<Box<Attempt>>,
    /// When the local copy that this caller has found was stored, if the copy is due for an early refresh.
    pub(super) due_early: Option<u64>,
}

/// Whether the store has answered a caller's look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookUpState {
    /// The caller joins a flight without a look-up. Or its look-up failed, and the caller has since rejected an older entry that a
    /// flight returned.
    NotMade,
    Answered,
    Failed,
}

impl<'a> CallState<'a> {
    pub(crate) fn new(call: Call<'a>) -> Self {
        Self {
            call,
            started: Instant::now(),
            came: CallerOrder::now(),
            budget: call.policy.budget(),
            look_up: LookUpState::NotMade,
            rejected: None,
            solo_read: None,
            mode: LoadMode::Leased,
            batch: None,
            due_early: None,
        }
    }

    /// The time on the store's clock when this caller came. Computed from `started`, so that a hit reads the clock only once.
    pub(crate) fn now(&self) -> u64 {
        self.call.state.store.clock_at(self.started)
    }

    pub(crate) fn flight(&self, mode: LoadMode) -> FlightKey {
        FlightKey { key: self.call.key.clone(), mode }
    }

    /// Makes this caller wait for no other caller, and no other caller wait for it.
    pub(crate) fn unattended(mut self: Box<Self>) -> Box<Self> {
        self.mode = LoadMode::Probe;
        self
    }

    /// The older value that this caller has read, if it may be served instead of a current one that is not available.
    pub(crate) fn stand_in<R: EntryReader>(&self, reader: &R) -> Option<R::Value> {
        let now = self.call.state.store.now();
        let value = self.rejected.as_ref()?.value().filter(|value| reader.stands_in(value, now))?;
        reader.open(value, now, None)
    }

    /// Like [`stand_in`](Self::stand_in), but a caller that joined a flight without a look-up makes its look-up now. Such callers share one
    /// read.
    pub(crate) async fn find_stand_in<R: EntryReader>(&self, reader: &R) -> Option<R::Value> {
        if self.rejected.is_some() {
            return self.stand_in(reader);
        }
        let mut caller = Self { rejected: None, solo_read: None, batch: None, ..*self };
        caller.see().await;
        caller.stand_in(reader)
    }

    /// Reads the stored entry if this caller has not read it yet: it may stand in, and a load may revalidate it.
    pub(crate) async fn see(&mut self) {
        if self.rejected.is_none()
            && self.look_up != LookUpState::Answered
            && let ReadResult::Found(found) = self.read_anyway().await
        {
            self.rejected = Some(found.into());
        }
    }

    /// Returns the older value once `soft_timeout` has passed; stays pending if there is no such value or no timeout.
    pub(crate) async fn soft_timeout<R: EntryReader>(&self, reader: &R) -> R::Value {
        if let Some(soft_timeout) = self.call.policy.soft_timeout {
            sleep_until(self.started + soft_timeout).await;
            if let Some(value) = self.find_stand_in(reader).await {
                return value;
            }
        }
        std::future::pending().await
    }

    /// The kind of flight to join. If other callers may be served the entry that this caller rejects, or find their own values through
    /// that entry (`leads_others`), this caller loads in [`LoadMode::ForcedReload`], so that those callers do not wait for this load.
    pub(crate) fn mode_to_join(&self, leads_others: impl FnOnce(&Entry) -> bool) -> LoadMode {
        let Some(value) = self.rejected.as_ref().and_then(|rejected| rejected.value()) else {
            return LoadMode::Leased;
        };
        let is_served = value.serves(self.now()).is_at_once();
        if is_served || leads_others(value) { LoadMode::ForcedReload } else { LoadMode::Leased }
    }

    /// Whether this caller's look-up, which failed, would have found this entry and rejected it.
    pub(crate) fn would_have_passed<R: EntryReader>(&self, reader: &R, entry: &Entry) -> bool {
        let now = self.now();
        self.look_up == LookUpState::Failed
            && entry.stored_at < now
            && reader.serves(entry, now, None) == Freshness::Expired
    }

    /// Whether this caller accepts this entry instead of a current value that is not available.
    pub(crate) fn takes<R: EntryReader>(&self, reader: &R, entry: &Entry) -> bool {
        reader.stands_in(entry, self.now()) || reader.serves(entry, self.now(), None) != Freshness::Expired
    }

    /// Remembers an entry of a flight's outcome as rejected.
    pub(crate) fn reject(&mut self, entry: &Entry) {
        self.rejected = Some(Arc::new(StoredEntry::new(Ok(entry.clone()))));
    }
}
