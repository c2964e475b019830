//! The end of a load: decides what its result means for its waiters and the fleet, then tells the store and the waiters. Step 7.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::lease::Lease;
use super::load::{FlightTask, LoadStart, let_go_since};
use super::tag_check::current;
use crate::flight::order::SentAt;
use crate::guard_state::RejectedEntry;
use crate::key::Key;
use crate::key::flight::LoadMode;
use crate::loader::{LoadOutput, LoadResult, MarkerRule};
use crate::observe::Count;
use crate::store::{StoreError, StoreErrorKind, TokenCheck};
use crate::value::entry::{Encoding, Entry, EntryKind};
use crate::value::freshness::{Freshness, Lifetimes};
use crate::value::outcome::FlightOutcome;
use crate::value::tags::{TagId, TagList};

impl FlightTask {
    /// Reads the ids of the policy's tags, as a load begins.
    pub(crate) async fn load_start(&self) -> LoadStart {
        let Self { state, policy, .. } = self;
        let (asked, tags) = (SentAt::now(), policy.tag_keys(&state.namespace));
        let tagged = state.tagged(tags, policy.tag_life(), policy.command_timeout).await;
        if tagged.is_err() {
            state.count(Count::store_errors);
        }
        LoadStart { asked, tagged: tagged.ok() }
    }

