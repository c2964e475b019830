//! [`HttpPolicy`]: the settings of the HTTP rules, and the policy's three starting points (`default`, `strict`, `private`).
//!
//! The settings that concern requests (lists of headers, authority, cookies, extensions) are its `RequestRules`.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/policy_tests.rs"]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderMap, HeaderName};
use http::uri::Scheme;
use http::{Request, header};

use super::groups::TagHeaders;
use super::key::{default_port, key, plain_authority};
use super::query::QueryRules;
use super::request::{Content, examine};
use super::request_settings::{
    CacheScope, CookieNames, CredentialRule, Heads, KeyHook, KeyParts, PersonalExtension, RateLimitScope,
    RequestRules, forwarding,
};
use super::vary::{MOST_NAMES, Normalization};
use crate::key::CacheKey;

/// Which responses the HTTP layer shares, with which clients, and for how long; set by
/// [`PolicyBuilder::http`](crate::PolicyBuilder::http).
///
/// Three starting points:
///
/// - [`default`](Self::default), safe by default: a shared cache that is stricter than the RFC where applications
///   are often careless. Responses to requests with credentials or cookies, and responses with `Set-Cookie`, are
///   not shared; failures go to waiters and are never stored.
/// - [`strict`](Self::strict), exactly as in RFC 9111: the expected behavior of a reverse proxy.
/// - [`private`](Self::private), for clients: the cache of one user.
///
/// Each of the three uses separate keys: one neither serves nor invalidates entries of another. Policies that
/// differ only in the settings below share their entries, so a response that one policy stores is served by the
/// others: if one shares more than the others, give it a separate namespace.
///
/// # Examples
///
/// ```
/// use stampede_guard::{Policy, http::HttpPolicy};
///
/// let policy = Policy::builder()
///     .http(HttpPolicy::default().share_cookies(true).vary_on(http::header::ACCEPT_LANGUAGE))
///     .build()?;
/// # Ok::<(), stampede_guard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct HttpPolicy {
    pub(crate) requests: RequestRules,
    pub(crate) scope: CacheScope,
    /// Whether the RFCs are followed exactly, even where the default is more careful.
    pub(crate) strict_rfc: bool,
    /// The rule for responses with `Set-Cookie`.
    pub(crate) set_cookie: CredentialRule,
    pub(crate) default_lifetime: bool,
    pub(crate) heuristic_freshness: bool,
    pub(crate) ignore_request_no_cache: bool,
    pub(crate) expose_key: bool,
    pub(crate) path_tags: bool,
    pub(crate) cache_groups: bool,
    pub(crate) no_vary_search: bool,
    /// In an `Arc`, because each request has a handle of it.
    pub(crate) tag_headers: Option<Arc<TagHeaders>>,
    pub(crate) answer_info: bool,
    pub(crate) etag: bool,
    /// Whether QUERY is looked up, and the longest content of one that is, in bytes.
    pub(crate) query_method: bool,
    pub(crate) query_content_limit: usize,
    /// The headers on which every response depends, sorted, each once.
    pub(crate) vary_on: Vec<HeaderName>,
    pub(crate) max_variants: usize,
    pub(crate) stale_on_disconnect: Duration,
    pub(crate) validate_within: Duration,
    pub(crate) retry_after: Duration,
    pub(crate) rate_limit_scope: RateLimitScope,
}

/// Methods that set one setting each: the argument is followed by the field that it sets.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($value:ident: $type:ty => $($field:ident).+);)+) => {
        impl HttpPolicy {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $value: $type) -> Self {
                self.$($field).+ = $value;
                self
            })+
        }
    };
}

