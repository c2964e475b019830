//! Byte ranges: the part of a stored response that answers a request (RFC 9110, 14).
//!
//! Numbers come from clients and origins, so all arithmetic here is checked.

use std::time::SystemTime;

use http::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_RANGE, ETAG, EXPIRES, HeaderMap, HeaderValue,
    IF_RANGE, RANGE,
};

use super::cdn::CDN_CACHE_CONTROL;
use super::dates::{self};
use super::fields::remove_content_digests;
use super::validation::{is_strong, last_modified_if_strong, not_modified};

/// The single range of a request. Several ranges are answered with the whole: a server may ignore any `Range` (RFC
/// 9110, 14.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteRange {
    /// From the first to the last byte, both inclusive; to the end without a last one.
    From(u64, Option<u64>),
    /// This many bytes at the end.
    Last(u64),
}

/// The kind of answer to a request with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeAnswer {
    /// 200, as if no range had been requested.
    Whole,
    /// 206.
    Part(Part),
    /// 416 (RFC 9110, 15.5.17).
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
    /// The range of a request; `None` if a cache may ignore it.
    pub(crate) fn of(request: &HeaderMap) -> Option<Self> {
        let mut lines = request.get_all(RANGE).iter();
        let (line, None) = (lines.next()?, lines.next()) else { return None };
        Self::parse(line.as_bytes())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut specs = specs(text)?;
        let (spec, None) = (specs.next()?, specs.next()) else { return None };
        Self::of_spec(spec)
    }

    fn of_spec(spec: &[u8]) -> Option<Self> {
        let dash = spec.iter().position(|&byte| byte == b'-')?;
        match (&spec[..dash], &spec[dash + 1..]) {
            ([], last) => Some(Self::Last(number(last)?)),
            (first, []) => Some(Self::From(number(first)?, None)),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                // RFC 9110, 14.1.1: a range that ends before it begins is invalid, and so ignored.
                (first <= last).then_some(Self::From(first, Some(last)))
            }
        }
    }

    /// The bytes of a whole with this length.
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
        let wanted = match (self, stored.complete) {
            (_, Some(complete)) => match self.of_whole(complete) {
                RangeAnswer::Part(part) => part,
                _ => return None,
            },
            // If the length of the whole is unknown, only a range with both ends can be located.
            (Self::From(first, Some(last)), None) => Part { first, last, complete: None },
            _ => return None,
        };
        (stored.first <= wanted.first && wanted.last <= stored.last).then_some(wanted)
    }
}

/// Whether a `Range` in bytes is valid, so that an origin may answer it with a part (RFC 9110, 14.1.1 and 14.2).
pub(crate) fn is_valid(range: &HeaderValue) -> bool {
    let Some(specs) = specs(range.as_bytes()) else { return false };
    let mut specs = specs.peekable();
    specs.peek().is_some() && specs.all(|spec| ByteRange::of_spec(spec).is_some())
}

/// The members of a set of byte ranges.
fn specs(text: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    let at = text.iter().position(|&byte| byte == b'=')?;
    let is_bytes = text[..at].trim_ascii().eq_ignore_ascii_case(b"bytes");
    let specs = text[at + 1..].split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
    is_bytes.then(|| specs.filter(|spec| !spec.is_empty()))
}

/// How a stored 200 with this length answers a GET; without a `ByteRange` with the whole.
pub(crate) fn answer(request: &HeaderMap, stored: &HeaderMap, length: u64, now: SystemTime) -> RangeAnswer {
    match ByteRange::of(request) {
        Some(range) if if_range_holds(request, stored, now) => range.of_whole(length),
        _ => RangeAnswer::Whole,
    }
}

/// Whether the client's condition matches the stored representation, so that the range applies (RFC 9110, 13.1.5).
pub(crate) fn if_range_holds(request: &HeaderMap, stored: &HeaderMap, now: SystemTime) -> bool {
    let mut lines = request.get_all(IF_RANGE).iter();
    let condition = match (lines.next(), lines.next()) {
        (None, _) => return true,
        (Some(line), None) => line.as_bytes(),
        _ => return false,
    };
    if condition.contains(&b'"') {
        // The strong comparison.
        return is_strong(condition) && stored.get(ETAG).is_some_and(|etag| etag.as_bytes() == condition);
    }
    let Some(asked) = dates::parse(condition, now) else { return false };
    last_modified_if_strong(stored, now) == Some(asked)
}

