//! Encodes a response as the payload of an HTTP entry: [`ResponseMeta`] (age, lifetimes, part and variant), then
//! [`StoredResponse`].
//!
//! The envelope around the payload has the checksum. Decoding checks that the bytes are a response that may be
//! replayed: whichever program wrote them, they yield no hop-by-hop header, no forged framing and no unbounded
//! header section.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/metadata_tests.rs"]
mod metadata_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/encoding_tests.rs"]
mod tests;

use std::slice;
use std::time::{Duration, SystemTime};

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, DATE, HeaderMap, HeaderName, HeaderValue, SET_COOKIE};
use http::response::Parts;
use http::{StatusCode, Version};

use crate::http_rules::cache_terms::CacheTerms;
use crate::http_rules::conditional::Part;
use crate::http_rules::fields::{exact_number, is_hop_by_hop, say_length_once, storable};
use crate::http_rules::freshness::{ReuseTerms, StaleWindows};
use crate::http_rules::vary::{Fingerprint, Names, Normalization, Variant};
use crate::value::entry::{Encoding, Entry, EntryKind, ms};

/// ```text
/// 0  layout   1
/// 1  version  1   of HTTP: major and minor digit
/// 2  status   2
/// 4  headers  2   how many
/// 6  trailers 2   how many; NO_TRAILERS for none
/// 8  head     4   bytes of headers and trailers together
/// 12 headers, trailers: tag 2, length of the value 2, name, value
///    body
/// ```
/// A tag is the length of the name, or with `NUMBERED` its index in `NAMES`, and then no name follows. `SENSITIVE`
/// marks the value. All integers are little-endian. Another layout has another number in the first byte.
const FIXED_OF_ENCODING: usize = 12;
const ENCODING_LAYOUT: u8 = 3;
const NO_TRAILERS: u16 = u16::MAX;
const SENSITIVE: u16 = 1 << 15;
const NUMBERED: u16 = 1 << 14;
const FLAGS: u16 = SENSITIVE | NUMBERED;

/// Names that are stored as a number: reading one is a table look-up, but a spelled-out name is validated, hashed
/// into a standard one or copied, and checked against the forbidden names.
///
/// Append only: the numbers are in stored entries. A process that does not know a number yet reads a miss, so a
/// rolling update costs loads and nothing else. None of these is a name that `is_sound` forbids.
macro_rules! names {
    ($($name:literal,)*) => {
        static NAMES: [HeaderName; [$($name),*].len()] = [$(HeaderName::from_static($name)),*];
    };
}
names![
    "content-type",
    "content-length",
    "cache-control",
    "date",
    "etag",
    "last-modified",
    "expires",
    "vary",
    "server",
    "content-encoding",
    "content-language",
    "content-location",
    "content-disposition",
    "location",
    "link",
    "access-control-allow-origin",
    "access-control-allow-methods",
    "access-control-allow-headers",
    "access-control-allow-credentials",
    "access-control-expose-headers",
    "access-control-max-age",
    "access-control-allow-private-network",
    "strict-transport-security",
    "x-content-type-options",
    "x-frame-options",
    "referrer-policy",
    "content-security-policy",
    "content-security-policy-report-only",
    "permissions-policy",
    "cross-origin-opener-policy",
    "cross-origin-embedder-policy",
    "cross-origin-resource-policy",
    "x-xss-protection",
    "x-dns-prefetch-control",
    "x-permitted-cross-domain-policies",
    "origin-agent-cluster",
    "timing-allow-origin",
    "server-timing",
    "x-request-id",
    "x-correlation-id",
    "traceparent",
    "x-powered-by",
    "x-robots-tag",
    "x-cache",
    "x-runtime",
    "via",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "accept-ranges",
    "allow",
    "retry-after",
    "alt-svc",
    "cache-status",
    "cdn-cache-control",
    "surrogate-control",
    "surrogate-key",
    "cache-tag",
    "trailer",
    "www-authenticate",
    "warning",
    "pragma",
    "refresh",
    "nel",
    "report-to",
    "reporting-endpoints",
    "accept-patch",
    "accept-post",
    "accept-ch",
    "content-digest",
    "repr-digest",
    "digest",
    "content-md5",
    "x-total-count",
    "deprecation",
    "sunset",
    "preference-applied",
];

/// The index in `NAMES` of `Content-Length`, which must equal the body's length.
const CONTENT_LENGTH_NUMBER: usize = 1;

