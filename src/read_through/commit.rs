//! The end of a load, step 7: decides what its result means for its waiters and the fleet, then commits it to the store and answers the
//! waiters.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::flight_task::{FlightTask, LoadStart, let_go_since};
use super::lease::Lease;
use super::read::EntryRead;
use crate::flight::SentAt;
use crate::guard_state::GuardState;
use crate::key::Key;
use crate::loader::{LoadOutput, LoadResult};
use crate::local::Ticket;
use crate::observe::{Count, GuardCount, log, warn_if};
use crate::store::protocol::ChangedName;
use crate::store::{OlderEntry, StoreError, StoreErrorKind, TokenCheck};
use crate::value::entry::{
    Encoding, Entry, EntryKind, Expiry, Lifetimes, NEVER, Packed, Storage, TagId, TagList, Unreadable,
    Unstored,
};
use crate::value::{FlightOutcome, StoredEntry};

/// If the origin asks to be left alone, it is so for at most this many times `back_off`.
const MOST_BACK_OFFS: u32 = 60;

impl FlightTask {
    /// Step 7: publishes the result to the fleet, then to the waiters of this process.
    pub(crate) async fn end(
        mut self,
        loaded: LoadOutput,
        took: Duration,
        start: LoadStart,
        lease: Option<Lease>,
    ) {
        self.stop_joins(&loaded.result);
        let LoadOutput { result, delivery, rest, .. } = loaded;
        self.rest = rest;
        if matches!(result, LoadResult::OnlyForCaller) {
            delivery.settle(&FlightOutcome::Invalidated);
            self.leader.finish(FlightOutcome::Invalidated);
            if let Some(lease) = lease {
                lease.hand_over(0).await;
            }
            return;
        }
        let sent_at = start.sent_at;
        // If the lease has been lost since the load began, a change may have ended the lease.
        let if_lost = if start.had_lease { Storage::NotStored } else { Storage::Unleased };
        let turn = self.batch_turn(lease.is_some()).await;
        let publication = self.classify(result, took, start, lease.is_some()).await;
        let Self { state, policy, flight, leader, rejected, budget, .. } = self;
        let publication = &publication;
        // The last moment at which the lease was certainly held: no other process had invalidated the key before it.
        let confirmed = lease.as_ref().map(Lease::confirmed);
        let mut fleet_notification = pin!(publication.notify_fleet(lease, &flight.key, rejected.as_deref()));
        // The store is notified first, so that the next request hits; but the waiters wait for that only within the first
        // caller's budget. If the budget runs out, they are answered first and the commit goes on below.
        let check = timeout(budget.left(), &mut fleet_notification).await.ok();
        // An unreadable entry counts as well: other processes may be able to read it.
        let replaces =
            rejected.as_ref().is_some_and(|rejected| rejected.value().is_some() || rejected.content.is_err());
        if let Some(check) = check {
            publication.keep_copy(&state, &flight.key, check, (sent_at, replaces));
        }
        let late = check.is_none().then(|| state.late_commits.begin(&flight.key, policy.lease));
        if let Some(current) = publication.current_at(check.flatten(), sent_at, confirmed) {
            let_go_since(&leader, current);
        }
        let outcome = publication.for_waiters(check.flatten(), if_lost);
        delivery.settle(&outcome);
        leader.finish(outcome);
        drop(turn);
        if let Some(_until_its_answer) = late {
            policy.count(Count::budget_exceeded);
            let check = fleet_notification.await;
            publication.keep_copy(&state, &flight.key, check, (sent_at, replaces));
        }
    }

    /// Callers that come from here on make a look-up instead of joining. As soon as the store has executed this load's commit, another
    /// process may change the resource, before this process has the commit's reply. Such a look-up is sent after the commit on the same
    /// connection, so it sees the change.
    ///
    /// Exception: callers may join an uncacheable load until its marker is stored. Such a caller loads for itself at once. With a look-up
    /// in between, it would find no marker and wait for another load.
    fn stop_joins(&self, result: &LoadResult) {
        let loads_alone = matches!(result, LoadResult::Uncacheable { .. }) && !self.is_refresh();
        if !loads_alone {
            self.leader.detach();
        }
        self.note_waits();
        if loads_alone {
            self.leader.announce_to_all(FlightOutcome::Uncacheable);
        }
    }

