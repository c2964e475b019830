//! What of the HTTP rules can be set: [`HttpPolicy`].

use super::forwarding::forwarding;
use super::request_rules::{Scope, Sharing};
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use http::header::{self, HeaderMap, HeaderName};
use http::uri::Scheme;

use super::normalize::Normal;
use super::request::{Content, survey};
use super::request_rules::{Heads, KeyHook, KeyParts, RequestRules};
use super::target::key;
use super::vary::MOST_NAMES;
use crate::key::CacheKey;

/// What the HTTP layer shares, with whom, and for how long; set by
/// [`PolicyBuilder::http`](crate::PolicyBuilder::http).
///
/// Three starting points:
///
/// - [`default`](Self::default), safe by default: a shared cache that is stricter than the RFC where
///   practice is careless. Requests with credentials or cookies and responses with `Set-Cookie` are
///   nobody else's; failures are told to those who wait and never stored.
/// - [`strict`](Self::strict), to the letter of RFC 9111: what a reverse proxy is expected to do.
/// - [`private`](Self::private), for clients: the cache of one user.
///
/// Each of the three has keys of its own: what one keeps, the others neither serve nor invalidate. Policies that differ
/// only in what the methods set share their entries, and what is stored by one is served by the others: give one that
/// shares more than the others a namespace of its own.
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
    pub(crate) scope: Scope,
    /// To the letter of the RFCs, also where the default is more careful.
    pub(crate) letter: bool,
    /// Of responses with `Set-Cookie`.
    pub(crate) set_cookie: Sharing,
    pub(crate) default_lifetime: bool,
    pub(crate) heuristic_freshness: bool,
    pub(crate) ignore_request_no_cache: bool,
    pub(crate) tell_key: bool,
    /// Sorted, each once.
    pub(crate) vary_on: Vec<HeaderName>,
    pub(crate) max_variants: usize,
    pub(crate) stale_on_disconnect: Duration,
    pub(crate) validate_within: Duration,
}

impl Default for HttpPolicy {
    /// The defaults that the methods name.
    fn default() -> Self {
        Self {
            requests: RequestRules::default(),
            scope: Scope::Shared,
            letter: false,
            set_cookie: Sharing::Never,
            default_lifetime: true,
            // A guess, where `fresh_for` is a decision.
            heuristic_freshness: false,
            ignore_request_no_cache: false,
            // It may hold what a log, or the next client, must not see.
            tell_key: false,
            vary_on: Vec::new(),
            // Languages times encodings of a large site; beyond that the header is no choice among
            // representations, but an identity.
            max_variants: 64,
            // Bridges a restart of the origin, and is no outage in disguise.
            stale_on_disconnect: Duration::from_secs(60),
            // A validation is cheaper than a load, but what nobody asks for again is only kept.
            validate_within: Duration::from_secs(600),
        }
    }
}

impl HttpPolicy {
    /// To the letter of RFC 9111, 9213 and 5861, for reverse proxies whose origins say what they mean.
    ///
    /// - A response that names no lifetime gets none: [`fresh_for`](crate::PolicyBuilder::fresh_for) is
    ///   not used; heuristic freshness is (RFC 9111, 4.2.2).
    /// - Any final status with an explicit lifetime is stored, failures included.
    /// - `Cookie` and `Set-Cookie` do not matter (RFC 9111, 7.3): **an origin that answers cookies without
    ///   `private` leaks them through this cache.** `Authorization` is as in RFC 9111, 3.5. The other
    ///   [`credential_headers`](Self::credential_headers) still bypass.
    /// - `CDN-Cache-Control` replaces `Cache-Control` (RFC 9213, 2.2); `no-cache="field"` and
    ///   `private="field"` are about the fields they name; `must-understand` lifts `no-store`.
    pub fn strict() -> Self {
        let mut requests =
            RequestRules { heads: Heads::STRICT, cookie: Sharing::Freely, ..RequestRules::default() };
        requests.authorization = Sharing::IfSaid;
        requests.credentials = requests
            .credentials
            .names
            .into_iter()
            .filter(|name| *name != header::AUTHORIZATION && *name != header::COOKIE)
            .collect();
        Self {
            requests,
            letter: true,
            set_cookie: Sharing::Freely,
            default_lifetime: false,
            heuristic_freshness: true,
            stale_on_disconnect: DAY,
            validate_within: DAY,
            ..Self::default()
        }
    }