/// `Age` and `Cache-Status` are added to each replay. Decoding reserves room for them, so that the map need not grow.
const ADDED_TO_REPLAYS: usize = 2;

/// The most headers and trailers together; far below the limit of `HeaderMap`.
const MOST_HEADERS: usize = 128;
/// The most bytes of names and values of headers and trailers together.
const MOST_HEADER_BYTES: usize = 64 * 1024;

/// A response that may be replayed to any client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    pub(crate) status: StatusCode,
    /// The origin's version. Not replayed: it belongs to that connection (RFC 9110, 2.5).
    pub(crate) version: Version,
    /// Without `Age`, until it is one of a replay.
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Boxed, because trailers are rare and each hit moves the response several times.
    pub(crate) trailers: Option<Box<HeaderMap>>,
}

impl StoredResponse {
    /// Takes the storable parts of a response that arrived at `now` on the wall clock, with its whole body.
    pub(crate) fn new(head: &Parts, now: SystemTime, body: Bytes, trailers: Option<HeaderMap>) -> Self {
        let headers = Self::storable_headers(head, now, trailers.is_none().then_some(body.len() as u64));
        let trailers = trailers.map(Box::new);
        Self { status: head.status, version: head.version, headers, body, trailers }
    }

    /// The headers that are stored, with `Date`, and with the `length` of the body unless trailers follow it.
    pub(crate) fn storable_headers(head: &Parts, now: SystemTime, length: Option<u64>) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(head.headers.len().min(MOST_HEADERS) + 2);
        for (name, value) in storable(&head.headers).take(MOST_HEADERS + 1) {
            // `append` panics only at a far larger size. One field more than `encode` accepts is enough for it to refuse the response.
            headers.append(name, value.clone());
        }
        say_length_once(&mut headers);
        if !headers.contains_key(DATE) {
            // RFC 9110, 6.6.1: a recipient that forwards from a cache adds the time of receipt. Without it a server
            // would date every hit anew, and `Expires` would count from there.
            if let Ok(date) = HeaderValue::try_from(httpdate::fmt_http_date(clamp(now))) {
                headers.insert(DATE, date);
            }
        }
        // Otherwise axum would add it to each hit, to a map that has no room left: a replay's headers are a clone. RFC 9110, 8.6: never with
        // 204.
        if let Some(length) = length.filter(|_| head.status != StatusCode::NO_CONTENT)
            && !headers.contains_key(CONTENT_LENGTH)
        {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        headers
    }

    /// The payload to store: the metadata, then the response; `None` if the response must not or cannot be stored.
    pub(crate) fn encode(&self, meta: &ResponseMeta) -> Option<Bytes> {
        let no_trailers = HeaderMap::new();
        let trailers = self.trailers.as_deref().unwrap_or(&no_trailers);
        let all = || self.headers.iter().chain(trailers);
        let section = section(all()).filter(|_| self.is_sound())?;
        // An upper bound of the length, because numbered names are not written.
        let room = section + 4 * (self.headers.len() + trailers.len());
        let mut out = BytesMut::with_capacity(FIXED + FIXED_OF_ENCODING + room + self.body.len());
        meta.encode(&mut out)?;
        let start = out.len();
        out.put_u8(ENCODING_LAYOUT);
        out.put_u8(VERSIONS.iter().find(|(version, _)| *version == self.version)?.1);
        out.put_u16_le(self.status.as_u16());
        out.put_u16_le(self.headers.len() as u16);
        out.put_u16_le(if self.trailers.is_some() { trailers.len() as u16 } else { NO_TRAILERS });
        // The length of the fields, filled in once they are written.
        out.put_u32_le(0);
        for (name, value) in all() {
            let number = NAMES.iter().position(|known| known == name);
            let (tag, spelled) = match number {
                Some(number) => (number as u16 | NUMBERED, ""),
                None => (u16::try_from(name.as_str().len()).ok()?, name.as_str()),
            };
            out.put_u16_le(if value.is_sensitive() { tag | SENSITIVE } else { tag });
            out.put_u16_le(u16::try_from(value.len()).ok()?);
            out.put_slice(spelled.as_bytes());
            out.put_slice(value.as_bytes());
        }
        let fields = start + FIXED_OF_ENCODING;
        let head = (out.len() - fields) as u32;
        out[fields - 4..fields].copy_from_slice(&head.to_le_bytes());
        out.put_slice(&self.body);
        Some(out.freeze())
    }

