//! The examples of draft-ietf-httpbis-no-vary-search-05 and of web-platform-tests, and what an attacker would send.

use http::HeaderValue;
use proptest::prelude::*;

use super::*;

fn rule(field: &str) -> Option<SearchRule> {
    SearchRule::parse(field.as_bytes())
}

fn response(lines: &[&str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(NO_VARY_SEARCH, HeaderValue::from_bytes(line.as_bytes()).unwrap());
    }
    headers
}

#[track_caller]
fn canonical(field: &str, query: &str) -> String {
    rule(field).unwrap_or_else(|| panic!("{field} has an effect")).canonical(query)
}

/// Section 5.2.1.
#[test]
fn the_drafts_examples_are_parsed_as_it_says() {
    let parsed = |field: &str| rule(field).map(|rule| (rule.names, rule.is_except, rule.ignores_order));
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    for (field, expected) in [
        (r#"params=("a")"#, Some((names(&["a"]), false, false))),
        (r#"except=("x")"#, Some((names(&["x"]), true, false))),
        ("except=()", Some((names(&[]), true, false))),
        ("params=()", None),
        ("key-order=?0", None),
        ("key-order", Some((names(&[]), false, true))),
        ("key-order=?1", Some((names(&[]), false, true))),
        (r#"except=("x"), key-order"#, Some((names(&["x"]), true, true))),
        (r#"params=("utm_source" "utm_medium")"#, Some((names(&["utm_source", "utm_medium"]), false, false))),
        (r#"params=("%C3%A9+%E6%B0%97")"#, Some((names(&["é 気"]), false, false))),
        // Unknown members and parameters have no meaning, and of two members with one name the last counts.
        (r#"params=("a");v=2, unknown=("x" 1), next"#, Some((names(&["a"]), false, false))),
        (r#"params=("a"), params=("b";w)"#, Some((names(&["b"]), false, false))),
        ("unknown-key", None),
        ("", None),
    ] {
        assert_eq!(parsed(field), expected, "{field}");
    }
}

#[test]
fn a_field_that_is_malformed_or_of_another_type_has_no_effect() {
    let long = format!("params=({})", "\"utm_source\" ".repeat(100).trim_end());
    for field in [
        r#"key-order="not a boolean""#,
        r#"params="not an inner list""#,
        "params=(not-a-string)",
        "params=?0",
        "params=?1",
        "params",
        r#"params=?1, except=("x")"#,
        r#"params=("a"), except=("x")"#,
        "params=(), except=()",
        r#"except="not an inner list""#,
        "except=(not-a-string)",
        "except=?1",
        r#"params=("a" 1)"#,
        r#"params=("a""#,
        r#"params=("a"),"#,
        r#"key-order=1, params=("a")"#,
        r#"key-order=(), params=("a")"#,
        r#"params=("é")"#,
        "*",
        &long,
    ] {
        assert_eq!(rule(field), None, "{field}");
    }
    assert_eq!(SearchRule::of(&response(&[r#"params=("a")"#, "key-order=1"])), None, "lines are one field");
    assert_eq!(
        SearchRule::of(&response(&[r#"params=("a")"#, "key-order"])),
        rule(r#"params=("a"), key-order"#)
    );
    assert_eq!(SearchRule::of(&HeaderMap::new()), None);
}

/// Sections 5.3.1 and 6.1, the differences in the spelling of a query under any rule, and the cases of web-platform-tests.
#[test]
fn equivalent_queries_have_one_canonical_query() {
    let all = [
        (r#"params=("%C3%A9+%E6%B0%97")"#, "é 気=1"),
        (r#"params=("%C3%A9+%E6%B0%97")"#, "é+気=2"),
        (r#"params=("%C3%A9+%E6%B0%97")"#, "%C3%A9%20気=3"),
        (r#"params=("%C3%A9+%E6%B0%97")"#, "%C3%A9+%E6%B0%97=4"),
        (r#"params=("a")"#, "a=1&%61&a=&a=%"),
        ("except=()", "a=1&b=2"),
        (r#"except=("c")"#, "a=1&C=2&c%20=3"),
        ("key-order", "&&"),
    ];
    for (field, query) in all {
        assert_eq!(canonical(field, query), "", "{field} {query}");
    }
    for (field, one, other) in [
        ("key-order", "a=x", "%61=%78"),
        ("key-order", "a=é", "a=%C3%A9"),
        ("key-order", "a=%f6", "a=%ef%bf%bd"),
        ("key-order", "a=x&&&&", "a=x"),
        ("key-order", "a=", "a"),
        ("key-order", "a=%20", "a= &"),
        ("key-order", "a=+", "a= &"),
        ("key-order", "a=1&b=2", "b=2&a=1"),
        ("key-order", "b=1&a=1&b=2", "a=1&b=1&b=2"),
        (r#"params=("c")"#, "a=1&b=2&c=3", "c=4&a=1&b=2"),
        (r#"key-order, params=("c")"#, "a=1&b=2&c=3", "b=2&c=4&a=1"),
        (r#"except=("a" "b")"#, "a=1&b=2&c=3", "d=4&a=1&b=2"),
        (r#"key-order, except=("a" "b")"#, "b=2&a=1&c=3", "d=4&a=1&b=2"),
    ] {
        assert_eq!(canonical(field, one), canonical(field, other), "{field}: {one}, {other}");
    }
}

#[test]
fn other_queries_are_kept_apart() {
    for (field, one, other) in [
        (r#"params=("c")"#, "a=1&b=2", "b=2&a=1"),
        (r#"params=("c")"#, "a=1", "a=2"),
        (r#"params=("c")"#, "a=1", "a=1&a=1"),
        (r#"params=("c")"#, "a=1", "A=1"),
        (r#"params=("c")"#, "a=1&C=2", "a=1"),
        (r#"params=("c")"#, "c%00=1", ""),
        (r#"params=("utm_*")"#, "utm_source=1", ""),
        ("key-order", "a=1&a=2", "a=2&a=1"),
        ("key-order", "a=1", ""),
        ("key-order", "a=b%26c=d", "a=b&c=d"),
        ("key-order", "a%3Db=c", "a=b=c"),
        ("key-order", "a=b;c=d", "a=b&c=d"),
        ("key-order", "a=%2B", "a=+"),
        ("key-order", "a=%25%34%31", "a=A"),
        ("key-order", "a=%EF%BB%BFx", "a=x"),
        (r#"except=("a")"#, "a=1", "a=2"),
        (r#"except=("a")"#, "a=1;b=2", "a=1"),
    ] {
        assert_ne!(canonical(field, one), canonical(field, other), "{field}: {one}, {other}");
    }
}

/// B8: characters that a browser would have encoded reach no handler as they are.
#[test]
fn a_canonical_query_has_one_form_of_each_character() {
    for (query, expected) in [
        ("q=<script>", "q=%3Cscript%3E"),
        ("q=a'b\"c", "q=a%27b%22c"),
        ("q=%3cscript%3E", "q=%3Cscript%3E"),
        ("q=a b+c", "q=a%20b%20c"),
        ("q=/../?#", "q=%2F..%2F%3F%23"),
        ("q=%0d%0aset-cookie", "q=%0D%0Aset-cookie"),
        ("q=%", "q=%25"),
        ("=x", "=x"),
    ] {
        assert_eq!(canonical("key-order", query), expected, "{query}");
    }
}

fn request(uri: &str) -> Request<()> {
    Request::get(uri).body(()).unwrap()
}

#[test]
fn a_request_gets_the_canonical_query_and_its_own_back() {
    let rule = Arc::new(rule(r#"key-order, params=("utm_source")"#).unwrap());
    for (uri, expected) in [
        ("/a?utm_source=x", "/a"),
        ("/a?", "/a"),
        ("/%61?b=%41&utm_source=x", "/%61?b=A"),
        ("/a?b=2&a=1", "/a?a=1&b=2"),
        ("http://h/a?utm_source=x&b", "http://h/a?b="),
        ("http://h?utm_source=x", "http://h/"),
    ] {
        let mut head = request(uri);
        let rewritten = RewrittenSearch::of(&mut head, &rule).unwrap();
        assert_eq!(head.uri(), &expected.parse::<Uri>().unwrap(), "{uri}");
        assert!(RewrittenSearch::of(&mut request(expected), &rule).is_none(), "{expected} is canonical");
        rewritten.restore(&mut head);
        assert_eq!(head.uri(), request(uri).uri(), "{uri}");
    }
    for uri in ["/a", "*", "/a?a=1&b=2", "/a?a="] {
        assert!(RewrittenSearch::of(&mut request(uri), &rule).is_none(), "{uri}");
    }
    // A form that is three times as long is no URI any more.
    let long = format!("/a?q={}", "/".repeat(30_000));
    assert!(RewrittenSearch::of(&mut request(&long), &rule).is_none());
}

/// Section 7: the field of the response that is used decides, not the rule that led to it.
#[test]
fn only_a_response_that_says_so_answers_the_query_that_was_sent() {
    let known = Arc::new(rule(r#"params=("utm_source" "size")"#).unwrap());
    let rewritten = RewrittenSearch::of(&mut request("/a?b=1&utm_source=x&size=2"), &known).unwrap();
    for (lines, answers) in [
        (&[r#"params=("utm_source" "size")"#][..], true),
        (&[r#"params=("size" "utm_source" "b")"#], true),
        (&[r#"except=("b")"#], true),
        (&["except=()"], true),
        (&[r#"params=("utm_source")"#], false),
        (&[r#"except=("size")"#], false),
        (&["key-order"], false),
        (&[r#"params=("utm_source" "size")"#, "key-order=1"], false),
        (&["?1"], false),
        (&[""], false),
        (&[], false),
    ] {
        assert_eq!(rewritten.is_answered_by(&response(lines)), answers, "{lines:?}");
    }
}

fn queries() -> impl Strategy<Value = String> {
    prop::collection::vec("(a|b|c|%61|%C3|é|\\+|%20|=|&|;|%|%4|<|\\?|1){0,4}(&?)", 0..6)
        .prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn a_canonical_query_is_its_own_canonical_query(query in queries(), field in prop::sample::select(vec![
        "key-order", r#"params=("a")"#, r#"except=("a" "b")"#, r#"key-order, params=("c" "%C3")"#, "except=()",
    ])) {
        let rule = rule(field).unwrap();
        let once = rule.canonical(&query);
        prop_assert_eq!(rule.canonical(&once), &*once);
        let uri = if once.is_empty() { "/a".to_owned() } else { format!("/a?{once}") };
        prop_assert_eq!(&*crate::http_rules::key::normal_form(&uri), &*uri);
        prop_assert!(uri.parse::<Uri>().is_ok());
    }
}
