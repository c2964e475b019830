//! What a load's result means for those who share it: here, in other processes, and later.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::leader::Lead;
use super::tag_check::current;
use crate::guard_state::Seen;
use crate::key::Key;
use crate::key::flight::Lane;
use crate::loader::{LoadResult, Mark};
use crate::observe::Count;
use crate::store::{StoreError, StoreErrorKind};
use crate::value::entry::{Encoding, Entry, Kind};
use crate::value::freshness::{Lifetimes, Serves};
use crate::value::outcome::Ending;
use crate::value::tags::{TagList, Tagged};

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
