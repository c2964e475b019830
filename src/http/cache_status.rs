//! What a response says about the guard: `Age`, `Cache-Status`, and the guard's own answers.

use std::sync::OnceLock;

use bytes::Bytes;
use http::StatusCode;
use http::header::{AGE, HeaderMap, HeaderName, HeaderValue};

use crate::value::entry::Entry;

const CACHE_STATUS: HeaderName = http::header::CACHE_STATUS;

/// What the guard did for a response (RFC 9211, 2). Never the key: it may hold what a log must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheStatus {
    /// From the store; fresh for so many seconds more.
    Hit { ttl: u64 },
    /// From the store, and stale for so many seconds.
    Stale { beyond: u64 },
    /// Loaded for another request. `ttl` where it is stored too.
    Collapsed { ttl: Option<u64> },
    /// The inner service was asked for this request. `status` is its answer's where the response has another one;
    /// `stored` for how many seconds; what decided, if anything, is a token.
    Forwarded { fwd: Fwd, status: Option<StatusCode>, stored: Option<u64>, detail: Option<&'static str> },
}

/// Why the inner service was asked (RFC 9211, 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fwd {
    /// Not looked up.
    Bypass,
    /// The same, for its method.
    Method,
    /// Nothing is stored of that URI.
    UriMiss,
    /// Not the variant that the request selects.
    VaryMiss,
    /// Nothing that may be used, for one reason or the other.
    Miss,
    /// What is stored is stale, or has to be validated.
    Stale,
    /// The request will not have what is stored.
    Request,
    /// What is stored is not all that is asked for.
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

    /// Of what is fresh for so many seconds more.
    pub(crate) fn hit(ttl: u64) -> Self {
        Self::Hit { ttl }
    }

    /// The same, of a load that others waited for. One that is shared with them only has no time left to tell.
    pub(crate) fn collapsed(ttl: u64) -> Self {
        Self::Collapsed { ttl: (ttl > 0).then_some(ttl) }
    }

    /// Of what stands in, stale.
    pub(crate) fn stale(entry: &Entry, now: u64) -> Self {
        let fresh_until = entry.times.fresh_until.max(entry.stored_at);
        Self::Stale { beyond: now.saturating_sub(fresh_until) / 1000 }
    }

    /// Asked for by itself.
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
            // Written once per process and `ttl`, and then neither allocated nor counted. What is
            // leaked for it is bounded: a line of some 30 bytes for each of them.
            let keep = || HeaderValue::from_static(self.write().leak());
            return kept.get_or_init(keep).clone();
        }
        self.write().to_value()
    }

    fn write(self) -> Line {
        let mut line = Line::new();
        match self {
            Self::Hit { ttl } => line.push(HIT).push("; ttl=").push_number(ttl),
            // RFC 9211, 2.5: a negative number where it was stale.
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

/// The lines of hits that are fresh for up to an hour more.
static KEPT_HITS: [OnceLock<HeaderValue>; 3601] = [const { OnceLock::new() }; 3601];

/// Says what the guard did, after what other caches on the way said: the list grows from the
/// origin to the client (RFC 9211, 2).
pub(crate) fn write_status(headers: &mut HeaderMap, status: CacheStatus) {
    // Full headers are left as they are: the remark is not worth the response.
    let _ = headers.try_append(CACHE_STATUS, status.to_value());
}

const HIT: &str = "stampede-guard; hit";

/// The inner service has confirmed something else than what it was asked about.
pub(crate) const NOT_VALIDATED: &str = "not-validated";

/// How a stale response comes to be the answer to a request that was not to be answered from the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandIn {
    /// The inner service was asked for this request. It answered with this status, if at all.
    Forwarded(Option<StatusCode>),
    /// It was asked for another one, which this one has waited for.
    Collapsed,
}

/// Takes back that it was a hit: what was forwarded is none (RFC 9211, 2.1).
pub(crate) fn write_stand_in(headers: &mut HeaderMap, stand_in: StandIn) {
    let Some(own) = own_line(headers) else { return };
    let Some(ttl) = own.as_bytes().strip_prefix(HIT.as_bytes()) else { return };
    let ttl = String::from_utf8_lossy(ttl);
    let mut line = Line::new();
    line.push(Fwd::Stale.text());
    let detail = match stand_in {
        StandIn::Forwarded(Some(status)) => {
            line.push("; fwd-status=").push(status.as_str());
            if status == StatusCode::NOT_MODIFIED { NOT_VALIDATED } else { "" }
        }
        // By default the answer's status was the response's (RFC 9211, 2.3).
        StandIn::Forwarded(None) => "no-answer",
        StandIn::Collapsed => {
            line.push("; collapsed");
            ""
        }
    };
    *own = line.push(&ttl).push_detail(detail).to_value();
}

/// What the guard has said last.
fn own_line(headers: &mut HeaderMap) -> Option<&mut HeaderValue> {
    let lines = headers.get_all(CACHE_STATUS).iter().count();
    let http::header::Entry::Occupied(all) = headers.entry(CACHE_STATUS) else { return None };
    all.into_iter().nth(lines.saturating_sub(1))
}

/// Adds the key to what the guard has said last (RFC 9211, 2.7). The text of a key is printable ASCII.
pub(crate) fn write_key(headers: &mut HeaderMap, key: &str) {
    let Some(own) = own_line(headers) else { return };
    let escaped = key.replace('\\', r"\\").replace('"', "\\\"");
    let line = [own.as_bytes(), b"; key=\"", escaped.as_bytes(), b"\""].concat();
    // What is too long or odd for a header is not told.
    if let Ok(line) = HeaderValue::from_maybe_shared(Bytes::from(line)) {
        *own = line;
    }
}

/// Says how old a reused response is, in place of an age it came with (RFC 9111, 5.1).
pub(crate) fn write_age(headers: &mut HeaderMap, seconds: u64) {
    let _ = headers.try_insert(AGE, age_value(seconds));
}

/// A number of seconds. A small one, as most ages are, is cut out of a static text.
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

/// Both, for a response out of the store.
pub(crate) fn age_and_status(headers: &mut HeaderMap, age: u64, status: CacheStatus) {
    write_age(headers, age);
    write_status(headers, status);
}

/// A line of `Cache-Status` under construction: it is written on every hit, so on the stack and
/// without the formatting machinery.
struct Line {
    bytes: [u8; 128],
    length: usize,
}

impl Line {
    fn new() -> Self {
        Self { bytes: [0; 128], length: 0 }
    }

    /// What does not fit is left out. The guard's own texts and a number of 20 digits always do.
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

    /// As a text for as long as the process lives.
    fn leak(&self) -> &'static str {
        String::from_utf8_lossy(&self.bytes[..self.length]).into_owned().leak()
    }

    fn to_value(&self) -> HeaderValue {
        // Only a detail with a control character would not do; those are our own constants.
        HeaderValue::from_bytes(&self.bytes[..self.length])
            .unwrap_or_else(|_| HeaderValue::from_static("stampede-guard"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http/cache_status_tests.rs"]
mod tests;
