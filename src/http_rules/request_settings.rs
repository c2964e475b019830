//! [`RequestRules`]: which requests may use the cache, in a form that is fast to check for every request.
//!
//! - [`CREDENTIAL_HEADERS`]: the default list of request headers that mark a response as one user's.
//! - [`CookieNames`]: the cookies that affect responses ([`HttpPolicy::cookies`](crate::http::HttpPolicy::cookies)).
//! - [`PersonalExtension`]: a request extension that only a layer on the wrong side of the guard sets. The operator is
//!   warned about it.
//! - [`forwarding`]: the host, port, scheme and path prefix that proxies report (RFC 7239, 4). Handlers build links and
//!   redirects from them, and seldom name them in `Vary`.
//!
//! Requests with different reports never share a response: each report has separate keys, so an invented report cannot
//! displace, delay or evict the responses to others. A tag ties the keys to their resource, so an unsafe method
//! invalidates all of them.

use std::any::{TypeId, type_name};
use std::fmt;
use std::sync::{Arc, LazyLock};

use http::header::{COOKIE, FORWARDED, HeaderMap, HeaderName};
use http::uri::Scheme;
use http::{Extensions, HeaderValue, Request, Uri};

use super::fields::split_once;
use super::query::QueryRules;
use crate::observe::{LogEveryMinute, log};

/// Headers that change the meaning of a request without being part of the key ("unkeyed input"). If such a request
/// were cached, its response would replace the one for all others (cache poisoning).
///
/// - `A-IM` asks for a delta, not for the resource (RFC 3229, 10.5.3).
/// - The method overrides turn a GET into another method in many frameworks.
/// - `X-Original-URL` and `X-Rewrite-URL` replace the path in some (Symfony, IIS, Zend).
///
/// `Forwarded`, `X-Forwarded-Host` and `-Proto` are missing, because a reverse proxy writes them on every request:
/// they select a key ([`forwarding`]). `X-Forwarded-For` is missing, because it differs from client to client: a
/// handler that depends on it names it in `Vary` (RFC 9110, 12.5.5), or the policy lists it as a credential.
pub(crate) const UNKEYED_HEADERS: [&str; 6] = [
    "a-im",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-url",
    "x-rewrite-url",
];

/// Whether the cache is shared or one user's (RFC 9111, 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheScope {
    Shared,
    Private,
}

/// Which requests a 429 concerns, beside the one that it answers:
/// [`HttpPolicy::rate_limit_scope`](super::settings::HttpPolicy::rate_limit_scope).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RateLimitScope {
    /// None: the origin limits each client, and each sends its own requests.
    #[default]
    Client,
    /// All requests of the fleet for the resource.
    Resource,
    /// All requests of the fleet to the authority: its replicas share one account there.
    Authority,
}

/// Whether requests or responses with credentials or cookies use the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CredentialRule {
    #[default]
    Never,
    /// Only if the response explicitly allows shared caches to reuse it.
    IfSaid,
    Freely,
}

impl CredentialRule {
    pub(crate) fn wished(share: bool, now: Self) -> Self {
        match (share, now) {
            (false, _) => Self::Never,
            (true, Self::Never) => Self::IfSaid,
            (true, already) => already,
        }
    }
}

/// The parts of a request for the hook of [`HttpPolicy::key`](crate::http::HttpPolicy::key).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KeyParts<'a> {
    /// The URI as the layer received it, with the query of the key: without the parameters that
    /// [`ignore_query`](crate::http::HttpPolicy::ignore_query) and
    /// [`only_query`](crate::http::HttpPolicy::only_query) leave out, and
    /// [sorted](crate::http::HttpPolicy::sort_query).
    pub uri: &'a Uri,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// The request's extensions. An `OriginalUri` of axum has the query of the key, too.
    pub extensions: &'a Extensions,
}

/// The policy's hook that extends the key.
#[derive(Clone)]
pub(crate) struct KeyHook(Arc<Hook>);

