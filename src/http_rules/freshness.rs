//! How long a response may be served, how old it is (RFC 9111, 4.2), and whether a stored response may answer a
//! request now (RFC 9111, 4).
//!
//! Every hit calls [`reuse`]: it compares numbers and allocates nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use http::header::{AGE, DATE, EXPIRES, HeaderMap, LAST_MODIFIED};

use super::Rule;
use super::cache_control::{CacheControl, LONGEST_SECONDS, RequestDirectives, delta_seconds};
use super::fields::date;
use super::request::RequestDemands;
use super::request_settings::CacheScope;
use super::settings::HttpPolicy;

/// The longest heuristic lifetime: a day (RFC 9111, 4.2.2 leaves it to the cache).
const LONGEST_GUESS: u64 = 86_400;

/// The lifetime of a response, measured from when the origin generated it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// An explicit lifetime of this many seconds, by this rule.
    Named(u64, Rule),
    /// No explicit lifetime; a tenth of the time since `Last-Modified`.
    Guessed(u64),
    /// No explicit lifetime, and no `Last-Modified` to derive one from.
    Unnamed,
}

/// The lifetime of a response that arrived at `now`, by the wall clock.
///
/// Shared caches use `s-maxage` before `max-age` before `Expires` (RFC 9111, 4.2.1). If the directives come from a
/// targeted field, `Expires` does not count (RFC 9213, 2.2).
pub(crate) fn lifetime(
    headers: &HeaderMap,
    directives: &CacheControl,
    targeted: bool,
    scope: CacheScope,
    now: SystemTime,
) -> Lifetime {
    if let Some(seconds) = directives.s_maxage.filter(|_| scope == CacheScope::Shared) {
        return Lifetime::Named(seconds, if targeted { Rule::Targeted } else { Rule::SharedMaxAge });
    }
    if let Some(seconds) = directives.max_age {
        return Lifetime::Named(seconds, if targeted { Rule::Targeted } else { Rule::MaxAge });
    }
    if !targeted && headers.contains_key(EXPIRES) {
        return Lifetime::Named(until_expiry(headers, now), Rule::Expires);
    }
    let made = date(headers, &DATE, now).unwrap_or(now);
    let unchanged =
        date(headers, &LAST_MODIFIED, now).and_then(|modified| made.duration_since(modified).ok());
    unchanged.map_or(Lifetime::Unnamed, |time| Lifetime::Guessed((time.as_secs() / 10).min(LONGEST_GUESS)))
}

/// Statuses that may get the policy's lifetime if the response states none.
///
/// These are the heuristically cacheable statuses, without the one that depends on more than the URI (206) and those that
/// concern the request (405, 414, 501).
pub(crate) fn may_have_default(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 203 | 204 | 300 | 301 | 308 | 404 | 410)
}

/// Statuses that may get a heuristic lifetime (RFC 9110, 15.1).
pub(crate) fn may_be_guessed(status: StatusCode) -> bool {
    may_have_default(status) || matches!(status.as_u16(), 206 | 405 | 414 | 501)
}

/// Statuses that no cache may store, whatever their lifetime (RFC 6585, 3 to 6), and 425, which concerns the
/// transport of one request (RFC 8470, 5.2). With a blanket `Cache-Control` of an outer layer, one client's limit
/// would be shared with all others.
pub(crate) fn is_unstorable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 425 | 428 | 429 | 431 | 511)
}

/// Statuses with caching rules that this crate implements (RFC 9110, 15; RFC 9111, 5.2.2.3).
pub(crate) fn is_understood(status: StatusCode) -> bool {
    matches!(
        status.as_u16(),
        200..=206 | 300..=305 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 500..=505
    )
}

/// Whether the response to a request without a body reports a failure of the server. A 408 for a complete request
/// (RFC 9110, 15.5.9) is the server's own time-out; tower-http's `TimeoutLayer` answers so by default.
pub(crate) fn is_failure(status: StatusCode) -> bool {
    status.as_u16() >= 500 || status == StatusCode::REQUEST_TIMEOUT
}

/// The subject of a response that is not stored. It decides what happens to the stored response of the resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// The resource, for all clients.
    Resource,
    /// Whether the client may access the resource (RFC 9110, 15.5.2 to 15.5.4). If the request has no credentials, this
    /// applies to any client.
    Access,
    /// Only this request or this client (RFC 9110, 15.5; RFC 6585; RFC 8470), or a failure of the server: the response says nothing about
    /// the resource, and the next request may succeed.
    Other,
}