setters! {
    /// The scheme of keys for requests without one in their URI, as servers receive them. Set it if two services share a
    /// namespace and are reached by different schemes. Defaults to `http`.
    ///
    /// **A service behind a proxy that terminates TLS must set `https`.** A request with the scheme's default port
    /// in `Host` (`shop.example:80`), or with an empty port, bypasses the cache (`detail=host`): a handler that
    /// builds URLs from `Host` would give that spelling to all clients. It is still the same resource (RFC 9110,
    /// 4.2.3): an unsafe method with it invalidates the responses that are stored for `shop.example`.
    ///
    /// **So must a server that terminates TLS itself**: HTTP/2 requests come with `:scheme`, and those of HTTP/1
    /// without, so one resource would have two keys, and a PUT through one would leave the other unchanged.
    scheme(scheme: Scheme => requests.scheme);

    /// Whether a request's `no-cache`, `max-age`, `min-fresh` and `Pragma` are ignored, so that they force no
    /// loads. (Requests that bypass the cache, as with `no-store`, are not affected.) Defaults to no: such
    /// a request has the stored response validated, once for all requests that arrive meanwhile.
    ignore_request_no_cache(ignore: bool => ignore_request_no_cache);

    /// Whether each response has the tag of its path, so that an invalidation of a path reaches all of its queries: one of `/p` by
    /// [`invalidate_path`](crate::StampedeGuard::invalidate_path) or an unsafe method removes the responses to `/p`, `/p?utm=1` and
    /// `/p?a=b`, under each [`key`](Self::key) and for each user of [`private`](Self::private). Defaults to no: it removes those of its
    /// own query.
    ///
    /// A hit reads one key more, in the same command (`MGET` instead of `GET`; on a cluster by a second `GET` at the same time). A load
    /// costs as much as a [tag](crate::PolicyBuilder::tags), and its waiters get the response at its end. Guards that share a store
    /// should agree about it: a response that a guard without it stores is a miss for a guard with it, and an invalidation by a
    /// guard without it does not reach the other queries.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// let http = HttpPolicy::default().authority("shop.example").path_tags(true);
    /// let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);
    /// guard.invalidate_path("/product/7").await?; // also `/product/7?utm_source=mail`
    /// # Ok(()) }
    /// ```
    path_tags(tagged: bool => path_tags);

    /// Whether the fields of Cache Groups (RFC 9875) have effect. Each member of a response's `Cache-Groups` is then a
    /// [tag](crate::http::CacheTags) of it, within its origin, and a response to an unsafe method that has `Cache-Group-Invalidation`
    /// invalidates the responses of these groups of its own origin, in the whole fleet. A field that is no list of strings is ignored, and
    /// so are the members of an invalidation beyond the 128th. Defaults to no.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// // GET /scripts.js  ->  Cache-Groups: "scripts"
    /// // POST /upload     ->  Cache-Group-Invalidation: "scripts"
    /// let policy = Policy::builder().http(HttpPolicy::default().cache_groups(true)).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// # let _ = guard;
    /// # Ok(()) }
    /// ```
    cache_groups(used: bool => cache_groups);

    /// Whether `Cache-Status` contains the key (RFC 9211, 2.7), to find out why two requests do not share a
    /// response. It contains the URI and the additions of the policy's [`key`](Self::key). Defaults to no.
    expose_key(is_exposed: bool => expose_key);

    /// Whether each response has an [`AnswerInfo`](crate::AnswerInfo) among its extensions, for a layer outside of the guard: the
    /// content of `Cache-Status`, as a value. Its `age` counts from when the guard stored the response, in contrast to the header
    /// `Age`, which counts from the origin. A response to an upgrade, or of a guard with
    /// [`shadow`](crate::PolicyBuilder::shadow), has none. Defaults to no, because it makes a hit from memory a tenth slower.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use axum::{Router, body::Body, http::Request, routing::get};
    /// use stampede_guard::{AnswerInfo, Outcome, Policy, StampedeGuard, http::HttpPolicy};
    /// use tower::ServiceExt as _;
    ///
    /// let policy = Policy::builder().http(HttpPolicy::default().answer_info(true)).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// let app: Router = Router::new().route("/", get(|| async { "expensive" })).layer(guard);
    ///
    /// let request = Request::get("/").header("host", "shop.example").body(Body::empty())?;
    /// let response = app.oneshot(request).await?;
    /// let info = response.extensions().get::<AnswerInfo>().ok_or("no info")?;
    /// assert_eq!(info.outcome, Outcome::Led);
    /// # Ok(()) }
    /// ```
    answer_info(is_exposed: bool => answer_info);

    /// Whether a stored 200 without an `ETag` gets one: a digest of its stored body, its content coding, type and language (RFC 9110,
    /// 8.8.3). A client that sends it in `If-None-Match` is answered with 304 from the stored response, also after a load that has
    /// returned the same body. Defaults to no.
    ///
    /// The tag is strong if the response has a content coding, because its bytes reach each client as they are stored. Otherwise it is
    /// weak: a layer outside of the guard may compress the body, and one strong tag would then name two sequences of bytes (8.8.1). A
    /// weak tag does not serve `If-Range`, so the client of an interrupted download gets the whole: let the handler send an `ETag` for
    /// what clients resume.
    ///
    /// The tag exists once the body is whole. So the client of the load gets none if it reads the body while that
    /// arrives, nor do waiters that [read along](crate::http#slow-bodies); a response that has its body ready with its head has the tag for
    /// every client. A response that is not stored has none. The inner service never receives such a tag: the guard validates by the
    /// validators of the inner service only.
    ///
    /// Costs a SHA-256 of each stored body, which the load pays; a hit costs nothing more.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use axum::{Router, body::Body, http::Request, routing::get};
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    /// use tower::ServiceExt as _;
    ///
    /// let policy = Policy::builder().http(HttpPolicy::default().etag(true)).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// let app: Router = Router::new().route("/", get(|| async { "expensive" })).layer(guard);
    ///
    /// let request = || Request::get("/").header("host", "shop.example");
    /// let response = app.clone().oneshot(request().body(Body::empty())?).await?;
    /// let tag = &response.headers()["etag"];
    /// let request = request().header("if-none-match", tag).body(Body::empty())?;
    /// assert_eq!(app.oneshot(request).await?.status(), 304);
    /// # Ok(()) }
    /// ```
    etag(is_made: bool => etag);

    /// Whether a response that states no lifetime gets [`fresh_for`](crate::PolicyBuilder::fresh_for). Defaults to
    /// yes; in [`strict`](Self::strict) to no.
    default_lifetime(is_on: bool => default_lifetime);

    /// Whether a response that states no lifetime is fresh for a tenth of the time since its `Last-Modified`, at
    /// most for a day (RFC 9111, 4.2.2). Defaults to no; in [`strict`](Self::strict) to yes.
    heuristic_freshness(guessed: bool => heuristic_freshness);

    /// Whether the inner service sees the query of a load as it was sent, with the parameters that
    /// [`ignore_query`](Self::ignore_query) and [`only_query`](Self::only_query) leave out of the key, and in the order that
    /// [`sort_query`](Self::sort_query) does not distinguish. Defaults to no.
    ///
    /// **It permits cache poisoning**: all clients receive the response to the first client's values. If a
    /// handler, a template or a layer inside the guard writes one of them into a response, as in a link to the page itself,
    /// then a stranger's `utm_source=<script>` runs in the browser of each visitor until the entry ends. Use it only if nothing
    /// inside the guard writes these parameters into responses, and something there needs them, such as a log.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::http::{HttpPolicy, TRACKING_PARAMETERS};
    ///
    /// let policy = HttpPolicy::default().ignore_query(TRACKING_PARAMETERS).pass_unkeyed_query(true);
    /// ```
    pass_unkeyed_query(passes: bool => requests.pass_unkeyed_query);

    /// How many variants of one resource are stored: the first ones. Further variants are loaded, and shared with
    /// requests that wait for that load, until the list of variants ends: together with the stored lifetime of its
    /// first variant, but not before twice its freshness. Defaults to 64.
    ///
    /// Different spellings of one value are one variant, but each invented value is a new variant. So one client can
    /// fill the list and keep other variants from being stored. If that matters, let a proxy reduce the headers in
    /// `Vary` to the values that the application distinguishes: `Accept-Encoding` to `gzip` or nothing, for
    /// example.
    max_variants(most: usize => max_variants);

    /// For how long after its freshness a response is served while the inner service cannot be reached, even if the
    /// response does not request it (RFC 9111, 4.2.4); never instead of an answer. Never if the response forbids it:
    /// `must-revalidate`, `proxy-revalidate`, `s-maxage`, `no-cache`. Zero turns it off. Defaults to 60 s; in
    /// [`strict`](Self::strict) to a day.
    stale_on_disconnect(window: Duration => stale_on_disconnect);

    /// For how long after its freshness a response with a validator stays stored, to be validated instead of
    /// loaded. Costs the store's memory. Defaults to ten minutes; in [`strict`](Self::strict) to a day.
    validate_within(window: Duration => validate_within);

    /// For how long at most the `Retry-After` of a 503 holds back the loads of its resource, in the whole fleet. Until then no process
    /// sends a request for it to the inner service: a stale response stands in within `stale_if_error`, and otherwise clients receive a
    /// 503 of the guard (`detail=retry-after`), in which `Retry-After` counts down. A request with `no-cache` is no exception. Defaults
    /// to zero: off, so the 503 goes to the waiters of its load, and the next request loads again.
    ///
    /// All variants of a resource are held back together; another query is another resource. Requests that do not share a load are not
    /// held back: unsafe methods, `HEAD`, those that bypass, and those that load for themselves alone. A 503 that is not shared, for
    /// example one with `no-store`, holds back as any other. A 429 holds back no load, unless
    /// [`rate_limit_scope`](Self::rate_limit_scope) says so: it concerns one client.
    ///
    /// **Turn it on only where a client cannot cause a 503**: one such response holds back all clients of the resource.
    ///
    /// A load costs one read of the store more; a hit costs nothing more. Without the store nothing is held back.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use axum::{Router, body::Body, http::{Request, StatusCode}, routing::get};
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    /// use tower::ServiceExt as _;
    ///
    /// let policy = Policy::builder().http(HttpPolicy::default().retry_after(Duration::from_secs(60))).build()?;
    /// let guard = StampedeGuard::in_memory().with_policy(policy);
    /// let busy = || async { (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "10")]) };
    /// let app: Router = Router::new().route("/", get(busy)).layer(guard);
    ///
    /// let request = || Request::get("/").header("host", "shop.example").body(Body::empty());
    /// app.clone().oneshot(request()?).await?;
    /// let held_back = app.oneshot(request()?).await?; // the handler does not run
    /// assert_eq!(held_back.headers()["cache-status"], "stampede-guard; fwd=uri-miss; detail=retry-after");
    /// # Ok(()) }
    /// ```
    retry_after(most: Duration => retry_after);

    /// Whose loads a 429 (too many requests) with `Retry-After` holds back, for as long as [`retry_after`](Self::retry_after) permits.
    /// Defaults to [`Client`](RateLimitScope::Client): those of no other. Around a client whose replicas share one account at an API, choose
    /// [`Resource`](RateLimitScope::Resource) or [`Authority`](RateLimitScope::Authority): one 429 then stops the whole fleet.
    ///
    /// Such a 429 is answered as a load that is held back: by a stale response, or a 503 with `Retry-After`. A 429 cannot be shared
    /// (RFC 6585, 4), so each waiter would send a request of its own.
    ///
    /// **Not around a server**: one visitor that exceeds a limit would close the page for all.
    rate_limit_scope(scope: RateLimitScope => rate_limit_scope);
}

