use super::*;

fn parse(lines: &[&str]) -> CacheControl {
    let values: Vec<_> = lines.iter().map(|line| HeaderValue::from_str(line).unwrap()).collect();
    CacheControl::parse(&values)
}

#[test]
fn a_number_is_read_or_counts_as_stale() {
    let cases = [
        ("max-age=60", Some(60)),
        ("MaX-aGe=60", Some(60)),
        ("max-age=\"60\"", Some(60)),
        ("max-age=0060", Some(60)),
        (" \tmax-age=60 ,", Some(60)),
        ("max-age=2147483648", Some(LONGEST_SECONDS)),
        ("max-age=99999999999999999999999999", Some(LONGEST_SECONDS)),
        ("max-age=-1", Some(0)),
        ("max-age=+1", Some(0)),
        ("max-age='60'", Some(0)),
        ("max-age=60a", Some(0)),
        ("max-age=a60", Some(0)),
        ("max-age=60.0", Some(0)),
        ("max-age=6 0", Some(0)),
        ("max-age= 60", Some(0)),
        ("max-age =60", Some(0)),
        ("max-age\t=60", Some(0)),
        ("max-age=\"60", Some(0)),
        ("max-age=\"\"", Some(0)),
        ("max-age=", Some(0)),
        ("max-age", Some(0)),
        ("max-age=60;x", Some(0)),
        ("x;max-age=60", Some(0)),
        ("max-age=60, max-age=30", Some(30)),
        ("max-age=30, max-age=60", Some(30)),
        ("max-age=60, max-age=x", Some(0)),
        ("x-max-age=60", None),
        ("max-age60", None),
        ("", None),
    ];
    for (text, seconds) in cases {
        assert_eq!(parse(&[text]).max_age, seconds, "{text}");
        let shared = text.to_lowercase().replace("max-age", "s-maxage");
        assert_eq!(parse(&[&shared]).s_maxage, seconds, "{shared}");
    }
}

#[test]
fn a_restrictive_directive_is_seen_wherever_it_stands() {
    let cases = [
        "private",
        "PRIVATE",
        "max-age=60,private",
        "max-age=60 , private ,",
        ",,private",
        "private=\"set-cookie\"",
        "private =\"a, b\"",
        "private; max-age=60",
        "max-age=60; private",
        "x=\"unclosed, private",
        "x=\"a\\\"b\", private",
        "x=\"\", private, y=\"\"",
        "x=\"\\\\\", private, y=\"\"",
    ];
    for text in cases {
        assert!(parse(&[text]).private.is_present(), "{text}");
        assert!(parse(&["max-age=60", text]).private.is_present(), "{text} on the second line");
        assert!(parse(&[&text.to_lowercase().replace("private", "no-store")]).no_store, "{text}");
        assert!(
            parse(&[&text.to_lowercase().replace("private", "no-cache")]).no_cache.is_present(),
            "{text}"
        );
    }
}

#[test]
fn text_inside_a_string_is_no_directive() {
    let strings =
        ["ext=\"private, no-store, max-age=1\"", "ext=\"a\\\", private\"", "ext=\"a\\\", private, b\""];
    for text in strings.into_iter().chain(["xprivate", "private2"]) {
        assert_eq!(parse(&[text]), CacheControl::default(), "{text}");
    }
    assert_eq!(parse(&["ext=\"max-age=1\", max-age=60"]).max_age, Some(60));
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(line in proptest::collection::vec(0x20u8..0x7f, 0..64)) {
        let value = HeaderValue::from_bytes(&line).unwrap();
        CacheControl::parse([&value]);
    }

    #[test]
    fn nothing_before_or_after_hides_a_directive(
        before in "[a-z=\\\\0-9 ]{0,12}", after in "[ -~]{0,12}",
    ) {
        let line = format!("{before},no-store,{after}");
        let value = HeaderValue::from_str(&line).unwrap();
        proptest::prop_assert!(CacheControl::parse([&value]).no_store, "{}", line);
    }
}

