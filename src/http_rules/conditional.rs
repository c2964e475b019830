//! Conditional requests and byte ranges.
//!
//! A stored response is validated with the origin, and clients' conditions are answered from it (RFC 9111, 4.3). A range
//! request is answered with a part of it (RFC 9110, 14). Numbers come from clients and origins, so all arithmetic here is
//! checked.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/ranges_tests.rs"]
mod ranges_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/validation_tests.rs"]
mod tests;

use std::time::SystemTime;

use http::header::{
    ACCEPT_RANGES, AGE, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, DATE,
    ETAG, EXPIRES, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE,
    LAST_MODIFIED, RANGE,
};
use http::{StatusCode, header};
use sha2::{Digest as _, Sha256};

use super::cache_control::CDN_CACHE_CONTROL;
use super::fields::{
    CONTENT_DIGEST, content_length, date, is_content_digest, is_encoded, is_of_this_hop, members, number,
    parse_date, remove_content_digests, single, split_once,
};
use super::vary::Fingerprint;

/// Whether a response can be validated: it has an entity tag, or a valid `Last-Modified`.
pub(crate) fn has_validator(response: &HeaderMap, now: SystemTime) -> bool {
    etag(response).is_some() || date(response, &LAST_MODIFIED, now).is_some()
}

/// The entity tag of a response; `None` if it has no tag, an empty one, or several.
fn etag(response: &HeaderMap) -> Option<&HeaderValue> {
    single(response, &ETAG).filter(|line| !line.is_empty())
}

/// A tag for a whole response without one: the digest of its content, and of the fields that tell representations of one resource apart,
/// because a tag belongs to one representation (RFC 9110, 8.8.1).
///
/// Strong only if the content is coded: no layer between the guard and the client changes its bytes any more. Content without a coding
/// may be compressed there, and a client that combined parts of both by a strong tag would have neither (RFC 9110, 8.8.3.3).
pub(crate) fn digest_tag(headers: &HeaderMap, content: &[u8]) -> Option<HeaderValue> {
    let mut digest = Sha256::new();
    for name in [CONTENT_TYPE, CONTENT_ENCODING, header::CONTENT_LANGUAGE] {
        for line in headers.get_all(name) {
            digest.update(line);
            digest.update(b"\n");
        }
        digest.update(b"\n");
    }
    digest.update(content);
    let weak = if is_encoded(headers) { "" } else { "W/" };
    HeaderValue::try_from(format!("{weak}\"{}\"", Fingerprint(digest.finalize().into()).half())).ok()
}

/// Removes the conditions for the client's own copy from a request with a shared response: a 304 to them would be
/// stored as if it were the resource (A9).
pub(crate) fn remove_conditions(request: &mut HeaderMap) {
    for name in [IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_RANGE, RANGE] {
        request.remove(name);
    }
}

/// Makes a request validate the stored response (RFC 9111, 4.3.1). Its other headers stay as in the triggering
/// request. Sends both validators: an origin that knows entity tags ignores the date (RFC 9110, 13.1.3), and
/// any other uses the date.
pub(crate) fn add_conditions(request: &mut HeaderMap, stored: &HeaderMap) {
    remove_conditions(request);
    if let Some(etag) = etag(stored) {
        request.insert(IF_NONE_MATCH, etag.clone());
    }
    if let Some(modified) = single(stored, &LAST_MODIFIED) {
        request.insert(IF_MODIFIED_SINCE, modified.clone());
    }
}

/// Whether a client's condition says that it has the stored response, so that it is answered with 304 (RFC 9111,
/// 4.3.2). `received` is when the stored response was received.
pub(crate) fn is_not_modified(
    request: &HeaderMap,
    status: StatusCode,
    stored: &HeaderMap,
    received: SystemTime,
    now: SystemTime,
) -> bool {
    // RFC 9111, 4.3.2 allows this only for "one of its stored 200 (OK) or 206 (Partial Content) responses".
    if !matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
        return false;
    }
    if request.contains_key(IF_NONE_MATCH) {
        // Entity tags take precedence over dates (RFC 9110, 13.2.2).
        let stored = etag(stored).map(|tag| opaque(tag.as_bytes()));
        return request.get_all(IF_NONE_MATCH).iter().any(|line| {
            line.as_bytes().trim_ascii() == b"*"
                || entity_tags(line.as_bytes()).any(|tag| stored == Some(opaque(tag)))
        });
    }
    let Some(since) = date(request, &IF_MODIFIED_SINCE, now) else { return false };
    // Without `Last-Modified`, use the time when the response was generated, else when it was received.
    let changed = if stored.contains_key(LAST_MODIFIED) {
        date(stored, &LAST_MODIFIED, now)
    } else {
        date(stored, &DATE, now).or(Some(received))
    };
    changed.is_some_and(|changed| changed <= since)
}