    /// Decides what a load's result means. Before that, reads the ids of the tags again, and the older value if that may stand in.
    async fn classify(
        &mut self,
        mut result: LoadResult,
        took: Duration,
        start: LoadStart,
        is_leased: bool,
    ) -> Publication {
        let is_known = start.tags.is_ok();
        let mut tags = start.tags.unwrap_or_default();
        let (mut is_outdated, mut ticket) = (false, None);
        let has_own = matches!(&result, LoadResult::Value { tags, .. } if !tags.is_empty());
        if start.journal_entry.is_some() && !has_own {
            self.policy.counters.added_no_tags();
        }
        if let LoadResult::Value { tags: late, lifetimes, .. } = &mut result {
            let mut late = std::mem::take(late);
            late.retain(|late| tags.iter().all(|tagged| tagged.tag.name() != late.name()));
            if !start.had_lease {
                // Nothing was to be stored, so no tag is needed.
                late.clear();
            }
            // The ticket is taken before the tags' ids are read again, and before the commit is sent.
            ticket = self.ticket(tags.iter().map(|tagged| &tagged.tag).chain(&late));
            let life = if is_leased { self.policy.longer_tag_life(*lifetimes) } else { None };
            is_outdated = !is_known || self.was_invalidated(&tags, life).await;
            if !late.is_empty() {
                match self.late_ids(start.journal_entry, &late, *lifetimes).await {
                    Some(mut ids) => {
                        self.state.known_tags.note(&self.flight.key, &late);
                        tags.append(&mut ids);
                    }
                    None => is_outdated = true,
                }
            }
        }
        let result = self.loaded(result, took, &tags);
        if is_leased && !is_outdated && !self.see_again(&result).await {
            // The older value may have been invalidated: only this process's waiters receive it, and it is not stored again.
            let elsewhere = result.elsewhere.clone().unwrap_or_else(|| result.outcome.clone());
            let publication = self.publication(result);
            return Publication { stored: None, elsewhere: Some(elsewhere), ..publication };
        }
        Publication { is_outdated, ticket, ..self.publication(result) }
    }
}

/// How long callers do not queue for a resource that was found uncacheable.
const MARKER_FOR: Duration = Duration::from_secs(10);

/// A load's outcome, and whether it is stored.
struct LoadedOutcome {
    outcome: FlightOutcome,
    /// The outcome for other processes, if it differs from `outcome`.
    elsewhere: Option<FlightOutcome>,
    retention: Retention,
}

impl LoadedOutcome {
    fn unstored(outcome: FlightOutcome, unstored: Unstored, mark: bool) -> Self {
        Self { outcome, elsewhere: None, retention: Retention::Unstored(unstored, mark) }
    }
}

/// Whether a load's value is stored.
enum Retention {
    /// Stored as these bytes, for this long.
    Stored(Bytes, Duration),
    /// Not stored: what that means for the older value, and whether a marker says that callers need not queue for the resource.
    Unstored(Unstored, bool),
}

/// What a load's result means for its waiters, other processes and later callers.
struct Publication {
    outcome: FlightOutcome,
    /// The outcome for other processes, if it differs from `outcome`.
    elsewhere: Option<FlightOutcome>,
    /// The entry that is stored, and for how long; `None` if only the current waiters receive the outcome.
    stored: Option<(Bytes, Duration)>,
    /// What happens to the older entry if no new one is stored.
    older: OlderEntry,
    /// For how long after a failure later callers receive it too.
    replay: Duration,
    /// Whether one of the value's tags may have been invalidated since the load began. Then only callers that came before the load
    /// receive the value.
    is_outdated: bool,
    /// The ticket for a local copy of the stored value, and the policy's tags.
    ticket: Option<(Ticket, Box<[Key]>)>,
}

impl Publication {
    fn of(outcome: FlightOutcome) -> Self {
        let (elsewhere, stored, older, replay) = (None, None, OlderEntry::Stays, Duration::ZERO);
        Self { outcome, elsewhere, stored, older, replay, is_outdated: false, ticket: None }
    }

