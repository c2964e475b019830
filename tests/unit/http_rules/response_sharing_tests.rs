//! The rules for responses: which of them may be shared between requests.

use super::*;
use crate::http_rules::vary::Names;

#[test]
fn directives_that_forbid_storing_do_so_in_every_mode() {
    let cases = [
        ("no-store", Rule::NoStore),
        ("max-age=10000, No-StOrE", Rule::NoStore),
        ("no-store, max-age=0", Rule::NoStore),
        ("private, max-age=3600", Rule::Private),
        ("no-cache", Rule::NoCache),
        ("max-age=10000, No-CaChE", Rule::NoCache),
    ];
    for (value, rule) in cases {
        for http in [HttpPolicy::strict(), HttpPolicy::default()] {
            assert_eq!(verdict_of(http, PLAIN, 200, &control(value)), Verdict::Private(rule), "A6: {value}");
        }
    }
    let private = |value| fresh(verdict_of(HttpPolicy::private(), PLAIN, 200, &control(value)));
    let own = stored(verdict_of(HttpPolicy::private(), PLAIN, 200, &control("private=\"a\", max-age=5")));
    assert!(own.left_out.is_empty(), "RFC 9111, 5.2.2.7: for shared caches");
    assert_eq!(private("private, max-age=3600"), Ok((3600, Rule::MaxAge)), "RFC 9111, 5.2.2.7");
    assert_eq!(private("no-store"), Err(Rule::NoStore));
}

#[test]
fn statuses_that_no_cache_may_store_are_stored_by_none() {
    let lines = ["max-age=10", "public, s-maxage=10", "max-age=10, must-understand", "no-cache"];
    for status in UNSTORABLE {
        for value in lines {
            for http in [HttpPolicy::strict(), HttpPolicy::default(), HttpPolicy::private()] {
                let fields = [("cache-control", value), ("etag", "\"a\"")];
                let verdict = verdict_of(http, PLAIN, status, &fields);
                assert!(matches!(verdict, Verdict::Private(_)), "RFC 6585: {status} {value}: {verdict:?}");
            }
        }
        assert_eq!(strictly(status, &control(lines[0])), Verdict::Private(Rule::Unstorable), "{status}");
        assert_eq!(by_default(status, &[]), Verdict::Private(Rule::Unstorable), "{status}");
    }
}

/// RFC 9111, 5.2.2.2, 5.2.2.4, 5.2.2.8 and 5.2.2.10: reuse needs a validation, and a validation needs a
/// validator.
#[test]
fn a_response_that_must_be_validated_and_cannot_be_is_not_shared() {
    let private = |rule| Verdict::Private(rule);
    let rule = Rule::MustRevalidate;
    for value in ["max-age=0, must-revalidate", "max-age=0, proxy-revalidate", "s-maxage=0, must-revalidate"]
    {
        for status in [200, 302, 500] {
            assert_eq!(strictly(status, &control(value)), private(rule), "{status} {value}");
            assert_eq!(by_default(status, &control(value)), private(rule), "{status} {value}");
        }
        let aged = [("cache-control", &*value.replace("=0", "=10")), ("age", "10")];
        assert_eq!(by_default(200, &aged), private(rule), "stale when it comes: {aged:?}");
        let tagged = [("cache-control", value), ("etag", "\"a\"")];
        assert_eq!(fresh(by_default(200, &tagged)).map(|(seconds, _)| seconds), Ok(0), "{value}");
        assert_eq!(fresh(strictly(200, &tagged)).map(|(seconds, _)| seconds), Ok(0), "{value}");
        let fresh_one = value.replace("=0", "=10");
        assert_eq!(fresh(by_default(200, &control(&fresh_one))).map(|(seconds, _)| seconds), Ok(10));
        let failure = by_default(500, &control(&fresh_one));
        assert!(matches!(failure, Verdict::ShareOnly { rule: Rule::ServerError, .. }), "{failure:?}");
    }
    let own = verdict_of(HttpPolicy::private(), PLAIN, 200, &control("max-age=0, proxy-revalidate"));
    assert!(matches!(own, Verdict::ShareOnly { rule: Rule::Stale, .. }), "for shared caches only: {own:?}");
    assert_eq!(strictly(200, &control("s-maxage=0")), private(rule), "RFC 9111, 5.2.2.10");
    assert_eq!(
        strictly(200, &control("must-revalidate")),
        private(rule),
        "without a lifetime it is stale too"
    );
    for shared in [by_default(200, &control("s-maxage=0")), by_default(200, &control("max-age=0"))] {
        assert!(matches!(shared, Verdict::ShareOnly { rule: Rule::Stale, .. }), "{shared:?}");
    }
}

