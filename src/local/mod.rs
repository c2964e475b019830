//! The local tier: copies of values in this process's memory, under a volume lease.
//!
//! A node serves a copy only under its *right*, a moment of its own monotonic clock that RENEW alone moves. A change is announced to all
//! nodes that may have a right, and is acknowledged to its caller when each of them has dropped its copies or must have lost its
//! right. No step needs a message to arrive; messages only make it fast. Every guard announces its changes, also one that keeps no
//! copies. docs/decisions/401-local-tier.md has the steps and the proof.
//!
//! This file has the state that the steps share: the registries that this process knows and since when ([`KnownRegistries`]), the
//! acknowledgements of its announcements ([`PendingAnnouncements`]), and its right to serve from memory ([`Right`]).

mod announcing;
#[cfg(feature = "local")]
mod copies;
#[cfg(not(feature = "local"))]
#[path = "no_copies.rs"]
mod copies;
mod renewal;
mod tickets;
mod tier;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;
use uuid::Uuid;

pub(crate) use self::announcing::AnnouncedChange;
pub(crate) use self::tickets::LocalCopy;
pub(crate) use self::tickets::Ticket;
pub(crate) use self::tier::{DEFAULT_CAPACITY, DEFAULT_TERM, LocalTier};
use crate::store::volume::{Member, RegistryState};
use crate::sync::lock;

/// How many registries are retained: a server may come back with an older one.
const MOST: usize = 4;

#[derive(Debug, Default)]
struct KnownRegistries {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    known_registries: Vec<(Uuid, Instant)>,
    /// The longest term that a registry of the volume has reported.
    term: Duration,
}

impl KnownRegistries {
    /// Records the registry of a reply. Returns since when this process knows it, and the longest term.
    fn learn(&self, registry: &RegistryState) -> (Instant, Duration) {
        let mut known = lock(&self.known);
        known.term = known.term.max(registry.term);
        let term = known.term;
        if let Some((_, since)) =
            known.known_registries.iter().find(|(registry_id, _)| *registry_id == registry.registry_id)
        {
            return (*since, term);
        }
        if known.known_registries.len() == MOST {
            known.known_registries.remove(0);
        }
        let now = Instant::now();
        known.known_registries.push((registry.registry_id, now));
        (now, term)
    }

    /// The newest registry that was known a term ago: rights that were set before it existed have ended.
    fn known_registry(&self, term: Duration) -> Option<Uuid> {
        let known = lock(&self.known);
        let term = known.term.max(term);
        known
            .known_registries
            .iter()
            .rev()
            .find(|(_, since)| since.elapsed() >= term)
            .map(|(registry_id, _)| *registry_id)
    }

    /// Whether a registry was ever seen here.
    fn any(&self) -> bool {
        !lock(&self.known).known_registries.is_empty()
    }
}

/// The announcements that wait for acknowledgements.
#[derive(Debug, Default)]
struct PendingAnnouncements {
    by_id: Mutex<HashMap<Uuid, Arc<Acknowledgements>>>,
}

/// The nodes that have acknowledged an announcement, also before the reply to it.
#[derive(Debug, Default)]
struct Acknowledgements {
    by: Mutex<HashSet<Uuid>>,
    more: Notify,
}

impl PendingAnnouncements {
    /// Collects the acknowledgements of this announcement. Must be called before it is sent.
    fn await_acknowledgements(&self, id: Uuid) {
        lock(&self.by_id).insert(id, Arc::default());
    }

    fn of(&self, id: Uuid) -> Arc<Acknowledgements> {
        lock(&self.by_id).get(&id).cloned().unwrap_or_default()
    }

    fn forget(&self, ids: &[Uuid]) {
        let mut by_id = lock(&self.by_id);
        for id in ids {
            by_id.remove(id);
        }
    }

    fn acknowledged(&self, id: Uuid, by: Uuid) {
        let acknowledgements = lock(&self.by_id).get(&id).cloned();
        if let Some(acknowledgements) = acknowledgements {
            lock(&acknowledgements.by).insert(by);
            acknowledgements.more.notify_one();
        }
    }
}

impl Acknowledgements {
    /// The members that have not acknowledged.
    fn silent(&self, members: &[Member]) -> Vec<Member> {
        let by = lock(&self.by);
        members.iter().copied().filter(|member| !by.contains(&member.node)).collect()
    }

    /// Waits for the next acknowledgement after this call.
    fn more(&self) -> Notified<'_> {
        self.more.notified()
    }
}

/// How long a right lasts, and how long an announcer waits, as parts of the term. Between the two is the margin for clocks that run at
/// different speeds: 3 of 64 parts.
const RIGHT_LASTS: (u32, u32) = (60, 64);
const ANNOUNCER_WAITS: (u32, u32) = (63, 64);

fn part(term: Duration, (numerator, denominator): (u32, u32)) -> Duration {
    term.mul_f64(f64::from(numerator) / f64::from(denominator))
}

/// For how long after the sending of a RENEW its node may serve from memory.
fn right_lasts(term: Duration) -> Duration {
    part(term, RIGHT_LASTS)
}

/// For how long after its answer an announcer waits for a member that stays silent: longer than all rights that were set before.
fn announcer_waits(term: Duration) -> Duration {
    part(term, ANNOUNCER_WAITS)
}

/// The moments of a node's clock as numbers, which threads share without a lock.
#[derive(Clone, Copy, Debug)]
struct NodeClock(Instant);

/// Microseconds since the node began.
type Moment = u64;

impl NodeClock {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn at(self, instant: Instant) -> Moment {
        let since = instant.saturating_duration_since(self.0);
        since.as_secs() * 1_000_000 + u64::from(since.subsec_micros())
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Claims a job of the process until a moment, if no claim is valid now. A claim ends by time and not with its task, because a task of
/// a runtime that is not driven never ends.
fn try_claim(claimed_until: &AtomicU64, now: Moment, until: Moment) -> bool {
    claimed_until
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |before| (before <= now).then_some(until))
        .is_ok()
}

/// Until when a node may serve from memory.
#[derive(Debug, Default)]
struct Right {
    until: AtomicU64,
    /// The latest end that the right has ever had.
    last: AtomicU64,
}

impl Right {
    /// Must be read before the copy is looked up. (The other order would serve a copy that was filled under a later right.)
    fn until(&self) -> Moment {
        self.until.load(Ordering::SeqCst)
    }

    /// When the last right ended or will end; zero if there never was one.
    fn last(&self) -> Moment {
        self.last.load(Ordering::SeqCst)
    }

    /// Must be called after the copies that the RENEW named were dropped.
    fn extend(&self, until: Moment) {
        self.last.fetch_max(until, Ordering::SeqCst);
        self.until.fetch_max(until, Ordering::SeqCst);
    }

    fn give_up(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Ends the right for good: no copy is served under it any more, not even while the store is down.
    fn end(&self) {
        self.give_up();
        self.last.store(0, Ordering::SeqCst);
    }
}