impl Subject {
    /// The subject of a response with this status.
    pub(crate) fn of(status: StatusCode) -> Self {
        match status.as_u16() {
            401..=403 => Self::Access,
            400 | 405..=408 | 411..=417 | 421 | 425 | 426 | 428 | 429 | 431 | 500.. => Self::Other,
            _ => Self::Resource,
        }
    }
}

/// `Expires - Date`, in seconds.
fn until_expiry(headers: &HeaderMap, now: SystemTime) -> u64 {
    // RFC 9111, 5.3: an invalid date, `0` in particular, is in the past. A repeated field is invalid.
    let Some(expires) = date(headers, &EXPIRES, now) else { return 0 };
    // Without a valid `Date`, the time of receipt counts (RFC 9110, 6.6.1).
    let date = date(headers, &DATE, now).unwrap_or(now);
    expires.duration_since(date).map_or(0, |left| left.as_secs().min(LONGEST_SECONDS))
}

/// How long ago the origin generated a response: the larger of the ages by `Age` and by `Date`, the
/// `corrected_initial_age` (RFC 9111, 4.2.3) of a response that arrived at `now`, `delay` after its request.
///
/// A response with neither field was made in this process, since an origin server with a clock sends `Date` (RFC
/// 9110, 6.6.1) and hyper adds it outside of the layer. Its age begins with its head: the time that a handler takes
/// does not age the response.
pub(crate) fn corrected_initial_age(headers: &HeaderMap, delay: Duration, now: SystemTime) -> Duration {
    if !headers.contains_key(DATE) && !headers.contains_key(AGE) {
        return Duration::ZERO;
    }
    // The first member of a list comes from the nearest cache; a member that is not a number is ignored (RFC 9111,
    // 5.1).
    let received_age = headers
        .get(AGE)
        .and_then(|line| line.as_bytes().split(|&byte| byte == b',').next())
        .and_then(|age| delta_seconds(age.trim_ascii()));
    let apparent = date(headers, &DATE, now).map(|date| {
        // `Date` has whole seconds, so a difference of one second is no age: counting it would make `max-age=1`
        // uncacheable at random.
        unix_seconds(now).saturating_sub(unix_seconds(date)).saturating_sub(1)
    });
    let corrected = Duration::from_secs(received_age.unwrap_or(0)).saturating_add(delay);
    let longest = Duration::from_secs(LONGEST_SECONDS);
    corrected.max(Duration::from_secs(apparent.unwrap_or(0))).min(longest)
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The terms on which a stored response may be reused. They are stored with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReuseTerms {
    /// How long it is fresh, measured from when the origin generated it (RFC 9111, 4.2.1).
    pub(crate) lifetime: Duration,
    pub(crate) stale: StaleWindows,
    /// `no-cache`: never without validation (RFC 9111, 5.2.2.4).
    pub(crate) revalidate_always: bool,
    /// `immutable`: a validation while it is fresh is useless (RFC 8246).
    pub(crate) immutable: bool,
    /// Whether the response explicitly allows shared caches to reuse it (RFC 9111, 3.5).
    pub(crate) says_shared: bool,
}

/// For how long after its freshness a response may be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StaleWindows {
    /// How long after its freshness a response is served while it is validated (RFC 5861, 3).
    pub(crate) while_revalidate: Duration,
    /// How long after its freshness a response is served instead of a failure (RFC 5861, 4).
    pub(crate) if_error: Duration,
    /// How long after its freshness a response is served if the inner service gives no answer at all (RFC 9111, 4.2.4).
    pub(crate) on_disconnect: Duration,
    /// Whether a request may accept a stale response by `max-stale` (RFC 9111, 5.2.1.2).
    pub(crate) on_request: bool,
}

impl StaleWindows {
    /// The windows by a response's directives and the policy.
    pub(crate) fn of(all: &CacheControl, revalidate_always: bool, http: &HttpPolicy) -> Self {
        if revalidate_always || must_revalidate(all, http) {
            return Self::default();
        }
        let s_maxage = http.scope == CacheScope::Shared && all.s_maxage.is_some();
        let window = |seconds: Option<u64>| Duration::from_secs(seconds.unwrap_or(0));
        Self {
            while_revalidate: window(all.stale_while_revalidate),
            if_error: window(all.stale_if_error),
            on_disconnect: if s_maxage { Duration::ZERO } else { http.stale_on_disconnect },
            on_request: !s_maxage,
        }
    }
}