#[test]
fn no_cache_is_stored_to_be_validated() {
    for (value, lifetime) in [("no-cache", 0), ("max-age=10000, no-cache", 10_000)] {
        let fields = [("cache-control", value), ("etag", "\"abcd\"")];
        let storing = stored(strictly(200, &fields));
        assert!(storing.terms.revalidate_always && storing.has_validator, "RFC 9111, 5.2.2.4: {value}");
        assert_eq!((storing.terms.lifetime, storing.terms.stale), (secs(lifetime), StaleWindows::default()));
        assert!(storing.keep_for >= secs(86_400), "stored beyond its freshness");
        assert!(stored(by_default(200, &fields)).terms.revalidate_always, "{value}");
    }
    let failed = [("cache-control", "max-age=5, no-cache"), ("etag", "\"a\"")];
    assert_eq!(fresh(by_default(500, &failed)), Err(Rule::NoCache), "A12");
    assert_eq!(fresh(strictly(500, &failed)), Ok((5, Rule::NoCache)), "RFC 9111, 5.2.2.4");
}

#[test]
fn listed_fields_are_left_out_strictly_and_forbid_sharing_by_default() {
    for directive in ["no-cache", "private"] {
        let value = format!("{directive}=\"a, b\", max-age=3600");
        let storing = stored(strictly(200, &control(&value)));
        assert_eq!(storing.left_out, ["a", "b"], "RFC 9111, 5.2.2.4 and 5.2.2.7: {value}");
        assert_eq!((storing.fresh_for(), storing.terms.revalidate_always), (secs(3600), false));
        let rule = if directive == "private" { Rule::Private } else { Rule::NoCache };
        assert_eq!(by_default(200, &control(&value)), Verdict::Private(rule), "A6: {value}");
        // These responses would only be shared with waiters, which receive them as they came, so listed fields could not be left out.
        for status in [200, 503] {
            let value = format!("{directive}=\"a\", max-age=0");
            assert_eq!(strictly(status, &control(&value)), Verdict::Private(rule), "A4: {value}");
        }
    }
}

#[test]
fn responses_to_credentials_are_shared_only_if_they_allow_it() {
    let said = ["max-age=3600, public", "s-maxage=3600", "max-age=3600, must-revalidate"];
    let unsaid = [
        "max-age=3600",
        "max-age=3600, proxy-revalidate",
        "max-age=3600, immutable",
        "x=\"public\", max-age=3600",
    ];
    let opened = HttpPolicy::default().share_authorized(true).share_cookies(true);
    for (demands, rule) in [(AUTHORIZED, Rule::Authorization), (WITH_COOKIE, Rule::Cookie)] {
        for http in [HttpPolicy::strict(), opened.clone()] {
            for value in said {
                let storing = stored(verdict_of(http.clone(), demands, 200, &control(value)));
                assert!(storing.terms.says_shared, "RFC 9111, 3.5; A1, A2: {value}");
            }
            for value in unsaid {
                let verdict = verdict_of(http.clone(), demands, 200, &control(value));
                assert_eq!(verdict, Verdict::Private(rule), "RFC 9111, 3.5; A1, A2, A4: {value}");
            }
            // A response without such a directive is not shared, not even a failure, and not with the policy's own lifetime.
            for status in [200, 404, 500] {
                assert_eq!(
                    verdict_of(http.clone(), demands, status, &[]),
                    Verdict::Private(rule),
                    "A4: {status}"
                );
            }
        }
    }
    let expires = [("expires", "Sun, 06 Nov 1994 09:49:37 GMT"), ("date", NOW)];
    let verdict = verdict_of(HttpPolicy::strict(), AUTHORIZED, 200, &expires);
    assert_eq!(verdict, Verdict::Private(Rule::Authorization), "other-authorization");
    assert!(!stored(by_default(200, &control("max-age=5"))).terms.says_shared);
}

