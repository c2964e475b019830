//! Which requests may use the cache, which of their parts are in the key, and which keys an unsafe request invalidates (RFC
//! 9111, 4.4).
//!
//! Every request that is not certainly the plain question "what is at this URI" goes straight to the inner service:
//! a needless bypass costs one load, a wrongly shared response leaks data.

use std::sync::Arc;

use http::header::{CONTENT_LOCATION, HeaderMap, HeaderName, HeaderValue, LOCATION};
use http::{Method, Request, StatusCode, Uri};

use super::Rule;
use super::cache_control::RequestDirectives;
use super::conditional;
use super::fields::{contains_token, members};
use super::key::{KeyHeaders, TargetUri, addition, additions, key_by, original};
use super::query::QueryRules;
use super::reference::of_same_origin;
use super::request_settings::{CredentialRule, Heads, RequestRules, is_forwarding};
use super::vary::may_be_misread;
use crate::key::CacheKey;

/// A request that may use the cache: its key, and its demands on the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConsideredRequest<K = CacheKey> {
    pub(crate) key: K,
    /// Whether its response may be loaded and stored, as that of a GET or a QUERY. A HEAD only finds the stored response of a GET (RFC 9110,
    /// 9.3.2).
    pub(crate) may_load: bool,
    pub(crate) demands: RequestDemands,
}

/// A request's demands on the cache, besides the resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestDemands {
    pub(crate) directives: RequestDirectives,
    /// Has `Authorization`, and uses the cache if the response allows it (RFC 9111, 3.5).
    pub(crate) authorized: bool,
    /// Has `Cookie`, and uses the cache if the response allows it.
    pub(crate) has_cookie: bool,
    /// Has `If-None-Match` or `If-Modified-Since`, which a cache evaluates (RFC 9111, 4.3.2).
    pub(crate) conditional: bool,
    /// Has a range of bytes. Does not apply to a HEAD (RFC 9110, 14.2).
    pub(crate) ranged: bool,
    /// Has a header in which proxies report a host, port, scheme or prefix.
    pub(crate) forwarded: bool,
    /// Has cookies, but none of those that affect responses.
    pub(crate) other_cookies: bool,
    /// Spells its path or query differently from the normal form.
    pub(crate) other_form: bool,
}

impl RequestDemands {
    /// Whether it has credentials and uses the cache nevertheless.
    pub(crate) fn has_credentials(&self) -> bool {
        self.authorized || self.has_cookie
    }
}

/// Whether a request may use the cache, by its head and the presence of a body; otherwise the rule that forbids it.
///
/// The complete list of requests that bypass: methods other than GET and HEAD (for QUERY see `query_method.rs`); no `Host`, several, or
/// one that is not a plain authority; a scheme other than `http` and `https`; a target without a path; a body, or a header that
/// announces one; `Upgrade` and `Expect`; a `Connection` that lists other headers; a `Range` in units other than
/// bytes; preconditions other than `If-None-Match`, `If-Modified-Since` and `If-Range`; credentials, by the policy;
/// headers that change the meaning of the request without being in the key; extensions that the policy lists;
/// `no-store`; and requests that the policy's hook excludes.
///
/// One pass over the headers, without allocations except the key's: every hit pays for this.
pub(crate) fn consider<B, K>(
    request: &Request<B>,
    has_body: bool,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<ConsideredRequest<K>, Rule> {
    // Only safe methods with defined cache semantics may use the cache (RFC 9110, 9.2.3). This excludes CONNECT, which is
    // also how a WebSocket over HTTP/2 begins (RFC 8441).
    let may_load = request.method() == Method::GET;
    if !may_load && request.method() != Method::HEAD {
        return Err(Rule::Method);
    }
    let (keyed, mut demands) = examine(request.headers(), rules, Content::Bypasses)?;
    // A GET's content has no defined meaning (RFC 9110, 9.3.1), but a handler that reads it ("fat GET") returns a
    // response that depends on more than the key.
    if has_body {
        return Err(Rule::Body);
    }
    let key;
    (key, demands.other_form) = key_without_extension(request, &keyed, rules, join)?;
    Ok(ConsideredRequest { key, may_load, demands })
}

/// The key of a request without an extension that makes its response personal, and whether it spells its target differently from the
/// normal form.
pub(crate) fn key_without_extension<B, K>(
    request: &Request<B>,
    keyed: &KeyHeaders<'_>,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<(K, bool), Rule> {
    if rules.personal.iter().any(|personal| personal.is_in(request.extensions())) {
        return Err(Rule::Extension);
    }
    key_by(request, keyed, rules, join)
}

/// The key of the GET for which the response to this POST may be stored, the POST's demands, and its absolute
/// target URI (RFC 9110, 9.3.3). It is stored if `response::classify` finds that the response allows it.
pub(crate) fn consider_post<B>(
    request: &Request<B>,
    rules: &RequestRules,
) -> Result<(ConsideredRequest, Uri), Rule> {
    if request.method() != Method::POST {
        return Err(Rule::Method);
    }
    let (keyed, mut demands) = examine(request.headers(), rules, Content::Expected)?;
    // A POST goes to the inner service with its whole query, so its response may depend on more than the key.
    if rules.query_of_loads().is_some_and(|query| !query.is_keyed(request)) {
        return Err(Rule::Query);
    }
    let uri = TargetUri::of(original(request), request, &keyed, rules)?.uri().ok_or(Rule::Host)?;
    let key;
    (key, demands.other_form) = key_without_extension(request, &keyed, rules, CacheKey::from_texts)?;
    Ok((ConsideredRequest { key, may_load: false, demands }, uri))
}

/// How announced content affects a request: a GET or HEAD with content bypasses the cache; the guard reads the content of a QUERY; a POST
/// is expected to have content, and passes unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Bypasses,
    Read,
    Expected,
}

