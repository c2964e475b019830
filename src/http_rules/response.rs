//! Which responses are shared, with which requests, for how long, and on which terms.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode, Uri};
use http_body::SizeHint;

use super::Rule;
use super::cache_control::{CDN_CACHE_CONTROL, CacheControl, DirectiveScope, targeted};
use super::cache_terms::CacheTerms;
use super::conditional::{Part, has_validator};
use super::fields::{Unsound, contains_token, content_length, least_length};
use super::freshness::{
    Lifetime, ReuseTerms, StaleWindows, corrected_initial_age, is_failure, is_understood, is_unstorable,
    lifetime, may_be_guessed, may_have_default, must_revalidate,
};
use super::reference::of_same_origin;
use super::request::RequestDemands;
use super::request_settings::{CacheScope, CredentialRule};
use super::settings::{HttpPolicy, ResponseRules};
use super::vary::{Vary, is_encoded_by_chance};

/// Marks a response that only the requesting client may receive.
///
/// A handler puts it into the response's extensions; the guard then neither stores the response nor shares it with
/// requests that wait for the same URI: each of them calls the handler. `Cache-Control: no-store` does the same, and
/// also applies to every other cache on the way.
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

/// A response's head, and its request.
#[derive(Clone, Debug)]
pub(crate) struct RequestResponse<'a> {
    pub(crate) method: &'a Method,
    /// The absolute target URI, if known: the response to a POST may represent it.
    pub(crate) target: Option<&'a Uri>,
    pub(crate) demands: &'a RequestDemands,
    /// The headers of the request.
    pub(crate) request_headers: &'a HeaderMap,
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    /// The known bounds of the body's length, even if no header states it: for a handler's body the server adds the
    /// header later.
    pub(crate) body: SizeHint,
    /// The response has a [`DoNotStore`] extension.
    pub(crate) do_not_store: bool,
    /// The response's [`CacheTerms`] extension; the default without one.
    pub(crate) terms: CacheTerms,
    /// The time from the request to this head (RFC 9111, 4.2.3, `response_delay`).
    pub(crate) delay: Duration,
    /// When this head was received, by the wall clock.
    pub(crate) now: SystemTime,
}

impl RequestResponse<'_> {
    /// The response's age when it was received (RFC 9111, 4.2.3).
    fn initial_age(&self) -> Duration {
        corrected_initial_age(self.headers, self.delay, self.now)
    }

    /// Whether the response to a POST represents what a GET of the same URI would return.
    fn is_about_target(&self) -> bool {
        self.status.is_success()
            && self.target.is_some_and(|target| {
                of_same_origin(target, self.headers, &header::CONTENT_LOCATION)
                    .is_some_and(|location| location.path_and_query() == target.path_and_query())
            })
    }
}

/// With which requests a response is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Stored for all requests that it answers, on these terms.
    Store(StoreDecision),
    /// Shared with requests that waited for it, if they agree in all headers on which it depends, and not stored.
    ShareOnly { rule: Rule, vary: Vary, says_shared: bool },
    /// Not shared: only the request that loaded the response receives it.
    Private(Rule),
}

/// The decision about a response, which is stored with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreDecision {
    pub(crate) terms: ReuseTerms,
    /// The response's age when it was received (RFC 9111, 4.2.3).
    pub(crate) initial_age: Duration,
    /// For how long from now on the store should keep it: while it is fresh, may be served stale, or may be validated.
    pub(crate) keep_for: Duration,
    pub(crate) vary: Vary,
    has_validator: bool,
    /// Whether the response itself states its stale windows: the one during a validation, and the one after an error.
    pub(crate) says_stale: (bool, bool),
    /// For a 206, its position in the whole as its head states it. The length of its content is not checked yet.
    pub(crate) part: Option<Part>,
    /// Fields of the response that must not be stored (RFC 9111, 5.2.2.4 and 5.2.2.7).
    pub(crate) left_out: Vec<HeaderName>,
    /// The rule that determined its lifetime.
    pub(crate) rule: Rule,
    /// The terms that the handler stated, for the validations that follow. Boxed, because most responses have none.
    pub(crate) handler_terms: Option<Box<CacheTerms>>,
}

