use http::HeaderValue;
use proptest::prelude::*;

use super::*;

/// Header lines.
type Lines<'a> = &'a [(&'a str, &'a str)];

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn vary(lines: &[&str]) -> Vary {
    Vary::of(&headers(&lines.iter().map(|line| ("vary", *line)).collect::<Vec<_>>()), &[])
}

fn names(list: &str) -> Names {
    match vary(&[list]) {
        Vary::Names(names) => names,
        other => panic!("{list}: {other:?}"),
    }
}

const EXACT: Normalization = Normalization::Exact;
const CAREFUL: Normalization = Normalization::Careful;

impl Vary {
    /// Whether the response to one request may answer the other.
    fn is_same_for(&self, one: &HeaderMap, other: &HeaderMap, normal: Normalization) -> bool {
        match self {
            Self::Nothing => true,
            Self::Any => false,
            Self::Names(names) => names.fingerprint(one, normal) == names.fingerprint(other, normal),
        }
    }
}

#[test]
fn names_are_read_over_all_lines_in_any_case_and_order() {
    let cases: [(&[&str], &str); 7] = [
        (&["Foo"], "foo"),
        (&["Foo, Bar, Baz"], "bar,baz,foo"),
        (&["Baz, foo", "BAR"], "bar,baz,foo"),
        (&["foo,foo", "Foo"], "foo"),
        (&[",foo,,"], "foo"),
        (&["", " foo\t"], "foo"),
        (&["1,2,3,4,5,6,7,8,8"], "1,2,3,4,5,6,7,8"),
    ];
    for (lines, text) in cases {
        assert_eq!(vary(lines), Vary::Names(names(text)), "RFC 9110, 12.5.5: {lines:?}");
        assert_eq!(names(text).to_text(), text);
        assert_eq!(Names::from_text(text), Some(names(text)));
    }
    for lines in [&[][..], &[""], &[" , ", ""]] {
        assert_eq!(vary(lines), Vary::Nothing, "{lines:?}");
    }
}

#[test]
fn a_star_anywhere_or_too_many_names_match_nothing() {
    let cases: [&[&str]; 12] = [
        &["*"],
        &["*, *"],
        &["*", "*"],
        &[", *"],
        &["", "*"],
        &["*, Foo"],
        &["Foo, *"],
        &["foo", "bar, *"],
        &["foo bar"],
        &["\"foo\""],
        &["é"],
        &["1,2,3,4,5,6,7,8,9"],
    ];
    for lines in cases {
        let any = vary(lines);
        assert_eq!(any, Vary::Any, "RFC 9111, 4.1; A5: {lines:?}");
        assert!(!any.is_same_for(&HeaderMap::new(), &HeaderMap::new(), EXACT));
    }
}

#[test]
fn the_policys_names_are_added_and_do_not_count() {
    let more = [header::ACCEPT, header::COOKIE];
    let eight = headers(&[("vary", "1,2,3,4,5,6,7,8")]);
    let Vary::Names(all) = Vary::of(&eight, &more) else { panic!("ten names") };
    assert_eq!(all.as_slice().len(), 10);
    assert_eq!(Names::from_text(&all.to_text()), Some(all));
    let Vary::Names(own) = Vary::of(&HeaderMap::new(), &more) else { panic!("two names") };
    assert_eq!(own.to_text(), "accept,cookie");
    assert_eq!(Vary::of(&headers(&[("vary", "*")]), &more), Vary::Any);
}

/// A name may contain a star (RFC 9110, 5.6.2). If the stored list of names were refused on reading, no request would find the response,
/// and each would load it.
#[test]
fn a_name_with_a_star_in_it_is_a_name() {
    let Vary::Names(names) = vary(&["*accept, b*"]) else { panic!("two names") };
    assert_eq!(Names::from_text(&names.to_text()), Some(names));
}

#[test]
fn a_list_in_another_form_is_refused() {
    for text in ["", "b,a", "a,a", "A", "a,", ",", "a b", "*", "1,2,3,4,5,6,7,8,9,a,b,c,d,e,f,g,h,i"] {
        assert_eq!(Names::from_text(text), None, "C6: {text:?}");
    }
}

/// Whether two values of a header match. Each is a list of lines.
fn alike(name: &str, one: &[&str], other: &[&str], normal: Normalization) -> bool {
    let of = |lines: &[&str]| headers(&lines.iter().map(|line| (name, *line)).collect::<Vec<_>>());
    Vary::Names(names(name)).is_same_for(&of(one), &of(other), normal)
}