/// Examines every header once: what the key needs, and the demands; otherwise the rule by which a header forbids the cache.
pub(crate) fn examine<'a>(
    headers: &'a HeaderMap,
    rules: &RequestRules,
    content: Content,
) -> Result<(KeyHeaders<'a>, RequestDemands), Rule> {
    let mut examined = ExaminedHeaders::default();
    for (name, value) in headers {
        if let Some(rule) = examined.add(name, value, rules, content) {
            return Err(rule);
        }
    }
    let ExaminedHeaders { keyed, mut demands, has_directives, pragma, .. } = examined;
    if demands.directives.no_store {
        // RFC 9111, 5.2.1.5: neither the request nor its response may be stored.
        return Err(Rule::RequestNoStore);
    }
    // RFC 9111, 5.4: `Pragma` counts only if there is no `Cache-Control`.
    demands.directives.no_cache |= pragma && !has_directives;
    // If a cookie on another line matters, the request keeps all cookies.
    demands.other_cookies = demands.other_cookies && !rules.has_own_cookies(headers);
    Ok((keyed, demands))
}

#[derive(Default)]
struct ExaminedHeaders<'a> {
    keyed: KeyHeaders<'a>,
    demands: RequestDemands,
    has_directives: bool,
    /// Has `Pragma: no-cache`.
    pragma: bool,
    has_range: bool,
}

impl<'a> ExaminedHeaders<'a> {
    /// Adds a header. Returns the rule by which it forbids the use of the cache, if it does.
    #[inline]
    fn add(
        &mut self,
        name: &HeaderName,
        value: &'a HeaderValue,
        rules: &RequestRules,
        content: Content,
    ) -> Option<Rule> {
        let demands = &mut self.demands;
        // A POST goes to the inner service unchanged, with all of its cookies.
        let cookies = rules.cookies.as_ref().filter(|_| content != Content::Expected);
        match name.as_str() {
            // Several `Host` fields are an attack or an accident (RFC 9112, 3.2: to be answered with 400).
            "host" => return self.keyed.host.replace(value).map(|_| Rule::Host),
            "cache-control" => {
                demands.directives.add(value);
                self.has_directives = true;
            }
            "accept-encoding" if may_be_misread(value) => return Some(Rule::Coding),
            "pragma" => self.pragma |= contains_token(value.as_bytes(), b"no-cache"),
            "range" if !self.has_range && is_bytes(value) => {
                // An invalid range is ignored: the whole is requested (RFC 9110, 14.2).
                demands.ranged = conditional::is_range(value);
                self.has_range = true;
            }
            "range" => return Some(Rule::Range),
            // A proxy would not forward such a header to the inner service, but a key and `Vary` would see it.
            "connection" if !is_of_connections(value) => return Some(Rule::Connection),
            // The client asks for another protocol on this connection (RFC 9110, 7.8).
            "upgrade" => return Some(Rule::Upgrade),
            "expect" | "transfer-encoding" | "content-length" if content == Content::Expected => {}
            "transfer-encoding" | "content-length" if content == Content::Read => {}
            // The server sends the 100 when the guard reads the content.
            "expect"
                if content == Content::Read && value.as_bytes().eq_ignore_ascii_case(b"100-continue") => {}
            // The client sends its body only after a 100 (RFC 9110, 10.1.1).
            "expect" => return Some(Rule::Expect),
            // The header announces a body (RFC 9112, 6.3).
            "transfer-encoding" => return Some(Rule::Body),
            "content-length" if !is_zero(value) => return Some(Rule::Body),
            "if-none-match" | "if-modified-since" => demands.conditional = true,
            // `If-Range` applies only together with a range, and is compared with the stored response (RFC 9110, 13.1.5).
            "if-range" => {}
            // Preconditions that only the origin may evaluate (RFC 9111, 4.3.2), and future ones.
            text if text.starts_with("if-") => return Some(Rule::Conditional),
            "cookie" if cookies.is_some_and(|cookies| !cookies.any_in(value)) => demands.other_cookies = true,
            _ if rules.keyed_by_credentials && rules.credentials.contains(name) => {
                self.keyed.credentials = true;
            }
            "authorization" if rules.authorization != CredentialRule::Never => demands.authorized = true,
            "cookie" if rules.cookie != CredentialRule::Never => {
                demands.has_cookie |= rules.cookie == CredentialRule::IfSaid;
            }
            _ if rules.credentials.contains(name) => return Some(Rule::Credentials),
            _ if rules.unkeyed.contains(name) => return Some(Rule::UnkeyedHeader),
            text => demands.forwarded |= is_forwarding(text),
        }
        None
    }
}

