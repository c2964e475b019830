//! What the lock toolkit asks of a store: one method per transition of a mutex or a semaphore.
//!
//! As in [`Store`](super::Store), every method is one atomic step as seen by all nodes, and who holds
//! what is decided by a token that was minted before the first command. Ownership is handed over *inside*
//! the step that frees it, to the head of a queue; a waiter that can not be reached is passed over there.
//!
//! Numbered once, cited elsewhere:
//!
//! 1. At most one token holds a mutex at any moment, at most `capacity` hold permits of a semaphore.
//! 2. While a token waits, none barges in: what is free goes to the head of the queue. A mutex that is [offered](LockStore::offer_mutex)
//!    goes to the first that barges, until the head of the queue has waited for the bound.
//! 3. A take is idempotent for its token: sent again, it answers as if it had been sent once, with the time
//!    to live started anew.
//! 4. A waiter is registered ([`LockStore::await_grant`]) before its first take.
//! 5. A grant that nobody heard is given back by the node it was sent to.
//! 6. Everything expires by itself, unless its owner asked for a mutex that does not.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::names::{LockName, Token};
use super::wake::lock_waiters::Await;
use super::{Reply, StoreError};

/// The locks of a store, as one node sees them.
///
/// `within` and cancellation are as in [`Store`](super::Store).
pub(crate) trait LockStore: fmt::Debug + Send + Sync {
    /// TAKE: the mutex, if it is free and nobody is before this token, or is this token's already; else, if
    /// asked, a place in its queue. With `instead`, FREE of that token before it, in the same step.
    fn take_mutex<'a>(&'a self, name: &'a LockName, ask: Take<'a>, within: Duration)
    -> Reply<'a, MutexTaken>;

    /// OFFER: as FREE, but leaves a mutex whose head of the queue has waited for less than the bound to the take that comes
    /// first and [barges](Take::barges), and tells the head. Who waits since when is known of those that barge; others are
    /// handed the mutex at once.
    fn offer_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        offer: Offer,
        within: Duration,
    ) -> Reply<'a, bool>;

    /// FREE: takes the token out of the queue if it waits there; if it holds the mutex, or nobody does, hands
    /// it to the head of the queue. Answers whether it held it. A queued token is known by its time to live
    /// too, which must be the one it was queued with.
    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool>;

    /// LEAVE: gives up the place of a waiter, and what it may have been granted unheard. As [`free_permit`](Self::free_permit),
    /// [`offer_mutex`](Self::offer_mutex) or [`free_mutex`](Self::free_mutex), but waiters that leave at one moment may go
    /// together.
    fn leave<'a>(&'a self, name: &'a LockName, place: Leave<'a>, within: Duration) -> Reply<'a, ()> {
        Box::pin(leave_alone(self, name, place, within))
    }

    /// EXTEND: starts the time to live anew, if the mutex is still this token's, and tells those who wait if it ends sooner
    /// so. Answers whether it was.
    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool>;

    /// LOOK: who holds the mutex, foreign holders included.
    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>>;

    /// BREAK: takes the mutex from whoever holds it, tells that holder's node, and hands it to the head of
    /// the queue. Answers whether anybody held it.
    fn break_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, bool>;

    /// TAKE of a permit: creates the semaphore if there is none; forgets permits whose lease has ended;
    /// serves the queue; then as [`take_mutex`](Self::take_mutex).
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

    /// REFRESH: starts the permit's lease anew, if it has not ended. Answers whether it had not.
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

    /// CHANGE of a semaphore, in one step. Answers the state after it, for [`Change::Delete`] the state before
    /// it; `None` where there is none to change.
    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: Change,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>>;

    /// Registers a waiter, in the order of calls, until the [`Await`] is dropped.
    fn await_grant(&self, name: &LockName, token: &Token) -> Await;

    /// Whether grants are heard at present. While they may not be, waits are cut short.
    fn grants_arrive(&self) -> bool;

    /// Whether a grant that is heard of has to be asked for at once: where nobody can know whether it was heard, it ends
    /// soon by itself.
    fn grants_are_claims(&self) -> bool {
        false
    }

    /// Has the server announce what happens to this mutex's key, whoever does it, for as long as anybody is
    /// registered who waits for it; the first of those is then told `missed` at each deletion and expiry. A
    /// wait may rely on it for what happens after a take that was sent after the answer. Needs rights that a
    /// guard does not need otherwise; where it can not be had, the answer says so.
    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Announced>;
}

