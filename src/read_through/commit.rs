//! The end of a load: decides what its result means for its waiters and the fleet, then tells the store and the waiters. Step 7.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::lease::Lease;
use super::load::{FlightTask, LoadStart, let_go_since};
use super::tag_check::current;
use crate::flight::order::SentAt;
use crate::guard_state::{GuardState, Leader};
use crate::key::Key;
use crate::key::flight::LoadMode;
use crate::loader::{LoadOutput, LoadResult, MarkerRule};
use crate::local::Ticket;
use crate::observe::{Count, GuardCount, log, warn_if};
use crate::policy::Policy;
use crate::store::volume::ChangedName;
use crate::store::{StoreError, StoreErrorKind, TokenCheck};
use crate::value::entry::{Encoding, Entry, EntryKind, Unreadable};
use crate::value::freshness::{Freshness, Lifetimes};
use crate::value::lz4::Packed;
use crate::value::outcome::FlightOutcome;
use crate::value::stored::StoredEntry;
use crate::value::tags::{TagId, TagList};

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
        let asked = start.asked;
        let publication = self.classify(result, took, start, lease.is_some()).await;
        let Self { state, policy, flight, leader, rejected, budget, .. } = self;
        let publication = &publication;
        // Up to this moment no other process has invalidated the key.
        let confirmed = lease.as_ref().map(Lease::confirmed);
        let mut telling = pin!(publication.tell_fleet(lease, &flight.key, rejected.as_deref(), &policy));
        // The store first, so that the next request hits; but the waiters wait for that only within the first caller's
        // budget. If it runs out, they are answered first and the commit goes on below.
        let told = timeout(budget.left(), &mut telling).await;
        let replaces = rejected.as_ref().is_some_and(|rejected| rejected.value().is_some());
        if let Ok(told) = told {
            publication.keep_copy(&state, &flight.key, told, (asked, replaces));
        }
        let current = match told {
            _ if publication.is_outdated => Some(asked),
            // This load held the lease until now.
            Ok(Some(TokenCheck::Held | TokenCheck::ForeignData)) => None,
            Ok(Some(TokenCheck::Lost)) => confirmed,
            // The store did not say. Only a value must not be older than a change; a failure may be.
            Ok(None) | Err(_) => confirmed.filter(|_| publication.outcome.has_value()),
        };
        // Of a commit that goes on it is not known yet.
        let is_stored = told.is_err() || told == Ok(Some(TokenCheck::Held));
        let late = told.is_err().then(|| state.late_commits.begin(&flight.key, policy.lease));
        tell_waiters(leader, publication.for_waiters(is_stored), current, settled);
        if let Some(_until_its_answer) = late {
            policy.count(Count::budget_exceeded);
            let told = telling.await;
            publication.keep_copy(&state, &flight.key, told, (asked, replaces));
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
        let (mut is_outdated, mut unsure, mut ticket) = (false, None, None);
        match &mut result {
            LoadResult::Value { tags: own, lifetimes, .. } => {
                tags.append(own);
                let life = if is_leased { self.policy.longer_tag_life(*lifetimes) } else { None };
                // Before the tags' ids are read again, and before the commit is sent.
                ticket = self.ticket(&tags);
                is_outdated = !is_known || self.was_invalidated(&tags, life).await;
            }
            LoadResult::Failed(failure) if is_leased && !self.see_again().await => {
                unsure = Some(FlightOutcome::Failed(failure.clone()));
            }
            LoadResult::Uncacheable { mark }
                if is_leased && self.leaves_served(*mark) && !self.see_again().await =>
            {
                unsure = Some(FlightOutcome::Uncacheable);
            }
            LoadResult::Uncacheable { .. } | LoadResult::Failed(_) | LoadResult::OnlyForCaller => {}
        }
        let publication = self.publication(result, took, &tags);
        match unsure {
            // The older value may have been invalidated: it answers this process's waiters, and is not stored again.
            Some(unsure) => {
                Publication { keep: None, elsewhere: publication.elsewhere.or(Some(unsure)), ..publication }
            }
            None => Publication { is_outdated, ticket, ..publication },
        }
    }
}

