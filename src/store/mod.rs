//! What the guard asks of a store: the contract of the fleet protocol, one method per transition.
//!
//! Every method is one atomic step as seen by all nodes (telling a long queue may take further steps after it), and every
//! mutation is conditional on the caller's [`Token`], or, for ACQUIRE and INSERT, on a last moment: one that runs late (its
//! caller timed out, left, or was paused) changes only what is its own.
//!
//! Numbered once, cited elsewhere:
//!
//! 1. At most one token is the lease of a key at any moment.
//! 2. A value is stored only while the lease is the token it was loaded under.
//! 3. A waiter is registered ([`Store::watch`]) before it tries to acquire, and the acquire that is refused enqueues it in the
//!    same step: no wake-up falls between the two.
//! 4. A wake is a hint. What holds is what the next `acquire` returns.
//! 5. Everything a node writes expires by itself.

pub(crate) mod backend;

#[cfg(test)]
#[path = "../../tests/contract/mod.rs"]
mod contract;
mod error;
pub(crate) mod handle;
pub(crate) mod lock_store;
pub(crate) mod memory;
pub(crate) mod names;
#[cfg(feature = "redis")]
pub(crate) mod redis;
pub(crate) mod tag_store;
pub(crate) mod wake;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

pub(crate) use error::{StoreError, StoreErrorKind};
pub(crate) use handle::NodeStore;
pub(crate) use names::Token;
pub(crate) use wake::lease_waiters::Watch;

use crate::health::{Finding, Health};
use crate::key::Key;

/// How long after its deadline an acquire or an insertion may run. The server's clock may be ahead of what is thought of it:
/// it is read once a minute, and of a cluster's masters that of one.
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

    /// Tells stores apart: equal for nodes whose keys are the same keys.
    fn place(&self) -> u64;

    /// What the clock by which all nodes judge freshness showed at `moment`, in milliseconds.
    fn clock_at(&self, moment: Instant) -> u64;

    /// What it shows now.
    fn now(&self) -> u64 {
        self.clock_at(Instant::now())
    }

    /// LOOK UP: the stored bytes, if there are any.
    fn look_up<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, Option<Bytes>>;

    /// ACQUIRE: the first that applies of: an entry that is not `seen`; the outcome of the holder
    /// named in `behind`, or one that is replayed to newcomers; the lease, if it is free or is
    /// already this token (its time starts anew); else the place in the queue.
    fn acquire<'a>(&'a self, key: &'a Key, ask: Acquire<'a>, within: Duration) -> Reply<'a, Acquired>;

    /// RENEW: gives the lease `lease` from now, if it is still this token's.
    fn renew<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, Kept>;

    /// COMMIT: if the lease is this token's, stores `entry` for `keep`, frees the lease and wakes
    /// everyone in the queue.
    fn commit<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        entry: Bytes,
        keep: Duration,
        within: Duration,
    ) -> Reply<'a, Kept>;

    /// FAIL: if the lease is this token's, leaves the outcome for those who wait behind it, frees
    /// the lease and wakes them.
    fn fail<'a>(&'a self, key: &'a Key, fail: Fail<'a>, within: Duration) -> Reply<'a, Kept>;

    /// HAND OVER: if the lease is this token's, makes it the token of the first waiter in the queue
    /// that can be reached, and tells that waiter. Frees the lease when there is none.
    fn hand_over<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        how: HandOver,
        within: Duration,
    ) -> Reply<'a, HandedOver>;

    /// RELEASE: if the lease is this token's, frees it and wakes everyone in the queue; else gives up the token's place there,
    /// so that it is handed nothing later. Also after a commit whose answer was lost.
    fn release<'a>(&'a self, key: &'a Key, token: &'a Token, within: Duration) -> Reply<'a, Kept>;

    /// INVALIDATE: removes entry, lease and outcome; tells the lease's holder and everyone in the
    /// queue. With an entry: the same, and stores it in the same step (INSERT).
    fn invalidate<'a>(&'a self, key: &'a Key, insert: Option<Insert>, within: Duration) -> Reply<'a, ()>;

    /// Registers a waiter for hints about `key`, until the [`Watch`] is dropped. Invariant 3 asks
    /// for this before the first `acquire`.
    fn watch(&self, key: &Key, token: &Token) -> Watch;

    /// Whether hints arrive at present. While they may not, waits are cut short.
    fn hints_arrive(&self) -> bool;

    /// Waits until commands can be sent, at most `within`; also opens what is opened lazily.
    fn connect(&self, within: Duration) -> Reply<'_, ()>;

    /// An error if the store lacks what loads need, or this user the right to it, and so never will do. `key` is one that
    /// nobody uses.
    fn probe<'a>(&'a self, _key: &'a Key, _within: Duration) -> Reply<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Waits until commands about the key of this name can be sent, at most `within`. Whether anything is heard does
    /// not matter.
    fn reach<'a>(&'a self, _name: &'a str, within: Duration) -> Reply<'a, ()> {
        self.connect(within)
    }

    /// Whether commands about the key of this name fail at once at present, as far as is known without asking.
    fn is_down(&self, _name: &str) -> bool {
        false
    }

    /// Ends background work and connections. Later commands fail at once.
    fn close(&self);

    /// What is known of the connections and the clock, without asking anybody.
    fn health(&self) -> Health;

    /// Looks at the store itself, in bounded time, with what rights there are. What fails is a finding.
    fn examine(&self, ask: Examine) -> Pin<Box<dyn Future<Output = Vec<Finding>> + Send + '_>>;
}

