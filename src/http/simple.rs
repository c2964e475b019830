//! A verdict for a service that neither validates nor keeps variants or parts: what needs any of it is one
//! client's own.

use std::time::{Duration, SystemTime};

use http::Method;
use http::response::Parts;

use super::policy::ResponseRules;
use super::request::Asked;
use super::response::{self, DoNotStore, Exchange, Storing};
use super::reuse::Stale;
use super::rule::Rule;
use super::vary::Vary;

/// With whom a response is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// With everyone, for so long, and stale for so long.
    Store { fresh_for: Duration, stale: Stale },
    /// With those who were waiting when it came, and with nobody later.
    ShareOnly,
    /// With nobody but the one whose request loaded it. Names the rule, as a token.
    Private(&'static str),
}

/// Judges the response to a plain GET by its head, at `now` on the wall clock.
pub(crate) fn judge(head: &Parts, rules: &ResponseRules, now: SystemTime) -> Verdict {
    let exchange = Exchange {
        method: &Method::GET,
        target: None,
        asked: &Asked::default(),
        status: head.status,
        headers: &head.headers,
        do_not_store: head.extensions.get::<DoNotStore>().is_some(),
        delay: Duration::ZERO,
        now,
    };
    match response::judge(&exchange, rules) {
        response::Verdict::Store(storing) => simplified(&storing),
        response::Verdict::ShareOnly { vary: Vary::Nothing, .. } => Verdict::ShareOnly,
        response::Verdict::ShareOnly { .. } => Verdict::Private(Rule::Vary.token()),
        response::Verdict::Private(rule) => Verdict::Private(rule.token()),
    }
}

fn simplified(storing: &Storing) -> Verdict {
    if storing.vary != Vary::Nothing {
        return Verdict::Private(Rule::Vary.token());
    }
    if storing.terms.revalidate_always || !storing.left_out.is_empty() {
        return Verdict::Private(Rule::NoCache.token());
    }
    match storing.fresh_for() {
        Duration::ZERO => Verdict::ShareOnly,
        fresh_for => Verdict::Store { fresh_for, stale: storing.terms.stale },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::Response;

    use super::*;
    use crate::http::{DoNotStore, HttpPolicy};

    fn rules() -> ResponseRules {
        ResponseRules { http: HttpPolicy::default(), fresh_for: Duration::from_secs(60), max_body: 1000 }
    }

    fn head(status: u16, headers: &[(&str, &str)]) -> Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0
    }

    fn of(status: u16, headers: &[(&str, &str)]) -> Verdict {
        judge(&head(status, headers), &rules(), SystemTime::now())
    }

    fn store(seconds: u64) -> Verdict {
        let stale = Stale { on_disconnect: HttpPolicy::default().stale_on_disconnect, ..Stale::default() };
        Verdict::Store { fresh_for: Duration::from_secs(seconds), stale: Stale { on_request: true, ..stale } }
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
        assert_eq!(judge(&head, &rules(), SystemTime::now()), Verdict::Private("do-not-store"));
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
        let rules = ResponseRules { fresh_for: Duration::ZERO, ..rules() };
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
