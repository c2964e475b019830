use std::time::{Duration, UNIX_EPOCH};

use http::header::HeaderName;
use proptest::prelude::*;

use super::*;

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn part(first: u64, last: u64, complete: u64) -> Part {
    Part { first, last, complete: Some(complete) }
}

fn answer_to(range: &str, length: u64) -> RangeAnswer {
    range_answer(&headers(&[("range", range)]), &HeaderMap::new(), length, UNIX_EPOCH)
}

#[test]
fn a_range_of_a_stored_whole_is_a_part() {
    let cases = [
        ("bytes=0-1", part(0, 1, 11)),
        ("bytes=1-", part(1, 10, 11)),
        ("bytes=-1", part(10, 10, 11)),
        ("bytes=-5", part(6, 10, 11)),
        ("bytes=-99", part(0, 10, 11)),
        ("bytes=0-", part(0, 10, 11)),
        ("bytes=10-10", part(10, 10, 11)),
        ("bytes=5-99", part(5, 10, 11)),
        ("BYTES=0-1", part(0, 1, 11)),
        ("bytes= 0-1 ", part(0, 1, 11)),
        ("bytes=0-1,", part(0, 1, 11)),
        ("bytes=000-001", part(0, 1, 11)),
        ("bytes=0-99999999999999999999999", part(0, 10, 11)),
    ];
    for (range, expected) in cases {
        assert_eq!(answer_to(range, 11), RangeAnswer::Part(expected), "RFC 9110, 14.1.2; A9: {range}");
    }
}

#[test]
fn a_range_beyond_the_end_cannot_be_satisfied() {
    for range in ["bytes=11-", "bytes=11-12", "bytes=99999999999999999999-", "bytes=-0"] {
        assert_eq!(answer_to(range, 11), RangeAnswer::Unsatisfiable, "RFC 9110, 14.1.2: {range}");
    }
    assert_eq!(answer_to("bytes=0-", 0), RangeAnswer::Unsatisfiable);
    assert_eq!(answer_to("bytes=-1", 0), RangeAnswer::Whole);
    let headers = unsatisfiable(&HeaderMap::new(), 11);
    assert_eq!(headers[CONTENT_RANGE], "bytes */11", "RFC 9110, 15.5.17");
    assert_eq!(headers[ACCEPT_RANGES], "bytes", "RFC 9110, 14.3: others would do");
    assert_eq!(headers[CONTENT_LENGTH], "0");
}

#[test]
fn anything_but_a_single_range_is_answered_with_the_whole() {
    let ranges = [
        "bytes=0-1,3-4",
        "bytes=0-1, -1",
        "bytes=2-1",
        "bytes=",
        "bytes=,",
        "bytes=-",
        "bytes=a-1",
        "bytes=1-b",
        "bytes=+1-2",
        "bytes=0 - 1",
        "bytes 0-1",
        "bytes",
        "",
        "items=0-1",
        "bytes=0x1-2",
        "bytes=--1",
    ];
    for range in ranges {
        assert_eq!(answer_to(range, 11), RangeAnswer::Whole, "RFC 9110, 14.2: {range}");
    }
    let twice = headers(&[("range", "bytes=0-1"), ("range", "bytes=0-1")]);
    assert_eq!(range_answer(&twice, &HeaderMap::new(), 11, UNIX_EPOCH), RangeAnswer::Whole);
    assert_eq!(range_answer(&HeaderMap::new(), &HeaderMap::new(), 11, UNIX_EPOCH), RangeAnswer::Whole);
}

#[test]
fn if_range_requires_the_very_same_representation() {
    let now = UNIX_EPOCH + Duration::from_secs(1_795_262_400);
    let modified = "Sun, 06 Nov 1994 08:49:37 GMT";
    let stored: &[(&str, &str)] =
        &[("etag", "\"a\""), ("last-modified", modified), ("date", "Sun, 06 Nov 1994 08:49:38 GMT")];
    let weak: &[(&str, &str)] = &[("etag", "W/\"a\""), ("last-modified", modified), ("date", modified)];
    let cases = [
        ("\"a\"", stored, true),
        ("\"b\"", stored, false),
        ("W/\"a\"", weak, false),
        ("\"a\"", weak, false),
        ("\"a\"", &[], false),
        (modified, stored, true),
        ("Sunday, 06-Nov-94 08:49:37 GMT", stored, true),
        ("Sun, 06 Nov 1994 08:49:38 GMT", stored, false),
        ("Sun, 06 Nov 1994 08:49:36 GMT", stored, false),
        (modified, weak, false),
        (modified, &stored[..2], false),
        ("soon", stored, false),
        ("", stored, false),
    ];
    for (condition, stored, holds) in cases {
        let request = headers(&[("range", "bytes=0-1"), ("if-range", condition)]);
        let expected = if holds { RangeAnswer::Part(part(0, 1, 11)) } else { RangeAnswer::Whole };
        let answer = range_answer(&request, &headers(stored), 11, now);
        assert_eq!(answer, expected, "RFC 9110, 13.1.5; A9: {condition} {stored:?}");
    }
    let twice = headers(&[("if-range", "\"a\""), ("if-range", "\"a\"")]);
    assert!(!if_range_holds(&twice, &headers(stored), now));
}