#[test]
fn values_that_mean_the_same_are_alike() {
    let cases: [(&str, &[&str], &[&str]); 12] = [
        ("foo", &["1"], &["1"]),
        ("foo", &[], &[]),
        ("foo", &["1,2"], &[" 1, 2 "]),
        ("foo", &["1, 2"], &["1", "2"]),
        ("foo", &["1\t,\t2"], &["1,2"]),
        ("foo", &["\"\\\"\", 2"], &["\"\\\"\",2"]),
        ("accept-encoding", &["gzip, br"], &["BR", "gzip"]),
        ("accept-encoding", &["gzip;q=1.0, br;q=0.50"], &["br; Q=0.5 ,gzip"]),
        ("accept-language", &["en, de"], &[" en ,   de"]),
        ("user-agent", &["a (b, c)"], &["a (b, c)"]),
        ("cookie", &[" a=1 "], &["a=1"]),
        ("cookie", &["a=1"], &["a=1"]),
    ];
    for (name, one, other) in cases {
        for normal in [EXACT, CAREFUL] {
            assert!(alike(name, one, other, normal), "RFC 9111, 4.1; {name}: {one:?} {other:?}");
        }
    }
}

#[test]
fn values_that_may_mean_something_else_are_not_alike() {
    let cases: [(&str, &[&str], &[&str]); 22] = [
        ("foo", &["1"], &["2"]),
        ("foo", &[], &["1"]),
        ("foo", &[], &[""]),
        ("foo", &["1,2"], &["2,1"]),
        ("foo", &["a"], &["A"]),
        ("foo", &["1 2"], &["12"]),
        ("foo", &["1,2"], &["1,,2"]),
        ("foo", &["1,2"], &["12"]),
        ("foo", &["\"1, 2\""], &["\"1,2\""]),
        ("foo", &["\"\\\", \""], &["\"\\\",\""]),
        ("accept-encoding", &["gzip"], &["gzip;q=0"]),
        ("accept-encoding", &["gzip;q=0.5"], &["gzip;q=0.501"]),
        ("accept-encoding", &["gzip;q=0.256"], &["gzip;q=0"]),
        ("accept-encoding", &["gzip;q=x"], &["gzip"]),
        ("accept-encoding", &["gzip;q=1.5"], &["gzip"]),
        ("accept-language", &["en"], &["en-gb"]),
        ("accept-language", &["en, de;q=0.5"], &["en;q=0.5, de"]),
        ("cookie", &["a=1,2"], &["a=1, 2"]),
        ("cookie", &["a=1; b=2"], &["a=1", "b=2"]),
        ("cookie", &["a=1", "2"], &["a=12"]),
        ("authorization", &["x A"], &["x a"]),
        ("user-agent", &["a (b, c)"], &["a (b,c)"]),
    ];
    for (name, one, other) in cases {
        for normal in [EXACT, CAREFUL] {
            assert!(!alike(name, one, other, normal), "A4, A5; {name}: {one:?} {other:?}");
        }
    }
}

#[test]
fn a_credential_and_free_text_are_compared_as_they_are() {
    let credentials = crate::http_rules::request_settings::CREDENTIAL_HEADERS;
    // Each of these is free text, one date or one origin (RFC 9110), so a comma in it separates nothing.
    let single = ["from", "host", "if-modified-since", "if-range", "if-unmodified-since", "origin", "range"];
    for name in credentials.into_iter().chain(single).chain(["referer", "user-agent"]) {
        assert!(!alike(name, &["a,b"], &["a, b"], EXACT), "B11; RFC 9111, 4.1: {name}");
    }
}

#[test]
fn a_weight_counts_only_as_in_the_grammar() {
    let cases = [
        ("accept", "a/b;x=\"1\"", "a/b;x=\"2\""),
        ("accept", "a/b;x=\"1;q=0;y\"", "a/b;x=\"1;y\";q=0"),
        ("accept", "q=0.5", ";q=0.5"),
        ("accept", "a/b;v=0.5", "a/b;q=0.5"),
        ("accept", "a/b;c", "a/bc"),
        ("accept", "a/b;c=d", "a/b;cd"),
        ("accept", "a/b;c=d", "a/b;c=e"),
        ("accept-encoding", "gzip;q=0.1234", "gzip;q=0.123"),
        ("accept-encoding", "gzip;q=0.1x", "gzip;q=0.82"),
    ];
    for (name, one, other) in cases {
        assert!(!alike(name, &[one], &[other], EXACT), "RFC 9110, 12.4.2; {name}: {one} {other}");
    }
}

