//! Locks for a fleet: a [`Mutex`] and a fair [`Semaphore`], on the guard's connections and scripts.
//!
//! The guard needs neither: its loads use leases. These locks are for an application's work that only one process,
//! or a limited number of processes, may do at a time.
//!
//! # Examples
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use stampede_guard::lock::{Locks, Scope};
//!
//! // In production: Locks::new(redis::Client::open("redis://127.0.0.1/")?), or `guard.locks()`.
//! let locks = Locks::in_memory();
//! let mutex = locks.mutex(Scope::new("server_access").local(7)).ttl(Duration::from_secs(30)).build()?;
//!
//! let mut guard = mutex.lock().await?;
//! // .. the exclusive work. Send `guard.fence()` along with each write outside the store.
//! let held_to_the_end = guard.unlock().await?;
//! assert!(held_to_the_end);
//!
//! // Or with a closure, after which it is always unlocked:
//! let done = mutex.synchronize(|held| async move { held.fence() }).await?;
//! assert!(done.still_held && done.value > 0);
//! # Ok(()) }
//! ```
//!
//! # What the locks promise
//!
//! - **One holder** (or as many as there are permits) among all processes that share the store, as long as each
//!   holder finishes within its time to live. Every holder has a random token; no process frees or extends
//!   another's lock.
//! - **Fair**: waiters form a queue. Unlocking hands the lock to its head in the same step; dead waiters are passed
//!   over, and no caller barges in.
//! - **Quiet**: waiters send nothing; all waiters of a process share one connection, and of all waiters of one lock
//!   only the first watches the clock.
//! - **Nothing stays behind**: a holder that dies blocks the lock for its time to live at most; a waiter that dies
//!   blocks nothing as soon as the server knows. If a whole machine vanishes, the server does not know for minutes,
//!   and each of its waiters blocks the lock for a time to live when its turn comes: choose a short one, and
//!   `auto_renew`. A future that is dropped leaves the queue; a lost reply is followed by a release. A future
//!   that is neither polled nor dropped delays the waiters behind it by the time to live that it is granted, plus at
//!   most half a second.
//!
//! # What the locks do not promise
//!
//! A lock with a time to live is a promise about time. A process that is paused for longer finds that it has lost
//! the lock when it wakes up, and a Redis that fails over may have lost its latest writes. So writes that must
//! be right carry the [fence](Held::fence): a number that grows with each holder, so that the receiving side can
//! refuse the late write of an earlier one. [`Held::lost`] notifies a holder as early as possible.
//!
//! # Dropping
//!
//! A dropped [`MutexGuard`] or [`Permit`] is released in the background: best effort, never a panic, also outside a
//! runtime (there, the end of the time to live frees it). Release explicitly to know when the release is done, and
//! whether the lock was still held. [`Locks::close`] waits for releases that are under way, and so does the
//! [`shutdown`](crate::StampedeGuard::shutdown) of the guard that owns the locks.

// Below are the types that the submodules share: [`LockTarget`] has the commands of a mutex or a semaphore, [`LockRegistry`] is the state
// that all handles of one [`Locks`] share, and [`WaitTerms`] says how a caller waits. `acquire` waits, and `hold` holds and releases; both
// treat mutexes and permits alike.
mod acquire;
mod hold;
mod locks;
mod mutex;
mod options;
mod semaphore;
#[cfg(test)]
#[path = "../../tests/unit/lock/tests/mod.rs"]
mod tests;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

pub(crate) use self::locks::LAST_RELEASES;
pub use self::locks::{Locks, LocksBuilder, Scope};
pub use self::mutex::{Held, Mutex, MutexBuilder, MutexGuard, Synchronized};
pub use self::options::{LockError, MutexOptions, Waiting};
pub use self::semaphore::{Holder, Permit, PermitView, Released, Semaphore, SemaphoreBuilder, Wait};
use crate::guard_state::GuardState;
use crate::guard_state::turns::LoadQueue;
use crate::observe::log;
use crate::store::load_limit::{EndedLoad, LimitBounds, LoadEnd};
use crate::store::{
    Create, Leave, LockName, MutexTaken, PermitFreed, Store, StoreError, StoreErrorKind, StoreResult, Take,
    TakePermit, Taken, Token,
};
use crate::task::{StoppableWaiters, Tracked, Tracker};