fn content_range(text: &str) -> Option<Part> {
    Part::of_response(&headers(&[("content-range", text)]))
}

#[test]
fn the_position_of_a_part_is_read_or_refused() {
    assert_eq!(content_range("bytes 4-8/10"), Some(part(4, 8, 10)));
    assert_eq!(content_range("Bytes 0-0/1"), Some(part(0, 0, 1)));
    assert_eq!(content_range("bytes 4-8/*"), Some(Part { first: 4, last: 8, complete: None }));
    let unsound = [
        "bytes */10",
        "bytes 8-4/10",
        "bytes 4-10/10",
        "bytes 4-8",
        "bytes 4/10",
        "bytes=4-8/10",
        "items 4-8/10",
        "bytes 4-8/x",
        "bytes a-8/10",
        "bytes -8/10",
        "bytes 4-/10",
        "bytes 4/8-10",
        "",
        "bytes",
        "bytes 4-8/",
        "bytes 4-8/10, bytes 1-2/10",
    ];
    for text in unsound {
        assert_eq!(content_range(text), None, "RFC 9110, 14.4: {text}");
    }
    let twice = headers(&[("content-range", "bytes 4-8/10"), ("content-range", "bytes 4-8/10")]);
    assert_eq!(Part::of_response(&twice), None);
    assert_eq!(Part::of_response(&HeaderMap::new()), None, "several parts: multipart/byteranges");
}

#[test]
fn a_part_with_a_wrong_length_is_stored_in_strict_mode_only() {
    let cases = [
        ("bytes 4-8/10", 5, Some(part(4, 8, 10)), Some(part(4, 8, 10))),
        // From the conformance suite, for strict mode: the part ends the whole, so the whole ends where the content ends.
        ("bytes 4-9/10", 5, None, Some(part(4, 8, 9))),
        ("bytes 4-9/10", 7, None, Some(part(4, 10, 11))),
        ("bytes 4-7/10", 5, None, Some(part(4, 8, 10))),
        ("bytes 4-7/10", 6, None, Some(part(4, 9, 10))),
        ("bytes 4-7/10", 7, None, Some(Part { first: 4, last: 10, complete: None })),
        ("bytes 4-7/10", 9, None, Some(Part { first: 4, last: 12, complete: None })),
        ("bytes 4-7/*", 5, None, Some(Part { first: 4, last: 8, complete: None })),
        ("bytes 4-8/10", 0, None, None),
        ("bytes 18446744073709551614-18446744073709551614/*", 5, None, None),
    ];
    for (text, length, careful, strict_rfc) in cases {
        let part = content_range(text).unwrap();
        assert_eq!(part.with_content(length, false), careful, "RFC 9110, 14.4: {text}, {length} bytes");
        assert_eq!(part.with_content(length, true), strict_rfc, "{text}, {length} bytes");
    }
}

#[test]
fn a_part_of_a_stored_part_is_found() {
    let from_part =
        |range: &str, stored: Part| ByteRange::of(&headers(&[("range", range)])).unwrap().of_part(stored);
    // The content "01234" under `bytes 4-9/10`, as in the conformance suite.
    let stored = content_range("bytes 4-9/10").unwrap().with_content(5, true).unwrap();
    for (range, text) in [("bytes=-5", "01234"), ("bytes=6-8", "234"), ("bytes=6-", "234"), ("bytes=-1", "4")]
    {
        let found = from_part(range, stored).unwrap();
        assert_eq!(&"01234"[found.within(stored.first).unwrap()], text, "RFC 9111, 3.3: {range}");
    }
    let stored = part(4, 8, 10);
    assert_eq!(from_part("bytes=4-8", stored), Some(stored));
    assert_eq!(from_part("bytes=5-5", stored), Some(part(5, 5, 10)));
    for range in ["bytes=3-5", "bytes=5-9", "bytes=5-", "bytes=-2", "bytes=0-", "bytes=10-", "bytes=-0"] {
        assert_eq!(from_part(range, stored), None, "{range}");
    }
    let open = Part { complete: None, ..stored };
    assert_eq!(from_part("bytes=5-8", open), Some(Part { first: 5, last: 8, complete: None }));
    assert_eq!(from_part("bytes=5-", open), None);
    assert_eq!(from_part("bytes=-1", open), None);
}

