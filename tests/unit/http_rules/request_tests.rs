use bytes::Bytes;
use http::uri::Scheme;
use http_body_util::{Empty, Full};

use super::*;
use crate::http::HttpPolicy;

pub(super) fn request(method: &str, uri: &str, headers: &[(&str, &str)]) -> Request<Empty<Bytes>> {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Empty::new()).unwrap()
}

/// How a request is treated. Its further demands, such as conditions, are left out.
#[derive(Debug, PartialEq)]
pub(super) enum Admission {
    Cached(CacheKey),
    LookUpOnly(CacheKey),
    Bypass(&'static str),
}

pub(super) fn admit<B: http_body::Body>(request: &Request<B>, rules: &RequestRules) -> Admission {
    match consider(request, !request.body().is_end_stream(), rules, CacheKey::from_texts) {
        Ok(ConsideredRequest { key, may_load: true, .. }) => Admission::Cached(key),
        Ok(ConsideredRequest { key, .. }) => Admission::LookUpOnly(key),
        Err(rule) => Admission::Bypass(rule.token()),
    }
}

pub(super) fn admit_get(uri: &str, headers: &[(&str, &str)]) -> Admission {
    admit(&request("GET", uri, headers), &RequestRules::default())
}

pub(super) fn cached(scheme: &str, authority: &str, path: &str) -> Admission {
    Admission::Cached(CacheKey::from_parts(["http", scheme, authority, path]))
}

#[test]
fn the_key_is_the_target_uri() {
    let cases = [
        ("/a", "example.com", cached("http", "example.com", "/a")),
        ("/a?b=c", "example.com", cached("http", "example.com", "/a?b=c")),
        ("/a?", "example.com", cached("http", "example.com", "/a")),
        ("/%41", "example.com", cached("http", "example.com", "/A")),
        ("/A//b/../c", "example.com", cached("http", "example.com", "/A//c")),
        ("/", "EXAMPLE.com", cached("http", "example.com", "/")),
        ("/", "example.com:443", cached("http", "example.com:443", "/")),
        ("/", "[::1]:8080", cached("http", "[::1]:8080", "/")),
        ("/", "[::1]", cached("http", "[::1]", "/")),
        ("/", "[2001:DB8::1]", cached("http", "[2001:db8::1]", "/")),
        ("https://example.com", "example.com", cached("https", "example.com", "/")),
        ("https://example.com/a", "example.com", cached("https", "example.com", "/a")),
        ("https://example.com:80/a", "example.com:80", cached("https", "example.com:80", "/a")),
        ("https://example.com/a", "", Admission::Bypass("host")),
        ("http://Example.com/a", "example.COM", cached("http", "example.com", "/a")),
    ];
    for (uri, host, key) in cases {
        assert_eq!(admit_get(uri, &[("host", host)]), key, "{uri} at {host}");
    }
    assert_eq!(admit_get("http://example.com/a", &[]), cached("http", "example.com", "/a"));
    assert_eq!(
        admit_get("http://example.com:80/a", &[]),
        cached("http", "example.com", "/a"),
        "a client's own"
    );
    for (uri, host) in [("example.com", "example.com"), ("example.com:80", ""), ("example.com", "")] {
        let admission = admit_get(uri, &[("host", host)]);
        assert_eq!(admission, Admission::Bypass("target"), "it names no path: {uri} at {host}");
    }
}

#[test]
fn the_scheme_of_the_policy_stands_in_for_a_missing_one() {
    let of = |policy: HttpPolicy| {
        let secure = request("GET", "/a", &[("host", "example.com")]);
        admit(&secure, &policy.scheme(Scheme::HTTPS).requests)
    };
    assert_eq!(of(HttpPolicy::default()), cached("https", "example.com", "/a"));
    for (policy, name) in [(HttpPolicy::strict(), "strict"), (HttpPolicy::private(), "private")] {
        let key = CacheKey::from_parts(["http", name, "https", "example.com", "/a"]);
        assert_eq!(of(policy), Admission::Cached(key));
    }
}

#[test]
fn a_doubtful_authority_is_bypassed() {
    let hosts = [
        "",
        " ",
        "a@b",
        "user:pw@b",
        "a:b",
        "a:65536",
        "a:+80",
        "a:80:80",
        ":80",
        "a/b",
        "a b",
        "[::1",
        "[]",
        "[::1]x",
        "[a@b]",
        "é",
        "a\"b",
    ];
    for host in hosts {
        let mut request = request("GET", "/", &[]);
        request.headers_mut().insert("host", HeaderValue::from_bytes(host.as_bytes()).unwrap());
        let admission = admit(&request, &RequestRules::default());
        assert_eq!(admission, Admission::Bypass("host"), "{host:?}");
    }
    assert_eq!(admit_get("/", &[]), Admission::Bypass("host"));
    assert_eq!(admit_get("/", &[("host", "a"), ("host", "a")]), Admission::Bypass("host"));
    assert_eq!(admit_get("http://a/", &[("host", "b")]), Admission::Bypass("host"));
    assert_eq!(admit_get("http://a/", &[("host", "a:81")]), Admission::Bypass("host"));
    assert_eq!(admit_get("http://a/", &[("host", "x@a")]), Admission::Bypass("host"));
    assert_eq!(admit_get("http://u:p@a/", &[]), Admission::Bypass("host"));
    assert_eq!(admit_get("ftp://a/", &[]), Admission::Bypass("scheme"));
}

#[test]
fn a_head_uses_the_key_of_the_get() {
    let admission = admit(&request("HEAD", "/a", &[("host", "h")]), &RequestRules::default());
    assert_eq!(admission, Admission::LookUpOnly(CacheKey::from_parts(["http", "http", "h", "/a"])));
}

#[test]
fn every_other_method_is_bypassed() {
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "QUERY", "get"] {
        let uri = if method == "CONNECT" { "h:80" } else { "/a" };
        let admission = admit(&request(method, uri, &[("host", "h")]), &RequestRules::default());
        assert_eq!(admission, Admission::Bypass("method"), "{method}");
    }
}

