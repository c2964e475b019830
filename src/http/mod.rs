//! The guard as an HTTP cache: a layer for servers and clients.
//!
//! [`StampedeGuard`] is a [`tower_layer::Layer`]. Around an axum `Router`, or another service
//! that hyper runs (by `hyper_util`'s `TowerToHyperService`), it answers from the store; around an HTTP client it
//! stores the responses of the servers that the client calls.
//!
//! # What is shared
//!
//! The layer is a cache by RFC 9111, shared by the whole fleet; [`HttpPolicy`] sets how careful it is. By default:
//!
//! - A response states its lifetime (`CDN-Cache-Control`, `s-maxage`, `max-age`, `Expires`); otherwise the policy's
//!   [`fresh_for`](crate::PolicyBuilder::fresh_for) applies. A 5xx or a 408 goes to the waiters of its load and is
//!   not stored; [below](#failures) are the statuses that are not shared at all.
//! - A request with credentials (`Authorization`, `Cookie`, ...), with a range in units other than bytes, or with a
//!   body goes straight to the inner service. A response with `Set-Cookie`, `private`, `no-store` or `Vary: *` goes
//!   only to the client that requested it, even while others wait. A response that depends on anything else (a
//!   header of your application, the peer's address) must say so: with `Vary`, `Cache-Control: private`, or
//!   [`DoNotStore`].
//! - A handler states lifetimes without header text by [`CacheTerms`], an extension of its response.
//! - Variants (`Vary`) are stored side by side, and each is coalesced separately. Let all responses for one URI
//!   name the same headers in `Vary` (RFC 9110, 12.5.5). A response that names only some of the known headers is
//!   stored with the others; a response that names another header makes the stored ones unfindable.
//! - A stale response is validated (`If-None-Match`, `If-Modified-Since`), once for all requests that arrive
//!   meanwhile. During the validation it is served within `stale-while-revalidate`, and instead of a 408, 500, 502,
//!   503, 504 or no answer it is served within `stale-if-error` (RFC 5861). Both windows are those of the response,
//!   else those of the policy, unless the response forbids stale use.
//! - Conditions and ranges of clients are answered from the stored response. A client's condition does not reach
//!   the inner service if others may wait for the answer. If nothing is stored, requests with a range and `HEAD`
//!   are not coalesced and do not wait for a lease: other requests may need another part, and an answer without a
//!   body stores nothing.
//! - `no-cache`, `max-age`, `min-fresh`, `max-stale` and `only-if-cached` of requests are obeyed. A request that
//!   insists on a load joins a running one, and delays no other request.
//! - Methods that are not known to be safe go through and, if they succeed, invalidate their target (RFC 9111,
//!   4.4), in every process. A `HEAD` is answered from a stored `GET`, or updates its headers. A `QUERY` is stored by its content if
//!   [`HttpPolicy::query_method`] says so.
//!
//! `Cache-Status` (RFC 9211) reports what the guard did and why, and [`explain`] reports the same in tests.
//!
//! # Keys
//!
//! A key is scheme, authority, path and query. A request that spells its path or query differently from the normal form
//! (RFC 3986, 6.2.2) has a separate key, which an invalidation under the normal form reaches too, because a router may
//! answer `/p` and `/%70` differently. **The authority is the client's `Host`**: a service that is
//! called by three names or ports loads three times, and invalidating a page needs the visitors' `Host`, unless the
//! policy names [one authority](HttpPolicy::authority) for all keys. A request with the scheme's default port, or an
//! empty port, in `Host` bypasses the cache. Servers see requests without a scheme: see
//! [`scheme`](HttpPolicy::scheme).
//!
//! A reverse proxy reports the host, port, scheme and prefix of a request (`Forwarded`, `X-Forwarded-Host`,
//! `-Port`, `-Prefix`, `-Proto`, `-Scheme`, `-Ssl`), and handlers build links and redirects from this report. So
//! requests with different reports share nothing: [`HttpPolicy::behind_proxy`] names the report of ordinary
//! requests, and each other report has a separate key. An invented report neither displaces nor delays other
//! requests. All of these keys have the resource as a tag: a hit is one `MGET`, waiters do not read the body while
//! it arrives, and an invalidation, or an unsafe method, reaches all reports. `X-Forwarded-For` and the pairs `for`
//! and `by` of `Forwarded` are part of no report: a response that depends on the client's address must say so.
//!
//! A layer *inside* a nested axum router sees paths without their prefix, so two routers nested at different paths
//! would share keys. Put the guard around the outermost router (`router.layer(guard)`; after wrapping it in a layer
//! that rewrites URIs, `Router::new().fallback_service(..)` makes it a router again), or turn on the feature
//! `axum`, which keys by `OriginalUri`.
//!
//! The query is part of the key, so an invalidation of `/p` leaves the responses to `/p?utm=1`: with
//! [`HttpPolicy::path_tags`] each response has the tag of its path, and the invalidation reaches each query.
//! [`HttpPolicy::ignore_query`] and [`HttpPolicy::only_query`] leave parameters out of the key, and
//! [`HttpPolicy::sort_query`] their order. With [`HttpPolicy::no_vary_search`] a response says this itself. The inner service does not
//! see what the key leaves out.
//!
//! Policies that are [`strict`](HttpPolicy::strict) or [`private`](HttpPolicy::private) use separate keys:
//! [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) returns these, and [`cache_key`] only those of the default policy.
//! [`StampedeGuard::invalidate_path`](crate::StampedeGuard::invalidate_path) invalidates by path.
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
//! - Envoy: `X-Forwarded-Client-Cert`. A mesh that adds it to all requests makes all of them bypass: replace the
//!   list there.
//!
//! **Any cookie makes a request bypass**, including those of analytics: [`HttpPolicy::cookies`] lists the ones that
//! matter.
//!
//! # Where the layer belongs
//!
//! **The guard wraps** (is *outside* of) **every layer that removes credentials from a request, or that sets
//! cookies, `Cache-Control`, `Vary` or nonces. It sits *inside* the layers that stamp each response** (request ids,
//! timings, rate-limit fields)**, trace, or compress.** The guard sees a request after the layers outside of it,
//! and stores the response of the layers inside. A layer outside runs for hits too; a layer inside runs for loads
//! only.
//!
//! ```text
//!  request ─►  request id, timing, rate-limit fields, tracing, compression    each response its own
//!                 │
//!              StampedeGuard   sees `Authorization` and `Cookie` ─► bypass
//!                 │            sees `Set-Cookie`, `private`, `Vary` ─► not shared, or shared per variant
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
//! # // Stand-ins: `http::stacks` of the integration tests has the stack with the real crates.
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
//!     // Removes the credentials: the guard has to see the request before.
//!     let _user = request.headers_mut().remove("authorization");
//!     next.run(request).await
//! }
//! async fn stamp(request: Request, next: Next) -> Response {
//!     let mut response = next.run(request).await;
//!     response.headers_mut().insert("x-request-id", "7f3a".parse().expect("a header's value"));
//!     response
//! }
//!
//! // Warns of session layers on the wrong side.
//! let http = HttpPolicy::default().personal_extension::<Session>();
//! let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);
//! let app: Router = Router::new()
//!     .route("/form", get(|| async { "a form" }))
//!     .layer(SessionManagerLayer::new(MemoryStore::default())) // reads and sets cookies: inside
//!     .layer(from_fn(authenticate))                            // removes credentials: inside
//!     .layer(guard)                                            // wraps all of these
//!     .layer(from_fn(stamp));                                  // stamps each response: outside
//! # Ok::<(), stampede_guard::Error>(())
//! ```
//!
//! On the wrong side these layers mix up the responses of different clients. With sessions or cookies
//! outside, one visitor's form or cart is stored, without the `Set-Cookie` that would forbid it; with
//! authentication outside, one user's page is stored, without the `private` that would forbid it; with nonces
//! outside, the page of a hit does not match its header. (A nonce from inside is stored with its page, and
//! gets as old: if each response needs a fresh nonce, the page is `private`.)
//!
//! **The guard detects a layer on the wrong side only by a request extension of a declared type**:
//! [`HttpPolicy::personal_extension`] declares it, a request with it bypasses (`detail=extension`), and a warning
//! names the remedy. The guard cannot detect that a layer outside has removed `Authorization` from a request, nor
//! see anything that a layer outside writes into a response.
//!
//! Two limits of the rule:
//!
//! - A layer that admits or refuses a client by anything but a listed [credential](#credentials), such as its peer
//!   address, a certificate, or a header of the application, does not run for hits if it is inside. Put it
//!   *outside* the guard, or make its routes `Cache-Control: private`, or declare its header with
//!   [`credential_header`](HttpPolicy::credential_header).
//! - **Around a client the guard must be inside every layer that adds credentials**: default headers and the cookie
//!   store of reqwest, `AddAuthorizationLayer`, a connector that signs. The guard does not see credentials that are
//!   added behind it: it takes all users for one, and **gives one user the responses of another**. Credentials must
//!   be on the request before it reaches the guard. Likewise, if a client behind the guard follows redirects, the
//!   guard sees the last response only: `no-store` or `Vary` on the redirect itself is lost.
//!
//! **The guard must be outside every layer that wraps request bodies**: `RequestBodyTimeoutLayer`,
//! `RequestDecompressionLayer`, a `map_request` that makes a stream of the body. The guard cannot see that such a
//! body is empty, so every `GET` would bypass the cache (`detail=body` in `Cache-Status`, and a warning now and
//! then).
//!
//! # Bodies without an end
//!
//! A waiter waits for the end of the response's body. `text/event-stream` and `multipart/x-mixed-replace` are never
//! shared, so no request waits for them. The same holds for newline-delimited JSON, `application/json-seq` and the
//! like, unless their length or an explicit lifetime shows that they end. The guard cannot know other endless
//! bodies: mark them `no-store`, or with [`DoNotStore`], or their waiters are held for
//! [`load_timeout`](crate::PolicyBuilder::load_timeout), again and again.
//!
//! # Slow bodies
//!
//! A body that is not complete within [`load_timeout`](crate::PolicyBuilder::load_timeout), though its head came in
//! time, is not stored. The client of its load receives all of it. Waiters in other processes then load for
//! themselves, all at once, and for ten seconds no request queues for it. So for a resource that is slow by nature
//! raise `load_timeout`; send `Content-Length`, which lets waiters in the loading process read the body as it
//! arrives; and bound concurrent requests by a limit *inside* the guard, because
//! [`max_concurrent_loads`](crate::PolicyBuilder::max_concurrent_loads) does not count requests that load for
//! themselves.
//!
//! # Readiness
//!
//! The service is always ready. A hit never touches the inner service, so capacity that `poll_ready` reserved there
//! would be held while a request waits for the store. Instead, a clone of the inner service is made ready where it
//! is called. Back-pressure by `poll_ready` is therefore lost: limit concurrency *inside* the guard, where it
//! limits loads, not hits.
//!
//! # Failures
//!
//! `S::Error` is passed on unchanged: the request that led a failing load gets the inner service's own error.
//! Waiters of that load get 502. A load that took longer than [`load_timeout`](crate::PolicyBuilder::load_timeout),
//! or a wait longer than [`wait_timeout`](crate::PolicyBuilder::wait_timeout), is 504. With
//! [`OnStoreDown::FailClosed`](crate::OnStoreDown) a store that is down is 503, and so is an overload. All carry
//! `Retry-After`.
//!
//! A response goes to all waiters if it is a failure of the server (any 5xx but 511, and a 408: a request without a
//! body was complete, so that is the server's own time-out), if it states its lifetime, or if its status is stored
//! without a stated lifetime (200, 203, 204, 300, 301, 308, 404, 410). **With any other status each waiter loads
//! for itself**, at once: a 302 or a 201 may concern only the request that it answers, and for ten seconds no
//! request queues. Statuses that concern one request or one client (400 to 403, 405 to 407, 411 to 417, 421, 425, 426,
//! 428, 429, 431, 511) leave no such mark, so later requests queue again.
//!
//! 425, 428, 429, 431 and 511 **are never stored or shared**, whatever their `Cache-Control` (RFC 6585, 3 to 6; RFC
//! 8470, 5.2). A limiter per client answers 429. A limiter for the server as a whole answers 503: it goes to all
//! waiters, and the origin is not called again for each of them.
//!
//! **A 504 depends on `load_timeout`, not on the service.** A `GET` that takes longer than `load_timeout` is 504 to its
//! own client too, but the same request with a cookie, which bypasses the guard, has no such bound and succeeds.
//! Raise `load_timeout` for routes that are slow by nature, or exclude them from look-ups with [`HttpPolicy::key`].
//!
//! If a 304 does not refer to the stored response that it should validate (RFC 9111, 4.3.4), the guard sends the
//! request again without its own conditions, if it can: with the feature `axum`, a request of axum, and any stored QUERY. Otherwise the
//! request that led gets a 502 of the guard (`detail=not-validated`), or the stale response if `stale-if-error`
//! permits it. The stored response is invalidated, and one of the waiters loads the whole.
//!
//! A load runs in a separate task, which outlives the request that led it. So a handler's panic is a 502 of the
//! guard (`detail=load-panicked`), and a `CatchPanicLayer` outside does not notice it: put it inside. After a panic
//! the guard runs the handler for up to four waiters, one after the other, before the other waiters get 502. (For
//! a request that bypasses the guard, or loads for itself alone, the handler runs in the request's own task, and a
//! panic unwinds through the layer as it would without one.) Task-locals of outer middlewares are not available in
//! handlers, except of requests that bypass the guard; extensions of the request are.
//!
//! # Extensions of responses
//!
//! Extensions are values in this process's memory and are not stored: the client that led the load receives them,
//! hits and waiters receive none. A layer *outside* the guard that reads them, such as one that writes errors in JSON
//! from a handler's extension, works for one client and leaves the next a bare status. **Put such a layer inside
//! the guard**, so that the response it writes is stored, or let the handler send the same information in a header.
//!
//! # Validation before each use
//!
//! `no-cache` and, once the response is stale, `must-revalidate` and `proxy-revalidate` forbid using it for another
//! request without validation (RFC 9111, 5.2.2.2, 5.2.2.4 and 5.2.2.8). With `ETag` or `Last-Modified`, all
//! requests that arrive during a validation share its result. **Without a validator** `no-cache` and `max-age=0,
//! must-revalidate` have the same effect: each waiter loads for itself. Give such a response an `ETag`, or omit
//! `must-revalidate`: a plain `max-age=0` goes to all waiters. With a [`strict`](HttpPolicy::strict)
//! policy `s-maxage=0` forbids it too (5.2.2.10); by default it goes to all waiters.
//!
//! # Age
//!
//! A response with neither `Date` nor `Age` was made in this process, and its lifetime begins when its head comes,
//! however long its handler took. For any other response the time in transit counts too (RFC 9111, 4.2.3). A
//! response that is already older than its lifetime when its head comes is marked `detail=too-old`, and the first such
//! response is logged as a warning.
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

