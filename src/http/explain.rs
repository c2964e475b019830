//! [`explain`]: applies the caching rules to one request and its response, for users' own tests.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{DATE, HeaderName};
use http::{Method, Request, Response, Uri};
use http_body::SizeHint;

use crate::http_rules::Rule;
use crate::http_rules::fields::date;
use crate::http_rules::query_method::{consider_query, is_query};
use crate::http_rules::request::{ConsideredRequest, consider, consider_post};
use crate::http_rules::response::{DoNotStore, RequestResponse, StoreDecision, Verdict, classify};
use crate::http_rules::settings::{HttpPolicy, ResponseRules};
use crate::http_rules::vary::Vary;
use crate::key::CacheKey;

/// Explains whether a policy stores a response to a request, for how long, and why.
///
/// Stores and sends nothing. The rules are those of the layer, except those that depend on a body (a response over
/// [`max_body`](crate::PolicyBuilder::max_body), a request with content that no header announces): bodies are not
/// examined. The response counts as received at its `Date`, else now.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use http::{Request, Response};
/// use stampede_guard::http::{HttpPolicy, explain};
///
/// let request = Request::get("http://shop.example/report/7").body(())?;
/// let response = Response::builder().header("cache-control", "s-maxage=300").body(())?;
/// let decision = explain(&request, &response, &HttpPolicy::default());
/// assert!(decision.stored);
/// assert_eq!(decision.fresh_for, Some(Duration::from_secs(300)));
/// assert_eq!(decision.to_string(), "stored, fresh for 300s: s-maxage (RFC 9111, 5.2.2.10)");
///
/// let response = Response::builder().header("cache-control", "private").body(())?;
/// let decision = explain(&request, &response, &HttpPolicy::default());
/// assert_eq!(decision.to_string(), "not stored: private (RFC 9111, 5.2.2.7)");
/// # Ok::<(), http::Error>(())
/// ```
pub fn explain<Q, B>(request: &Request<Q>, response: &Response<B>, policy: &HttpPolicy) -> Decision {
    let (considered, target) = match considered(request, policy) {
        Ok(considered) => considered,
        Err(rule) => return Decision::of(rule, None),
    };
    let (headers, now) = (response.headers(), SystemTime::now());
    let method = request.method();
    let exchange = RequestResponse {
        // The rules for a stored QUERY are those of a GET.
        method: if is_query(method) { &Method::GET } else { method },
        target: target.as_ref(),
        demands: &considered.demands,
        request_headers: request.headers(),
        status: response.status(),
        headers,
        body: SizeHint::default(),
        do_not_store: response.extensions().get::<DoNotStore>().is_some(),
        terms: response.extensions().get().copied().unwrap_or_default(),
        delay: Duration::ZERO,
        now: date(headers, &DATE, now).unwrap_or(now),
    };
    // `Decision` does not report the policy's own lifetime, and the body's length is not known.
    let rules = ResponseRules {
        http: Arc::new(policy.clone()),
        fresh_for: Duration::from_secs(1),
        negative_for: Duration::from_secs(1),
        max_body: usize::MAX,
    };
    let decision = |rule| Decision::of(rule, Some(considered.key.clone()));
    match classify(&exchange, &rules) {
        Verdict::Private(rule) => decision(rule),
        Verdict::ShareOnly { rule, vary, .. } => {
            Decision { shared_with_waiters: true, varies_on: names(vary), ..decision(rule) }
        }
        Verdict::Store(storing) => {
            let StoreDecision { ref terms, rule, .. } = storing;
            Decision {
                stored: true,
                shared_with_waiters: true,
                fresh_for: (rule != Rule::Default).then(|| storing.fresh_for()),
                stale_while_revalidate: terms.stale.while_revalidate,
                stale_if_error: terms.stale.if_error,
                stale_on_disconnect: terms.stale.on_disconnect,
                validated_always: terms.revalidate_always,
                varies_on: names(storing.vary),
                ..decision(rule)
            }
        }
    }
}

/// The key and request as a look-up sees them, and for a POST the target URI.
fn considered<Q>(
    request: &Request<Q>,
    policy: &HttpPolicy,
) -> Result<(ConsideredRequest, Option<Uri>), Rule> {
    let rules = &policy.requests;
    match request.method() {
        &Method::POST if policy.strict_rfc => {
            consider_post(request, rules).map(|(post, uri)| (post, Some(uri)))
        }
        method if policy.query_method && is_query(method) => {
            consider_query(request, rules, CacheKey::from_texts).map(|considered| (considered, None))
        }
        _ => consider(request, false, rules, CacheKey::from_texts).map(|considered| (considered, None)),
    }
}

