use http::HeaderMap;
use http::header::{ACCEPT_LANGUAGE, CONTENT_LANGUAGE, HeaderValue, VARY};
use proptest::prelude::*;

use super::*;
use crate::http_rules::vary::Normalization;
use crate::http_rules::vary::Vary;
use crate::value::entry::Expiry;
use crate::value::entry::TagList;

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn meta() -> ResponseMeta {
    let stale = StaleWindows {
        while_revalidate: secs(1),
        if_error: secs(2),
        on_disconnect: secs(3),
        on_request: true,
    };
    let terms = ReuseTerms {
        lifetime: Duration::from_millis(60_500),
        stale,
        revalidate_always: false,
        immutable: true,
        says_shared: false,
    };
    ResponseMeta {
        terms,
        age: Duration::from_millis(7_250),
        part: None,
        variant: None,
        handler_terms: None,
        has_digest_tag: false,
    }
}

fn variant() -> Box<VariantId> {
    let mut headers = HeaderMap::new();
    headers.insert(VARY, HeaderValue::from_static("accept-language, x-b"));
    headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("de-AT"));
    let mut request = HeaderMap::new();
    request.insert(ACCEPT_LANGUAGE, HeaderValue::from_static("de"));
    let Vary::Names(names) = Vary::of(&headers, &[]) else { unreachable!("it names two") };
    let variant = Variant::of(&names, &request, &headers, Normalization::Careful);
    assert!(variant.language.is_some());
    Box::new(VariantId { generation: 77, names, variant })
}

#[test]
fn metadata_comes_back_with_the_offset_of_the_response() {
    let part = Some(Part { first: 4, last: 9, complete: None });
    let without_language = {
        let mut variant = variant();
        variant.variant.language = None;
        variant
    };
    for part in [None, part, Some(Part { first: 0, last: 0, complete: Some(1) })] {
        for variant in [None, Some(variant()), Some(without_language.clone())] {
            let meta = ResponseMeta { part, variant, ..meta() };
            let mut out = BytesMut::from("before");
            meta.encode(&mut out).unwrap();
            let _ = out.split_to("before".len());
            let length = out.len();
            out.put_slice(b"the response");
            let raw = out.freeze();
            assert_eq!(ResponseMeta::decode(&raw), Some((meta, length)));
            for cut in 0..length {
                assert_eq!(ResponseMeta::decode(&raw.slice(..cut)), None, "{cut}");
            }
        }
    }
}

#[test]
fn the_terms_of_a_handler_and_the_origin_of_the_tag_come_back() {
    let all = CacheTerms::fresh_for(secs(5)).stale_while_revalidate(secs(6)).stale_if_error(Duration::ZERO);
    let some = CacheTerms::default().for_one_user().hide_from_clients();
    let hidden = all.hide_from_clients();
    for (handler_terms, has_digest_tag, variant) in [
        (Some(all), false, None),
        (Some(some), true, Some(variant())),
        (Some(hidden), false, None),
        (None, true, None),
    ] {
        let handler_terms = handler_terms.map(Box::new);
        let meta = ResponseMeta { handler_terms, has_digest_tag, variant, ..meta() };
        let raw = written(&meta);
        assert_eq!(ResponseMeta::decode(&raw), Some((meta, raw.len())));
        for cut in 0..raw.len() {
            assert_eq!(ResponseMeta::decode(&raw.slice(..cut)), None, "{cut}");
        }
    }
}

fn written(meta: &ResponseMeta) -> Bytes {
    let mut out = BytesMut::new();
    meta.encode(&mut out).unwrap();
    out.freeze()
}

#[test]
fn each_flag_comes_back_whether_it_is_set_or_not() {
    let mut meta = meta();
    for _ in 0..2 {
        assert_eq!(ResponseMeta::decode(&written(&meta)).unwrap().0, meta);
        let terms = &mut meta.terms;
        for flag in [&mut terms.revalidate_always, &mut terms.immutable, &mut terms.says_shared] {
            *flag = !*flag;
        }
        terms.stale.on_request = !terms.stale.on_request;
    }
}

