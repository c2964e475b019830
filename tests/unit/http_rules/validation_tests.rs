use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;

use super::*;

const EARLY: &str = "Sun, 06 Nov 1994 08:49:36 GMT";
const AT: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
const LATE: &str = "Sun, 06 Nov 1994 08:49:38 GMT";

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(784_111_777 + 3600)
}

/// Header lines.
type Lines<'a> = &'a [(&'a str, &'a str)];

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers
            .append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    headers
}

fn lines(headers: &HeaderMap) -> Vec<String> {
    let mut lines: Vec<_> = headers
        .iter()
        .map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
        .collect();
    lines.sort();
    lines
}

#[test]
fn a_validator_is_an_entity_tag_or_a_date() {
    let cases: [(Lines<'_>, bool); 8] = [
        (&[("etag", "\"a\"")], true),
        (&[("etag", "W/\"a\"")], true),
        (&[("etag", "a")], true),
        (&[("last-modified", AT)], true),
        (&[("last-modified", "soon")], false),
        (&[("etag", "")], false),
        (&[("etag", "\"a\""), ("etag", "\"b\"")], false),
        (&[], false),
    ];
    for (fields, has) in cases {
        assert_eq!(has_validator(&headers(fields), now()), has, "RFC 9110, 8.8: {fields:?}");
    }
}

#[test]
fn a_validation_sends_both_validators_and_the_triggering_requests_headers() {
    let mut request = headers(&[
        ("if-none-match", "\"mine\""),
        ("if-modified-since", EARLY),
        ("if-range", "\"mine\""),
        ("range", "bytes=0-1"),
        ("accept-language", "de"),
        ("req-num", "2"),
    ]);
    add_conditions(&mut request, &headers(&[("etag", "W/\"a\""), ("last-modified", AT), ("req-num", "1")]));
    assert_eq!(
        lines(&request),
        ["accept-language: de", &format!("if-modified-since: {AT}"), "if-none-match: W/\"a\"", "req-num: 2"],
        "RFC 9111, 4.3.1; A9"
    );
    add_conditions(&mut request, &headers(&[("last-modified", AT)]));
    assert_eq!(lines(&request), ["accept-language: de", &format!("if-modified-since: {AT}"), "req-num: 2"]);
    add_conditions(
        &mut request,
        &headers(&[("etag", "\"a\""), ("etag", "\"b\""), ("last-modified", AT), ("last-modified", AT)]),
    );
    assert_eq!(lines(&request), ["accept-language: de", "req-num: 2"], "two are no validator");
}

fn not_modified_for(condition: &[(&str, &str)], stored: &[(&str, &str)]) -> bool {
    is_not_modified(&headers(condition), StatusCode::OK, &headers(stored), now(), now())
}

#[test]
fn a_client_with_the_stored_entity_tag_gets_a_304() {
    let strong = [("etag", "\"abcdef\"")];
    let weak = [("etag", "W/\"abcdef\"")];
    let cases = [
        ("\"abcdef\"", &strong, true),
        ("W/\"abcdef\"", &strong, true),
        ("\"abcdef\"", &weak, true),
        ("W/\"abcdef\"", &weak, true),
        ("\"abcdef\", \"1234\", \"5678\"", &strong, true),
        ("\"1234\", \"abcdef\", \"5678\"", &strong, true),
        ("\"1234\",\"5678\",\"abcdef\"", &strong, true),
        ("*", &strong, true),
        (" * ", &strong, true),
        (", \"abcdef\" ,", &strong, true),
        ("\"1234\"", &strong, false),
        ("\"ABCDEF\"", &strong, false),
        ("\"x, \"abcdef\"", &strong, false),
        ("abcdef", &strong, false),
        ("\"*\"", &strong, false),
        ("", &strong, false),
    ];
    for (tag, stored, expected) in cases {
        let is_304 = not_modified_for(&[("if-none-match", tag)], stored);
        assert_eq!(is_304, expected, "RFC 9110, 13.1.2; A9: {tag} {stored:?}");
    }
    let comma = [("etag", "\"a,b\"")];
    assert!(not_modified_for(&[("if-none-match", "\"x\", \"a,b\"")], &comma), "a comma is part of a tag");
    assert!(!not_modified_for(&[("if-none-match", "\"a\", \"b\"")], &comma));
    assert!(not_modified_for(&[("if-none-match", "\"x\""), ("if-none-match", "\"abcdef\"")], &strong));
    assert!(not_modified_for(&[("if-none-match", "\"abcdefü\"")], &[("etag", "\"abcdefü\"")]), "obs-text");
    assert!(!not_modified_for(&[("if-none-match", "\"a\"")], &[]));
    assert!(not_modified_for(&[("if-none-match", "*")], &[]), "there is a representation");
}

#[test]
fn an_entity_tag_takes_precedence_over_a_date() {
    let stored = [("etag", "\"a\""), ("last-modified", AT)];
    assert!(
        not_modified_for(&[("if-none-match", "\"a\""), ("if-modified-since", EARLY)], &stored),
        "RFC 9110, 13.2.2"
    );
    assert!(!not_modified_for(&[("if-none-match", "\"b\""), ("if-modified-since", LATE)], &stored));
    assert!(!not_modified_for(&[("if-none-match", ""), ("if-modified-since", LATE)], &stored));
}

#[test]
fn a_client_with_a_copy_since_the_last_change_gets_a_304() {
    let cases: [(&str, Lines<'_>, bool); 13] = [
        (AT, &[("last-modified", AT)], true),
        (LATE, &[("last-modified", AT)], true),
        ("Sunday, 06-Nov-94 08:49:37 GMT", &[("last-modified", AT)], true),
        ("Sun Nov  6 08:49:37 1994", &[("last-modified", AT)], true),
        (EARLY, &[("last-modified", AT)], false),
        ("soon", &[("last-modified", AT)], false),
        // Without `Last-Modified`, only the time when the response was generated counts (RFC 9111, 4.3.2).
        (AT, &[("date", AT)], true),
        (EARLY, &[("date", AT)], false),
        (LATE, &[("last-modified", "soon"), ("date", AT)], false),
        (LATE, &[("last-modified", LATE), ("date", AT)], true),
        (AT, &[], false),
        ("Sun, 06 Nov 1994 09:49:37 GMT", &[], true),
        ("Sun, 06 Nov 1994 09:49:36 GMT", &[], false),
    ];
    for (since, stored, expected) in cases {
        let is_304 = not_modified_for(&[("if-modified-since", since)], stored);
        assert_eq!(is_304, expected, "RFC 9111, 4.3.2: {since} {stored:?}");
    }
    let twice = [("if-modified-since", AT), ("if-modified-since", AT)];
    assert!(!not_modified_for(&twice, &[("last-modified", AT)]));
    assert!(!not_modified_for(&[], &[("last-modified", AT)]), "without a condition the whole is sent");
}

#[test]
fn only_a_200_or_a_part_can_be_not_modified() {
    for status in 100..=599 {
        let status = StatusCode::from_u16(status).unwrap();
        let is_304 =
            is_not_modified(&headers(&[("if-none-match", "*")]), status, &HeaderMap::new(), now(), now());
        assert_eq!(is_304, matches!(status.as_u16(), 200 | 206), "RFC 9111, 4.3.2: {status}");
    }
}

#[test]
fn a_304_carries_the_headers_of_a_200_except_those_of_its_content() {
    let stored = [
        ("cache-control", "max-age=60"),
        ("content-digest", "d"),
        ("content-encoding", "gzip"),
        ("content-language", "de"),
        ("content-length", "5"),
        ("content-location", "/x"),
        ("content-md5", "d"),
        ("content-type", "text/plain"),
        ("date", AT),
        ("etag", "\"a\""),
        ("expires", LATE),
        ("last-modified", EARLY),
        ("trailer", "x"),
        ("vary", "accept"),
        ("x", "1"),
        ("x", "2"),
    ];
    let retained = ["cache-control", "content-location", "date", "etag", "expires", "vary", "x"];
    let expected: Vec<_> = stored
        .iter()
        .filter(|(name, _)| retained.contains(name))
        .map(|(name, value)| format!("{name}: {value}"))
        .collect();
    assert_eq!(lines(&not_modified(&headers(&stored))), expected, "RFC 9110, 15.4.5");
    let dated = headers(&[("last-modified", AT), ("content-length", "5")]);
    assert_eq!(lines(&not_modified(&dated)), [format!("last-modified: {AT}")], "it is the validator");
}

#[test]
fn a_304_confirms_the_stored_response_unless_it_names_another() {
    let cases: [(Lines<'_>, Lines<'_>, bool); 17] = [
        (&[], &[], true),
        // From the conformance suite: the 304 has no validator, and answers the guard's own condition.
        (&[], &[("etag", "\"a\""), ("last-modified", AT)], true),
        (&[("etag", "\"a\"")], &[("etag", "\"a\"")], true),
        (&[("etag", "W/\"a\"")], &[("etag", "W/\"a\"")], true),
        (&[("etag", "W/\"a\"")], &[("etag", "\"a\"")], true),
        // The stored tag is the weak form of the same tag, as with nginx and compression.
        (&[("etag", "\"a\"")], &[("etag", "W/\"a\"")], true),
        (&[("etag", "\"b\"")], &[("etag", "\"a\"")], false),
        (&[("etag", "W/\"b\"")], &[("etag", "W/\"a\"")], false),
        (&[("etag", "\"a\""), ("last-modified", LATE)], &[("etag", "\"a\""), ("last-modified", AT)], true),
        (&[("etag", "\"a\"")], &[], false),
        (&[("etag", "\"a\""), ("last-modified", AT)], &[("last-modified", AT)], true),
        // The stored response has no tag, so the condition was only a date.
        (&[("etag", "\"a\"")], &[("last-modified", AT)], true),
        (&[("etag", "\"a\""), ("last-modified", LATE)], &[("last-modified", AT)], false),
        (&[("last-modified", AT)], &[("last-modified", AT)], true),
        (&[("last-modified", LATE)], &[("last-modified", AT)], false),
        (&[("last-modified", AT)], &[("etag", "\"a\"")], true),
        (&[("last-modified", "soon")], &[("last-modified", AT)], true),
    ];
    for (update, stored, about) in cases {
        let found = is_about(&headers(update), &headers(stored), now());
        assert_eq!(found, about, "RFC 9111, 4.3.4: {update:?} {stored:?}");
    }
}

#[test]
fn a_304_replaces_the_fields_it_carries_and_keeps_the_rest() {
    let stored = headers(&[
        ("age", "100"),
        ("cache-control", "max-age=2"),
        ("content-encoding", "gzip"),
        ("content-length", "5"),
        ("content-type", "text/plain"),
        ("date", EARLY),
        ("etag", "\"a\""),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=1"),
        ("test-header", "A"),
        ("x-frame-options", "deny"),
    ]);
    let update = headers(&[
        ("age", "3"),
        ("cache-control", "max-age=3600"),
        ("connection", "x-hop, close"),
        ("content-encoding", "br"),
        ("content-digest", "of the 304"),
        ("content-foo", "new"),
        ("content-length", "0"),
        ("content-md5", "new"),
        ("content-range", "bytes 0-1/2"),
        ("content-type", "text/plain;charset=utf-8"),
        ("date", AT),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "close"),
        ("set-cookie", "c=1"),
        ("transfer-encoding", "chunked"),
        ("x-frame-options", "sameorigin"),
        ("x-hop", "1"),
    ]);
    let expected = [
        "age: 3",
        "cache-control: max-age=3600",
        "content-encoding: gzip",
        "content-foo: new",
        "content-length: 5",
        "content-md5: new",
        "content-type: text/plain;charset=utf-8",
        &format!("date: {AT}"),
        "etag: \"a\"",
        "set-cookie: c=1",
        "test-header: A",
        "x-frame-options: sameorigin",
    ];
    assert_eq!(lines(&freshened(&stored, &update)), expected, "RFC 9111, 3.2; A10");
}

#[test]
fn a_304_makes_no_tag_a_stronger_one() {
    let cases: [(Lines<'_>, Lines<'_>, &str); 5] = [
        (&[("etag", "W/\"a\"")], &[("etag", "\"a\"")], "W/\"a\""),
        (&[("etag", "W/\"a\"")], &[("etag", "W/\"a\"")], "W/\"a\""),
        (&[("etag", "\"a\"")], &[("etag", "W/\"a\"")], "W/\"a\""),
        (&[("last-modified", AT)], &[("etag", "\"a\"")], ""),
        (&[("last-modified", AT)], &[("etag", "W/\"a\"")], "W/\"a\""),
    ];
    for (stored, update, expected) in cases {
        let merged = freshened(&headers(stored), &headers(update));
        let tag = merged.get("etag").map_or("", |tag| tag.to_str().unwrap());
        assert_eq!(tag, expected, "RFC 9110, 8.8.1; RFC 9111, 4.3.4: {stored:?} {update:?}");
    }
}

#[test]
fn a_304_without_a_date_or_an_age_does_not_inherit_the_stored_age() {
    let stored = headers(&[("date", EARLY), ("age", "100"), ("x", "1")]);
    assert_eq!(lines(&freshened(&stored, &HeaderMap::new())), ["x: 1"], "RFC 9110, 6.6.1; RFC 9111, 4.2.3");
}

#[test]
fn a_head_freshens_its_stored_get() {
    let stored = [("etag", "\"a\""), ("last-modified", AT)];
    let cases: [(u16, Lines<'_>, HeadUpdate); 13] = [
        (200, &[], HeadUpdate::Ignore),
        (200, &[("content-length", "5")], HeadUpdate::Ignore),
        (200, &[("etag", "\"a\"")], HeadUpdate::Freshen),
        (200, &[("etag", "\"a\""), ("last-modified", AT), ("content-length", "5")], HeadUpdate::Freshen),
        (200, &[("last-modified", "Sun Nov  6 08:49:37 1994")], HeadUpdate::Freshen),
        (200, &[("etag", "\"b\"")], HeadUpdate::Invalidate),
        (200, &[("etag", "W/\"a\"")], HeadUpdate::Invalidate),
        (200, &[("last-modified", LATE)], HeadUpdate::Invalidate),
        (200, &[("last-modified", "soon")], HeadUpdate::Invalidate),
        (200, &[("content-length", "6")], HeadUpdate::Invalidate),
        (200, &[("content-length", "5, 6")], HeadUpdate::Invalidate),
        (410, &[("etag", "\"b\"")], HeadUpdate::Ignore),
        (304, &[], HeadUpdate::Ignore),
    ];
    for (status, head, expected) in cases {
        let status = StatusCode::from_u16(status).unwrap();
        let update = head_update((status, &headers(head)), (StatusCode::OK, &headers(&stored)), 5, now());
        assert_eq!(update, expected, "RFC 9111, 4.3.5: {status} {head:?}");
    }
    let tag = headers(&[("etag", "\"a\"")]);
    let (tagged, plain) = ((StatusCode::OK, &tag), (StatusCode::OK, &HeaderMap::new()));
    assert_eq!(head_update(tagged, plain, 5, now()), HeadUpdate::Invalidate);
}

#[test]
fn parts_are_of_one_representation_by_a_strong_validator_only() {
    let cases: [(Lines<'_>, Lines<'_>, bool); 9] = [
        (&[("etag", "\"a\"")], &[("etag", "\"a\"")], true),
        (&[("etag", "\"a\"")], &[("etag", "\"b\"")], false),
        (&[("etag", "W/\"a\"")], &[("etag", "W/\"a\"")], false),
        (&[("etag", "a")], &[("etag", "a")], false),
        (&[("etag", "\"a\"")], &[], false),
        (&[("last-modified", AT), ("date", LATE)], &[("last-modified", AT), ("date", LATE)], true),
        (&[("last-modified", AT), ("date", LATE)], &[("last-modified", EARLY), ("date", LATE)], false),
        (&[("last-modified", AT), ("date", AT)], &[("last-modified", AT), ("date", AT)], false),
        (&[], &[], false),
    ];
    for (one, other, same) in cases {
        let found = is_same_representation(&headers(one), &headers(other), now());
        assert_eq!(found, same, "RFC 9111, 3.4; RFC 9110, 8.8.2.2: {one:?} {other:?}");
    }
}

prop_compose! {
    fn any_headers()(fields in proptest::collection::vec((
        prop_oneof![
            Just("age"), Just("date"), Just("etag"), Just("connection"), Just("content-length"), Just("set-cookie"),
            Just("content-encoding"), Just("cache-control"), Just("keep-alive"), Just("a"), Just("b"),
        ],
        "[a-c, 0-9]{0,6}",
    ), 0..10)) -> HeaderMap {
        headers(&fields.iter().map(|(name, value)| (*name, &**value)).collect::<Vec<_>>())
    }
}

proptest! {
    #[test]
    fn a_merge_twice_is_a_merge_once(stored in any_headers(), update in any_headers()) {
        let once = freshened(&stored, &update);
        prop_assert_eq!(freshened(&once, &update), once);
    }

    #[test]
    fn a_merge_changes_no_length_and_no_coding(stored in any_headers(), update in any_headers()) {
        let merged = freshened(&stored, &update);
        for name in [CONTENT_LENGTH, CONTENT_ENCODING] {
            prop_assert!(merged.get_all(&name).iter().eq(stored.get_all(&name).iter()));
        }
    }

    #[test]
    fn any_list_of_tags_is_read_without_a_panic(list in "[\"W/, ab*]{0,24}", tag in "[\"W/ab]{0,8}") {
        not_modified_for(&[("if-none-match", &list)], &[("etag", &tag)]);
        is_about(&headers(&[("etag", &list)]), &headers(&[("etag", &tag)]), now());
    }

    #[test]
    fn a_tag_is_found_anywhere_in_a_list(before in "(\"[a-c, ]{0,5}\",)?", after in "(, ?W/\"[a-c,]{0,5}\")?") {
        let list = format!("{before}\"d\"{after}");
        prop_assert!(not_modified_for(&[("if-none-match", &list)], &[("etag", "W/\"d\"")]), "{}", list);
    }
}