/// Gives the flight's waiters their outcome. Callers that came after `current` join again.
fn tell_waiters(
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

/// What a load's result means for its waiters, other processes and later callers.
struct Publication {
    outcome: FlightOutcome,
    /// What other processes are told, if that differs from `outcome`.
    elsewhere: Option<FlightOutcome>,
    /// How long the value is stored; `None` shares it with the current waiters only.
    keep: Option<Duration>,
    /// A marker for later callers, and its lifetime.
    marker: Option<(Bytes, Duration)>,
    /// How long a failure is replayed to later callers.
    replay: Duration,
    /// One of the value's tags may have been invalidated since the load began: it is shared with the callers that came before.
    is_outdated: bool,
    /// For the copy of a value that is stored, with the policy's tags.
    ticket: Option<(Ticket, Box<[Key]>)>,
}

impl Publication {
    fn only(outcome: FlightOutcome) -> Self {
        let replay = Duration::ZERO;
        Self { outcome, elsewhere: None, keep: None, marker: None, replay, is_outdated: false, ticket: None }
    }

    /// After the store has answered the commit of a load that `began` then: keeps a copy, and announces that the value `replaces` an
    /// older one.
    fn keep_copy(
        &self,
        state: &GuardState,
        key: &Key,
        told: Option<TokenCheck>,
        (began, replaces): (SentAt, bool),
    ) {
        if told != Some(TokenCheck::Held) || self.is_outdated {
            return;
        }
        if let (FlightOutcome::Value(entry), Some(_)) = (&self.outcome, self.keep) {
            state.kept.reloaded(key, began.at, entry.stored_at);
        }
        let name = || ChangedName::value(key);
        match (&self.outcome, self.keep, &self.ticket) {
            (FlightOutcome::Value(entry), Some(_), Some((ticket, checked)))
                if state.kept.may_copy(key, entry) =>
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
        if replaces && (self.keep.is_some() || self.marker.is_some()) {
            state.local.announce_later(name());
        }
    }

    /// What this process's waiters are told.
    fn for_waiters(&self, is_stored: bool) -> FlightOutcome {
        match &self.outcome {
            FlightOutcome::Value(entry) if !is_stored => FlightOutcome::Value(Entry {
                expiry: entry.expiry.not_stored(entry.stored_at),
                ..entry.clone()
            }),
            outcome => outcome.clone(),
        }
    }

    /// Ends the lease with what other processes are told. `None` if there was none, or if the store's answer is not known.
    async fn tell_fleet(
        &self,
        lease: Option<Lease>,
        key: &Key,
        rejected: Option<&StoredEntry>,
        policy: &Policy,
    ) -> Option<TokenCheck> {
        let lease = lease?;
        if self.is_outdated {
            lease.hand_over(0).await;
            return None;
        }
        match (&self.outcome, self.keep) {
            (FlightOutcome::Value(entry) | FlightOutcome::Stale(entry), Some(keep)) => {
                let entry = entry.encode(key);
                let most = lease.state.store.longest_entry();
                if entry.len() <= most {
                    return lease.commit(entry, keep).await;
                }
                warn_if!(
                    log::GUARD,
                    lease.state.unshareable(policy),
                    ?key,
                    size = entry.len(),
                    most,
                    "a loaded value is longer than the server takes (its setting `proto-max-bulk-len`): it is not stored"
                );
                // As for a value over `max_body`: the others load for themselves, without waiting for each other.
                let marker = marker_entry(key, lease.state.store.now());
                let seen = rejected.map(|rejected| rejected.raw(key));
                lease.fail(&FlightOutcome::Uncacheable, Duration::ZERO, Some(marker), seen.as_ref()).await;
                None
            }
            (outcome, _) => {
                let told = self.elsewhere.as_ref().unwrap_or(outcome);
                let seen = rejected.map(|rejected| rejected.raw(key));
                lease.fail(told, self.replay, self.marker.clone(), seen.as_ref()).await
            }
        }
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

    /// Decides what a load's result means.
    fn publication(&self, result: LoadResult, took: Duration, tagged: &[TagId]) -> Publication {
        let now = self.state.store.now();
        match result {
            LoadResult::Value { encoding, payload, packed, lifetimes, validator, tags: _, brief } => {
                let (times, keep) = self.policy.jittered(lifetimes).from(now, took);
                let tags = TagList::new(tagged);
                let value = |payload, packed| {
                    let (kind, validator, tags) = (EntryKind::Value, validator[..].into(), tags.clone());
                    FlightOutcome::Value(Entry {
                        kind,
                        encoding,
                        stored_at: now,
                        expiry: times,
                        validator,
                        tags,
                        payload,
                        packed,
                    })
                };
                let keep = (!keep.is_zero()).then_some(keep);
                // Waiters in other processes, which may lack the feature, are sent a value that is not stored.
                let packed = if keep.is_some() { packed } else { Packed::default() };
                let elsewhere = brief.map(|brief| value(brief, Packed::default()));
                Publication { keep, elsewhere, ..Publication::only(value(payload, packed)) }
            }
            LoadResult::OnlyForCaller => Publication::only(FlightOutcome::Gone),
            LoadResult::Uncacheable { mark } => match self.stand_in(now).filter(|_| self.leaves_served(mark))
            {
                Some((entry, keep)) => {
                    Publication { keep: Some(keep), ..Publication::only(FlightOutcome::Stale(entry)) }
                }
                None => Publication {
                    marker: self.marks(mark, now).then(|| marker_entry(&self.flight.key, now)),
                    ..Publication::only(FlightOutcome::Uncacheable)
                },
            },
            LoadResult::Failed(failure) => match self.stand_in(now) {
                Some((entry, keep)) => {
                    self.policy.count(Count::stand_ins);
                    Publication { keep: Some(keep), ..Publication::only(FlightOutcome::Stale(entry)) }
                }
                None => Publication {
                    replay: self.policy.error_for,
                    ..Publication::only(FlightOutcome::Failed(failure))
                },
            },
        }
    }

    /// Whether the value that callers are served meanwhile stays in place. It is then stored again with a back-off, else each
    /// caller would begin another load that yields no value.
    fn leaves_served(&self, mark: MarkerRule) -> bool {
        self.flight.mode == LoadMode::BackgroundRefresh && mark != MarkerRule::Replace
    }

    fn marks(&self, mark: MarkerRule, now: u64) -> bool {
        match mark {
            MarkerRule::No => false,
            MarkerRule::IfUnserved => self.rejected.as_ref().is_none_or(|rejected| match &rejected.content {
                Ok(entry) => !entry.serves(now).is_at_once(),
                Err(raw) => !self.is_for_others(raw),
            }),
            MarkerRule::Replace => true,
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
    async fn see_again(&mut self) -> bool {
        if self.stand_in(self.state.store.now()).is_none() {
            return true;
        }
        let Self { state, policy, budget, flight, rejected, .. } = self;
        let (Some(within), asked) = (budget.next(), Instant::now()) else { return false };
        let tags = policy.tag_keys(&state.namespace, &flight.key);
        let rules = (&tags[..], state.kept.servable(&flight.key, &tags));
        let found = async {
            match state.store.look_up(&flight.key, within).await? {
                Some(raw) => current(state, raw, &flight.key, rules, within).await.map(Some),
                None => Ok(None),
            }
        };
        let late = |_| Err(StoreError::new(StoreErrorKind::TimedOut));
        let found = timeout(within, found).await.unwrap_or_else(late);
        budget.spend(asked);
        let known = found.is_ok();
        match found {
            Ok(content) => *rejected = content.map(|content| Arc::new(StoredEntry::new(content))),
            Err(_) => state.count(GuardCount::store_errors),
        }
        known
    }

    /// The older value that may be served instead of a failure, and how long to store it. Stored again, it tells the whole
    /// fleet not to ask the origin for the back-off.
    pub(crate) fn stand_in(&self, now: u64) -> Option<(Entry, Duration)> {
        let previous = self.rejected.as_ref()?.value()?;
        let may = match self.flight.mode {
            // A background refresh has no waiters: the value is not served by this, only stored again with a back-off.
            LoadMode::BackgroundRefresh => previous.expiry.serves(now) != Freshness::Expired,
            LoadMode::Leased | LoadMode::Unleased | LoadMode::Probe | LoadMode::ForcedReload => {
                previous.expiry.stands_in(now)
            }
        };
        if !may {
            return None;
        }
        let times = previous.expiry.rested(now, self.policy.back_off);
        let keep = times.stale_until.max(times.error_until).saturating_sub(now);
        Some((Entry { expiry: times, ..previous.clone() }, Duration::from_millis(keep)))
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