impl Part {
    /// The position of a 206's content by its own head (RFC 9110, 14.4). `None` for several parts, an unknown unit,
    /// and contradictory numbers.
    pub(crate) fn of_response(response: &HeaderMap) -> Option<Self> {
        let mut lines = response.get_all(CONTENT_RANGE).iter();
        let (line, None) = (lines.next()?, lines.next()) else { return None };
        let text = line.as_bytes();
        let (unit, rest) = text.split_at(text.iter().position(|&byte| byte == b' ')?);
        let rest = rest.trim_ascii();
        let dash = rest.iter().position(|&byte| byte == b'-')?;
        let slash = rest.iter().position(|&byte| byte == b'/').filter(|&slash| slash > dash)?;
        let (first, last) = (number(&rest[..dash])?, number(&rest[dash + 1..slash])?);
        let complete = match &rest[slash + 1..] {
            b"*" => None,
            complete => Some(number(complete)?),
        };
        let sound = unit.eq_ignore_ascii_case(b"bytes")
            && first <= last
            && complete.is_none_or(|complete| last < complete);
        sound.then_some(Self { first, last, complete })
    }

    /// The part that content of this length is.
    ///
    /// If the length contradicts the head, the content is not stored. To the letter, it begins where the head says,
    /// and it ends the whole if the head says so: an error in the origin's arithmetic.
    pub(crate) fn with_content(self, length: u64, by_the_letter: bool) -> Option<Self> {
        let last = self.first.checked_add(length.checked_sub(1)?)?;
        if last == self.last {
            return Some(self);
        }
        let to_the_end = self.complete.is_some_and(|complete| complete - 1 == self.last);
        let complete = match self.complete {
            _ if to_the_end => Some(last.checked_add(1)?),
            complete => complete.filter(|&complete| last < complete),
        };
        by_the_letter.then_some(Self { last, complete, ..self })
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.first == 0 && self.complete.is_some_and(|complete| complete - 1 == self.last)
    }

    /// How many bytes it has; never zero.
    pub(crate) fn length(&self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }

    /// The position of these bytes in the content of a stored part (or of a whole, which begins at 0).
    pub(crate) fn within(&self, stored_first: u64) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(self.first.checked_sub(stored_first)?).ok()?;
        let length = usize::try_from(self.length()).ok()?;
        Some(start..start.checked_add(length)?)
    }

    /// Both as one part, if they touch or overlap and agree about the length of the whole (RFC 9110, 15.3.7.3).
    /// `validation` checks that they belong to one representation.
    pub(crate) fn joined(&self, other: &Self) -> Option<Self> {
        let touch = |end: u64, start: u64| end.checked_add(1).is_none_or(|after| start <= after);
        if !touch(self.last, other.first) || !touch(other.last, self.first) {
            return None;
        }
        let complete = match (self.complete, other.complete) {
            (Some(one), Some(another)) if one != another => return None,
            (one, another) => one.or(another),
        };
        let (first, last) = (self.first.min(other.first), self.last.max(other.last));
        complete.is_none_or(|complete| last < complete).then_some(Self { first, last, complete })
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
/// checked that both have the same strong validator (RFC 9111, 3.4).
pub(crate) fn join(stored: (Part, &[u8]), new: (Part, &[u8])) -> Option<(Part, Vec<u8>)> {
    let all = stored.0.joined(&new.0)?;
    // Not longer than both contents together, whatever the positions claim.
    let length = usize::try_from(all.length()).ok().filter(|&all| all <= stored.1.len() + new.1.len())?;
    let mut content = vec![0; length];
    for (part, bytes) in [stored, new] {
        let place = content.get_mut(part.within(all.first)?)?;
        place.copy_from_slice(Some(bytes).filter(|bytes| bytes.len() == place.len())?);
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

/// Digits only; a number that overflows counts as the largest.
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let fold = |sum: u64, digit: &u8| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    Some(digits.iter().try_fold(0, fold).unwrap_or(u64::MAX))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/ranges_tests.rs"]
mod tests;