/// Whether a stale response must be validated before it answers another request (RFC 9111, 5.2.2.2 and 5.2.2.8).
///
/// In strict mode this includes `s-maxage` (5.2.2.10). By default it does not: the windows of RFC 5861 are widely
/// used together with `s-maxage`, and would have no effect.
pub(crate) fn must_revalidate(all: &CacheControl, http: &HttpPolicy) -> bool {
    let shared = http.scope == CacheScope::Shared;
    all.must_revalidate || (shared && (all.proxy_revalidate || (http.strict_rfc && all.s_maxage.is_some())))
}

/// How a stored response is used for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// It is served.
    Fresh,
    /// It is served stale, because the request accepts that.
    Stale,
    /// It is served stale, and validated meanwhile.
    StaleWhileRevalidate,
    /// It is validated first.
    Revalidate,
    /// It may not be served, and the request accepts only a stored response: 504 (RFC 9111, 5.2.1.7).
    OnlyIfCached,
    /// It must not answer a request with these credentials: the inner service answers, and the stored response stays.
    NotForThis,
}

/// The request's directives, without those that the policy ignores: the directives that demand more than freshness, by which
/// clients force loads.
fn directives(demands: &RequestDemands, policy: &HttpPolicy) -> RequestDirectives {
    let all = demands.directives;
    if policy.ignore_request_no_cache {
        return RequestDirectives { no_cache: false, max_age: None, min_fresh: 0, ..all };
    }
    all
}

/// Whether a request demands more than freshness: a client's reload, mostly.
pub(crate) fn is_reload(demands: &RequestDemands, policy: &HttpPolicy) -> bool {
    let RequestDirectives { no_cache, max_age, min_fresh, .. } = directives(demands, policy);
    no_cache || max_age.is_some() || min_fresh > 0
}

/// How a stored response is used for a request: decided by the request's demands, the stored terms, and the response's age
/// (`current_age` of RFC 9111, 4.2.3).
pub(crate) fn reuse(
    demands: &RequestDemands,
    terms: &ReuseTerms,
    age: Duration,
    policy: &HttpPolicy,
) -> Reuse {
    if !is_for(demands, terms, policy) {
        return Reuse::NotForThis;
    }
    let directives = directives(demands, policy);
    let otherwise = if directives.only_if_cached { Reuse::OnlyIfCached } else { Reuse::Revalidate };
    if terms.revalidate_always || directives.no_cache {
        return otherwise;
    }
    let left = terms.lifetime.saturating_sub(age);
    // RFC 9111, 4.2: at its lifetime a response is stale.
    let is_fresh = !left.is_zero();
    let too_old = directives.max_age.is_some_and(|most| age > Duration::from_secs(most))
        && !(is_fresh && terms.immutable);
    if too_old || left < Duration::from_secs(directives.min_fresh) {
        return otherwise;
    }
    if is_fresh {
        return Reuse::Fresh;
    }
    let beyond = age.saturating_sub(terms.lifetime);
    if terms.stale.on_request && directives.max_stale.is_some_and(|most| beyond <= Duration::from_secs(most))
    {
        return Reuse::Stale;
    }
    // RFC 9111, 5.2.1.1: with `max-age` and without `max-stale`, the request accepts nothing stale.
    if beyond <= terms.stale.while_revalidate
        && !terms.stale.while_revalidate.is_zero()
        && directives.max_age.is_none()
    {
        return Reuse::StaleWhileRevalidate;
    }
    otherwise
}

/// Whether a response, stored or still loading, may answer a request with these credentials. In strict mode any stored
/// response may. Otherwise only one that explicitly allows shared caches to reuse it, because an origin may answer
/// anonymous requests and users differently.
pub(crate) fn is_for(demands: &RequestDemands, terms: &ReuseTerms, policy: &HttpPolicy) -> bool {
    policy.strict_rfc || terms.says_shared || !demands.has_credentials()
}

/// How a validation or a load failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadFailure {
    /// The inner service returned no response.
    Disconnected,
    /// It returned a response with this status.
    Status(u16),
}