impl HttpPolicy {
    /// The report that the reverse proxy puts on every request: its `Forwarded` (`host` and `proto`),
    /// `X-Forwarded-Host`, `-Port`, `-Prefix`, `-Proto`, `-Scheme` and `-Ssl`. A request with exactly this report
    /// has the plain key of its URI, and a hit costs one `GET`. Requests with any other report, or with none, have
    /// a [separate key](crate::http#keys): a hit is an `MGET`. Defaults to no report.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, HeaderValue};
    /// use stampede_guard::{Policy, http::HttpPolicy};
    ///
    /// let mut report = HeaderMap::new();
    /// report.insert("x-forwarded-proto", HeaderValue::from_static("https"));
    /// report.insert("x-forwarded-host", HeaderValue::from_static("shop.example"));
    /// let policy = Policy::builder().http(HttpPolicy::default().behind_proxy(report)).build()?;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    #[must_use]
    pub fn behind_proxy(mut self, report: HeaderMap) -> Self {
        // `build` refuses an empty report.
        self.requests.report = Some(forwarding(&report).unwrap_or_default());
        self
    }

    /// Adds a request header that marks a response as one user's to those of
    /// [`credential_headers`](Self::credential_headers), for example a header that a proxy adds.
    #[must_use]
    pub fn credential_header(mut self, name: HeaderName) -> Self {
        self.requests.add_credential(name);
        self
    }

