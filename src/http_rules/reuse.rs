//! Whether a stored response may answer this request now (RFC 9111, 4).
//!
//! Every hit passes here: it compares numbers and allocates nothing.

use std::time::Duration;

use super::cache_control::{CacheControl, RequestDirectives};
use super::policy::HttpPolicy;
use super::request::RequestDemands;
use super::request_rules::CacheScope;

/// The stored decision about a response, as far as reuse depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReuseTerms {
    /// How long it is fresh, counted from when the origin made it (RFC 9111, 4.2.1).
    pub(crate) lifetime: Duration,
    pub(crate) stale: StaleWindows,
    /// `no-cache`: never without validation (RFC 9111, 5.2.2.4).
    pub(crate) revalidate_always: bool,
    /// `immutable`: a validation while it is fresh is useless (RFC 8246).
    pub(crate) immutable: bool,
    /// Explicitly allows sharing (RFC 9111, 3.5).
    pub(crate) says_shared: bool,
}

/// For how long after its freshness a response may be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StaleWindows {
    /// While it is validated (RFC 5861, 3).
    pub(crate) while_revalidate: Duration,
    /// Instead of a failure (RFC 5861, 4).
    pub(crate) if_error: Duration,
    /// Instead of no answer at all (RFC 9111, 4.2.4).
    pub(crate) on_disconnect: Duration,
    /// Whether a request may accept it stale by `max-stale` (RFC 9111, 5.2.1.2).
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

/// Whether a stale response may not answer another request without validation (RFC 9111, 5.2.2.2 and 5.2.2.8).
///
/// To the letter this includes `s-maxage` (5.2.2.10). By default it does not: the windows of RFC 5861 are widely
/// used together with `s-maxage`, and would have no effect.
pub(crate) fn must_revalidate(all: &CacheControl, http: &HttpPolicy) -> bool {
    let shared = http.scope == CacheScope::Shared;
    all.must_revalidate || (shared && (all.proxy_revalidate || (http.letter && all.s_maxage.is_some())))
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
    /// It may not be served, and the request accepts nothing else: 504 (RFC 9111, 5.2.1.7).
    OnlyIfCached,
    /// It must not answer a request like this: the inner service answers, and the stored response stays.
    NotForThis,
}

/// Whether a request demands more than freshness: a client's reload, mostly.
pub(crate) fn is_reload(asked: &RequestDemands, policy: &HttpPolicy) -> bool {
    let RequestDirectives { no_cache, max_age, min_fresh, .. } = asked.directives;
    !policy.ignore_request_no_cache && (no_cache || max_age.is_some() || min_fresh > 0)
}

/// Decides by the request, what was stored, and its age (`current_age` of RFC 9111, 4.2.3).
pub(crate) fn reuse(asked: &RequestDemands, terms: &ReuseTerms, age: Duration, policy: &HttpPolicy) -> Reuse {
    if !is_for(asked, terms, policy) {
        return Reuse::NotForThis;
    }
    // Each of these demands more than freshness, and so a load.
    let ignored = policy.ignore_request_no_cache;
    let wanted = RequestDirectives {
        no_cache: asked.directives.no_cache && !ignored,
        max_age: asked.directives.max_age.filter(|_| !ignored),
        min_fresh: if ignored { 0 } else { asked.directives.min_fresh },
        ..asked.directives
    };
    let otherwise = if wanted.only_if_cached { Reuse::OnlyIfCached } else { Reuse::Revalidate };
    if terms.revalidate_always || wanted.no_cache {
        return otherwise;
    }
    let left = terms.lifetime.saturating_sub(age);
    // RFC 9111, 4.2: at its lifetime a response is stale.
    let is_fresh = !left.is_zero();
    let too_old =
        wanted.max_age.is_some_and(|most| age > Duration::from_secs(most)) && !(is_fresh && terms.immutable);
    if too_old || left < Duration::from_secs(wanted.min_fresh) {
        return otherwise;
    }
    if is_fresh {
        return Reuse::Fresh;
    }
    let beyond = age.saturating_sub(terms.lifetime);
    if terms.stale.on_request && wanted.max_stale.is_some_and(|most| beyond <= Duration::from_secs(most)) {
        return Reuse::Stale;
    }
    // RFC 9111, 5.2.1.1: with `max-age` and without `max-stale`, nothing stale is wanted.
    if beyond <= terms.stale.while_revalidate
        && !terms.stale.while_revalidate.is_zero()
        && wanted.max_age.is_none()
    {
        return Reuse::StaleWhileRevalidate;
    }
    otherwise
}