    /// Reads the output of `encode` at offset `at` of `raw`; values and body share the memory of `raw`. `None` for
    /// other bytes.
    pub(crate) fn decode(raw: &Bytes, at: usize) -> Option<Self> {
        let (fixed, rest) = raw.get(at..)?.split_first_chunk::<FIXED_OF_ENCODING>()?;
        let u16_at = |at: usize| u16::from_le_bytes([fixed[at], fixed[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        let head = u32_at(8) as usize;
        let (headers, trailers) = (u16_at(4), Some(u16_at(6)).filter(|&count| count != NO_TRAILERS));
        let fields = usize::from(headers) + usize::from(trailers.unwrap_or(0));
        if fixed[0] != ENCODING_LAYOUT
            || fields > MOST_HEADERS
            || head > rest.len()
            || head > MOST_HEADER_BYTES + 4 * fields
        {
            return None;
        }
        let status = StatusCode::from_u16(u16_at(2)).ok()?;
        let start = at + FIXED_OF_ENCODING;
        let body = raw.slice(start + head..);
        if !is_replayable(status, body.is_empty()) {
            return None;
        }
        let mut fields = HeaderFields { raw, at: start, end: start + head };
        let stored = Self {
            status,
            version: VERSIONS.iter().find(|(_, number)| *number == fixed[1])?.0,
            headers: fields.read(headers, ADDED_TO_REPLAYS, Some(body.len() as u64))?,
            trailers: match trailers {
                Some(count) => Some(Box::new(fields.read(count, 0, None)?)),
                None => None,
            },
            body,
        };
        (fields.at == fields.end).then_some(stored)
    }

    /// Whether it may be replayed. `decode` makes the same checks, so that bytes written by another version or
    /// program cannot bypass them.
    fn is_sound(&self) -> bool {
        let length = Some(self.body.len() as u64);
        is_replayable(self.status, self.body.is_empty())
            && self.headers.iter().all(|(name, value)| is_sound(name, value, length))
            && self.trailers.as_deref().is_none_or(are_sound_trailers)
    }
}

/// Whether the fields of a head are within the limits for storing.
pub(crate) fn is_storable(headers: &HeaderMap) -> bool {
    // `StoredResponse::new` adds a date and a length if there is none.
    let date = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
    let length = HeaderValue::from(u64::MAX);
    let added = [(&DATE, &date), (&CONTENT_LENGTH, &length)];
    let added = added.into_iter().filter(|(name, _)| !headers.contains_key(*name));
    section(storable(headers).chain(added)).is_some()
}

/// The size of these fields in bytes; `None` above the limits.
fn section<'a>(fields: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) -> Option<usize> {
    let (mut lines, mut bytes) = (0, 0);
    for (name, value) in fields {
        let length = name.as_str().len();
        // A longer name would overlap the flag bits.
        if length & usize::from(FLAGS) != 0 {
            return None;
        }
        (lines, bytes) = (lines + 1, bytes + length + value.len());
    }
    (lines <= MOST_HEADERS && bytes <= MOST_HEADER_BYTES).then_some(bytes)
}

/// Whether a response with this status is complete by itself.
pub(crate) fn is_replayable(status: StatusCode, is_empty: bool) -> bool {
    match status.as_u16() {
        // RFC 9110, 15.2 and 15.4.5: no final response, or no content of its own.
        100..200 | 304 => false,
        // RFC 9110, 6.4.1: these have no content.
        204 | 205 => is_empty,
        _ => true,
    }
}

/// Whether a field may be replayed; `length` is the body's for a header, and `None` for a trailer.
fn is_sound(name: &HeaderName, value: &HeaderValue, length: Option<u64>) -> bool {
    if *name == CONTENT_LENGTH {
        return promises(value, length);
    }
    // RFC 9110, 6.5.1: a trailer sets no cookie.
    !(is_hop_by_hop(name) || (length.is_none() && *name == SET_COOKIE))
}

/// Whether these trailers may be replayed to any client.
pub(crate) fn are_sound_trailers(trailers: &HeaderMap) -> bool {
    trailers.iter().all(|(name, value)| is_sound(name, value, None))
}

/// Whether each member of a `Content-Length` is the body's `length` (RFC 9110, 8.6). False in trailers, which have no `length` (6.5.1).
///
/// RFC 9112, 6.3: another length would desynchronize the messages of the connection.
fn promises(value: &HeaderValue, length: Option<u64>) -> bool {
    let is_length = |member: &[u8]| exact_number(member) == length;
    let line = value.as_bytes();
    // There is almost always one member, so compare the whole line before splitting it.
    length.is_some()
        && (is_length(line) || line.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).all(is_length))
}

/// Reads header fields from `raw[at..end]`.
struct HeaderFields<'a> {
    raw: &'a Bytes,
    at: usize,
    end: usize,
}