/// The headers of a stored response that a 304 carries: all but those that describe the omitted content (RFC 9110,
/// 15.4.5).
pub(crate) fn not_modified(stored: &HeaderMap) -> HeaderMap {
    let has_etag = stored.contains_key(ETAG);
    let described = [
        CONTENT_ENCODING,
        CONTENT_LENGTH,
        CONTENT_RANGE,
        CONTENT_TYPE,
        header::CONTENT_LANGUAGE,
        header::TRAILER,
    ];
    let is_retained = |name: &HeaderName| {
        let is_described = described.contains(name) || is_content_digest(name);
        !(is_described || (has_etag && *name == LAST_MODIFIED))
    };
    stored
        .iter()
        .filter(|(name, _)| is_retained(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// Whether a 304 to the guard's own condition confirms the stored response (RFC 9111, 4.3.4): it does, unless it
/// names another response.
///
/// By the RFC, a 304 without validators confirms a stored response without them, and one with a strong tag a
/// response with the same strong tag. But the guard's condition names one tag or one date, so the 304 cannot concern
/// any other response. nginx gives a compressed 200 a weak tag and its 304 the strong one, and an origin that has begun
/// to send tags may name one although the guard's condition was a date.
pub(crate) fn is_about(update: &HeaderMap, stored: &HeaderMap, now: SystemTime) -> bool {
    let dates = (date(update, &LAST_MODIFIED, now), date(stored, &LAST_MODIFIED, now));
    match (etag(update), etag(stored)) {
        (Some(new), Some(old)) => opaque(new.as_bytes()) == opaque(old.as_bytes()),
        (Some(_), None) => dates.1.is_some() && (dates.0.is_none() || dates.0 == dates.1),
        (None, _) => dates.0.is_none() || dates.1.is_none() || dates.0 == dates.1,
    }
}

/// A stored response's headers after a 304, or another update (RFC 9111, 3.2): each field of the update replaces
/// all lines of its name, except hop-by-hop fields and fields that describe content, because the content is still
/// the stored one.
///
/// The result has the update's age: it is classified like a response that was just received.
pub(crate) fn freshened(stored: &HeaderMap, update: &HeaderMap) -> HeaderMap {
    let mut headers = stored.clone();
    headers.remove(AGE);
    if !update.contains_key(DATE) {
        // An update without `Date` was generated when it was received (RFC 9110, 6.6.1), not when the stored response was.
        headers.remove(DATE);
    }
    let strengthens = strengthens(update, stored);
    for name in update.keys().filter(|name| is_updated(update, name) && !(strengthens && **name == ETAG)) {
        headers.remove(name);
        for value in update.get_all(name) {
            // A head with as many lines as a map can hold is too long to be stored anyway.
            if headers.try_append(name.clone(), value.clone()).is_err() {
                return headers;
            }
        }
    }
    headers
}

/// Whether an update has a strong tag that the stored response did not have. A strong tag guarantees each byte of the
/// body (RFC 9110, 8.8.1), so parts would be joined by it; but this body was confirmed by a weaker validator only.
fn strengthens(update: &HeaderMap, stored: &HeaderMap) -> bool {
    etag(update).is_some_and(|new| is_strong(new.as_bytes()) && etag(stored) != Some(new))
}

fn is_updated(update: &HeaderMap, name: &HeaderName) -> bool {
    let of_content = [CONTENT_LENGTH, CONTENT_ENCODING, CONTENT_RANGE].contains(name);
    // Describes the update's own content (RFC 9530, 2). `Content-MD5` is older than that rule: RFC 9111, 3.2 makes
    // no exception for it.
    let describes_content = of_content || name.as_str() == CONTENT_DIGEST;
    !describes_content && !is_of_this_hop(update, name)
}

/// The effect of the response to a HEAD on a stored GET (RFC 9111, 4.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadUpdate {
    /// It repeats a validator, so the representation is the same: [`freshened`] by this head.
    Freshen,
    /// The representation has changed, so the stored response is outdated.
    Invalidate,
    /// The head proves nothing: the stored response stays as it is.
    Ignore,
}

/// Compares the response to a HEAD with a stored response of `length` bytes.
pub(crate) fn head_update(
    (status, head): (StatusCode, &HeaderMap),
    (stored_status, stored): (StatusCode, &HeaderMap),
    length: u64,
    now: SystemTime,
) -> HeadUpdate {
    if status != StatusCode::OK {
        return HeadUpdate::Ignore;
    }
    if stored_status != StatusCode::OK {
        // The stored error or redirect is outdated: the resource exists at this URI by now.
        return HeadUpdate::Invalidate;
    }
    let same_tag = etag(head).is_none_or(|new| etag(stored) == Some(new));
    let same_date = !head.contains_key(LAST_MODIFIED)
        || date(head, &LAST_MODIFIED, now).is_some_and(|new| date(stored, &LAST_MODIFIED, now) == Some(new));
    let same_length = content_length(head).is_ok_and(|new| new.is_none_or(|new| new == length));
    if !(same_tag && same_date && same_length) {
        return HeadUpdate::Invalidate;
    }
    // A head without a validator does not confirm that the body is still the same: any client could keep the stored
    // response fresh for ever by repeated HEADs.
    let is_repeated = etag(head).is_some() || head.contains_key(LAST_MODIFIED);
    if is_repeated { HeadUpdate::Freshen } else { HeadUpdate::Ignore }
}

/// Whether two responses have the same representation, byte for byte, so that their parts can be combined (RFC
/// 9111, 3.4): by a strong validator.
pub(crate) fn is_same_representation(one: &HeaderMap, other: &HeaderMap, now: SystemTime) -> bool {
    match (etag(one), etag(other)) {
        (Some(one), Some(other)) => one == other && is_strong(one.as_bytes()),
        (None, None) => {
            let modified = last_modified_if_strong(one, now);
            modified.is_some() && modified == last_modified_if_strong(other, now)
        }
        _ => false,
    }
}

/// Whether an entity tag is strong (RFC 9110, 8.8.3).
fn is_strong(tag: &[u8]) -> bool {
    tag.len() >= 2 && tag.starts_with(b"\"") && tag.ends_with(b"\"")
}

/// The part of a tag that the weak comparison uses (RFC 9110, 8.8.3.2).
fn opaque(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// The members of a list of entity tags, which may contain commas (RFC 9110, 8.8.3).
fn entity_tags(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = list;
    std::iter::from_fn(move || {
        let start = rest.iter().position(|byte| !b", \t".contains(byte))?;
        rest = &rest[start..];
        // A quoted tag ends at the next quote, an unquoted one at the comma. Never scan further than that, or a
        // list of many members would be scanned as many times.
        let first = rest.iter().position(|byte| b"\",".contains(byte)).unwrap_or(rest.len());
        let end = match rest.get(first) {
            Some(b'"') => {
                let after = first + 1;
                rest[after..].iter().position(|&byte| byte == b'"').map_or(rest.len(), |at| after + at + 1)
            }
            _ => first,
        };
        let tag = rest[..end].trim_ascii();
        rest = &rest[end..];
        Some(tag)
    })
}

/// `Last-Modified` if it is a strong validator: so long before `Date` that the representation cannot have changed
/// twice in between (RFC 9110, 8.8.2.2).
fn last_modified_if_strong(stored: &HeaderMap, now: SystemTime) -> Option<SystemTime> {
    let modified = date(stored, &LAST_MODIFIED, now)?;
    let made = date(stored, &DATE, now)?;
    made.duration_since(modified).is_ok_and(|age| age.as_secs() >= 1).then_some(modified)
}

/// The single range of a request. Several ranges are answered with the whole: a server may ignore any `Range` (RFC
/// 9110, 14.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteRange {
    /// From the first to the last byte, both inclusive; `None` is the end of the whole.
    From(u64, Option<u64>),
    /// This many bytes at the end.
    Last(u64),
}

/// The kind of answer to a request with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeAnswer {
    /// 200 with the whole, as if no range had been requested.
    Whole,
    /// 206, with this part of the whole.
    Part(Part),
    /// 416: the whole has none of the requested bytes (RFC 9110, 15.5.17).
    Unsatisfiable,
}

/// The position of a part in a representation; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) first: u64,
    /// The last byte, inclusive: not before `first`.
    pub(crate) last: u64,
    /// The length of the whole, if known: more than `last`.
    pub(crate) complete: Option<u64>,
}

