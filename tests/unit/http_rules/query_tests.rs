use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::http_rules::request::{ChangedResources, consider, consider_post};
use crate::http_rules::settings::HttpPolicy;
use crate::http_rules::{Rule, key};
use crate::key::CacheKey;

fn rules(ignored: &[&str], only: Option<&[&str]>, is_sorted: bool) -> QueryRules {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    QueryRules { ignored: list(ignored), only: only.map(list), is_sorted }
}

fn tracking() -> QueryRules {
    rules(TRACKING_PARAMETERS, None, false)
}

#[track_caller]
fn keyed(rules: &QueryRules, sent: &str, expected: &str) {
    let keyed = rules.keyed(sent);
    assert_eq!(keyed, expected, "{sent}");
    assert_eq!(matches!(keyed, Cow::Borrowed(_)), sent == expected, "{sent} is copied only if it changes");
    assert_eq!(rules.keyed(expected), expected, "{sent}: once is enough");
}

#[test]
fn ignored_parameters_leave_the_rest_of_the_query_as_it_was_sent() {
    for (sent, expected) in [
        ("/a", "/a"),
        ("*", "*"),
        ("/a?b=1", "/a?b=1"),
        ("/a?utm_source=x", "/a"),
        ("/a?utm_source", "/a"),
        ("/a?utm_source=", "/a"),
        ("/a?utm_=1", "/a"),
        ("/a?utm=1", "/a?utm=1"),
        ("/a?xutm_source=1", "/a?xutm_source=1"),
        ("/a?gclid=1&b=2&fbclid=3", "/a?b=2"),
        ("/a?gclid2=1", "/a?gclid2=1"),
        ("/a?b=1&gclid=1&b=2", "/a?b=1&b=2"),
        ("/a?gclid=1&gclid=2&c", "/a?c"),
        ("/a?b=utm_source=1", "/a?b=utm_source=1"),
        ("/a?b=%2f%41+é|&utm_x=1", "/a?b=%2f%41+é|"),
        // Only `&` separates: a handler that also splits at `;` sees nothing of an ignored piece.
        ("/a?utm_content=1;callback=evil", "/a"),
        ("/a?b=1;utm_content=x", "/a?b=1;utm_content=x"),
        ("/a?x?utm_source=1", "/a?x?utm_source=1"),
        ("/utm_source=1/a", "/utm_source=1/a"),
    ] {
        keyed(&tracking(), sent, expected);
    }
}

#[test]
fn a_name_is_compared_after_decoding() {
    for name in
        ["utm%5Fsource", "utm%5fsource", "%75tm_source", "ut%6D_%73ource", "gcli%64", "%67%63%6C%69%64"]
    {
        keyed(&tracking(), &format!("/a?{name}=1&b=2"), "/a?b=2");
    }
    for name in
        ["UTM_source", "Gclid", "utm%255Fsource", "utm%5", "utm%", "%", "%zz", "utm%5Gsource", "gclid%00"]
    {
        keyed(&tracking(), &format!("/a?{name}=1"), &format!("/a?{name}=1"));
    }
    let spaced = rules(&["a b", "é", "x[]", "1+1"], None, false);
    for name in ["a+b", "a%20b", "%C3%A9", "%c3%a9", "é", "x[]", "x%5B%5d", "1%2B1"] {
        keyed(&spaced, &format!("/a?{name}=1"), "/a");
    }
    // A `+` is a space in a query, and not in a listed name.
    keyed(&spaced, "/a?1+1=2", "/a?1+1=2");
}

#[test]
fn an_empty_parameter_and_an_empty_query_are_removed() {
    for (sent, expected) in [
        ("/a?", "/a"),
        ("/a?&", "/a"),
        ("/a?&&b=1", "/a?b=1"),
        ("/a?b=1&&c=2&", "/a?b=1&c=2"),
        ("/a?=1", "/a?=1"),
        ("?b=1", "/?b=1"),
        ("?gclid=1", "/"),
        ("?", "/"),
    ] {
        keyed(&tracking(), sent, expected);
    }
}

