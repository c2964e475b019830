//! Which requests may use the cache, and which of their parts are in the key.
//!
//! Every request that is not certainly the plain question "what is at this URI" goes straight to the inner service:
//! a needless bypass costs one load, a wrongly shared response leaks data.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Uri};

use super::Rule;
use super::cache_control::RequestDirectives;
use super::conditional;
use super::fields::{contains_token, members};
use super::key::{KeyHeaders, TargetUri, key_by};
use super::request_settings::{CredentialRule, RequestRules, is_forwarding};
use super::vary::may_be_misread;
use crate::key::CacheKey;

/// A request that may use the cache: its key, and its other demands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConsideredRequest<K = CacheKey> {
    pub(crate) key: K,
    /// A GET may be loaded and stored; a HEAD only finds the stored response of a GET (RFC 9110, 9.3.2).
    pub(crate) is_get: bool,
    pub(crate) demands: RequestDemands,
}

/// A request's demands on the cache, besides the resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestDemands {
    pub(crate) directives: RequestDirectives,
    /// Has `Authorization`, and uses the cache if the response allows it (RFC 9111, 3.5).
    pub(crate) authorized: bool,
    /// Has `Cookie`, likewise.
    pub(crate) has_cookie: bool,
    /// Has `If-None-Match` or `If-Modified-Since`, which a cache evaluates (RFC 9111, 4.3.2).
    pub(crate) conditional: bool,
    /// Has a range of bytes. Applies to a GET only (RFC 9110, 14.2).
    pub(crate) ranged: bool,
    /// Has a header in which proxies report a host, port, scheme or prefix.
    pub(crate) forwarded: bool,
    /// Has cookies, none of which matter.
    pub(crate) other_cookies: bool,
    /// Spells its path or query differently from the normal form.
    pub(crate) other_form: bool,
}

impl RequestDemands {
    /// Whether it has credentials and uses the cache nevertheless.
    pub(crate) fn has_credentials(&self) -> bool {
        self.authorized || self.has_cookie
    }
}

/// Whether a request may use the cache, by its head and the presence of a body; otherwise the rule that forbids it.
///
/// The complete list of requests that bypass: methods other than GET and HEAD; no `Host`, several, or one that is
/// not a plain authority; a scheme other than `http` and `https`; a target without a path; a body, or a header that
/// announces one; `Upgrade` and `Expect`; a `Connection` that lists other headers; a `Range` in units other than
/// bytes; preconditions other than `If-None-Match`, `If-Modified-Since` and `If-Range`; credentials, by the policy;
/// headers that change the meaning of the request without being in the key; extensions that the policy lists;
/// `no-store`; and requests that the policy's hook excludes.
///
/// One pass over the headers, without allocations except the key's: every hit pays for this.
pub(crate) fn consider<B, K>(
    request: &Request<B>,
    has_body: bool,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<ConsideredRequest<K>, Rule> {
    // Only safe methods with defined cache semantics may use the cache (RFC 9110, 9.2.3). This excludes CONNECT, which is
    // also how a WebSocket over HTTP/2 begins (RFC 8441).
    let is_get = request.method() == Method::GET;
    if !is_get && request.method() != Method::HEAD {
        return Err(Rule::Method);
    }
    let (keyed, mut demands) = examine(request.headers(), rules, Content::Bypasses)?;
    // A GET's content has no defined meaning (RFC 9110, 9.3.1), but a handler that reads it ("fat GET") returns a
    // response that depends on more than the key.
    if has_body {
        return Err(Rule::Body);
    }
    if rules.personal.iter().any(|personal| personal.is_in(request.extensions())) {
        return Err(Rule::Extension);
    }
    let key;
    (key, demands.other_form) = key_by(request, &keyed, rules, join)?;
    Ok(ConsideredRequest { key, is_get, demands })
}

/// The key of the GET for which the response to this POST may be stored, the POST's demands, and its absolute
/// target URI (RFC 9110, 9.3.3). It is stored if `response::classify` finds that the response allows it.
pub(crate) fn consider_post<B>(
    request: &Request<B>,
    rules: &RequestRules,
) -> Result<(ConsideredRequest, Uri), Rule> {
    if request.method() != Method::POST {
        return Err(Rule::Method);
    }
    let (keyed, mut demands) = examine(request.headers(), rules, Content::Expected)?;
    let uri = TargetUri::of(request, &keyed, rules)?.uri().ok_or(Rule::Host)?;
    let key;
    (key, demands.other_form) = key_by(request, &keyed, rules, CacheKey::from_texts)?;
    Ok((ConsideredRequest { key, is_get: false, demands }, uri))
}

/// Whether a request may come with content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Bypasses,
    Expected,
}