impl ByteRange {
    /// The range of a request; `None` if the request has none, several, or an invalid one: a cache may ignore these.
    pub(crate) fn of(request: &HeaderMap) -> Option<Self> {
        let mut specs = specs(single(request, &RANGE)?.as_bytes())?;
        let (spec, None) = (specs.next()?, specs.next()) else { return None };
        Self::of_spec(spec)
    }

    fn of_spec(spec: &[u8]) -> Option<Self> {
        match split_once(spec, b'-')? {
            ([], last) => Some(Self::Last(number(last)?)),
            (first, []) => Some(Self::From(number(first)?, None)),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                // RFC 9110, 14.1.1: a range that ends before it begins is invalid, and so ignored.
                (first <= last).then_some(Self::From(first, Some(last)))
            }
        }
    }

    /// The answer to a request with this range, from a whole of this length.
    pub(crate) fn of_whole(self, length: u64) -> RangeAnswer {
        let first = match self {
            Self::From(first, _) => first,
            Self::Last(0) => return RangeAnswer::Unsatisfiable,
            // Satisfiable, but `Content-Range` cannot express an empty range (RFC 9110, 14.4).
            Self::Last(_) if length == 0 => return RangeAnswer::Whole,
            Self::Last(count) => length.saturating_sub(count),
        };
        if first >= length {
            return RangeAnswer::Unsatisfiable;
        }
        let last = match self {
            Self::From(_, Some(last)) => last.min(length - 1),
            _ => length - 1,
        };
        RangeAnswer::Part(Part { first, last, complete: Some(length) })
    }

    /// The requested bytes in a stored part, if it contains all of them.
    pub(crate) fn of_part(self, stored: Part) -> Option<Part> {
        let requested = match (self, stored.complete) {
            (_, Some(complete)) => match self.of_whole(complete) {
                RangeAnswer::Part(part) => part,
                _ => return None,
            },
            // If the length of the whole is unknown, only a range with both ends can be located.
            (Self::From(first, Some(last)), None) => Part { first, last, complete: None },
            _ => return None,
        };
        (stored.first <= requested.first && requested.last <= stored.last).then_some(requested)
    }
}