impl HeaderFields<'_> {
    /// Reads `count` sound fields into a map with room for `leftover` more.
    fn read(&mut self, count: u16, leftover: usize, length: Option<u64>) -> Option<HeaderMap> {
        let mut headers = HeaderMap::try_with_capacity(usize::from(count) + leftover).ok()?;
        for _ in 0..count {
            let [tag @ .., low, high] = *self.raw.get(self.at..self.end)?.first_chunk::<4>()?;
            let tag = u16::from_le_bytes(tag);
            let number = usize::from(tag & !FLAGS);
            let name_at = self.at + 4;
            let value_at = if tag & NUMBERED == 0 { name_at + number } else { name_at };
            self.at = value_at + usize::from(u16::from_le_bytes([low, high]));
            if self.at > self.end {
                return None;
            }
            // The constructors refuse bytes that would break out of a header line: CR, LF, NUL (RFC 9110, 5.5).
            let mut value = HeaderValue::from_maybe_shared(self.raw.slice(value_at..self.at)).ok()?;
            if tag & SENSITIVE != 0 {
                value.set_sensitive(true);
            }
            if tag & NUMBERED == 0 {
                let name = HeaderName::from_bytes(self.raw.get(name_at..value_at)?).ok()?;
                if !is_sound(&name, &value, length) {
                    return None;
                }
                headers.try_append(name, value).ok()?;
            } else {
                // Of the numbered names only `Content-Length` can be unsound.
                if number == CONTENT_LENGTH_NUMBER && !promises(&value, length) {
                    return None;
                }
                headers.try_append(NAMES.get(number)?, value).ok()?;
            }
        }
        Some(headers)
    }
}

/// The versions of HTTP, each with its number in stored entries.
const VERSIONS: [(Version, u8); 5] = [
    (Version::HTTP_09, 9),
    (Version::HTTP_10, 10),
    (Version::HTTP_11, 11),
    (Version::HTTP_2, 20),
    (Version::HTTP_3, 30),
];

/// Clamps the time to the years 1970 to 9999: `httpdate` panics outside them, and a broken clock may be there.
fn clamp(now: SystemTime) -> SystemTime {
    const YEAR_9999: u64 = 253_370_764_800;
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + since.min(std::time::Duration::from_secs(YEAR_9999))
}

/// ```text
/// 0  layout   1
/// 1  flags    1
/// 2  length   2   of all metadata
/// 4  age      8   ms, when it was stored
/// 12 lifetime 8   ms
/// 20 stale    8 8 8   ms: while revalidated, on error, on disconnect
/// 44 part     8 8 8   first, last, length of the whole or MAX; only with PART
///    variant  8 32 2  generation, fingerprint, length of the names; names. Only with VARIES
///    language 32 1    fingerprint of the rest, length; language. Only with LANGUAGE
///    more     1       bits. Only with MORE
///    terms    8 8 8   ms as stated or MAX: fresh, while revalidated, on error. Only with the bit TERMS
/// ```
/// All integers are little-endian. Another layout has another number in the first byte.
const FIXED: usize = 44;
const LAYOUT: u8 = 2;
const REVALIDATE_ALWAYS: u8 = 1;
const IMMUTABLE: u8 = 2;
const SAYS_SHARED: u8 = 4;
const ON_REQUEST: u8 = 8;
const PART: u8 = 16;
const VARIES: u8 = 32;
const LANGUAGE: u8 = 64;
const MORE: u8 = 128;
const TERMS: u8 = 1;
const FOR_ONE_USER: u8 = 2;
const HIDDEN: u8 = 4;
const DIGEST_TAG: u8 = 8;

/// The metadata that is stored with a response: its age, its terms, and which part and variant it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResponseMeta {
    pub(crate) terms: ReuseTerms,
    /// The response's age when it was stored (RFC 9111, 4.2.3).
    pub(crate) age: Duration,
    /// Which part of the whole the response's content is; `None` for the whole.
    pub(crate) part: Option<Part>,
    /// Boxed, because most resources have no variants.
    pub(crate) variant: Option<Box<VariantId>>,
    /// The terms that the handler stated, if any: a 304 without terms leaves them as they are.
    pub(crate) handler_terms: Option<Box<CacheTerms>>,
    /// Whether its `ETag` is the guard's, which the inner service does not know.
    pub(crate) has_digest_tag: bool,
}