/// Whether `Connection` lists only options of the connection itself (RFC 9110, 7.6.1).
fn is_of_connections(value: &HeaderValue) -> bool {
    members(value.as_bytes()).all(|option| {
        let known = ["", "close", "keep-alive", "te", "upgrade", "http2-settings"];
        known.iter().any(|known| option.eq_ignore_ascii_case(known.as_bytes()))
    })
}

/// Whether a `Range` is in bytes (RFC 9110, 14.1: names of units are case-insensitive).
fn is_bytes(value: &HeaderValue) -> bool {
    let unit = value.as_bytes().split(|&byte| byte == b'=').next().unwrap_or_default();
    unit.trim_ascii().eq_ignore_ascii_case(b"bytes")
}

pub(crate) fn is_zero(value: &HeaderValue) -> bool {
    !value.is_empty() && value.as_bytes().iter().all(|&byte| byte == b'0')
}

/// The data of an unsafe request that its invalidation needs, taken before the request is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChangedResources {
    /// The absolute URIs of the request's target: two if `Host` names another authority than the URI does.
    targets: Vec<Uri>,
    keys: Vec<CacheKey>,
    heads: Heads,
    /// The authority of all keys, if the policy names one.
    authority: Option<String>,
    /// The policy's rules for queries.
    query: Option<Arc<QueryRules>>,
    /// The policy's additions to the invalidated keys.
    added: Vec<Vec<String>>,
}

impl ChangedResources {
    /// `None` for a method that is known to be safe, and for a target that cannot be a key.
    pub(crate) fn of<B>(request: &Request<B>, rules: &RequestRules) -> Option<Self> {
        if is_safe(request.method()) || request.method() == Method::CONNECT {
            return None;
        }
        let keyed = KeyHeaders::of(request.headers(), rules)?;
        let all = TargetUri::changed_by(request, &keyed, rules);
        let added = all_additions(request, &keyed, rules);
        let keys: Vec<_> =
            all.iter().flat_map(|target| added.iter().map(|added| target.key(added))).collect();
        let mut targets: Vec<_> = all.iter().filter_map(TargetUri::uri).collect();
        if rules.authority.is_some() {
            // A response refers to its resource by the authority that the client used.
            let named = RequestRules { authority: None, ..rules.clone() };
            targets.extend(TargetUri::changed_by(request, &keyed, &named).iter().filter_map(TargetUri::uri));
        }
        let (heads, authority, query) = (rules.heads, rules.authority.clone(), rules.query.clone());
        (!keys.is_empty()).then_some(Self { targets, keys, heads, authority, query, added })
    }

    /// The keys that are invalid after this response, each once: those of the target, and those of URIs of the same
    /// origin in `Location` and `Content-Location`. None after an error, because then no change is known.
    pub(crate) fn keys(&self, status: StatusCode, headers: &HeaderMap) -> Vec<CacheKey> {
        if !status.is_success() && !status.is_redirection() {
            return Vec::new();
        }
        let locations = self.targets.iter().flat_map(|target| {
            [LOCATION, CONTENT_LOCATION].map(|name| of_same_origin(target, headers, &name))
        });
        let of_locations = locations.flatten().flat_map(|uri| self.keys_of(&uri));
        each_once(self.keys.iter().cloned().chain(of_locations))
    }

