//! `Age`, `Cache-Status`, and the texts of the guard's details.

use std::sync::OnceLock;

use bytes::Bytes;
use http::StatusCode;
use http::header::{AGE, HeaderMap, HeaderName, HeaderValue};

use crate::value::entry::Entry;

const CACHE_STATUS: HeaderName = http::header::CACHE_STATUS;

/// What the guard did for a response (RFC 9211, 2). Never contains the key, which may hold data that must not be
/// logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheStatus {
    /// From the store; fresh for `ttl` more seconds.
    Hit { ttl: u64 },
    /// From the store, and stale for `beyond` seconds.
    Stale { beyond: u64 },
    /// Loaded for another request. `ttl` if it is stored too.
    Collapsed { ttl: Option<u64> },
    /// The inner service was asked for this request. `status` is its status if the response has another one;
    /// `stored` is the number of seconds for which it is stored; `detail` is the token of the rule that decided, if
    /// any.
    Forwarded { fwd: Fwd, status: Option<StatusCode>, stored: Option<u64>, detail: Option<&'static str> },
}

/// Why the inner service was asked (RFC 9211, 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fwd {
    /// Not looked up.
    Bypass,
    /// Not looked up because of its method.
    Method,
    /// Nothing is stored for that URI.
    UriMiss,
    /// The stored variants do not match the request.
    VaryMiss,
    /// Nothing usable is stored, for another reason.
    Miss,
    /// The stored response is stale, or has to be validated.
    Stale,
    /// The request refuses the stored response.
    Request,
    /// The stored response is only a part of what the request asks for.
    Partial,
}

impl Fwd {
    fn text(self) -> &'static str {
        match self {
            Self::Bypass => "stampede-guard; fwd=bypass",
            Self::Method => "stampede-guard; fwd=method",
            Self::UriMiss => "stampede-guard; fwd=uri-miss",
            Self::VaryMiss => "stampede-guard; fwd=vary-miss",
            Self::Miss => "stampede-guard; fwd=miss",
            Self::Stale => "stampede-guard; fwd=stale",
            Self::Request => "stampede-guard; fwd=request",
            Self::Partial => "stampede-guard; fwd=partial",
        }
    }
}

impl CacheStatus {
    /// Not looked up, for this reason.
    pub(crate) fn bypass(detail: &'static str) -> Self {
        Self::unstored(Fwd::Bypass, Some(detail))
    }

    /// A hit that is fresh for `ttl` more seconds.
    pub(crate) fn hit(ttl: u64) -> Self {
        Self::Hit { ttl }
    }

    /// A response of a load that others waited for. One that is shared with waiters only has no time left to
    /// report.
    pub(crate) fn collapsed(ttl: u64) -> Self {
        Self::Collapsed { ttl: (ttl > 0).then_some(ttl) }
    }

    /// A stale response that stands in.
    pub(crate) fn stale(entry: &Entry, now: u64) -> Self {
        let fresh_until = entry.expiry.fresh_until.max(entry.stored_at);
        Self::Stale { beyond: now.saturating_sub(fresh_until) / 1000 }
    }

    /// Loaded for this request alone.
    pub(crate) fn miss(detail: &'static str) -> Self {
        Self::unstored(Fwd::Miss, Some(detail))
    }

    /// The inner service's own answer, for this request alone.
    pub(crate) fn unstored(fwd: Fwd, detail: Option<&'static str>) -> Self {
        Self::Forwarded { fwd, status: None, stored: None, detail }
    }

    fn to_value(self) -> HeaderValue {
        if let Self::Hit { ttl } = self
            && let Some(kept) = usize::try_from(ttl).ok().and_then(|ttl| KEPT_HITS.get(ttl))
        {
            // Each value is built once per process, so later hits neither allocate nor count references. The leaked
            // memory is bounded: some 30 bytes for each of the values.
            let keep = || HeaderValue::from_static(self.write().leak());
            return kept.get_or_init(keep).clone();
        }
        self.write().to_value()
    }

    fn write(self) -> StatusLine {
        let mut line = StatusLine::new();
        match self {
            Self::Hit { ttl } => line.push(HIT).push("; ttl=").push_number(ttl),
            // RFC 9211, 2.5: a negative number if it was stale.
            Self::Stale { beyond } => {
                line.push(HIT).push(if beyond > 0 { "; ttl=-" } else { "; ttl=" }).push_number(beyond)
            }
            Self::Collapsed { ttl: Some(ttl) } => {
                line.push("stampede-guard; fwd=miss; collapsed; ttl=").push_number(ttl)
            }
            Self::Collapsed { ttl: None } => line.push("stampede-guard; fwd=miss; collapsed"),
            Self::Forwarded { fwd, status, stored, detail } => {
                line.push(fwd.text());
                if let Some(status) = status {
                    line.push("; fwd-status=").push(status.as_str());
                }
                if let Some(ttl) = stored {
                    line.push("; stored; ttl=").push_number(ttl);
                }
                line.push_detail(detail.unwrap_or_default())
            }
        };
        line
    }
}

/// The values of hits that are fresh for up to an hour more.
static KEPT_HITS: [OnceLock<HeaderValue>; 3601] = [const { OnceLock::new() }; 3601];

/// Appends the guard's line after those of other caches: the list grows from the origin to the client (RFC 9211,
/// 2).
pub(crate) fn write_status(headers: &mut HeaderMap, status: CacheStatus) {
    // If the header map is full, the line is omitted: it is not worth failing the response.
    let _ = headers.try_append(CACHE_STATUS, status.to_value());
}