/// A lock that a token can hold.
trait LockTarget: fmt::Debug + Send + Sync + 'static {
    /// The answer to a release.
    type Freed: Send;

    /// Whether there is at most one holder.
    const IS_EXCLUSIVE: bool;

    fn registry(&self) -> &Arc<LockRegistry>;

    fn name(&self) -> &LockName;

    /// The time to live of a hold; `None` if it does not expire.
    fn ttl(&self) -> Option<Duration>;

    /// With `take.instead`, the same command first gives up that token's lock or position in the queue. Only mutexes support this.
    fn take(&self, take: Take<'_>, within: Duration) -> impl LockReply<MutexTaken>;

    fn extend(&self, token: &Token, ttl: Option<Duration>, within: Duration) -> impl LockReply<bool>;

    fn free(&self, token: &Token, within: Duration) -> impl LockReply<Self::Freed>;

    /// Gives up a position in the queue, and a grant whose message did not arrive.
    fn leave(&self, token: &Token, within: Duration) -> impl LockReply<()> {
        let leave = Leave { token, ttl: self.ttl() };
        async move { self.registry().store.leave(self.name(), leave, within).await }
    }

    /// Whether the token holds the lock, as the store sees it.
    fn is_holder(&self, token: &Token, within: Duration) -> impl LockReply<bool>;

    /// Converts a store's failure into the user's error.
    fn error(&self, doing: &str, error: StoreError) -> LockError {
        LockError::store(doing, self.name(), error)
    }
}

/// A command's eventual result.
trait LockReply<T>: Future<Output = StoreResult<T>> + Send {}

impl<T, F: Future<Output = StoreResult<T>> + Send> LockReply<T> for F {}

/// A mutex, as all clones of a handle see it.
#[derive(Debug)]
struct MutexTarget {
    registry: Arc<LockRegistry>,
    name: LockName,
    options: MutexOptions,
}

impl MutexTarget {
    /// How a caller waits according to the options.
    fn terms(&self) -> WaitTerms {
        let MutexOptions { waiting, acquire_timeout, retries, retry_interval, jitter, min_remaining, .. } =
            self.options;
        let fallback = (retry_interval, jitter);
        WaitTerms { waiting, fallback, retries, timeout: acquire_timeout, min_remaining }
    }
}

impl LockTarget for MutexTarget {
    type Freed = bool;

    const IS_EXCLUSIVE: bool = true;

    fn registry(&self) -> &Arc<LockRegistry> {
        &self.registry
    }

    fn name(&self) -> &LockName {
        &self.name
    }

    fn ttl(&self) -> Option<Duration> {
        self.options.ttl
    }

    async fn take(&self, take: Take<'_>, within: Duration) -> StoreResult<MutexTaken> {
        self.registry.locks()?.take_mutex(&self.name, take, within).await
    }

    async fn extend(&self, token: &Token, ttl: Option<Duration>, within: Duration) -> StoreResult<bool> {
        self.registry.locks()?.extend_mutex(&self.name, token, ttl, within).await
    }

    async fn free(&self, token: &Token, within: Duration) -> StoreResult<bool> {
        self.registry.store.free_mutex(&self.name, token, self.options.ttl, within).await
    }

    async fn is_holder(&self, token: &Token, within: Duration) -> StoreResult<bool> {
        let holder = self.registry.locks()?.look_at_mutex(&self.name, within).await?;
        Ok(holder.is_some_and(|holder| holder.token == token.as_str().as_bytes()))
    }
}