    /// The request headers that mark a response as one user's: a request with any of them bypasses the cache; in
    /// [`private`](Self::private) they are part of the key instead. Defaults to [a list](crate::http#credentials)
    /// of standard headers and those of common proxies; in [`strict`](Self::strict) without `Authorization` and
    /// `Cookie`. **Replaces** that list; headers of [`credential_header`](Self::credential_header), added before or
    /// after, stay.
    #[must_use]
    pub fn credential_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.requests.replace_credentials(names);
        self
    }

    /// Whether requests with `Authorization` use the cache, if the response explicitly allows it: `public`, `s-maxage` or
    /// `must-revalidate` (RFC 9111, 3.5). Defaults to no; in [`strict`](Self::strict) to yes, and there such requests are
    /// answered with any stored response.
    #[must_use]
    pub fn share_authorized(mut self, share: bool) -> Self {
        self.requests.authorization = CredentialRule::wished(share, self.requests.authorization);
        if !share {
            self.requests.credentials.add(header::AUTHORIZATION);
        }
        self
    }

    /// Whether requests with `Cookie` and responses with `Set-Cookie` use the cache, if the response explicitly allows it,
    /// as for [`share_authorized`](Self::share_authorized). Defaults to no; in [`strict`](Self::strict) to yes, and there
    /// even if the response does not explicitly allow it.
    #[must_use]
    pub fn share_cookies(mut self, share: bool) -> Self {
        self.requests.cookie = CredentialRule::wished(share, self.requests.cookie);
        self.set_cookie = CredentialRule::wished(share, self.set_cookie);
        if !share {
            self.requests.credentials.add(header::COOKIE);
        }
        self
    }

    /// A request header on which every response depends, as if it were in its `Vary`. For headers that an
    /// application reads without naming them in `Vary`. Can be called several times.
    #[must_use]
    pub fn vary_on(mut self, name: HeaderName) -> Self {
        if let Err(at) = self.vary_on.binary_search_by(|known| known.as_str().cmp(name.as_str())) {
            self.vary_on.insert(at, name);
        }
        self
    }

    /// Extends the key by the hook's result for a request: a tenant, a cohort of an experiment. With `None` the
    /// request bypasses the cache. Runs for every request, so it should be quick.
    ///
    /// An unsafe method invalidates its target under the hook's result for its sender, under an empty text, and
    /// without any. So let the hook return `Some(String::new())` for the public: then a change by editors, for whom
    /// it returns `None`, invalidates the public responses. **Other tenants and cohorts are not reached**, because
    /// the guard does not know them: invalidate their responses by
    /// [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) of one of their requests, or by a tag.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().key(|parts| {
    ///     let tenant = parts.headers.get("x-tenant")?;
    ///     tenant.to_str().ok().map(str::to_owned)
    /// });
    /// ```
    #[must_use]
    pub fn key(mut self, hook: impl Fn(&KeyParts<'_>) -> Option<String> + Send + Sync + 'static) -> Self {
        self.requests.key = Some(KeyHook::new(hook));
        self
    }

    /// The key under which the response to a GET with this request's URI and headers is stored, for
    /// [`invalidate`](crate::StampedeGuard::invalidate). `None` if such a GET would bypass the cache by its URI or headers; the request's
    /// extensions are not considered.
    /// [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) is the same with all of a guard's policy.
    pub fn cache_key<B>(&self, request: &Request<B>) -> Option<CacheKey> {
        let (keyed, _) = examine(request.headers(), &self.requests, Content::Bypasses).ok()?;
        key(request, &keyed, &self.requests).ok()
    }

    /// How far the values of selecting request headers are normalized.
    pub(crate) fn normal(&self) -> Normalization {
        if self.strict_rfc { Normalization::Exact } else { Normalization::Careful }
    }

    /// Why these settings are refused, for [`PolicyBuilder::build`](crate::PolicyBuilder::build).
    pub(crate) fn refusal(&self) -> Option<String> {
        let ten_years = DAY * 3650;
        if self.max_variants == 0 {
            return Some("max_variants is 0: choose at least 1".to_owned());
        }
        if let Some(refusal) = self.requests.refusal() {
            return Some(refusal);
        }
        if self.query_content_limit > MOST_QUERY_CONTENT {
            return Some(format!(
                "query_content_limit is {}: choose at most {MOST_QUERY_CONTENT} bytes",
                self.query_content_limit
            ));
        }
        if self.vary_on.len() > MOST_NAMES {
            return Some(format!(
                "vary_on names {} headers: choose at most {MOST_NAMES}",
                self.vary_on.len()
            ));
        }
        if self.requests.report.as_ref().is_some_and(Vec::is_empty) {
            return Some(
                "behind_proxy names no host, port, prefix or scheme: give it the headers that the proxy sends, as in \
                 X-Forwarded-Proto: https"
                    .to_owned(),
            );
        }
        if self.rate_limit_scope != RateLimitScope::Client && self.retry_after.is_zero() {
            let text = "rate_limit_scope has no effect without retry_after: set how long a load is held back at most";
            return Some(text.to_owned());
        }
        let windows = [
            ("stale_on_disconnect", self.stale_on_disconnect),
            ("validate_within", self.validate_within),
            ("retry_after", self.retry_after),
        ];
        let too_long = windows.iter().find(|(_, window)| *window > ten_years)?;
        Some(format!("{} is {:?}: choose at most {ten_years:?}", too_long.0, too_long.1))
    }
}