type Hook = dyn Fn(&KeyParts<'_>) -> Option<String> + Send + Sync;

impl KeyHook {
    pub(crate) fn new(hook: impl Fn(&KeyParts<'_>) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn call(&self, parts: &KeyParts<'_>) -> Option<String> {
        (self.0)(parts)
    }
}

impl fmt::Debug for KeyHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHook")
    }
}

impl PartialEq for KeyHook {
    /// Compares by identity: closures cannot be compared by behaviour.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The first parts of keys: the kind of entry, the kind of policy, and the scheme.
///
/// One kind of policy stores responses that another would refuse, and a hit is not classified again. So each kind uses
/// separate keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    pub(crate) http: &'static str,
    pub(crate) https: &'static str,
}

impl Heads {
    const DEFAULT: Self = Self { http: "http:http", https: "http:https" };
    pub(crate) const STRICT: Self = Self { http: "http:strict:http", https: "http:strict:https" };
    pub(crate) const PRIVATE: Self = Self { http: "http:private:http", https: "http:private:https" };
}

/// Which requests may use the cache, and under which key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestRules {
    pub(crate) heads: Heads,
    /// The scheme of requests without one in their URI, as an HTTP/1 server receives them.
    pub(crate) scheme: Scheme,
    pub(crate) credentials: NameSet,
    /// Credentials that stay when `credentials` is replaced, because the program declared each of them as one user's.
    pub(crate) added: Vec<HeaderName>,
    pub(crate) unkeyed: NameSet,
    /// The rule for requests with `Authorization`. With `Never`, `credentials` decides.
    pub(crate) authorization: CredentialRule,
    /// The rule for requests with `Cookie`. With `Never`, `credentials` decides.
    pub(crate) cookie: CredentialRule,
    /// Credentials are part of the key instead of a reason to bypass.
    pub(crate) keyed_by_credentials: bool,
    pub(crate) key: Option<KeyHook>,
    /// The authority of all keys, instead of that of each request. In lower case.
    pub(crate) authority: Option<String>,
    /// The cookies that affect responses; `None` if all do.
    pub(crate) cookies: Option<CookieNames>,
    /// Which parameters of the query are in the key; `None` if all are, as they were sent.
    pub(crate) query: Option<Arc<QueryRules>>,
    /// Whether a load sees the query as it was sent, with what the key leaves out.
    pub(crate) pass_unkeyed_query: bool,
    /// What the proxy reports on ordinary requests, as [`forwarding`] normalizes it: these have the plain key of their URI.
    pub(crate) report: Option<Vec<u8>>,
    /// Types of extensions that make a request bypass.
    pub(crate) personal: Vec<PersonalExtension>,
}

impl Default for RequestRules {
    fn default() -> Self {
        Self {
            heads: Heads::DEFAULT,
            scheme: Scheme::HTTP,
            credentials: CREDENTIAL_HEADERS.map(HeaderName::from_static).into_iter().collect(),
            added: Vec::new(),
            unkeyed: UNKEYED_HEADERS.map(HeaderName::from_static).into_iter().collect(),
            authorization: CredentialRule::Never,
            cookie: CredentialRule::Never,
            keyed_by_credentials: false,
            key: None,
            authority: None,
            cookies: None,
            query: None,
            pass_unkeyed_query: false,
            report: None,
            personal: Vec::new(),
        }
    }
}

impl RequestRules {
    pub(crate) fn add_credential(&mut self, name: HeaderName) {
        if !self.added.contains(&name) {
            self.added.push(name.clone());
        }
        self.credentials.add(name);
    }

    /// Whether the request has a cookie that affects responses.
    pub(crate) fn has_own_cookies(&self, headers: &HeaderMap) -> bool {
        let mut lines = headers.get_all(COOKIE).iter();
        lines.any(|line| self.cookies.as_ref().is_none_or(|cookies| cookies.any_in(line)))
    }

    /// Changes the rules for queries. Without a rule there are none, so that a hit costs no look at its query.
    pub(crate) fn change_query(&mut self, change: impl FnOnce(&mut QueryRules)) {
        let mut rules = self.query.take().map(Arc::unwrap_or_clone).unwrap_or_default();
        change(&mut rules);
        self.query = (rules != QueryRules::default()).then(|| Arc::new(rules));
    }