    /// The target's keys: they may be invalid if there was no response.
    pub(crate) fn target_keys(&self) -> Vec<CacheKey> {
        self.keys.clone()
    }

    fn keys_of(&self, uri: &Uri) -> Vec<CacheKey> {
        let mut request = Request::new(());
        *request.uri_mut() = uri.clone();
        let (authority, query) = (self.authority.clone(), self.query.clone());
        let rules = RequestRules { heads: self.heads, authority, query, ..RequestRules::default() };
        let target = TargetUri::of(None, &request, &KeyHeaders::default(), &rules);
        target
            .map_or_else(|_| Vec::new(), |target| self.added.iter().map(|added| target.key(added)).collect())
    }
}

/// The additions that the keys of the changed resource may have, each once: those for the sender, those for the same
/// request without credentials, none at all, and, if the policy has a hook, the hook's empty text. The target is invalid for all users
/// (RFC 9111, 4.4), but the credentials and cohorts of other users are unknown here.
fn all_additions<B>(request: &Request<B>, keyed: &KeyHeaders<'_>, rules: &RequestRules) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    for keyed in [*keyed, KeyHeaders { credentials: false, ..*keyed }] {
        // If the hook excludes the sender from the cache, its change affects other readers all the same.
        all.extend(additions(request, &keyed, rules).ok());
    }
    all.push(Vec::new());
    all.extend(rules.key.is_some().then(|| vec![addition("")]));
    each_once(all)
}

/// The items without repetitions, in the order of their first occurrences.
fn each_once<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for item in items {
        if !all.contains(&item) {
            all.push(item);
        }
    }
    all
}