    /// The cache of one user, for clients (RFC 9111, 2: "a private cache is dedicated to a single
    /// user").
    ///
    /// Responses to credentials and responses marked `private` are stored; `s-maxage`,
    /// `proxy-revalidate` and `CDN-Cache-Control` are not for this cache. A digest of the request's
    /// [`credential_headers`](Self::credential_headers) is part of the key, so a client that speaks for
    /// several users keeps them apart as long as these headers tell them.
    ///
    /// **The credentials must be on the request before it reaches the guard.** What is added inside, by reqwest's default
    /// headers or cookie store, by `AddAuthorizationLayer` or by a connector that signs, is not part of any key, and users are mixed up.
    /// Likewise, of redirects that are followed inside, only the end is seen, not what the redirects said.
    ///
    /// An unsafe method invalidates what its sender, and what a request without credentials, would be given, but **not what
    /// other users have stored**: invalidate that by [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) of a request
    /// of theirs, or by a tag.
    pub fn private() -> Self {
        let requests =
            RequestRules { heads: Heads::PRIVATE, keyed_by_credentials: true, ..RequestRules::default() };
        Self { requests, scope: Scope::Private, set_cookie: Sharing::Freely, ..Self::default() }
    }

    /// The scheme of keys for requests whose URI has none, as servers receive them. Two services that
    /// share a namespace and are reached by different schemes set it. Defaults to `http`.
    ///
    /// **A service behind a proxy that terminates TLS must set `https`.** A request whose `Host` names the scheme's default port
    /// (`shop.example:80`), or an empty one, bypasses the cache (`detail=host`): a handler that builds URLs from `Host` would give
    /// that spelling to everyone. It is still the same resource (RFC 9110, 4.2.3): an unsafe method with it invalidates what
    /// is stored for `shop.example`.
    ///
    /// **So must a server that terminates TLS itself**: HTTP/2 requests come with `:scheme`, and those of HTTP/1 without, so one
    /// resource would be two, and a PUT through one would leave the other as it was.
    #[must_use]
    pub fn scheme(mut self, scheme: Scheme) -> Self {
        self.requests.scheme = scheme;
        self
    }

