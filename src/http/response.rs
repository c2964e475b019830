//! Which responses are shared, with whom, and what of them is kept.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap};
use http::response::Parts;

use super::cache_control::CacheControl;
use super::fields::{Unsound, contains_token, content_length};
use super::freshness::{Lifetime, lifetime};
use super::policy::ResponseRules;

/// Marks a response that must reach nobody but the one who asked.
///
/// A handler puts it into the response's extensions; the guard then neither stores the response
/// nor gives it to others who wait for the same URI: each of them asks the handler itself.
/// `Cache-Control: no-store` does the same, and also tells every cache on the way.
///
/// # Examples
///
/// ```
/// use http::Response;
/// use stampede_guard::http::DoNotStore;
///
/// let mut response = Response::new("for your eyes only");
/// response.extensions_mut().insert(DoNotStore);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoNotStore;

/// With whom a response is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// With everyone, for so long.
    Store { fresh_for: Duration },
    /// With those who were waiting when it came, and with nobody later.
    ShareOnly,
    /// With nobody but the one whose request loaded it. Names the rule, as a token.
    Private(&'static str),
}

/// Judges a response by its head, at `now` on the wall clock.
///
/// What forbids sharing comes first: coalescing alone, without any storing, already hands one
/// user's response to others.
pub(crate) fn judge(head: &Parts, rules: &ResponseRules, now: SystemTime) -> Verdict {
    if head.extensions.get::<DoNotStore>().is_some() {
        return Verdict::Private("do-not-store");
    }
    let cache_control = CacheControl::parse(head.headers.get_all(header::CACHE_CONTROL));
    if let Some(rule) = forbidden_by_headers(&head.headers, &cache_control, rules.max_body) {
        return Verdict::Private(rule);
    }
    match head.status.as_u16() {
        // Interim responses and another protocol (RFC 9110, 15.2).
        100..200 => return Verdict::Private("status"),
        // A part, and an answer to somebody's validator (RFC 9111, 3.3 and 4.3.4).
        206 | 304 => return Verdict::Private("status"),
        // Sharing the failure ends the wave at once, instead of a convoy of retries; keeping it
        // would prolong the outage.
        500.. => return Verdict::ShareOnly,
        _ => {}
    }
    match lifetime(head, &cache_control, now) {
        Lifetime::Explicit(Duration::ZERO) => Verdict::ShareOnly,
        Lifetime::Explicit(fresh_for) => Verdict::Store { fresh_for },
        Lifetime::Default if rules.fresh_for.is_zero() => Verdict::ShareOnly,
        Lifetime::Default => Verdict::Store { fresh_for: rules.fresh_for },
        Lifetime::None => Verdict::Private("status"),
    }
}

fn forbidden_by_headers(
    headers: &HeaderMap,
    cache_control: &CacheControl,
    max_body: usize,
) -> Option<&'static str> {
    // RFC 9111, 5.2.2.5, 5.2.2.7 and 5.2.2.4. `no-cache` may be stored and revalidated; without
    // revalidation it may not be reused at all, not even by the waiting wave.
    if cache_control.no_store {
        return Some("no-store");
    }
    if cache_control.private.is_present() {
        return Some("private");
    }
    if cache_control.no_cache.is_present() {
        return Some("no-cache");
    }
    // Addressed to caches like this one. Its lifetimes are not read yet, its prohibitions are
    // (RFC 9213, 2.2: it stands above Cache-Control).
    let targeted = CacheControl::parse(headers.get_all("cdn-cache-control"));
    if targeted.no_store || targeted.private.is_present() || targeted.no_cache.is_present() {
        return Some("cdn-cache-control");
    }
    for (name, value) in headers {
        match *name {
            // RFC 9111, 7.3 leaves it to Cache-Control; practice is that a cookie is one user's.
            header::SET_COOKIE => return Some("set-cookie"),
            // RFC 9111, 4.1: the answer depends on request headers that are not in the key.
            // A line without any member says nothing.
            header::VARY if value.as_bytes().iter().any(|byte| !b" \t,".contains(byte)) => {
                return Some("vary");
            }
            // Not defined for responses, yet written by old frameworks to mean `no-cache`
            // (RFC 9111, 5.4). Cache-Control, where there is one, is what was meant.
            header::PRAGMA
                if contains_token(value.as_bytes(), b"no-cache")
                    && !headers.contains_key(header::CACHE_CONTROL) =>
            {
                return Some("pragma");
            }
            // Endless, so nobody may wait for its end.
            header::CONTENT_TYPE if is_endless(value.as_bytes()) => return Some("event-stream"),
            // The connection turns into something else (RFC 9110, 7.8).
            header::CONNECTION if contains_token(value.as_bytes(), b"upgrade") => return Some("upgrade"),
            _ => {}
        }
    }
    match content_length(headers) {
        Err(Unsound) => Some("content-length"),
        Ok(Some(length)) if length > max_body as u64 => Some("too-big"),
        Ok(_) => None,
    }
}