/// What a store is examined for.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "memory is not slow, and grants all rights"))]
pub(crate) struct Examine {
    /// A key that nobody uses.
    pub(crate) key: Key,
    /// What one request may lose to the store.
    pub(crate) coordination_budget: Duration,
    pub(crate) lease: Duration,
    /// How many replicas an invalidation waits for.
    pub(crate) replicas: u32,
}

/// What an ACQUIRE asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acquire<'a> {
    pub(crate) token: &'a Token,
    pub(crate) lease: Duration,
    /// The stored bytes this caller has read and will not use.
    pub(crate) seen: Option<&'a Bytes>,
    /// The holder this caller has waited behind, whose outcome is its answer too.
    pub(crate) behind: Option<&'a Token>,
    /// Whether to queue where the lease is held.
    pub(crate) queue: bool,
}

/// What an ACQUIRE answers.
#[derive(Clone, Debug)]
pub(crate) enum Acquired {
    /// There is an entry that is not the one seen.
    Found(Bytes),
    /// The holder waited behind has ended without an entry; its outcome as it was given to FAIL.
    Ended(Bytes),
    /// The lease is this token's.
    Granted,
    /// Another token holds the lease for `remaining` more.
    Held { remaining: Duration, holder: Token },
}

/// What a FAIL leaves behind.
#[derive(Clone, Debug)]
pub(crate) struct Fail<'a> {
    pub(crate) token: &'a Token,
    /// The encoded outcome.
    pub(crate) outcome: Bytes,
    /// How long the outcome stays for those who waited.
    pub(crate) keep: Duration,
    /// How long newcomers are given it too; zero for never.
    pub(crate) replay: Duration,
    /// A marker entry and its lifetime, stored unless there is an entry that is not `seen`.
    pub(crate) marker: Option<(Bytes, Duration)>,
    pub(crate) seen: Option<&'a Bytes>,
}

/// What takes the place of an entry.
#[derive(Clone, Debug)]
pub(crate) struct Insert {
    pub(crate) entry: Bytes,
    pub(crate) keep: Duration,
    /// Only of this one, or of itself where the step was made before and not heard of; otherwise nothing is stored.
    pub(crate) over: Option<Bytes>,
}

/// Whether the lease was still the token's, and the step therefore done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Yes,
    No,
    /// It was, but other people's data is where the entry should go: those who wait are given the value, and nobody later.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "in memory there is nobody else's data"))]
    Aside,
}

/// How a lease is handed over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandOver {
    /// The new holder's.
    pub(crate) lease: Duration,
    /// How many loads of this wave have vanished.
    pub(crate) hops: u8,
    /// The token's node ends: who waits there leaves, too, and is passed over.
    pub(crate) is_leaving: bool,
}

/// Where a HAND OVER left the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandedOver {
    /// A waiter has it.
    ToWaiter,
    /// Nobody waited; it is free.
    Freed,
    /// It was not the token's any more.
    NotMine,
}
