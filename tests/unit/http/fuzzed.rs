//! Properties of header fields and stored responses that hold for arbitrary bytes, for [`crate::fuzzed`].

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{
    ACCEPT_LANGUAGE, CACHE_CONTROL, CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue, IF_RANGE,
    LAST_MODIFIED, RANGE, VARY,
};
use http::{Uri, uri};

use super::stored::ResponseMeta;
use super::stored::StoredResponse;
use crate::http_rules::cache_control::{CDN_CACHE_CONTROL, targeted};
use crate::http_rules::cache_control::{CacheControl, RequestDirectives};
use crate::http_rules::conditional::{ByteRange, Part, RangeAnswer, join, range_answer};
use crate::http_rules::fields;
use crate::http_rules::reference::resolve;
use crate::http_rules::vary::Normalization;
use crate::http_rules::vary::{Names, Vary};
use crate::value::entry::Expiry;
use crate::value::entry::TagList;
use crate::value::entry::{Encoding, Entry, EntryKind};

pub(crate) const READERS: &crate::fuzzed::Readers = &[
    ("stored", stored),
    ("cache-control", cache_control),
    ("vary", vary),
    ("date", date),
    ("range", range),
    ("location", location),
];

/// 2026-11-21.
const NOW: Duration = Duration::from_secs(1_795_219_200);

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + NOW
}

/// A header with these lines. Lines that no HTTP parser accepts are left out.
fn field(name: HeaderName, lines: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in lines.split(|&byte| byte == b'\n').take(64) {
        if let Ok(value) = HeaderValue::from_bytes(line) {
            headers.append(&name, value);
        }
    }
    headers
}

/// Encoding a decoded response yields the same response: a newer fleet serves the responses of an older one.
fn stored(bytes: &[u8]) {
    let entry = |payload: Bytes| Entry {
        kind: EntryKind::Value,
        encoding: Encoding::HTTP,
        stored_at: 1_000,
        tag_expired_at: u64::MAX,
        expiry: Expiry {
            fresh_until: 2_000,
            stale_until: 3_000,
            error_until: 4_000,
            retry_at: 0,
            load_ms: 5,
        },
        validator: Box::default(),
        tags: TagList::default(),
        payload,
        packed: Default::default(),
    };
    let read = |payload: Bytes| {
        let (meta, at) = ResponseMeta::of(&entry(payload.clone()))?;
        let response = StoredResponse::decode(&payload, at)?;
        Some((meta, response))
    };
    let Some((meta, response)) = read(Bytes::copy_from_slice(bytes)) else { return };
    let _ = meta.at(&entry(Bytes::new()), u64::MAX);
    if let Some(again) = response.encode(&meta) {
        assert_eq!(read(again), Some((meta, response)));
    }
}

fn cache_control(bytes: &[u8]) {
    let headers = field(CACHE_CONTROL, bytes);
    let once = CacheControl::parse(headers.get_all(CACHE_CONTROL));
    // Repeated lines change nothing: the smallest number applies, and a flag applies if it occurs at all.
    let twice = headers.get_all(CACHE_CONTROL).iter().chain(headers.get_all(CACHE_CONTROL));
    let twice = CacheControl::parse(twice);
    assert_eq!((once.max_age, once.s_maxage), (twice.max_age, twice.s_maxage));
    assert_eq!((once.no_store, once.says_shared), (twice.no_store, twice.says_shared));
    let mut directives = RequestDirectives::default();
    headers.get_all(CACHE_CONTROL).iter().for_each(|line| directives.add(line));
    let _ = targeted(&field(HeaderName::from_static(CDN_CACHE_CONTROL), bytes));
}

fn vary(bytes: &[u8]) {
    let (lines, value) = bytes.split_at(bytes.len() / 2);
    let Vary::Names(names) = Vary::of(&field(VARY, lines), &[]) else { return };
    assert_eq!(Names::from_text(&names.to_text()), Some(names.clone()));
    for name in names.as_slice().iter().chain([&ACCEPT_LANGUAGE]) {
        let request = field(name.clone(), value);
        for normal in [Normalization::Careful, Normalization::Exact] {
            assert!(names.fingerprint(&request, normal) == names.fingerprint(&request, normal));
        }
    }
}

/// A date that was parsed is written in one form, which parses to the same date.
fn date(bytes: &[u8]) {
    let Some(date) = fields::parse_date(bytes, now()) else { return };
    let year_9999 = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    if (SystemTime::UNIX_EPOCH..=year_9999).contains(&date) {
        let text = httpdate::fmt_http_date(date);
        assert_eq!(fields::parse_date(text.as_bytes(), now()), Some(date), "{text}");
    }
}

fn range(bytes: &[u8]) {
    let Some((lengths, text)) = bytes.split_first_chunk::<4>() else { return };
    let length = u64::from(u16::from_le_bytes([lengths[0], lengths[1]]));
    let request = field(RANGE, text);
    let is_within = |part: Part| part.first <= part.last && part.last < length;
    if let Some(range) = ByteRange::of(&request) {
        assert!(match range.of_whole(length) {
            RangeAnswer::Part(part) => is_within(part),
            RangeAnswer::Whole | RangeAnswer::Unsatisfiable => true,
        });
        if let Some(stored) = Part::of_response(&field(CONTENT_RANGE, text)) {
            let part = range.of_part(stored);
            assert!(part.is_none_or(|part| stored.first <= part.first && part.last <= stored.last));
        }
    }
    let mut conditional = request;
    conditional.extend(field(IF_RANGE, text));
    let _ = range_answer(&conditional, &field(LAST_MODIFIED, text), length, now());
    // Two parts of a whole, each with content of its stated length.
    let mut parts =
        text.split(|&byte| byte == b'\n').filter_map(|line| Part::of_response(&field(CONTENT_RANGE, line)));
    if let (Some(one), Some(other)) = (parts.next(), parts.next()) {
        let content = |part: &Part| usize::try_from(part.length()).ok().filter(|&length| length < 100_000);
        if let (Some(a), Some(b)) = (content(&one), content(&other)) {
            let (a, b) = (vec![b'a'; a], vec![b'b'; b]);
            if let Some((part, joined)) = join((one, &a), (other, &b)) {
                assert_eq!(part.length(), joined.len() as u64);
                assert!(part.complete.is_none_or(|complete| part.last < complete));
            }
        }
    }
}

fn location(bytes: &[u8]) {
    let base = Uri::from_static("http://shop.example/a/b?c");
    let Ok(reference) = std::str::from_utf8(bytes) else { return };
    if let Some(uri) = resolve(&base, reference) {
        let uri::Parts { scheme, authority, path_and_query, .. } = uri.into_parts();
        assert!(scheme.is_some() && path_and_query.is_some());
        assert!(authority.is_some_and(|authority| !authority.as_str().contains('@')));
    }
}