    /// Whether any of these tags may have been invalidated since its id was read. True if the store does not answer: callers that
    /// came after the load had begun have joined without a look-up. With a `life`, this read sets the ids' TTL to it.
    async fn was_invalidated(&self, tagged: &[TagId], life: Option<Duration>) -> bool {
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

    /// Step 7: tells the fleet, then the waiters of this process.
    pub(crate) async fn end(
        mut self,
        mut loaded: LoadOutput,
        took: Duration,
        start: LoadStart,
        lease: Option<Lease>,
    ) {
        // Callers that come from here on make a look-up instead of joining. As soon as the store has executed this load's commit,
        // another process may change the resource, before this process has the commit's reply. Such a look-up is sent after the
        // commit on the same connection, so it sees the change.
        self.leader.detach();
        let (known, mut tagged) = (start.tagged.is_some(), start.tagged.unwrap_or_default());
        let outdated = match &mut loaded.result {
            LoadResult::Value { tags, lifetimes, .. } => {
                tagged.append(tags);
                let life = lease.as_ref().and_then(|_| self.policy.longer_tag_life(*lifetimes));
                !known || self.was_invalidated(&tagged, life).await
            }
            LoadResult::OnlyForCaller => {
                loaded.settle();
                self.leader.finish(FlightOutcome::Invalidated);
                if let Some(lease) = lease {
                    lease.hand_over(0).await;
                }
                return;
            }
            LoadResult::Uncacheable { .. } | LoadResult::Failed(_) => false,
        };
        let unsure = match &loaded.result {
            LoadResult::Failed(failure) if lease.is_some() => {
                let known = self.see_again().await;
                (!known).then(|| FlightOutcome::Failed(failure.clone()))
            }
            LoadResult::Uncacheable { mark } if lease.is_some() && self.leaves_served(*mark) => {
                (!self.see_again().await).then_some(FlightOutcome::Uncacheable)
            }
            _ => None,
        };
        let LoadOutput { result, settled } = loaded;
        let Publication { outcome, elsewhere, keep, marker, replay } = self.classify(result, took, &tagged);
        let keep = keep.filter(|_| unsure.is_none());
        let elsewhere = elsewhere.or(unsure);
        let Self { state, flight, leader, rejected: seen, budget, .. } = self;
        let seen = seen.as_ref().map(|seen| &seen.raw);

        // Up to this moment no other process has invalidated the key.
        let confirmed = lease.as_ref().map(Lease::confirmed);
        let tell_fleet = async {
            let lease = lease?;
            match (&outcome, keep) {
                _ if outdated => {
                    lease.hand_over(0).await;
                    None
                }
                (FlightOutcome::Value(entry) | FlightOutcome::Stale(entry), Some(keep)) => {
                    lease.commit(entry.encode(&flight.key), keep).await
                }
                (outcome, _) => lease.fail(elsewhere.as_ref().unwrap_or(outcome), replay, marker, seen).await,
            }
        };
        tokio::pin!(tell_fleet);
        // The store first, so that the next request hits; but the waiters wait for that only within the first caller's
        // budget. If it runs out, they are answered first and the commit goes on below.
        let told = timeout(budget.left(), &mut tell_fleet).await;
        let current = match told {
            _ if outdated => Some(start.asked),
            // This load held the lease until now.
            Ok(Some(TokenCheck::Held | TokenCheck::ForeignData)) => None,
            Ok(Some(TokenCheck::Lost)) => confirmed,
            // The store did not say. Only a value must not be older than a change; a failure may be.
            Ok(None) | Err(_) => confirmed.filter(|_| outcome.has_value()),
        };
        if let Some(current) = current {
            let_go_since(&leader, current);
        }
        match settled {
            // For `FlightOutcome::Stale`, the loader's own caller is given the older value too.
            Some(settled) if !matches!(outcome, FlightOutcome::Stale(_)) => settled(),
            _ => {}
        }
        leader.finish(outcome.clone());
        if told.is_err() {
            state.count(Count::budget_exceeded);
            tell_fleet.await;
        }
    }
}

/// How long callers do not queue for a resource that was found uncacheable.
const MARKER_FOR: Duration = Duration::from_secs(10);

/// What a load's result means for its waiters, other processes and later callers.
pub(crate) struct Publication {
    pub(crate) outcome: FlightOutcome,
    /// What other processes are told, if that differs from `outcome`.
    pub(crate) elsewhere: Option<FlightOutcome>,
    /// How long the value is stored; `None` shares it with the current waiters only.
    pub(crate) keep: Option<Duration>,
    /// A marker for later callers, and its lifetime.
    pub(crate) marker: Option<(Bytes, Duration)>,
    /// How long a failure is replayed to later callers.
    pub(crate) replay: Duration,
}

impl Publication {
    fn only(outcome: FlightOutcome) -> Self {
        Self { outcome, elsewhere: None, keep: None, marker: None, replay: Duration::ZERO }
    }
}

impl FlightTask {
    /// Decides what a load's result means.
    pub(crate) fn classify(&self, result: LoadResult, took: Duration, tagged: &[TagId]) -> Publication {
        let now = self.state.store.now();
        match result {
            LoadResult::Value { encoding, payload, lifetimes, validator, tags: _, brief } => {
                let (times, keep) = self.policy.jittered(lifetimes).from(now, took);
                let tags = TagList::new(tagged);
                let value = |payload| {
                    let (kind, validator, tags) = (EntryKind::Value, validator[..].into(), tags.clone());
                    FlightOutcome::Value(Entry {
                        kind,
                        encoding,
                        stored_at: now,
                        expiry: times,
                        validator,
                        tags,
                        payload,
                    })
                };
                let keep = (!keep.is_zero()).then_some(keep);
                Publication { keep, elsewhere: brief.map(value), ..Publication::only(value(payload)) }
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
                    self.state.count(Count::stand_ins);
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
    pub(crate) fn leaves_served(&self, mark: MarkerRule) -> bool {
        self.flight.mode == LoadMode::BackgroundRefresh && mark != MarkerRule::Replace
    }

    fn marks(&self, mark: MarkerRule, now: u64) -> bool {
        let seen = self.rejected.as_ref().and_then(|seen| seen.value.as_ref());
        match mark {
            MarkerRule::No => false,
            MarkerRule::IfUnserved => !seen.is_some_and(|seen| seen.serves(now).is_at_once()),
            MarkerRule::Replace => true,
        }
    }

    /// Reads the value that may stand in for the failed load again, and its tags. It was first read before this flight had the
    /// lease, so it may have been invalidated since. An invalidation after this read takes the lease or a tag's id away, so that
    /// a value stored under them is known to be invalid. Returns whether the store answered.
    pub(crate) async fn see_again(&mut self) -> bool {
        if self.stand_in(self.state.store.now()).is_none() {
            return true;
        }
        let Self { state, policy, budget, flight, rejected: seen, .. } = self;
        let (Some(within), asked) = (budget.next(), Instant::now()) else { return false };
        let tags = policy.tag_keys(&state.namespace);
        let found = async {
            match state.store.look_up(&flight.key, within).await? {
                Some(raw) => current(state, raw, &flight.key, &tags, within).await.map(Some),
                None => Ok(None),
            }
        };
        let late = |_| Err(StoreError::new(StoreErrorKind::TimedOut));
        let found = timeout(within, found).await.unwrap_or_else(late);
        budget.spend(asked);
        let known = found.is_ok();
        match found {
            Ok(stored) => *seen = stored.map(|stored| Box::new(RejectedEntry::of(stored, &flight.key))),
            Err(_) => state.count(Count::store_errors),
        }
        known
    }

    /// The older value that may be served instead of a failure, and how long to store it. Stored again, it tells the whole
    /// fleet not to ask the origin for the back-off.
    pub(crate) fn stand_in(&self, now: u64) -> Option<(Entry, Duration)> {
        let previous = self.rejected.as_ref()?.value.as_ref()?;
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
    };
    (marker.encode(key), MARKER_FOR)
}