#[test]
fn a_permission_counts_only_in_exact_spelling() {
    let cases = [
        ("public", true),
        ("PUBLIC , x", true),
        ("max-age=1,public", true),
        ("s-maxage=0", true),
        ("s-maxage=\"5\"", true),
        ("must-revalidate", true),
        ("public; max-age=1", false),
        ("max-age=1; public", false),
        ("public=1", false),
        ("public =1", false),
        ("s-maxage", false),
        ("s-maxage=", false),
        ("s-maxage=x", false),
        ("s-maxage = 5", false),
        ("s-maxage =5", false),
        ("s-maxage=5; x", false),
        ("must-revalidate=1", false),
        ("x=\"public\"", false),
        ("proxy-revalidate", false),
        ("max-age=60", false),
        ("", false),
    ];
    for (text, says_shared) in cases {
        assert_eq!(parse(&[text]).says_shared, says_shared, "RFC 9111, 3.5; A1: {text}");
    }
    // A permission in its exact spelling applies also beside a permission in an inexact one.
    for doubtful in ["public=1", "s-maxage=x", "must-revalidate=1"] {
        assert!(parse(&["public", doubtful]).says_shared, "RFC 9111, 3.5: {doubtful}");
    }
    assert!(parse(&["public, public=1"]).public && parse(&["immutable", "immutable; x"]).immutable);
    assert!(parse(&["must-understand, must-understand=1"]).must_understand);
    // Restrictions apply also in an inexact spelling.
    assert!(parse(&["must-revalidate; x"]).must_revalidate);
    assert!(parse(&["proxy-revalidate=1"]).proxy_revalidate);
    assert!(!parse(&["must-understand; x"]).must_understand, "it would lift a no-store");
    assert!(parse(&["immutable=1"]).immutable, "RFC 8246, 2: the argument has no meaning");
    assert!(!parse(&["immutable; x"]).immutable);
}

#[test]
fn fields_are_listed_only_in_exact_spelling() {
    let listed =
        |names: &[&str]| DirectiveScope::Listed(names.iter().map(|name| name.parse().unwrap()).collect());
    let cases: [(&[&str], DirectiveScope); 15] = [
        (&["no-cache=\"a\""], listed(&["a"])),
        (&["no-cache=\"a, B ,c\""], listed(&["a", "b", "c"])),
        // RFC 9110, 5.6.1.2: an empty member is ignored.
        (&["no-cache=\"a,, b,\""], listed(&["a", "b"])),
        (&["no-cache=a"], listed(&["a"])),
        (&["NO-CACHE=\"a\", max-age=3600"], listed(&["a"])),
        (&["no-cache=\"a\"", "no-cache=\"b\""], listed(&["a", "b"])),
        (&["no-cache"], DirectiveScope::Whole),
        (&["no-cache=\"a\", no-cache"], DirectiveScope::Whole),
        (&["no-cache", "no-cache=\"a\""], DirectiveScope::Whole),
        (&["no-cache=\"\""], DirectiveScope::Whole),
        (&["no-cache=\", ,\""], DirectiveScope::Whole),
        (&["no-cache=\"a b\""], DirectiveScope::Whole),
        (&["no-cache=\"a"], DirectiveScope::Whole),
        (&["no-cache =\"a\""], DirectiveScope::Whole),
        (&["max-age=60"], DirectiveScope::Absent),
    ];
    for (lines, fields) in cases {
        assert_eq!(parse(lines).no_cache, fields, "RFC 9111, 5.2.2.4: {lines:?}");
        assert_eq!(fields.listed().is_empty(), !matches!(fields, DirectiveScope::Listed(_)));
        let lines: Vec<_> =
            lines.iter().map(|line| line.to_lowercase().replace("no-cache", "private")).collect();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        assert_eq!(parse(&lines).private, fields, "RFC 9111, 5.2.2.7: {lines:?}");
    }
}