/// Whether a `Range` in bytes is valid, so that an origin may answer it with a part (RFC 9110, 14.1.1 and 14.2).
pub(crate) fn is_range(range: &HeaderValue) -> bool {
    let Some(specs) = specs(range.as_bytes()) else { return false };
    let mut specs = specs.peekable();
    specs.peek().is_some() && specs.all(|spec| ByteRange::of_spec(spec).is_some())
}

/// The members of a set of byte ranges; `None` for a `Range` in another unit.
fn specs(text: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    let (unit, ranges) = split_once(text, b'=')?;
    let is_bytes = unit.trim_ascii().eq_ignore_ascii_case(b"bytes");
    is_bytes.then(|| members(ranges).filter(|spec| !spec.is_empty()))
}

/// How a stored 200 with this length answers a GET: with the whole, unless the GET has a single valid range and its
/// `If-Range`, if any, matches.
pub(crate) fn range_answer(
    request: &HeaderMap,
    stored: &HeaderMap,
    length: u64,
    now: SystemTime,
) -> RangeAnswer {
    match ByteRange::of(request) {
        Some(range) if if_range_holds(request, stored, now) => range.of_whole(length),
        _ => RangeAnswer::Whole,
    }
}

/// Whether the client's condition matches the stored representation, so that the range applies (RFC 9110, 13.1.5).
pub(crate) fn if_range_holds(request: &HeaderMap, stored: &HeaderMap, now: SystemTime) -> bool {
    let Some(condition) = single(request, &IF_RANGE) else { return !request.contains_key(IF_RANGE) };
    let condition = condition.as_bytes();
    if condition.contains(&b'"') {
        // An entity tag, which is compared strongly.
        return is_strong(condition) && stored.get(ETAG).is_some_and(|etag| etag.as_bytes() == condition);
    }
    let Some(condition) = parse_date(condition, now) else { return false };
    last_modified_if_strong(stored, now) == Some(condition)
}

impl Part {
    /// The position of a 206's content by its own head (RFC 9110, 14.4). `None` for several parts, an unknown unit,
    /// and contradictory numbers.
    pub(crate) fn of_response(response: &HeaderMap) -> Option<Self> {
        let text = single(response, &CONTENT_RANGE)?.as_bytes();
        let (unit, rest) = split_once(text, b' ')?;
        let (range, complete) = split_once(rest.trim_ascii(), b'/')?;
        let (first, last) = split_once(range, b'-')?;
        let (first, last) = (number(first)?, number(last)?);
        let complete = match complete {
            b"*" => None,
            complete => Some(number(complete)?),
        };
        Self::new(first, last, complete).filter(|_| unit.eq_ignore_ascii_case(b"bytes"))
    }