    /// Called after the store has answered the commit of a load that began at `began`. Keeps a local copy if the value was stored. If
    /// there was an older entry (`replaces`) and it has not stayed, announces that to the other processes.
    fn keep_copy(
        &self,
        state: &GuardState,
        key: &Key,
        check: Option<TokenCheck>,
        (began, replaces): (SentAt, bool),
    ) {
        if check != Some(TokenCheck::Held) || self.is_outdated {
            return;
        }
        if let (FlightOutcome::Value(entry), Some(_)) = (&self.outcome, &self.stored) {
            state.retained.reloaded(key, began.at, entry.stored_at);
        }
        let name = || ChangedName::value(key);
        match (&self.outcome, &self.stored, &self.ticket) {
            (FlightOutcome::Value(entry), Some(_), Some((ticket, checked)))
                if state.retained.may_copy(key, entry) =>
            {
                // Copies the bytes: the loader's payload may be a small part of a large buffer, which the copy would keep in memory.
                let payload = Bytes::copy_from_slice(&entry.payload);
                let entry = Entry { payload, ..entry.clone() };
                let copy = Arc::new(StoredEntry::new(Ok(entry)).shared(checked));
                state.local.fill_stored(key, &copy, ticket.clone());
            }
            _ if replaces => state.local.forget(&name()),
            _ => {}
        }
        if replaces && (self.stored.is_some() || self.older != OlderEntry::Stays) {
            state.local.announce_later(name());
        }
    }

    /// The moment up to which the outcome was certainly current: callers that came after it join again. `None` if no caller must. `check`
    /// is the store's answer to the commit, if there is one; `sent_at` is when the load began, and `confirmed` when the lease was last
    /// certainly held.
    fn current_at(
        &self,
        check: Option<TokenCheck>,
        sent_at: SentAt,
        confirmed: Option<SentAt>,
    ) -> Option<SentAt> {
        match check {
            _ if self.is_outdated => Some(sent_at),
            // This load held the lease until now.
            Some(TokenCheck::Held | TokenCheck::ForeignData) => None,
            Some(TokenCheck::Lost) => confirmed,
            // The store did not answer the commit. Only a value must not be older than a change; a failure may be.
            None => confirmed.filter(|_| self.outcome.has_value()),
        }
    }

    /// The outcome for this process's waiters. `check` is the store's answer to the commit, if there is one. `if_lost` says why the value
    /// is not stored if the load has no lease, or has it no longer.
    fn for_waiters(&self, check: Option<TokenCheck>, if_lost: Storage) -> FlightOutcome {
        let FlightOutcome::Value(entry) = &self.outcome else { return self.outcome.clone() };
        let times = entry.expiry;
        let expiry = match check {
            Some(TokenCheck::Lost | TokenCheck::ForeignData) => {
                times.not_stored(entry.stored_at).marked(if_lost)
            }
            _ if self.stored.is_none() => times.marked(Storage::Forbidden),
            Some(TokenCheck::Held) => times,
            None => times.marked(Storage::Unconfirmed),
        };
        FlightOutcome::Value(Entry { expiry, ..entry.clone() })
    }

    /// Ends the lease and publishes the outcome for other processes. Returns [`TokenCheck::Lost`] also if there was no lease, or if the
    /// value was not sent; `None` if the store did not answer.
    async fn notify_fleet(
        &self,
        lease: Option<Lease>,
        key: &Key,
        rejected: Option<&StoredEntry>,
    ) -> Option<TokenCheck> {
        let Some(lease) = lease else { return Some(TokenCheck::Lost) };
        if self.is_outdated {
            lease.hand_over(0).await;
            return Some(TokenCheck::Lost);
        }
        if let Some((entry, keep)) = &self.stored {
            return lease.commit(entry.clone(), *keep).await;
        }
        let outcome = self.elsewhere.as_ref().unwrap_or(&self.outcome);
        let seen = rejected.map(|rejected| rejected.raw(key));
        lease.fail(outcome, self.replay, self.older.clone(), seen.as_ref()).await
    }
}

