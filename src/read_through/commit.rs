//! The end of a load: decides what its result means for its waiters and the fleet, then tells the store and the waiters. Step 7.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::flight_task::{FlightTask, LoadStart, let_go_since};
use super::lease::Lease;
use super::read::current;
use crate::flight::order::SentAt;
use crate::guard_state::{GuardState, Leader};
use crate::key::Key;
use crate::key::LoadMode;
use crate::loader::{LoadOutput, LoadResult};
use crate::local::Ticket;
use crate::observe::{Count, GuardCount, log, warn_if};
use crate::store::volume::ChangedName;
use crate::store::{OlderEntry, StoreError, StoreErrorKind, TokenCheck};
use crate::value::FlightOutcome;
use crate::value::StoredEntry;
use crate::value::entry::{Encoding, Entry, EntryKind, Unreadable};
use crate::value::entry::{Expiry, Lifetimes, Storage, Unstored};
use crate::value::entry::{TagId, TagList};
use crate::value::lz4::Packed;

impl FlightTask {
    /// Step 7: tells the fleet, then the waiters of this process.
    pub(crate) async fn end(
        mut self,
        loaded: LoadOutput,
        took: Duration,
        start: LoadStart,
        lease: Option<Lease>,
    ) {
        // Callers that come from here on make a look-up instead of joining. As soon as the store has executed this load's commit,
        // another process may change the resource, before this process has the commit's reply. Such a look-up is sent after the
        // commit on the same connection, so it sees the change.
        // A caller that joins an uncacheable load loads for itself. So it does not wait for the marker, and joins until that is stored:
        // in between, its look-up would find nothing, and it would wait for another load.
        let loads_alone = matches!(loaded.result, LoadResult::Uncacheable { .. })
            && self.flight.mode != LoadMode::BackgroundRefresh;
        if !loads_alone {
            self.leader.detach();
        }
        self.note_waits();
        if loads_alone {
            self.leader.announce_to_all(FlightOutcome::Uncacheable);
        }
        let LoadOutput { result, settled } = loaded;
        if matches!(result, LoadResult::OnlyForCaller) {
            settled.into_iter().for_each(|settled| settled());
            self.leader.finish(FlightOutcome::Invalidated);
            if let Some(lease) = lease {
                lease.hand_over(0).await;
            }
            return;
        }
        let sent_at = start.sent_at;
        // A lease that is lost since then may have been taken away by a change.
        let if_lost = if start.had_lease { Storage::NotStored } else { Storage::Unleased };
        let turn = self.batch_turn(lease.is_some()).await;
        let publication = self.classify(result, took, start, lease.is_some()).await;
        let Self { state, policy, flight, leader, rejected, budget, .. } = self;
        let publication = &publication;
        // Up to this moment no other process has invalidated the key.
        let confirmed = lease.as_ref().map(Lease::confirmed);
        let mut telling = pin!(publication.notify_fleet(lease, &flight.key, rejected.as_deref()));
        // The store first, so that the next request hits; but the waiters wait for that only within the first caller's
        // budget. If it runs out, they are answered first and the commit goes on below.
        let check = timeout(budget.left(), &mut telling).await;
        // Also what only other processes can read.
        let replaces =
            rejected.as_ref().is_some_and(|rejected| rejected.value().is_some() || rejected.content.is_err());
        if let Ok(check) = check {
            publication.keep_copy(&state, &flight.key, check, (sent_at, replaces));
        }
        let current = match check {
            _ if publication.is_outdated => Some(sent_at),
            // This load held the lease until now.
            Ok(Some(TokenCheck::Held | TokenCheck::ForeignData)) => None,
            Ok(Some(TokenCheck::Lost)) => confirmed,
            // The store did not say. Only a value must not be older than a change; a failure may be.
            Ok(None) | Err(_) => confirmed.filter(|_| publication.outcome.has_value()),
        };
        let late = check.is_err().then(|| state.late_commits.begin(&flight.key, policy.lease));
        notify_waiters(leader, publication.for_waiters(check.ok(), if_lost), current, settled);
        drop(turn);
        if let Some(_until_its_answer) = late {
            policy.count(Count::budget_exceeded);
            let check = telling.await;
            publication.keep_copy(&state, &flight.key, check, (sent_at, replaces));
        }
    }