/// Examines every header once.
pub(crate) fn examine<'a>(
    headers: &'a HeaderMap,
    rules: &RequestRules,
    content: Content,
) -> Result<(KeyHeaders<'a>, RequestDemands), Rule> {
    let mut examined = ExaminedHeaders::default();
    for (name, value) in headers {
        if let Some(rule) = examined.add(name, value, rules, content) {
            return Err(rule);
        }
    }
    let ExaminedHeaders { keyed, mut demands, has_directives, pragma, .. } = examined;
    if demands.directives.no_store {
        // RFC 9111, 5.2.1.5: neither the request nor its response may be stored.
        return Err(Rule::RequestNoStore);
    }
    // RFC 9111, 5.4: `Pragma` counts only if there is no `Cache-Control`.
    demands.directives.no_cache |= pragma && !has_directives;
    // If a cookie on another line matters, the request keeps all cookies.
    demands.other_cookies &= !rules.has_own_cookies(headers);
    Ok((keyed, demands))
}

#[derive(Default)]
struct ExaminedHeaders<'a> {
    keyed: KeyHeaders<'a>,
    demands: RequestDemands,
    has_directives: bool,
    /// Has `Pragma: no-cache`.
    pragma: bool,
    has_range: bool,
}

impl<'a> ExaminedHeaders<'a> {
    /// Adds a header. Returns the rule by which it forbids the use of the cache, if it does.
    #[inline]
    fn add(
        &mut self,
        name: &HeaderName,
        value: &'a HeaderValue,
        rules: &RequestRules,
        content: Content,
    ) -> Option<Rule> {
        let demands = &mut self.demands;
        // A POST goes to the inner service unchanged, with all of its cookies.
        let cookies = rules.cookies.as_ref().filter(|_| content == Content::Bypasses);
        match name.as_str() {
            // Several `Host` fields are an attack or an accident (RFC 9112, 3.2: to be answered with 400).
            "host" => return self.keyed.host.replace(value).map(|_| Rule::Host),
            "cache-control" => {
                demands.directives.add(value);
                self.has_directives = true;
            }
            "accept-encoding" if may_be_misread(value) => return Some(Rule::Coding),
            "pragma" => self.pragma |= contains_token(value.as_bytes(), b"no-cache"),
            "range" if !self.has_range && is_bytes(value) => {
                // An invalid range is ignored: the whole is requested (RFC 9110, 14.2).
                demands.ranged = conditional::is_range(value);
                self.has_range = true;
            }
            "range" => return Some(Rule::Range),
            // A proxy would not forward such a header to the inner service, but a key and `Vary` would see it.
            "connection" if !is_of_connections(value) => return Some(Rule::Connection),
            // Another protocol takes over the connection (RFC 9110, 7.8).
            "upgrade" => return Some(Rule::Upgrade),
            "expect" | "transfer-encoding" | "content-length" if content == Content::Expected => {}
            // The client sends its body only after a 100 (RFC 9110, 10.1.1).
            "expect" => return Some(Rule::Expect),
            // A body follows (RFC 9112, 6.3).
            "transfer-encoding" => return Some(Rule::Body),
            "content-length" if !is_zero(value) => return Some(Rule::Body),
            "if-none-match" | "if-modified-since" => demands.conditional = true,
            // Applies only together with a range, and is compared with what is stored (RFC 9110, 13.1.5).
            "if-range" => {}
            // Preconditions that only the origin may evaluate (RFC 9111, 4.3.2), and future ones.
            text if text.starts_with("if-") => return Some(Rule::Conditional),
            "cookie" if cookies.is_some_and(|cookies| !cookies.any_in(value)) => demands.other_cookies = true,
            _ if rules.keyed_by_credentials && rules.credentials.contains(name) => {
                self.keyed.credentials = true;
            }
            "authorization" if rules.authorization != CredentialRule::Never => demands.authorized = true,
            "cookie" if rules.cookie != CredentialRule::Never => {
                demands.has_cookie |= rules.cookie == CredentialRule::IfSaid;
            }
            _ if rules.credentials.contains(name) => return Some(Rule::Credentials),
            _ if rules.unkeyed.contains(name) => return Some(Rule::UnkeyedHeader),
            text => demands.forwarded |= is_forwarding(text),
        }
        None
    }
}

/// Whether `Connection` lists only options of the connection itself (RFC 9110, 7.6.1).
fn is_of_connections(value: &HeaderValue) -> bool {
    members(value.as_bytes()).all(|option| {
        let known = ["", "close", "keep-alive", "te", "upgrade", "http2-settings"];
        known.iter().any(|known| option.eq_ignore_ascii_case(known.as_bytes()))
    })
}

/// Whether a `Range` is in bytes (RFC 9110, 14.1: names of units are case-insensitive).
fn is_bytes(value: &HeaderValue) -> bool {
    let unit = value.as_bytes().split(|&byte| byte == b'=').next().unwrap_or_default();
    unit.trim_ascii().eq_ignore_ascii_case(b"bytes")
}

pub(crate) fn is_zero(value: &HeaderValue) -> bool {
    !value.is_empty() && value.as_bytes().iter().all(|&byte| byte == b'0')
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/request_tests.rs"]
mod tests;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/request_policy_tests.rs"]
mod policy_tests;