#[test]
fn the_spelling_of_preferences_is_ignored_in_strict_mode_only() {
    let cases: [(&str, &[&str], &[&str]); 7] = [
        ("accept-language", &["en, de"], &["de, en"]),
        ("accept", &["a/b, c/d"], &["c/d, a/b"]),
        ("accept-language", &["en, de"], &["eN, De"]),
        ("accept", &["application/json"], &["Application/JSON"]),
        ("accept-language", &["de;q=0.5, en"], &["en;q=1.000,", ",de ; q = 0.500"]),
        ("accept", &["text/html;level=1;q=0.3, */*"], &["*/*", "Text/HTML; level=1; q=0.3"]),
        ("accept-charset", &["utf-8, x;q=0.5"], &["UTF-8,x; q=0.5"]),
    ];
    for (name, one, other) in cases {
        assert!(alike(name, one, other, EXACT), "RFC 9110, 12.4.2: {name}: {one:?} {other:?}");
        assert!(
            !alike(name, one, other, CAREFUL),
            "many origins look for one spelling: {name}: {one:?} {other:?}"
        );
    }
}

#[test]
fn several_names_are_compared_each() {
    let one = headers(&[("foo", "1"), ("bar", "abc"), ("baz", "789")]);
    let all = Vary::Names(names("Foo, Bar, Baz"));
    let cases: [(Lines<'_>, bool); 7] = [
        (&[("foo", "1"), ("bar", "abc"), ("baz", "789")], true),
        (&[("baz", "789"), ("other", "3"), ("bar", "abc"), ("foo", "1")], true),
        (&[("foo", "2"), ("bar", "abc"), ("baz", "789")], false),
        (&[("foo", "1"), ("baz", "789"), ("bar", "abcde")], false),
        (&[("foo", "1"), ("baz", "789")], false),
        (&[("foo", "abc"), ("bar", "1"), ("baz", "789")], false),
        (&[], false),
    ];
    for (fields, same) in cases {
        assert_eq!(all.is_same_for(&one, &headers(fields), EXACT), same, "RFC 9111, 4.1: {fields:?}");
    }
    let omitted = headers(&[("foo", "1"), ("baz", "789")]);
    assert!(all.is_same_for(&omitted, &omitted.clone(), EXACT), "absent in both");
}

#[test]
fn a_variant_is_selected_by_its_values_else_by_the_language_preferred_to_all() {
    let list = names("accept-language, foo");
    let german = headers(&[("content-language", "de-AT")]);
    let variants = [
        Variant::of(&list, &headers(&[("accept-language", "en, de")]), &german, EXACT),
        Variant::of(&list, &headers(&[("accept-language", "fr"), ("foo", "1")]), &HeaderMap::new(), EXACT),
    ];
    let cases: [(Lines<'_>, Option<usize>); 15] = [
        (&[("accept-language", "de, en")], Some(0)),
        (&[("accept-language", "fr"), ("foo", "1")], Some(1)),
        (&[("accept-language", "fr;q=0.5, de;q=1.0")], Some(0)),
        (&[("accept-language", "fr;q=0.5, de;q=0.999")], Some(0)),
        // A number above 1 is no weight (RFC 9110, 12.4.2).
        (&[("accept-language", "fr, de;q=1.001")], None),
        (&[("accept-language", "DE-at")], Some(0)),
        (&[("accept-language", "de;q=0.001")], Some(0)),
        (&[("accept-language", "de, fr")], None),
        (&[("accept-language", "fr, de;q=0.9")], None),
        (&[("accept-language", "d")], None),
        (&[("accept-language", "de-at-1996")], None),
        (&[("accept-language", "*")], None),
        (&[("accept-language", "de;q=0")], None),
        (&[("accept-language", "de"), ("foo", "1")], None),
        (&[], None),
    ];
    for (fields, variant) in cases {
        let request = headers(fields);
        assert_eq!(Variant::select(&list, &request, &variants, EXACT), variant, "RFC 9111, 4.1: {fields:?}");
    }
    let request = headers(&[("accept-language", "fr;q=0.5, de;q=1.0")]);
    assert_eq!(Variant::select(&list, &request, &variants, CAREFUL), None);
}

#[test]
fn a_language_selects_only_a_valid_tag_of_a_varying_response() {
    let request = headers(&[("accept-language", "en")]);
    let language = |list: &str, response: &[(&str, &str)]| {
        Variant::of(&names(list), &request, &headers(response), EXACT).language.map(|(_, tag)| tag)
    };
    assert_eq!(language("accept-language", &[("content-language", " De ")]), Some("de".to_owned()));
    assert_eq!(language("foo", &[("content-language", "de")]), None);
    assert_eq!(language("accept-language", &[("content-language", "de, en")]), None);
    assert_eq!(language("accept-language", &[("content-language", "de"), ("content-language", "en")]), None);
    assert_eq!(language("accept-language", &[("content-language", "")]), None);
    assert_eq!(language("accept-language", &[]), None);
}

#[test]
fn a_fingerprint_is_the_same_for_every_node_that_shares_the_store() {
    let print = names("foo, bar").fingerprint(&headers(&[("foo", "1, 2")]), CAREFUL);
    let mut text = b"vary-1".to_vec();
    for field in [&b"bar"[..], b"", b"foo", b"=", b"1,2"] {
        text.extend_from_slice(&(field.len() as u64).to_le_bytes());
        text.extend_from_slice(field);
    }
    assert_eq!(print.0, <[u8; 32]>::from(Sha256::digest(&text)), "B1: each field has its length before it");
    assert_eq!(print.short(), print.0[..8], "A5: or all variants would count as one");
}

#[test]
fn a_fingerprint_shows_nothing_of_the_values() {
    let names = names("authorization");
    let print = names.fingerprint(&headers(&[("authorization", "secret")]), EXACT);
    assert!(!format!("{print} {print:?}").contains("secret"), "C9");
    assert_eq!(print.to_string().len(), 64);
    assert_eq!(format!("{print:?}"), format!("Fingerprint({print})"));
}

proptest! {
    #[test]
    fn order_between_fields_and_space_around_commas_do_not_matter(
        mut fields in proptest::collection::vec(("[a-c]", "[a-z0-9]{0,4}"), 0..6), space in "[ \t]{0,3}",
    ) {
        let all = Vary::Names(names("a,b,c"));
        let one = headers(&fields.iter().map(|(name, value)| (&**name, &**value)).collect::<Vec<_>>());
        // A stable sort, so that lines of the same name keep their order, which may have a meaning.
        fields.sort_by(|a, b| b.0.cmp(&a.0));
        let mut joined = HeaderMap::new();
        for name in ["c", "b", "a"] {
            let values: Vec<_> = fields.iter().filter(|field| field.0 == name).map(|field| &*field.1).collect();
            if !values.is_empty() {
                let line = values.join(&format!("{space},{space}"));
                joined.append(name.parse::<HeaderName>().unwrap(), line.parse().unwrap());
            }
        }
        prop_assert!(all.is_same_for(&one, &joined, CAREFUL));
    }

    #[test]
    fn a_list_of_codings_is_alike_in_any_order(
        mut codings in proptest::collection::vec("[a-z]{1,4}(;q=0\\.[0-9]{1,3})?", 1..5), by in 0_usize..5,
    ) {
        let one = codings.join(", ");
        let by = by % codings.len();
        codings.rotate_left(by);
        prop_assert!(alike("accept-encoding", &[&one], &[&codings.join(",")], CAREFUL));
        prop_assert!(alike("accept-language", &[&one], &[&codings.join(",")], EXACT));
    }

    #[test]
    fn other_words_are_another_variant(one in "[a-z]{1,6}(,[a-z]{1,6}){0,3}", other in "[a-z]{1,6}(,[a-z]{1,6}){0,3}") {
        for name in ["foo", "cookie"] {
            prop_assert_eq!(alike(name, &[&one], &[&other], EXACT), one == other);
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(line in proptest::collection::vec(0x20u8..0xff, 0..48)) {
        let line: Vec<_> = line.into_iter().filter(|&byte| byte != 0x7f).collect();
        let value = HeaderValue::from_bytes(&line).unwrap();
        let list = names("accept, accept-encoding, accept-language, cookie, foo");
        let mut request = HeaderMap::new();
        for name in list.as_slice() {
            request.append(name.clone(), value.clone());
        }
        Variant::select(&list, &request, &[Variant::of(&list, &request, &request, EXACT)], EXACT);
        let mut response = HeaderMap::new();
        response.append(header::VARY, value);
        Vary::of(&response, &[]);
    }
}