#[test]
fn a_header_that_changes_the_answer_is_bypassed() {
    let cases = [
        ("range", "lines=0-1", "range"),
        ("if-match", "*", "conditional"),
        ("if-unmodified-since", "x", "conditional"),
        ("upgrade", "websocket", "upgrade"),
        ("expect", "100-continue", "expect"),
        ("transfer-encoding", "chunked", "body"),
        ("content-length", "1", "body"),
        ("content-length", "", "body"),
        ("content-length", "00x", "body"),
        ("cache-control", "no-store", "no-store"),
        ("cache-control", "max-age=0, No-Store", "no-store"),
    ];
    let credentials = CREDENTIALS.map(|name| (name, "x", "credentials"));
    let unkeyed =
        crate::http_rules::request_settings::UNKEYED_HEADERS.map(|name| (name, "x", "unkeyed-header"));
    for (name, value, reason) in cases.into_iter().chain(credentials).chain(unkeyed) {
        let admission = admit_get("/a", &[("host", "h"), (name, value)]);
        assert_eq!(admission, Admission::Bypass(reason), "{name}: {value}");
    }
}

/// The length of the list is spelled out: a name cannot be added or removed without a change here.
const CREDENTIALS: [&str; 41] = crate::http_rules::request_settings::CREDENTIAL_HEADERS;

#[test]
fn ordinary_headers_do_not_matter() {
    let headers = [
        ("host", "h"),
        ("accept", "text/html"),
        ("accept-encoding", "gzip"),
        ("user-agent", "x"),
        ("content-length", "0"),
        ("cache-control", "no-cache, max-age=0"),
        ("pragma", "no-cache"),
        ("te", "trailers"),
        ("connection", "Keep-Alive, TE, ,close"),
        ("connection", "HTTP2-Settings, Upgrade"),
        ("connection", ""),
        ("x-forwarded-for", "192.0.2.1"),
        ("x-forwarded-host", "other"),
    ];
    assert_eq!(admit_get("/a", &headers), cached("http", "h", "/a"));
}

