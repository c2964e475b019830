//! The end of a load: what its result means, and for whom; then the fleet is told, and the callers that are seated on its flight. Step 7.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::lease::Lease;
use super::load::{Lead, LoadStart, let_go_since};
use super::tag_check::current;
use crate::flight::order::Question;
use crate::guard_state::Seen;
use crate::key::Key;
use crate::key::flight::Lane;
use crate::loader::{LoadResult, Loaded, Mark};
use crate::observe::Count;
use crate::store::{Kept, StoreError, StoreErrorKind};
use crate::value::entry::{Encoding, Entry, Kind};
use crate::value::freshness::{Lifetimes, Serves};
use crate::value::outcome::Ending;
use crate::value::tags::{TagList, Tagged};

impl Lead {
    /// Reads the ids of the policy's tags, as a load begins.
    pub(crate) async fn load_start(&self) -> LoadStart {
        let Self { node, policy, .. } = self;
        let (asked, tags) = (Question::now(), policy.tag_keys(&node.namespace));
        let tagged = node.tagged(tags, policy.tag_life(), policy.command_timeout).await;
        if tagged.is_err() {
            node.count(Count::store_errors);
        }
        LoadStart { asked, tagged: tagged.ok() }
    }

    /// Whether any of these tags may have been invalidated since. Where the store does not say, it may: callers joined that came
    /// after the load had begun, and have not looked for themselves. With a `life`, the ids have that from this look on.
    async fn was_invalidated(&self, tagged: &[Tagged], life: Option<Duration>) -> bool {
        let Some(first) = tagged.first() else { return false };
        let tags: Vec<_> = tagged.iter().map(|tagged| tagged.tag.clone()).collect();
        let (store, within) = (&self.node.store, self.policy.command_timeout);
        let ask = async || match life {
            // Makes one where there is none, which is as good as none: it is another.
            Some(life) => {
                let ids = store.tags().tag_ids(&tags, life, within).await?;
                Ok::<_, StoreError>(ids.into_iter().map(Some).collect())
            }
            None => store.tags().present_ids(&tags, within).await,
        };
        let mut ids = ask().await;
        if ids.is_err() {
            // A connection that broke is soon made again, and that is cheaper than one load more.
            let _ = store.reach(first.tag.name(), self.budget.left()).await;
            ids = ask().await;
        }
        ids.is_err() || ids.is_ok_and(|ids| ids.iter().zip(tagged).any(|(id, tagged)| *id != Some(tagged.id)))
    }

    /// Step 7: tells the fleet, then those seated here.
    pub(crate) async fn end(
        mut self,
        mut loaded: Loaded,
        took: Duration,
        start: LoadStart,
        lease: Option<Lease>,
    ) {
        // A caller that comes from here on looks for itself: it may come after a change that another process has made as soon as
        // the store has this load's end, and before that is known here. Its look-up comes after the end, on the same connection.
        self.leader.detach();
        let (known, mut tagged) = (start.tagged.is_some(), start.tagged.unwrap_or_default());
        let outdated = match &mut loaded.result {
            LoadResult::Value { tags, lifetimes, .. } => {
                tagged.append(tags);
                let life = lease.as_ref().and_then(|_| self.policy.longer_tag_life(*lifetimes));
                !known || self.was_invalidated(&tagged, life).await
            }
            LoadResult::Aside => {
                loaded.settle();
                self.leader.finish(Ending::Invalidated);
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
                (!known).then(|| Ending::Failed(failure.clone()))
            }
            LoadResult::Uncacheable { mark } if lease.is_some() && self.leaves_served(*mark) => {
                (!self.see_again().await).then_some(Ending::Uncacheable)
            }
            _ => None,
        };
        let Loaded { result, settled } = loaded;
        let Share { ending, elsewhere, keep, marker, replay } = self.share(result, took, &tagged);
        let keep = keep.filter(|_| unsure.is_none());
        let elsewhere = elsewhere.or(unsure);
        let Self { node, flight, leader, seen, budget, .. } = self;
        let seen = seen.as_ref().map(|seen| &seen.raw);

        // Until when no other process has changed what was loaded.
        let confirmed = lease.as_ref().map(Lease::confirmed);
        let tell_fleet = async {
            let lease = lease?;
            match (&ending, keep) {
                _ if outdated => {
                    lease.hand_over(0).await;
                    None
                }
                (Ending::Value(entry) | Ending::Stale(entry), Some(keep)) => {
                    lease.commit(entry.encode(&flight.key), keep).await
                }
                (ending, _) => lease.fail(elsewhere.as_ref().unwrap_or(ending), replay, marker, seen).await,
            }
        };
        tokio::pin!(tell_fleet);
        // The store first, so that the next request hits; but only within what the caller gives the
        // store. The rest of the way is then gone without the callers.
        let told = timeout(budget.left(), &mut tell_fleet).await;
        let current = match told {
            _ if outdated => Some(start.asked),
            // The lease was this load's until now.
            Ok(Some(Kept::Yes | Kept::Aside)) => None,
            Ok(Some(Kept::No)) => confirmed,
            // The store did not say. A failure may be older than a change.
            Ok(None) | Err(_) => confirmed.filter(|_| ending.has_value()),
        };
        if let Some(current) = current {
            let_go_since(&leader, current);
        }
        match settled {
            // Its own caller is given the older value too.
            Some(settled) if !matches!(ending, Ending::Stale(_)) => settled(),
            _ => {}
        }
        leader.finish(ending.clone());
        if told.is_err() {
            node.count(Count::budget_exceeded);
            tell_fleet.await;
        }
    }
}