#[test]
fn another_layout_or_contradictory_metadata_is_refused() {
    let whole = written(&meta());
    let other = [&[LAYOUT + 1], &whole[1..]].concat();
    assert_eq!(ResponseMeta::decode(&other.into()), None, "another layout");
    for (first, last, complete) in [(5, 4, None), (5, 4, Some(9)), (0, 5, Some(5))] {
        let meta = ResponseMeta { part: Some(Part { first, last, complete }), ..meta() };
        assert_eq!(
            ResponseMeta::decode(&written(&meta)),
            None,
            "RFC 9110, 14.4: {first}-{last}/{complete:?}"
        );
    }
}

fn entry(fresh_until: u64) -> Entry {
    Entry {
        kind: EntryKind::Value,
        encoding: Encoding::HTTP,
        stored_at: 10_000,
        tag_expired_at: u64::MAX,
        expiry: Expiry { fresh_until, ..Expiry::default() },
        validator: Box::default(),
        tags: TagList::default(),
        payload: written(&meta()),
        packed: Default::default(),
    }
}

#[test]
fn only_a_value_in_the_http_encoding_is_a_response() {
    assert_eq!(ResponseMeta::of(&entry(0)), Some((meta(), FIXED)));
    assert_eq!(ResponseMeta::of(&Entry { encoding: Encoding::RAW, ..entry(0) }), None);
    assert_eq!(ResponseMeta::of(&Entry { kind: EntryKind::Marker, ..entry(0) }), None);
}

#[test]
fn a_shared_only_response_answers_matching_waiters_and_no_later_request() {
    let variant = variant();
    let meta = ResponseMeta::shared_only(true, secs(3), Some(variant.clone()));
    let ReuseTerms { lifetime, stale, revalidate_always, immutable, says_shared } = meta.terms;
    assert_eq!((meta.age, lifetime, stale), (secs(3), Duration::ZERO, StaleWindows::default()));
    assert!(revalidate_always && !immutable && says_shared, "A4");
    let mut request = HeaderMap::new();
    assert!(!meta.is_for(&request, Normalization::Careful), "RFC 9111, 4.1; A4");
    assert!(ResponseMeta { variant: None, ..meta.clone() }.is_for(&request, Normalization::Careful));
    request.insert(ACCEPT_LANGUAGE, HeaderValue::from_static("de"));
    assert!(meta.is_for(&request, Normalization::Careful));
}

#[test]
fn a_response_is_fresh_no_longer_than_its_entry() {
    let meta = meta();
    let (age, terms) = meta.at(&entry(10_000 + 53_250), 20_000);
    assert_eq!((age, terms.lifetime), (Duration::from_millis(17_250), meta.terms.lifetime));
    let jittered = meta.at(&entry(10_000 + 50_000), 20_000).1;
    assert_eq!(jittered.lifetime, Duration::from_millis(57_250));
    let ended = meta.at(&entry(10_000), 20_000).1;
    assert_eq!(ended.lifetime, meta.age);
    // `expire` has marked this entry stale. Until the response's lifetime has ended, the entry counts as stale since this moment.
    let mut expired = entry(0);
    expired.expiry.error_until = 30_000;
    assert_eq!(meta.at(&expired, 20_000).1.lifetime, Duration::from_millis(17_250));
    // This response was stale already when it was stored: its lifetime was shorter than its age.
    let terms = ReuseTerms { lifetime: secs(5), ..meta.terms };
    assert_eq!(ResponseMeta { terms, ..meta }.at(&entry(10_000), 10_000).1.lifetime, secs(5));
}

proptest! {
    #[test]
    fn any_metadata_bytes_are_read_without_a_panic(raw in proptest::collection::vec(0u8.., 0..200), flags in 0u8.., length in 0u16..200) {
        let mut raw = raw;
        if raw.len() > 4 {
            raw[..4].copy_from_slice(&[LAYOUT, flags, length as u8, 0]);
        }
        if let Some((meta, length)) = ResponseMeta::decode(&raw.into()) {
            prop_assert!(length >= FIXED);
            prop_assert!(meta.part.is_none_or(|part| part.first <= part.last));
        }
    }
}
