//! The rules for responses: lifetimes, statuses, stale windows, parts and targeted fields.

use std::time::UNIX_EPOCH;

use super::*;
use crate::http_rules::cache_control::RequestDirectives;

#[path = "response_sharing_tests.rs"]
mod shared_responses;

/// Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110.
const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
const DAY_BEFORE: &str = "Sat, 05 Nov 1994 08:49:37 GMT";
const PLAIN: RequestDemands = RequestDemands {
    directives: RequestDirectives {
        no_store: false,
        no_cache: false,
        only_if_cached: false,
        max_age: None,
        min_fresh: 0,
        max_stale: None,
    },
    authorized: false,
    has_cookie: false,
    conditional: false,
    ranged: false,
    forwarded: false,
    other_cookies: false,
    other_form: false,
};
const AUTHORIZED: RequestDemands = RequestDemands { authorized: true, ..PLAIN };
const WITH_COOKIE: RequestDemands = RequestDemands { has_cookie: true, ..PLAIN };
const RANGED: RequestDemands = RequestDemands { ranged: true, ..PLAIN };

/// Header lines.
type Lines<'a> = &'a [(&'a str, &'a str)];

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn rules(http: HttpPolicy) -> ResponseRules {
    ResponseRules { http: http.into(), fresh_for: secs(60), negative_for: secs(5), max_body: 1000 }
}

/// The verdict on a response with these fields and terms to a GET, which came at `now`.
pub(in crate::http_rules) fn verdict_by(
    rules: &ResponseRules,
    demands: &RequestDemands,
    status: u16,
    (fields, terms): (&[(&str, &str)], CacheTerms),
    now: SystemTime,
) -> Verdict {
    let exchange = RequestResponse {
        method: &Method::GET,
        target: None,
        demands,
        request_headers: &HeaderMap::new(),
        status: StatusCode::from_u16(status).unwrap(),
        headers: &headers(fields),
        body: SizeHint::default(),
        do_not_store: false,
        terms,
        delay: Duration::ZERO,
        now,
    };
    classify(&exchange, rules)
}

fn verdict_of(http: HttpPolicy, demands: RequestDemands, status: u16, fields: &[(&str, &str)]) -> Verdict {
    let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
    verdict_by(&rules(http), &demands, status, (fields, CacheTerms::default()), now)
}

fn strictly(status: u16, fields: &[(&str, &str)]) -> Verdict {
    verdict_of(HttpPolicy::strict(), PLAIN, status, fields)
}

fn by_default(status: u16, fields: &[(&str, &str)]) -> Verdict {
    verdict_of(HttpPolicy::default(), PLAIN, status, fields)
}

pub(in crate::http_rules) fn stored(verdict: Verdict) -> StoreDecision {
    match verdict {
        Verdict::Store(storing) => storing,
        other => panic!("not stored: {other:?}"),
    }
}

/// For how many seconds the response is fresh, and by which rule; or the rule that keeps it from being stored.
type Fresh = Result<(u64, Rule), Rule>;

fn fresh(verdict: Verdict) -> Fresh {
    match verdict {
        Verdict::Store(storing) => Ok((storing.fresh_for().as_secs(), storing.rule)),
        Verdict::ShareOnly { rule, .. } | Verdict::Private(rule) => Err(rule),
    }
}

