//! The tests of the conformance suite whose outcome depends only on the rules: one table line per test of the suite.

use super::*;

type Lines<'a> = &'a [(&'a str, &'a str)];

/// Where the response to a request comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Finds {
    /// The stored response, with this status.
    Stored(u16),
    /// A new response, which the origin has sent.
    Origin,
    /// The stored response, which the origin has confirmed; the client receives this status.
    Validated(u16),
    /// There is no response, but an error.
    Nothing,
}

/// Sends a request, and another one 3 s later. Returns the outcome of the later one.
///
/// The origin answers the first request with `response`, and later ones with 304 if they have the validators
/// of the first response, else with 299.
fn second(policy: HttpPolicy, first: Lines<'_>, response: (u16, Lines<'_>), then: Lines<'_>) -> Finds {
    let mut cache = Cache::new(policy);
    let mut reply = (response.0, headers(response.1), b"0123456789A".to_vec());
    reply.1.entry("date").or_insert(httpdate::fmt_http_date(cache.now).parse().unwrap());
    let validators = reply.1.clone();
    cache.ask(&request("GET", first), &mut |_, _| Some(reply.clone()));
    cache.now += Duration::from_secs(3);
    let (mut is_forwarded, mut is_validated) = (false, false);
    let (status, found, _) = cache.ask(&request("GET", then), &mut |_, conditional| {
        is_forwarded = true;
        is_validated = [("if-none-match", "etag"), ("if-modified-since", "last-modified")].iter().any(
            |(condition, validator)| {
                validators.get(*validator).is_some_and(|value| conditional.get(*condition) == Some(value))
            },
        );
        Some((if is_validated { 304 } else { 299 }, HeaderMap::new(), b"new".to_vec()))
    });
    match (is_forwarded, is_validated) {
        (false, _) if !found.contains_key("date") => Finds::Nothing,
        (false, _) => Finds::Stored(status),
        (true, true) => Finds::Validated(status),
        (true, false) => Finds::Origin,
    }
}

fn strictly(first: Lines<'_>, response: (u16, Lines<'_>), then: Lines<'_>) -> Finds {
    second(HttpPolicy::strict(), first, response, then)
}

const LASTING: (&str, &str) = ("cache-control", "max-age=3600");
const SHORT: (&str, &str) = ("cache-control", "max-age=2");
const TAG: (&str, &str) = ("etag", "\"abcdef\"");
const OLD: (&str, &str) = ("last-modified", "Wed, 01 Jan 2020 00:00:00 GMT");
const FAR: (&str, &str) = ("expires", "Thu, 18 Aug 2050 02:01:18 GMT");