#[test]
fn a_cookie_is_stored_strictly_and_by_default_never() {
    let fields = |value: &'static str| [("set-cookie", "a=b"), ("cache-control", value)];
    let cases = [
        (HttpPolicy::strict(), "max-age=3600", Ok((3600, Rule::MaxAge))),
        (HttpPolicy::strict(), "max-age=3600, public", Ok((3600, Rule::MaxAge))),
        (HttpPolicy::default(), "max-age=3600", Err(Rule::SetCookie)),
        (HttpPolicy::default(), "max-age=3600, public", Err(Rule::SetCookie)),
        (HttpPolicy::default().share_cookies(true), "max-age=3600", Err(Rule::SetCookie)),
        (HttpPolicy::default().share_cookies(true), "max-age=3600, public", Ok((3600, Rule::MaxAge))),
        (HttpPolicy::default().share_cookies(true), "s-maxage=3600", Ok((3600, Rule::SharedMaxAge))),
        (HttpPolicy::strict().share_cookies(false), "max-age=3600, public", Err(Rule::SetCookie)),
        (HttpPolicy::private(), "max-age=3600", Ok((3600, Rule::MaxAge))),
    ];
    for (http, value, expected) in cases {
        assert_eq!(
            fresh(verdict_of(http.clone(), PLAIN, 200, &fields(value))),
            expected,
            "A3: {value} {http:?}"
        );
    }
}

#[test]
fn a_response_is_stored_with_the_headers_it_depends_on() {
    let fields = |vary: &'static str| [("vary", vary), ("cache-control", "max-age=5000")];
    for http in [HttpPolicy::strict(), HttpPolicy::default(), HttpPolicy::private()] {
        let Vary::Names(names) = stored(verdict_of(http.clone(), PLAIN, 200, &fields("Foo, Bar"))).vary
        else {
            panic!("two names")
        };
        assert_eq!(names.to_text(), "bar,foo", "RFC 9111, 4.1");
        for any in ["*", "Foo, *", "1,2,3,4,5,6,7,8,9"] {
            let verdict = verdict_of(http.clone(), PLAIN, 200, &fields(any));
            assert_eq!(verdict, Verdict::Private(Rule::Vary), "A4, A5: {any}");
        }
        let varied = verdict_of(http.vary_on(header::ACCEPT), PLAIN, 200, &control("max-age=5"));
        assert!(matches!(stored(varied).vary, Vary::Names(names) if names.to_text() == "accept"));
    }
    // Waiters share a failure only if they agree in the headers that it names in `Vary`.
    let failure = by_default(500, &[("vary", "accept-language")]);
    assert!(matches!(failure, Verdict::ShareOnly { vary: Vary::Names(_), .. }), "A4");
}

#[test]
fn pragma_in_a_response_has_no_effect_strictly() {
    let fields = [("pragma", "no-cache"), ("last-modified", DAY_BEFORE)];
    assert_eq!(fresh(strictly(200, &fields)), Ok((8640, Rule::Heuristic)), "RFC 9111, 5.4");
    assert_eq!(fresh(by_default(200, &fields)), Err(Rule::Pragma), "A6");
    assert_eq!(fresh(by_default(200, &[("pragma", "x")])), Ok((60, Rule::Default)));
    let clear = [fields[0], ("cache-control", "max-age=5")];
    assert_eq!(
        fresh(by_default(200, &clear)),
        Ok((5, Rule::MaxAge)),
        "RFC 9111, 5.4: that is what was meant"
    );
}