const DAY: Duration = Duration::from_secs(86_400);

/// The highest limit for the content of a QUERY, which each such request holds in memory.
const MOST_QUERY_CONTENT: usize = 16 * 1024 * 1024;

/// The part of a policy that decides which responses are shared, and for how long.
#[derive(Clone, Debug)]
pub(crate) struct ResponseRules {
    pub(crate) http: Arc<HttpPolicy>,
    /// The lifetime of a response that states none; for 404 and 410 the second one.
    pub(crate) fresh_for: Duration,
    pub(crate) negative_for: Duration,
    /// The longest body that is stored, in bytes.
    pub(crate) max_body: usize,
}

impl Default for HttpPolicy {
    /// The defaults that the methods document.
    fn default() -> Self {
        Self {
            requests: RequestRules::default(),
            scope: CacheScope::Shared,
            strict_rfc: false,
            set_cookie: CredentialRule::Never,
            default_lifetime: true,
            // A heuristic lifetime is a guess; `fresh_for` is the operator's decision.
            heuristic_freshness: false,
            ignore_request_no_cache: false,
            // The key may contain data that a log, or the next client, must not see.
            expose_key: false,
            // With it, each path has a tag id in the store for a day at least, and each hit reads that id.
            path_tags: false,
            cache_groups: false,
            // The draft is no RFC yet, and a miss with a query costs one command more.
            no_vary_search: false,
            tag_headers: None,
            answer_info: false,
            // It digests each stored body, and clients of an origin without tags may not expect any.
            etag: false,
            // The guard then reads the content before the handler does, and clients of an origin may not expect stored responses.
            query_method: false,
            // Longer than queries are, and short enough that a thousand requests at once take 64 to 128 MiB.
            query_content_limit: 64 * 1024,
            vary_on: Vec::new(),
            // Enough for the languages times the encodings of a large site. A header with more values does not choose among
            // representations: it identifies the client.
            max_variants: 64,
            // Bridges a restart of the origin, without hiding an outage.
            stale_on_disconnect: Duration::from_secs(60),
            // A validation is cheaper than a load, but storing a response that is not requested again wastes
            // memory.
            validate_within: Duration::from_secs(600),
            // One 503 then decides for all clients, so it is the operator's decision to believe it.
            retry_after: Duration::ZERO,
            rate_limit_scope: RateLimitScope::Client,
        }
    }
}