fn names(vary: Vary) -> Vec<HeaderName> {
    if let Vary::Names(names) = vary { names.as_slice().to_vec() } else { Vec::new() }
}

/// The decision about a response, and the rule that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Decision {
    /// The key of the response, which a GET or HEAD looks up; for a QUERY that of its resource. `None` for a request that bypasses the
    /// cache.
    pub key: Option<CacheKey>,
    /// Whether the response is stored for later requests.
    pub stored: bool,
    /// Whether requests that wait for the same load receive it, as far as they agree in
    /// [`varies_on`](Self::varies_on).
    pub shared_with_waiters: bool,
    /// For how long it is served without a new request to the inner service. `None`: as long as
    /// [`fresh_for`](crate::PolicyBuilder::fresh_for) of the policy; zero if it is not stored.
    pub fresh_for: Option<Duration>,
    /// For how long after [`fresh_for`](Self::fresh_for) it is served while it is validated (RFC 5861, 3).
    pub stale_while_revalidate: Duration,
    /// For how long after [`fresh_for`](Self::fresh_for) it is served instead of a failure (RFC 5861, 4).
    pub stale_if_error: Duration,
    /// For how long after [`fresh_for`](Self::fresh_for) it is served while the inner service cannot be reached.
    pub stale_on_disconnect: Duration,
    /// Whether it is validated each time before it is served (`no-cache`).
    pub validated_always: bool,
    /// Request headers that distinguish its variants.
    pub varies_on: Vec<HeaderName>,
    /// The token of the rule that decided, as in `Cache-Status`.
    pub rule: &'static str,
    /// The specification of that rule.
    pub section: &'static str,
}

impl Decision {
    fn of(rule: Rule, key: Option<CacheKey>) -> Self {
        Self {
            key,
            stored: false,
            shared_with_waiters: false,
            fresh_for: Some(Duration::ZERO),
            stale_while_revalidate: Duration::ZERO,
            stale_if_error: Duration::ZERO,
            stale_on_disconnect: Duration::ZERO,
            validated_always: false,
            varies_on: Vec::new(),
            rule: rule.token(),
            section: rule.section(),
        }
    }
}

