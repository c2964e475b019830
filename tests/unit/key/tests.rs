use super::*;

fn key(source: impl Into<CacheKey>) -> Key {
    Key::new("ns", &source.into())
}

#[test]
fn a_key_of_texts_is_the_one_of_their_cache_key() {
    for namespace in ["ns", &escape_namespace("a {shop}:b"), ""] {
        let before = format!("{namespace}:http:http:shop.example:").len();
        let [fits, is_digested] = [0, 1].map(|more| "p".repeat(LONGEST_NAME - before + more));
        for path in ["/a?b=c", "/", "", "/two words", "/a:b", "/{}~%", &fits, &is_digested] {
            for parts in [&["shop.example", path][..], &["shop.example", path, "key=7"]] {
                let text = CacheKey::from_texts("http:http", parts);
                let (key, same) =
                    (Key::from_texts(namespace, "http:http", parts), Key::new(namespace, &text));
                assert_eq!((&key, key.name()), (&same, same.name()), "{parts:?}");
                assert_eq!(key.within(namespace), text.to_string());
                assert_eq!(key.name().contains('~'), key.full().len() > LONGEST_NAME, "{parts:?}");
                assert!(!key.has_tilde && !same.has_tilde, "{parts:?}");
                for derived in [key.of_report("7"), key.of_query("8", "9"), key.derived("~v7")] {
                    let again = Key::new(namespace, &derived.cache_key(namespace));
                    assert!([derived.has_report(), again.has_report()] == [derived.full().contains("~f"); 2]);
                    assert!(derived.has_tilde && again.has_tilde && Key::of_full(derived.full()).has_tilde);
                }
            }
        }
    }
}

/// All keys of a path (with its queries, variants, reports and additions) have one tag, which no other path and no tag of a user has.
#[test]
fn the_responses_of_a_path_have_one_tag() {
    let long = format!("/{}", "p".repeat(LONGEST_NAME));
    for head in ["http:http", "http:https", "http:strict:http", "http:private:https"] {
        for path in ["/", "/p", "/a/b:c", "/x~y", "/caf%C3%A9", &long] {
            let of = |parts: &[&str]| Key::from_texts("ns", head, parts);
            let tag = of(&["http", path]).of_path("ns").expect("a path");
            let query = format!("{path}?a=b:c?~d");
            let all = [
                of(&["http", &query]),
                of(&["http", path, "/rewritten?x"]),
                of(&["http", &query, "credentials=7", "key=t"]),
            ];
            for key in all.iter().flat_map(|key| [key.clone(), key.derived("~v7"), key.of_report("7")]) {
                assert_eq!(key.of_path("ns"), Some(tag.clone()), "{}", key.full());
                assert!(tag.is_path() && key.has_path(&tag), "{}", key.full());
            }
            assert!(tag.full().ends_with("~p"), "{}", tag.full());
            for other in [of(&["http", &format!("{path}q")]), of(&["other", path])] {
                assert_ne!(other.of_path("ns"), Some(tag.clone()));
                assert!(!other.has_path(&tag), "{}", other.full());
            }
        }
    }
    for key in [
        key("http"),
        key(("http", "http")),
        key(("http", "http", "h")),
        key("/p"),
        key(("user", "http", "h", "/p")),
    ] {
        assert_eq!(key.of_path("ns"), None, "{}", key.full());
    }
}

/// A key under a report of proxies, that of a QUERY, and each key that is derived from it, has the tag of the reports of its resource. Other
/// keys have none.
#[cfg(feature = "http")]
#[test]
fn a_key_under_a_report_has_the_tag_of_its_resource() {
    let long = format!("/{}", "p".repeat(LONGEST_NAME));
    for path in ["/", "/x~fy?~f", &long] {
        let resource = Key::from_texts("ns", "http:http", &["h", path]);
        let tag = resource.of_reports("ns");
        let report = resource.of_report("7f");
        let queries =
            [resource.of_query("7f", ""), resource.of_query("7f", "8a"), resource.of_query("7f8b", "")];
        let mut all = vec![report.derived("~v7"), report.derived("~a"), report, resource.clone()];
        for query in queries {
            assert!(!all.contains(&query), "{}", query.full());
            all.push(query);
        }
        for key in all.into_iter().filter(|key| *key != resource) {
            assert_eq!(key.report_tag(), tag, "{}", key.full());
        }
        for other in [resource.derived("~v7"), resource.derived("~a"), resource] {
            assert_eq!(other.report_tag(), None, "{}", other.full());
        }
    }
}