pub(crate) mod answer;
mod body;
mod candidate;
mod commit;
pub(crate) mod exchange;
mod explain;
#[cfg(any(test, fuzzing))]
#[path = "../../tests/unit/http/fuzzed.rs"]
pub(crate) mod fuzzed;
mod hold_back;
mod inner_body;
mod load;
mod miss;
mod query_method;
#[cfg(feature = "reqwest")]
pub mod reqwest;
#[cfg(feature = "reqwest")]
mod reqwest_body;
mod search;
mod service;
mod side_commit;
pub(crate) mod stored;
mod tags;
mod tee;
mod unsafe_methods;
mod upstream;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/walkthrough_tests.rs"]
mod walkthrough;

use http::{Method, Request, Uri};

pub use self::body::GuardedBody;
pub use self::explain::{Decision, explain};
pub use self::service::{Guarded, GuardedFuture, HttpService};
pub use self::tags::{CacheTagger, CacheTags};
use crate::error::{Error, ErrorKind, InvalidationTarget};
use crate::guard::StampedeGuard;
use crate::guard::invalidation::Invalidation;
use crate::guard_state::retained::ChangeTarget;
pub use crate::http_rules::cache_terms::CacheTerms;
pub use crate::http_rules::key::cache_key;
use crate::http_rules::key::normal_form;
pub use crate::http_rules::query::TRACKING_PARAMETERS;
use crate::http_rules::request::ChangedResources;
use crate::http_rules::request_settings::RequestRules;
pub use crate::http_rules::request_settings::{KeyParts, RateLimitScope};
pub use crate::http_rules::response::DoNotStore;
pub use crate::http_rules::settings::HttpPolicy;
use crate::key::CacheKey;

