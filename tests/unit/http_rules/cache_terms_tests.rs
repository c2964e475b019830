use http::Response;
use http::header::AGE;

use super::*;
use crate::http_rules::Rule;
use crate::http_rules::request::RequestDemands;
use crate::http_rules::response::Verdict;
use crate::http_rules::response::tests::{stored, verdict_by};
use crate::http_rules::settings::{HttpPolicy, ResponseRules};

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn minute() -> CacheTerms {
    CacheTerms::fresh_for(secs(60))
}

/// Header lines.
type Lines<'a> = &'a [(&'a str, &'a str)];

fn verdict_on(
    http: HttpPolicy,
    demands: RequestDemands,
    status: u16,
    lines: Lines<'_>,
    terms: CacheTerms,
) -> Verdict {
    let rules =
        ResponseRules { http: http.into(), fresh_for: secs(30), negative_for: secs(5), max_body: 1000 };
    verdict_by(&rules, &demands, status, (lines, terms), SystemTime::now())
}

/// The response to a plain request, by the default policy.
fn plainly(lines: Lines<'_>, terms: CacheTerms) -> Verdict {
    verdict_on(HttpPolicy::default(), RequestDemands::default(), 200, lines, terms)
}

/// For how long the response is fresh, and by which rule; or the rule that keeps it from being stored.
fn fresh(verdict: Verdict) -> Result<(Duration, Rule), Rule> {
    match verdict {
        Verdict::Store(storing) => Ok((storing.fresh_for(), storing.rule)),
        Verdict::ShareOnly { rule, .. } | Verdict::Private(rule) => Err(rule),
    }
}

#[test]
fn stated_terms_replace_the_lifetimes_of_the_response_and_of_the_policy() {
    let lines: [Lines<'_>; 10] = [
        &[],
        &[("cache-control", "max-age=5, s-maxage=7")],
        &[("cache-control", "no-store")],
        &[("cache-control", "no-cache")],
        &[("cache-control", "max-age=0, must-revalidate, proxy-revalidate")],
        &[("cdn-cache-control", "max-age=5")],
        &[("expires", "0")],
        &[("pragma", "no-cache")],
        &[("age", "3600"), ("cache-control", "max-age=5")],
        &[("content-type", "application/x-ndjson")],
    ];
    for lines in lines {
        for http in [HttpPolicy::default(), HttpPolicy::strict(), HttpPolicy::private()] {
            let verdict = verdict_on(http.clone(), RequestDemands::default(), 200, lines, minute());
            assert_eq!(fresh(verdict), Ok((secs(60), Rule::CacheTerms)), "{lines:?} {http:?}");
        }
    }
    let half = CacheTerms::fresh_for(Duration::from_millis(500));
    assert_eq!(fresh(plainly(&[], half)), Ok((Duration::from_millis(500), Rule::CacheTerms)));
    for status in [201, 302, 404] {
        let verdict = verdict_on(HttpPolicy::default(), RequestDemands::default(), status, &[], minute());
        assert_eq!(fresh(verdict), Ok((secs(60), Rule::CacheTerms)), "an explicit lifetime: {status}");
    }
}