    /// Decides what a load's result means, after reading again what it depends on.
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
        if let LoadResult::Value { tags: own, lifetimes, .. } = &mut result {
            tags.append(own);
            let life = if is_leased { self.policy.longer_tag_life(*lifetimes) } else { None };
            // Before the tags' ids are read again, and before the commit is sent.
            ticket = self.ticket(&tags);
            is_outdated = !is_known || self.was_invalidated(&tags, life).await;
        }
        let result = self.loaded(result, took, &tags);
        if is_leased && !is_outdated && !self.see_again(&result).await {
            // The older value may have been invalidated: it answers this process's waiters, and is not stored again.
            let elsewhere = result.elsewhere.clone().unwrap_or_else(|| result.outcome.clone());
            let publication = self.publication(result);
            return Publication { stored: None, elsewhere: Some(elsewhere), ..publication };
        }
        Publication { is_outdated, ticket, ..self.publication(result) }
    }
}

/// Gives the flight's waiters their outcome. Callers that came after `current` join again.
fn notify_waiters(
    leader: Leader,
    outcome: FlightOutcome,
    current: Option<SentAt>,
    settled: Option<Box<dyn FnOnce() + Send>>,
) {
    if let Some(current) = current {
        let_go_since(&leader, current);
    }
    match settled {
        // For `FlightOutcome::Stale`, the loader's own caller is given the older value too.
        Some(settled) if !matches!(outcome, FlightOutcome::Stale(_)) => settled(),
        _ => {}
    }
    leader.finish(outcome);
}

/// How long callers do not queue for a resource that was found uncacheable.
const MARKER_FOR: Duration = Duration::from_secs(10);

/// What a load has ended with.
struct Loaded {
    outcome: FlightOutcome,
    /// What other processes are told, if that differs from `outcome`.
    elsewhere: Option<FlightOutcome>,
    retained: Retention,
}

/// Whether a load's value is stored.
enum Retention {
    /// As these bytes, for so long.
    Stored(Bytes, Duration),
    /// What that means for the older value, and whether later callers need not queue for the resource.
    Unstored(Unstored, bool),
}

/// What a load's result means for its waiters, other processes and later callers.
struct Publication {
    outcome: FlightOutcome,
    /// What other processes are told, if that differs from `outcome`.
    elsewhere: Option<FlightOutcome>,
    /// The entry that is stored, and for how long; `None` tells only the current waiters.
    stored: Option<(Bytes, Duration)>,
    /// What happens to the older entry if none is stored.
    older: OlderEntry,
    /// How long a failure is replayed to later callers.
    replay: Duration,
    /// One of the value's tags may have been invalidated since the load began: it is shared with the callers that came before.
    is_outdated: bool,
    /// For the copy of a value that is stored, with the policy's tags.
    ticket: Option<(Ticket, Box<[Key]>)>,
}

impl Publication {
    fn of(outcome: FlightOutcome) -> Self {
        let (elsewhere, stored, older, replay) = (None, None, OlderEntry::Stays, Duration::ZERO);
        Self { outcome, elsewhere, stored, older, replay, is_outdated: false, ticket: None }
    }

    /// After the store has answered the commit of a load that `began` then: keeps a copy, and announces that the result `replaces` an
    /// older value, or ends it.
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
                // Bytes of its own: what the loader returned may be a small part of a large buffer, which the copy would keep.
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

    /// What this process's waiters are told, where the store has answered the commit so; `None` if it has not answered yet. `if_lost` says
    /// why nothing is stored, if the load has no lease any more.
    fn for_waiters(&self, check: Option<Option<TokenCheck>>, if_lost: Storage) -> FlightOutcome {
        let FlightOutcome::Value(entry) = &self.outcome else { return self.outcome.clone() };
        let times = entry.expiry;
        let expiry = match check {
            Some(Some(TokenCheck::Lost | TokenCheck::ForeignData)) => {
                times.not_stored(entry.stored_at).marked(if_lost)
            }
            _ if self.stored.is_none() => times.marked(Storage::Forbidden),
            Some(Some(TokenCheck::Held)) => times,
            Some(None) | None => times.marked(Storage::Unconfirmed),
        };
        FlightOutcome::Value(Entry { expiry, ..entry.clone() })
    }

    /// Ends the lease with what other processes are told. [`TokenCheck::Lost`] also if there was none, or if the value was not sent;
    /// `None` if the store's answer is not known.
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
        let check = self.elsewhere.as_ref().unwrap_or(&self.outcome);
        let seen = rejected.map(|rejected| rejected.raw(key));
        lease.fail(check, self.replay, self.older.clone(), seen.as_ref()).await
    }
}