/// B1: different lists of parts are different keys.
#[test]
fn joining_is_unambiguous() {
    let keys = [
        CacheKey::from(("a.b", "c")),
        CacheKey::from(("a", "b.c")),
        CacheKey::from("a:b.c"),
        CacheKey::from(("a", "b", "c")),
        CacheKey::from(("a", "")),
        CacheKey::from(("", "a")),
        CacheKey::from("a"),
    ];
    for (i, left) in keys.iter().enumerate() {
        for right in &keys[i + 1..] {
            assert_ne!(left, right);
        }
    }
}

#[test]
fn a_reference_to_a_key_is_that_key() {
    let key = CacheKey::from(("user", 7));
    assert_eq!(CacheKey::from(&key), key);
    assert_ne!(CacheKey::from((&key,)), key, "a tuple's part is its text, escaped once more");
}

/// B10, B13: each byte is possible in a key, and none of them ends the hash tag of a name.
#[test]
fn any_byte_is_a_key_and_stays_out_of_the_hash_tag() {
    let mut seen = std::collections::HashSet::new();
    for byte in 0..=u8::MAX {
        let key = key(&[byte]);
        assert!(!key.name().contains(['{', '}', ' ', '\0', '\n']), "{byte}: {}", key.name());
        assert!(seen.insert(key.name().to_owned()));
    }
}

#[test]
fn each_byte_is_escaped_alike_at_each_position_of_a_text_of_any_length() {
    for byte in 0..128_u8 {
        let (char, stays) = (char::from(byte), byte.is_ascii_graphic() && !b":{}%~".contains(&byte));
        let written = if stays { char.to_string() } else { format!("%{byte:02X}") };
        for (length, at) in [1, 15, 16, 17, 33].into_iter().flat_map(|n| (0..n).map(move |at| (n, at))) {
            let with = |middle: &str| "a".repeat(at) + middle + &"a".repeat(length - 1 - at);
            let part = with(&char.to_string());
            let keys = [CacheKey::from((&part,)), CacheKey::from_parts([&part])];
            assert_eq!(keys.map(|key| key.to_string()), [with(&written), with(&written)]);
        }
    }
    assert_eq!(CacheKey::from(("\u{e9} %41",)).to_string(), "%C3%A9%20%2541");
}

/// B10, B11: a long key has a bounded name: the beginning of its text, and a digest.
#[test]
fn a_long_key_is_digested_with_a_readable_head() {
    let long = "product/".repeat(200);
    let (one, two) = (key(long.as_str()), key(format!("{long}x")));
    assert!(one.name().starts_with("ns:product/product/"));
    assert!(one.name().len() <= LONGEST_NAME);
    assert_ne!(one.name(), two.name());
    assert_ne!(one, two);
    assert_eq!(one.full(), format!("ns:{long}"));
}

/// B11: a key whose text is the digest of another key has another name.
#[test]
fn a_key_spelled_like_a_digest_is_another_key() {
    let long = key("k".repeat(500));
    let spelled = key(long.name().strip_prefix("ns:").expect("namespace comes first"));
    assert_ne!(long.name(), spelled.name());
}

#[test]
fn only_a_key_without_any_text_is_empty() {
    assert!(CacheKey::from("").is_empty());
    assert!(CacheKey::from(("",)).is_empty());
    assert!(!CacheKey::from(("", "")).is_empty());
    assert!(!CacheKey::from("\0").is_empty());
}

proptest::proptest! {
    /// B1: different lists of parts are different keys.
    #[test]
    fn distinct_parts_make_distinct_keys(
        a in proptest::collection::vec(proptest::collection::vec(0u8.., 0..6), 1..4),
        b in proptest::collection::vec(proptest::collection::vec(0u8.., 0..6), 1..4),
    ) {
        proptest::prop_assert_eq!(a == b, CacheKey::from_parts(&a) == CacheKey::from_parts(&b));
    }
}