#[test]
fn terms_make_no_response_shareable() {
    let cases: [(Lines<'_>, Rule); 8] = [
        (&[("cache-control", "private")], Rule::Private),
        (&[("cache-control", "private, max-age=60")], Rule::Private),
        (&[("set-cookie", "a=b")], Rule::SetCookie),
        (&[("vary", "*")], Rule::Vary),
        (&[("content-type", "text/event-stream")], Rule::EventStream),
        (&[("cdn-cache-control", "no-store")], Rule::Targeted),
        (&[("cdn-cache-control", "private")], Rule::Targeted),
        (&[("content-length", "1001")], Rule::TooBig),
    ];
    for (lines, rule) in cases {
        assert_eq!(plainly(lines, minute()), Verdict::Private(rule), "{lines:?}");
    }
    for (demands, rule) in [
        (RequestDemands { authorized: true, ..RequestDemands::default() }, Rule::Authorization),
        (RequestDemands { has_cookie: true, ..RequestDemands::default() }, Rule::Cookie),
    ] {
        let on = |lines| verdict_on(HttpPolicy::default(), demands, 200, lines, minute());
        assert_eq!(on(&[]), Verdict::Private(rule));
        assert_eq!(fresh(on(&[("cache-control", "public")])), Ok((secs(60), Rule::CacheTerms)));
    }
    for status in [425, 429, 511] {
        let verdict = verdict_on(HttpPolicy::default(), RequestDemands::default(), status, &[], minute());
        assert_eq!(verdict, Verdict::Private(Rule::Unstorable), "{status}");
    }
    let failed = verdict_on(HttpPolicy::default(), RequestDemands::default(), 503, &[], minute());
    assert_eq!(fresh(failed), Err(Rule::ServerError));
}

#[test]
fn a_response_for_one_user_is_stored_in_a_private_cache_only() {
    let terms = minute().for_one_user();
    for http in [HttpPolicy::default(), HttpPolicy::strict()] {
        let verdict = verdict_on(http, RequestDemands::default(), 200, &[], terms);
        assert_eq!(verdict, Verdict::Private(Rule::Private));
    }
    let private = verdict_on(HttpPolicy::private(), RequestDemands::default(), 200, &[], terms);
    assert_eq!(fresh(private), Ok((secs(60), Rule::CacheTerms)));
    for http in [HttpPolicy::default(), HttpPolicy::strict(), HttpPolicy::private()] {
        let lines = [("cache-control", "public, max-age=60")];
        let terms = CacheTerms::do_not_store();
        let verdict = verdict_on(http, RequestDemands::default(), 200, &lines, terms);
        assert_eq!(verdict, Verdict::Private(Rule::CacheTerms));
    }
}

#[test]
fn stated_windows_replace_those_of_the_response() {
    let own = [("cache-control", "max-age=5, stale-while-revalidate=6, stale-if-error=7")];
    let stale = |terms| stored(plainly(&own, terms)).terms.stale;
    let windows = |terms| (stale(terms).while_revalidate, stale(terms).if_error);
    assert_eq!(windows(minute()), (secs(6), secs(7)), "what is not stated is the response's");
    let one = minute().stale_while_revalidate(secs(30));
    assert_eq!(windows(one), (secs(30), secs(7)));
    let only = CacheTerms::default().stale_if_error(Duration::ZERO);
    assert_eq!(windows(only), (secs(6), Duration::ZERO));
    assert_eq!(fresh(plainly(&own, only)), Ok((secs(5), Rule::MaxAge)));
    let stated = stored(plainly(&[], one)).says_stale;
    assert_eq!(stated, (true, false), "the policy's window applies to the other one");
}

fn head(status: u16, lines: Lines<'_>, terms: Option<CacheTerms>) -> Parts {
    let mut response = Response::builder().status(status);
    for (name, value) in lines {
        response = response.header(*name, *value);
    }
    let mut head = response.body(()).unwrap().into_parts().0;
    if let Some(terms) = terms {
        head.extensions.insert(terms);
    }
    CacheTerms::announce(&mut head);
    head
}

fn line(head: &Parts) -> Option<&str> {
    head.headers.get(CACHE_CONTROL).map(|line| line.to_str().unwrap())
}

#[test]
fn clients_see_what_corresponds_to_the_terms() {
    let windows = minute().stale_while_revalidate(secs(30)).stale_if_error(Duration::from_millis(2_900));
    let cases = [
        (minute(), Some("max-age=60")),
        (windows, Some("max-age=60, stale-while-revalidate=30, stale-if-error=2")),
        (minute().for_one_user(), Some("private, max-age=60")),
        (CacheTerms::default().for_one_user(), Some("private")),
        (CacheTerms::do_not_store(), Some("no-store")),
        (CacheTerms::fresh_for(Duration::from_millis(999)), Some("max-age=0")),
        (CacheTerms::fresh_for(Duration::MAX), Some("max-age=2147483648")),
        (CacheTerms::default().stale_if_error(secs(5)), None),
        (windows.hide_from_clients(), None),
        (CacheTerms::do_not_store().hide_from_clients(), None),
    ];
    for (terms, expected) in cases {
        assert_eq!(line(&head(200, &[], Some(terms))), expected, "{terms:?}");
        let own = [("cache-control", "no-cache")];
        assert_eq!(line(&head(200, &own, Some(terms))), Some("no-cache"), "the handler's own: {terms:?}");
    }
    assert_eq!(line(&head(200, &[], None)), None);
    assert_eq!(line(&head(103, &[], Some(minute()))), None);
    let aged = head(200, &[(AGE.as_str(), "10")], Some(minute()));
    assert_eq!(line(&aged), Some("max-age=70"), "clients subtract the age");
}

#[test]
fn a_response_to_credentials_is_private_for_other_caches() {
    let cases: [(Lines<'_>, CacheTerms, Option<&str>); 6] = [
        (&[], minute(), Some("private, max-age=60")),
        (&[], minute().for_one_user(), Some("private, max-age=60")),
        (&[], CacheTerms::do_not_store(), Some("no-store")),
        (&[], minute().hide_from_clients(), None),
        (&[("cache-control", "max-age=5")], minute(), Some("max-age=5")),
        (&[("cache-control", "public")], minute(), Some("public")),
    ];
    for (lines, terms, expected) in cases {
        let mut head = head(200, lines, Some(terms));
        CacheTerms::restrict(&mut head);
        assert_eq!(line(&head), expected, "{lines:?} {terms:?}");
    }
}
