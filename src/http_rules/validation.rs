//! Validates a stored response with the origin, and answers clients' conditions (RFC 9111, 4.3).

use std::time::SystemTime;

use http::StatusCode;
use http::header::{
    self, AGE, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, DATE, ETAG, HeaderMap,
    HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, LAST_MODIFIED, RANGE,
};

use super::dates::date;
use super::fields::{CONTENT_DIGEST, content_length, is_content_digest, is_of_this_hop};

/// Whether a response can be validated.
pub(crate) fn has_validator(response: &HeaderMap, now: SystemTime) -> bool {
    etag(response).is_some() || date(response, &LAST_MODIFIED, now).is_some()
}

/// The entity tag; `None` if there are two.
fn etag(response: &HeaderMap) -> Option<&HeaderValue> {
    let mut lines = response.get_all(ETAG).iter();
    let (line, None) = (lines.next()?, lines.next()) else { return None };
    (!line.is_empty()).then_some(line)
}

/// Removes the conditions for the client's own copy from a request with a shared response: a 304 to them would be
/// stored as if it were the resource (A9).
pub(crate) fn remove_conditions(request: &mut HeaderMap) {
    for name in [IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_RANGE, RANGE] {
        request.remove(name);
    }
}

/// Makes a request validate the stored response (RFC 9111, 4.3.1). Everything else in it stays as the triggering
/// request has it. Sends both validators: an origin that knows entity tags ignores the date (RFC 9110, 13.1.3), and
/// any other uses the date.
pub(crate) fn add_conditions(request: &mut HeaderMap, stored: &HeaderMap) {
    remove_conditions(request);
    if let Some(etag) = etag(stored) {
        request.insert(IF_NONE_MATCH, etag.clone());
    }
    let mut modified = stored.get_all(LAST_MODIFIED).iter();
    if let (Some(modified), None) = (modified.next(), modified.next()) {
        request.insert(IF_MODIFIED_SINCE, modified.clone());
    }
}

/// Whether a client's condition says that it has the stored response, so that it is answered with 304 (RFC 9111,
/// 4.3.2). `received` is when the stored response came.
pub(crate) fn is_not_modified(
    request: &HeaderMap,
    status: StatusCode,
    stored: &HeaderMap,
    received: SystemTime,
    now: SystemTime,
) -> bool {
    // "One of its stored 200 (OK) or 206 (Partial Content) responses".
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
    // Without `Last-Modified`, use the time when it was made, else when it came.
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
    let is_kept = |name: &HeaderName| {
        let is_described = described.contains(name) || is_content_digest(name);
        !(is_described || (has_etag && *name == LAST_MODIFIED))
    };
    stored
        .iter()
        .filter(|(name, _)| is_kept(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// Whether a 304 to the guard's own condition confirms the stored response (RFC 9111, 4.3.4): it does, unless it
/// names another one.
///
/// By the RFC, a 304 without validators confirms a stored response without them, and one with a strong tag a
/// response with the same strong tag. But the guard asks about one tag or one date, so the 304 cannot concern any
/// other response. nginx gives a compressed 200 a weak tag and its 304 the strong one, and an origin that has begun
/// to send tags may name one although the guard asked about a date.
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
/// The result has the update's age: it is judged like a response that just came.
pub(crate) fn freshened(stored: &HeaderMap, update: &HeaderMap) -> HeaderMap {
    let mut headers = stored.clone();
    headers.remove(AGE);
    if !update.contains_key(DATE) {
        // An update without `Date` was made when it came (RFC 9110, 6.6.1), not when the stored response was.
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

/// Whether an update has a strong tag that the stored response did not have. It would vouch for each byte of a body
/// (RFC 9110, 8.8.1) that was confirmed by a weaker validator only: parts would be joined by it.
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
    /// The representation has changed.
    Invalidate,
    /// No effect.
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
    // Without a validator nothing confirms that the body is still the same, and any client could keep it fresh for
    // ever by repeated HEADs.
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
pub(crate) fn is_strong(tag: &[u8]) -> bool {
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
pub(crate) fn last_modified_if_strong(stored: &HeaderMap, now: SystemTime) -> Option<SystemTime> {
    let modified = date(stored, &LAST_MODIFIED, now)?;
    let made = date(stored, &DATE, now)?;
    made.duration_since(modified).is_ok_and(|age| age.as_secs() >= 1).then_some(modified)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/validation_tests.rs"]
mod tests;