    /// The report that the proxy in front puts on every request: its `Forwarded` (`host` and `proto`), `X-Forwarded-Host`, `-Port`, `-Prefix`,
    /// `-Proto`, `-Scheme` and `-Ssl`. A request with exactly this report has the plain key of its URI, and a hit costs one `GET`. Any other
    /// report, and none, has a [key of its own](crate::http#keys): a hit is an `MGET`. Defaults to no report.
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
        // An empty one is refused by `build`.
        self.requests.report = Some(forwarding(&report).unwrap_or_default());
        self
    }

    /// One more request header that marks an answer as one user's, beside those of
    /// [`credential_headers`](Self::credential_headers): one that a proxy adds, say.
    #[must_use]
    pub fn credential_header(mut self, name: HeaderName) -> Self {
        self.requests.add_credential(name);
        self
    }

    /// The request headers that mark an answer as one user's: a request with any of them bypasses the cache;
    /// in [`private`](Self::private) they are part of the key instead. Defaults to [a list](crate::http#credentials) of standard
    /// ones and those of common proxies; in [`strict`](Self::strict) without `Authorization` and `Cookie`. **Replaces** that list; what
    /// [`credential_header`](Self::credential_header) adds to it, before or after, stays.
    #[must_use]
    pub fn credential_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.requests.replace_credentials(names);
        self
    }

    /// Whether requests with `Authorization` take part: they are answered with, and their answers are
    /// stored as, what says explicitly that it is for everyone: `public`, `s-maxage` or
    /// `must-revalidate` (RFC 9111, 3.5). Defaults to no; in [`strict`](Self::strict) to yes, and there
    /// they are answered with whatever is stored.
    #[must_use]
    pub fn share_authorized(mut self, share: bool) -> Self {
        self.requests.authorization = Sharing::wished(share, self.requests.authorization);
        if !share {
            self.requests.credentials.add(header::AUTHORIZATION);
        }
        self
    }

    /// Whether requests with `Cookie` and responses with `Set-Cookie` take part, where the response says
    /// explicitly that it is for everyone, as for [`share_authorized`](Self::share_authorized). Defaults
    /// to no; in [`strict`](Self::strict) to yes, and there without the response saying so.
    #[must_use]
    pub fn share_cookies(mut self, share: bool) -> Self {
        self.requests.cookie = Sharing::wished(share, self.requests.cookie);
        self.set_cookie = Sharing::wished(share, self.set_cookie);
        if !share {
            self.requests.credentials.add(header::COOKIE);
        }
        self
    }

    /// Whether a request's `no-cache`, `max-age`, `min-fresh` and `Pragma` are ignored, so that they force no loads. (What is
    /// not looked up at all, as with `no-store`, still is not.) Defaults to no: what is stored is validated, once for all who ask
    /// at the time.
    #[must_use]
    pub fn ignore_request_no_cache(mut self, ignore: bool) -> Self {
        self.ignore_request_no_cache = ignore;
        self
    }

    /// Whether `Cache-Status` names the key (RFC 9211, 2.7), for finding out why two requests do not share an
    /// answer. It holds the URI and what the policy's [`key`](Self::key) adds. Defaults to no.
    #[must_use]
    pub fn tell_key(mut self, told: bool) -> Self {
        self.tell_key = told;
        self
    }

    /// Whether a response that names no lifetime gets [`fresh_for`](crate::PolicyBuilder::fresh_for).
    /// Defaults to yes; in [`strict`](Self::strict) to no.
    #[must_use]
    pub fn default_lifetime(mut self, given: bool) -> Self {
        self.default_lifetime = given;
        self
    }

    /// Whether a response that names no lifetime is fresh for a tenth of the time since its
    /// `Last-Modified`, at most for a day (RFC 9111, 4.2.2). Defaults to no; in
    /// [`strict`](Self::strict) to yes.
    #[must_use]
    pub fn heuristic_freshness(mut self, guessed: bool) -> Self {
        self.heuristic_freshness = guessed;
        self
    }

    /// A request header that every response depends on, as though it were in its `Vary`. For what an
    /// application reads and its responses do not mention. Can be called several times.
    #[must_use]
    pub fn vary_on(mut self, name: HeaderName) -> Self {
        if let Err(at) = self.vary_on.binary_search_by(|known| known.as_str().cmp(name.as_str())) {
            self.vary_on.insert(at, name);
        }
        self
    }

    /// How many variants of one resource are stored: those that come first. Further ones are loaded, and shared with those who
    /// ask at that moment, until the list of variants ends: with what the first on it was kept for, and not before twice its
    /// freshness. Defaults to 64.
    ///
    /// Spellings of one value are one variant; values that a client invents are not. So one client can fill the list and
    /// keep others' variants from being stored. Where that matters, let something in front reduce what the responses vary by
    /// to what the application tells apart: `Accept-Encoding` to `gzip` or nothing, say.
    #[must_use]
    pub fn max_variants(mut self, most: usize) -> Self {
        self.max_variants = most;
        self
    }

    /// For how long after its freshness a response is served while the inner service can not be reached,
    /// without the response asking for it (RFC 9111, 4.2.4). Never where it forbids that:
    /// `must-revalidate`, `proxy-revalidate`, `s-maxage`, `no-cache`. Zero turns it off. Defaults to
    /// 60 s; in [`strict`](Self::strict) to a day.
    #[must_use]
    pub fn stale_on_disconnect(mut self, window: Duration) -> Self {
        self.stale_on_disconnect = window;
        self
    }

    /// For how long after its freshness a response with a validator is kept, to be validated instead of
    /// loaded. Costs the store's memory. Defaults to ten minutes; in [`strict`](Self::strict) to a day.
    #[must_use]
    pub fn validate_within(mut self, window: Duration) -> Self {
        self.validate_within = window;
        self
    }

    /// Extends the key by what the hook makes of a request: a tenant, a cohort of an experiment. `None`
    /// sends the request past the cache. Runs for every request, so it should be quick.
    ///
    /// An unsafe method invalidates its target under what the hook says of its sender, under an empty text, and without any:
    /// so let it say `Some(String::new())` of the public, and a change by editors, of whom it says `None`, is a change for all
    /// of it. **Other tenants and cohorts it does not reach**, as nobody knows which there are: invalidate those by
    /// [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) of a request of theirs, or by a tag.
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

    /// The key under which the response to a GET is stored that comes with this request's URI and
    /// headers, for [`invalidate`](crate::StampedeGuard::invalidate). `None` for a request that would
    /// bypass the cache. [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) is the same with all of a guard's policy.
    pub fn cache_key<B>(&self, request: &Request<B>) -> Option<CacheKey> {
        let (keyed, _) = survey(request.headers(), &self.requests, Content::Bypasses).ok()?;
        key(request, &keyed, &self.requests).ok()
    }

    /// How far requests are made alike.
    pub(crate) fn normal(&self) -> Normal {
        if self.letter { Normal::ByTheLetter } else { Normal::Careful }
    }

    /// What contradicts itself, for [`PolicyBuilder::build`](crate::PolicyBuilder::build).
    pub(crate) fn refusal(&self) -> Option<String> {
        let ten_years = DAY * 3650;
        if self.max_variants == 0 {
            return Some("max_variants is 0: choose at least 1".to_owned());
        }
        if let Some(refusal) = self.requests.refusal() {
            return Some(refusal);
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
        let windows =
            [("stale_on_disconnect", self.stale_on_disconnect), ("validate_within", self.validate_within)];
        let too_long = windows.iter().find(|(_, window)| *window > ten_years)?;
        Some(format!("{} is {:?}: choose at most {ten_years:?}", too_long.0, too_long.1))
    }
}

const DAY: Duration = Duration::from_secs(86_400);

/// Which responses are shared, and for how long.
#[derive(Clone, Debug)]
pub(crate) struct ResponseRules {
    pub(crate) http: Arc<HttpPolicy>,
    /// The lifetime of a response that names none.
    pub(crate) fresh_for: Duration,
    /// The longest body that is kept, in bytes.
    pub(crate) max_body: usize,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/policy_tests.rs"]
mod tests;