impl FlightTask {
    /// A ticket for a local copy of a value with these tags, and the policy's tags; `None` if the policy has no local copies.
    fn ticket<'a>(&self, tags: impl Iterator<Item = &'a Key>) -> Option<(Ticket, Box<[Key]>)> {
        if !self.policy.has_copies() {
            return None;
        }
        let all: Vec<_> = tags.cloned().collect();
        let checked = self.policy.tag_keys(&self.state.namespace, &self.flight.key).into();
        Some((self.state.local.ticket(&self.flight.key, &all), checked))
    }

    /// Converts a load's result to the outcome for its waiters, and decides whether it can be stored.
    fn loaded(&self, result: LoadResult, took: Duration, tagged: &[TagId]) -> LoadedOutcome {
        let not_stored = LoadedOutcome::unstored;
        match result {
            LoadResult::Value {
                encoding,
                payload,
                packed,
                lifetimes,
                validator,
                status_only,
                unstored,
                ..
            } => {
                let now = self.state.store.now();
                let (times, keep) = self.policy.jittered(lifetimes).from(now, took);
                let tags = TagList::new(tagged);
                let value = |payload, packed| {
                    let value = Entry::value(encoding, (payload, packed), (now, times), tags.clone());
                    Entry { validator: validator[..].into(), ..value }
                };
                let elsewhere = status_only
                    .map(|status_only| FlightOutcome::Value(value(status_only, Packed::default())));
                if keep.is_zero() {
                    // The value is not compressed: it is sent to waiters in other processes, which may lack the feature `lz4`.
                    let value = FlightOutcome::Value(value(payload, Packed::default()));
                    LoadedOutcome { elsewhere, ..not_stored(value, unstored, false) }
                } else {
                    self.if_short_enough(value(payload, packed), keep)
                }
            }
            LoadResult::OnlyForCaller => not_stored(FlightOutcome::NoLoader, Unstored::SaysNothing, false),
            LoadResult::Uncacheable { unstored, mark } => {
                not_stored(FlightOutcome::Uncacheable, unstored, mark)
            }
            LoadResult::Failed { failure, before } => {
                not_stored(FlightOutcome::Failed(failure), Unstored::Failure { before }, false)
            }
        }
    }

    /// The outcome and retention of a storable value: it is not stored if its entry is longer than the server accepts.
    fn if_short_enough(&self, value: Entry, keep: Duration) -> LoadedOutcome {
        let key = &self.flight.key;
        let (entry, most) = (value.encode(key), self.state.store.longest_entry());
        if entry.len() <= most {
            let (outcome, retention) = (FlightOutcome::Value(value), Retention::Stored(entry, keep));
            return LoadedOutcome { outcome, elsewhere: None, retention };
        }
        warn_if!(
            log::GUARD,
            self.state.unshareable(&self.policy),
            ?key,
            size = entry.len(),
            most,
            "a loaded value is longer than the server takes (its setting `proto-max-bulk-len`): it is not stored"
        );
        // The same consequence as for a value over `max_body`: other processes load for themselves, without waiting for each other.
        let expiry = Lifetimes::default().from(value.stored_at, Duration::ZERO).0;
        let value = FlightOutcome::Value(Entry { expiry, ..value });
        let elsewhere = Some(FlightOutcome::Uncacheable);
        LoadedOutcome { elsewhere, ..LoadedOutcome::unstored(value, Unstored::OfResource, true) }
    }

    /// Decides what a load's result means.
    fn publication(&self, LoadedOutcome { outcome, elsewhere, retention }: LoadedOutcome) -> Publication {
        let (unstored, mark) = match retention {
            Retention::Stored(entry, keep) => {
                return Publication { elsewhere, stored: Some((entry, keep)), ..Publication::of(outcome) };
            }
            Retention::Unstored(unstored, mark) => (unstored, mark),
        };
        let (now, is_failure) = (self.state.store.now(), matches!(outcome, FlightOutcome::Failed(_)));
        if let Some((older, keep)) = self.older_value(&outcome, unstored, now) {
            if is_failure {
                self.policy.count(Count::stand_ins);
            }
            let stored = Some((older.encode(&self.flight.key), keep));
            return Publication { stored, ..Publication::of(FlightOutcome::Stale(older)) };
        }
        let replay = if is_failure { self.policy.error_for } else { Duration::ZERO };
        let older = self.older_entry(unstored, mark, now);
        Publication { elsewhere, older, replay, ..Publication::of(outcome) }
    }

    /// What happens to the older entry if no new one is stored.
    fn older_entry(&self, unstored: Unstored, mark: bool, now: u64) -> OlderEntry {
        let older = self.rejected.as_ref().map(|rejected| &rejected.content);
        let ends = unstored == Unstored::OfResource;
        let may_mark = match older {
            None => true,
            Some(Ok(entry)) => ends || !entry.serves(now).is_at_once(),
            Some(Err(raw)) => !self.is_for_others(raw),
        };
        match older {
            _ if mark && may_mark => {
                let (marker, life) = marker_entry(&self.flight.key, now);
                OlderEntry::Marked(marker, life)
            }
            Some(Ok(entry)) if ends && entry.kind == EntryKind::Value => OlderEntry::Ends,
            // This process serves the entry to no caller, for instance because of an unconfirmed invalidation; other processes may.
            Some(Err(raw)) if ends && !self.is_for_others(raw) => OlderEntry::Ends,
            _ => OlderEntry::Stays,
        }
    }

    /// Whether `raw` is an entry that other processes can read although this one cannot decompress it. If this process replaced it by a
    /// marker, they would load it again, and the processes would replace each other's entries for ever.
    fn is_for_others(&self, raw: &Bytes) -> bool {
        let decoded = Entry::decode(raw.clone(), &self.flight.key, self.state.longest_payload());
        matches!(decoded, Err((Unreadable::Compressed { .. }, _)))
    }

    /// Reads the older value, which may stand in for the failed load, and its tags again. They were first read before this flight
    /// had the lease, so the value may have been invalidated since. An invalidation after this read removes the lease or a tag's id,
    /// so that a value stored under them is known to be invalid. Returns whether the store answered.
    async fn see_again(&mut self, result: &LoadedOutcome) -> bool {
        let Retention::Unstored(unstored, _) = result.retention else { return true };
        if self.older_value(&result.outcome, unstored, self.state.store.now()).is_none() {
            return true;
        }
        let Self { state, policy, budget, flight, rejected, .. } = self;
        let (Some(within), sent_at) = (budget.next(), Instant::now()) else { return false };
        let tags = policy.tag_keys(&state.namespace, &flight.key);
        let servable = state.retained.servable(&flight.key, &tags);
        let read = EntryRead { state, key: &flight.key, tags: &tags, keeps: false, within };
        let found = async {
            match state.store.look_up(&flight.key, within).await? {
                Some(raw) => read.current(raw, servable).await.map(Some),
                None => Ok(None),
            }
        };
        let late = |_| Err(StoreError::new(StoreErrorKind::TimedOut));
        let found = timeout(within, found).await.unwrap_or_else(late);
        budget.spend(sent_at);
        let known = found.is_ok();
        match found {
            Ok(content) => *rejected = content.map(|content| Arc::new(StoredEntry::new(content))),
            Err(_) => state.count(GuardCount::store_errors),
        }
        known
    }

    /// The older value that replaces a load's `outcome`, and how long to store it. It replaces a failure, and each outcome of a
    /// background refresh that is not stored, because no caller waits for such an outcome. (Otherwise each caller that is served the
    /// older value would begin another refresh that yields no value.)
    fn older_value(
        &self,
        outcome: &FlightOutcome,
        unstored: Unstored,
        now: u64,
    ) -> Option<(Entry, Duration)> {
        let is_replaced = self.is_refresh() || matches!(outcome, FlightOutcome::Failed(_));
        if is_replaced { self.stand_in(unstored, now) } else { None }
    }

    /// The older value, if it may be served after a load that has ended without a value to store, and how long to store it. It is to be
    /// stored again with a back-off, during which no process loads.
    pub(crate) fn stand_in(&self, unstored: Unstored, now: u64) -> Option<(Entry, Duration)> {
        let previous = self.rejected.as_ref()?.value()?;
        let back_off = self.policy.back_off;
        let rest = self.rest.clamp(back_off, back_off.saturating_mul(MOST_BACK_OFFS));
        let rested = previous.times().rested(unstored, now, rest);
        // A background refresh has no waiters for whom the value would have to stand in: it is stored again if it may still be served.
        let may = if self.is_refresh() {
            now < previous.times().served_until(unstored)
        } else {
            rested.stands_in(now)
        };
        // The entry stays stored until its windows end, so that a later load can revalidate it.
        let Expiry { stale_until, error_until, .. } = previous.times();
        let keep = Duration::from_millis(stale_until.max(error_until).saturating_sub(now));
        may.then(|| (Entry { expiry: rested, ..previous.clone() }, keep))
    }
}