/// Identifies the response among its resource's variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VariantId {
    /// The generation of the resource's variants. It is part of the other variants' keys, so a new generation makes
    /// them unreachable.
    pub(crate) generation: u64,
    pub(crate) names: Names,
    pub(crate) variant: Variant,
}

impl ResponseMeta {
    /// The metadata of a response that is shared with waiters at this age, and not stored.
    pub(crate) fn shared_only(says_shared: bool, age: Duration, variant: Option<Box<VariantId>>) -> Self {
        let terms = ReuseTerms {
            lifetime: Duration::ZERO,
            stale: StaleWindows::default(),
            revalidate_always: true,
            immutable: false,
            says_shared,
        };
        Self { terms, age, part: None, variant, handler_terms: None, has_digest_tag: false }
    }

    /// Whether the response is the variant for a request with these headers.
    pub(crate) fn is_for(&self, request: &HeaderMap, normal: Normalization) -> bool {
        self.variant.as_ref().is_none_or(|variant| {
            let one = slice::from_ref(&variant.variant);
            Variant::select(&variant.names, request, one, normal).is_some()
        })
    }

    /// The response's age at `now` (`current_age` of RFC 9111, 4.2.3), and its terms with the lifetime of its entry, which is
    /// shorter if it was jittered or ended early.
    pub(crate) fn at(&self, entry: &Entry, now: u64) -> (Duration, ReuseTerms) {
        let now = entry.judged_at(now);
        let age = self.age.saturating_add(Duration::from_millis(now.saturating_sub(entry.stored_at)));
        let entry_lifetime = Duration::from_millis(entry.fresh_until().saturating_sub(entry.stored_at));
        // An entry that `expire` has marked is stale from now on, but its stale windows begin where they would have begun without the mark.
        let entry_lifetime =
            if entry.expiry.is_expired() { age } else { self.age.saturating_add(entry_lifetime) };
        let lifetime = self.terms.lifetime.min(entry_lifetime);
        (age, ReuseTerms { lifetime, ..self.terms })
    }

    /// Writes the metadata, before the bytes of the response.
    fn encode(&self, out: &mut BytesMut) -> Option<()> {
        let start = out.len();
        let ReuseTerms { lifetime, stale, revalidate_always, immutable, says_shared } = self.terms;
        let language = self.variant.as_ref().and_then(|variant| variant.variant.language.as_ref());
        let flags = [
            (REVALIDATE_ALWAYS, revalidate_always),
            (IMMUTABLE, immutable),
            (SAYS_SHARED, says_shared),
            (ON_REQUEST, stale.on_request),
            (PART, self.part.is_some()),
            (VARIES, self.variant.is_some()),
            (LANGUAGE, language.is_some()),
            (MORE, self.handler_terms.is_some() || self.has_digest_tag),
        ];
        out.put_u8(LAYOUT);
        out.put_u8(flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum());
        // The length of the metadata, filled in once the rest is written.
        out.put_u16_le(0);
        let windows = [stale.while_revalidate, stale.if_error, stale.on_disconnect];
        for time in [self.age, lifetime].into_iter().chain(windows) {
            out.put_u64_le(ms(time));
        }
        if let Some(Part { first, last, complete }) = self.part {
            out.put_u64_le(first);
            out.put_u64_le(last);
            out.put_u64_le(complete.unwrap_or(u64::MAX));
        }
        if let Some(variant) = &self.variant {
            out.put_u64_le(variant.generation);
            out.put_slice(&variant.variant.fingerprint.0);
            let names = variant.names.to_text();
            out.put_u16_le(u16::try_from(names.len()).ok()?);
            out.put_slice(names.as_bytes());
        }
        if let Some((others, language)) = language {
            out.put_slice(&others.0);
            out.put_u8(u8::try_from(language.len()).ok()?);
            out.put_slice(language.as_bytes());
        }
        self.encode_more(out);
        let length = u16::try_from(out.len() - start).ok()?;
        out[start + 2..start + 4].copy_from_slice(&length.to_le_bytes());
        Some(())
    }