/// Writes the outcome and its rule, such as `not stored: private (RFC 9111, 5.2.2.7)`.
impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.key.is_some(), self.stored, self.fresh_for) {
            (false, ..) => f.write_str("not looked up")?,
            (true, false, _) => f.write_str("not stored")?,
            (true, true, _) if self.validated_always => f.write_str("stored, always validated")?,
            (true, true, Some(fresh_for)) => write!(f, "stored, fresh for {fresh_for:?}")?,
            (true, true, None) => f.write_str("stored, fresh for as long as the policy says")?,
        }
        write!(f, ": {} ({})", self.rule, self.section)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use super::*;

    /// Header lines.
    type Lines<'a> = &'a [(&'a str, &'a str)];

    fn explained(
        method: &str,
        request: &[(&str, &str)],
        response: &[(&str, &str)],
        policy: &HttpPolicy,
    ) -> Decision {
        let mut built = Request::builder().method(method).uri("http://h/a");
        for (name, value) in request {
            built = built.header(*name, *value);
        }
        let mut answer = Response::builder();
        for (name, value) in response {
            answer = answer.header(*name, *value);
        }
        explain(&built.body(()).unwrap(), &answer.body(()).unwrap(), policy)
    }

    /// Regression: only the layer looked at extensions, and not at those of a POST whose response is stored for GETs.
    #[test]
    fn a_personal_extension_bypasses() {
        #[derive(Clone)]
        struct Session;
        let policy = HttpPolicy::strict().personal_extension::<Session>();
        let response = Response::builder().header("cache-control", "max-age=60");
        let response = response.header("content-location", "http://h/a").body(()).unwrap();
        for method in ["GET", "POST"] {
            let mut request = Request::builder().method(method).uri("http://h/a").body(()).unwrap();
            assert!(explain(&request, &response, &policy).stored, "{method}");
            request.extensions_mut().insert(Session);
            let decision = explain(&request, &response, &policy);
            assert_eq!((decision.stored, decision.rule), (false, "extension"), "{method}");
        }
    }

    #[test]
    fn a_decision_names_the_outcome_and_its_rule() {
        let (default, strict) = (HttpPolicy::default(), HttpPolicy::strict());
        let cases: [(&str, Lines<'_>, Lines<'_>, &HttpPolicy, &str); 15] = [
            (
                "GET",
                &[],
                &[],
                &default,
                "stored, fresh for as long as the policy says: default (PolicyBuilder::fresh_for)",
            ),
            ("GET", &[], &[], &strict, "not stored: stale (RFC 9111, 4.2)"),
            (
                "GET",
                &[],
                &[("cache-control", "max-age=5")],
                &default,
                "stored, fresh for 5s: max-age (RFC 9111, 5.2.2.1)",
            ),
            (
                "GET",
                &[],
                &[("expires", "Sun, 06 Nov 1994 08:50:37 GMT"), ("date", "Sun, 06 Nov 1994 08:49:37 GMT")],
                &default,
                "stored, fresh for 60s: expires (RFC 9111, 5.3)",
            ),
            (
                "GET",
                &[],
                &[("cache-control", "no-cache"), ("etag", "\"a\"")],
                &default,
                "stored, always validated: no-cache (RFC 9111, 5.2.2.4)",
            ),
            (
                "GET",
                &[],
                &[("cache-control", "no-store")],
                &default,
                "not stored: no-store (RFC 9111, 5.2.2.5)",
            ),
            (
                "GET",
                &[],
                &[("cdn-cache-control", "max-age=7")],
                &default,
                "stored, fresh for 7s: cdn-cache-control (RFC 9213, 2.2)",
            ),
            ("GET", &[], &[("vary", "*")], &strict, "not stored: vary (RFC 9111, 4.1)"),
            (
                "GET",
                &[("cookie", "a=b")],
                &[],
                &default,
                "not looked up: credentials (HttpPolicy::credential_headers)",
            ),
            (
                "GET",
                &[("authorization", "x")],
                &[("cache-control", "max-age=5")],
                &strict,
                "not stored: authorization (RFC 9111, 3.5)",
            ),
            (
                "GET",
                &[("accept-encoding", "zz")],
                &[("content-encoding", "gzip"), ("cache-control", "max-age=5")],
                &strict,
                "not stored: accept-encoding (RFC 9110, 12.5.3)",
            ),
            ("GET", &[("content-length", "5")], &[], &default, "not looked up: body (RFC 9110, 9.3.1)"),
            ("HEAD", &[], &[("cache-control", "max-age=5")], &default, "not stored: method (RFC 9111, 4)"),
            ("PUT", &[], &[("cache-control", "max-age=5")], &strict, "not looked up: method (RFC 9111, 4)"),
            (
                "POST",
                &[("content-length", "5")],
                &[("cache-control", "max-age=5"), ("content-location", "/a")],
                &strict,
                "stored, fresh for 5s: max-age (RFC 9111, 5.2.2.1)",
            ),
        ];
        for (method, request, response, policy, text) in cases {
            let decision = explained(method, request, response, policy);
            assert_eq!(decision.to_string(), text, "{method} {request:?} {response:?}");
        }
    }

    #[test]
    fn a_query_is_explained_as_a_get_if_the_policy_stores_it() {
        let policy = HttpPolicy::default().query_method(true);
        let fields = [("cache-control", "max-age=5")];
        for (request, policy, text) in [
            (&[][..], &policy, "not looked up: content-type (RFC 10008, 2)"),
            (&[("content-type", "a/b")], &policy, "stored, fresh for 5s: max-age (RFC 9111, 5.2.2.1)"),
            (&[("content-type", "a/b")], &HttpPolicy::default(), "not looked up: method (RFC 9111, 4)"),
        ] {
            assert_eq!(explained("QUERY", request, &fields, policy).to_string(), text, "{request:?}");
        }
    }

    #[test]
    fn a_decision_has_the_windows_the_variants_and_the_key() {
        let fields =
            [("cache-control", "max-age=5, stale-while-revalidate=6, stale-if-error=7"), ("vary", "B, a")];
        let decision = explained("GET", &[], &fields, &HttpPolicy::default());
        assert_eq!(decision.stale_while_revalidate, Duration::from_secs(6));
        assert_eq!(decision.stale_if_error, Duration::from_secs(7));
        assert_eq!(decision.stale_on_disconnect, Duration::from_secs(60));
        assert_eq!(decision.varies_on, ["a", "b"]);
        assert_eq!(
            decision.key,
            HttpPolicy::default().cache_key(&Request::get("http://h/a").body(()).unwrap())
        );
        assert!(decision.stored && decision.shared_with_waiters && !decision.validated_always);
    }

    #[test]
    fn a_failure_is_shared_and_not_stored() {
        let request = Request::get("http://h/a").body(()).unwrap();
        let mut response =
            Response::builder().status(503).header("cache-control", "max-age=60").body(()).unwrap();
        let decision = explain(&request, &response, &HttpPolicy::default());
        assert!(decision.shared_with_waiters && !decision.stored, "A8, A12");
        assert_eq!(decision.rule, "server-error");
        assert!(explain(&request, &response, &HttpPolicy::strict()).stored);
        response.extensions_mut().insert(DoNotStore);
        assert_eq!(explain(&request, &response, &HttpPolicy::strict()).rule, "do-not-store");
    }
}