/// Whether a stale response is served instead of a failure.
pub(crate) fn instead_of(
    failed: LoadFailure,
    demands: &RequestDemands,
    terms: &ReuseTerms,
    age: Duration,
    policy: &HttpPolicy,
) -> bool {
    let window = match failed {
        // No response is an error, too (RFC 5861, 4: "any situation that would result in a 500, 502, 503 or 504");
        // so is a 408 to a request without a body, which reports a time-out of the server.
        LoadFailure::Disconnected => terms.stale.on_disconnect.max(terms.stale.if_error),
        LoadFailure::Status(408 | 500 | 502 | 503 | 504) => terms.stale.if_error,
        LoadFailure::Status(_) => return false,
    };
    // Either the response always needs validation, or the request insists on it.
    let needs_validation = terms.revalidate_always || directives(demands, policy).no_cache;
    let beyond = age.saturating_sub(terms.lifetime);
    is_for(demands, terms, policy) && !needs_validation && !window.is_zero() && beyond <= window
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::Response;

    use super::*;

    /// The remaining lifetime under the default policy.
    #[derive(Debug, PartialEq)]
    enum Remaining {
        Explicit(Duration),
        Default,
        None,
    }

    /// Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110.
    const NOW: u64 = 784_111_777;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(NOW * 1000 + 300)
    }

    fn initial_age(headers: &HeaderMap, now: SystemTime) -> u64 {
        corrected_initial_age(headers, Duration::ZERO, now).as_secs()
    }

    fn at(offset: i64) -> String {
        httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(NOW.saturating_add_signed(offset)))
    }

    fn head(headers: &[(&str, &str)]) -> HeaderMap {
        let mut response = Response::builder();
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0.headers
    }

    fn named(headers: &[(&str, &str)], targeted: bool, scope: CacheScope) -> Lifetime {
        let headers = head(headers);
        let directives = CacheControl::parse(headers.get_all("cache-control"));
        lifetime(&headers, &directives, targeted, scope, now())
    }

    fn of(status: u16, headers: &[(&str, &str)]) -> Remaining {
        match named(headers, false, CacheScope::Shared) {
            Lifetime::Named(seconds, _) => {
                explicit(seconds.saturating_sub(initial_age(&head(headers), now())))
            }
            _ if may_have_default(StatusCode::from_u16(status).unwrap()) => Remaining::Default,
            _ => Remaining::None,
        }
    }

    fn explicit(seconds: u64) -> Remaining {
        Remaining::Explicit(Duration::from_secs(seconds))
    }

    #[test]
    fn the_most_specific_source_decides() {
        let expires = at(30);
        let cases: [(&[(&str, &str)], u64); 8] = [
            (&[("cache-control", "s-maxage=10, max-age=20"), ("expires", &expires)], 10),
            (&[("cache-control", "max-age=20"), ("expires", &expires)], 20),
            (&[("expires", &expires), ("date", &at(0))], 30),
            (&[("expires", &expires), ("cache-control", "public")], 29),
            (&[("expires", &expires), ("cache-control", "max-age=x")], 0),
            (&[("cache-control", "s-maxage=x, max-age=20")], 0),
            (&[("cache-control", "max-age=0")], 0),
            (&[("cache-control", "max-age=99999999999")], LONGEST_SECONDS),
        ];
        for (headers, seconds) in cases {
            assert_eq!(of(200, headers), explicit(seconds), "{headers:?}");
        }
    }

    #[test]
    fn expires_is_relative_to_the_date_in_any_format() {
        let cases = [
            ("Sun, 06 Nov 1994 08:50:37 GMT", 60),
            ("Sunday, 06-Nov-94 08:50:37 GMT", 60),
            ("Sun Nov  6 08:50:37 1994", 60),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
            ("Sun, 06 Nov 1994 08:48:37 GMT", 0),
            ("0", 0),
            ("-1", 0),
            ("", 0),
            ("soon", 0),
            ("Sun, 06 Nov 1994 08:50:37 UTC", 0),
        ];
        for (expires, seconds) in cases {
            assert_eq!(of(200, &[("expires", expires), ("date", &at(0))]), explicit(seconds), "{expires}");
        }
        let twice = [("expires", &*at(60)), ("expires", &*at(60))];
        assert_eq!(of(200, &twice), explicit(0), "two dates are no date");
        let broken_date = [("expires", &*at(60)), ("date", "yesterday")];
        assert_eq!(of(200, &broken_date), explicit(59), "the time of receipt stands in");
    }

    #[test]
    fn the_age_on_receipt_shortens_the_lifetime() {
        let cases: [(&[(&str, &str)], u64); 9] = [
            (&[("age", "10")], 50),
            (&[("age", "60")], 0),
            (&[("age", "99999999999999999999")], 0),
            (&[("age", "10, 50")], 50),
            (&[("age", "10"), ("age", "50")], 50),
            (&[("age", "-10")], 60),
            (&[("age", "1.5")], 60),
            (&[("date", &at(-11))], 50),
            (&[("date", &at(-11)), ("age", "20")], 40),
        ];
        for (headers, seconds) in cases {
            let all: Vec<_> = headers.iter().copied().chain([("cache-control", "max-age=60")]).collect();
            assert_eq!(of(200, &all), explicit(seconds), "{headers:?}");
        }
    }

    #[test]
    fn a_second_of_difference_or_a_clock_ahead_is_no_age() {
        for offset in [-1, 0, 1, 3600] {
            let headers = [("cache-control", "max-age=1"), ("date", &*at(offset))];
            assert_eq!(of(200, &headers), explicit(1), "{offset}");
        }
    }

    #[test]
    fn a_silent_response_gets_a_default_by_its_status_only() {
        for status in 200..=599 {
            let listed = [200, 203, 204, 300, 301, 308, 404, 410].contains(&status);
            let lifetime = if listed { Remaining::Default } else { Remaining::None };
            assert_eq!(of(status, &[]), lifetime, "{status}");
            assert_eq!(of(status, &[("cache-control", "max-age=5")]), explicit(5), "{status}");
        }
        assert_eq!(of(200, &[("age", "1000")]), Remaining::Default, "the policy's lifetime begins here");
    }

    #[test]
    fn the_source_of_a_lifetime_is_named() {
        let all = [("cache-control", "s-maxage=10, max-age=20"), ("expires", &*at(30)), ("date", &*at(0))];
        let (shared, private) = (CacheScope::Shared, CacheScope::Private);
        assert_eq!(named(&all, false, shared), Lifetime::Named(10, Rule::SharedMaxAge));
        assert_eq!(named(&all, true, shared), Lifetime::Named(10, Rule::Targeted), "RFC 9213, 2.2");
        assert_eq!(named(&all, false, private), Lifetime::Named(20, Rule::MaxAge), "RFC 9111, 5.2.2.10");
        assert_eq!(named(&all[1..], false, shared), Lifetime::Named(30, Rule::Expires));
        assert_eq!(named(&all[1..], true, shared), Lifetime::Unnamed, "RFC 9213, 2.2: Expires is ignored");
    }

    #[test]
    fn a_lifetime_is_guessed_from_the_last_change() {
        let cases = [
            (at(-100), Lifetime::Guessed(10)),
            (at(-5), Lifetime::Guessed(0)),
            (at(0), Lifetime::Guessed(0)),
            (at(-86_400), Lifetime::Guessed(8640)),
            (at(-864_000), Lifetime::Guessed(86_400)),
            (at(-86_400_000), Lifetime::Guessed(86_400)),
            (at(60), Lifetime::Unnamed),
            ("yesterday".to_owned(), Lifetime::Unnamed),
        ];
        for (modified, expected) in cases {
            let headers = [("last-modified", &*modified), ("date", &*at(0))];
            assert_eq!(named(&headers, false, CacheScope::Shared), expected, "RFC 9111, 4.2.2: {modified}");
            // Without a `Date`, the time of receipt counts.
            assert_eq!(named(&headers[..1], false, CacheScope::Shared), expected, "{modified}");
        }
        let named_too = [("last-modified", &*at(-100)), ("expires", "0")];
        assert_eq!(named(&named_too, false, CacheScope::Shared), Lifetime::Named(0, Rule::Expires));
        assert_eq!(named(&[], false, CacheScope::Shared), Lifetime::Unnamed);
    }

    #[test]
    fn statuses_that_may_be_guessed_are_those_of_the_rfc() {
        let listed = [200, 203, 204, 206, 300, 301, 308, 404, 405, 410, 414, 501];
        for status in 100..=999 {
            let may = may_be_guessed(StatusCode::from_u16(status).unwrap());
            assert_eq!(may, listed.contains(&status), "RFC 9110, 15.1: {status}");
        }
    }

    #[test]
    fn the_expires_tests_of_the_conformance_suite_hold() {
        let cases = [
            (vec![("expires", at(2_592_000)), ("date", at(0))], 2_592_000),
            (vec![("expires", at(-2_592_000)), ("date", at(0))], 0),
            (vec![("expires", at(0)), ("date", at(0))], 0),
            (vec![("expires", at(300)), ("date", at(400))], 0),
            (vec![("expires", at(10)), ("date", "foo".to_owned())], 9),
            (vec![("expires", at(10)), ("date", at(-10)), ("age", "25".to_owned())], 0),
            (vec![("expires", at(20)), ("date", at(10)), ("age", "15".to_owned())], 0),
            (vec![("expires", "Thu, 18 Aug 2050 02:01:18 UTC".to_owned()), ("date", at(0))], 0),
            (vec![("expires", at(60)), ("expires", at(61)), ("date", at(0))], 0),
        ];
        for (headers, left) in cases {
            let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            assert_eq!(of(200, &headers), explicit(left), "RFC 9111, 5.3: {headers:?}");
        }
    }

    #[test]
    fn the_age_tests_of_the_conformance_suite_hold() {
        let cases: [(&[&str], u64); 13] = [
            (&["abc"], 0),
            (&["-7200"], 0),
            (&["7200.0"], 0),
            (&["2147483647"], LONGEST_SECONDS - 1),
            (&["2147483648"], LONGEST_SECONDS),
            (&["2147483649"], LONGEST_SECONDS),
            (&["7200, 0"], 7200),
            (&["0, 7200"], 0),
            (&["7200", "0"], 7200),
            (&["0", "7200"], 0),
            (&["0, 0"], 0),
            (&["0", "0"], 0),
            (&["3600", "3600"], 3600),
        ];
        for (lines, age) in cases {
            let headers: Vec<_> = lines.iter().map(|line| ("age", *line)).collect();
            assert_eq!(initial_age(&head(&headers), now()), age, "RFC 9111, 5.1: {lines:?}");
        }
    }

    #[test]
    fn the_delay_counts_from_the_request() {
        let delay = Duration::from_millis(2500);
        let age = |headers: &[(&str, &str)]| corrected_initial_age(&head(headers), delay, now());
        assert_eq!(age(&[]), Duration::ZERO, "made in this process: neither Date nor Age");
        assert_eq!(age(&[("date", &at(0))]), delay, "RFC 9111, 4.2.3: corrected_age_value");
        assert_eq!(age(&[("age", "soon")]), delay, "whatever has sent it is another process");
        assert_eq!(age(&[("age", "10")]), delay + Duration::from_secs(10));
        assert_eq!(age(&[("date", &at(-2))]), delay, "the larger of both");
        assert_eq!(age(&[("date", &at(-60))]), Duration::from_secs(59));
        let forever = corrected_initial_age(&head(&[("age", "5")]), Duration::MAX, now());
        assert_eq!(forever, Duration::from_secs(LONGEST_SECONDS));
    }

    proptest::proptest! {
        #[test]
        fn nothing_makes_a_response_younger(age in 0_u64..5000, more in 0_u64..5000, back in 0_i64..5000) {
            let date = at(-back);
            let left = |age: u64| {
                let age = age.to_string();
                of(200, &[("cache-control", "max-age=4000"), ("age", &age), ("date", &date)])
            };
            let (Remaining::Explicit(young), Remaining::Explicit(old)) = (left(age), left(age + more)) else {
                unreachable!("max-age is explicit")
            };
            proptest::prop_assert!(old <= young && young <= Duration::from_secs(4000));
        }
    }
}