#[test]
fn only_listed_parameters_are_in_the_key() {
    let only = rules(&["filter_debug"], Some(&["page", "filter_*"]), false);
    for (sent, expected) in [
        ("/a?page=2", "/a?page=2"),
        ("/a?x=1&page=2&filter_size=4&y", "/a?page=2&filter_size=4"),
        ("/a?filter_debug=1&filter_x=2", "/a?filter_x=2"),
        ("/a?PAGE=2&=1&&pages=3", "/a"),
        ("/a?p%61ge=2", "/a?p%61ge=2"),
    ] {
        keyed(&only, sent, expected);
    }
    for sent in ["/a?b=1", "/a?", "/a?&=", "/a"] {
        keyed(&rules(&[], Some(&[]), false), sent, "/a");
    }
    keyed(&rules(&["*"], None, false), "/a?b=1&c", "/a");
}

#[test]
fn sorting_is_by_name_and_keeps_the_order_of_equal_names() {
    let sorted = rules(&["gclid"], None, true);
    for (sent, expected) in [
        ("/a?b=2&a=1", "/a?a=1&b=2"),
        ("/a?a=2&a=1", "/a?a=2&a=1"),
        ("/a?b=1&a=2&b=0&a=1", "/a?a=2&a=1&b=1&b=0"),
        ("/a?b&%61=2&a=1", "/a?%61=2&a=1&b"),
        ("/a?ab=1&a=2", "/a?a=2&ab=1"),
        ("/a?b=1&gclid=1&a=2", "/a?a=2&b=1"),
        ("/a?b=1&&a=2", "/a?a=2&b=1"),
        ("/a?b=1&=2", "/a?=2&b=1"),
        // By the name alone: a `=` or a `-` after it does not matter.
        ("/a?a-b=1&a=2", "/a?a=2&a-b=1"),
    ] {
        keyed(&sorted, sent, expected);
    }
}

#[test]
fn a_name_that_no_parameter_has_is_refused_with_its_setting() {
    for name in ["", "a*b", "**", "*a", "a&b", "a=1", "a#", "?a", "utm%5Fsource", "a\n"] {
        for (rules, setting) in [
            (rules(&["b", name], None, false), "ignore_query"),
            (rules(&[], Some(&[name]), false), "only_query"),
        ] {
            let text = rules.refusal().unwrap_or_else(|| panic!("{name:?} is accepted"));
            assert!(text.starts_with(&format!("{setting} names {name:?}: choose")), "{text}");
        }
    }
    for name in TRACKING_PARAMETERS.iter().chain(&["*", "a b", "é", "x[]", "a-b.c~d_e", "1+1", "@"]) {
        assert_eq!(rules(&[name], Some(&[name]), true).refusal(), None, "{name}");
    }
    let policy = crate::policy::Policy::builder().http(HttpPolicy::default().only_query(["page="])).build();
    assert!(policy.unwrap_err().to_string().contains("only_query names \"page=\""));
}

#[test]
fn a_policy_without_a_rule_has_none() {
    let policy = HttpPolicy::default().ignore_query([""; 0]).sort_query(true).sort_query(false);
    assert_eq!(policy, HttpPolicy::default());
    assert_eq!(policy.requests.query, None, "so a hit does not look at its query");
    let twice = HttpPolicy::default().ignore_query(["a", "b"]).ignore_query(["b".to_owned()]);
    assert_eq!(twice, HttpPolicy::default().ignore_query(["a", "b"]));
    let none = HttpPolicy::default().only_query([""; 0]);
    assert_eq!(none.requests.query, Some(Arc::new(rules(&[], Some(&[]), false))));
}

fn of(policy: &HttpPolicy, method: &str, uri: &str) -> Request<()> {
    let mut request = Request::builder().method(method).uri(uri);
    if uri.starts_with('/') && policy.requests.authority.is_none() {
        request = request.header("host", "h");
    }
    request.body(()).unwrap()
}

fn key_of(policy: &HttpPolicy, uri: &str) -> (String, bool) {
    let request = of(policy, "GET", uri);
    let considered = consider(&request, false, &policy.requests, CacheKey::from_texts).unwrap();
    (considered.key.to_string(), considered.demands.other_form)
}

#[test]
fn the_keys_of_a_policy_without_the_settings_do_not_change() {
    for (uri, key, is_other) in [
        ("/a?utm_source=1&b=2", "http:http:h:/a?utm_source=1&b=2", false),
        ("/a?b=2&a=1&&", "http:http:h:/a?b=2&a=1&&", false),
        ("/a?", "http:http:h:/a", true),
        ("/a?%61=1", "http:http:h:/a?a=1", true),
        ("http://h?a=1", "http:http:h:?a=1", false),
    ] {
        for policy in [HttpPolicy::default(), HttpPolicy::default().pass_unkeyed_query(true)] {
            assert_eq!(key_of(&policy, uri), (key.to_owned(), is_other), "{uri}");
        }
    }
}

