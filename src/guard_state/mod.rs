//! What all clones of one guard share: the store, the flights, the counters. Knows no Redis, no HTTP.

#[cfg(feature = "http")]
mod http;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;

use crate::flight::shared_read::LookUps;
use crate::flight::waiter;
use crate::flight::{self, Flights};
use crate::key::flight::{FlightKey, Lane};
use crate::key::{Hashed, Key};
use crate::loader::Loader;
use crate::loader::nesting::Turn;
use crate::observe::Outage;
use crate::observe::{Count, Counters, Outcome, Seldom, log, warn_if};
use crate::store::{NodeStore, StoreError};
use crate::tracker::{Gauge, Waiters};
use crate::value::entry::{Entry, Kind};
use crate::value::outcome::Ending;
use crate::value::reader::Opened;
use crate::value::tags::Tagged;

/// One guard core: everything behind a [`StampedeGuard`](crate::StampedeGuard) and its clones.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) store: NodeStore,
    /// Escaped, as it stands in key names.
    pub(crate) namespace: Box<str>,
    pub(crate) flights: Arc<Flights<FlightKey, Loader, Ending, Hashed>>,
    pub(crate) look_ups: Arc<LookUps<Key, LookedUp, Hashed>>,
    pub(crate) counters: Counters,
    /// Of values that can not be shared.
    pub(crate) warned: Seldom,
    /// Of stored bytes that are no entry.
    damaged: Seldom,
    /// Of leases that ran out because they were not renewed.
    pub(crate) unrenewed: Seldom,
    /// Of callers for whom there was no flight.
    pub(crate) crowded: Seldom,
    /// Tasks of flights that run.
    pub(crate) tasks: Arc<Gauge>,
    /// Leases that are held.
    pub(crate) leases: Arc<Gauge>,
    /// Leases that it may hold without knowing it: those it waits for, and those it gives back.
    pub(crate) doubtful: Arc<Gauge>,
    /// Loads that run without the store because it can not be asked.
    pub(crate) fail_open: Arc<Gauge>,
    /// Of permits: loads that run beyond `max_concurrent_loads` because nobody can be asked for one.
    pub(crate) uncapped: Outage,
    #[cfg(feature = "http")]
    pub(crate) http: self::http::State,
    /// For its locks.
    pub(crate) waiters: Waiters,
    /// Releases of its locks and permits that nobody waits for.
    pub(crate) background: Arc<Gauge>,
    /// Set by `shutdown`: calls ask the store nothing from now on.
    closed: AtomicBool,
    /// Set when a shutdown's deadline has passed: leases are handed over.
    leaving: AtomicBool,
    /// Tells so. Wakes in the order in which they came, which a channel with many receivers does not.
    left: Notify,
    longest_command_us: AtomicU64,
}

pub(crate) type Leader = flight::Leader<FlightKey, Loader, Ending, Hashed>;
pub(crate) type Joined = flight::Joined<FlightKey, Loader, Ending, Hashed>;
pub(crate) type Follower = waiter::Follower<Loader, Ending>;

/// What those who queue for a read of a key are told.
#[derive(Clone, Debug)]
pub(crate) enum LookedUp {
    /// What it came to, for all who asked at that moment.
    Read(Result<Option<Arc<SharedRead>>, StoreError>),
    /// It was left out: there is a flight to join, which reads by itself.
    LeftOut,
}

/// Stored bytes, decoded.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    Entry(Entry),
    Unreadable(Bytes),
    /// A tag of it was invalidated.
    Invalidated(Bytes),
}

/// Stored bytes that a flight has read and will not serve as they are.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) raw: Bytes,
    /// The value in them, if they hold one: to be served where a load fails, and for the load to build on.
    pub(crate) value: Option<Entry>,
}

impl Seen {
    pub(crate) fn of(stored: Stored, key: &Key) -> Self {
        match stored {
            Stored::Entry(entry) => Self::entry(entry, key),
            Stored::Unreadable(raw) | Stored::Invalidated(raw) => Self { raw, value: None },
        }
    }

    pub(crate) fn entry(entry: Entry, key: &Key) -> Self {
        let raw = entry.encode(key);
        Self { raw, value: (entry.kind == Kind::Value).then_some(entry) }
    }
}

/// What many callers were given by one read.
#[derive(Debug)]
pub(crate) struct SharedRead {
    pub(crate) stored: Stored,
    /// The tags it was found to be current by.
    pub(crate) tags: Box<[Key]>,
    /// What the first of them has made of it, for the others.
    pub(crate) opened: Opened,
}

impl SharedRead {
    pub(crate) fn new(stored: Stored, tags: &[Key]) -> Arc<Self> {
        Arc::new(Self { stored, tags: tags.into(), opened: Opened::new() })
    }
}

impl Node {
    /// The turn of a load that holds one of `limit` permits of this namespace.
    pub(crate) fn permit_turn(&self, limit: u32) -> Turn {
        Turn::Permit { place: self.store.place(), namespace: self.namespace.clone(), limit }
    }

    /// The turn of a load that holds one of this node's places for loads without the store.
    pub(crate) fn place_turn(&self) -> Turn {
        Turn::Place(self.store.node())
    }