fn marker_entry(key: &Key, now: u64) -> (Bytes, Duration) {
    let marker = Entry {
        kind: EntryKind::Marker,
        encoding: Encoding::RAW,
        stored_at: now,
        expiry: Lifetimes::fresh(MARKER_FOR).from(now, Duration::ZERO).0,
        tag_expired_at: NEVER,
        validator: Box::default(),
        tags: TagList::default(),
        payload: Bytes::new(),
        packed: Packed::default(),
    };
    (marker.encode(key), MARKER_FOR)
}

impl FlightTask {
    /// Reads the ids of the policy's tags when a load begins, and enters the load in the journal of tags if it `may_tag`.
    pub(crate) async fn load_start(&self, had_lease: bool, may_tag: bool) -> LoadStart {
        let Self { state, policy, flight, .. } = self;
        let _turn = self.batch_turn(policy.has_tags(&flight.key)).await;
        let sent_at = SentAt::now();
        let (tags, journal_entry) = state.tags_at_start(policy, &flight.key, may_tag).await;
        if tags.is_err() {
            state.count(GuardCount::store_errors);
        }
        LoadStart { sent_at, had_lease, tags, journal_entry }
    }

    /// As [`GuardState::late_ids`]. Reads a second time if the store does not answer.
    async fn late_ids(&self, load: Option<Uuid>, tags: &[Key], lifetimes: Lifetimes) -> Option<Vec<TagId>> {
        let Self { state, policy, budget, .. } = self;
        let mut ids = state.late_ids(policy, load, tags, lifetimes).await;
        if let (Err(_), Some(first)) = (&ids, tags.first()) {
            let _ = state.store.reach(first.name(), budget.left()).await;
            ids = state.late_ids(policy, load, tags, lifetimes).await;
        }
        ids.ok().flatten()
    }