#[test]
fn endless_bodies_switched_protocols_and_invalid_lengths_are_not_shared() {
    let cases = [
        ("content-type", "text/event-stream", Rule::EventStream),
        ("content-type", "text/event-stream ; charset=utf-8", Rule::EventStream),
        ("connection", "upgrade", Rule::SwitchedProtocol),
        ("content-length", "1, 2", Rule::ContentLength),
        ("content-length", "1001", Rule::TooBig),
    ];
    for http in [HttpPolicy::strict(), HttpPolicy::default(), HttpPolicy::private()] {
        for (name, value, rule) in cases {
            let fields = [("cache-control", "max-age=60"), (name, value)];
            assert_eq!(
                verdict_of(http.clone(), PLAIN, 200, &fields),
                Verdict::Private(rule),
                "A13, B14: {name}"
            );
        }
        let longest = [("cache-control", "max-age=60"), ("content-length", "1000")];
        assert_eq!(fresh(verdict_of(http.clone(), PLAIN, 200, &longest)), Ok((60, Rule::MaxAge)), "B14");
    }
}

#[test]
fn a_stream_of_records_is_shared_only_with_a_length_or_a_lifetime() {
    let kinds = [
        "application/x-ndjson",
        "application/ndjson",
        "application/jsonl; charset=utf-8",
        "application/x-jsonlines",
        "application/stream+json",
        "Application/JSON-seq",
        "application/geo+json-seq",
    ];
    for http in [HttpPolicy::strict(), HttpPolicy::default(), HttpPolicy::private()] {
        for kind in kinds {
            let is_stream = |fields: &[(&str, &str)]| {
                let fields: Vec<_> = fields.iter().copied().chain([("content-type", kind)]).collect();
                verdict_of(http.clone(), PLAIN, 200, &fields) == Verdict::Private(Rule::EventStream)
            };
            assert!(is_stream(&[]), "A13: {kind}");
            assert!(is_stream(&control("max-age=0")), "A13: it holds for no time: {kind}");
            assert!(is_stream(&[("last-modified", DAY_BEFORE)]), "A13: {kind}");
            assert!(!is_stream(&[("content-length", "5")]), "{kind}");
            assert!(!is_stream(&control("max-age=60")), "{kind}");
        }
        // The length of a handler's body is known without a header.
        let exchange = RequestResponse {
            method: &Method::GET,
            target: None,
            demands: &PLAIN,
            request_headers: &HeaderMap::new(),
            status: StatusCode::OK,
            headers: &headers(&[("content-type", kinds[0])]),
            body: SizeHint::with_exact(5),
            do_not_store: false,
            terms: CacheTerms::default(),
            delay: Duration::ZERO,
            now: UNIX_EPOCH,
        };
        assert_ne!(classify(&exchange, &rules(http.clone())), Verdict::Private(Rule::EventStream));
        for kind in ["application/json", "text/plain", "application/x-ndjson2", "json-seq"] {
            let verdict = verdict_of(http.clone(), PLAIN, 200, &[("content-type", kind)]);
            assert_ne!(verdict, Verdict::Private(Rule::EventStream), "{kind}");
        }
    }
}