    pub(crate) fn new(store: NodeStore, namespace: Box<str>, max_flights: usize) -> Self {
        Self {
            store,
            namespace,
            flights: Arc::new(Flights::new(max_flights)),
            look_ups: Arc::new(LookUps::new()),
            counters: Counters::default(),
            warned: Seldom::default(),
            damaged: Seldom::default(),
            unrenewed: Seldom::default(),
            crowded: Seldom::default(),
            tasks: Arc::default(),
            leases: Arc::default(),
            doubtful: Arc::default(),
            fail_open: Arc::default(),
            uncapped: Outage::default(),
            #[cfg(feature = "http")]
            http: self::http::State::default(),
            waiters: Waiters::default(),
            background: Arc::default(),
            closed: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            left: Notify::new(),
            longest_command_us: AtomicU64::new(0),
        }
    }

    /// Takes note of how long a command may take by a policy that is used from now on.
    pub(crate) fn note_command_timeout(&self, timeout: Duration) {
        let us = timeout.as_micros().try_into().unwrap_or(u64::MAX);
        self.longest_command_us.fetch_max(us, Ordering::Relaxed);
    }

    /// How long a command may take by the most patient policy.
    pub(crate) fn longest_command(&self) -> Duration {
        Duration::from_micros(self.longest_command_us.load(Ordering::Relaxed))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether a shutdown's deadline has passed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// From now on it has: flights give back and hand over what they hold.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        self.left.notify_waiters();
    }

    /// Waits until it has.
    pub(crate) async fn leaving(&self) {
        let mut left = pin!(self.left.notified());
        // From here on it is woken; before, it sees the flag.
        left.as_mut().enable();
        if !self.is_leaving() {
            left.await;
        }
    }

    pub(crate) fn count(&self, count: Count) {
        self.counters.add(count);
    }

    /// Counts a value that can not be shared; whether it is time to warn of one.
    pub(crate) fn unshareable(&self) -> bool {
        self.count(Count::unshareable);
        self.warned.is_due()
    }

    /// Counts and reports an entry that is of no use. Seldom as a warning: what has damaged one has mostly damaged many.
    pub(crate) fn unreadable(&self, key: &Key, reason: &dyn fmt::Debug) {
        self.count(Count::unreadable);
        warn_if!(
            log::GUARD,
            self.damaged.is_due(),
            ?key,
            ?reason,
            "a stored entry is unreadable; it is loaded anew"
        );
    }

    /// Counts and reports how a request was answered.
    pub(crate) fn answered(&self, key: &Key, outcome: Outcome) {
        self.counters.request(outcome);
        // The digest is only computed where somebody listens.
        tracing::trace!(target: log::GUARD, ?key, outcome = outcome.as_str(), "stampede_guard.answered");
    }

    /// Tags with their present ids, made where there are none.
    pub(crate) async fn tagged(
        &self,
        tags: Vec<Key>,
        life: Duration,
        within: Duration,
    ) -> Result<Vec<Tagged>, StoreError> {
        if tags.is_empty() {
            return Ok(Vec::new());
        }
        let ids = self.store.tags().tag_ids(&tags, life, within).await?;
        Ok(tags.into_iter().zip(ids).map(|(tag, id)| Tagged { tag, id }).collect())
    }

    /// `entry`, unless one of its tags was invalidated since it was loaded, as the ids of `tags` show that were read
    /// with it. Those of other tags are read now. An entry without one of `tags` was stored by somebody who did not
    /// care for it, so nobody knows.
    pub(crate) async fn unless_invalidated(
        &self,
        key: &Key,
        entry: Entry,
        tags: &[Key],
        ids: &[Option<u64>],
        within: Duration,
    ) -> Result<Stored, StoreError> {
        if entry.kind != Kind::Value || (tags.is_empty() && entry.tags.is_empty()) {
            return Ok(Stored::Entry(entry));
        }
        let same = |(tag, id): (&Key, &Option<u64>)| id.is_some() && entry.tags.id_of(tag) == *id;
        if !tags.iter().zip(ids).all(same) {
            return Ok(Stored::Invalidated(entry.encode(key)));
        }
        let known = |name: &str| tags.iter().any(|tag| tag.name() == name);
        let others: Vec<_> =
            entry.tags.iter().filter(|(name, _)| !known(name)).map(|(name, _)| Key::of_name(name)).collect();
        if !others.is_empty() {
            let ids = self.store.tags().present_ids(&others, within).await?;
            if !others.iter().zip(&ids).all(same) {
                return Ok(Stored::Invalidated(entry.encode(key)));
            }
        }
        Ok(Stored::Entry(entry))
    }

    /// Takes the key's flights out of the map, so that later callers start anew.
    pub(crate) fn detach(&self, key: &Key) {
        for lane in [Lane::Lease, Lane::Beside, Lane::Heal, Lane::Refresh, Lane::Anew] {
            self.flights.detach(&FlightKey { key: key.clone(), lane });
        }
    }

    /// The same for all keys of a resource that was changed.
    pub(crate) fn detach_resource(&self, key: &Key) {
        self.detach(key);
        if let Some(reports) = key.of_reports(&self.namespace) {
            self.flights.detach_if(|flight| flight.key.is_below(&reports));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.store.close();
    }
}

impl Stored {
    /// Decodes what the store returned for `key`; damage is counted, and logged as what it is.
    pub(crate) fn decode(node: &Node, raw: Bytes, key: &Key) -> Self {
        Entry::decode(raw, key).map_or_else(
            |(reason, raw)| {
                node.unreadable(key, &reason);
                Self::Unreadable(raw)
            },
            Self::Entry,
        )
    }
}
