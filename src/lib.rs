//! Cache-stampede protection for a whole fleet: one load per cold key across all replicas.
//!
//! A hot cache entry expires, thousands of requests miss at once, and all of them ask the database behind
//! the cache. Coalescing inside one process leaves one load per replica. This crate takes a short, renewed lease per
//! resource on Redis, so that **one request in the whole fleet** loads; the others sleep until they are told,
//! and read the cache again.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use stampede_guard::StampedeGuard;
//!
//! // In production: StampedeGuard::new(redis::Client::open("redis://127.0.0.1/")?)
//! let guard = StampedeGuard::in_memory();
//!
//! // Around any async loader:
//! let report: String = guard
//!     .get_or_load(("report", 7), || async { Ok::<_, std::io::Error>("expensive".to_owned()) })
//!     .await?;
//!
//! // Around an axum router, another tower service or an HTTP client. `Host` is part of the key;
//! // `HttpPolicy::authority` sets one host name for all requests.
//! # #[cfg(feature = "http")] {
//! let app: axum::Router = axum::Router::new()
//!     .route("/report/{id}", axum::routing::get(|| async { "expensive" }))
//!     .layer(guard);
//! # }
//! # assert_eq!(report, "expensive");
//! # Ok(()) }
//! ```
//!
//! Around a service **the guard wraps every layer that removes credentials or sets cookies, `Cache-Control`, `Vary` or nonces, and
//! sits inside the layers that stamp each response, trace or compress**: the module `http` shows the stack,
//! in "Where the layer belongs".
//!
//! A guard can be made anywhere; its calls need a Tokio runtime, with time and, for Redis, I/O.
//!
//! # How a request is answered
//!
//! 1. **key**: request or caller -> [`CacheKey`], or straight to the inner service.
//! 2. **look up**: one plain GET; fresh -> 8, stale but servable -> 8 now and 3 to 7 in the background.
//! 3. **join**: the flight of this process; a follower awaits its leader -> 8.
//! 4. **lease**: one script for all processes: an entry meanwhile -> 8, granted -> 6, held -> 5.
//! 5. **wait**: until the wake-up, the lease's end, a lost connection or the deadline; then 4 again.
//! 6. **load**: in a separate task, while the lease is renewed.
//! 7. **commit**: one script stores the value, frees the lease and wakes every waiting process, if the lease is
//!    still held. A failure goes to all waiters; if the loader vanished, one waiter goes on.
//! 8. **response**: the value.
//!
//! # Locks
//!
//! For work of your own that only one process, or a limited number, may do at a time: [`lock`] has a mutex and a fair
//! semaphore on the same connections ([`StampedeGuard::locks`]).
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `redis` | yes | the fleet: `StampedeGuard::new(redis::Client)` |
//! | `http` | yes | the layer for HTTP services and clients |
//! | `tls` | no | `rediss://`, through rustls |
//! | `sentinel` | no | `StampedeGuard::new(redis::sentinel::SentinelClient)` |
//! | `cluster` | no | `StampedeGuard::new(redis::cluster::ClusterClient)` |
//! | `axum` | no | keys by `OriginalUri`, for guards inside nested routers |
//! | `metrics` | no | counters and histograms through the `metrics` facade |
//! | `testing` | no | a store that injects faults by seed, and a scripted origin, for your own tests |
//!
//! Without any feature, the in-memory guard for loaders, [`memoize`](StampedeGuard::memoize) and the locks remain.
//!
//! # Observability
//!
//! [`StampedeGuard::health`] returns the state of this process's store, [`StampedeGuard::doctor`] examines the deployment
//! ([`health`]). [`StampedeGuard::stats`] counts without any feature. Spans and events go to `tracing`: each load runs in a span
//! `stampede_guard.load` inside the span of the request that led it. Keys appear as a digest, values never.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod failure_text;
mod flight;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzed;
mod guard;
mod guard_state;
pub mod health;
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
pub mod http;
#[cfg(feature = "http")]
mod http_rules;
mod key;
mod loader;
pub mod lock;
mod observe;
mod policy;
mod read_through;
mod store;
mod sync;
#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
pub mod testing;
mod tracker;
mod value;

pub use crate::guard::builder::StampedeGuardBuilder;
pub use crate::guard::load_context::LoadContext;
pub use crate::guard::memoize::{Memoize, MemoizeFuture, MemoizeLayer};
pub use crate::store::backend::Backend;
pub use crate::value::codec::Codec;
pub use error::{Error, ErrorKind, LoadError};
pub use guard::{Shutdown, StampedeGuard};
pub use key::CacheKey;
pub use observe::Stats;
pub use policy::{OnOverload, OnStoreDown, OnWaitTimeout, Policy, PolicyBuilder};
pub use store::memory::MemoryStore;

#[cfg(all(test, feature = "testing"))]
#[path = "../tests/simulation/mod.rs"]
mod simulation;

/// The README's examples run as tests.
#[cfg(all(doctest, feature = "redis", feature = "http"))]
#[doc = include_str!("../README.md")]
struct Readme;
