//! Locks for a fleet: a [`Mutex`] and a fair [`Semaphore`], on the guard's connections and scripts.
//!
//! The guard needs neither: its loads go through leases of its own. These are for work of yours that only one
//! process, or a limited number, may do at a time.
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
//! // .. what only one process may do. Hand `guard.fence()` to whatever is written outside the store.
//! let held_to_the_end = guard.unlock().await?;
//! assert!(held_to_the_end);
//!
//! // Or, unlocked whatever happens inside:
//! let done = mutex.synchronize(|held| async move { held.fence() }).await?;
//! assert!(done.still_held && done.value > 0);
//! # Ok(()) }
//! ```
//!
//! # What they promise
//!
//! - **One holder** (or as many as there are permits) among all processes that share the store, as long as nobody
//!   holds on for longer than its time to live. Every holder has a random token; nobody frees or extends
//!   what is another's.
//! - **Fair**: those who wait are a queue. Whoever unlocks hands the lock to its head in the same step;
//!   the dead are passed over, and nobody barges in.
//! - **Quiet**: those who wait send nothing; all waiters of a process share one connection, and of all waiters of one
//!   lock only the first watches the clock.
//! - **Nothing stays behind**: a holder that dies costs others its time to live; a waiter that dies costs nothing as soon as the
//!   server knows. Where a whole machine vanishes, the server does not know for minutes, and each of its waiters whose turn comes
//!   costs a time to live: choose a short one, and `auto_renew`. A future that is dropped gives up its place; a reply that was lost
//!   is followed by a release. A future that is kept but not polled costs those behind it the time to live it is granted for, and
//!   half a second at the most.
//!
//! # What they do not promise
//!
//! A lock with a time to live is a promise about time. A process that is paused for longer than that finds itself
//! without the lock when it wakes up, and a Redis that fails over may have forgotten its latest writes. So
//! writes that must be right carry the [fence](Held::fence): a number that grows with each holder, so that
//! the side that is written to can refuse whoever comes late. [`Held::lost`] tells a holder as soon as it can be known.
//!
//! # Dropping
//!
//! A dropped [`MutexGuard`] or [`Permit`] is released in the background: best effort, never a panic, also outside a
//! runtime (where the end of the time to live has to do). Release explicitly to know when it is done, and whether it
//! was still yours; [`Locks::close`] waits for what is under way, and so does the
//! [`shutdown`](crate::StampedeGuard::shutdown) of the guard whose locks they are.

mod engine;
mod error;
mod fairness;
mod held;
mod locks;
mod mutex;
mod mutex_builder;
mod options;
mod permit;
mod scope;
mod semaphore;
mod semaphore_builder;
#[cfg(test)]
#[path = "../../tests/unit/lock/tests/mod.rs"]
mod tests;

pub use error::LockError;
pub use fairness::Fairness;
pub use held::{Held, MutexGuard};
pub(crate) use locks::LAST_RELEASES;
pub use locks::{Locks, LocksBuilder};
pub use mutex::{Mutex, Synchronized};
pub use mutex_builder::MutexBuilder;
pub use options::{MutexOptions, Waiting};
pub use permit::{Permit, PermitView, Released};
pub use scope::Scope;
pub use semaphore::{Holder, Semaphore, Wait};
pub use semaphore_builder::SemaphoreBuilder;