/// What a TAKE asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Take<'a> {
    pub(crate) token: &'a Token,
    /// `None` for a mutex that does not expire.
    pub(crate) ttl: Option<Duration>,
    /// Whether to queue where it is held.
    pub(crate) queue: bool,
    /// A token that gives the mutex up for this one, with the same time to live. Once this one holds the
    /// mutex, that was done.
    pub(crate) instead: Option<&'a Token>,
    /// Whether to take a mutex that is free also where others wait. A take with `instead` does not.
    pub(crate) barges: bool,
}

/// LEAVE of one that goes alone.
pub(crate) async fn leave_alone<S: LockStore + ?Sized>(
    store: &S,
    name: &LockName,
    Leave { token, ttl, bound }: Leave<'_>,
    within: Duration,
) -> Result<(), StoreError> {
    if name.is_semaphore() {
        store.free_permit(name, token, ttl.unwrap_or_default(), within).await?;
    } else if let Some(bound) = bound {
        store.offer_mutex(name, token, Offer { ttl, bound }, within).await?;
    } else {
        store.free_mutex(name, token, ttl, within).await?;
    }
    Ok(())
}

/// What is given up by a LEAVE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leave<'a> {
    pub(crate) token: &'a Token,
    /// What it was queued with: a mutex's time to live, or a permit's lease.
    pub(crate) ttl: Option<Duration>,
    /// For how long the head of the queue may have waited, if it is a mutex that is [offered](LockStore::offer_mutex).
    pub(crate) bound: Option<Duration>,
}

/// What an OFFER is made with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// The token's, as it was queued with.
    pub(crate) ttl: Option<Duration>,
    /// For how long the head of the queue may have waited.
    pub(crate) bound: Duration,
}

/// What a TAKE of a mutex answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MutexTaken {
    pub(crate) taken: Taken,
    /// Whether the token that gave it up held it until then. Sent again, a take answers false.
    pub(crate) was_held: bool,
}

/// Whether it was had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The mutex is this token's.
    Granted { fence: u64 },
    /// Another holds it, for `remaining` more; `None` where it never expires.
    Busy { remaining: Option<Duration> },
}

/// Who holds a mutex.
#[derive(Clone, Debug)]
pub(crate) struct MutexHolder {
    /// What stands in the key: a token of ours, or what a foreign client has written.
    pub(crate) token: Bytes,
    pub(crate) remaining: Option<Duration>,
}

/// What a TAKE of a permit asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TakePermit<'a> {
    pub(crate) token: &'a Token,
    pub(crate) lease: Duration,
    pub(crate) semaphore: Create,
    pub(crate) queue: bool,
}

/// What a semaphore is made with, by whoever comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Create {
    pub(crate) capacity: u32,
    /// How long it outlives its last use; never less than the longest lease.
    pub(crate) idle_ttl: Duration,
}

/// What a TAKE of a permit answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitTaken {
    pub(crate) granted: bool,
    pub(crate) available: u32,
    /// What the semaphore was created with, which may not be what was asked.
    pub(crate) created_with: u32,
    /// When the next lease ends, if nothing else happens.
    pub(crate) next_expiry: Option<Duration>,
}

/// What a FREE of a permit answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PermitFreed {
    pub(crate) was_held: bool,
    pub(crate) available: u32,
}

/// A semaphore at one moment.
#[derive(Clone, Debug)]
pub(crate) struct SemaphoreState {
    pub(crate) created_with: u32,
    /// With what was added since.
    pub(crate) capacity: u32,
    pub(crate) available: u32,
    pub(crate) waiting: u32,
    /// Whose leases have not ended, and what is left of them; the one that ends first comes first.
    pub(crate) holders: Vec<(Token, Duration)>,
    /// Whether this very step created it.
    pub(crate) created: bool,
    /// How many permits this very step took from holders whose leases had ended.
    pub(crate) recovered: u32,
}

/// A change of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Create it, if there is none.
    Ensure(Create),
    /// Create it if there is none, and add so many permits.
    Add { permits: u32, semaphore: Create },
    /// Take back the permits whose leases have ended.
    Sweep,
    /// Remove it; everyone who waits is told `closed`.
    Delete,
}

/// Whether the server announces what happens to keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    Yes,
    /// It can not be had there; why, in one sentence for a log.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only servers refuse"))]
    No {
        why: &'static str,
    },
}