impl HttpPolicy {
    /// Exactly as in RFC 9111, 9213 and 5861, for reverse proxies in front of origins with correct headers.
    ///
    /// - A response that states no lifetime gets none: [`fresh_for`](crate::PolicyBuilder::fresh_for) is not used;
    ///   heuristic freshness is (RFC 9111, 4.2.2).
    /// - Any final status with an explicit lifetime is stored, including failures.
    /// - `Cookie` and `Set-Cookie` have no effect (RFC 9111, 7.3): **an origin that answers requests with cookies
    ///   without `private` leaks those responses through this cache.** `Authorization` is as in RFC 9111, 3.5. The
    ///   other [`credential_headers`](Self::credential_headers) still bypass.
    /// - `CDN-Cache-Control` replaces `Cache-Control` (RFC 9213, 2.2); `no-cache="field"` and `private="field"`
    ///   apply to the fields that they list; `must-understand` overrides `no-store`.
    /// - `No-Vary-Search` has effect ([`no_vary_search`](Self::no_vary_search)).
    pub fn strict() -> Self {
        let mut requests =
            RequestRules { heads: Heads::STRICT, cookie: CredentialRule::Freely, ..RequestRules::default() };
        requests.authorization = CredentialRule::IfSaid;
        requests.credentials = requests
            .credentials
            .names
            .into_iter()
            .filter(|name| *name != header::AUTHORIZATION && *name != header::COOKIE)
            .collect();
        Self {
            requests,
            strict_rfc: true,
            set_cookie: CredentialRule::Freely,
            default_lifetime: false,
            heuristic_freshness: true,
            no_vary_search: true,
            stale_on_disconnect: DAY,
            validate_within: DAY,
            ..Self::default()
        }
    }