impl StoreDecision {
    /// For how long it is fresh from now on.
    pub(crate) fn fresh_for(&self) -> Duration {
        self.terms.lifetime.saturating_sub(self.initial_age)
    }

    /// Whether it was older than its stated lifetime when it was received.
    pub(crate) fn is_too_old(&self) -> bool {
        let ReuseTerms { lifetime, revalidate_always, .. } = self.terms;
        !revalidate_always && !lifetime.is_zero() && self.fresh_for().is_zero()
    }
}

/// Classifies a response by its head.
///
/// The rules that forbid reuse are checked first: even coalescing without storing passes one user's response to others.
pub(crate) fn classify(exchange: &RequestResponse<'_>, rules: &ResponseRules) -> Verdict {
    if is_encoded_by_chance(exchange.request_headers, exchange.headers) {
        return Verdict::Private(Rule::Coding);
    }
    let directives = Directives::of(exchange.headers, &exchange.terms, &rules.http);
    let response = ClassifiedResponse { exchange, rules, http: &rules.http, directives };
    let forbidden = response.forbidden_by_directives().or_else(|| response.forbidden_by_fields());
    match forbidden.or_else(|| response.forbidden_by_status()) {
        Some(rule) => Verdict::Private(rule),
        None => response.storing(),
    }
}

/// The directives that count, and whether they come from a targeted field.
struct Directives {
    all: CacheControl,
    targeted: bool,
    /// The targeted field forbids reuse, even if the rest of that field is invalid.
    forbidden_by_target: bool,
}

impl Directives {
    fn of(headers: &HeaderMap, terms: &CacheTerms, http: &HttpPolicy) -> Self {
        let mut general = CacheControl::parse(headers.get_all(header::CACHE_CONTROL));
        // Only here: a targeted field is for caches such as this one, so what it forbids stays forbidden.
        terms.replace_in(&mut general);
        let untargeted = Self { all: general.clone(), targeted: false, forbidden_by_target: false };
        if http.scope == CacheScope::Private || !headers.contains_key(CDN_CACHE_CONTROL) {
            return untargeted;
        }
        let valid = targeted(headers);
        if http.strict_rfc {
            // RFC 9213, 2.2: a targeted field replaces `Cache-Control`, and is ignored as a whole if it is invalid.
            return match valid {
                Some(all) => Self { all, targeted: true, ..untargeted },
                None => untargeted,
            };
        }
        // More careful than the RFC: reuse is forbidden if either field forbids it, even if the targeted field is invalid.
        let lenient = CacheControl::parse(headers.get_all(CDN_CACHE_CONTROL));
        let forbids =
            |all: &CacheControl| all.no_store || all.private.is_present() || all.no_cache.is_present();
        let forbidden_by_target = forbids(&lenient) || valid.as_ref().is_some_and(forbids);
        match valid {
            Some(mut all) => {
                all.no_store |= general.no_store;
                for (both, one) in
                    [(&mut all.private, general.private), (&mut all.no_cache, general.no_cache)]
                {
                    if one.is_present() {
                        *both = DirectiveScope::Whole;
                    }
                }
                all.must_revalidate |= general.must_revalidate;
                all.proxy_revalidate |= general.proxy_revalidate;
                let targeted = all.max_age.is_some() || all.s_maxage.is_some();
                if !targeted {
                    (all.max_age, all.s_maxage) = (general.max_age, general.s_maxage);
                }
                Self { all, targeted, forbidden_by_target }
            }
            None => Self { forbidden_by_target, ..untargeted },
        }
    }
}

/// A response while its [`Verdict`] is computed.
struct ClassifiedResponse<'a> {
    exchange: &'a RequestResponse<'a>,
    rules: &'a ResponseRules,
    http: &'a HttpPolicy,
    directives: Directives,
}