impl FlightTask {
    /// A ticket for the copy of a value with these tags, if the policy keeps copies.
    fn ticket(&self, tags: &[TagId]) -> Option<(Ticket, Box<[Key]>)> {
        if self.policy.local_for.is_zero() {
            return None;
        }
        let all: Vec<_> = tags.iter().map(|tagged| tagged.tag.clone()).collect();
        let checked = self.policy.tag_keys(&self.state.namespace, &self.flight.key).into();
        Some((self.state.local.ticket(&self.flight.key, &all), checked))
    }

    /// What a load's result is for its waiters, and whether it can be stored.
    fn loaded(&self, result: LoadResult, took: Duration, tagged: &[TagId]) -> Loaded {
        let (outcome, elsewhere, retained) = match result {
            LoadResult::Value {
                encoding,
                payload,
                packed,
                lifetimes,
                validator,
                tags: _,
                status_only,
                unstored,
            } => {
                let now = self.state.store.now();
                let (times, keep) = self.policy.jittered(lifetimes).from(now, took);
                let tags = TagList::new(tagged);
                let value = |payload, packed| {
                    let (kind, validator, tags) = (EntryKind::Value, validator[..].into(), tags.clone());
                    Entry { kind, encoding, stored_at: now, expiry: times, validator, tags, payload, packed }
                };
                let elsewhere = status_only
                    .map(|status_only| FlightOutcome::Value(value(status_only, Packed::default())));
                if keep.is_zero() {
                    // Waiters in other processes, which may lack the feature, are sent a value that is not stored.
                    let value = FlightOutcome::Value(value(payload, Packed::default()));
                    (value, elsewhere, Retention::Unstored(unstored, false))
                } else {
                    let value = value(payload, packed);
                    self.if_short_enough(value, keep)
                }
            }
            LoadResult::OnlyForCaller => {
                (FlightOutcome::NoLoader, None, Retention::Unstored(Unstored::SaysNothing, false))
            }
            LoadResult::Uncacheable { unstored, mark } => {
                (FlightOutcome::Uncacheable, None, Retention::Unstored(unstored, mark))
            }
            LoadResult::Failed { failure, before } => {
                let unstored = Unstored::Failure { before };
                (FlightOutcome::Failed(failure), None, Retention::Unstored(unstored, false))
            }
        };
        Loaded { outcome, elsewhere, retained }
    }

    /// A value that is stored, unless the server takes no entry of its length.
    fn if_short_enough(
        &self,
        value: Entry,
        keep: Duration,
    ) -> (FlightOutcome, Option<FlightOutcome>, Retention) {
        let key = &self.flight.key;
        let (entry, most) = (value.encode(key), self.state.store.longest_entry());
        if entry.len() <= most {
            return (FlightOutcome::Value(value), None, Retention::Stored(entry, keep));
        }
        warn_if!(
            log::GUARD,
            self.state.unshareable(&self.policy),
            ?key,
            size = entry.len(),
            most,
            "a loaded value is longer than the server takes (its setting `proto-max-bulk-len`): it is not stored"
        );
        // As for a value over `max_body`: the others load for themselves, without waiting for each other.
        let expiry = Lifetimes::default().from(value.stored_at, Duration::ZERO).0;
        let (value, elsewhere) = (Entry { expiry, ..value }, FlightOutcome::Uncacheable);
        (FlightOutcome::Value(value), Some(elsewhere), Retention::Unstored(Unstored::OfResource, true))
    }

    /// Decides what a load's result means.
    fn publication(&self, Loaded { outcome, elsewhere, retained }: Loaded) -> Publication {
        let (unstored, mark) = match retained {
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

    /// What happens to the older entry if nothing is stored in its place.
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
            // This process serves it to no caller, because of an invalidation that the store has not confirmed, say. Others may.
            Some(Err(raw)) if ends && !self.is_for_others(raw) => OlderEntry::Ends,
            _ => OlderEntry::Stays,
        }
    }

    /// Whether other processes can read an entry that this one cannot decompress. A marker in its place would make them load it anew, and
    /// the two would take turns for ever.
    fn is_for_others(&self, raw: &Bytes) -> bool {
        let decoded = Entry::decode(raw.clone(), &self.flight.key, self.state.longest_payload());
        matches!(decoded, Err((Unreadable::Compressed { .. }, _)))
    }