    /// The cache of one user, for clients (RFC 9111, 2: "a private cache is dedicated to a single user").
    ///
    /// Responses to credentials and responses marked `private` are stored; `s-maxage`, `proxy-revalidate` and
    /// `CDN-Cache-Control` are not for this cache. A digest of the request's
    /// [`credential_headers`](Self::credential_headers) is part of the key, so a client that acts for several users
    /// uses separate keys for them as long as these headers identify them.
    ///
    /// **The credentials must be on the request before it reaches the guard.** Credentials that are added inside,
    /// by reqwest's default headers or cookie store, by `AddAuthorizationLayer` or by a connector that signs, are
    /// not part of any key, and users are mixed up. Likewise, if a client inside follows redirects, the guard sees
    /// the last response only.
    ///
    /// An unsafe method invalidates the responses for its sender and for requests without credentials, but **not
    /// the responses stored for other users**: invalidate those by
    /// [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) of one of their requests, or by a tag.
    pub fn private() -> Self {
        let requests =
            RequestRules { heads: Heads::PRIVATE, keyed_by_credentials: true, ..RequestRules::default() };
        Self { requests, scope: CacheScope::Private, set_cookie: CredentialRule::Freely, ..Self::default() }
    }
}

impl HttpPolicy {
    /// One authority for all keys, such as `shop.example` or `shop.example:8080`, instead of the `Host` of each
    /// request: for a service that answers the same under any name. Defaults to none: the host and port of a
    /// request are part of its key, so three replicas that are requested by their own ports load three times, and
    /// an admin route invalidates a page only with the visitors' `Host`.
    ///
    /// With it, [`StampedeGuard::invalidate_path`](crate::StampedeGuard::invalidate_path) invalidates a page by its
    /// path, and an unsafe method invalidates its path whatever its `Host` is. Guards that share a store must agree
    /// about it.
    ///
    /// **A handler that writes `Host` into its response, for example in an absolute link, or chooses a tenant by
    /// it, must not have this**: one client's `Host` would reach all clients. **Nor may a guard around an HTTP client**: the
    /// responses of all hosts that it calls would have one key.
    /// [`PolicyBuilder::build`](crate::PolicyBuilder::build) refuses a text that is not an authority, or has the
    /// scheme's default port.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().authority("shop.example");
    /// let by_port = Request::get("/product/7").header("host", "10.0.0.1:8080").body(())?;
    /// let by_name = Request::get("/product/7").header("host", "shop.example").body(())?;
    /// assert_eq!(policy.cache_key(&by_port), policy.cache_key(&by_name));
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn authority(mut self, authority: impl Into<String>) -> Self {
        self.requests.authority = Some(authority.into().to_ascii_lowercase());
        self
    }

