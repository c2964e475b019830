//! The keys that an unsafe request invalidates (RFC 9111, 4.4).

use http::header::{CONTENT_LOCATION, HeaderMap, LOCATION};
use http::{Method, Request, StatusCode, Uri};

use super::key::{KeyHeaders, TargetUri, addition, additions, of_same_origin};
use super::request_settings::{Heads, RequestRules};
use crate::key::CacheKey;

/// The data of an unsafe request that its invalidation needs, taken before the request is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChangedResources {
    /// Absolute URIs. Two, if `Host` names another authority than the URI.
    targets: Vec<Uri>,
    keys: Vec<CacheKey>,
    heads: Heads,
    /// The authority of all keys, if the policy names one.
    authority: Option<String>,
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
        let (heads, authority) = (rules.heads, rules.authority.clone());
        (!keys.is_empty()).then_some(Self { targets, keys, heads, authority, added })
    }

    /// The keys that are invalid after this response, each once: those of the target, and those of URIs of the same
    /// origin in `Location` and `Content-Location`. None after an error, because then no change is known.
    pub(crate) fn keys(&self, status: StatusCode, headers: &HeaderMap) -> Vec<CacheKey> {
        if !status.is_success() && !status.is_redirection() {
            return Vec::new();
        }
        let mut keys = self.keys.clone();
        let locations = self.targets.iter().flat_map(|target| {
            [LOCATION, CONTENT_LOCATION].map(|name| of_same_origin(target, headers, &name))
        });
        for uri in locations.flatten() {
            for key in self.keys_of(&uri) {
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
        }
        keys
    }

    /// The target's keys: they may be invalid if there was no response.
    pub(crate) fn target_keys(&self) -> Vec<CacheKey> {
        self.keys.clone()
    }

    fn keys_of(&self, uri: &Uri) -> Vec<CacheKey> {
        let mut request = Request::new(());
        *request.uri_mut() = uri.clone();
        let authority = self.authority.clone();
        let rules = RequestRules { heads: self.heads, authority, ..RequestRules::default() };
        let target = TargetUri::of(&request, &KeyHeaders::default(), &rules);
        target
            .map_or_else(|_| Vec::new(), |target| self.added.iter().map(|added| target.key(added)).collect())
    }
}

/// The policy's possible additions to the keys of the changed resource, each once: for the sender, for the same
/// request without credentials, none, and, if there is a hook, its empty text. The target is invalid for all users
/// (RFC 9111, 4.4), but the credentials and cohorts of other users are unknown here.
fn all_additions<B>(request: &Request<B>, keyed: &KeyHeaders<'_>, rules: &RequestRules) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    for keyed in [*keyed, KeyHeaders { credentials: false, ..*keyed }] {
        // If the hook excludes the sender from the cache, its change affects other readers all the same.
        all.extend(additions(request, &keyed, rules).ok());
    }
    all.push(Vec::new());
    all.extend(rules.key.is_some().then(|| vec![addition("")]));
    let mut once: Vec<Vec<String>> = Vec::with_capacity(all.len());
    for added in all {
        if !once.contains(&added) {
            once.push(added);
        }
    }
    once
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
mod tests {
    use http::HeaderValue;

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
