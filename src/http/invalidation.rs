//! What a request that may have changed something makes invalid (RFC 9111, 4.4).

use http::header::{CONTENT_LOCATION, HeaderMap, LOCATION};
use http::{Method, Request, StatusCode, Uri};

use super::location::of_same_origin;
use super::request_rules::{Heads, RequestRules};
use super::target::{Keyed, Target, additions};
use crate::key::CacheKey;

/// What is known of an unsafe request before it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Invalidation {
    /// Absolute.
    target: Uri,
    key: CacheKey,
    heads: Heads,
    /// What the policy adds to the keys of whoever sent it.
    added: Vec<String>,
}

impl Invalidation {
    /// Nothing for a method that is known to be safe, and for a target that no key names.
    pub(crate) fn of<B>(request: &Request<B>, rules: &RequestRules) -> Option<Self> {
        if is_safe(request.method()) || request.method() == Method::CONNECT {
            return None;
        }
        let keyed = Keyed::of(request.headers(), rules)?;
        let target = Target::of(request, &keyed, rules).ok()?;
        let added = additions(request, &keyed, rules).ok()?;
        Some(Self { target: target.uri()?, key: target.key(&added), heads: rules.heads, added })
    }

    /// The keys that are invalid after this response, each once: the target's, and what `Location` and
    /// `Content-Location` refer to at the same origin. None after an error: nothing was changed that is
    /// known of.
    pub(crate) fn keys(&self, status: StatusCode, headers: &HeaderMap) -> Vec<CacheKey> {
        if !status.is_success() && !status.is_redirection() {
            return Vec::new();
        }
        let mut keys = vec![self.key.clone()];
        for name in [LOCATION, CONTENT_LOCATION] {
            let key = of_same_origin(&self.target, headers, &name).and_then(|uri| self.key_of(uri));
            keys.extend(key.filter(|key| !keys.contains(key)));
        }
        keys
    }

    fn key_of(&self, uri: Uri) -> Option<CacheKey> {
        let mut request = Request::new(());
        *request.uri_mut() = uri;
        let rules = RequestRules { heads: self.heads, ..RequestRules::default() };
        let target = Target::of(&request, &Keyed::default(), &rules).ok()?;
        Some(target.key(&self.added))
    }
}

/// Methods that are registered as safe (RFC 9110, 18.2 and the registry it made). What is not known may
/// change anything: "including methods whose safety is unknown".
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
    use crate::http::cache_key;

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
        let invalidation = Invalidation::of(&request, &RequestRules::default());
        let status = StatusCode::from_u16(status).unwrap();
        invalidation.map_or_else(Vec::new, |all| all.keys(status, &headers(response)))
    }

    fn keys(uris: &[&'static str]) -> Vec<CacheKey> {
        uris.iter().map(|uri| cache_key(&Uri::from_static(uri)).unwrap()).collect()
    }

    const OWN: &str = "http://shop.example/a/b?c";

    #[test]
    fn what_is_not_known_to_be_safe_invalidates_its_target() {
        for method in ["POST", "PUT", "DELETE", "PATCH", "M-SEARCH", "MKCOL", "get", "FROBNICATE"] {
            for status in 100..=999 {
                let expected = if (200..400).contains(&status) { keys(&[OWN]) } else { Vec::new() };
                assert_eq!(of(method, status, &[]), expected, "RFC 9111, 4.4; A7: {method} {status}");
            }
        }
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "SEARCH", "REPORT"] {
            assert_eq!(of(method, 200, &[]), [], "RFC 9110, 9.2.1: {method}");
        }
        let connect = request("CONNECT", "shop.example:80", &[("host", "shop.example:80")]);
        assert_eq!(Invalidation::of(&connect, &RequestRules::default()), None);
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
    fn credentials_and_bodies_do_not_keep_a_request_from_invalidating() {
        let fields =
            [("host", "shop.example"), ("authorization", "x"), ("cookie", "a=b"), ("content-length", "5")];
        let all = Invalidation::of(&request("PUT", "/a/b?c", &fields), &RequestRules::default()).unwrap();
        assert_eq!(all.keys(StatusCode::NO_CONTENT, &HeaderMap::new()), keys(&[OWN]));
    }

    #[test]
    fn a_target_that_no_key_names_invalidates_nothing() {
        for host in [&[][..], &[("host", "a"), ("host", "a")], &[("host", "a@b")]] {
            assert_eq!(
                Invalidation::of(&request("PUT", "/", host), &RequestRules::default()),
                None,
                "B2: {host:?}"
            );
        }
    }

    #[test]
    fn keys_have_what_the_policy_adds_to_them() {
        let policy = crate::http::HttpPolicy::private()
            .key(|parts| parts.headers.get("x-tenant")?.to_str().ok().map(str::to_owned));
        let rules = &policy.requests;
        let fields = [("host", "shop.example"), ("authorization", "x"), ("x-tenant", "t")];
        let all = Invalidation::of(&request("POST", "/a/b?c", &fields), rules).unwrap();
        let mine: Vec<_> =
            ["/a/b?c", "/x"].map(|path| policy.cache_key(&request("GET", path, &fields)).unwrap()).into();
        assert_eq!(all.keys(StatusCode::OK, &headers(&[("location", "/x")])), mine);
        let others = [("host", "shop.example"), ("authorization", "y"), ("x-tenant", "t")];
        assert_ne!(policy.cache_key(&request("GET", "/x", &others)), Some(mine[1].clone()));
        assert_eq!(Invalidation::of(&request("POST", "/", &fields[..2]), rules), None, "the hook says no");
    }
}