impl StampedeGuard {
    /// The key under which this guard, as an HTTP layer with its policy, stores the response to a GET with this
    /// request's URI and headers, for [`invalidate`](Self::invalidate). `None` if such a GET would bypass the
    /// cache, for example because of credentials: pass a request as clients send it. `Host` is part of the key, unless
    /// the policy names [one authority](HttpPolicy::authority) for all keys: then
    /// [`invalidate_path`](Self::invalidate_path) needs no request.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let guard = stampede_guard::StampedeGuard::in_memory();
    /// let request = http::Request::get("/report/7").header("host", "shop.example").body(())?;
    /// if let Some(key) = guard.http_key(&request) {
    ///     guard.invalidate(key).await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn http_key<B>(&self, request: &Request<B>) -> Option<CacheKey> {
        self.current().parts().1.http.cache_key(request)
    }

    /// Removes the stored responses for one URI, this path with this query, under the policy's
    /// [`authority`](HttpPolicy::authority) and [`scheme`](HttpPolicy::scheme), as an unsafe
    /// method does: in every process, all variants, and also the results of running loads. If the policy has a
    /// [`key`](HttpPolicy::key) function, removes what an unsafe request without headers would remove.
    ///
    /// The path may be plain text or percent-encoded: `/café`, `/caf%C3%A9` and `/caf%c3%a9` are the same path, and the responses to
    /// all of these spellings are removed (RFC 3986, 6.2.2). A `%` that two hexadecimal digits follow is a code. `%2F` and `/`, `/a/`
    /// and `/a`, and parameters in another order are other paths, and so is the same path with another query, unless the policy has
    /// [`path_tags`](HttpPolicy::path_tags): then the responses to each query of the path are removed.
    ///
    /// # Errors
    ///
    /// [`InvalidPolicy`](ErrorKind::InvalidPolicy) if the policy names no authority; [`InvalidKey`](ErrorKind::InvalidKey) for a text
    /// that is no path, or has a fragment or control characters; else as [`invalidate`](Self::invalidate).
    ///
    /// # Cancel safety
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Consistency
    ///
    /// As [`invalidate`](Self::invalidate).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// let policy = Policy::builder().http(HttpPolicy::default().authority("shop.example")).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// guard.invalidate_path("/product/7").await?;
    /// # Ok(()) }
    /// ```
    pub async fn invalidate_path(&self, path: &str) -> Result<(), Error> {
        self.invalidation().path(path).send().await
    }
}