    /// Gives the request of a load the query of its key, unless the policy passes the query as it was sent.
    pub(crate) fn rewrite_query(&self, request: &mut Request<()>) {
        if let Some(query) = self.query_of_loads() {
            query.rewrite(request);
        }
    }

    /// The rules by which a load sees less of the query than was sent.
    pub(crate) fn query_of_loads(&self) -> Option<&QueryRules> {
        self.query.as_deref().filter(|_| !self.pass_unkeyed_query)
    }

    /// Whether the request has this credential.
    pub(crate) fn has(&self, name: &HeaderName, headers: &HeaderMap) -> bool {
        if *name == COOKIE { self.has_own_cookies(headers) } else { headers.contains_key(name) }
    }

    pub(crate) fn replace_credentials(&mut self, names: impl IntoIterator<Item = HeaderName>) {
        self.credentials = names.into_iter().collect();
        for name in &self.added {
            self.credentials.add(name.clone());
        }
    }
}

/// A few header names, checked against every header of every request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NameSet {
    pub(crate) names: Vec<HeaderName>,
    /// A Bloom filter of the names. It rejects most headers.
    bits: u128,
}

impl NameSet {
    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        self.bits & bit(name) != 0 && self.names.contains(name)
    }

    pub(crate) fn add(&mut self, name: HeaderName) {
        if !self.contains(&name) {
            self.bits |= bit(&name);
            self.names.push(name);
        }
    }
}

impl FromIterator<HeaderName> for NameSet {
    fn from_iter<I: IntoIterator<Item = HeaderName>>(names: I) -> Self {
        let names: Vec<_> = names.into_iter().collect();
        let bits = names.iter().fold(0, |bits, name| bits | bit(name));
        Self { names, bits }
    }
}

/// One of 128 bits, chosen by the length and the first and last byte of a name. The length alone would reject too few
/// headers, because there is a listed name of almost every length.
fn bit(name: &HeaderName) -> u128 {
    let bytes = name.as_str().as_bytes();
    let code = |byte: Option<&u8>| byte.copied().map_or(0, usize::from);
    1 << ((bytes.len() + 31 * code(bytes.first()) + 7 * code(bytes.last())) % 128)
}

/// A type of request extension that marks a request as one client's.
#[derive(Clone, Copy)]
pub(crate) struct PersonalExtension {
    id: TypeId,
    name: &'static str,
    is_in: fn(&Extensions) -> bool,
}

impl PersonalExtension {
    pub(crate) fn of<T: Clone + Send + Sync + 'static>() -> Self {
        let is_in = |extensions: &Extensions| extensions.get::<T>().is_some();
        Self { id: TypeId::of::<T>(), name: type_name::<T>(), is_in }
    }

    pub(crate) fn is_in(&self, extensions: &Extensions) -> bool {
        (self.is_in)(extensions)
    }
}

impl PartialEq for PersonalExtension {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl fmt::Debug for PersonalExtension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The limit on warnings about extensions: one for all guards of the process, because each request passes the same layers.
static WARNED: LazyLock<LogEveryMinute> = LazyLock::new(LogEveryMinute::default);

/// Warns about the layer that set a personal extension of this request.
pub(crate) fn warn_of_extension<B>(request: &Request<B>, personal: &[PersonalExtension]) {
    let found = personal.iter().find(|personal| personal.is_in(request.extensions()));
    if let Some(found) = found
        && WARNED.is_due()
    {
        tracing::warn!(
            target: log::HTTP,
            extension = found.name,
            "a layer outside of the guard has put this extension into a request: requests bypass the cache, because what such \
             a layer adds to a response would be missing from hits, and a response made with it is one client's; put the guard \
             outside of that layer: in axum, call `.layer(guard)` after `.layer(..)` of the other"
        );
    }
}

/// The names of cookies that mark a request as one user's.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CookieNames(pub(super) Vec<String>);

impl CookieNames {
    pub(crate) fn new(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }

