//! The contract of the lock toolkit with a store: one method per transition of a mutex or a semaphore.
//!
//! As in [`Store`](super::Store), every method is one atomic step as seen by all nodes, and ownership is decided by a token
//! that was minted before the first command. A lock is handed over *inside* the step that frees it, to the head of a queue;
//! a waiter that cannot be reached is passed over there.
//!
//! The invariants, which other comments cite by number:
//!
//! 1. At most one token holds a mutex at any moment, at most `capacity` hold permits of a semaphore.
//! 2. While a token waits, no other token barges in: a free lock goes to the head of the queue.
//! 3. A take is idempotent for its token: a repeated take answers as if it had been sent once, and restarts the time
//!    to live.
//! 4. A waiter is registered ([`LockStore::await_grant`]) before its first take.
//! 5. A grant that no waiter received is returned by the node it was sent to.
//! 6. Everything expires by itself, except a mutex that was taken without a time to live.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::names::{LockName, Token};
use super::wake::lock_waiters::LockWaiter;
use super::{Reply, StoreError};

/// The locks of a store, as one node sees them.
///
/// `within` and cancellation are as in [`Store`](super::Store).
pub(crate) trait LockStore: fmt::Debug + Send + Sync {
    /// TAKE: the mutex, if it is free and no waiter is before this token, or if this token holds it already; else, if
    /// requested, a position in its queue. With `instead`, does FREE of that token before, in the same step.
    fn take_mutex<'a>(&'a self, name: &'a LockName, ask: Take<'a>, within: Duration)
    -> Reply<'a, MutexTaken>;

    /// FREE: gives up the token's position in the queue; if the token holds the mutex, or the mutex has no holder, hands it
    /// to the head of the queue. Answers whether the token held it. A position is identified by token and time to live, so
    /// `ttl` must be the one that the token was queued with.
    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool>;

    /// LEAVE: gives up a waiter's position in the queue, and a grant that it may not have received. As
    /// [`free_permit`](Self::free_permit) or [`free_mutex`](Self::free_mutex), but waiters that leave at the same moment may
    /// share one command.
    fn leave<'a>(&'a self, name: &'a LockName, position: Leave<'a>, within: Duration) -> Reply<'a, ()> {
        Box::pin(leave_alone(self, name, position, within))
    }

    /// EXTEND: restarts the time to live, if this token still holds the mutex, and notifies the waiters if the new end is
    /// earlier. Answers whether the token held it.
    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool>;

    /// LOOK: the holder of the mutex, foreign holders included.
    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>>;

    /// BREAK: takes the mutex from its holder, notifies that holder's node, and hands the mutex to the head of the queue.
    /// Answers whether it had a holder.
    fn break_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, bool>;

    /// TAKE of a permit: creates the semaphore if there is none; removes permits with an ended lease; serves the queue;
    /// then as [`take_mutex`](Self::take_mutex).
    fn take_permit<'a>(
        &'a self,
        name: &'a LockName,
        ask: TakePermit<'a>,
        within: Duration,
    ) -> Reply<'a, PermitTaken>;

    /// FREE of a permit: as [`free_mutex`](Self::free_mutex).
    fn free_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, PermitFreed>;

    /// REFRESH: restarts the permit's lease, if it has not ended. Answers whether it was restarted.
    fn refresh_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, bool>;

    /// LOOK at a semaphore; changes nothing and creates nothing.
    fn look_at_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>>;

    /// CHANGE of a semaphore, in one step. Answers the state after it, for [`Change::Delete`] the state before it; `None`
    /// if there is no semaphore to change.
    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: SemaphoreChange,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>>;

    /// Registers a waiter, in the order of calls, until the [`LockWaiter`] is dropped.
    fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter;

    /// Whether grants arrive at present. While they may not, waits are cut short.
    fn grants_arrive(&self) -> bool;

    /// Whether a waiter must confirm a grant by a take at once: a store that cannot know whether grants arrive lets them
    /// end soon.
    fn grants_are_claims(&self) -> bool {
        false
    }

    /// Has the server announce all changes of this mutex's key, by any client, for as long as a waiter for it is
    /// registered; the first waiter then receives `missed` at each deletion and expiry. A wait may rely on it for events
    /// after a take that was sent after the answer. Needs rights that a guard does not need otherwise; if it is not
    /// available, the answer says so.
    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, KeyspaceAnswer>;
}