fn is_endless(content_type: &[u8]) -> bool {
    let essence = content_type.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    essence.eq_ignore_ascii_case(b"text/event-stream")
        || essence.eq_ignore_ascii_case(b"multipart/x-mixed-replace")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::Response;

    use super::*;

    const RULES: ResponseRules = ResponseRules { fresh_for: Duration::from_secs(60), max_body: 1000 };

    fn head(status: u16, headers: &[(&str, &str)]) -> Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0
    }

    fn of(status: u16, headers: &[(&str, &str)]) -> Verdict {
        judge(&head(status, headers), &RULES, SystemTime::now())
    }

    fn store(seconds: u64) -> Verdict {
        Verdict::Store { fresh_for: Duration::from_secs(seconds) }
    }

    #[test]
    fn what_marks_a_response_as_one_users_is_never_shared() {
        let cases = [
            ("set-cookie", "a=b", "set-cookie"),
            ("cache-control", "private", "private"),
            ("cache-control", "private=\"x\", max-age=60", "private"),
            ("cache-control", "no-store", "no-store"),
            ("cache-control", "no-cache=\"set-cookie\"", "no-cache"),
            ("cdn-cache-control", "no-store", "cdn-cache-control"),
            ("vary", "*", "vary"),
            ("vary", "accept-encoding", "vary"),
            ("vary", ", accept", "vary"),
            ("pragma", "No-Cache", "pragma"),
            ("content-type", "text/event-stream", "event-stream"),
            ("content-type", "Text/Event-Stream ; charset=utf-8", "event-stream"),
            ("content-type", "multipart/x-mixed-replace;boundary=x", "event-stream"),
            ("connection", "keep-alive, Upgrade", "upgrade"),
            ("content-length", "1001", "too-big"),
            ("content-length", "18446744073709551616", "content-length"),
            ("content-length", "1, 2", "content-length"),
            ("content-length", "+1", "content-length"),
            ("content-length", "", "content-length"),
        ];
        for (name, value, rule) in cases {
            for status in [200, 404, 500, 503] {
                let verdict = of(status, &[(name, value)]);
                assert_eq!(verdict, Verdict::Private(rule), "{status} {name}: {value}");
            }
            // An explicit lifetime does not lift it; for Pragma it does (Cache-Control is there).
            let explicit = of(200, &[("cache-control", "public, max-age=60"), (name, value)]);
            assert_eq!(explicit == Verdict::Private(rule), name != "pragma", "{name}: {value}");
        }
    }

    #[test]
    fn what_the_handler_marks_is_never_shared() {
        let mut head = head(200, &[("cache-control", "public, max-age=60")]);
        head.extensions.insert(DoNotStore);
        assert_eq!(judge(&head, &RULES, SystemTime::now()), Verdict::Private("do-not-store"));
    }

    #[test]
    fn the_status_decides_where_no_lifetime_is_named() {
        for status in 100..=999 {
            let verdict = match status {
                200 | 203 | 204 | 300 | 301 | 308 | 404 | 410 => store(60),
                500.. => Verdict::ShareOnly,
                _ => Verdict::Private("status"),
            };
            assert_eq!(of(status, &[]), verdict, "{status}");
        }
    }

    #[test]
    fn a_named_lifetime_decides_for_any_status_but_these() {
        for status in 100..=999 {
            let (verdict, stale) = match status {
                100..200 | 206 | 304 => (Verdict::Private("status"), Verdict::Private("status")),
                500.. => (Verdict::ShareOnly, Verdict::ShareOnly),
                _ => (store(5), Verdict::ShareOnly),
            };
            assert_eq!(of(status, &[("cache-control", "max-age=5")]), verdict, "{status}");
            assert_eq!(of(status, &[("cache-control", "max-age=0")]), stale, "{status}");
            assert_eq!(of(status, &[("expires", "0")]), stale, "{status}");
        }
    }

    #[test]
    fn a_default_of_zero_shares_with_the_waiting_wave_only() {
        let rules = ResponseRules { fresh_for: Duration::ZERO, ..RULES };
        assert_eq!(judge(&head(200, &[]), &rules, SystemTime::now()), Verdict::ShareOnly);
    }

    #[test]
    fn what_says_nothing_forbids_nothing() {
        let cases = [
            ("vary", ""),
            ("vary", " , "),
            ("content-length", "1000"),
            ("content-length", "5, 5"),
            ("connection", "close"),
            ("content-type", "text/event-stream-not"),
            ("pragma", "x"),
        ];
        for (name, value) in cases {
            assert_eq!(of(200, &[(name, value)]), store(60), "{name}: {value}");
        }
    }
}
