//! Which requests are looked up, and what they are keyed by.
//!
//! Everything that is not provably the plain question "what is at this URI" goes straight to the
//! inner service: a request bypassed in vain costs one load, one shared in vain leaks an answer.

use http::header::{HeaderMap, HeaderValue};
use http::{Method, Request, Uri};

use super::cache_control::RequestDirectives;
use super::fields::contains_token;
use super::forwarding::is_forwarding;
use super::normalize::may_be_misread;
use super::ranges;
use super::reason::Rule;
use super::request_rules::RequestRules;
use super::request_rules::Sharing;
use super::target::{Keyed, Target, key, key_by};
use crate::key::CacheKey;

/// A request that the rules apply to: its key, and what it asks beyond that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Considered<K = CacheKey> {
    pub(crate) key: K,
    /// A GET may be loaded and stored; a HEAD only finds what a GET has left (RFC 9110, 9.3.2).
    pub(crate) is_get: bool,
    pub(crate) asked: Asked,
}

/// What a request asks of the cache beside the resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) directives: RequestDirectives,
    /// Comes with `Authorization`, and takes part if the response says so (RFC 9111, 3.5).
    pub(crate) authorized: bool,
    /// Comes with `Cookie`, likewise.
    pub(crate) has_cookie: bool,
    /// Comes with `If-None-Match` or `If-Modified-Since`, which a cache evaluates (RFC 9111, 4.3.2).
    pub(crate) conditional: bool,
    /// Comes with a range of bytes. Means something for a GET only (RFC 9110, 14.2).
    pub(crate) ranged: bool,
    /// Comes with `If-Range`. Means something beside a range only (RFC 9110, 13.1.5).
    pub(crate) if_range: bool,
    /// Comes with a header by which proxies report a host, port, scheme or prefix.
    pub(crate) forwarded: bool,
    /// Comes with cookies, none of which matter.
    pub(crate) other_cookies: bool,
}

impl Asked {
    /// Whether it comes with credentials, and takes part all the same.
    pub(crate) fn has_credentials(&self) -> bool {
        self.authorized || self.has_cookie
    }
}

/// Whether the rules apply to a request, by its head and by whether a body follows; else what forbids it.
///
/// The whole list of what passes by: methods other than GET and HEAD; more than one `Host`, none, or one that is no
/// plain authority; another scheme than `http` and `https`; a target without a path; a body, or a header that announces
/// one; `Upgrade` and `Expect`; a `Connection` that names other headers; a `Range` in other units than bytes;
/// preconditions other than `If-None-Match`, `If-Modified-Since` and `If-Range`; credentials, as the policy has it;
/// headers that change what is asked without being in the key; extensions that the policy names; `no-store`; and what the
/// policy's hook sends away.
///
/// One pass over the headers, and no allocation but the key's: every hit pays for this.
pub(crate) fn consider<B: http_body::Body, K>(
    request: &Request<B>,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<Considered<K>, Rule> {
    let is_get = method(request)?;
    let (keyed, asked) = survey(request.headers(), rules, Content::Bypasses)?;
    bodiless(request)?;
    if rules.personal.iter().any(|personal| personal.is_in(request.extensions())) {
        return Err(Rule::Extension);
    }
    Ok(Considered { key: key_by(request, &keyed, rules, join)?, is_get, asked })
}

/// The key of the GET that the answer to this POST may stand for, what the POST asks, and its target URI,
/// absolute (RFC 9110, 9.3.3). It is stored if `response::judge` finds that it says so.
pub(crate) fn consider_post<B>(
    request: &Request<B>,
    rules: &RequestRules,
) -> Result<(Considered, Uri), Rule> {
    if request.method() != Method::POST {
        return Err(Rule::Method);
    }
    let (keyed, asked) = survey(request.headers(), rules, Content::Expected)?;
    let uri = Target::of(request, &keyed, rules)?.uri().ok_or(Rule::Host)?;
    Ok((Considered { key: key(request, &keyed, rules)?, is_get: false, asked }, uri))
}

/// Whether it is a GET; what else is no HEAD is not looked up.
///
/// Only what is safe and has defined cache semantics here (RFC 9110, 9.2.3); CONNECT included in the
/// rest, which also is what a WebSocket over HTTP/2 is (RFC 8441).
fn method<B>(request: &Request<B>) -> Result<bool, Rule> {
    match *request.method() {
        Method::GET => Ok(true),
        Method::HEAD => Ok(false),
        _ => Err(Rule::Method),
    }
}

/// A GET's content has no defined meaning (RFC 9110, 9.3.1), but a handler that reads it ("fat GET")
/// answers something that the key does not name.
fn bodiless<B: http_body::Body>(request: &Request<B>) -> Result<(), Rule> {
    if request.body().is_end_stream() { Ok(()) } else { Err(Rule::Body) }
}

/// Whether a request may come with content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Bypasses,
    Expected,
}