/// A semaphore, as all clones of a handle see it.
#[derive(Debug)]
struct SemaphoreTarget {
    registry: Arc<LockRegistry>,
    name: LockName,
    create: Create,
    lease: Duration,
    /// Whether the warning was logged that the semaphore was created with another number of permits.
    warned: AtomicBool,
    load: Option<LimitedLoad>,
}

/// The load under an adaptive limit that one permit is for.
#[derive(Clone, Debug)]
pub(crate) struct LimitedLoad {
    pub(crate) bounds: LimitBounds,
    /// How the load has ended; empty if it did not run.
    pub(crate) end: Arc<OnceLock<LoadEnd>>,
    /// Where the limit is recorded that the store returns with the release.
    pub(crate) queue: Arc<LoadQueue>,
}

impl LockTarget for SemaphoreTarget {
    type Freed = PermitFreed;

    const IS_EXCLUSIVE: bool = false;

    fn registry(&self) -> &Arc<LockRegistry> {
        &self.registry
    }

    fn name(&self) -> &LockName {
        &self.name
    }

    fn ttl(&self) -> Option<Duration> {
        Some(self.lease)
    }

    async fn take(&self, Take { token, queue, .. }: Take<'_>, within: Duration) -> StoreResult<MutexTaken> {
        let ask = TakePermit { token, lease: self.lease, semaphore: self.create, queue };
        let taken = self.registry.locks()?.take_permit(&self.name, ask, within).await?;
        let (expected, actual) = (self.create.capacity, taken.created_with);
        if expected != actual && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: log::LOCK, expected, actual, "the semaphore was created with another number of permits");
        }
        let taken = match taken.granted {
            true => Taken::Granted { fence: 0 },
            false => Taken::Busy { remaining: taken.next_expiry },
        };
        Ok(MutexTaken { taken, was_held: false })
    }

    async fn extend(&self, token: &Token, ttl: Option<Duration>, within: Duration) -> StoreResult<bool> {
        self.registry.locks()?.refresh_permit(&self.name, token, ttl.unwrap_or(self.lease), within).await
    }

    async fn free(&self, token: &Token, within: Duration) -> StoreResult<PermitFreed> {
        let store = &self.registry.store;
        let ended = self.load.as_ref().and_then(|load| Some((load, *load.end.get()?)));
        let Some((load, end)) = ended else {
            return store.free_permit(&self.name, token, self.lease, within).await;
        };
        let ended = EndedLoad { end, bounds: load.bounds };
        match store.end_load(&self.name, token, (self.lease, ended), within).await {
            Ok((freed, limit)) => {
                limit.into_iter().for_each(|limit| load.queue.has_seen(limit, load.bounds.least));
                Ok(freed)
            }
            // Without the rights for the state of the adaptive limit, the limit stays as it is, but the permit must be released.
            Err(error) if error.kind == StoreErrorKind::Refused => {
                store.free_permit(&self.name, token, self.lease, within).await
            }
            Err(error) => Err(error),
        }
    }

    async fn is_holder(&self, token: &Token, within: Duration) -> StoreResult<bool> {
        let state = self.registry.locks()?.look_at_semaphore(&self.name, within).await?;
        Ok(state.is_some_and(|state| state.holders.iter().any(|(holder, _)| holder == token)))
    }
}

/// The state that all locks made from one [`Locks`] share.
struct LockRegistry {
    store: Store,
    /// Escaped, as it appears in key names.
    namespace: Box<str>,
    command_timeout: Duration,
    /// Releases that run in the background. Locks of a guard use the guard's own tracker: each `guard.locks()` and
    /// each permit to load makes a `LockRegistry`, and the guard's shutdown has to wait for the releases of all of them.
    background: Arc<Tracker>,
    waiters: StoppableWaiters,
    /// Whether the warning was logged that the server announces no key events.
    warned: AtomicBool,
    /// The guard that owns the connections, if any: it closes them. Without a guard, this registry closes them when it is dropped.
    guard: Option<Arc<GuardState>>,
}