impl Invalidation {
    /// Adds a path with its query, as in [`invalidate_path`](StampedeGuard::invalidate_path).
    pub fn path(self, path: impl Into<String>) -> Self {
        let path = path.into();
        let keys = path_keys(&path, &self.guard().parts().1.http.requests);
        let stored = keys.and_then(|keys| {
            let all: Result<Vec<_>, Error> = keys.into_iter().map(|key| stored(self.guard(), key)).collect();
            all.map(|all| all.concat())
        });
        self.target(InvalidationTarget::Path(path), stored)
    }
}

/// An invalidation of the resources with these keys.
fn of_keys(guard: &StampedeGuard, keys: Vec<CacheKey>) -> Invalidation {
    keys.into_iter().fold(guard.invalidation(), |invalidation, key| {
        let stored = stored(guard, key.clone());
        invalidation.target(InvalidationTarget::Key(key), stored)
    })
}

/// The key to invalidate for this resource, and the tag of its path if the policy sets path tags, or follows `No-Vary-Search`. The key is
/// needed beside the tag: a process without [`path_tags`](HttpPolicy::path_tags) stores the entry without the tag.
fn stored(guard: &StampedeGuard, key: CacheKey) -> Result<Vec<ChangeTarget>, Error> {
    let (state, policy) = guard.parts();
    let key = guard.key(key)?;
    let path = policy.path_tag(&state.namespace, &key);
    let path = path.or_else(|| policy.search_tag(&state.namespace, &key));
    Ok([ChangeTarget::value(key)].into_iter().chain(path.map(ChangeTarget::tag)).collect())
}

/// The keys that [`StampedeGuard::invalidate_path`] removes.
fn path_keys(path: &str, rules: &RequestRules) -> Result<Vec<CacheKey>, Error> {
    if rules.authority.is_none() {
        let text = "a path needs one authority for all keys, and the policy names none: set \
                    HttpPolicy::authority(\"shop.example\"), or invalidate the http_key of a request with the clients' Host";
        return Err(Error::new(ErrorKind::InvalidPolicy, text));
    }
    let refused = || {
        let text = format!(
            "{path:?} is no path of a URI: give it as in \"/product/7\", with its query if it has one, without a fragment, an authority or \
             control characters"
        );
        Error::new(ErrorKind::InvalidKey, text)
    };
    // `http` drops a URI's fragment, so refuse one here.
    let is_path = path.starts_with('/') && !path.contains(|c: char| c == '#' || c.is_control());
    let uri = Uri::try_from(&*normal_form(path)).ok().filter(|_| is_path);
    let mut change = Request::new(());
    *change.method_mut() = Method::DELETE;
    *change.uri_mut() = uri.ok_or_else(refused)?;
    Ok(ChangedResources::of(&change, rules).ok_or_else(refused)?.target_keys())
}