#[test]
fn the_key_has_the_remaining_query_in_normal_form() {
    let policy = HttpPolicy::default().ignore_query(["utm_*"]).sort_query(true);
    for (uri, path, is_other) in [
        ("/a?utm_source=%3Cscript%3E", "/a", false),
        ("/a?utm_source=%3c&", "/a", false),
        ("/a?", "/a", false),
        ("/a?b=1&a=2", "/a?a=2&b=1", false),
        ("/%61?utm_x=1", "/a", true),
        ("/./a?utm_x=1", "/a", true),
        ("/a?utm_x=1&b=%41", "/a?b=A", true),
        ("http://h?utm_x=1", "/", false),
        ("http://h?b=1&a=1", "/?a=1&b=1", false),
    ] {
        assert_eq!(key_of(&policy, uri), (format!("http:http:h:{path}"), is_other), "{uri}");
    }
}

#[test]
fn another_form_has_one_key_whatever_is_ignored() {
    let policy = HttpPolicy::default().ignore_query(["utm_*"]);
    let sent = |uri: &str| {
        let request = of(&policy, "GET", uri);
        key::sent_target(&request, &policy.requests).map(Cow::into_owned)
    };
    assert_eq!(sent("/%61?utm_x=1&b=%41"), sent("/%61?b=%41&utm_y=2"));
    assert_ne!(sent("/%61?b=%41"), sent("/a?b=%41"));
}

#[test]
fn an_unsafe_request_changes_the_resource_without_ignored_parameters() {
    let policy = HttpPolicy::default().ignore_query(["utm_*"]).sort_query(true);
    let changed = ChangedResources::of(&of(&policy, "PUT", "/a?c=1&utm_x=1&b=2"), &policy.requests).unwrap();
    let mut headers = http::HeaderMap::new();
    headers.insert("location", "/new?utm_x=2&z=1&y=2".parse().unwrap());
    headers.insert("content-location", "?utm_x=2".parse().unwrap());
    let keys = changed.keys(http::StatusCode::CREATED, &headers);
    let keys: Vec<_> = keys.iter().map(ToString::to_string).collect();
    assert_eq!(keys, ["/a?b=2&c=1", "/new?y=2&z=1", "/a"].map(|path| format!("http:http:h:{path}")));
}

/// A POST passes with its whole query, so a response with a `Content-Location` may show an ignored parameter.
#[test]
fn the_response_to_a_post_with_ignored_parameters_is_not_stored() {
    let rule = |policy: HttpPolicy, uri: &str| {
        let request = of(&policy, "POST", uri);
        consider_post(&request, &policy.requests).err()
    };
    let policy = || HttpPolicy::strict().ignore_query(["utm_*"]).sort_query(true);
    for uri in ["/a?utm_source=%3Cscript%3E", "/a?b=1&a=2", "/a?a=1&"] {
        assert_eq!(rule(policy(), uri), Some(Rule::Query), "{uri}");
        assert_eq!(rule(policy().pass_unkeyed_query(true), uri), None, "{uri}: as the policy permits");
        assert_eq!(rule(HttpPolicy::strict(), uri), None, "{uri}: in the key");
    }
    assert_eq!(rule(policy(), "/a?a=1&b=2"), None);
}

#[test]
fn the_hook_sees_the_query_of_the_key() {
    let policy = || HttpPolicy::default().ignore_query(["utm_*"]).key(|parts| Some(parts.uri.to_string()));
    for pass in [false, true] {
        let policy = policy().pass_unkeyed_query(pass);
        assert_eq!(key_of(&policy, "/a?utm_x=1&b=2"), key_of(&policy, "/a?b=2&utm_x=2"));
        assert!(
            key_of(&policy, "/a?utm_x=1&b=2").0.ends_with("/a?b=2"),
            "{:?}",
            key_of(&policy, "/a?utm_x=1&b=2")
        );
    }
}