    /// Whether any of these tags may have been invalidated since its id was read. True if the store does not answer: callers that
    /// came after the load had begun have joined without a look-up. If there is a `life`, this read sets the ids' TTL to it.
    async fn was_invalidated(&self, tagged: &[TagId], life: Option<Duration>) -> bool {
        let Some(first) = tagged.first() else { return false };
        let tags: Vec<_> = tagged.iter().map(|tagged| tagged.tag.clone()).collect();
        let (store, within) = (&self.state.store, self.policy.command_timeout);
        let ask = async || match life {
            // This creates missing ids. A new id differs from the old one, so it also shows an invalidation.
            Some(life) => {
                let ids = store.tag_ids(&tags, life, within).await?;
                Ok::<Vec<_>, StoreError>(ids.into_iter().map(Some).collect())
            }
            None => {
                let present = store.present_tags(&tags, within).await?;
                Ok(present.into_iter().map(|tag| tag.map(|tag| tag.id())).collect())
            }
        };
        let mut ids = ask().await;
        if ids.is_err() {
            // The connection may have been lost: waiting for the reconnect is cheaper than another load.
            let _ = store.reach(first.tag.name(), self.budget.left()).await;
            ids = ask().await;
        }
        ids.is_err() || ids.is_ok_and(|ids| ids.iter().zip(tagged).any(|(id, tagged)| *id != Some(tagged.id)))
    }
}
