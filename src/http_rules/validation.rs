//! Asking whether a stored response still holds, and answering clients who ask that (RFC 9111, 4.3).

use std::time::SystemTime;

use http::StatusCode;
use http::header::{
    self, AGE, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, DATE, ETAG, HeaderMap,
    HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, LAST_MODIFIED, RANGE,
};

use super::dates::date;
use super::fields::{CONTENT_DIGEST, content_length, is_content_digest, is_of_this_hop};

/// Whether there is something to validate a response with.
pub(crate) fn has_validator(response: &HeaderMap, now: SystemTime) -> bool {
    etag(response).is_some() || date(response, &LAST_MODIFIED, now).is_some()
}

/// The entity tag; none where there are two.
fn etag(response: &HeaderMap) -> Option<&HeaderValue> {
    let mut lines = response.get_all(ETAG).iter();
    let (line, None) = (lines.next()?, lines.next()) else { return None };
    (!line.is_empty()).then_some(line)
}

/// Takes what a client asked for its own copy off a request whose answer is for everyone: a 304 to it
/// would be stored as though it were the resource (A9).
pub(crate) fn remove_conditions(request: &mut HeaderMap) {
    for name in [IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_RANGE, RANGE] {
        request.remove(name);
    }
}

/// Makes a request ask whether the stored response still holds (RFC 9111, 4.3.1). All else in it stays
/// the triggering request's. With both validators: an origin that knows entity tags ignores the date
/// (RFC 9110, 13.1.3), and one that does not has the other.
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

/// Whether a client's condition says that it has what is stored, so that it is told 304 (RFC 9111,
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
        // It takes precedence over dates (RFC 9110, 13.2.2).
        let stored = etag(stored).map(|tag| opaque(tag.as_bytes()));
        return request.get_all(IF_NONE_MATCH).iter().any(|line| {
            line.as_bytes().trim_ascii() == b"*"
                || entity_tags(line.as_bytes()).any(|tag| stored == Some(opaque(tag)))
        });
    }
    let Some(since) = date(request, &IF_MODIFIED_SINCE, now) else { return false };
    // Without `Last-Modified` what is known is when it was made, else when it came.
    let changed = if stored.contains_key(LAST_MODIFIED) {
        date(stored, &LAST_MODIFIED, now)
    } else {
        date(stored, &DATE, now).or(Some(received))
    };
    changed.is_some_and(|changed| changed <= since)
}

/// What of a stored response a 304 carries: all but what describes content that is not sent (RFC 9110,
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

/// Whether a 304 to our own condition is about the stored response (RFC 9111, 4.3.4): it is, unless it
/// names another one.
///
/// The RFC takes a 304 without validators for one about a stored response without them, and one with a strong tag for one
/// about a response with the same strong tag. But we ask about one tag or one date, and there is nothing else that the
/// answer could be about: nginx gives a compressed 200 a weak tag and its 304 the strong one, and an origin that has learnt
/// to give tags meanwhile names one where it was asked about a date.
pub(crate) fn is_about(update: &HeaderMap, stored: &HeaderMap, now: SystemTime) -> bool {
    let dates = (date(update, &LAST_MODIFIED, now), date(stored, &LAST_MODIFIED, now));
    match (etag(update), etag(stored)) {
        (Some(new), Some(old)) => opaque(new.as_bytes()) == opaque(old.as_bytes()),
        (Some(_), None) => dates.1.is_some() && (dates.0.is_none() || dates.0 == dates.1),
        (None, _) => dates.0.is_none() || dates.1.is_none() || dates.0 == dates.1,
    }
}

/// A stored response's headers after a 304, or after what else updates them (RFC 9111, 3.2): each field
/// that the update has replaces all lines of its name, but for those of one hop and those that describe
/// content which is still the stored one.
///
/// The result says how old it is as the update does: it is to be judged like a response that just came.
pub(crate) fn freshened(stored: &HeaderMap, update: &HeaderMap) -> HeaderMap {
    let mut headers = stored.clone();
    headers.remove(AGE);
    if !update.contains_key(DATE) {
        // It was made when it came (RFC 9110, 6.6.1), and not when the stored one was.
        headers.remove(DATE);
    }
    let strengthens = strengthens(update, stored);
    for name in update.keys().filter(|name| is_updated(update, name) && !(strengthens && **name == ETAG)) {
        headers.remove(name);
        for value in update.get_all(name) {
            // A head of as many lines as a map can hold is too long to be stored anyway.
            if headers.try_append(name.clone(), value.clone()).is_err() {
                return headers;
            }
        }
    }
    headers
}

/// Whether an update has a strong tag that the stored response did not come with. It would vouch for each byte of a body
/// (RFC 9110, 8.8.1) of which a weaker validator has said that it is good enough: parts would be joined by it.
fn strengthens(update: &HeaderMap, stored: &HeaderMap) -> bool {
    etag(update).is_some_and(|new| is_strong(new.as_bytes()) && etag(stored) != Some(new))
}

fn is_updated(update: &HeaderMap, name: &HeaderName) -> bool {
    let of_content = [CONTENT_LENGTH, CONTENT_ENCODING, CONTENT_RANGE].contains(name);
    // Of the update's own content (RFC 9530, 2). `Content-MD5` is older than that rule: RFC 9111, 3.2 makes no exception for it.
    let describes_content = of_content || name.as_str() == CONTENT_DIGEST;
    !describes_content && !is_of_this_hop(update, name)
}

/// What the answer to a HEAD says about a stored GET (RFC 9111, 4.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadUpdate {
    /// It repeats a validator, so it is the same representation: [`freshened`] by this head.
    Freshen,
    /// It is another one by now.
    Invalidate,
    /// Nothing.
    Ignore,
}

/// Compares the answer to a HEAD with a stored response of `length` bytes.
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
        // There is something by now, or it is where it was asked for.
        return HeadUpdate::Invalidate;
    }
    let same_tag = etag(head).is_none_or(|new| etag(stored) == Some(new));
    let same_date = !head.contains_key(LAST_MODIFIED)
        || date(head, &LAST_MODIFIED, now).is_some_and(|new| date(stored, &LAST_MODIFIED, now) == Some(new));
    let same_length = content_length(head).is_ok_and(|new| new.is_none_or(|new| new == length));
    if !(same_tag && same_date && same_length) {
        return HeadUpdate::Invalidate;
    }
    // Without a validator nothing says that the body is still the same, and anyone may ask as often as a lifetime takes.
    let is_repeated = etag(head).is_some() || head.contains_key(LAST_MODIFIED);
    if is_repeated { HeadUpdate::Freshen } else { HeadUpdate::Ignore }
}

/// Whether two responses are of one representation, byte for byte, so that parts of them can be combined
/// (RFC 9111, 3.4): by a strong validator.
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

/// Whether an entity tag is a strong one (RFC 9110, 8.8.3).
pub(crate) fn is_strong(tag: &[u8]) -> bool {
    tag.len() >= 2 && tag.starts_with(b"\"") && tag.ends_with(b"\"")
}

/// What the weak comparison compares (RFC 9110, 8.8.3.2).
fn opaque(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// The members of a list of entity tags, which may hold commas themselves (RFC 9110, 8.8.3).
fn entity_tags(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = list;
    std::iter::from_fn(move || {
        let start = rest.iter().position(|byte| !b", \t".contains(byte))?;
        rest = &rest[start..];
        // What stands in quotes is up to the next one; what does not, up to the comma. No further is looked, or a list of
        // many members would be read as many times.
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

/// A time of change that is a strong validator: so long before `Date` that nothing can have changed
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