/// The arguments of a TAKE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Take<'a> {
    pub(crate) token: &'a Token,
    /// `None` for a mutex that does not expire.
    pub(crate) ttl: Option<Duration>,
    /// Whether to queue if the mutex is held.
    pub(crate) queue: bool,
    /// A token that gives up the mutex for this one, with the same time to live. Done before this token gets the mutex.
    pub(crate) instead: Option<&'a Token>,
}

/// LEAVE of one waiter in a command of its own.
pub(crate) async fn leave_alone<S: LockStore + ?Sized>(
    store: &S,
    name: &LockName,
    Leave { token, ttl }: Leave<'_>,
    within: Duration,
) -> Result<(), StoreError> {
    if name.is_semaphore() {
        store.free_permit(name, token, ttl.unwrap_or_default(), within).await?;
    } else {
        store.free_mutex(name, token, ttl, within).await?;
    }
    Ok(())
}

/// The position in the queue that a LEAVE gives up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leave<'a> {
    pub(crate) token: &'a Token,
    /// The time to live of a mutex, or the lease of a permit, that the token was queued with.
    pub(crate) ttl: Option<Duration>,
}

/// The answer to a TAKE of a mutex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MutexTaken {
    pub(crate) taken: Taken,
    /// Whether the token in `instead` held the mutex until then. A repeated take answers false.
    pub(crate) was_held: bool,
}

/// Whether the mutex was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// This token holds the mutex.
    Granted { fence: u64 },
    /// Another token holds it, for `remaining` more; `None` if it never expires.
    Busy { remaining: Option<Duration> },
}

/// The holder of a mutex.
#[derive(Clone, Debug)]
pub(crate) struct MutexHolder {
    /// The value of the key: a token of ours, or a foreign client's value.
    pub(crate) token: Bytes,
    pub(crate) remaining: Option<Duration>,
}

/// The arguments of a TAKE of a permit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakePermit<'a> {
    pub(crate) token: &'a Token,
    pub(crate) lease: Duration,
    pub(crate) semaphore: Create,
    pub(crate) queue: bool,
}

/// The settings with which the first caller creates a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Create {
    pub(crate) capacity: u32,
    /// How long it outlives its last use; never less than the longest lease.
    pub(crate) idle_ttl: Duration,
}

/// The answer to a TAKE of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitTaken {
    pub(crate) granted: bool,
    pub(crate) available: u32,
    /// The capacity the semaphore was created with, which may differ from the requested one.
    pub(crate) created_with: u32,
    /// When the next lease ends, if it is not renewed.
    pub(crate) next_expiry: Option<Duration>,
}

/// The answer to a FREE of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitFreed {
    pub(crate) was_held: bool,
    pub(crate) available: u32,
}

/// A semaphore at one moment.
#[derive(Clone, Debug)]
pub(crate) struct SemaphoreState {
    pub(crate) created_with: u32,
    /// Including the permits that were added.
    pub(crate) capacity: u32,
    pub(crate) available: u32,
    pub(crate) waiting: u32,
    /// The holders with a running lease, and its remaining time, the earliest first.
    pub(crate) holders: Vec<(Token, Duration)>,
    /// Whether this step created it.
    pub(crate) created: bool,
    /// How many permits this step took back because their leases had ended.
    pub(crate) recovered: u32,
}

/// A change of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SemaphoreChange {
    /// Create it, if there is none.
    Ensure(Create),
    /// Create it if there is none, and add `permits` permits.
    Add { permits: u32, semaphore: Create },
    /// Take back the permits with an ended lease.
    Sweep,
    /// Remove it; all waiters receive `closed`.
    Delete,
}

/// Whether the server announces changes of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyspaceAnswer {
    Yes,
    /// It does not; the reason, as one sentence for a log.
    No {
        why: &'static str,
    },
}