impl LockRegistry {
    fn new(
        store: Store,
        namespace: Box<str>,
        command_timeout: Duration,
        guard: Option<Arc<GuardState>>,
    ) -> Self {
        let background = guard.as_ref().map(|guard| Arc::clone(&guard.background)).unwrap_or_default();
        Self {
            store,
            namespace,
            command_timeout,
            background,
            waiters: StoppableWaiters::default(),
            warned: AtomicBool::new(false),
            guard,
        }
    }

    /// The store, for all lock commands but releases; an error once these locks are closed. Releases use the store itself: they are allowed
    /// even after that, as long as there are connections, and the connections of a guard stay open longer.
    fn locks(&self) -> StoreResult<&Store> {
        match self.is_closed() {
            true => Err(StoreError::new(StoreErrorKind::Closed)),
            false => Ok(&self.store),
        }
    }

    /// Not derived from the connections: the connections of a guard outlive its locks, and a memory store has none.
    fn is_closed(&self) -> bool {
        self.waiters.are_sent_away() || self.guard.as_ref().is_some_and(|guard| guard.waiters.are_sent_away())
    }

    /// Resolves when this is closed, or the guard shuts down.
    async fn closed(&self) {
        let Some(guard) = &self.guard else { return self.waiters.sent_away().await };
        tokio::select! {
            biased;
            () = self.waiters.sent_away() => {}
            () = guard.waiters.sent_away() => {}
        }
    }

    /// Counts a call that waits for a lock, until the returned values are dropped.
    fn wait(&self) -> (Tracked, Option<Tracked>) {
        (self.waiters.enter(), self.guard.as_ref().map(|guard| guard.waiters.enter()))
    }

    /// Sends a command about this lock. If the connection is down, waits for it within the command's timeout,
    /// because a lock has nothing to fall back on. Does not repeat a command that was sent and not answered, which
    /// may have been executed.
    async fn ask<T, F>(&self, name: &LockName, send: impl Fn(Duration) -> F) -> StoreResult<T>
    where
        F: Future<Output = StoreResult<T>>,
    {
        let started = Instant::now();
        let answer = send(self.command_timeout).await;
        let Err(StoreError { kind: StoreErrorKind::Unavailable, .. }) = answer else { return answer };
        let left = || self.command_timeout.saturating_sub(started.elapsed());
        if left().is_zero() || self.store.reach(&name.key, left()).await.is_err() {
            return answer;
        }
        send(left()).await
    }

    /// A new token for a lock with this time to live; `None` if it does not expire.
    fn mint(&self, ttl: Option<Duration>) -> Token {
        let node = self.store.node();
        ttl.map_or_else(|| Token::mint(node), |ttl| Token::mint_for(node, ttl))
    }

    fn close(&self) {
        if self.guard.is_none() {
            self.store.close();
        }
    }
}

impl Drop for LockRegistry {
    fn drop(&mut self) {
        self.close();
    }
}

debug_as!(self: LockRegistry {
    namespace: self.namespace, command_timeout: self.command_timeout, of_guard: self.guard.is_some()
});

/// How a caller waits.
#[derive(Clone, Copy, Debug)]
struct WaitTerms {
    waiting: Waiting,
    /// Interval and jitter of the polling to which `Keyspace` falls back.
    fallback: (Duration, f64),
    /// How many attempts may follow the first.
    retries: Option<u32>,
    /// How long the caller waits; `None` for ever.
    timeout: Option<Duration>,
    min_remaining: Duration,
}

/// The end of a time that begins now; `None` for never, or if no `Instant` can represent it.
fn from_now(ttl: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(ttl?)
}

/// The later of two moments, where `None` is never.
fn later(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.zip(other).map(|(one, other)| one.max(other))
}

/// Resolves at that moment; never, if there is none.
async fn reached(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