#[test]
fn stale_windows_are_read_as_lifetimes_are() {
    for name in ["stale-while-revalidate", "stale-if-error"] {
        let read = |text: &str| {
            let all = parse(&[&text.replace('N', name)]);
            if name == "stale-if-error" { all.stale_if_error } else { all.stale_while_revalidate }
        };
        assert_eq!(read("max-age=1, N=60"), Some(60), "RFC 5861");
        assert_eq!(read("N=60, N=30"), Some(30));
        assert_eq!(read("N"), Some(0));
        assert_eq!(read("N=-1"), Some(0));
        assert_eq!(read("x=\"N=60\""), None);
    }
}

fn demands(lines: &[&str]) -> RequestDirectives {
    let mut demands = RequestDirectives::default();
    for line in lines {
        demands.add(&HeaderValue::from_str(line).unwrap());
    }
    demands
}

#[test]
fn request_directives_are_read() {
    let none = RequestDirectives::default();
    let cases: [(&[&str], RequestDirectives); 21] = [
        (&[""], none),
        (&["public, x=\"no-cache\""], none),
        (&["no-cache"], RequestDirectives { no_cache: true, ..none }),
        (&["No-Cache; x"], RequestDirectives { no_cache: true, ..none }),
        (&["no-store"], RequestDirectives { no_store: true, ..none }),
        (&["only-if-cached"], RequestDirectives { only_if_cached: true, ..none }),
        (&["max-age=5"], RequestDirectives { max_age: Some(5), ..none }),
        (&["max-age=5", "max-age=3"], RequestDirectives { max_age: Some(3), ..none }),
        (&["max-age=x"], RequestDirectives { max_age: Some(0), ..none }),
        (&["max-age"], RequestDirectives { max_age: Some(0), ..none }),
        (&["min-fresh=5, min-fresh=7"], RequestDirectives { min_fresh: 7, ..none }),
        (&["max-age=5; x"], RequestDirectives { max_age: Some(0), ..none }),
        (&["min-fresh=x"], none),
        (&["min-fresh=5; x"], none),
        (&["max-stale"], RequestDirectives { max_stale: Some(LONGEST_SECONDS), ..none }),
        (&["max-stale=9"], RequestDirectives { max_stale: Some(9), ..none }),
        (&["max-stale, max-stale=9"], RequestDirectives { max_stale: Some(9), ..none }),
        (&["max-stale=0", "max-stale=9"], RequestDirectives { max_stale: Some(0), ..none }),
        (&["max-stale=x"], RequestDirectives { max_stale: Some(0), ..none }),
        (&["max-stale=9; x"], RequestDirectives { max_stale: Some(0), ..none }),
        (&["max-stale;x"], RequestDirectives { max_stale: Some(0), ..none }),
    ];
    for (lines, expected) in cases {
        assert_eq!(demands(lines), expected, "RFC 9111, 5.2.1: {lines:?}");
    }
}

proptest::proptest! {
    #[test]
    fn any_request_is_read_without_a_panic(line in proptest::collection::vec(0x20u8..0x7f, 0..64)) {
        RequestDirectives::default().add(&HeaderValue::from_bytes(&line).unwrap());
    }

    #[test]
    fn more_lines_never_permit_more(a in "[a-z=\", 0-9;-]{0,40}", b in "[a-z=\", 0-9;-]{0,40}") {
        let (one, both) = (parse(&[&a]), parse(&[&a, &b]));
        proptest::prop_assert!(both.no_store || !one.no_store);
        proptest::prop_assert!(both.private.is_present() || !one.private.is_present());
        proptest::prop_assert!(both.no_cache.is_present() || !one.no_cache.is_present());
        proptest::prop_assert!(one.max_age.is_none_or(|age| both.max_age.is_some_and(|b| b <= age)));
    }
}