fn control(value: &str) -> [(&str, &str); 1] {
    [("cache-control", value)]
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

#[test]
fn a_response_without_a_lifetime_is_stored_by_default_and_not_strictly() {
    assert_eq!(fresh(strictly(200, &[])), Err(Rule::Stale), "freshness-none");
    assert!(matches!(strictly(200, &[]), Verdict::ShareOnly { .. }), "the wave may have it");
    assert_eq!(fresh(by_default(200, &[])), Ok((60, Rule::Default)));
    assert_eq!(fresh(by_default(200, &[("age", "1000")])), Ok((60, Rule::Default)), "it begins here");
    for status in [404, 410] {
        assert_eq!(fresh(by_default(status, &[])), Ok((5, Rule::Default)), "negative_for");
        assert_eq!(fresh(by_default(status, &control("max-age=7"))), Ok((7, Rule::MaxAge)));
    }
    let tagged = [("etag", "\"a\"")];
    assert_eq!(fresh(strictly(200, &tagged)), Ok((0, Rule::Unnamed)), "stored to be validated");
    assert_eq!(fresh(strictly(201, &tagged)), Err(Rule::Status), "RFC 9111, 3");
    assert_eq!(fresh(strictly(405, &tagged)), Ok((0, Rule::Unnamed)), "RFC 9110, 15.1");
    let public = [tagged[0], ("cache-control", "public")];
    assert_eq!(fresh(strictly(201, &public)), Ok((0, Rule::Unnamed)), "RFC 9111, 5.2.2.9");
    assert_eq!(fresh(by_default(201, &public)), Err(Rule::Status), "A8");
    let uncached = [tagged[0], ("cache-control", "no-cache")];
    assert_eq!(fresh(strictly(200, &uncached)), Ok((0, Rule::NoCache)));
    assert_eq!(fresh(strictly(201, &uncached)), Err(Rule::NoCache), "RFC 9111, 3: nothing says that it may");
}

#[test]
fn the_most_specific_lifetime_counts() {
    let cases = [
        ("max-age=3600", Ok((3600, Rule::MaxAge))),
        ("max-age=3600, s-maxage=1", Ok((1, Rule::SharedMaxAge))),
        ("max-age=1, s-maxage=3600", Ok((3600, Rule::SharedMaxAge))),
        ("max-age=0", Err(Rule::Stale)),
        ("max-age=-3600", Err(Rule::Stale)),
        ("max-age='3600'", Err(Rule::Stale)),
        ("max-age=003600", Ok((3600, Rule::MaxAge))),
        ("extension=\"max-age=3600\", max-age=1", Ok((1, Rule::MaxAge))),
        ("MaX-aGe=3600", Ok((3600, Rule::MaxAge))),
    ];
    for (value, expected) in cases {
        assert_eq!(fresh(strictly(200, &control(value))), expected, "RFC 9111, 4.2.1: {value}");
    }
    let private = verdict_of(HttpPolicy::private(), PLAIN, 200, &control("s-maxage=3600, max-age=1"));
    assert_eq!(fresh(private), Ok((1, Rule::MaxAge)), "RFC 9111, 5.2.2.10: not for a private cache");
    let aged = stored(strictly(200, &[("cache-control", "max-age=60"), ("age", "20")]));
    assert_eq!((aged.terms.lifetime, aged.initial_age, aged.fresh_for()), (secs(60), secs(20), secs(40)));
    let past = [("cache-control", "max-age=3600"), ("expires", "0"), ("age", "7200")];
    assert_eq!(fresh(strictly(200, &past)), Err(Rule::TooOld), "older than it may be");
}

/// The statuses that must not be stored: RFC 8470, 5.2; RFC 6585, 3 to 6.
const UNSTORABLE: [u16; 5] = [425, 428, 429, 431, 511];

#[test]
fn any_final_status_with_a_lifetime_is_stored_strictly() {
    for status in (200..=599).filter(|status| ![206, 304].contains(status) && !UNSTORABLE.contains(status)) {
        let verdict = strictly(status, &control("max-age=10"));
        assert_eq!(fresh(verdict), Ok((10, Rule::MaxAge)), "RFC 9111, 3: {status}");
        let failure = status >= 500 || status == 408;
        let careful = fresh(by_default(status, &control("max-age=10")));
        let expected = if failure { Err(Rule::ServerError) } else { Ok((10, Rule::MaxAge)) };
        assert_eq!(careful, expected, "A8, A12: {status}");
    }
    for fields in [&[][..], &control("max-age=0")] {
        let verdict = strictly(500, fields);
        assert!(matches!(verdict, Verdict::ShareOnly { rule: Rule::ServerError, .. }), "A12: {fields:?}");
    }
    for status in [100, 101, 103, 199, 206, 304] {
        assert_eq!(strictly(status, &control("max-age=10")), Verdict::Private(Rule::Status), "{status}");
    }
}

#[test]
fn a_lifetime_is_guessed_for_the_statuses_of_the_rfc_only() {
    let dated = [("last-modified", DAY_BEFORE), ("date", NOW)];
    let public = [("last-modified", DAY_BEFORE), ("date", NOW), ("cache-control", "public")];
    for status in 200..=599 {
        let listed = [200, 203, 204, 300, 301, 308, 404, 405, 410, 414, 501].contains(&status);
        let guessed = fresh(strictly(status, &dated));
        let excluded = [206, 304].contains(&status) || UNSTORABLE.contains(&status);
        match guessed {
            Ok(found) => assert_eq!((found, listed), ((8640, Rule::Heuristic), true), "{status}"),
            Err(_) => assert!(!listed, "RFC 9110, 15.1: {status}"),
        }
        assert_eq!(fresh(strictly(status, &public)).is_ok(), !excluded, "RFC 9111, 5.2.2.9: {status}");
    }
    assert_eq!(fresh(by_default(200, &dated)), Ok((60, Rule::Default)), "A6: no guess by default");
    let guessing = HttpPolicy::default().heuristic_freshness(true);
    assert_eq!(fresh(verdict_of(guessing, PLAIN, 200, &dated)), Ok((8640, Rule::Heuristic)));
}

#[test]
fn must_understand_depends_on_the_status() {
    let value = control("max-age=3600, no-store, must-understand");
    assert_eq!(fresh(strictly(599, &value)), Err(Rule::MustUnderstand), "status-599-must-understand");
    assert_eq!(fresh(strictly(200, &value)), Ok((3600, Rule::MaxAge)), "status-200-must-understand");
    assert_eq!(fresh(by_default(200, &value)), Err(Rule::NoStore), "A6");
    let alone = control("max-age=3600, must-understand");
    assert_eq!(fresh(strictly(599, &alone)), Err(Rule::MustUnderstand), "RFC 9111, 5.2.2.3");
    assert_eq!(fresh(by_default(299, &alone)), Err(Rule::MustUnderstand));
    // The statuses of RFC 9110, 15; 306 and 418 are reserved there, without a meaning.
    let known = |status| matches!(status, 200..=206 | 300..=305 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 500..=505);
    for status in 200..=599 {
        let understood = strictly(status, &alone) != Verdict::Private(Rule::MustUnderstand);
        assert_eq!(understood, known(status), "RFC 9111, 5.2.2.3: {status}");
    }
}

#[test]
fn stale_windows_are_those_of_the_response_and_of_the_policy() {
    let (minute, day) = (secs(60), secs(86_400));
    let none = StaleWindows::default();
    let implicit = |on_disconnect| StaleWindows { on_disconnect, on_request: true, ..none };
    let cases = [
        ("max-age=2", implicit(day), implicit(minute)),
        ("max-age=2, must-revalidate", none, none),
        ("max-age=2, proxy-revalidate", none, none),
        ("max-age=2, s-maxage=2", none, none),
        (
            "max-age=2, stale-while-revalidate=4, stale-if-error=60",
            StaleWindows { while_revalidate: secs(4), if_error: secs(60), ..implicit(day) },
            StaleWindows { while_revalidate: secs(4), if_error: secs(60), ..implicit(minute) },
        ),
        ("max-age=2, stale-while-revalidate=4, must-revalidate", none, none),
        // In strict mode, a response with `s-maxage` has no stale windows.
        ("s-maxage=2, stale-while-revalidate=4", none, StaleWindows { while_revalidate: secs(4), ..none }),
    ];
    for (value, strict, careful) in cases {
        assert_eq!(stored(strictly(200, &control(value))).terms.stale, strict, "RFC 9111, 4.2.4: {value}");
        let storing = stored(by_default(200, &control(value)));
        assert_eq!(storing.terms.stale, careful, "{value}");
        let said = ["stale-while-revalidate", "stale-if-error"].map(|name| value.contains(name));
        assert_eq!(storing.says_stale, said.into(), "RFC 5861: {value}");
    }
    let private =
        verdict_of(HttpPolicy::private(), PLAIN, 200, &control("max-age=2, s-maxage=9, proxy-revalidate"));
    assert_eq!(stored(private).terms.stale, implicit(minute), "RFC 9111, 5.2.2.8: for shared caches");
}

#[test]
fn a_response_is_stored_as_long_as_it_is_useful() {
    let http = || HttpPolicy::default().stale_on_disconnect(secs(5)).validate_within(secs(100));
    let keep = |fields: &[(&str, &str)]| stored(verdict_of(http(), PLAIN, 200, fields)).keep_for.as_secs();
    assert_eq!(keep(&control("max-age=10")), 15, "to stand in for the inner service");
    assert_eq!(keep(&[("cache-control", "max-age=10"), ("etag", "\"a\"")]), 110, "to be validated");
    assert_eq!(keep(&control("max-age=10, stale-while-revalidate=20")), 30);
    assert_eq!(keep(&control("max-age=10, stale-if-error=200")), 210);
    assert_eq!(keep(&control("max-age=10, must-revalidate")), 10, "there is nothing else that it could do");
    assert_eq!(keep(&[("cache-control", "max-age=10"), ("age", "4")]), 11);
    assert_eq!(keep(&control("max-age=0, stale-while-revalidate=20")), 20);
    assert_eq!(fresh(verdict_of(http(), PLAIN, 200, &control("max-age=0"))), Err(Rule::Stale));
}

#[test]
fn a_part_is_stored_if_it_was_requested_and_states_its_position() {
    let fields = [("cache-control", "max-age=3600"), ("content-range", "bytes 4-9/10")];
    let part = Part { first: 4, last: 9, complete: Some(10) };
    for http in [HttpPolicy::strict(), HttpPolicy::default()] {
        assert_eq!(stored(verdict_of(http.clone(), RANGED, 206, &fields)).part, Some(part), "RFC 9111, 3.3");
        for (demands, fields) in [(PLAIN, &fields[..]), (RANGED, &fields[..1])] {
            let verdict = verdict_of(http.clone(), demands, 206, fields);
            assert_eq!(verdict, Verdict::Private(Rule::Status), "A8, A9: {fields:?}");
        }
        assert_eq!(stored(verdict_of(http.clone(), RANGED, 200, &fields)).part, None, "RFC 9110, 14.4");
        let status_only = [("cache-control", "max-age=0"), fields[1]];
        assert_eq!(verdict_of(http.clone(), RANGED, 206, &status_only), Verdict::Private(Rule::Status), "A4");
        let unsatisfied = verdict_of(http, RANGED, 416, &control("max-age=5"));
        assert_eq!(unsatisfied, Verdict::Private(Rule::Status), "A9: no other request has that range");
    }
    assert_eq!(verdict_of(HttpPolicy::default(), RANGED, 206, &fields[1..]), Verdict::Private(Rule::Status));
}

#[test]
fn a_targeted_field_counts_instead_of_the_general_ones_strictly() {
    let cases: [(Lines<'_>, Fresh); 14] = [
        (&[("cdn-cache-control", "max-age=3600")], Ok((3600, Rule::Targeted))),
        (&[("cdn-cache-control", "max-age=3600"), ("age", "7200")], Err(Rule::TooOld)),
        (&[("cdn-cache-control", "max-age=0")], Err(Rule::Stale)),
        (&[("cdn-cache-control", "max-age=3600"), ("expires", "0")], Ok((3600, Rule::Targeted))),
        (
            &[("cdn-cache-control", "max-age=0"), ("expires", "Sun, 06 Nov 1994 09:49:37 GMT")],
            Err(Rule::Stale),
        ),
        (
            &[("cdn-cache-control", "max-age=3600"), ("cache-control", "max-age=1")],
            Ok((3600, Rule::Targeted)),
        ),
        (&[("cdn-cache-control", "max-age=1"), ("cache-control", "max-age=3600")], Ok((1, Rule::Targeted))),
        (&[("cdn-cache-control", "private"), ("cache-control", "max-age=10000")], Err(Rule::Private)),
        (&[("cdn-cache-control", "no-cache"), ("cache-control", "max-age=10000")], Err(Rule::NoCache)),
        (&[("cdn-cache-control", "no-store"), ("cache-control", "max-age=10000")], Err(Rule::NoStore)),
        (
            &[("cdn-cache-control", "max-age=10000"), ("cache-control", "no-store")],
            Ok((10_000, Rule::Targeted)),
        ),
        (&[("cdn-cache-control", "max-age=10000, &&&&&"), ("cache-control", "no-store")], Err(Rule::NoStore)),
        (&[("cdn-cache-control", "max-age=\"10000\""), ("cache-control", "no-store")], Err(Rule::NoStore)),
        (&[("cdn-cache-control", "none"), ("cache-control", "max-age=5")], Err(Rule::Stale)),
    ];
    for (fields, expected) in cases {
        assert_eq!(fresh(strictly(200, fields)), expected, "RFC 9213, 2.2: {fields:?}");
    }
}

#[test]
fn by_default_either_field_can_make_a_response_private() {
    let cases = [
        ("max-age=3600", "max-age=1", Ok((3600, Rule::Targeted))),
        ("max-age=1", "max-age=3600", Ok((1, Rule::Targeted))),
        ("s-maxage=1", "max-age=3600", Ok((1, Rule::Targeted))),
        ("max-age=3600", "no-store", Err(Rule::NoStore)),
        ("max-age=3600", "private", Err(Rule::Private)),
        ("max-age=3600", "no-cache", Err(Rule::NoCache)),
        ("max-age=3600", "private=\"a\"", Err(Rule::Private)),
        ("no-store", "max-age=3600", Err(Rule::Targeted)),
        ("private", "public, max-age=3600", Err(Rule::Targeted)),
        ("no-cache", "max-age=3600", Err(Rule::Targeted)),
        ("no-store, &&&&&", "max-age=3600", Err(Rule::Targeted)),
        ("NO-STORE", "max-age=3600", Err(Rule::Targeted)),
        ("max-age=10, &&&&&", "max-age=3600", Ok((3600, Rule::MaxAge))),
        ("none", "max-age=5", Ok((5, Rule::MaxAge))),
        ("stale-if-error=5", "s-maxage=7", Ok((7, Rule::SharedMaxAge))),
    ];
    for (targeted, general, expected) in cases {
        let fields = [("cdn-cache-control", targeted), ("cache-control", general)];
        assert_eq!(fresh(by_default(200, &fields)), expected, "A6: {fields:?}");
    }
    for directive in ["must-revalidate", "proxy-revalidate"] {
        let more = format!("max-age=60, {directive}");
        for (targeted, general) in [("max-age=60", &more[..]), (&more, "max-age=60")] {
            let fields = [("cdn-cache-control", targeted), ("cache-control", general)];
            assert_eq!(
                stored(by_default(200, &fields)).terms.stale,
                StaleWindows::default(),
                "A6: {fields:?}"
            );
        }
    }
    // These lines are valid only as one dictionary (RFC 8941, 4.2): the string that begins in the first line ends in the second.
    let lines = [("cdn-cache-control", "x=\"a"), ("cdn-cache-control", "b\", no-store, y=\"c\"")];
    assert_eq!(fresh(by_default(200, &lines)), Err(Rule::Targeted), "A6");
    let private = verdict_of(
        HttpPolicy::private(),
        PLAIN,
        200,
        &[("cdn-cache-control", "no-store"), ("cache-control", "max-age=5")],
    );
    assert_eq!(fresh(private), Ok((5, Rule::MaxAge)), "RFC 9213, 3.1: not for a private cache");
}

#[test]
fn the_response_to_a_post_represents_a_get_if_it_says_so() {
    let target = Uri::from_static("http://h/a?b");
    let lasting = ("cache-control", "max-age=60");
    let freshness = |http: HttpPolicy, method: Method, status: u16, fields: &[(&str, &str)]| {
        let exchange = RequestResponse {
            method: &method,
            target: Some(&target),
            demands: &PLAIN,
            request_headers: &HeaderMap::new(),
            status: StatusCode::from_u16(status).unwrap(),
            headers: &headers(fields),
            body: SizeHint::default(),
            do_not_store: false,
            terms: CacheTerms::default(),
            delay: Duration::ZERO,
            now: UNIX_EPOCH + Duration::from_secs(784_111_777),
        };
        fresh(classify(&exchange, &rules(http)))
    };
    for location in ["", "/a?b", "http://h/a?b", "http://H:80/a?b"] {
        let fields = [lasting, ("content-location", location)];
        let stored = freshness(HttpPolicy::strict(), Method::POST, 200, &fields);
        assert_eq!(stored, Ok((60, Rule::MaxAge)), "RFC 9110, 9.3.3: {location}");
        let careful = freshness(HttpPolicy::default(), Method::POST, 200, &fields);
        assert_eq!(careful, Err(Rule::Post), "A7: {location}");
        assert_eq!(freshness(HttpPolicy::strict(), Method::PUT, 200, &fields), Err(Rule::Method));
        assert_eq!(
            freshness(HttpPolicy::strict(), Method::HEAD, 200, &fields),
            Err(Rule::Method),
            "no content"
        );
        assert_eq!(freshness(HttpPolicy::strict(), Method::POST, 400, &fields), Err(Rule::Post));
        let unnamed = [("content-location", location), ("last-modified", DAY_BEFORE), ("etag", "\"a\"")];
        assert_eq!(
            freshness(HttpPolicy::strict(), Method::POST, 200, &unnamed),
            Err(Rule::Post),
            "explicit only"
        );
        let expired = [("cache-control", "max-age=0"), ("content-location", location), ("etag", "\"a\"")];
        assert_eq!(freshness(HttpPolicy::strict(), Method::POST, 200, &expired), Err(Rule::Post));
    }
    for location in ["/a", "/A?b", "https://h/a?b", "http://x/a?b"] {
        let fields = [lasting, ("content-location", location)];
        assert_eq!(
            freshness(HttpPolicy::strict(), Method::POST, 200, &fields),
            Err(Rule::Post),
            "{location}"
        );
    }
    assert_eq!(freshness(HttpPolicy::strict(), Method::POST, 200, &[lasting]), Err(Rule::Post));
}
