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

// `acquire` waits and `hold` holds and releases, both in the same way for mutexes and permits.
mod acquire;
mod hold;
mod locks;
mod mutex;
mod options;
mod semaphore;
mod target;
#[cfg(test)]
#[path = "../../tests/unit/lock/tests/mod.rs"]
mod tests;

pub(crate) use self::locks::LAST_RELEASES;
pub use self::locks::{Locks, LocksBuilder, Scope};
pub use self::mutex::{Held, Mutex, MutexBuilder, MutexGuard, Synchronized};
pub use self::options::{LockError, MutexOptions, Waiting};
pub use self::semaphore::{Holder, Permit, PermitView, Released, Semaphore, SemaphoreBuilder, Wait};