    /// Writes what only few responses have, if this one has any of it.
    fn encode_more(&self, out: &mut BytesMut) {
        let handler_terms = self.handler_terms.as_deref();
        let bits = [
            (TERMS, handler_terms.is_some()),
            (FOR_ONE_USER, handler_terms.is_some_and(|terms| terms.is_for_one_user)),
            (HIDDEN, handler_terms.is_some_and(|terms| terms.is_hidden)),
            (DIGEST_TAG, self.has_digest_tag),
        ];
        let bits: u8 = bits.iter().filter(|(_, is_set)| *is_set).map(|(bit, _)| bit).sum();
        if bits != 0 {
            out.put_u8(bits);
        }
        if let Some(CacheTerms { fresh_for, stale_while_revalidate, stale_if_error, .. }) = handler_terms {
            for time in [fresh_for, stale_while_revalidate, stale_if_error] {
                out.put_u64_le(time.map_or(u64::MAX, ms));
            }
        }
    }

    /// The metadata of an entry that is a response, and the offset of the response.
    pub(crate) fn of(entry: &Entry) -> Option<(Self, usize)> {
        if entry.encoding != Encoding::HTTP || entry.kind != EntryKind::Value {
            return None;
        }
        Self::decode(&entry.payload)
    }

    /// Reads the output of `encode`, and the offset of the response. `None` for other bytes.
    fn decode(raw: &Bytes) -> Option<(Self, usize)> {
        let fixed = raw.first_chunk::<FIXED>()?;
        let length = usize::from(u16::from_le_bytes([fixed[2], fixed[3]]));
        let flags = fixed[1];
        if fixed[0] != LAYOUT {
            return None;
        }
        let mut fields = MetaFields(raw.get(4..length)?);
        let [age, lifetime] = [fields.millis()?, fields.millis()?];
        let [while_revalidate, if_error, on_disconnect] =
            [fields.millis()?, fields.millis()?, fields.millis()?];
        let stale =
            StaleWindows { while_revalidate, if_error, on_disconnect, on_request: flags & ON_REQUEST != 0 };
        let part = if flags & PART == 0 { None } else { Some(fields.part()?) };
        let variant = if flags & VARIES == 0 { None } else { Some(fields.variant(flags & LANGUAGE != 0)?) };
        let [more] = if flags & MORE == 0 { [0] } else { fields.array()? };
        let handler_terms =
            if more & TERMS == 0 { None } else { Some(Box::new(fields.handler_terms(more)?)) };
        let has_digest_tag = more & DIGEST_TAG != 0;
        let terms = ReuseTerms {
            lifetime,
            stale,
            revalidate_always: flags & REVALIDATE_ALWAYS != 0,
            immutable: flags & IMMUTABLE != 0,
            says_shared: flags & SAYS_SHARED != 0,
        };
        fields
            .0
            .is_empty()
            .then_some((Self { terms, age, part, variant, handler_terms, has_digest_tag }, length))
    }
}

struct MetaFields<'a>(&'a [u8]);

impl<'a> MetaFields<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn millis(&mut self) -> Option<Duration> {
        self.u64().map(Duration::from_millis)
    }

    fn text(&mut self, length: usize) -> Option<&'a str> {
        std::str::from_utf8(self.bytes(length)?).ok()
    }

    fn part(&mut self) -> Option<Part> {
        let (first, last, complete) = (self.u64()?, self.u64()?, self.u64()?);
        let complete = Some(complete).filter(|&complete| complete != u64::MAX);
        Part::new(first, last, complete)
    }

    fn handler_terms(&mut self, bits: u8) -> Option<CacheTerms> {
        let mut time = || Some(Some(self.u64()?).filter(|&ms| ms != u64::MAX).map(Duration::from_millis));
        Some(CacheTerms {
            fresh_for: time()?,
            stale_while_revalidate: time()?,
            stale_if_error: time()?,
            is_for_one_user: bits & FOR_ONE_USER != 0,
            is_hidden: bits & HIDDEN != 0,
            ..CacheTerms::default()
        })
    }

    fn variant(&mut self, has_language: bool) -> Option<Box<VariantId>> {
        let generation = self.u64()?;
        let fingerprint = Fingerprint(self.array()?);
        let length = usize::from(self.array().map(u16::from_le_bytes)?);
        let names = Names::from_text(self.text(length)?)?;
        let language = match has_language {
            true => {
                let others = Fingerprint(self.array()?);
                let [length] = self.array()?;
                Some((others, self.text(length.into())?.to_owned()))
            }
            false => None,
        };
        Some(Box::new(VariantId { generation, names, variant: Variant { fingerprint, language } }))
    }
}