#[cfg(test)]
mod reuse_tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http_rules::cache_control::LONGEST_SECONDS;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    const FRESH_FOR_60: ReuseTerms = ReuseTerms {
        lifetime: secs(60),
        stale: StaleWindows {
            while_revalidate: Duration::ZERO,
            if_error: Duration::ZERO,
            on_disconnect: Duration::ZERO,
            on_request: true,
        },
        revalidate_always: false,
        immutable: false,
        says_shared: false,
    };

    fn demands(line: &str) -> RequestDemands {
        let mut directives = RequestDirectives::default();
        directives.add(&line.parse().expect("a value"));
        RequestDemands { directives, ..RequestDemands::default() }
    }

    fn at(age: u64, line: &str, terms: &ReuseTerms) -> Reuse {
        reuse(&demands(line), terms, secs(age), &HttpPolicy::default())
    }

    #[test]
    fn a_response_is_fresh_until_its_lifetime() {
        let cases =
            [(0, Reuse::Fresh), (59, Reuse::Fresh), (60, Reuse::Revalidate), (7200, Reuse::Revalidate)];
        for (age, expected) in cases {
            assert_eq!(at(age, "", &FRESH_FOR_60), expected, "RFC 9111, 4.2: {age}");
        }
        let almost = secs(60) - Duration::from_nanos(1);
        assert_eq!(reuse(&demands(""), &FRESH_FOR_60, almost, &HttpPolicy::default()), Reuse::Fresh);
        let never = ReuseTerms { lifetime: Duration::ZERO, ..FRESH_FOR_60 };
        assert_eq!(at(0, "", &never), Reuse::Revalidate);
    }

    #[test]
    fn a_request_may_demand_more_than_freshness() {
        let cases = [
            (30, "max-age=30", Reuse::Fresh),
            (31, "max-age=30", Reuse::Revalidate),
            (1, "max-age=0", Reuse::Revalidate),
            (0, "max-age=0", Reuse::Fresh),
            (0, "no-cache", Reuse::Revalidate),
            (30, "min-fresh=30", Reuse::Fresh),
            (31, "min-fresh=30", Reuse::Revalidate),
            (0, "min-fresh=2000", Reuse::Revalidate),
            (0, "only-if-cached", Reuse::Fresh),
            (60, "only-if-cached", Reuse::OnlyIfCached),
            (0, "only-if-cached, no-cache", Reuse::OnlyIfCached),
            (0, "only-if-cached, min-fresh=61", Reuse::OnlyIfCached),
        ];
        for (age, line, expected) in cases {
            assert_eq!(at(age, line, &FRESH_FOR_60), expected, "RFC 9111, 5.2.1: {line} at {age}");
        }
    }

    #[test]
    fn a_request_may_accept_a_stale_response() {
        let cases = [
            (60, "max-stale", Reuse::Stale),
            (60 + LONGEST_SECONDS, "max-stale", Reuse::Stale),
            (70, "max-stale=10", Reuse::Stale),
            (71, "max-stale=10", Reuse::Revalidate),
            (59, "max-stale=10", Reuse::Fresh),
            (70, "max-stale=10, only-if-cached", Reuse::Stale),
            (70, "max-stale=10, max-age=70", Reuse::Stale),
            (70, "max-stale=10, max-age=69", Reuse::Revalidate),
            (70, "max-stale=10, min-fresh=1", Reuse::Revalidate),
            (70, "max-stale=10, no-cache", Reuse::Revalidate),
        ];
        for (age, line, expected) in cases {
            assert_eq!(at(age, line, &FRESH_FOR_60), expected, "RFC 9111, 5.2.1.2: {line} at {age}");
        }
        let stale = StaleWindows { on_request: false, ..FRESH_FOR_60.stale };
        let must_revalidate = ReuseTerms { stale, ..FRESH_FOR_60 };
        assert_eq!(at(60, "max-stale", &must_revalidate), Reuse::Revalidate, "RFC 9111, 5.2.2.2");
    }

    #[test]
    fn a_stale_response_is_served_during_validation_within_its_window_only() {
        let stale = StaleWindows { while_revalidate: secs(4), ..FRESH_FOR_60.stale };
        let terms = ReuseTerms { stale, ..FRESH_FOR_60 };
        let cases = [
            (59, "", Reuse::Fresh),
            (60, "", Reuse::StaleWhileRevalidate),
            (64, "", Reuse::StaleWhileRevalidate),
            (65, "", Reuse::Revalidate),
            (62, "only-if-cached", Reuse::StaleWhileRevalidate),
            (62, "max-age=100", Reuse::Revalidate),
            (62, "min-fresh=1", Reuse::Revalidate),
            (62, "no-cache", Reuse::Revalidate),
            (62, "max-stale=1", Reuse::StaleWhileRevalidate),
        ];
        for (age, line, expected) in cases {
            assert_eq!(at(age, line, &terms), expected, "RFC 5861, 3: {line} at {age}");
        }
    }

    #[test]
    fn a_no_cache_response_is_never_served_without_validation() {
        let stale = StaleWindows { while_revalidate: secs(99), ..FRESH_FOR_60.stale };
        let terms = ReuseTerms { revalidate_always: true, stale, ..FRESH_FOR_60 };
        for line in ["", "max-stale", "max-age=100"] {
            assert_eq!(at(0, line, &terms), Reuse::Revalidate, "RFC 9111, 5.2.2.4: {line}");
            assert_eq!(at(61, line, &terms), Reuse::Revalidate, "{line}");
        }
        assert_eq!(at(0, "only-if-cached", &terms), Reuse::OnlyIfCached);
    }

    #[test]
    fn the_policy_can_keep_clients_from_forcing_loads() {
        let policy = HttpPolicy::default().ignore_request_no_cache(true);
        for line in ["no-cache", "max-age=0", "no-cache, max-age=0", "min-fresh=61"] {
            assert_eq!(reuse(&demands(line), &FRESH_FOR_60, secs(1), &policy), Reuse::Fresh, "A11: {line}");
            assert_eq!(reuse(&demands(line), &FRESH_FOR_60, secs(60), &policy), Reuse::Revalidate, "{line}");
            let stale = StaleWindows { while_revalidate: secs(4), ..FRESH_FOR_60.stale };
            let served = reuse(&demands(line), &ReuseTerms { stale, ..FRESH_FOR_60 }, secs(61), &policy);
            assert_eq!(served, Reuse::StaleWhileRevalidate, "{line}");
        }
    }

    #[test]
    fn a_reload_of_an_immutable_response_is_a_hit() {
        let terms = ReuseTerms { immutable: true, ..FRESH_FOR_60 };
        assert_eq!(at(30, "max-age=0", &terms), Reuse::Fresh, "RFC 8246, 2.1");
        assert_eq!(at(30, "no-cache", &terms), Reuse::Revalidate, "a forced one is not");
        assert_eq!(at(60, "max-age=0", &terms), Reuse::Revalidate, "nor is one of a stale response");
    }

    #[test]
    fn requests_with_credentials_get_only_explicitly_shared_responses() {
        let shared = ReuseTerms { says_shared: true, ..FRESH_FOR_60 };
        for facts in [
            RequestDemands { authorized: true, ..demands("") },
            RequestDemands { has_cookie: true, ..demands("") },
        ] {
            let decision = |terms: &ReuseTerms, policy: &HttpPolicy| reuse(&facts, terms, secs(1), policy);
            assert_eq!(decision(&FRESH_FOR_60, &HttpPolicy::default()), Reuse::NotForThis, "A1, A2");
            assert_eq!(decision(&shared, &HttpPolicy::default()), Reuse::Fresh, "A1, A2");
            assert_eq!(decision(&FRESH_FOR_60, &HttpPolicy::strict()), Reuse::Fresh, "RFC 9111, 4");
            assert!(!instead_of(
                LoadFailure::Disconnected,
                &facts,
                &FRESH_FOR_60,
                secs(1),
                &HttpPolicy::default()
            ));
        }
    }

    #[test]
    fn a_stale_response_stands_in_for_a_failure_within_its_windows() {
        let stale = StaleWindows { if_error: secs(20), on_disconnect: secs(10), ..FRESH_FOR_60.stale };
        let terms = ReuseTerms { stale, ..FRESH_FOR_60 };
        let none = ReuseTerms { stale: StaleWindows::default(), ..FRESH_FOR_60 };
        let disconnect_only =
            ReuseTerms { stale: StaleWindows { if_error: Duration::ZERO, ..stale }, ..FRESH_FOR_60 };
        let always = ReuseTerms { revalidate_always: true, ..terms };
        let disconnected = LoadFailure::Disconnected;
        let cases = [
            (disconnected, 70, "", terms, true),
            (disconnected, 80, "", terms, true),
            (disconnected, 81, "", terms, false),
            (disconnected, 70, "", disconnect_only, true),
            (disconnected, 71, "", disconnect_only, false),
            (disconnected, 61, "", none, false),
            (disconnected, 60, "", none, false),
            (disconnected, 61, "", always, false),
            (disconnected, 61, "no-cache", terms, false),
            (disconnected, 30, "max-age=0", terms, true),
            (LoadFailure::Status(503), 80, "", terms, true),
            (LoadFailure::Status(503), 81, "", terms, false),
            (LoadFailure::Status(503), 61, "", disconnect_only, false),
            (LoadFailure::Status(500), 61, "", terms, true),
            (LoadFailure::Status(502), 61, "", terms, true),
            (LoadFailure::Status(504), 61, "", terms, true),
            (LoadFailure::Status(408), 61, "", terms, true),
            (LoadFailure::Status(501), 61, "", terms, false),
            (LoadFailure::Status(404), 61, "", terms, false),
        ];
        for (failed, age, line, terms, expected) in cases {
            let stands_in = instead_of(failed, &demands(line), &terms, secs(age), &HttpPolicy::strict());
            assert_eq!(stands_in, expected, "RFC 5861, 4; RFC 9111, 4.2.4: {failed:?} {line} at {age}");
        }
    }

    /// How permissive a decision is.
    fn generosity(reuse: Reuse) -> u8 {
        match reuse {
            Reuse::Fresh => 2,
            Reuse::Stale | Reuse::StaleWhileRevalidate => 1,
            _ => 0,
        }
    }

    proptest! {
        #[test]
        fn age_never_makes_a_response_more_reusable(
            age in 0_u64..200, more in 0_u64..200, lifetime in 0_u64..100, window in 0_u64..100,
            immutable: bool, line in "(max-age=[0-9]{1,2},)?(min-fresh=[0-9]{1,2},)?(max-stale(=[0-9]{1,2})?)?",
        ) {
            let stale = StaleWindows { while_revalidate: secs(window), ..FRESH_FOR_60.stale };
            let terms = ReuseTerms { lifetime: secs(lifetime), stale, immutable, ..FRESH_FOR_60 };
            prop_assert!(generosity(at(age + more, &line, &terms)) <= generosity(at(age, &line, &terms)));
        }
    }
}
