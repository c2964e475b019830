//! The contract of the fleet protocol with a store: one method per transition.
//!
//! Every method is one atomic step as seen by all nodes (notifying a long queue may take further steps after it). Every
//! mutation is conditional on the caller's [`Token`], or, for ACQUIRE and changes, on a latest moment; a change also on its
//! [number](attempt). So a step that runs late (its caller timed out, left, or was paused) changes only data that belongs to
//! its token, or that its own process has not changed since.
//!
//! The invariants, which other comments cite by number:
//!
//! 1. At most one token is the lease of a key at any moment.
//! 2. A value is stored only while the lease is the token it was loaded under.
//! 3. A waiter is registered ([`Store::watch`]) before it tries to acquire, and a refused acquire enqueues it in the same
//!    step: no wake-up falls between the two.
//! 4. A wake-up is a hint. Only the answer of the next `acquire` counts.
//! 5. Everything a node writes expires by itself.

pub(crate) mod attempt;
pub(crate) mod backend;

#[cfg(test)]
#[path = "../../tests/contract/mod.rs"]
mod contract;
#[cfg(feature = "redis")]
pub(crate) mod credentials;
mod error;
pub(crate) mod handle;
pub(crate) mod lock_store;
pub(crate) mod memory;
pub(crate) mod names;
#[cfg(feature = "redis")]
pub(crate) mod redis;
pub(crate) mod tag_store;
pub(crate) mod volume;
pub(crate) mod volume_store;
pub(crate) mod wake;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

pub(crate) use error::{StoreError, StoreErrorKind};
pub(crate) use handle::StoreHandle;
pub(crate) use names::Token;
pub(crate) use wake::lease_waiters::LeaseWatch;

use crate::health::{Finding, Health};
use crate::key::Key;
use volume::{Announced, Announcement};

/// How long after its deadline an acquire or a change may run. The server's clock may be ahead of the guard's estimate,
/// which is made once a minute, and in a cluster from one master only.
pub(crate) const LATEST: Duration = Duration::from_secs(1);

/// A command's eventual result. Boxed, so that the guard needs no type parameter for its store.
pub(crate) type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// The store of entries, leases and wake-ups, as one node sees it.
///
/// `within` is the deadline of one command, waiting for a connection included. A command that misses it may still run later.
///
/// # Cancel safety
///
/// Dropping a reply's future abandons the answer, not the command.
pub(crate) trait Store: fmt::Debug + Send + Sync {
    /// The identity of this node: the first half of its tokens and the name of its inbox.
    fn node(&self) -> Uuid;

    /// Identifies the store: equal for nodes that share their keys.
    fn store_id(&self) -> u64;

    /// The clock that decides on freshness for all nodes, at `moment`, in milliseconds.
    fn clock_at(&self, moment: Instant) -> u64;

    /// The same clock now.
    fn now(&self) -> u64 {
        self.clock_at(Instant::now())
    }

    /// Whether a reply is ready at once, so that callers have no reads to share.
    fn answers_at_once(&self) -> bool {
        false
    }

    /// Whether keys are on several servers, which fail independently.
    fn is_spread(&self) -> bool {
        false
    }

    /// LOOK UP: the stored bytes, if there are any.
    fn look_up<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, Option<Bytes>>;

    /// ACQUIRE: answers the first that applies: an entry that is not `seen`; the outcome of the holder named in `behind`,
    /// or one that is replayed to newcomers; the lease, if it is free or this token holds it already (its time restarts);
    /// else a position in the queue.
    fn acquire<'a>(&'a self, key: &'a Key, ask: Acquire<'a>, within: Duration) -> Reply<'a, Acquired>;

    /// RENEW: gives the lease `lease` from now, if it is still this token's.
    fn renew<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck>;

    /// COMMIT: if the lease is this token's, stores `entry` for `keep`, frees the lease and wakes all waiters in the queue.
    fn commit<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        entry: Bytes,
        keep: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck>;

    /// FAIL: if the lease is this token's, leaves the outcome for the waiters behind it, ends or keeps the older entry, frees the lease
    /// and wakes them.
    fn fail<'a>(&'a self, key: &'a Key, fail: Fail<'a>, within: Duration) -> Reply<'a, TokenCheck>;

    /// HAND OVER: if the lease is this token's, gives it to the first waiter in the queue that can be reached, and notifies
    /// that waiter. Frees the lease if there is none.
    fn hand_over<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        how: HandOver,
        within: Duration,
    ) -> Reply<'a, HandedOver>;

    /// RELEASE: if the lease is this token's, frees it and wakes all waiters in the queue; else gives up the token's
    /// position there, so that it is not handed the lease later. Also used after a commit whose answer was lost.
    fn release<'a>(&'a self, key: &'a Key, token: &'a Token, within: Duration) -> Reply<'a, TokenCheck>;

    /// INVALIDATE: removes entry, lease and outcome; notifies the lease's holder and all waiters in the queue. With an
    /// entry: the same, and stores it in the same step (INSERT). On one server the same step [announces](volume) the change. An
    /// attempt that a later one has [voided](attempt) changes nothing, and fails as one that came too late.
    fn invalidate<'a>(
        &'a self,
        key: &'a Key,
        insert: Option<Insert>,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, Announced>;

    /// Registers a waiter for hints about `key`, until the [`LeaseWatch`] is dropped. Invariant 3 requires this before the first
    /// `acquire`.
    fn watch(&self, key: &Key, token: &Token) -> LeaseWatch;

    /// Whether hints arrive at present. While they may not, waits are cut short.
    fn hints_arrive(&self) -> bool;

    /// Waits until commands can be sent, at most `within`; also opens the inbox, which is otherwise opened at its first
    /// use.
    fn connect(&self, within: Duration) -> Reply<'_, ()>;

    /// Returns an error if the store lacks a command that loads need, or if this user has no right to it. Neither changes by
    /// itself. `key` must be an unused key.
    fn probe<'a>(&'a self, _key: &'a Key, _within: Duration) -> Reply<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Waits until commands about the key of this name can be sent, at most `within`. Does not wait for the inbox.
    fn reach<'a>(&'a self, _name: &'a str, within: Duration) -> Reply<'a, ()> {
        self.connect(within)
    }

    /// Whether commands about the key of this name fail at once at present, as far as is known without asking the server.
    fn is_down(&self, _name: &str) -> bool {
        false
    }

    /// Has the connections checked and their round trips measured, because a caller has waited long for its turn to send.
    fn suspect(&self) {}

    /// The server of this name, as far as is known.
    fn server_of(&self, _name: &str) -> NamedServer {
        NamedServer::default()
    }

    /// The longest entry that the store takes; `usize::MAX` while no limit is known.
    fn longest_entry(&self) -> usize {
        usize::MAX
    }

    /// Counts a load that runs without the store, for the report at the end of the outage.
    fn went_without(&self) {}

    /// Ends background work and connections. Later commands fail at once.
    fn close(&self);

    /// The known state of the connections and the clock, without asking the server.
    fn health(&self) -> Health;

    /// Examines the store itself, in bounded time, with the rights that this user has. A failure is a finding.
    fn examine(&self, ask: Examine) -> Pin<Box<dyn Future<Output = Vec<Finding>> + Send + '_>>;
}