#[test]
fn an_encoded_response_varies_on_accept_encoding_even_without_vary() {
    let names = |http, fields: &[(&str, &str)]| {
        let fields: Vec<_> = fields.iter().copied().chain(control("max-age=60")).collect();
        match stored(verdict_of(http, PLAIN, 200, &fields)).vary {
            Vary::Names(names) => names.to_text(),
            vary => format!("{vary:?}"),
        }
    };
    let cases: [(Lines<'_>, &str); 7] = [
        (&[("content-encoding", "gzip")], "accept-encoding"),
        (&[("content-encoding", "identity"), ("content-encoding", "BR")], "accept-encoding"),
        (&[("content-encoding", "identity, gzip"), ("vary", "origin")], "accept-encoding,origin"),
        (&[("content-encoding", "gzip"), ("vary", "Accept-Encoding")], "accept-encoding"),
        (&[("content-encoding", "Identity")], "Nothing"),
        (&[("content-encoding", ""), ("vary", "origin")], "origin"),
        (&[], "Nothing"),
    ];
    for (fields, expected) in cases {
        for http in [HttpPolicy::default(), HttpPolicy::private()] {
            assert_eq!(names(http, fields), expected, "A5: {fields:?}");
        }
    }
    assert_eq!(names(HttpPolicy::strict(), &[("content-encoding", "gzip")]), "Nothing", "RFC 9111, 4.1");
    let own = ("vary", "a, b, c, d, e, f, g, h");
    let most = ["i", "j", "k", "l", "m", "n", "o", "p"].map(HeaderName::from_static);
    let most = most.into_iter().fold(HttpPolicy::default(), HttpPolicy::vary_on);
    let all = names(most, &[own, ("content-encoding", "gzip")]);
    assert_eq!(Names::from_text(&all).map(|names| names.as_slice().len()), Some(17), "it can be read again");
    let any = verdict_of(HttpPolicy::default(), PLAIN, 200, &[("vary", "*"), ("content-encoding", "gzip")]);
    assert_eq!(any, Verdict::Private(Rule::Vary), "A5");
}

#[test]
fn a_response_that_the_handler_marks_is_shared_in_no_mode() {
    for http in [HttpPolicy::strict(), HttpPolicy::private()] {
        let exchange = RequestResponse {
            method: &Method::GET,
            target: None,
            demands: &PLAIN,
            request_headers: &HeaderMap::new(),
            status: StatusCode::OK,
            headers: &headers(&control("public, max-age=60")),
            body: SizeHint::default(),
            do_not_store: true,
            terms: CacheTerms::default(),
            delay: Duration::ZERO,
            now: UNIX_EPOCH,
        };
        assert_eq!(classify(&exchange, &rules(http)), Verdict::Private(Rule::DoNotStore));
    }
}

proptest::proptest! {
    /// Only an explicit directive, and no other header, makes the response to credentials shareable.
    #[test]
    fn only_an_explicit_directive_shares_a_response_to_credentials(
        fields in proptest::collection::vec((
            proptest::prop_oneof![
                proptest::strategy::Just("cache-control"), proptest::strategy::Just("cdn-cache-control"),
                proptest::strategy::Just("expires"), proptest::strategy::Just("pragma"),
                proptest::strategy::Just("vary"), proptest::strategy::Just("etag"),
            ],
            "(max-age=[0-9]{1,3}|no-store|private|no-cache|immutable|a|\"|;|,| |=){0,4}",
        ), 0..5),
        status in 100_u16..600,
    ) {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.trim())).collect();
        let opened = HttpPolicy::default().share_authorized(true).share_cookies(true);
        for demands in [AUTHORIZED, WITH_COOKIE] {
            for http in [HttpPolicy::strict(), opened.clone()] {
                let verdict = verdict_of(http, demands, status, &fields);
                proptest::prop_assert!(matches!(verdict, Verdict::Private(_)), "{:?} {:?}", verdict, fields);
            }
        }
    }

    /// The default stores nothing that strict mode would not store, except with the policy's own lifetime.
    #[test]
    fn the_default_is_never_looser_than_strict_mode(
        lines in proptest::collection::vec(
            "(max-age=[0-9]{1,3}|s-maxage=[0-9]|no-store|private|private=\"a\"|no-cache|public|must-understand|x)(, ?(max-age=[0-9]|no-store|private|no-cache=\"b\"|must-revalidate))?", 0..3),
        target in proptest::option::of("(max-age=[0-9]{1,2}|no-store|private|&)"),
        status in 200_u16..600,
    ) {
        let mut fields: Vec<_> = lines.iter().map(|line| ("cache-control", &**line)).collect();
        fields.extend(target.iter().map(|line| ("cdn-cache-control", &**line)));
        let careful = verdict_of(HttpPolicy::default().default_lifetime(false), PLAIN, status, &fields);
        let strict_rfc = verdict_of(HttpPolicy::strict(), PLAIN, status, &fields);
        if let Verdict::Store(careful) = careful {
            proptest::prop_assert!(stored(strict_rfc).fresh_for() >= careful.fresh_for(), "{:?}", fields);
        }
    }
}
