use std::collections::HashSet;

use http::HeaderValue;

use super::*;
use crate::key::CacheKey;

/// Header lines.
type Lines<'a> = &'a [(&'static str, &'a str)];

fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
    fields
        .iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
        .fold(HeaderMap::new(), |mut headers, (name, value)| {
            headers.append(name, value);
            headers
        })
}

fn rule(fields: &[(&'static str, &str)]) -> Result<CacheKey, &'static str> {
    let mut request = Request::builder().method("QUERY").uri("/a").body(()).unwrap();
    *request.headers_mut() = headers(fields);
    request.headers_mut().insert("host", HeaderValue::from_static("h"));
    let considered = consider_query(&request, &RequestRules::default(), CacheKey::from_texts);
    considered.map(|considered| considered.key).map_err(Rule::token)
}

#[test]
fn only_the_method_in_upper_case_is_query() {
    for method in ["QUERY", "Query", "query", "QUER", "GET"] {
        assert_eq!(is_query(&Method::from_bytes(method.as_bytes()).unwrap()), method == "QUERY");
    }
}

/// E1
#[test]
fn a_query_has_the_key_of_its_resource_unless_its_head_forbids_that() {
    let plain = Ok(CacheKey::from_parts(["http", "http", "h", "/a"]));
    let kind = ("content-type", "text/plain");
    for field in [
        kind,
        ("content-length", "5"),
        ("transfer-encoding", "chunked"),
        ("expect", "100-continue"),
        ("expect", "100-Continue"),
        ("content-encoding", "gzip"),
        ("if-none-match", "*"),
    ] {
        assert_eq!(rule(&[kind, field]), plain, "{field:?}");
    }
    for (field, expected) in [
        (("expect", "x"), "expect"),
        (("authorization", "x"), "credentials"),
        (("cookie", "a=b"), "credentials"),
        (("cache-control", "no-store"), "no-store"),
        (("upgrade", "h2c"), "upgrade"),
        (("if-match", "*"), "conditional"),
        (("x-http-method-override", "DELETE"), "unkeyed-header"),
    ] {
        assert_eq!(rule(&[kind, field]), Err(expected), "{field:?}");
    }
    for missing in [&[][..], &[("content-type", "")], &[("content-type", " ")], &[("content-language", "de")]]
    {
        assert_eq!(rule(missing), Err("content-type"), "RFC 10008, 2: {missing:?}");
    }
}

#[test]
fn a_head_announces_one_length_or_chunks() {
    let announced = |fields: &[(&'static str, &str)]| announced_length(&headers(fields)).map_err(Rule::token);
    assert_eq!(announced(&[]), Ok(None));
    assert_eq!(announced(&[("transfer-encoding", "chunked")]), Ok(None));
    assert_eq!(announced(&[("content-length", "5")]), Ok(Some(5)));
    assert_eq!(announced(&[("content-length", "5, 5"), ("content-length", "5")]), Ok(Some(5)));
    for bad in [
        &[("content-length", "5"), ("content-length", "6")][..],
        &[("content-length", "x")],
        &[("content-length", "-1")],
        &[("content-length", "5"), ("transfer-encoding", "chunked")],
    ] {
        assert_eq!(announced(bad), Err("content-length"), "B14: {bad:?}");
    }
}

/// E2
#[test]
fn each_byte_of_the_content_and_of_its_fields_tells_queries_apart() {
    let kind = ("content-type", "a/b");
    let all: [(Lines<'_>, &[u8]); 16] = [
        (&[kind], b""),
        (&[kind], b"x"),
        (&[kind], b"X"),
        (&[kind], b"x\0"),
        (&[("content-type", "A/b")], b"x"),
        (&[("content-type", "a/b;c=d")], b"x"),
        (&[("content-type", "a/b; c=d")], b"x"),
        (&[kind, kind], b"x"),
        (&[kind, ("content-encoding", "gzip")], b"x"),
        (&[kind, ("content-encoding", "")], b"x"),
        (&[kind, ("content-language", "gzip")], b"x"),
        (&[kind, ("content-language", "a"), ("content-language", "b")], b"x"),
        (&[kind, ("content-language", "b"), ("content-language", "a")], b"x"),
        (&[kind, ("content-language", "a, b")], b"x"),
        (&[kind, ("content-disposition", "form-data")], b"x"),
        (&[kind, ("content-encoding", "gzip"), ("content-language", "de")], b"x"),
    ];
    let prints: HashSet<_> =
        all.iter().map(|(fields, content)| content_fingerprint(&headers(fields), content)).collect();
    assert_eq!(prints.len(), all.len());
}

#[test]
fn the_order_of_fields_and_what_does_not_describe_the_content_mean_nothing() {
    let print = |fields: &[(&'static str, &str)]| content_fingerprint(&headers(fields), b"x");
    let [kind, coding] = [("content-type", "a/b"), ("content-encoding", "gzip")];
    assert_eq!(print(&[kind, coding]), print(&[coding, kind]));
    for field in
        [("content-length", "1"), ("transfer-encoding", "chunked"), ("accept", "*/*"), ("contents-x", "1")]
    {
        assert_eq!(print(&[kind, field]), print(&[kind]), "{field:?}");
    }
}
