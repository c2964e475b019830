//! The guard as an HTTP cache: a layer for servers and clients.
//!
//! [`StampedeGuard`](crate::StampedeGuard) is a [`tower_layer::Layer`]. Around an axum `Router` or a hyper
//! service it answers from the store; around an HTTP client it memoizes the servers behind it.
//!
//! # What is shared
//!
//! `GET` responses that may be shared with everyone. A request with credentials (`Authorization`,
//! `Cookie`, ...), a condition, a range or a body goes straight to the inner service, and so does
//! every other method; a `HEAD` is answered from a stored `GET`. A response with `Set-Cookie`, `private`,
//! `no-store`, `no-cache` or `Vary` goes only to the client that asked for it, also while others wait. An
//! answer that depends on anything else (a header of your own, the peer's address) must say so: with
//! `Vary`, `Cache-Control: private`, or [`DoNotStore`].
//!
//! The lifetime is the response's own (`s-maxage`, `max-age`, `Expires`), else the policy's
//! [`fresh_for`](crate::PolicyBuilder::fresh_for). Responses of 5xx go to those who wait and to nobody later.
//!
//! After that a response may be served stale: while it is loaded anew (`stale-while-revalidate`), and instead of a 500,
//! 502, 503, 504 or no answer (`stale-if-error`; RFC 5861), by what it says, else by the policy, unless it forbids that.
//!
//! # Keys
//!
//! Scheme, authority, path and query, byte for byte. Servers see requests without a scheme: see
//! [`scheme`](crate::PolicyBuilder::scheme). A layer *inside* a nested axum router sees paths without their
//! prefix, so two routers nested at different places would share keys: put the guard around the outermost
//! router, or turn on the feature `axum`, which keys by `OriginalUri`.
//!
//! # Readiness
//!
//! The service is always ready. A hit never touches the inner service, so capacity that `poll_ready`
//! reserves there would be held while a request waits for the store; instead a clone of the inner service is
//! made ready where it is called. Back-pressure by `poll_ready` is therefore lost: limit concurrency
//! *inside* the guard, where it limits loads, not hits.
//!
//! # Failures
//!
//! `S::Error` is untouched: the request that led a failing load gets the inner service's own error. Whoever
//! waited for it gets 502; a load or a wait that took too long is 504; with
//! [`OnStoreDown::FailClosed`](crate::OnStoreDown) a store that is down is 503. All carry `Retry-After`.
//!
//! # Examples
//!
//! ```
//! use axum::{Router, routing::get};
//! use stampede_guard::StampedeGuard;
//!
//! let app: Router = Router::new()
//!     .route("/report/{id}", get(|| async { "expensive" }))
//!     .layer(StampedeGuard::in_memory());
//! ```

mod apart;
mod body;
mod cache_control;
mod cdn;
mod change;
mod dates;
mod draft;
mod exchange;
mod explain;
mod fields;
mod freshness;
mod invalidation;
mod journey;
mod kept;
mod load;
mod location;
mod policy;
mod ranges;
mod replay;
mod request;
mod request_rules;
mod response;
mod reuse;
mod rule;
mod selecting;
mod service;
mod share;
mod status;
mod target;
mod tee;
mod validation;
mod vary;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "walkthrough_tests.rs"]
mod walkthrough;
mod wire;

pub use body::GuardedBody;
pub use explain::{Decision, explain};
pub use policy::HttpPolicy;
pub use request_rules::KeyParts;
pub use response::DoNotStore;
pub use service::{Guarded, GuardedFuture};
pub use target::cache_key;