/// Whether a response may answer a request with its credentials at all, stored or during its load: to the letter
/// any stored one, otherwise only one that explicitly allows sharing. An origin may answer anonymous requests and
/// users differently.
pub(crate) fn is_for(asked: &RequestDemands, terms: &ReuseTerms, policy: &HttpPolicy) -> bool {
    policy.letter || terms.says_shared || !asked.has_credentials()
}

/// How a validation or a load failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadFailure {
    /// The inner service gave no response.
    Disconnected,
    /// It gave a response with this status.
    Status(u16),
}

/// Whether a stale response is served instead of a failure.
pub(crate) fn instead_of(
    failed: LoadFailure,
    asked: &RequestDemands,
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
    // A response that always needs validation, or a request that insists on it.
    let validated = terms.revalidate_always || (asked.directives.no_cache && !policy.ignore_request_no_cache);
    let beyond = age.saturating_sub(terms.lifetime);
    is_for(asked, terms, policy) && !validated && !window.is_zero() && beyond <= window
}

#[cfg(test)]
mod tests {
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

    fn asked(line: &str) -> RequestDemands {
        let mut directives = RequestDirectives::default();
        directives.add(&line.parse().expect("a value"));
        RequestDemands { directives, ..RequestDemands::default() }
    }

    fn at(age: u64, line: &str, terms: &ReuseTerms) -> Reuse {
        reuse(&asked(line), terms, secs(age), &HttpPolicy::default())
    }

    #[test]
    fn a_response_is_fresh_until_its_lifetime() {
        let cases =
            [(0, Reuse::Fresh), (59, Reuse::Fresh), (60, Reuse::Revalidate), (7200, Reuse::Revalidate)];
        for (age, expected) in cases {
            assert_eq!(at(age, "", &FRESH_FOR_60), expected, "RFC 9111, 4.2: {age}");
        }
        let almost = secs(60) - Duration::from_nanos(1);
        assert_eq!(reuse(&asked(""), &FRESH_FOR_60, almost, &HttpPolicy::default()), Reuse::Fresh);
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
            assert_eq!(reuse(&asked(line), &FRESH_FOR_60, secs(1), &policy), Reuse::Fresh, "A11: {line}");
            assert_eq!(reuse(&asked(line), &FRESH_FOR_60, secs(60), &policy), Reuse::Revalidate, "{line}");
            let stale = StaleWindows { while_revalidate: secs(4), ..FRESH_FOR_60.stale };
            let served = reuse(&asked(line), &ReuseTerms { stale, ..FRESH_FOR_60 }, secs(61), &policy);
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
    fn requests_with_credentials_get_only_responses_that_allow_sharing() {
        let shared = ReuseTerms { says_shared: true, ..FRESH_FOR_60 };
        for facts in [
            RequestDemands { authorized: true, ..asked("") },
            RequestDemands { has_cookie: true, ..asked("") },
        ] {
            let given = |terms: &ReuseTerms, policy: &HttpPolicy| reuse(&facts, terms, secs(1), policy);
            assert_eq!(given(&FRESH_FOR_60, &HttpPolicy::default()), Reuse::NotForThis, "A1, A2");
            assert_eq!(given(&shared, &HttpPolicy::default()), Reuse::Fresh, "A1, A2");
            assert_eq!(given(&FRESH_FOR_60, &HttpPolicy::strict()), Reuse::Fresh, "RFC 9111, 4");
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
        let gone = LoadFailure::Disconnected;
        let cases = [
            (gone, 70, "", terms, true),
            (gone, 80, "", terms, true),
            (gone, 81, "", terms, false),
            (gone, 70, "", disconnect_only, true),
            (gone, 71, "", disconnect_only, false),
            (gone, 61, "", none, false),
            (gone, 60, "", none, false),
            (gone, 61, "", always, false),
            (gone, 61, "no-cache", terms, false),
            (gone, 30, "max-age=0", terms, true),
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
        for (failed, age, line, terms, given) in cases {
            let stands_in = instead_of(failed, &asked(line), &terms, secs(age), &HttpPolicy::strict());
            assert_eq!(stands_in, given, "RFC 5861, 4; RFC 9111, 4.2.4: {failed:?} {line} at {age}");
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