#[test]
fn a_load_has_the_query_of_its_key_unless_the_policy_passes_it() {
    for uri in ["/a?utm_x=1&b=2#f", "http://h:1/a?utm_x=1&b=2", "http://h?utm_x=1&b=2"] {
        let policy = HttpPolicy::default().ignore_query(["utm_*"]);
        let mut request = of(&policy, "GET", uri);
        policy.requests.rewrite_query(&mut request);
        assert_eq!(request.uri().query(), Some("b=2"), "{uri}");
        let sent = of(&policy, "GET", uri);
        assert_eq!(request.uri().authority(), sent.uri().authority());
        assert_eq!(request.uri().path(), sent.uri().path());
        let policy = policy.pass_unkeyed_query(true);
        let mut request = of(&policy, "GET", uri);
        policy.requests.rewrite_query(&mut request);
        assert_eq!(request.uri(), sent.uri(), "{uri}");
    }
}

#[cfg(feature = "axum")]
mod with_axum {
    use axum::extract::OriginalUri;

    use super::*;

    fn nested(original: &str, uri: &str) -> Request<()> {
        let mut request = Request::get(uri).header("host", "h").body(()).unwrap();
        request.extensions_mut().insert(OriginalUri(original.parse().unwrap()));
        request
    }

    fn key_of(policy: &HttpPolicy, request: &Request<()>) -> String {
        consider(request, false, &policy.requests, CacheKey::from_texts).unwrap().key.to_string()
    }

    #[test]
    fn a_load_sees_the_query_of_the_key_in_its_original_uri() {
        let policy = HttpPolicy::default().ignore_query(["utm_*"]);
        let mut request = nested("/api/a?utm_x=1&b=2", "/a?utm_x=1&b=2");
        policy.requests.rewrite_query(&mut request);
        assert_eq!(*request.uri(), "/a?b=2");
        assert_eq!(request.extensions().get::<OriginalUri>().unwrap().0, "/api/a?b=2");
    }

    #[test]
    fn the_hook_sees_the_query_of_the_key_in_the_original_uri() {
        let policy = HttpPolicy::default()
            .ignore_query(["utm_*"])
            .key(|parts| Some(parts.extensions.get::<OriginalUri>()?.0.to_string()));
        let key = key_of(&policy, &nested("/a?utm_x=1&b=2", "/a?utm_x=1&b=2"));
        assert_eq!(key, key_of(&policy, &nested("/a?b=2", "/a?b=2")));
    }

    /// The inner service sees the same in both cases, so nothing more belongs in the key.
    #[test]
    fn a_layer_that_removes_ignored_parameters_makes_no_other_key() {
        let policy = HttpPolicy::default().ignore_query(["utm_*"]);
        let key = key_of(&policy, &nested("/a?utm_x=1&b=2", "/a?b=2"));
        assert_eq!(key, "http:http:h:/a?b=2");
        let added = key_of(&policy, &nested("/a?utm_x=1&b=2", "/a?b=2&c=3"));
        assert_eq!(added, "http:http:h:/a?b=2:/a?b=2&c=3", "what a layer adds is in the key");
    }
}

fn pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-c]{0,2}(=[a-c%+]{0,3})?",
        "utm_[a-b]{0,2}(=[ -%'-~]{0,4})?",
        "(u|%75|%5)(tm|%74m)(_|%5F|%5f)(=x)?",
        "[ -%'-~]{0,6}",
    ];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.join("&"))
}

proptest! {
    #[test]
    fn what_remains_is_a_valid_uri_that_the_rules_do_not_change(query in pieces(), is_sorted: bool, only: bool) {
        let rules = rules(&["utm_*"], only.then_some(&["a*", "b", "utm_a"][..]), is_sorted);
        let Ok(uri) = format!("/p?{query}").parse::<Uri>() else { return Ok(()) };
        let sent = uri.path_and_query().unwrap().as_str().to_owned();
        let keyed = rules.keyed(&sent);
        prop_assert_eq!(rules.keyed(&keyed), keyed.clone());
        let rewritten = rules.keyed_uri(&uri).unwrap_or(uri);
        prop_assert_eq!(rewritten.path_and_query().unwrap().as_str(), &*keyed);
        // Each remaining piece was sent, as often as it remains, and none of them is ignored.
        let mut sent: Vec<_> = sent.split_once('?').map_or(Vec::new(), |(_, query)| query.split('&').collect());
        for piece in keyed.split_once('?').into_iter().flat_map(|(_, query)| query.split('&')) {
            let at = sent.iter().position(|sent| *sent == piece);
            prop_assert!(at.is_some(), "{} is new", piece);
            sent.remove(at.unwrap_or_default());
            prop_assert!(!piece.starts_with("utm_"));
        }
    }
}
