//! Cache-stampede protection for a whole fleet: one load per cold key across all replicas.
//!
//! When a hot cache entry expires, thousands of requests miss at once, and all of them query the database behind the cache.
//! Coalescing inside one process leaves one load per replica. This crate takes a short, renewed lease per resource on
//! Redis, so that **one request in the whole fleet** loads; the others sleep until they are notified, and read the cache. The
//! cache is Redis itself.
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
//! // Around an axum router, another tower service or an HTTP client:
//! # #[cfg(feature = "http")] {
//! let app: axum::Router = axum::Router::new()
//!     .route("/report/{id}", axum::routing::get(|| async { "expensive" }))
//!     .layer(guard);
//! # }
//! # assert_eq!(report, "expensive");
//! # Ok(()) }
//! ```
//!
//! # What the layer does by default
//!
//! - It caches a 200 to a `GET`, and also 203, 204, 300, 301, 308, 404 and 410, of at most 1 MiB: as long as `Cache-Control`
//!   says, or 60 s without it. Other statuses are cached only if the response states a lifetime.
//! - A request with `Authorization`, a cookie or another credential goes straight to the service. A response with
//!   `Set-Cookie`, `private`, `no-store` or `Vary: *` is not shared. **A response that depends on anything else must say
//!   so**: with `Vary`, `private`, or the extension `DoNotStore`.
//! - The key is scheme, host, path and query. A successful `POST`, `PUT` or `DELETE` invalidates its URI.
//! - Authentication, sessions and cookies belong inside the guard; tracing, compression, CORS and request ids outside.
//!
//! The module `http` documents all of it.
//!
//! # Where to read on
//!
//! The repository has a guide, a page per question, in `docs/`: `getting-started.md` step by step, `keys.md` (what is
//! cached), `stack.md` (where the layer belongs), `freshness.md`, `local-tier.md` (hits from memory), `errors.md`,
//! `invalidation.md`, `attribute.md`, `redis-down.md`, `rest-clients.md`, `locks.md`, `settings.md`, `testing.md`, `redis.md` (users,
//! Sentinel, Cluster), `credentials.md` (TLS, tokens), `large-values.md`, `operations.md`, `guarantees.md` (each promise with its tests),
//! `limits.md` (what is not promised) and `how-it-works.md`.
//!
//! Here: [`StampedeGuard`] is what a service calls, [`Policy`] how it behaves; [`LoadContext`] lets a loader set the
//! lifetime, tags and validator of its value; [`lock`] has a mutex and a fair semaphore on the same connections;
//! [`health`] and [`StampedeGuard::doctor`] examine a deployment; [`StampedeGuard::stats`] counts. Spans and events go to
//! `tracing`: keys appear as a digest, values never. A guard can be made anywhere; its calls need a Tokio runtime, with
//! time and, for Redis, I/O.
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
//! | `axum` | no | keys by `OriginalUri`, for guards inside nested routers; `LoadError` as a response; the matched route as a label of metrics |
//! | `reqwest` | no | the guard around a reqwest client, as a middleware or in a tower stack: `http::reqwest` |
//! | `inspector` | no | a page and an API about the fleet that is running: `StampedeGuard::inspector` |
//! | `lz4` | no | long values take less memory on the server: `PolicyBuilder::compress_from` |
//! | `macros` | no | `#[memoize]`, an attribute for async functions |
//! | `metrics` | no | counters, gauges and histograms through the `metrics` facade |
//! | `serde` | no | `Policy` and `HttpPolicy` from a file, and back |
//! | `testing` | no | a store that injects faults by seed, and a scripted origin, for your own tests |
//!
//! Without any feature, the in-memory guard for loaders, [`memoize`](StampedeGuard::memoize) and the locks remain.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Code that names no type of a feature is compiled without the feature too, and may then be unused. Code that no feature uses is reported
// when all features are on.
#![cfg_attr(
    not(all(
        feature = "axum",
        feature = "cluster",
        feature = "http",
        feature = "inspector",
        feature = "metrics",
        feature = "redis",
        feature = "reqwest",
        feature = "testing"
    )),
    allow(dead_code)
)]

/// Implements `Debug` for a type with fields that are secret or of no use: prints a text, or only the named fields.
macro_rules! debug_as {
    ($self:ident: $Type:ident => $text:literal $(, $value:expr)?) => {
        impl ::std::fmt::Debug for $Type {
            fn fmt(&$self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                write!(f, $text $(, $value)?)
            }
        }
    };
    ($self:ident: $Type:ident $(<$($of:ident),+>)? { $($field:ident: $value:expr),* }) => {
        impl $(<$($of),+>)? ::std::fmt::Debug for $Type $(<$($of),+>)? {
            fn fmt(&$self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_struct(stringify!($Type))$(.field(stringify!($field), &$value))*.finish_non_exhaustive()
            }
        }
    };
}

mod error;
mod flight;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
#[path = "../tests/unit/fuzzed.rs"]
pub mod fuzzed;
mod guard;
mod guard_state;
pub mod health;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "http")]
mod http_rules;
#[cfg(feature = "inspector")]
pub mod inspector;
mod key;
mod loader;
mod local;
pub mod lock;
#[cfg(feature = "metrics")]
pub mod metrics;
mod observe;
mod policy;
mod read_through;
#[cfg(feature = "serde")]
mod setting;
mod store;
mod sync;
mod task;
#[cfg(feature = "testing")]
pub mod testing;
mod value;