/// Looks at every header once.
pub(crate) fn survey<'a>(
    headers: &'a HeaderMap,
    rules: &RequestRules,
    content: Content,
) -> Result<(Keyed<'a>, Asked), Rule> {
    let mut keyed = Keyed::default();
    let mut asked = Asked::default();
    let [mut has_directives, mut pragma, mut has_range] = [false; 3];
    // A POST goes to the inner service as it came, with all of its cookies.
    let cookies = rules.cookies.as_ref().filter(|_| content == Content::Bypasses);
    for (name, value) in headers {
        let rule = match name.as_str() {
            // More than one Host is an attack or an accident (RFC 9112, 3.2: answered with 400).
            "host" if keyed.host.is_some() => Rule::Host,
            "host" => {
                keyed.host = Some(value);
                continue;
            }
            "cache-control" => {
                has_directives = true;
                asked.directives.add(value);
                continue;
            }
            "accept-encoding" if may_be_misread(value) => Rule::Coding,
            "pragma" => {
                pragma |= contains_token(value.as_bytes(), b"no-cache");
                continue;
            }
            "range" if !has_range && is_bytes(value) => {
                has_range = true;
                // An invalid one asks for nothing but the whole (RFC 9110, 14.2).
                asked.ranged = ranges::is_valid(value);
                continue;
            }
            "range" => Rule::Range,
            // Not for the inner service, if that is a proxy; but a key and `Vary` would see it.
            "connection" if !is_of_connections(value) => Rule::Connection,
            // Another protocol takes over the connection (RFC 9110, 7.8).
            "upgrade" => Rule::Upgrade,
            "expect" | "transfer-encoding" | "content-length" if content == Content::Expected => continue,
            // A body that waits for a 100 (RFC 9110, 10.1.1).
            "expect" => Rule::Expect,
            // A body follows (RFC 9112, 6.3).
            "transfer-encoding" => Rule::Body,
            "content-length" if !is_zero(value) => Rule::Body,
            "if-none-match" | "if-modified-since" => {
                asked.conditional = true;
                continue;
            }
            "if-range" => {
                asked.if_range = true;
                continue;
            }
            // Preconditions that are the origin's (RFC 9111, 4.3.2), and those not invented yet.
            text if text.starts_with("if-") => Rule::Conditional,
            "cookie" if cookies.is_some_and(|cookies| !cookies.any_in(value)) => {
                asked.other_cookies = true;
                continue;
            }
            _ if rules.keyed_by_credentials && rules.credentials.contains(name) => {
                keyed.credentials = true;
                continue;
            }
            "authorization" if rules.authorization != Sharing::Never => {
                asked.authorized = true;
                continue;
            }
            "cookie" if rules.cookie != Sharing::Never => {
                asked.has_cookie |= rules.cookie == Sharing::IfSaid;
                continue;
            }
            _ if rules.credentials.contains(name) => Rule::Credentials,
            _ if rules.unkeyed.contains(name) => Rule::UnkeyedHeader,
            text => {
                asked.forwarded |= is_forwarding(text);
                continue;
            }
        };
        return Err(rule);
    }
    if asked.directives.no_store {
        // RFC 9111, 5.2.1.5: nothing of the request nor of its response is stored.
        return Err(Rule::RequestNoStore);
    }
    // RFC 9111, 5.4: it stands in for Cache-Control where there is none.
    asked.directives.no_cache |= pragma && !has_directives;
    // Where a cookie on another line matters, all of them go on.
    asked.other_cookies &= !rules.has_own_cookies(headers);
    Ok((keyed, asked))
}

/// Whether `Connection` names nothing but what is about connections (RFC 9110, 7.6.1).
fn is_of_connections(value: &HeaderValue) -> bool {
    value.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii).all(|option| {
        let known = ["", "close", "keep-alive", "te", "upgrade", "http2-settings"];
        known.iter().any(|known| option.eq_ignore_ascii_case(known.as_bytes()))
    })
}

/// Whether a `Range` is in bytes (RFC 9110, 14.1: names of units are in any case).
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