/// Methods that are registered as safe (RFC 9110, 18.2 and its registry). An unknown method may change anything:
/// "including methods whose safety is unknown".
fn is_safe(method: &Method) -> bool {
    matches!(
        method.as_str(),
        "GET" | "HEAD" | "OPTIONS" | "TRACE" | "PRI" | "PROPFIND" | "QUERY" | "REPORT" | "SEARCH"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/request_tests.rs"]
mod tests;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/request_policy_tests.rs"]
mod policy_tests;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod invalidation_tests {
    use super::*;
    use crate::http::{HttpPolicy, cache_key};

    /// Header lines.
    type Lines<'a> = &'a [(&'static str, &'a str)];

    fn request(method: &str, uri: &str, headers: &[(&'static str, &str)]) -> Request<()> {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        fields
            .iter()
            .map(|(name, value)| ((*name).parse().unwrap(), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    fn of(method: &str, status: u16, response: &[(&'static str, &str)]) -> Vec<CacheKey> {
        let request = request(method, "/a/b?c", &[("host", "Shop.example:80")]);
        let changed = ChangedResources::of(&request, &RequestRules::default());
        let status = StatusCode::from_u16(status).unwrap();
        changed.map_or_else(Vec::new, |all| all.keys(status, &headers(response)))
    }

    fn keys(uris: &[&'static str]) -> Vec<CacheKey> {
        uris.iter().map(|uri| cache_key(&Uri::from_static(uri)).unwrap()).collect()
    }

    const OWN: &str = "http://shop.example/a/b?c";

    #[test]
    fn a_method_not_known_to_be_safe_invalidates_its_target() {
        for method in ["POST", "PUT", "DELETE", "PATCH", "M-SEARCH", "MKCOL", "get", "FROBNICATE"] {
            for status in 100..=999 {
                let expected = if (200..400).contains(&status) { keys(&[OWN]) } else { Vec::new() };
                assert_eq!(of(method, status, &[]), expected, "RFC 9111, 4.4; A7: {method} {status}");
            }
        }
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PRI", "QUERY", "PROPFIND", "SEARCH", "REPORT"] {
            assert_eq!(of(method, 200, &[]), [], "RFC 9110, 9.2.1: {method}");
        }
        let connect = request("CONNECT", "shop.example:80", &[("host", "shop.example:80")]);
        assert_eq!(ChangedResources::of(&connect, &RequestRules::default()), None);
    }

    #[test]
    fn locations_of_the_same_origin_are_invalid_too() {
        let cases: [(Lines<'_>, &[&'static str]); 6] = [
            (&[("location", "x")], &[OWN, "http://shop.example/a/x"]),
            (&[("content-location", "/y?z")], &[OWN, "http://shop.example/y?z"]),
            (
                &[("location", "x"), ("content-location", "http://shop.example/y")],
                &[OWN, "http://shop.example/a/x", "http://shop.example/y"],
            ),
            (&[("location", OWN), ("content-location", "")], &[OWN]),
            (
                &[("location", "http://other.example/x"), ("content-location", "https://shop.example/")],
                &[OWN],
            ),
            (&[("location", "//shop.example:8080/x"), ("content-location", "a b")], &[OWN]),
        ];
        for (response, expected) in cases {
            assert_eq!(of("POST", 201, response), keys(expected), "RFC 9111, 4.4; A7: {response:?}");
            assert_eq!(of("POST", 500, response), []);
            assert_eq!(of("GET", 200, response), []);
        }
    }

    #[test]
    fn the_targets_of_the_uri_and_the_host_are_invalidated_once_each() {
        let of = |uri: &str, host: &str| {
            let request = request("POST", uri, &[("host", host)]);
            let all = ChangedResources::of(&request, &RequestRules::default()).unwrap();
            assert_eq!(all.target_keys(), all.keys(StatusCode::OK, &HeaderMap::new()));
            all.keys(StatusCode::OK, &headers(&[("location", "/x")]))
        };
        let one = keys(&[OWN, "http://shop.example/x"]);
        assert_eq!(of("http://Shop.example:80/a/b?c", "shop.example"), one, "RFC 9111, 4.4; A7");
        let two = ["http://a.example/", "http://b.example/", "http://a.example/x", "http://b.example/x"];
        assert_eq!(of("http://a.example/", "b.example"), keys(&two), "RFC 9112, 3.2.2");
        let secure = keys(&["https://a.example/", "https://a.example/x"]);
        assert_eq!(of("https://a.example:443/", "a.example"), secure);
        assert_eq!(of("a.example:80", "a.example"), keys(&["http://a.example/", "http://a.example/x"]));
    }

    #[test]
    fn credentials_and_bodies_do_not_keep_a_request_from_invalidating() {
        let fields =
            [("host", "shop.example"), ("authorization", "x"), ("cookie", "a=b"), ("content-length", "5")];
        let all = ChangedResources::of(&request("PUT", "/a/b?c", &fields), &RequestRules::default()).unwrap();
        assert_eq!(all.keys(StatusCode::NO_CONTENT, &HeaderMap::new()), keys(&[OWN]));
    }

    #[test]
    fn a_target_that_no_key_names_invalidates_nothing() {
        for host in [&[][..], &[("host", "a"), ("host", "a")], &[("host", "a@b")]] {
            assert_eq!(
                ChangedResources::of(&request("PUT", "/", host), &RequestRules::default()),
                None,
                "B2: {host:?}"
            );
        }
    }

    #[test]
    fn invalidated_keys_have_the_policys_additions() {
        let policy = HttpPolicy::private()
            .key(|parts| parts.headers.get("x-tenant")?.to_str().ok().map(str::to_owned));
        let rules = &policy.requests;
        let fields = [("host", "shop.example"), ("authorization", "x"), ("x-tenant", "t")];
        let all = ChangedResources::of(&request("POST", "/a/b?c", &fields), rules).unwrap();
        let key = |path, fields: Lines<'_>| policy.cache_key(&request("GET", path, fields)).unwrap();
        let keys = all.keys(StatusCode::OK, &headers(&[("location", "/x")]));
        let stranger = [fields[0], fields[2]];
        for path in ["/a/b?c", "/x"] {
            for key in [key(path, &fields), key(path, &stranger), key(path, &[fields[0], ("x-tenant", "")])] {
                assert!(keys.contains(&key), "RFC 9111, 4.4; A7: {key}");
            }
        }
        assert_eq!(keys.len(), 2 * 4, "the fourth is what a policy without a hook has: {keys:?}");
        let others = [("host", "shop.example"), ("authorization", "y"), ("x-tenant", "t")];
        assert!(!keys.contains(&key("/x", &others)), "other credentials are unknown");
        let plain = HttpPolicy::private();
        let all = ChangedResources::of(&request("POST", "/x", &fields[..1]), &plain.requests).unwrap();
        let own = plain.cache_key(&request("GET", "/x", &fields[..1])).unwrap();
        assert_eq!(all.target_keys(), [own], "there are no credentials that it could be stored for");
        // The hook returns `None` for the sender: of all tenants only the unnamed one is known.
        let all = ChangedResources::of(&request("POST", "/x", &fields[..2]), rules).unwrap();
        let bare = HttpPolicy::private().cache_key(&request("GET", "/x", &fields[..1])).unwrap();
        let keys = all.keys(StatusCode::OK, &HeaderMap::new());
        assert_eq!(keys, [bare, key("/x", &[fields[0], ("x-tenant", "")])]);
    }
}