#[test]
fn freshness() {
    let cases: [(Lines<'_>, Finds); 25] = [
        (&[], Finds::Origin),
        (&[LASTING], Finds::Stored(200)),
        (&[("cache-control", "max-age=99999999999")], Finds::Stored(200)),
        (&[LASTING, ("age", "7200")], Finds::Origin),
        (&[LASTING, ("expires", "0")], Finds::Stored(200)),
        (&[("cache-control", "max-age=0"), FAR], Finds::Origin),
        (&[("cache-control", "max-age=1, s-maxage=3600")], Finds::Stored(200)),
        (&[("cache-control", "max-age=3600"), ("cache-control", "s-maxage=1")], Finds::Origin),
        (&[LASTING, ("age", "abc")], Finds::Stored(200)),
        (&[LASTING, ("age", "7200, 0")], Finds::Origin),
        (&[LASTING, ("age", "0"), ("age", "7200")], Finds::Stored(200)),
        (&[FAR], Finds::Stored(200)),
        (&[FAR, ("date", "foo")], Finds::Stored(200)),
        (&[FAR, FAR], Finds::Origin),
        (&[("expires", "Thu, 18 Aug 2050 02:01:18 UTC")], Finds::Origin),
        (&[("expires", "Thursday, 18-Aug-50 02:01:18 GMT")], Finds::Stored(200)),
        (&[("expires", "Thu Aug  8 02:01:18 2050")], Finds::Stored(200)),
        (&[OLD], Finds::Stored(200)),
        (&[SHORT, TAG], Finds::Validated(200)),
        (&[SHORT, ("etag", "W/\"a\"")], Finds::Validated(200)),
        (&[SHORT, OLD], Finds::Validated(200)),
        (&[("cache-control", "no-cache"), TAG], Finds::Validated(200)),
        (&[("cache-control", "max-age=10000, No-CaChE")], Finds::Origin),
        (&[("cache-control", "no-store, max-age=10000"), FAR], Finds::Origin),
        (&[("cache-control", "max-age=2, must-revalidate"), TAG], Finds::Validated(200)),
    ];
    for (response, finds) in cases {
        assert_eq!(strictly(&[], (200, response), &[]), finds, "{response:?}");
    }
}

#[test]
fn statuses() {
    for status in [200, 203, 204, 299, 301, 302, 303, 307, 308, 400, 404, 410, 499, 500, 502, 503, 504, 599] {
        assert_eq!(strictly(&[], (status, &[LASTING]), &[]), Finds::Stored(status), "status-{status}-fresh");
        let stale = [("expires", "Fri, 20 Nov 2026 12:00:00 GMT")];
        assert_eq!(strictly(&[], (status, &stale), &[]), Finds::Origin, "status-{status}-stale");
    }
    for (status, finds) in
        [(201, Finds::Origin), (403, Finds::Origin), (502, Finds::Origin), (599, Finds::Origin)]
    {
        assert_eq!(strictly(&[], (status, &[OLD]), &[]), finds, "heuristic-{status}");
    }
    for status in [203, 204, 404, 405, 410, 414, 501] {
        assert_eq!(strictly(&[], (status, &[OLD]), &[]), Finds::Stored(status), "heuristic-{status}");
    }
}

#[test]
fn directives_of_requests() {
    let cases: [(Lines<'_>, Lines<'_>, Finds); 12] = [
        (&[LASTING], &[("cache-control", "max-age=1")], Finds::Origin),
        (&[LASTING, TAG], &[("cache-control", "no-cache")], Finds::Validated(200)),
        (&[LASTING], &[("pragma", "no-cache")], Finds::Origin),
        (&[LASTING], &[("cache-control", "no-store")], Finds::Origin),
        (&[LASTING], &[("cache-control", "min-fresh=4000")], Finds::Origin),
        (&[SHORT], &[("cache-control", "max-stale=1000")], Finds::Stored(200)),
        (&[SHORT], &[("cache-control", "only-if-cached")], Finds::Nothing),
        (&[LASTING], &[("cookie", "a=b")], Finds::Stored(200)),
        (&[LASTING, ("set-cookie", "a=b")], &[], Finds::Stored(200)),
        (&[LASTING], &[("authorization", "x")], Finds::Stored(200)),
        (&[LASTING], &[("range", "bytes=0-1")], Finds::Stored(206)),
        (&[LASTING], &[("range", "bytes=0-1"), ("if-range", "\"x\"")], Finds::Stored(200)),
    ];
    for (response, then, finds) in cases {
        assert_eq!(strictly(&[], (200, response), then), finds, "{response:?} {then:?}");
    }
    let authorized = [("authorization", "FOO")];
    assert_eq!(strictly(&authorized, (200, &[FAR]), &[]), Finds::Origin, "other-authorization");
    for word in ["max-age=3600, public", "max-age=3600, must-revalidate", "s-maxage=3600"] {
        let response = [("cache-control", word)];
        assert_eq!(strictly(&authorized, (200, &response), &[]), Finds::Stored(200), "{word}");
        assert_eq!(second(HttpPolicy::default(), &authorized, (200, &response), &[]), Finds::Origin, "A1");
    }
}

#[test]
fn conditions_of_clients() {
    let cases: [(Lines<'_>, Lines<'_>, Finds); 9] = [
        (&[FAR, TAG], &[("if-none-match", "\"abcdef\"")], Finds::Stored(304)),
        (&[FAR, ("etag", "W/\"a\"")], &[("if-none-match", "W/\"a\"")], Finds::Stored(304)),
        (&[FAR, TAG], &[("if-none-match", "\"1\", \"abcdef\", \"2\"")], Finds::Stored(304)),
        (&[FAR, TAG], &[("if-none-match", "\"1\"")], Finds::Stored(200)),
        (
            &[FAR, TAG, OLD],
            &[("if-none-match", "\"abcdef\""), ("if-modified-since", "Sat, 21 Nov 2026 11:59:59 GMT")],
            Finds::Stored(304),
        ),
        (&[LASTING, OLD], &[("if-modified-since", OLD.1)], Finds::Stored(304)),
        (&[LASTING, OLD], &[("if-modified-since", "Wednesday, 01-Jan-20 00:00:00 GMT")], Finds::Stored(304)),
        (&[LASTING, OLD], &[("if-modified-since", "Fri, 20 Nov 2026 12:00:00 GMT")], Finds::Stored(304)),
        (&[SHORT, OLD], &[("if-modified-since", OLD.1)], Finds::Validated(304)),
    ];
    for (response, then, finds) in cases {
        assert_eq!(strictly(&[], (200, response), then), finds, "{response:?} {then:?}");
    }
}

#[test]
fn variants() {
    let foo: Lines<'_> = &[LASTING, ("vary", "Foo")];
    let three: Lines<'_> = &[LASTING, ("vary", "Foo, Bar, Baz")];
    let language: Lines<'_> = &[LASTING, ("vary", "Accept-Language")];
    let german: Lines<'_> = &[LASTING, ("vary", "Accept-Language"), ("content-language", "de")];
    let (same, other) = (Finds::Stored(200), Finds::Origin);
    let cases: [(Lines<'_>, Lines<'_>, Lines<'_>, Finds); 18] = [
        (foo, &[("foo", "1")], &[("foo", "1")], same),
        (foo, &[("foo", "1")], &[("foo", "2")], other),
        (foo, &[], &[("foo", "1")], other),
        (foo, &[("foo", "1")], &[], other),
        (foo, &[("foo", "1"), ("other", "2")], &[("foo", "1"), ("other", "3")], same),
        (
            three,
            &[("foo", "1"), ("bar", "a"), ("baz", "7")],
            &[("foo", "1"), ("baz", "7"), ("bar", "a")],
            same,
        ),
        (
            three,
            &[("foo", "1"), ("bar", "a"), ("baz", "7")],
            &[("foo", "1"), ("baz", "7"), ("bar", "abcde")],
            other,
        ),
        (three, &[("foo", "1"), ("baz", "7")], &[("foo", "1"), ("baz", "7")], same),
        (foo, &[("foo", "1, 2")], &[("foo", "1"), ("foo", "2")], same),
        (foo, &[("foo", "1,2")], &[("foo", " 1, 2 ")], same),
        (language, &[("accept-language", "en, de")], &[("accept-language", "de, en")], same),
        (language, &[("accept-language", "en, de")], &[("accept-language", "eN, De")], same),
        (language, &[("accept-language", "en, de")], &[("accept-language", " en ,   de")], same),
        (german, &[("accept-language", "en, de")], &[("accept-language", "fr;q=0.5, de;q=1.0")], same),
        (german, &[("accept-language", "en, de")], &[("accept-language", "fr")], other),
        (&[LASTING, ("vary", "*")], &[("foo", "1")], &[("foo", "1")], other),
        (&[LASTING, ("vary", "Foo"), ("vary", "*")], &[("foo", "1")], &[("foo", "1")], other),
        (&[LASTING, ("vary", ""), ("vary", "*")], &[], &[], other),
    ];
    for (response, first, then, finds) in cases {
        assert_eq!(strictly(first, (200, response), then), finds, "{response:?} {first:?} {then:?}");
    }
}

#[test]
fn two_variants_are_stored() {
    let mut cache = Cache::new(HttpPolicy::strict());
    let mut ask = |value: &str| {
        let mut is_forwarded = false;
        let reply = cache.ask(&request("GET", &[("foo", value)]), &mut |_, sent| {
            is_forwarded = true;
            let reply = headers(&[LASTING, ("vary", "Foo")]);
            Some((200, reply, sent["foo"].as_bytes().to_vec()))
        });
        (reply.2, is_forwarded)
    };
    assert_eq!(ask("1"), (b"1".to_vec(), true));
    assert_eq!(ask("2"), (b"2".to_vec(), true));
    assert_eq!(ask("1"), (b"1".to_vec(), false), "vary-invalidate");
}

#[test]
fn targeted_fields() {
    let cases: [(Lines<'_>, Finds); 8] = [
        (&[("cdn-cache-control", "max-age=3600")], Finds::Stored(200)),
        (&[("cdn-cache-control", "max-age=3600"), ("age", "7200")], Finds::Origin),
        (&[("cdn-cache-control", "max-age=0"), FAR], Finds::Origin),
        (&[("cdn-cache-control", "max-age=1"), LASTING], Finds::Origin),
        (&[("cdn-cache-control", "private"), LASTING, FAR], Finds::Origin),
        (&[("cdn-cache-control", "no-cache"), LASTING, FAR], Finds::Origin),
        (&[("cdn-cache-control", "max-age=10000"), ("cache-control", "no-store")], Finds::Stored(200)),
        (&[("cdn-cache-control", "max-age=\"10000\""), ("cache-control", "no-store")], Finds::Origin),
    ];
    for (response, finds) in cases {
        assert_eq!(strictly(&[], (200, response), &[]), finds, "{response:?}");
    }
}

#[test]
fn parts() {
    let cases = [("bytes=-5", "01234"), ("bytes=6-8", "234"), ("bytes=6-", "234"), ("bytes=-1", "4")];
    for (range, text) in cases {
        let mut cache = Cache::new(HttpPolicy::strict());
        let part = (206, headers(&[LASTING, ("content-range", "bytes 4-9/10")]), b"01234".to_vec());
        cache.ask(&request("GET", &[("range", "bytes=-5")]), &mut |_, sent| {
            assert_eq!(sent["range"], "bytes=-5", "the range is passed on");
            Some(part.clone())
        });
        let (status, _, content) = cache.ask(&request("GET", &[("range", range)]), &mut |_, _| None);
        assert_eq!((status, content), (206, text.as_bytes().to_vec()), "partial-store-partial: {range}");
        // A request for the whole representation is not answered with a stored part of it.
        assert_eq!(
            cache.ask(&request("GET", &[]), &mut |_, _| Some((299, HeaderMap::new(), Vec::new()))).0,
            299
        );
        let mut careful = Cache::new(HttpPolicy::default());
        careful.ask(&request("GET", &[("range", "bytes=-5")]), &mut |_, _| Some(part.clone()));
        assert!(careful.resources.is_empty(), "it is not as long as it says");
    }
}

#[test]
fn a_304_updates_the_stored_response_and_the_whole_is_served() {
    let mut cache = Cache::new(HttpPolicy::strict());
    let stored =
        headers(&[SHORT, TAG, ("test-header", "A"), ("x-frame-options", "deny"), ("content-length", "5")]);
    cache.ask(&request("GET", &[]), &mut |_, _| Some((200, stored.clone(), b"whole".to_vec())));
    cache.now += Duration::from_secs(3);
    let update = headers(&[SHORT, ("test-header", "B"), ("content-length", "10")]);
    let reply = cache.ask(&request("GET", &[("req-num", "2")]), &mut |_, sent| {
        assert_eq!(
            (&sent["if-none-match"], &sent["req-num"]),
            (&"\"abcdef\"".parse().unwrap(), &"2".parse().unwrap())
        );
        Some((304, update.clone(), Vec::new()))
    });
    assert_eq!((reply.0, &*reply.2), (200, &b"whole"[..]));
    let again = cache.ask(&request("GET", &[]), &mut |_, _| None);
    for reply in [&reply.1, &again.1] {
        let values =
            ["test-header", "x-frame-options", "content-length"].map(|name| reply[name].to_str().unwrap());
        assert_eq!(values, ["B", "deny", "5"]);
    }
}

#[test]
fn a_stale_response_is_served_if_allowed_while_the_origin_is_down() {
    let cases = [
        ("max-age=2", 200),
        ("max-age=2, stale-if-error=60", 200),
        ("max-age=2, must-revalidate", 502),
        ("max-age=2, proxy-revalidate", 502),
        ("max-age=2, no-cache", 502),
        ("max-age=2, s-maxage=2", 502),
    ];
    for (value, status) in cases {
        let mut cache = Cache::new(HttpPolicy::strict());
        let stored = headers(&[("cache-control", value), TAG]);
        cache.ask(&request("GET", &[]), &mut |_, _| Some((200, stored.clone(), Vec::new())));
        cache.now += Duration::from_secs(3);
        let reply = cache.ask(&request("GET", &[]), &mut |_, _| None);
        assert_eq!((reply.0, reply.1.contains_key("etag")), (status, status == 200), "stale-close: {value}");
    }
}

#[test]
fn a_stale_response_is_served_while_it_is_validated() {
    let mut cache = Cache::new(HttpPolicy::strict());
    let first = headers(&[("cache-control", "max-age=1, stale-while-revalidate=4"), ("etag", "\"abc\"")]);
    let second = headers(&[("cache-control", "no-cache"), ("etag", "\"def\"")]);
    let mut calls = 0;
    let mut ask = |after: u64| {
        cache.now += Duration::from_secs(after);
        let reply = cache.ask(&request("GET", &[]), &mut |_, _| {
            calls += 1;
            Some((200, if calls == 1 { &first } else { &second }.clone(), calls.to_string().into_bytes()))
        });
        String::from_utf8(reply.2).unwrap()
    };
    assert_eq!(ask(0), "1");
    assert_eq!(ask(3), "1", "stale-while-revalidate: the stored one, and the new one behind it");
    assert_eq!(ask(3), "3", "stale-while-revalidate-window: the new one is always validated");
}

#[test]
fn unsafe_methods() {
    for (method, status, found) in [
        ("POST", 200, 299),
        ("PUT", 204, 299),
        ("DELETE", 303, 299),
        ("M-SEARCH", 200, 299),
        ("POST", 500, 200),
        ("OPTIONS", 200, 200),
    ] {
        let mut cache = Cache::new(HttpPolicy::strict());
        cache.ask(&request("GET", &[]), &mut |_, _| Some((200, headers(&[LASTING]), Vec::new())));
        cache.ask(&request(method, &[]), &mut |_, _| Some((status, HeaderMap::new(), Vec::new())));
        let reply = cache.ask(&request("GET", &[]), &mut |_, _| Some((299, HeaderMap::new(), Vec::new())));
        assert_eq!(reply.0, found, "invalidate-{method}: {status}");
    }
}

#[test]
fn a_post_response_that_represents_the_target_answers_a_get() {
    let mut cache = Cache::new(HttpPolicy::strict());
    let reply = headers(&[FAR, ("content-location", "/a/b")]);
    cache.ask(&request("POST", &[]), &mut |_, _| Some((200, reply.clone(), b"posted".to_vec())));
    let found = cache.ask(&request("GET", &[]), &mut |_, _| None);
    assert_eq!((found.0, &*found.2), (200, &b"posted"[..]), "method-POST");
}

#[test]
fn an_unstorable_response_leaves_the_stored_one() {
    let mut cache = Cache::new(HttpPolicy::strict());
    cache.ask(&request("GET", &[]), &mut |_, _| Some((200, headers(&[LASTING, ("a", "1")]), Vec::new())));
    // Another client forces a load, whose response must not be stored.
    let forced = [("cache-control", "no-cache")];
    let new = headers(&[("cache-control", "no-store"), ("a", "2")]);
    assert_eq!(
        cache.ask(&request("GET", &forced), &mut |_, _| Some((200, new.clone(), Vec::new()))).1["a"],
        "2"
    );
    let found = cache.ask(&request("GET", &[]), &mut |_, _| None);
    assert_eq!((found.0, &found.1["a"]), (200, &"1".parse().unwrap()), "cc-resp-no-store-old-new");
}

#[test]
fn hop_by_hop_and_listed_fields_are_left_out() {
    let mut cache = Cache::new(HttpPolicy::strict());
    let reply = headers(&[
        ("cache-control", "max-age=3600, no-cache=\"d\""),
        ("connection", "a, b"),
        ("a", "1"),
        ("b", "2"),
        ("c", "3"),
        ("d", "4"),
        ("proxy-authentication-info", "x"),
        ("date", "Sat, 21 Nov 2026 11:59:00 GMT"),
    ]);
    cache.ask(&request("GET", &[]), &mut |_, _| Some((200, reply.clone(), Vec::new())));
    cache.now += Duration::from_secs(3);
    let (status, found, _) = cache.ask(&request("GET", &[]), &mut |_, _| None);
    let mut names: Vec<_> = found.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!((status, names), (200, vec!["age", "c", "cache-control", "date"]), "RFC 9111, 3.1");
    assert_eq!(
        (&found["age"], &found["date"]),
        (&"62".parse().unwrap(), &reply["date"]),
        "other-age-gen, other-date-update"
    );
}