    /// Whether a `Cookie` line holds a cookie with one of these names. Names are case-sensitive (RFC 6265, 4.1.1).
    pub(crate) fn any_in(&self, line: &HeaderValue) -> bool {
        let pairs = line.as_bytes().split(|&byte| byte == b';');
        let mut names = pairs.map(|pair| pair.split(|&byte| byte == b'=').next().unwrap_or_default());
        names.any(|name| self.0.iter().any(|listed| listed.as_bytes() == name.trim_ascii()))
    }

    /// The first name that cannot be the name of a cookie, because it is no token (RFC 6265, 4.1.1).
    pub(crate) fn unsound(&self) -> Option<&str> {
        let is_token = |name: &str| {
            let other = |byte: u8| b"!#$%&'*+-.^_`|~".contains(&byte);
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || other(byte))
        };
        self.0.iter().map(String::as_str).find(|name| !is_token(name))
    }
}

/// Headers that mark a request as one user's: its response is not for others.
///
/// A shared cache may store a response to `Authorization` only if the response allows it (RFC 9111, 3.5); for the
/// other headers no standard exists, so their requests bypass the cache.
pub(crate) const CREDENTIAL_HEADERS: [&str; 41] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "x-api-key",
    "x-auth-token",
    "x-amz-security-token",
    // RFC 9421: a signature identifies the key that made it.
    "signature",
    "signature-input",
    // RFC 9440: the client certificate, as reported by a proxy that terminates TLS.
    "client-cert",
    "client-cert-chain",
    // oauth2-proxy: `--pass-user-headers`, `--pass-access-token`.
    "x-forwarded-user",
    "x-forwarded-email",
    "x-forwarded-preferred-username",
    "x-forwarded-groups",
    "x-forwarded-access-token",
    // oauth2-proxy behind nginx's `auth_request`: `--set-xauthrequest`.
    "x-auth-request-user",
    "x-auth-request-email",
    "x-auth-request-preferred-username",
    "x-auth-request-groups",
    "x-auth-request-access-token",
    // Cloudflare Access.
    "cf-access-jwt-assertion",
    "cf-access-authenticated-user-email",
    // Google's Identity-Aware Proxy.
    "x-goog-iap-jwt-assertion",
    "x-goog-authenticated-user-email",
    "x-goog-authenticated-user-id",
    // AWS Application Load Balancer.
    "x-amzn-oidc-data",
    "x-amzn-oidc-identity",
    "x-amzn-oidc-accesstoken",
    "x-amzn-mtls-clientcert",
    "x-amzn-mtls-clientcert-subject",
    // Azure App Service and Container Apps.
    "x-ms-client-principal",
    "x-ms-client-principal-id",
    "x-ms-client-principal-idp",
    "x-ms-client-principal-name",
    "x-ms-token-aad-access-token",
    "x-ms-token-aad-id-token",
    "x-ms-token-facebook-access-token",
    "x-ms-token-google-access-token",
    "x-ms-token-google-id-token",
    "x-ms-token-twitter-access-token",
    // Envoy.
    "x-forwarded-client-cert",
];

/// The headers in which proxies report a host, port, scheme or prefix, besides `Forwarded`. `X-Forwarded-For` is missing, because it
/// differs from client to client.
const X_FORWARDED: [&str; 6] = [
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-prefix",
    "x-forwarded-proto",
    "x-forwarded-scheme",
    "x-forwarded-ssl",
];

/// Whether a header of this name reports a host, port, scheme or prefix.
pub(crate) fn is_forwarding(name: &str) -> bool {
    name == FORWARDED.as_str() || (name.starts_with("x-forwarded-") && X_FORWARDED.contains(&name))
}