    /// The cookies that matter, by name: a GET or HEAD with other cookies only, such as those of analytics, is
    /// treated like one without cookies. **Defaults to all cookies**: any of them makes a request bypass the
    /// cache, so a browser with a cookie is answered by the inner service each time.
    ///
    /// The inner service does not see the other cookies of such a request: the guard removes the `Cookie` field,
    /// whether the response is stored or not, so no response depends on them, and `Vary: Cookie` sees none. A
    /// request with a listed cookie keeps all of its cookies, and is treated as the policy treats cookies
    /// ([`share_cookies`](Self::share_cookies)): by default it bypasses. So list each cookie that a handler, or a
    /// layer inside the guard, reads. Requests with other methods are not changed. The [`key`](Self::key) hook sees
    /// all cookies, and may put one into the key.
    ///
    /// [`PolicyBuilder::build`](crate::PolicyBuilder::build) refuses names that no cookie can have (RFC 6265,
    /// 4.1.1).
    ///
    /// # Examples
    ///
    /// ```
    /// use http::Request;
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::default().cookies(["session"]);
    /// let key = |cookies: &str| {
    ///     let request = Request::get("http://shop.example/").header("cookie", cookies).body(())?;
    ///     Ok::<_, http::Error>(policy.cache_key(&request))
    /// };
    /// assert!(key("_ga=GA1.2.3; theme=dark")?.is_some(), "uses the cache");
    /// assert!(key("_ga=GA1.2.3; session=7f3a")?.is_none(), "bypasses");
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn cookies<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.requests.cookies = Some(CookieNames::new(names));
        self
    }

    /// A type of request extension that marks a request as one client's, such as `tower_sessions::Session` or
    /// `tower_cookies::Cookies`: a GET or HEAD with it bypasses the cache (`detail=extension` in `Cache-Status`),
    /// and a warning names the extension, whose layer belongs inside the guard. Can be called several times. Defaults to none,
    /// because the guard cannot list the extensions of a request without their types.
    ///
    /// Only a layer outside of the guard can have set such an extension before the guard sees the request; a layer
    /// inside may set any. This detects neither a layer that removes credentials from a request nor one that
    /// changes the response: see [where the layer belongs](crate::http#where-the-layer-belongs).
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::http::HttpPolicy;
    ///
    /// # // Stand-ins for the types of these crates.
    /// # mod tower_sessions { #[derive(Clone)] pub struct Session; }
    /// # mod tower_cookies { #[derive(Clone)] pub struct Cookies; }
    /// let policy = HttpPolicy::default()
    ///     .personal_extension::<tower_sessions::Session>()
    ///     .personal_extension::<tower_cookies::Cookies>();
    /// ```
    #[must_use]
    pub fn personal_extension<T: Clone + Send + Sync + 'static>(mut self) -> Self {
        let extension = PersonalExtension::of::<T>();
        if !self.requests.personal.contains(&extension) {
            self.requests.personal.push(extension);
        }
        self
    }
}

impl HttpPolicy {
    /// The first setting that differs but must not change while a guard runs, and why.
    pub(crate) fn fixed_setting(&self, old: &Self) -> Option<(&'static str, &'static str)> {
        let (new, old) = (&self.requests, &old.requests);
        let keys = "keys would change, and no invalidation would reach what is stored under the old ones";
        let function = "what keeps clients apart would change; a file has no functions and types";
        let private = new.keyed_by_credentials;
        let none = QueryRules::default();
        let [new_query, old_query] = [new, old].map(|rules| rules.query.as_deref().unwrap_or(&none));
        [
            ("kind (default, strict or private)", new.heads != old.heads, keys),
            ("scheme", new.scheme != old.scheme, keys),
            ("authority", new.authority != old.authority, keys),
            ("behind_proxy", new.report != old.report, keys),
            ("credential_headers", private && new.credentials != old.credentials, keys),
            ("cookies", private && new.cookies != old.cookies, keys),
            ("ignore_query", new_query.ignored != old_query.ignored, keys),
            ("only_query", new_query.only != old_query.only, keys),
            ("sort_query", new_query.is_sorted != old_query.is_sorted, keys),
            ("key", new.key.is_some() != old.key.is_some(), function),
            ("personal_extension", new.personal != old.personal, function),
        ]
        .into_iter()
        .find_map(|(setting, differs, why)| differs.then_some((setting, why)))
    }
}

impl RequestRules {
    /// Why these rules for requests are refused, for [`PolicyBuilder::build`](crate::PolicyBuilder::build).
    fn refusal(&self) -> Option<String> {
        let authority = self.authority.as_deref();
        let port = default_port(&self.scheme);
        if let Some(text) = authority.filter(|text| plain_authority(text, port) != Some(text)) {
            return Some(format!(
                "authority is {text:?}: choose a host, with its port where that is not {port}, as \"shop.example\" or \
                 \"shop.example:8080\""
            ));
        }
        if let Some(name) = self.cookies.as_ref().and_then(CookieNames::unsound) {
            return Some(format!("cookies names {name:?}: choose names of cookies, as \"session\""));
        }
        self.query.as_ref()?.refusal()
    }
}
