//! For tests of your own service: a store on which things go wrong by seed, and an origin that is scripted and counts.
//!
//! A service that uses a guard has to be right when the store is not: when an answer is lost, a wake-up does not come, the
//! server fails over, a replica dies with the lease. [`ChaosStore`] makes that happen in a test, in memory and in
//! virtual time; [`Origin`] stands for the expensive thing behind the guard.
//!
//! Put the feature into your dev-dependencies, so that it is in no release:
//!
//! ```toml
//! [dev-dependencies]
//! stampede-guard = { version = "0.1", features = ["testing"] }
//! tokio = { version = "1", features = ["macros", "rt", "test-util"] }
//! ```
//!
//! # A test of a service
//!
//! Have your service take its guard, give it one on a `ChaosStore`, pause the clock, and loop over seeds:
//!
//! ```
//! use std::time::Duration;
//! use stampede_guard::{Policy, StampedeGuard};
//! use stampede_guard::testing::{ChaosStore, Fault, Origin};
//!
//! /// Your service: in production its guard is made from a `redis::Client`.
//! #[derive(Clone)]
//! struct Prices { guard: StampedeGuard, origin: Origin }
//!
//! impl Prices {
//!     async fn price(&self, id: u32) -> Option<u64> {
//!         let origin = self.origin.clone();
//!         self.guard.get_or_load(("price", id), move || async move { origin.load(format!("price:{id}")).await }).await.ok()
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! for seed in 0..20 {
//!     let (chaos, origin) = (ChaosStore::new(seed), Origin::new());
//!     chaos.latency(Duration::from_millis(1), Duration::from_millis(3));
//!     origin.takes(Duration::from_millis(200));
//!     for fault in [Fault::ErrorAfter, Fault::BlackHole, Fault::WakeLost, Fault::EvictLease] {
//!         chaos.inject(fault, 0.1);
//!     }
//!     let replicas: Vec<_> = (0..3)
//!         .map(|_| Prices { guard: StampedeGuard::new(chaos.clone()), origin: origin.clone() })
//!         .collect();
//!
//!     // Thirty callers on three replicas: each is answered, whatever happens to the store.
//!     let callers: Vec<_> =
//!         (0..30).map(|n| { let prices = replicas[n % 3].clone(); tokio::spawn(async move { prices.price(7).await }) }).collect();
//!     for caller in callers {
//!         assert_eq!(caller.await?, Some(0), "SEED={seed}");
//!     }
//!     // Not one load each, but one per process at the worst, and two where a lease was lost.
//!     assert!(origin.loads("price:7") <= 6, "SEED={seed}");
//!
//!     // And when the store is well again, one load is enough for all.
//!     chaos.calm();
//!     tokio::time::sleep(Duration::from_secs(5)).await;
//!     replicas[0].guard.invalidate(("price", 7)).await?;
//!     let before = origin.loads("price:7");
//!     for prices in &replicas {
//!         assert_eq!(prices.price(7).await, Some(0));
//!     }
//!     assert_eq!(origin.loads("price:7"), before + 1, "SEED={seed}");
//! }
//! # let _ = Policy::default();
//! # Ok(()) }
//! ```
//!
//! A failing test names its seed, and the seed makes the same run again: on a current-thread runtime with a paused clock the
//! order of everything follows from it, as long as your own code does not throw dice. (The guard's own come from `fastrand`, for
//! the thread that they are thrown on; [`ChaosStore::new`] seeds them for the thread that it is called on. Make one store for each
//! run, before anything else of it.)
//!
//! # What it can do
//!
//! - [`ChaosStore::over`]: the same in front of a store of yours, such as a Redis server of an integration test, as far as a fault
//!   is one of the way there ([`Fault::ON_ANY_STORE`]).
//! - [`ChaosStore::inject`]: a [`Fault`] with a probability; [`ChaosStore::once`]: the next time, for a test with a script;
//!   [`ChaosStore::calm`]: all is well again.
//! - [`ChaosStore::replica`]: a guard of which one can say that its process was cut off, paused or killed ([`Replica`]).
//! - [`Origin`]: counts loads, per key and in all, and how many ran at once; is told to fail, hang, panic, take long, or answer
//!   what may not be stored; and its values have versions, so that a test sees which one it was given.
//!
//! What [`ChaosStore::new`] is not: a Redis. It has no connections, so nothing is opened again and there is no breaker. Faults
//! strike between the guard and a [`MemoryStore`](crate::MemoryStore), which keeps the same contract as the scripts on a server.
//! Locks and tags know the faults of the way, and refusals. What is said about locks gets lost and is said twice, and those who
//! wait are told to look again for nothing; they are never told that a lock is theirs when it is not. Evictions, flushes,
//! failovers and the clock concern entries and leases (a flush, tags too).

mod chaos;
mod command;
mod condition;
mod fault;
mod line;
mod origin;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use chaos::{ChaosStore, Replica};
#[cfg(test)]
pub(crate) use command::{Answer as ServerAnswer, Command};
pub use fault::Fault;
pub use origin::{Answer, Origin, OriginError};
#[cfg(test)]
pub(crate) use server::Witness;