/// Traits that are implemented for every suitable type. For an unsuitable type the compiler names what is missing. There is nothing to
/// implement; docs/compile-errors.md explains the messages.
pub mod bounds {
    #[cfg(feature = "macros")]
    pub use crate::guard::function::{
        FromLoadError, FunctionError, FunctionResult, KeyPart, LoaderArgument, LoaderReceiver, LoaderReferent,
    };
    pub use crate::guard::memoize::MemoizedService;
    pub use crate::guard::memoize::{CacheableResponse, CloneService, ServiceError, SharedError};
    #[cfg(feature = "http")]
    pub use crate::http::HttpService;
    pub use crate::store::backend::IntoBackend;
}

pub use crate::guard::builder::StampedeGuardBuilder;
pub use crate::guard::invalidation::{Invalidation, PendingInvalidation};
pub use crate::guard::load::{AnswerInfo, Load, Loaded};
pub use crate::guard::load_many::Warmed;
pub use crate::guard::memoize::{Memoize, MemoizeFuture, MemoizeLayer};
pub use crate::guard::typed::LoadContext;
pub use crate::store::backend::Backend;
pub use crate::value::codec::Codec;
pub use error::{Error, ErrorKind, InvalidationTarget, LoadError};
pub use guard::{Shutdown, StampedeGuard};
pub use key::CacheKey;
pub use observe::{FlightId, Outcome, SpanLinks, Stats};
pub use policy::{AdaptiveLoads, OnAbsent, OnOverload, OnStoreDown, OnWaitTimeout, Policy, PolicyBuilder};
pub use store::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use store::redis::login::Credentials;

/// Used by the code that the attribute [`macro@memoize`] writes. It changes without notice.
#[cfg(feature = "macros")]
#[doc(hidden)]
pub mod __macros {
    pub use crate::guard::function::{BodyOf, FunctionSettings, argument, load, owned, part, receiver};
}

/// Used by the other packages of this crate's workspace. It changes without notice.
#[doc(hidden)]
pub mod __members {
    pub use crate::guard::messages::{Channel, Listening, invalidates_all, listen, send};
}

/// Memoizes an `async fn`, or a method: one call in the whole fleet runs the body, and the others receive its value or its failure, as
/// with [`get_or_load`](StampedeGuard::get_or_load).
///
/// | setting | what |
/// |---|---|
/// | `guard = self.guard` | an expression of the guard. Required |
/// | `name = "price"` | the first part of the key; all arguments but `self` follow, by [`Display`](std::fmt::Display) |
/// | `skip(db)` | with `name`: arguments that are no part of the key |
/// | `key = ("price", id)` | instead of `name`: the whole key, an expression of the arguments that is [converted](Into) into a [`CacheKey`] |
/// | `fresh_for = "30s"` | changes a setting of the guard's policy for this function; so do `negative_for`, `stale_while_revalidate`, `stale_if_error`, `back_off`, `error_for`, `soft_timeout`, `load_timeout` and `local_for` |
/// | `policy = \|policy\| ..` | changes any setting, by a function from [`PolicyBuilder`] to `PolicyBuilder` that captures nothing |
///
/// The attribute also writes a function with the suffix `_key`. It returns the key for the same arguments, for
/// [`invalidate`](StampedeGuard::invalidate) and the like. It has the arguments that are in the key. These calls use the policy of
/// the guard, not the function's: [`insert`](StampedeGuard::insert) does not know the function's lifetimes and tags.
///
/// **The attribute sees the signature, and not the `impl` around it.** With `name`, the method of each instance of a generic `impl`,
/// and a trait's default method in each type, have one key. If the result depends on a type parameter of the `impl`, or on
/// `Self`, write a `key` with a part that differs for each type. Type parameters and `Self` in the signature's own result are
/// refused with `name`.
///
/// The function returns a [`Result`] with a [`LoadError<E>`](LoadError), or an error made [of one](bounds::FromLoadError); in both
/// cases the body's error is `E`. The body owns the arguments that it names: `self` and the referents of references are cloned for each
/// call, and other arguments are moved.
///
/// The repository's guide has a page: docs/attribute.md.
///
/// # Errors
///
/// The function fails as `get_or_load` does; and with [`ErrorKind::InvalidPolicy`] if its settings contradict those of the guard.
///
/// # Cancel safety
///
/// See [`get_or_load`](StampedeGuard::get_or_load).
///
/// # Examples
///
/// ```
/// use std::convert::Infallible;
/// use stampede_guard::{LoadError, StampedeGuard, memoize};
///
/// #[derive(Clone)]
/// struct Shop {
///     guard: StampedeGuard,
///     discount: u64,
/// }
///
/// impl Shop {
///     #[memoize(guard = self.guard, name = "price", skip(_trace), fresh_for = "30s")]
///     async fn price(&self, id: u64, _trace: &str) -> Result<u64, LoadError<Infallible>> {
///         Ok(id * 100 - self.discount)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let shop = Shop { guard: StampedeGuard::in_memory(), discount: 1 };
/// assert_eq!(shop.price(7, "first").await?, 699);
/// assert_eq!(shop.guard.get(Shop::price_key(7)).await?, Some(699_u64));
/// shop.guard.invalidate(Shop::price_key(7)).await?;
/// # Ok(()) }
/// ```
#[cfg(feature = "macros")]
pub use stampede_guard_macros::memoize;

/// The version of `redis` that a client for [`StampedeGuard::new`] must come from.
#[cfg(feature = "redis")]
pub use redis;

#[cfg(all(test, feature = "testing"))]
#[path = "../tests/simulation/mod.rs"]
mod simulation;