/// What proxies report about a request (host, port, scheme, prefix), in normalized form; `None` if they report nothing.
pub(crate) fn forwarding(request: &HeaderMap) -> Option<Vec<u8>> {
    let mut report = Vec::new();
    let mut add = |name: &str, value: &[u8]| {
        for part in [name.as_bytes(), b"=", value, b"\n"] {
            report.extend_from_slice(part);
        }
    };
    let lines: Vec<_> =
        request.get_all(FORWARDED).iter().map(|line| without_nodes(line.as_bytes())).collect();
    // A handler may read only the first line or element, so the order of both counts, and empty elements stay.
    if lines.iter().flatten().any(|byte| *byte != b',') {
        lines.iter().for_each(|line| add(FORWARDED.as_str(), line));
    }
    for name in X_FORWARDED {
        request.get_all(name).iter().for_each(|line| add(name, line.as_bytes()));
    }
    (!report.is_empty()).then_some(report)
}

/// A line of `Forwarded` without the pairs that name the client and the proxies.
fn without_nodes(line: &[u8]) -> Vec<u8> {
    let elements = line.split(|byte| *byte == b',').map(|element| {
        let pairs = element.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        pairs.filter(|pair| !is_of_nodes(pair)).collect::<Vec<_>>().join(&b';')
    });
    elements.collect::<Vec<_>>().join(&b',')
}