    /// The part from the byte `first` to `last` of `complete` bytes; `None` if these numbers contradict each other.
    pub(crate) fn new(first: u64, last: u64, complete: Option<u64>) -> Option<Self> {
        let is_sound = first <= last && complete.is_none_or(|complete| last < complete);
        is_sound.then_some(Self { first, last, complete })
    }

    /// This part with the actual length of its content.
    ///
    /// If the length contradicts the head, the result is `None` by default, and the content is not stored. In strict mode the
    /// part then begins where the head says, and it reaches the end of the whole if the head says so: only the origin's
    /// arithmetic is wrong.
    pub(crate) fn with_content(self, length: u64, strict: bool) -> Option<Self> {
        let last = self.first.checked_add(length.checked_sub(1)?)?;
        if last == self.last {
            return Some(self);
        }
        let to_the_end = self.complete.is_some_and(|complete| complete - 1 == self.last);
        let complete = match self.complete {
            _ if to_the_end => Some(last.checked_add(1)?),
            complete => complete.filter(|&complete| last < complete),
        };
        strict.then_some(Self { last, complete, ..self })
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.first == 0 && self.complete.is_some_and(|complete| complete - 1 == self.last)
    }

    /// How many bytes the part has; never zero.
    pub(crate) fn length(&self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }

    /// The position of these bytes in the content of a stored part (or of a whole, which begins at 0).
    pub(crate) fn within(&self, stored_first: u64) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(self.first.checked_sub(stored_first)?).ok()?;
        let length = usize::try_from(self.length()).ok()?;
        Some(start..start.checked_add(length)?)
    }

    /// Both parts as one, if they touch or overlap and do not disagree about the length of the whole (RFC 9110, 15.3.7.3).
    /// The caller has checked that they belong to one representation.
    fn joined(&self, other: &Self) -> Option<Self> {
        let touch = |end: u64, start: u64| end.checked_add(1).is_none_or(|after| start <= after);
        if !touch(self.last, other.first) || !touch(other.last, self.first) {
            return None;
        }
        let complete = match (self.complete, other.complete) {
            (Some(one), Some(another)) if one != another => return None,
            (one, another) => one.or(another),
        };
        Self::new(self.first.min(other.first), self.last.max(other.last), complete)
    }

    /// Makes the head of a stored response the head of this part of it, with status 206 (RFC 9110,
    /// 15.3.7).
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        if Self::of_response(headers) != Some(*self) {
            remove_content_digests(headers);
        }
        let complete = self.complete.map_or_else(|| "*".to_owned(), |complete| complete.to_string());
        let range = format!("bytes {}-{}/{complete}", self.first, self.last);
        if let Ok(range) = HeaderValue::try_from(range) {
            headers.insert(CONTENT_RANGE, range);
        }
        headers.insert(CONTENT_LENGTH, HeaderValue::from(self.length()));
    }
}

/// Joins two parts of one representation and their content; where they overlap the new bytes count. The caller has
/// checked that both have the same strong validator (RFC 9111, 3.4; [`is_same_representation`]).
pub(crate) fn join(stored: (Part, &[u8]), new: (Part, &[u8])) -> Option<(Part, Vec<u8>)> {
    let all = stored.0.joined(&new.0)?;
    // Not longer than both contents together, whatever the positions claim.
    let length = usize::try_from(all.length()).ok().filter(|&all| all <= stored.1.len() + new.1.len())?;
    let mut content = vec![0; length];
    for (part, bytes) in [stored, new] {
        let target = content.get_mut(part.within(all.first)?)?;
        target.copy_from_slice(Some(bytes).filter(|bytes| bytes.len() == target.len())?);
    }
    Some((all, content))
}

/// The headers of a 416 for a stored whole with this length (RFC 9110, 15.5.17): those of the whole except the ones
/// that describe its content, so that a browser's CORS check passes. No lifetime: a cache on the way could store
/// the 416 as the resource.
pub(crate) fn unsatisfiable(stored: &HeaderMap, length: u64) -> HeaderMap {
    let mut headers = not_modified(stored);
    for name in [CACHE_CONTROL.as_str(), CDN_CACHE_CONTROL, EXPIRES.as_str()] {
        headers.remove(name);
    }
    if let Ok(range) = HeaderValue::try_from(format!("bytes */{length}")) {
        headers.insert(CONTENT_RANGE, range);
    }
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(0));
    headers
}
