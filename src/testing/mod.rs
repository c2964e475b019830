//! For tests of your own service: a store with injected faults that follow a seed, and a scripted origin that
//! counts its loads.
//!
//! A service that uses a guard has to be right when the store is not: when an answer is lost, a wake-up does not
//! come, the server fails over, a replica dies with the lease. [`ChaosStore`] makes that happen in a test, in
//! memory and in virtual time; [`Origin`] stands for the expensive resource behind the guard.
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
//! Let your service take its guard as a parameter, give it one on a `ChaosStore`, pause the clock, and loop over
//! seeds:
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
//!     // Not one load for each caller, but at most one per process, and two if a lease was lost.
//!     assert!(origin.loads("price:7") <= 6, "SEED={seed}");
//!
//!     // After the faults end, one load is enough for all replicas.
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
//! A failing test names its seed, and the seed reproduces the run: on a current-thread runtime with a paused clock
//! it determines the order of all events, as long as your own code uses no random numbers. (The guard takes its
//! own from `fastrand`, which has one state per thread; [`ChaosStore::new`] seeds it for the calling thread. Make
//! one store for each run, before anything else.)
//!
//! # What it can do
//!
//! - [`ChaosStore::over`]: the same in front of another store, such as a Redis server of an integration test, with
//!   the faults of the connection ([`Fault::ON_ANY_STORE`]).
//! - [`ChaosStore::inject`]: a [`Fault`] with a probability; [`ChaosStore::once`]: the next time, for a scripted
//!   test; [`ChaosStore::calm`]: ends all faults.
//! - [`ChaosStore::replica`]: makes a guard that a test can cut off, pause or kill ([`Replica`]).
//! - [`Origin`]: counts loads, per key and in all, and how many ran at once. A script makes it fail, hang, panic,
//!   take long, or answer a value that must not be stored; and its values have versions, so that a test sees which
//!   one it received.
//!
//! [`ChaosStore::new`] is no Redis. It has no connections, so no reconnections and no circuit breaker. Faults
//! strike between the guard and a [`MemoryStore`](crate::MemoryStore), which keeps the same contract as the scripts
//! on a server. Locks and tags are struck by the faults of the connection, and by refusals. Messages about locks
//! get lost and are sent twice, and lock waiters are notified to ask again without need; they never receive a false
//! grant. Evictions, flushes, failovers and the clock affect entries and leases (a flush also affects tags).

mod chaos;
mod fault;
mod origin;
mod server;
#[cfg(test)]
#[path = "../../tests/unit/testing_tests.rs"]
mod tests;
mod wire;

pub use chaos::{ChaosStore, Replica};
pub use fault::Fault;
pub use origin::{Answer, Origin, OriginError};
#[cfg(test)]
pub(crate) use server::Witness;