#[test]
fn a_request_with_a_body_is_bypassed() {
    let request = Request::get("/a").header("host", "h").body(Full::new(Bytes::from_static(b"x"))).unwrap();
    assert_eq!(admit(&request, &RequestRules::default()), Admission::Bypass("body"));
}

#[cfg(feature = "axum")]
#[test]
fn a_rewritten_path_enters_the_key_and_the_uri_of_another_origin_does_not() {
    let keyed_by = |original: &'static str, seen: &str| {
        let mut request = request("GET", seen, &[("host", "h")]);
        request.extensions_mut().insert(axum::extract::OriginalUri(Uri::from_static(original)));
        admit(&request, &RequestRules::default())
    };
    assert_eq!(keyed_by("/users", "/users"), cached("http", "h", "/users"));
    let rewritten = [
        ("/users", "/tenant/users"),
        ("/users", "/users?tenant=1"),
        ("/a", "/b"),
        // The request looks nested, but no router has reported that, so both paths enter the key.
        ("/api/users?a=1", "/users?a=1"),
        ("/api?a=1", "/?a=1"),
    ];
    for (original, seen) in rewritten {
        let both = CacheKey::from_parts(["http", "http", "h", original, seen]);
        assert_eq!(keyed_by(original, seen), Admission::Cached(both), "{original} as {seen}");
    }
    for original in ["/a", "http://other/a", "https://h/a", "http://h:8080/a", "other"] {
        assert_eq!(keyed_by(original, "http://h/b"), cached("http", "h", "/b"), "B2: {original}");
    }
    assert_eq!(keyed_by("http://other/a", "/b"), cached("http", "h", "/b"), "B2");
}

proptest::proptest! {
    #[test]
    fn any_host_is_examined_without_a_panic(host in proptest::collection::vec(0x20u8..0x7f, 0..24)) {
        let mut request = request("GET", "/", &[]);
        request.headers_mut().insert("host", HeaderValue::from_bytes(&host).unwrap());
        admit(&request, &RequestRules::default());
    }
}

/// Header lines.
type Lines<'a> = &'a [(&'a str, &'a str)];

pub(super) fn ask(headers: &[(&str, &str)], policy: &HttpPolicy) -> Result<RequestDemands, Rule> {
    let headers: Vec<_> = [("host", "h")].iter().chain(headers).copied().collect();
    consider(&request("GET", "/a", &headers), false, &policy.requests, CacheKey::from_texts)
        .map(|considered| considered.demands)
}