#[test]
fn parts_that_touch_are_joined_until_they_are_the_whole() {
    let cases = [
        (part(0, 4, 10), part(5, 9, 10), Some(part(0, 9, 10))),
        (part(5, 9, 10), part(0, 4, 10), Some(part(0, 9, 10))),
        (part(0, 6, 10), part(4, 9, 10), Some(part(0, 9, 10))),
        (part(0, 9, 10), part(4, 5, 10), Some(part(0, 9, 10))),
        (part(0, 3, 10), part(5, 9, 10), None),
        (part(0, 4, 10), part(5, 9, 11), None),
        (Part { complete: None, ..part(0, 4, 10) }, part(5, 9, 10), Some(part(0, 9, 10))),
        (
            Part { complete: None, ..part(0, 4, 10) },
            Part { complete: None, ..part(3, 5, 10) },
            Some(Part { first: 0, last: 5, complete: None }),
        ),
        (Part { complete: None, ..part(0, 20, 30) }, part(5, 9, 10), None),
        (Part { complete: None, ..part(0, 10, 30) }, part(5, 9, 10), None),
    ];
    for (one, other, expected) in cases {
        assert_eq!(one.joined(&other), expected, "RFC 9111, 3.4: {one:?} {other:?}");
        assert_eq!(other.joined(&one), expected, "either way");
    }
    let (all, content) = join((part(0, 6, 10), b"0123456"), (part(4, 9, 10), b"EFGHIJ")).unwrap();
    assert!(all.is_whole() && !part(0, 8, 10).is_whole() && !part(1, 9, 10).is_whole());
    assert_eq!(content, b"0123EFGHIJ", "the new bytes count");
    let (all, content) = join((part(0, 3, 10), b"0123"), (part(4, 9, 10), b"456789")).unwrap();
    assert_eq!((all, &content[..]), (part(0, 9, 10), &b"0123456789"[..]), "they only touch");
    assert_eq!(join((part(0, 6, 10), b"012"), (part(4, 9, 10), b"EFGHIJ")), None, "of another length");
    assert_eq!(
        join((part(0, 3, 10), b"01234"), (part(4, 9, 10), b"56789")),
        None,
        "as long as both, together"
    );
}

#[test]
fn the_head_of_a_part_states_its_position() {
    let mut head = headers(&[("content-length", "11"), ("etag", "\"a\""), ("a", "1")]);
    part(0, 1, 11).write(&mut head);
    assert_eq!(head[CONTENT_RANGE], "bytes 0-1/11");
    assert_eq!(head[CONTENT_LENGTH], "2");
    assert_eq!(
        (&head["a"], &head["etag"]),
        (&"1".parse().unwrap(), &"\"a\"".parse().unwrap()),
        "RFC 9110, 15.3.7"
    );
    Part { first: 2, last: 3, complete: None }.write(&mut head);
    assert_eq!(head[CONTENT_RANGE], "bytes 2-3/*");
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(text in "[bytes=0-9,/* -]{0,24}", length: u64) {
        let found = answer_to(&text, length);
        if let RangeAnswer::Part(part) = found {
            prop_assert!(part.first <= part.last && part.last < length);
            prop_assert!(part.length() <= length);
        }
        if let Some(part) = content_range(&text) {
            part.with_content(length, true);
            part.length();
            part.within(length);
        }
    }

    #[test]
    fn arithmetic_never_panics(
        range in prop_oneof![
            any::<u64>().prop_map(ByteRange::Last),
            (any::<u64>(), any::<Option<u64>>()).prop_map(|(a, b)| ByteRange::From(a, b)),
        ],
        (a, b, c) in any::<(u64, u64, u64)>(),
        (d, e, f) in any::<(u64, u64, Option<u64>)>(),
    ) {
        range.of_whole(c);
        let sound = |first: u64, last: u64, complete: Option<u64>| {
            (first <= last && complete.is_none_or(|complete| last < complete)).then_some(Part { first, last, complete })
        };
        let one = sound(a.min(b), a.max(b), (c > a.max(b)).then_some(c)).unwrap();
        if let Some(part) = range.of_part(one) {
            prop_assert!(one.first <= part.first && part.last <= one.last);
        }
        if let Some(other) = sound(d, e, f) {
            if let Some(both) = one.joined(&other) {
                prop_assert_eq!((both.first, both.last), (one.first.min(other.first), one.last.max(other.last)));
                prop_assert!(both.complete.is_none_or(|complete| both.last < complete));
            }
            join((one, b"x"), (other, b"y"));
        }
        for strict_rfc in [false, true] {
            if let Some(part) = one.with_content(d, strict_rfc) {
                prop_assert!(part.first <= part.last && part.complete.is_none_or(|complete| part.last < complete));
                prop_assert_eq!(part.length(), d);
            }
        }
    }

    #[test]
    fn a_part_is_the_same_from_the_whole_and_from_a_part(first in 0_usize..20, last in 0_usize..20, from in 0_u64..20, to in 0_u64..20) {
        let whole = b"abcdefghijklmnopqrst";
        prop_assume!(first <= last && from <= to);
        let stored = part(first as u64, last as u64, 20);
        let range = ByteRange::From(from, Some(to));
        let RangeAnswer::Part(of_whole) = range.of_whole(20) else { panic!("within the whole") };
        if let Some(found) = range.of_part(stored) {
            prop_assert_eq!(&whole[of_whole.within(0).unwrap()], &whole[first..=last][found.within(stored.first).unwrap()]);
        }
    }
}