const HIT: &str = "stampede-guard; hit";

/// The inner service sent a 304 that does not refer to the stored response.
pub(crate) const NOT_VALIDATED: &str = "not-validated";

/// Why a stale response answers a request that could not be answered from the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandIn {
    /// The inner service was asked for this request. It answered with this status, if at all.
    Forwarded(Option<StatusCode>),
    /// The inner service was asked for another request, and this one waited for it.
    Collapsed,
}

/// Replaces `hit`: a forwarded request is no hit (RFC 9211, 2.1).
pub(crate) fn write_stand_in(headers: &mut HeaderMap, stand_in: StandIn) {
    let Some(own) = own_line(headers) else { return };
    let Some(ttl) = own.as_bytes().strip_prefix(HIT.as_bytes()) else { return };
    let ttl = String::from_utf8_lossy(ttl);
    let mut line = StatusLine::new();
    line.push(Fwd::Stale.text());
    let detail = match stand_in {
        StandIn::Forwarded(Some(status)) => {
            line.push("; fwd-status=").push(status.as_str());
            if status == StatusCode::NOT_MODIFIED { NOT_VALIDATED } else { "" }
        }
        // RFC 9211, 2.3: without `fwd-status`, the origin's status was that of the response.
        StandIn::Forwarded(None) => "no-answer",
        StandIn::Collapsed => {
            line.push("; collapsed");
            ""
        }
    };
    *own = line.push(&ttl).push_detail(detail).to_value();
}

/// The guard's own line, which is the last.
fn own_line(headers: &mut HeaderMap) -> Option<&mut HeaderValue> {
    let lines = headers.get_all(CACHE_STATUS).iter().count();
    let http::header::Entry::Occupied(all) = headers.entry(CACHE_STATUS) else { return None };
    all.into_iter().nth(lines.saturating_sub(1))
}

/// Adds the key to the guard's line (RFC 9211, 2.7). The text of a key is printable ASCII.
pub(crate) fn write_key(headers: &mut HeaderMap, key: &str) {
    let Some(own) = own_line(headers) else { return };
    let escaped = key.replace('\\', r"\\").replace('"', "\\\"");
    let line = [own.as_bytes(), b"; key=\"", escaped.as_bytes(), b"\""].concat();
    // A key that is too long or invalid for a header is omitted.
    if let Ok(line) = HeaderValue::from_maybe_shared(Bytes::from(line)) {
        *own = line;
    }
}

/// Writes the age of a reused response, in place of the age that it came with (RFC 9111, 5.1).
pub(crate) fn write_age(headers: &mut HeaderMap, seconds: u64) {
    let _ = headers.try_insert(AGE, age_value(seconds));
}

/// A number of seconds. Small numbers, as most ages are, are slices of a static text.
fn age_value(seconds: u64) -> HeaderValue {
    let skipped = match seconds {
        0..10 => 2,
        10..100 => 1,
        100..1000 => 0,
        _ => return HeaderValue::from(seconds),
    };
    let digits = &THREE_DIGITS[seconds as usize][skipped..];
    HeaderValue::from_maybe_shared(Bytes::from_static(digits)).unwrap_or_else(|_| HeaderValue::from(seconds))
}

/// `000` to `999`.
static THREE_DIGITS: [[u8; 3]; 1000] = {
    let mut all = [[b'0'; 3]; 1000];
    let mut number = 0;
    while number < all.len() {
        all[number] =
            [b'0' + (number / 100) as u8, b'0' + (number / 10 % 10) as u8, b'0' + (number % 10) as u8];
        number += 1;
    }
    all
};

/// Writes both, for a response from the store.
pub(crate) fn age_and_status(headers: &mut HeaderMap, age: u64, status: CacheStatus) {
    write_age(headers, age);
    write_status(headers, status);
}

/// A line of `Cache-Status` under construction. It is written on every hit, so it is built on the stack and without
/// formatting machinery.
struct StatusLine {
    bytes: [u8; 128],
    length: usize,
}

impl StatusLine {
    fn new() -> Self {
        Self { bytes: [0; 128], length: 0 }
    }

    /// Omits a text that does not fit. The guard's own texts and a number of 20 digits always fit.
    fn push(&mut self, text: &str) -> &mut Self {
        if let Some(free) = self.bytes.get_mut(self.length..self.length + text.len()) {
            free.copy_from_slice(text.as_bytes());
            self.length += text.len();
        }
        self
    }

    fn push_detail(&mut self, detail: &str) -> &mut Self {
        if detail.is_empty() { self } else { self.push("; detail=").push(detail) }
    }

    fn push_number(&mut self, number: u64) -> &mut Self {
        let end = self.length + number.checked_ilog10().map_or(1, |digits| digits as usize + 1);
        if let Some(free) = self.bytes.get_mut(self.length..end) {
            let mut left = number;
            for place in free.iter_mut().rev() {
                *place = b'0' + (left % 10) as u8;
                left /= 10;
            }
            self.length = end;
        }
        self
    }

    fn leak(&self) -> &'static str {
        String::from_utf8_lossy(&self.bytes[..self.length]).into_owned().leak()
    }

    fn to_value(&self) -> HeaderValue {
        // Fails only for control characters, which the constant details do not contain.
        HeaderValue::from_bytes(&self.bytes[..self.length])
            .unwrap_or_else(|_| HeaderValue::from_static("stampede-guard"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/cache_status_tests.rs"]
mod tests;