    /// Reads the value that may stand in for the failed load again, and its tags. It was first read before this flight had the
    /// lease, so it may have been invalidated since. An invalidation after this read takes the lease or a tag's id away, so that
    /// a value stored under them is known to be invalid. Returns whether the store answered.
    async fn see_again(&mut self, result: &Loaded) -> bool {
        let Retention::Unstored(unstored, _) = result.retained else { return true };
        if self.older_value(&result.outcome, unstored, self.state.store.now()).is_none() {
            return true;
        }
        let Self { state, policy, budget, flight, rejected, .. } = self;
        let (Some(within), sent_at) = (budget.next(), Instant::now()) else { return false };
        let tags = policy.tag_keys(&state.namespace, &flight.key);
        let rules = (&tags[..], state.retained.servable(&flight.key, &tags));
        let found = async {
            match state.store.look_up(&flight.key, within).await? {
                Some(raw) => current(state, raw, &flight.key, rules, within).await.map(Some),
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

    /// The older value that takes the place of a load's `outcome`, and how long to store it: a failure's, and that of a background
    /// refresh, whatever it is, because nobody waits for it. (Else each caller that is served the older value would begin another
    /// refresh that yields no value.)
    fn older_value(
        &self,
        outcome: &FlightOutcome,
        unstored: Unstored,
        now: u64,
    ) -> Option<(Entry, Duration)> {
        let is_refresh = self.flight.mode == LoadMode::BackgroundRefresh;
        let is_replaced = is_refresh || matches!(outcome, FlightOutcome::Failed(_));
        if is_replaced { self.stand_in(unstored, now) } else { None }
    }

    /// The older value, if it may be served after a load that has ended without a value to store. Stored again, it tells the whole
    /// fleet not to ask the origin for the back-off.
    pub(crate) fn stand_in(&self, unstored: Unstored, now: u64) -> Option<(Entry, Duration)> {
        let previous = self.rejected.as_ref()?.value()?;
        let rested = previous.expiry.rested(unstored, now, self.policy.back_off);
        let may = match self.flight.mode {
            // A background refresh has no waiters: the value is not served by this, only stored again with a back-off.
            LoadMode::BackgroundRefresh => now < previous.expiry.served_until(unstored),
            LoadMode::Leased | LoadMode::Unleased | LoadMode::Probe | LoadMode::ForcedReload => {
                rested.stands_in(now)
            }
        };
        // The entry stays for a validation as long as it was.
        let Expiry { stale_until, error_until, .. } = previous.expiry;
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
        validator: Box::default(),
        tags: TagList::default(),
        payload: Bytes::new(),
        packed: Packed::default(),
    };
    (marker.encode(key), MARKER_FOR)
}

impl FlightTask {
    /// Reads the ids of the policy's tags, as a load begins.
    pub(crate) async fn load_start(&self, had_lease: bool) -> LoadStart {
        let Self { state, policy, flight, .. } = self;
        let _turn = self.batch_turn(policy.is_tagged()).await;
        let sent_at = SentAt::now();
        let tags = policy.tag_keys(&state.namespace, &flight.key);
        let tags = state.tagged(tags, policy.tag_life(), policy.command_timeout).await;
        if tags.is_err() {
            state.count(GuardCount::store_errors);
        }
        LoadStart { sent_at, had_lease, tags }
    }

    /// Whether any of these tags may have been invalidated since its id was read. True if the store does not answer: callers that
    /// came after the load had begun have joined without a look-up. With a `life`, this read sets the ids' TTL to it.
    pub(super) async fn was_invalidated(&self, tagged: &[TagId], life: Option<Duration>) -> bool {
        let Some(first) = tagged.first() else { return false };
        let tags: Vec<_> = tagged.iter().map(|tagged| tagged.tag.clone()).collect();
        let (store, within) = (&self.state.store, self.policy.command_timeout);
        let ask = async || match life {
            // Creates the missing ids. A new id differs from the old one, so it also shows an invalidation.
            Some(life) => {
                let ids = store.tags().tag_ids(&tags, life, within).await?;
                Ok::<_, StoreError>(ids.into_iter().map(Some).collect())
            }
            None => store.tags().present_ids(&tags, within).await,
        };
        let mut ids = ask().await;
        if ids.is_err() {
            // Waiting for the reconnect is cheaper than another load.
            let _ = store.reach(first.tag.name(), self.budget.left()).await;
            ids = ask().await;
        }
        ids.is_err() || ids.is_ok_and(|ids| ids.iter().zip(tagged).any(|(id, tagged)| *id != Some(tagged.id)))
    }
}