/// Whether a pair of `Forwarded` is `for` or `by`, or empty. Quotes are ignored: a handler may look for `host=`
/// anywhere, so every pair that is not clearly one of these two belongs to the report.
fn is_of_nodes(pair: &[u8]) -> bool {
    let Some((name, value)) = split_once(pair, b'=') else { return pair.is_empty() };
    [b"for".as_slice(), b"by"].iter().any(|known| name.eq_ignore_ascii_case(known)) && !value.contains(&b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_lists_are_valid_names_and_found() {
        let rules = RequestRules::default();
        for name in CREDENTIAL_HEADERS {
            assert!(rules.credentials.contains(&HeaderName::from_static(name)), "{name}");
        }
        for name in UNKEYED_HEADERS {
            assert!(rules.unkeyed.contains(&HeaderName::from_static(name)), "{name}");
        }
    }

    #[test]
    fn a_name_of_a_listed_length_is_not_taken_for_a_listed_name() {
        let set: NameSet = [HeaderName::from_static("cookie")].into_iter().collect();
        assert!(set.contains(&http::header::COOKIE));
        assert!(!set.contains(&http::header::ACCEPT));
        assert!(!set.contains(&http::header::EXPECT));
        assert!(!NameSet::default().contains(&http::header::COOKIE));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod personal_tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use http::Response;
    use http_body_util::Empty;
    use tower::{Layer as _, ServiceExt as _, service_fn};
    use tracing::field::{Field, Visit};
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

    use super::*;
    use crate::guard::StampedeGuard;
    use crate::http::HttpPolicy;
    use crate::policy::Policy;

    /// A subscriber that collects the text of each warning of the HTTP layer.
    #[derive(Clone, Default)]
    struct Warnings(Arc<Mutex<Vec<String>>>);

    impl<S: Subscriber> tracing_subscriber::Layer<S> for Warnings {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            struct Text(String);
            impl Visit for Text {
                fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
                    self.0.push_str(&format!("{value:?} "));
                }
            }
            let meta = event.metadata();
            if *meta.level() == Level::WARN && meta.target() == "stampede_guard::http" {
                let mut text = Text(String::new());
                event.record(&mut text);
                self.0.lock().unwrap().push(text.0);
            }
        }
    }

    #[derive(Clone)]
    struct Visitor;

    /// A single test, because the process has only one rate limit.
    #[tokio::test(start_paused = true)]
    async fn a_layer_on_the_wrong_side_is_warned_of_once_with_the_remedy() {
        let warnings = Warnings::default();
        // With a single subscriber, tracing would cache the interest that another test's thread registered.
        let _second = tracing::Dispatch::new(tracing_subscriber::registry());
        let _listening =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
        let http = HttpPolicy::default().personal_extension::<Visitor>();
        let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build().unwrap());
        let shop = guard.layer(service_fn(|_: Request<Empty<Bytes>>| async {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }));
        let ask = async |extension: Option<Visitor>| {
            let mut request = Request::get("http://h/").body(Empty::new()).unwrap();
            if let Some(extension) = extension {
                request.extensions_mut().insert(extension);
            }
            let response = shop.clone().oneshot(request).await.unwrap();
            let bypassed = response.headers()["cache-status"].to_str().unwrap().ends_with("detail=extension");
            (bypassed, warnings.0.lock().unwrap().len())
        };
        assert_eq!(ask(None).await, (false, 0));
        for _ in 0..3 {
            assert_eq!(ask(Some(Visitor)).await, (true, 1));
        }
        let text = warnings.0.lock().unwrap()[0].clone();
        assert!(text.contains("Visitor") && text.contains("put the guard outside of that layer"), "{text}");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod cookies_tests {
    use super::*;

    #[test]
    fn only_a_listed_cookie_is_found_at_any_position() {
        let names = CookieNames::new(["session", "cart"]);
        for line in [
            "session=1",
            "a=b; session=1",
            "a=b;session=1;c",
            " cart = 2 ",
            "_ga=1; cart",
            "session",
            "x; cart=",
        ] {
            assert!(names.any_in(&HeaderValue::from_str(line).unwrap()), "{line}");
        }
        for line in [
            "",
            "_ga=1",
            "Session=1",
            "xsession=1",
            "a=session",
            "a=\"session=1\"",
            "sessions=1; _ga=session=1",
        ] {
            assert!(!names.any_in(&HeaderValue::from_str(line).unwrap()), "{line}");
        }
        assert!(!CookieNames::new([""; 0]).any_in(&HeaderValue::from_static("a=b")));
    }

    #[test]
    fn a_cookie_name_that_is_no_token_is_refused() {
        assert_eq!(CookieNames::new(["session", "__Host-id"]).unsound(), None);
        for name in ["", "a=b", "a;b", "a b", "a,b", "\"a\"", "\u{e9}"] {
            assert_eq!(CookieNames::new(["session", name]).unsound(), Some(name));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod forwarding_tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn of(lines: &[(&str, &str)]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::try_from(*name).unwrap(), HeaderValue::from_str(value).unwrap());
        }
        assert_eq!(headers.keys().any(|name| is_forwarding(name.as_str())), !lines.is_empty());
        forwarding(&headers).map(|report| String::from_utf8(report).unwrap())
    }

    #[test]
    fn for_and_by_select_no_variant() {
        assert_eq!(of(&[]), None);
        for line in ["for=192.0.2.60", "For=\"[2001:db8::1]:4711\" ; by=_proxy, for=unknown", "", " ,; "] {
            assert_eq!(of(&[("forwarded", line)]), None, "RFC 7239, 4: {line}");
        }
        let report = "forwarded=proto=https;host=a.example\n";
        for line in ["for=1;proto=https;host=a.example", "proto=https ; for=2;  host=a.example;by=b"] {
            assert_eq!(of(&[("forwarded", line)]).as_deref(), Some(report), "{line}");
        }
    }

    #[test]
    fn an_ambiguous_pair_selects_a_variant() {
        for line in ["for=\"x;host=evil\"", "for=x=host=evil", "for = x", "secret=1", "host", "for=\"a,b\""] {
            assert!(of(&[("forwarded", line)]).is_some(), "{line}");
        }
    }

    #[test]
    fn each_header_and_line_counts_by_itself() {
        let all = [
            of(&[("x-forwarded-host", "a")]),
            of(&[("x-forwarded-proto", "a")]),
            of(&[("x-forwarded-host", "")]),
            of(&[("x-forwarded-host", "a"), ("x-forwarded-host", "b")]),
            of(&[("x-forwarded-host", "a, b")]),
            of(&[("x-forwarded-host", "a"), ("x-forwarded-proto", "b")]),
            of(&[("forwarded", "host=a")]),
            of(&[("forwarded", "for=x, host=a")]),
            of(&[("forwarded", "host=a, for=x")]),
            of(&[("forwarded", "for=x"), ("forwarded", "host=a")]),
            of(&[("forwarded", "host=a, proto=b")]),
            of(&[("forwarded", "host=a;proto=b")]),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(one.is_some() && !all[at + 1..].contains(one), "{one:?}");
        }
    }
}