impl ClassifiedResponse<'_> {
    fn forbidden_by_directives(&self) -> Option<Rule> {
        let RequestResponse { demands, status, do_not_store, terms, .. } = *self.exchange;
        let (http, Directives { all, forbidden_by_target, .. }) = (self.http, &self.directives);
        let is_shared = http.scope == CacheScope::Shared;
        let is_private = terms.is_for_one_user
            || all.private == DirectiveScope::Whole
            || (all.private.is_present() && !http.strict_rfc);
        // RFC 9111, 5.2.2.3: caches that understand the status may store "even if no-store is present".
        let is_overridden = *forbidden_by_target || (all.must_understand && http.strict_rfc);
        [
            (do_not_store, Rule::DoNotStore),
            (terms.do_not_store, Rule::CacheTerms),
            (all.must_understand && !is_understood(status), Rule::MustUnderstand),
            (all.no_store && !is_overridden, Rule::NoStore),
            (*forbidden_by_target, Rule::Targeted),
            (is_shared && is_private, Rule::Private),
            (is_shared && demands.authorized && !all.says_shared, Rule::Authorization),
            (is_shared && demands.has_cookie && !all.says_shared, Rule::Cookie),
        ]
        .into_iter()
        .find_map(|(forbids, rule)| forbids.then_some(rule))
    }

    fn forbidden_by_fields(&self) -> Option<Rule> {
        let RequestResponse { headers, ref body, terms, .. } = *self.exchange;
        let (http, all) = (self.http, &self.directives.all);
        if let Some(rule) = headers.iter().find_map(|(name, value)| match *name {
            // RFC 9111, 7.3 leaves it to `Cache-Control`; in practice a cookie is one user's.
            header::SET_COOKIE => match http.set_cookie {
                CredentialRule::Freely => None,
                CredentialRule::IfSaid if all.says_shared => None,
                CredentialRule::IfSaid | CredentialRule::Never => Some(Rule::SetCookie),
            },
            // `Pragma` is not defined for responses, yet old frameworks write it to mean `no-cache` (RFC 9111, 5.4).
            // `Cache-Control` overrides it, and so do terms.
            header::PRAGMA => (!http.strict_rfc
                && contains_token(value.as_bytes(), b"no-cache")
                && terms.fresh_for.is_none()
                && !headers.contains_key(header::CACHE_CONTROL))
            .then_some(Rule::Pragma),
            // A body of these types never ends, so waiters would wait for its end in vain.
            header::CONTENT_TYPE => is_endless(value).then_some(Rule::EventStream),
            // The connection changes its protocol (RFC 9110, 7.8).
            header::CONNECTION => {
                contains_token(value.as_bytes(), b"upgrade").then_some(Rule::SwitchedProtocol)
            }
            _ => None,
        }) {
            return Some(rule);
        }
        match content_length(headers) {
            Err(Unsound) => Some(Rule::ContentLength),
            Ok(content_length) if least_length(content_length, body) > self.rules.max_body as u64 => {
                Some(Rule::TooBig)
            }
            // A sequence of records without a length and without a stated lifetime may be endless. Its waiters would be held
            // for a whole `load_timeout`, one wave after the other.
            Ok(None)
                if body.exact().is_none() && headers.get(header::CONTENT_TYPE).is_some_and(is_stream) =>
            {
                let lifetime =
                    lifetime(headers, all, self.directives.targeted, http.scope, self.exchange.now);
                let has_lifetime = match terms.fresh_for {
                    Some(fresh_for) => !fresh_for.is_zero(),
                    None => matches!(lifetime, Lifetime::Named(1.., _)),
                };
                (!has_lifetime).then_some(Rule::EventStream)
            }
            Ok(_) => None,
        }
    }

    fn forbidden_by_status(&self) -> Option<Rule> {
        let RequestResponse { demands, status, headers, .. } = *self.exchange;
        match (self.exchange.method, status.as_u16()) {
            // No answer for other requests: an interim response, a switch to another protocol, or the confirmation of a client's
            // own validator (RFC 9110, 15.2; RFC 9111, 4.3.4).
            (_, 100..200 | 304) => Some(Rule::Status),
            _ if is_unstorable(status) => Some(Rule::Unstorable),
            // Only a part that was requested, and that says which part it is, may be stored (RFC 9111, 3.3).
            (&Method::GET, 206) if demands.ranged && Part::of_response(headers).is_some() => None,
            (_, 206) => Some(Rule::Status),
            // A 416 concerns the requested range, not the resource (RFC 9110, 15.5.17).
            (_, 416) if demands.ranged => Some(Rule::Status),
            (&Method::GET, _) => None,
            // The response to a POST represents its target, like that to a GET, if it says so and states its lifetime (RFC
            // 9110, 9.3.3).
            (&Method::POST, _) if self.http.strict_rfc && self.exchange.is_about_target() => None,
            (&Method::POST, _) => Some(Rule::Post),
            _ => Some(Rule::Method),
        }
    }

    /// The verdict on a response that no earlier rule forbids to share.
    fn storing(&self) -> Verdict {
        let RequestResponse { status, headers, .. } = *self.exchange;
        let (http, all) = (self.http, &self.directives.all);
        let vary = Vary::of(headers, &http.vary_on);
        // RFC 9111, 4.1 leaves it to the origin to name `Accept-Encoding`.
        let vary = if http.strict_rfc { vary } else { vary.and_on_coding(headers) };
        if vary == Vary::Any {
            return Verdict::Private(Rule::Vary);
        }
        let private = if http.scope == CacheScope::Shared { all.private.listed() } else { &[] };
        let left_out: Vec<_> = all.no_cache.listed().iter().chain(private).cloned().collect();
        let rule = match self.decision() {
            Ok(decision) => return Verdict::Store(StoreDecision { vary, left_out, ..decision }),
            Err(rule) => rule,
        };
        match (rule, status) {
            // Waiters may need another part. And a response with fields that must not be reused is not shared without storing it: only
            // storing removes these fields.
            (Rule::ServerError | Rule::Stale | Rule::TooOld, StatusCode::PARTIAL_CONTENT) => {
                Verdict::Private(Rule::Status)
            }
            (Rule::ServerError | Rule::Stale | Rule::TooOld, _) => match private {
                [_, ..] => Verdict::Private(Rule::Private),
                [] if !left_out.is_empty() => Verdict::Private(Rule::NoCache),
                [] => Verdict::ShareOnly { rule, vary, says_shared: all.says_shared },
            },
            _ => Verdict::Private(rule),
        }
    }

    /// The decision about a response that is stored, with `vary` and `left_out` still empty; otherwise the rule by which it is not
    /// stored.
    fn decision(&self) -> Result<StoreDecision, Rule> {
        let RequestResponse { status, headers, now, terms, .. } = *self.exchange;
        let (http, all) = (self.http, &self.directives.all);
        let revalidate_always =
            all.no_cache == DirectiveScope::Whole || (all.no_cache.is_present() && !http.strict_rfc);
        let has_validator = has_validator(headers, now);
        if revalidate_always && !self.can_be_validated(has_validator) {
            // It could be stored only to be validated; without a validator it may not be reused at all, not even by
            // waiters.
            return Err(Rule::NoCache);
        }
        let (lifetime, rule) = self.stored_lifetime(revalidate_always)?;
        let stale = StaleWindows::of(all, revalidate_always, http);
        let stale = if revalidate_always { stale } else { terms.windows(stale) };
        let beyond = if has_validator { http.validate_within } else { Duration::ZERO };
        let beyond = beyond.max(stale.while_revalidate).max(stale.if_error).max(stale.on_disconnect);
        let initial_age = self.exchange.initial_age();
        let decision = StoreDecision {
            initial_age,
            keep_for: lifetime.saturating_sub(initial_age).saturating_add(beyond),
            vary: Vary::Nothing,
            has_validator,
            says_stale: (
                all.stale_while_revalidate.is_some() || terms.stale_while_revalidate.is_some(),
                all.stale_if_error.is_some() || terms.stale_if_error.is_some(),
            ),
            part: if status == StatusCode::PARTIAL_CONTENT { Part::of_response(headers) } else { None },
            left_out: Vec::new(),
            rule: if revalidate_always { Rule::NoCache } else { rule },
            handler_terms: terms.as_option().map(Box::new),
            terms: ReuseTerms {
                lifetime,
                stale,
                revalidate_always,
                immutable: all.immutable,
                says_shared: all.says_shared,
            },
        };
        self.refusal(&decision).map_or(Ok(decision), Err)
    }

    /// The lifetime with which a response is stored, and the rule that determined it; otherwise the rule by which it is not stored,
    /// because it has no lifetime.
    fn stored_lifetime(&self, revalidate_always: bool) -> Result<(Duration, Rule), Rule> {
        let RequestResponse { status, headers, now, terms, .. } = *self.exchange;
        if let Some(fresh_for) = terms.fresh_for {
            // As the policy's lifetime, it begins when the response is received, however old it is.
            return Ok((fresh_for.saturating_add(self.exchange.initial_age()), Rule::CacheTerms));
        }
        let (http, all) = (self.http, &self.directives.all);
        let guess_allowed = may_be_guessed(status) || all.public;
        let storable_unnamed = may_have_default(status) || (http.strict_rfc && guess_allowed);
        Ok(match lifetime(headers, all, self.directives.targeted, http.scope, now) {
            Lifetime::Named(seconds, rule) => (Duration::from_secs(seconds), rule),
            _ if self.exchange.method != Method::GET => return Err(Rule::Post),
            _ if is_failure(status) && !http.strict_rfc => return Err(Rule::ServerError),
            // RFC 9111, 3: a response without a lifetime may be stored for its status, or because it is `public`.
            _ if revalidate_always && storable_unnamed => (Duration::ZERO, Rule::NoCache),
            _ if revalidate_always => return Err(Rule::NoCache),
            Lifetime::Guessed(seconds) if http.heuristic_freshness && guess_allowed => {
                (Duration::from_secs(seconds), Rule::Heuristic)
            }
            // The policy's lifetime begins when the response is received, however old it is.
            _ if http.default_lifetime && may_have_default(status) => {
                let says_nothing = matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE);
                let lifetime = if says_nothing { self.rules.negative_for } else { self.rules.fresh_for };
                (lifetime.saturating_add(self.exchange.initial_age()), Rule::Default)
            }
            _ if storable_unnamed => (Duration::ZERO, Rule::Unnamed),
            _ if is_failure(status) => return Err(Rule::ServerError),
            _ => return Err(Rule::Status),
        })
    }

    fn can_be_validated(&self, has_validator: bool) -> bool {
        has_validator && (!is_failure(self.exchange.status) || self.http.strict_rfc)
    }

    /// Why the response is not stored although it has a lifetime.
    fn refusal(&self, decision: &StoreDecision) -> Option<Rule> {
        let (is_fresh, is_failure) = (!decision.fresh_for().is_zero(), is_failure(self.exchange.status));
        let has_validator = decision.has_validator;
        let StaleWindows { while_revalidate, if_error, .. } = decision.terms.stale;
        let is_of_use = is_fresh || !while_revalidate.is_zero() || !if_error.is_zero() || has_validator;
        let needs_validation = must_revalidate(&self.directives.all, self.http);
        match is_failure {
            _ if self.exchange.method != Method::GET && !is_fresh => Some(Rule::Post),
            // No other request may use it without validation, as with `no-cache`, and waiters are other requests.
            _ if !is_fresh && needs_validation && !self.can_be_validated(has_validator) => {
                Some(Rule::MustRevalidate)
            }
            // Shared, the failure ends all waits at once instead of one retry after the other. Stored, it would prolong
            // the outage.
            true if !self.http.strict_rfc || !is_of_use => Some(Rule::ServerError),
            _ if is_of_use => None,
            _ if decision.terms.lifetime.is_zero() => Some(Rule::Stale),
            _ => Some(Rule::TooOld),
        }
    }
}

/// A media type without its parameters.
fn essence(content_type: &HeaderValue) -> &[u8] {
    content_type.as_bytes().split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii()
}

fn is_endless(content_type: &HeaderValue) -> bool {
    let endless = [&b"text/event-stream"[..], b"multipart/x-mixed-replace"];
    endless.iter().any(|endless| essence(content_type).eq_ignore_ascii_case(endless))
}

/// Whether the type is a sequence of records, which may be a finite file or an endless feed.
fn is_stream(content_type: &HeaderValue) -> bool {
    let streams = [
        &b"application/x-ndjson"[..],
        b"application/ndjson",
        b"application/jsonl",
        b"application/x-jsonlines",
        b"application/stream+json",
        // JSON text sequences (RFC 7464).
        b"application/json-seq",
    ];
    let essence = essence(content_type);
    let suffix = essence.len().checked_sub(SEQUENCE.len()).map(|at| &essence[at..]);
    streams.iter().any(|stream| essence.eq_ignore_ascii_case(stream))
        || suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case(SEQUENCE))
}

/// The suffix of the media types that are sequences of JSON texts (RFC 8091).
const SEQUENCE: &[u8] = b"+json-seq";

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/response_tests.rs"]
pub(super) mod tests;