#[test]
fn requests_that_a_cache_can_answer_use_the_cache() {
    let plain = RequestDemands::default();
    let cases: [(Lines<'_>, RequestDemands); 14] = [
        (&[], plain),
        (&[("if-none-match", "\"a\"")], RequestDemands { conditional: true, ..plain }),
        (&[("if-modified-since", "x")], RequestDemands { conditional: true, ..plain }),
        (&[("range", "bytes=0-1")], RequestDemands { ranged: true, ..plain }),
        (&[("range", "Bytes = 0-1,5-")], RequestDemands { ranged: true, ..plain }),
        (&[("range", "bytes=1-0")], plain),
        (&[("range", "bytes=0-1,x")], plain),
        (&[("range", "bytes=0-1"), ("if-range", "\"a\"")], RequestDemands { ranged: true, ..plain }),
        (&[("if-range", "\"a\"")], plain),
        (&[("pragma", "x")], plain),
        (&[("pragma", "no-cache"), ("cache-control", "x")], plain),
        (&[("te", "trailers"), ("x-forwarded-for", "other")], plain),
        (&[("x-forwarded-host", "other")], RequestDemands { forwarded: true, ..plain }),
        (&[("forwarded", "for=1")], RequestDemands { forwarded: true, ..plain }),
    ];
    for (headers, demands) in cases {
        assert_eq!(ask(headers, &HttpPolicy::default()), Ok(demands), "RFC 9111, 4.3.2; A9: {headers:?}");
    }
    let no_cache =
        |headers: &[(&str, &str)]| ask(headers, &HttpPolicy::default()).unwrap().directives.no_cache;
    assert!(no_cache(&[("cache-control", "no-cache")]), "A11: it joins");
    assert!(no_cache(&[("pragma", "x, No-Cache")]), "RFC 9111, 5.4");
    assert!(!no_cache(&[("cache-control", "max-age=5"), ("pragma", "no-cache")]));
    let only = ask(&[("cache-control", "only-if-cached")], &HttpPolicy::default()).unwrap();
    assert!(only.directives.only_if_cached, "RFC 9111, 5.2.1.7");
}

#[test]
fn the_list_of_bypassing_requests_is_complete() {
    let cases: [(Lines<'_>, Rule); 20] = [
        (&[("range", "items=0-1")], Rule::Range),
        (&[("range", "bytes=0-1"), ("range", "bytes=0-1")], Rule::Range),
        (&[("range", "bytes=1-0"), ("range", "bytes=0-1")], Rule::Range),
        (&[("if-match", "*")], Rule::Conditional),
        (&[("if-unmodified-since", "x")], Rule::Conditional),
        (&[("if-anything", "x")], Rule::Conditional),
        (&[("upgrade", "websocket")], Rule::Upgrade),
        (&[("expect", "100-continue")], Rule::Expect),
        (&[("transfer-encoding", "chunked")], Rule::Body),
        (&[("content-length", "1")], Rule::Body),
        (&[("cache-control", "no-store")], Rule::RequestNoStore),
        (&[("host", "h")], Rule::Host),
        (&[("connection", "accept-language")], Rule::Connection),
        (&[("connection", "close"), ("connection", "keep-alive, Host")], Rule::Connection),
        (&[("connection", "close x")], Rule::Connection),
        (&[("a-im", "x")], Rule::UnkeyedHeader),
        (&[("x-http-method-override", "DELETE")], Rule::UnkeyedHeader),
        (&[("x-original-url", "/b")], Rule::UnkeyedHeader),
        (&[("x-rewrite-url", "/b")], Rule::UnkeyedHeader),
        (&[("x-api-key", "x")], Rule::Credentials),
    ];
    for policy in [HttpPolicy::default(), HttpPolicy::strict()] {
        for (headers, rule) in cases {
            assert_eq!(ask(headers, &policy), Err(rule), "A13, B4, B5, B6: {headers:?}");
        }
    }
    for method in ["POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "get"] {
        let uri = if method == "CONNECT" { "h:80" } else { "/a" };
        let passed = consider(
            &request(method, uri, &[("host", "h")]),
            false,
            &RequestRules::default(),
            CacheKey::from_texts,
        );
        assert_eq!(passed, Err(Rule::Method), "A7, A13: {method}");
    }
}

#[test]
fn the_policy_decides_which_credentials_take_part() {
    let authorization = [("authorization", "x")];
    let cookie = [("cookie", "a=b")];
    let opened = HttpPolicy::default().share_authorized(true).share_cookies(true);
    let (authorized, has_cookie) = (
        RequestDemands { authorized: true, ..RequestDemands::default() },
        RequestDemands { has_cookie: true, ..RequestDemands::default() },
    );
    let cases = [
        (&authorization, HttpPolicy::default(), Err(Rule::Credentials)),
        (&authorization, opened.clone(), Ok(authorized)),
        (&authorization, HttpPolicy::strict(), Ok(authorized)),
        (&authorization, HttpPolicy::strict().share_authorized(false), Err(Rule::Credentials)),
        (&authorization, HttpPolicy::private(), Ok(RequestDemands::default())),
        (&cookie, HttpPolicy::default(), Err(Rule::Credentials)),
        (&cookie, opened, Ok(has_cookie)),
        (&cookie, HttpPolicy::strict(), Ok(RequestDemands::default())),
        (&cookie, HttpPolicy::strict().share_cookies(false), Err(Rule::Credentials)),
        (&cookie, HttpPolicy::private(), Ok(RequestDemands::default())),
        (&cookie, HttpPolicy::default().credential_headers([]), Ok(RequestDemands::default())),
    ];
    for (headers, policy, expected) in cases {
        assert_eq!(ask(headers, &policy), expected, "A1, A2; RFC 9111, 3.5: {headers:?} {policy:?}");
    }
}

#[test]
fn a_private_cache_has_separate_keys_for_each_user() {
    let policy = HttpPolicy::private();
    let key = |headers: &[(&str, &str)]| {
        let headers: Vec<_> = [("host", "h")].iter().chain(headers).copied().collect();
        policy.cache_key(&request("GET", "/a", &headers)).unwrap()
    };
    let alice = key(&[("authorization", "alice")]);
    assert_eq!(alice, key(&[("authorization", "alice"), ("accept", "x")]));
    let others: [&[(&str, &str)]; 6] = [
        &[],
        &[("authorization", "bob")],
        &[("authorization", "Alice")],
        &[("cookie", "alice")],
        &[("authorization", "alice"), ("cookie", "a=b")],
        &[("authorization", "al"), ("authorization", "ice")],
    ];
    for other in others {
        assert_ne!(alice, key(other), "A1: {other:?}");
    }
    // The key contains lengths, which separate the end of a value from the name of the next header.
    let twice = key(&[("authorization", "al"), ("authorization", "ice")]);
    assert_ne!(twice, key(&[("authorization", "alauthorizationice")]), "B1");
    assert!(!alice.to_string().contains("alice"), "C9: a key contains no secret");
    assert_eq!(key(&[]), CacheKey::from_parts(["http", "private", "http", "h", "/a"]));
}

#[test]
fn the_hook_extends_the_key_or_makes_the_request_bypass() {
    let tenant =
        |parts: &crate::http::KeyParts<'_>| Some(parts.headers.get("x-tenant")?.to_str().ok()?.to_owned());
    let policy = HttpPolicy::default().key(tenant);
    let considered = |headers: &[(&str, &str)]| {
        consider(&request("GET", "/a", headers), false, &policy.requests, CacheKey::from_texts)
    };
    let key = considered(&[("host", "h"), ("x-tenant", "t:1")]).unwrap().key;
    assert_eq!(key, CacheKey::from_parts(["http", "http", "h", "/a", "key=t:1"]), "B12");
    assert_eq!(considered(&[("host", "h")]), Err(Rule::KeyHook));
    assert_eq!(policy.cache_key(&request("GET", "/a", &[("host", "h")])), None);
}

#[test]
fn a_post_is_keyed_like_the_get_that_its_response_may_represent() {
    let headers =
        [("host", "H"), ("content-length", "5"), ("expect", "100-continue"), ("authorization", "x")];
    let posted = request("POST", "/a?b", &headers);
    let strict = HttpPolicy::strict();
    let (considered, uri) = consider_post(&posted, &strict.requests).unwrap();
    assert_eq!(uri, "http://h/a?b");
    assert_eq!(considered.key, CacheKey::from_parts(["http", "strict", "http", "h", "/a?b"]));
    assert!(considered.demands.authorized && !considered.may_load, "A1");
    assert_eq!(consider_post(&posted, &RequestRules::default()), Err(Rule::Credentials), "A1");
    assert_eq!(consider_post(&request("PUT", "/", &headers), &strict.requests), Err(Rule::Method));
}