/// How long nobody queues for a resource that was found uncacheable.
const MARKER_FOR: Duration = Duration::from_secs(10);

/// What is shared of a load, and with whom.
pub(crate) struct Share {
    pub(crate) ending: Ending,
    /// What other processes are told, if it is something else.
    pub(crate) elsewhere: Option<Ending>,
    /// How long the value is stored; `None` shares it with the waiting wave only.
    pub(crate) keep: Option<Duration>,
    /// A marker for those who come later, and its lifetime.
    pub(crate) marker: Option<(Bytes, Duration)>,
    /// How long a failure is told to those who come later.
    pub(crate) replay: Duration,
}

impl Share {
    fn only(ending: Ending) -> Self {
        Self { ending, elsewhere: None, keep: None, marker: None, replay: Duration::ZERO }
    }
}

impl Lead {
    /// What a load's result means for those who share it.
    pub(crate) fn share(&self, result: LoadResult, took: Duration, tagged: &[Tagged]) -> Share {
        let now = self.node.store.now();
        match result {
            LoadResult::Value { encoding, payload, lifetimes, validator, tags: _, brief } => {
                let (times, keep) = self.policy.jittered(lifetimes).from(now, took);
                let tags = TagList::new(tagged);
                let value = |payload| {
                    let (kind, validator, tags) = (Kind::Value, validator[..].into(), tags.clone());
                    Ending::Value(Entry { kind, encoding, stored_at: now, times, validator, tags, payload })
                };
                let keep = (!keep.is_zero()).then_some(keep);
                Share { keep, elsewhere: brief.map(value), ..Share::only(value(payload)) }
            }
            LoadResult::Aside => Share::only(Ending::Gone),
            LoadResult::Uncacheable { mark } => match self.stand_in(now).filter(|_| self.leaves_served(mark))
            {
                Some((entry, keep)) => Share { keep: Some(keep), ..Share::only(Ending::Stale(entry)) },
                None => Share {
                    marker: self.marks(mark, now).then(|| marker_entry(&self.flight.key, now)),
                    ..Share::only(Ending::Uncacheable)
                },
            },
            LoadResult::Failed(failure) => match self.stand_in(now) {
                Some((entry, keep)) => {
                    self.node.count(Count::stand_ins);
                    Share { keep: Some(keep), ..Share::only(Ending::Stale(entry)) }
                }
                None => Share { replay: self.policy.error_for, ..Share::only(Ending::Failed(failure)) },
            },
        }
    }

    /// Whether what others are served meanwhile stays for them. Nobody asks the origin for a while then: each of them would
    /// begin another load that brings nothing.
    pub(crate) fn leaves_served(&self, mark: Mark) -> bool {
        self.flight.lane == Lane::Refresh && mark != Mark::Over
    }

    fn marks(&self, mark: Mark, now: u64) -> bool {
        let seen = self.seen.as_ref().and_then(|seen| seen.value.as_ref());
        match mark {
            Mark::No => false,
            Mark::IfUnserved => !seen.is_some_and(|seen| seen.serves(now).is_at_once()),
            Mark::Over => true,
        }
    }

    /// Reads again what may stand in for the failed load, and its tags. It was read before this flight had the lease, so
    /// it may have been invalidated since; from now on whoever does that takes the lease away, or a tag's id, by which
    /// what is stored is known to be gone. Whether it is known.
    pub(crate) async fn see_again(&mut self) -> bool {
        if self.stand_in(self.node.store.now()).is_none() {
            return true;
        }
        let Self { node, policy, budget, flight, seen, .. } = self;
        let (Some(within), asked) = (budget.next(), Instant::now()) else { return false };
        let tags = policy.tag_keys(&node.namespace);
        let found = async {
            match node.store.look_up(&flight.key, within).await? {
                Some(raw) => current(node, raw, &flight.key, &tags, within).await.map(Some),
                None => Ok(None),
            }
        };
        let late = |_| Err(StoreError::new(StoreErrorKind::TimedOut));
        let found = timeout(within, found).await.unwrap_or_else(late);
        budget.spend(asked);
        let known = found.is_ok();
        match found {
            Ok(stored) => *seen = stored.map(|stored| Box::new(Seen::of(stored, &flight.key))),
            Err(_) => node.count(Count::store_errors),
        }
        known
    }

    /// The older value that may be served instead of a failure. Stored again, it tells the whole fleet not
    /// to ask the origin for a while.
    pub(crate) fn stand_in(&self, now: u64) -> Option<(Entry, Duration)> {
        let previous = self.seen.as_ref()?.value.as_ref()?;
        let may = match self.flight.lane {
            // Nobody is given it by this: it only rests.
            Lane::Refresh => previous.times.serves(now) != Serves::No,
            Lane::Lease | Lane::Beside | Lane::Heal | Lane::Anew => previous.times.stands_in(now),
        };
        if !may {
            return None;
        }
        let times = previous.times.rested(now, self.policy.back_off);
        let keep = times.stale_until.max(times.error_until).saturating_sub(now);
        Some((Entry { times, ..previous.clone() }, Duration::from_millis(keep)))
    }
}

fn marker_entry(key: &Key, now: u64) -> (Bytes, Duration) {
    let marker = Entry {
        kind: Kind::Marker,
        encoding: Encoding::RAW,
        stored_at: now,
        times: Lifetimes::fresh(MARKER_FOR).from(now, Duration::ZERO).0,
        validator: Box::default(),
        tags: TagList::default(),
        payload: Bytes::new(),
    };
    (marker.encode(key), MARKER_FOR)
}
