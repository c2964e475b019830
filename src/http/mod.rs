//! The guard as an HTTP cache: a layer for servers and clients.
//!
//! [`StampedeGuard`](crate::StampedeGuard) is a [`tower_layer::Layer`]. Around an axum `Router`, or another service that hyper
//! runs (by `hyper_util`'s `TowerToHyperService`), it answers from the store; around an HTTP client it memoizes the servers
//! behind it.
//!
//! # What is shared
//!
//! It is a cache by RFC 9111, shared by the whole fleet; [`HttpPolicy`] says how careful it is. By default:
//!
//! - The lifetime of a response is its own (`CDN-Cache-Control`, `s-maxage`, `max-age`, `Expires`), else the
//!   policy's [`fresh_for`](crate::PolicyBuilder::fresh_for). A 5xx or a 408 goes to those who wait and to nobody later;
//!   which statuses do not is told [below](#failures).
//! - A request with credentials (`Authorization`, `Cookie`, ...), with a range in units other than bytes, or with a
//!   body goes straight to the inner service. A response with `Set-Cookie`, `private`, `no-store` or `Vary: *` goes
//!   only to the client that asked for it, also while others wait. An answer that depends on anything else (a header
//!   of your own, the peer's address) must say so: with `Vary`, `Cache-Control: private`, or [`DoNotStore`].
//! - Variants (`Vary`) are stored side by side, and each coalesces by itself. Let all answers for one URI name the same headers
//!   (RFC 9110, 12.5.5): one that names some of those which are known is stored with the others; one that names another
//!   makes what is stored unfindable.
//! - What is stale is validated (`If-None-Match`, `If-Modified-Since`), once for all who ask meanwhile. It is served
//!   meanwhile within `stale-while-revalidate`, and instead of a 408, 500, 502, 503, 504 or no answer within
//!   `stale-if-error` (RFC 5861), by what the response says, else by the policy, unless the response forbids it.
//! - Conditions and ranges of clients are answered out of what is stored. A client's condition does not reach the
//!   inner service where others may wait for the answer. Where nothing is stored, requests with a range and `HEAD` are not
//!   coalesced, and nobody waits for a lease: each may want another part, of which the others would have no use, and an answer
//!   without a body stores nothing.
//! - `no-cache`, `max-age`, `min-fresh`, `max-stale` and `only-if-cached` of requests count. Who insists on a load
//!   joins the one that runs, and makes nobody else wait for it.
//! - Methods that are not known to be safe go through and, if they succeed, invalidate their target (RFC 9111,
//!   4.4), in every process. A `HEAD` is answered from a stored `GET`, or brings it up to date.
//!
//! `Cache-Status` (RFC 9211) says what was done and why, and [`explain`] does so in tests.
//!
//! # Keys
//!
//! Scheme, authority, path and query, byte for byte. **The authority is the client's `Host`**: a service that is called by three names or
//! ports loads three times, and a page is invalidated with the visitors' `Host`, unless the policy names
//! [one authority](HttpPolicy::authority) for all keys. A `Host` with the scheme's default port or an empty one bypasses. Servers see requests without a
//! scheme: see [`scheme`](crate::PolicyBuilder::scheme).
//!
//! A proxy in front reports the host, port, scheme and prefix by which a request came (`Forwarded`, `X-Forwarded-Host`, `-Port`, `-Prefix`,
//! `-Proto`, `-Scheme`, `-Ssl`), and handlers build links and redirects from its report. So requests with different reports share
//! nothing: [`HttpPolicy::behind_proxy`] names the report of ordinary requests; each other one has a key of its own, and an invented
//! one neither displaces nor delays what others ask for. The resource is a tag of all of them: a hit is one `MGET`, waiters do not read
//! along, and an invalidation, or an unsafe method, reaches all reports. `X-Forwarded-For` and the pairs `for` and `by` of `Forwarded` are in
//! no report: a response that depends on the client's address must say so.
//!
//! A layer *inside* a nested axum router sees paths without their
//! prefix, so two routers nested at different places would share keys: put the guard around the outermost
//! router (`router.layer(guard)`; what is wrapped around that, to rewrite URIs, becomes a router again by
//! `Router::new().fallback_service(..)`), or turn on the feature `axum`, which keys by `OriginalUri`.
//!
//! Policies that are [`strict`](HttpPolicy::strict) or [`private`](HttpPolicy::private) have keys of their own:
//! [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) knows them, [`cache_key`] the default's only.
//!
//! # Credentials
//!
//! A request with one of these headers bypasses the cache by default; [`credential_header`](HttpPolicy::credential_header) adds
//! to the list, [`credential_headers`](HttpPolicy::credential_headers) replaces it:
//!
//! - `Authorization`, `Proxy-Authorization`, `Cookie`, `X-Api-Key`, `X-Auth-Token`, `X-Amz-Security-Token`
//! - `Signature`, `Signature-Input` (RFC 9421); `Client-Cert`, `Client-Cert-Chain` (RFC 9440)
//! - oauth2-proxy: `X-Forwarded-User`, `-Email`, `-Preferred-Username`, `-Groups`, `-Access-Token`, and the same with
//!   `X-Auth-Request-`
//! - Cloudflare Access: `Cf-Access-Jwt-Assertion`, `Cf-Access-Authenticated-User-Email`
//! - Google IAP: `X-Goog-Iap-Jwt-Assertion`, `X-Goog-Authenticated-User-Email`, `-Id`
//! - AWS ALB: `X-Amzn-Oidc-Data`, `-Identity`, `-Accesstoken`; `X-Amzn-Mtls-Clientcert`, `-Subject`
//! - Azure: `X-Ms-Client-Principal`, `-Id`, `-Idp`, `-Name`; `X-Ms-Token-` with `Aad-Access-Token`, `Aad-Id-Token`,
//!   `Google-Access-Token`, `Google-Id-Token`, `Facebook-Access-Token`, `Twitter-Access-Token`
//! - Envoy: `X-Forwarded-Client-Cert`. A mesh that adds it to all requests keeps all of them from the cache: replace the list there.
//!
//! **Any cookie makes a request bypass**, those of analytics included: [`HttpPolicy::cookies`] lists the ones that matter.
//!
//! # Where the layer belongs
//!
//! **The guard wraps** (is *outside* of) **every layer that takes credentials off a request, or that sets cookies, `Cache-Control`,
//! `Vary` or nonces. It sits *inside* the layers that stamp each response** (request ids, timings, rate-limit fields)**, trace, or
//! compress.** The guard sees the request as it reaches it, and stores the response as it leaves the layers behind it. A layer
//! outside is asked for hits, too; a layer inside is asked for loads only.
//!
//! ```text
//!  request ─►  request id, timing, rate-limit fields, tracing, compression    each response its own
//!                 │
//!              StampedeGuard   sees `Authorization` and `Cookie` ─► bypass
//!                 │            sees `Set-Cookie`, `private`, `Vary` ─► kept from others, or told apart
//!                 │
//!              sessions, cookies, authentication, `Cache-Control`, CSP nonces
//!                 │
//!              handlers
//! ```
//!
//! As an axum stack, where the layer that is added later is outside:
//!
//! ```
//! use axum::extract::Request;
//! use axum::middleware::{Next, from_fn};
//! use axum::response::Response;
//! use axum::{Router, routing::get};
//! use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
//! use tower_sessions::{MemoryStore, Session, SessionManagerLayer};
//! # // Stand-ins: the stack with the real crates is `http::stacks` of the integration tests.
//! # mod tower_sessions {
//! #     #[derive(Clone)]
//! #     pub struct Session;
//! #     #[derive(Default)]
//! #     pub struct MemoryStore;
//! #     #[derive(Clone)]
//! #     pub struct SessionManagerLayer;
//! #     impl SessionManagerLayer {
//! #         pub fn new(_: MemoryStore) -> Self { Self }
//! #     }
//! #     impl<S> tower::Layer<S> for SessionManagerLayer {
//! #         type Service = S;
//! #         fn layer(&self, inner: S) -> S { inner }
//! #     }
//! # }
//!
//! async fn authenticate(mut request: Request, next: Next) -> Response {
//!     // Takes the credentials off: the guard has to be asked before.
//!     let _user = request.headers_mut().remove("authorization");
//!     next.run(request).await
//! }
//! async fn stamp(request: Request, next: Next) -> Response {
//!     let mut response = next.run(request).await;
//!     response.headers_mut().insert("x-request-id", "7f3a".parse().expect("a header's value"));
//!     response
//! }
//!
//! // Says which layers are on the wrong side, if they are.
//! let http = HttpPolicy::default().personal_extension::<Session>();
//! let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);
//! let app: Router = Router::new()
//!     .route("/form", get(|| async { "a form" }))
//!     .layer(SessionManagerLayer::new(MemoryStore::default())) // reads and sets cookies: inside
//!     .layer(from_fn(authenticate))                            // takes credentials off: inside
//!     .layer(guard)                                            // wraps all of these
//!     .layer(from_fn(stamp));                                  // stamps each response: outside
//! # Ok::<(), stampede_guard::Error>(())
//! ```
//!
//! On the wrong side these layers mix clients up. With sessions or cookies outside, one visitor's form or cart is stored, without the
//! `Set-Cookie` that would forbid it; with authentication outside, one user's page, without the `private` that would; with
//! nonces outside, the page of a hit does not match its header. (A nonce from inside is stored with its page, and is as old as
//! that: where each response needs a fresh one, the page is `private`.)
//!
//! **The guard notices a layer on the wrong side only by a request extension of a declared type**:
//! [`HttpPolicy::personal_extension`] names it, such a request bypasses (`detail=extension`), and a warning says what to do. It
//! can not see that a layer outside has taken `Authorization` off a request, nor what a layer outside writes into a response.
//!
//! Two limits of the rule:
//!
//! - A layer that admits or refuses a client by anything but a listed [credential](#credentials), such as its peer address, a
//!   certificate, or a header of the application, is not asked for hits if it is inside. It stays *outside* the guard, or its routes are
//!   `Cache-Control: private`, or its header is declared with [`credential_header`](HttpPolicy::credential_header).
//! - **Around a client the guard stays inside whatever adds credentials**: default headers and the cookie store of reqwest,
//!   `AddAuthorizationLayer`, a connector that signs. What they add behind the guard it does not see: it takes all users for
//!   one, and **gives each what belongs to another**. Credentials must be on the request before it reaches the guard. Likewise, of
//!   redirects that are followed inside, it sees the end: what the redirect itself said, `no-store` or `Vary`, is lost.
//!
//! **Outside whatever wraps request bodies**: `RequestBodyTimeoutLayer`, `RequestDecompressionLayer`, a `map_request` that
//! makes a stream of the body. Nobody can tell that such a body is empty, so every `GET` would bypass the cache
//! (`detail=body` in `Cache-Status`, and a warning now and then).
//!
//! # Bodies without an end
//!
//! Whoever waits for a response waits for the end of its body. `text/event-stream` and `multipart/x-mixed-replace` are never
//! shared, so nobody waits for them; nor for newline-delimited JSON, `application/json-seq` and the like, unless their length
//! or an explicit lifetime says that they end. The guard can not know of others: mark them `no-store`, or with [`DoNotStore`],
//! or those who wait are held for [`load_timeout`](crate::PolicyBuilder::load_timeout), again and again.
//!
//! # Slow bodies
//!
//! A body that is not complete within [`load_timeout`](crate::PolicyBuilder::load_timeout), though its head came in time, is
//! stored for nobody. Its own client is given all of it. Those who wait for it elsewhere then ask for themselves, all at once, and
//! for ten seconds nobody queues for it. So for a resource that is slow by nature raise `load_timeout`; send `Content-Length`, by
//! which those who wait in the leader's process read along; and bound what may run at once by a concurrency limit *inside* the
//! guard, as [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) does not count who asks for itself.
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
//! waited for it gets 502; a load that took longer than [`load_timeout`](crate::PolicyBuilder::load_timeout), or a wait longer
//! than [`wait_timeout`](crate::PolicyBuilder::wait_timeout), is 504; with
//! [`OnStoreDown::FailClosed`](crate::OnStoreDown) a store that is down is 503, as is too much at once. All carry `Retry-After`.
//!
//! A response is told to all who wait if it is a failure of the server (any 5xx but 511, and a 408: a request without a body was
//! complete, so that is the server's own time-out), if it names its lifetime, or if it is stored without (200, 203, 204, 300,
//! 301, 308, 404, 410). **With any other status each waiter asks for itself**, at once: a 302 or a 201 may be about the one
//! that was asked for, and for ten seconds nobody queues. Statuses about one request or one client (400 to 403, 406, 407, 411 to
//! 413, 415 to 417, 421, 425, 426, 428, 429, 431, 511) leave no such mark, so the requests that come later wait for one again.
//!
//! 425, 428, 429, 431 and 511 **are never stored or shared**, whatever their `Cache-Control` (RFC 6585, 3 to 6; RFC 8470, 5.2). A
//! limiter per client answers 429. A limiter that speaks for the server as a whole answers 503: all waiters are
//! told it, and the origin has its rest.
//!
//! **A 504 depends on the bound, not on the service.** A `GET` that takes longer than `load_timeout` is 504 to its own client too,
//! while the same request with a cookie, which bypasses the guard, takes as long as it takes and succeeds. Raise `load_timeout`
//! for routes that are slow by nature, or mark them with [`HttpPolicy::key`] as not to be looked up.
//!
//! A 304 about something else than what was asked about (RFC 9111, 4.3.4) is followed by the same request without the guard's
//! conditions, where that can be sent again: one of axum's, with the feature `axum`. Elsewhere it is a 502 of the guard
//! (`detail=not-validated`) to the request that led, or what `stale-if-error` permits. What was stored is forgotten, and one of
//! those who wait asks for the whole.
//!
//! A load is a task of its own, which outlives the request that led it. So a handler's panic is a 502 of the guard
//! (`detail=load-panicked`), of which a `CatchPanicLayer` outside hears nothing: put it inside. A handler that
//! panics is tried for up to four of those who wait, one after the other, before the rest are told. (A request that bypasses the
//! guard, or is loaded for itself alone, runs the handler in its own task, and a panic unwinds through the layer as it would
//! without one.) And the task-locals of outer middlewares are not there in the handlers of requests that are looked up;
//! extensions of the request are.
//!
//! # Extensions of responses
//!
//! They are values in this process's memory and are not stored: the client that led the load is given them, a hit and a waiter are
//! not. A layer *outside* the guard that reads them, such as one that writes errors in JSON by an extension of the handler's, does
//! so for one client and leaves the next one a bare status. **Put such a layer inside the guard**, so that the response it writes
//! is stored, or let the handler say the same in a header.
//!
//! # Validation before each use
//!
//! `no-cache` and, once the response is stale, `must-revalidate` and `proxy-revalidate` let it answer no other request before a
//! validation (RFC 9111, 5.2.2.2, 5.2.2.4 and 5.2.2.8). With `ETag` or `Last-Modified` there is one, which all requests that
//! come meanwhile share. **Without a validator** `no-cache` and `max-age=0, must-revalidate` are alike: each waiter asks for
//! itself. Give such a response an `ETag`, or leave `must-revalidate` away: a plain `max-age=0` goes to all waiters. To the letter
//! ([`strict`](HttpPolicy::strict)) `s-maxage=0` forbids it too (5.2.2.10); by default it goes to all waiters.
//!
//! # Age
//!
//! A response with neither `Date` nor `Age` was made in this process, and its lifetime begins when its head comes, however long
//! its handler took. Of any other the way counts (RFC 9111, 4.2.3). One that is older than its lifetime when it comes says
//! `detail=too-old`, and the first one is warned of.
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

mod body;
mod body_warning;
mod cache_status;
mod candidate;
mod commit;
mod encoding;
mod exchange;
mod explain;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzed;
mod keys;
mod load;
mod metadata;
mod miss;
mod respond;
mod retry;
mod service;
mod shared_body;
mod side_commit;
mod tee;
mod unsafe_methods;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/walkthrough_tests.rs"]
mod walkthrough;
mod wanted;

pub use crate::http_rules::policy::HttpPolicy;
pub use crate::http_rules::request_rules::KeyParts;
pub use crate::http_rules::response::DoNotStore;
pub use crate::http_rules::target::cache_key;
pub use body::GuardedBody;
pub use explain::{Decision, explain};
pub use service::{Guarded, GuardedFuture};
