//! How long a response may be served, and how old it already is (RFC 9111, 4.2).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use http::header::{AGE, DATE, EXPIRES, HeaderMap};
use http::response::Parts;

use super::cache_control::{CacheControl, LONGEST_SECONDS, delta_seconds};
use super::dates::date;

/// How long a response may be served from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// What the response says, less the age it arrived with. Zero: stale already.
    Explicit(Duration),
    /// It says nothing, and its status may be given a lifetime by the policy.
    Default,
    /// It says nothing, and its status may not.
    None,
}

/// The lifetime of a response that arrived at `now`, by the wall clock.
///
/// Shared caches take `s-maxage` before `max-age` before `Expires` (RFC 9111, 4.2.1).
pub(crate) fn lifetime(head: &Parts, cache_control: &CacheControl, now: SystemTime) -> Lifetime {
    let seconds = match cache_control.s_maxage.or(cache_control.max_age) {
        Some(seconds) => seconds,
        None if head.headers.contains_key(EXPIRES) => until_expiry(&head.headers, now),
        None if may_have_default(head.status) => return Lifetime::Default,
        None => return Lifetime::None,
    };
    Lifetime::Explicit(Duration::from_secs(seconds.saturating_sub(initial_age(&head.headers, now))))
}

/// Statuses to which a lifetime may be given that the response does not name.
///
/// Those of RFC 9110, 15.1 without the ones that depend on more than the URI (206), or that say
/// something about the request (405, 414, 501).
fn may_have_default(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 203 | 204 | 300 | 301 | 308 | 404 | 410)
}

/// `Expires - Date`, in seconds.
fn until_expiry(headers: &HeaderMap, now: SystemTime) -> u64 {
    // RFC 9111, 5.3: an invalid date, `0` above all, is in the past. Two dates are no valid one.
    let Some(expires) = date(headers, &EXPIRES, now) else { return 0 };
    // Without a (sound) Date, the moment of receipt is it (RFC 9110, 6.6.1).
    let date = date(headers, &DATE, now).unwrap_or(now);
    expires.duration_since(date).map_or(0, |left| left.as_secs().min(LONGEST_SECONDS))
}

/// Seconds since the origin made the response: the larger of what `Age` says and what `Date`
/// shows (RFC 9111, 4.2.3, `corrected_initial_age` without the delay of the response).
pub(crate) fn initial_age(headers: &HeaderMap, now: SystemTime) -> u64 {
    // Of a list the first member is the last cache's; what is no number is ignored (RFC 9111, 5.1).
    let told = headers
        .get(AGE)
        .and_then(|line| line.as_bytes().split(|&byte| byte == b',').next())
        .and_then(|age| delta_seconds(age.trim_ascii()));
    let apparent = date(headers, &DATE, now).map(|date| {
        // A Date is cut to whole seconds: a difference of one is no age, and counting it would
        // make `max-age=1` uncacheable at random.
        unix_seconds(now).saturating_sub(unix_seconds(date)).saturating_sub(1)
    });
    told.unwrap_or(0).max(apparent.unwrap_or(0)).min(LONGEST_SECONDS)
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::Response;

    use super::*;

    /// Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110.
    const NOW: u64 = 784_111_777;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(NOW * 1000 + 300)
    }

    fn at(offset: i64) -> String {
        httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(NOW.saturating_add_signed(offset)))
    }

    fn of(status: u16, headers: &[(&str, &str)]) -> Lifetime {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let head = response.body(()).unwrap().into_parts().0;
        lifetime(&head, &CacheControl::parse(head.headers.get_all("cache-control")), now())
    }

    fn explicit(seconds: u64) -> Lifetime {
        Lifetime::Explicit(Duration::from_secs(seconds))
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
    fn expiry_is_counted_from_the_date_in_any_format() {
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
    fn the_age_it_arrived_with_is_taken_off() {
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
            let lifetime = if listed { Lifetime::Default } else { Lifetime::None };
            assert_eq!(of(status, &[]), lifetime, "{status}");
            assert_eq!(of(status, &[("cache-control", "max-age=5")]), explicit(5), "{status}");
        }
        assert_eq!(of(200, &[("age", "1000")]), Lifetime::Default, "the policy's lifetime begins here");
    }
}