/// The settings that a store is examined for.
#[derive(Clone, Debug)]
pub(crate) struct Examine {
    /// A key that no load uses.
    pub(crate) key: Key,
    /// How much of a request's time the store may cost.
    pub(crate) coordination_budget: Duration,
    pub(crate) lease: Duration,
    /// How many replicas an invalidation waits for.
    pub(crate) replicas: u32,
}

/// The arguments of an ACQUIRE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acquire<'a> {
    pub(crate) token: &'a Token,
    pub(crate) lease: Duration,
    /// The stored bytes this caller has read and will not use.
    pub(crate) seen: Option<&'a Bytes>,
    /// The holder this caller has waited behind: its outcome answers this caller, too.
    pub(crate) behind: Option<&'a Token>,
    /// Whether to queue if the lease is held.
    pub(crate) queue: bool,
}

/// The answer to an ACQUIRE.
#[derive(Clone, Debug)]
pub(crate) enum Acquired {
    /// An entry other than the one seen.
    Found(Bytes),
    /// The outcome of a holder that has ended without an entry, as it was passed to FAIL.
    Ended(Bytes),
    /// This token holds the lease.
    Granted,
    /// Another token holds the lease for `remaining` more.
    Held { remaining: Duration, holder: Token },
}

/// The arguments of a FAIL.
#[derive(Clone, Debug)]
pub(crate) struct Fail<'a> {
    pub(crate) token: &'a Token,
    /// The encoded outcome.
    pub(crate) outcome: Bytes,
    /// How long the outcome is stored for the waiters.
    pub(crate) keep: Duration,
    /// How long newcomers may read it, too; zero for never.
    pub(crate) replay: Duration,
    pub(crate) older: OlderEntry,
    pub(crate) seen: Option<&'a Bytes>,
}

/// What a FAIL does with the entry that was `seen`. It leaves any other entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OlderEntry {
    Stays,
    Ends,
    /// A marker with this lifetime replaces it, or is stored where there is no entry.
    Marked(Bytes, Duration),
}

/// An entry that replaces another.
#[derive(Clone, Debug)]
pub(crate) struct Insert {
    pub(crate) entry: Bytes,
    pub(crate) keep: Duration,
    /// The only entry that it may replace; otherwise nothing is stored. A repeated step whose first answer was lost also
    /// finds its own entry.
    pub(crate) over: Option<Bytes>,
}

/// The server that has a name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NamedServer {
    /// Its index among the store's servers.
    pub(crate) number: usize,
    /// How long the latest reading of its clock took: in the last minute, or as it connected.
    pub(crate) round_trip: Duration,
}

/// Whether the token still held the lease, so that the step took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenCheck {
    Held,
    Lost,
    /// It held the lease, but the entry's key has foreign data: the waiters get the value, later callers do not.
    ForeignData,
}

/// How to hand over a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandOver {
    /// The lease of the new holder.
    pub(crate) lease: Duration,
    /// How many loads of this wave have vanished.
    pub(crate) hops: u8,
    /// The token's node is shutting down: its waiters leave, too, and are passed over.
    pub(crate) is_leaving: bool,
}

/// Where a HAND OVER has left the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandedOver {
    /// A waiter holds it.
    ToWaiter,
    /// There was no waiter; it is free.
    Freed,
    /// The token did not hold it any more.
    NotMine,
}
