//! Which requests are looked up, and what they are keyed by.
//!
//! Everything that is not provably the plain question "what is at this URI" goes straight to the
//! inner service: a request bypassed in vain costs one load, one shared in vain leaks an answer.

use std::borrow::Cow;

use http::header::{HeaderMap, HeaderValue};
use http::uri::Scheme;
use http::{Method, Request, Uri};

use super::cache_control::RequestDirectives;
use super::policy::RequestRules;
use crate::key::CacheKey;

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// A GET: looked up, and loaded once when it is missing.
    Cached(CacheKey),
    /// A HEAD, under the key of the GET (RFC 9110, 9.3.2): looked up, but a miss passes through.
    /// Its answer has no body, so it must never become the GET's.
    LookUpOnly(CacheKey),
    /// Passes through untouched. The reason is a token, for `Cache-Status` and events.
    Bypass(&'static str),
}

/// The key under which the guard stores the response to a GET of `uri`, for
/// [`invalidate`](crate::StampedeGuard::invalidate). `None` unless the URI is absolute, with a plain
/// `http` or `https` authority.
///
/// A server's requests carry no scheme: there it is the policy's
/// [`scheme`](crate::PolicyBuilder::scheme), `http` by default, and the authority is the client's `Host`.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let guard = stampede_guard::StampedeGuard::in_memory();
/// let uri = "http://shop.example/report/7".parse()?;
/// if let Some(key) = stampede_guard::http::cache_key(&uri) {
///     guard.invalidate(key).await?;
/// }
/// # Ok(()) }
/// ```
pub fn cache_key(uri: &Uri) -> Option<CacheKey> {
    let mut request = Request::new(());
    *request.uri_mut() = uri.clone();
    key(&request, None, &RequestRules::default()).ok()
}

/// Decides about a request by its head, and by whether a body follows.
///
/// One pass over the headers, and no allocation but the key's: every hit pays for this.
pub(crate) fn admit<B: http_body::Body>(request: &Request<B>, rules: &RequestRules) -> Admission {
    let is_get = request.method() == Method::GET;
    // Only what is safe and has defined cache semantics here (RFC 9110, 9.2.3); CONNECT included
    // in the rest, which also is what a WebSocket over HTTP/2 is (RFC 8441).
    if !is_get && request.method() != Method::HEAD {
        return Admission::Bypass("method");
    }
    let host = match host_if_plain(request.headers(), rules) {
        Ok(host) => host,
        Err(reason) => return Admission::Bypass(reason),
    };
    // A GET's content has no defined meaning (RFC 9110, 9.3.1), but a handler that reads it ("fat
    // GET") answers something that the key does not name.
    if !request.body().is_end_stream() {
        return Admission::Bypass("body");
    }
    match key(request, host, rules) {
        Ok(key) if is_get => Admission::Cached(key),
        Ok(key) => Admission::LookUpOnly(key),
        Err(reason) => Admission::Bypass(reason),
    }
}

/// Looks at every header once; gives back the Host header unless one of them forbids sharing.
fn host_if_plain<'a>(
    headers: &'a HeaderMap,
    rules: &RequestRules,
) -> Result<Option<&'a HeaderValue>, &'static str> {
    let mut host = None;
    let mut directives = RequestDirectives::default();
    for (name, value) in headers {
        let reason = match name.as_str() {
            // More than one Host is an attack or an accident (RFC 9112, 3.2: answered with 400).
            "host" if host.is_some() => "host",
            "host" => {
                host = Some(value);
                continue;
            }
            "cache-control" => {
                directives.add(value);
                continue;
            }
            // A part of the resource (RFC 9110, 14.2); If-Range falls under `if-`.
            "range" => "range",
            // Another protocol takes over the connection (RFC 9110, 7.8).
            "upgrade" => "upgrade",
            // A body that waits for a 100 (RFC 9110, 10.1.1).
            "expect" => "expect",
            // A body follows (RFC 9112, 6.3).
            "transfer-encoding" => "body",
            "content-length" if !is_zero(value) => "body",
            // Preconditions (RFC 9110, 13.1), and those not invented yet: the answer may be a 304 or
            // a 412, which is for who holds that validator only.
            text if text.starts_with("if-") => "conditional",
            _ if rules.credentials.contains(name) => "credentials",
            _ if rules.unkeyed.contains(name) => "unkeyed-header",
            _ => continue,
        };
        return Err(reason);
    }
    if directives.no_store {
        // RFC 9111, 5.2.1.5: nothing of the request nor of its response is stored.
        return Err("no-store");
    }
    if directives.only_if_cached {
        // RFC 9111, 5.2.1.7: the inner service must not be asked by us; who sends this means
        // another cache, so leave it to the inner service to say 504.
        return Err("only-if-cached");
    }
    Ok(host)
}

fn is_zero(value: &HeaderValue) -> bool {
    !value.is_empty() && value.as_bytes().iter().all(|&byte| byte == b'0')
}

/// Scheme, authority, path and query: the target URI (RFC 9110, 7.1), which is what a cache is
/// keyed by (RFC 9111, 2).
fn key<B>(
    request: &Request<B>,
    host: Option<&HeaderValue>,
    rules: &RequestRules,
) -> Result<CacheKey, &'static str> {
    let uri = request.uri();
    let target = original(request).unwrap_or(uri);
    let scheme = target.scheme().unwrap_or(&rules.scheme);
    let (head, default_port) = match scheme {
        scheme if *scheme == Scheme::HTTP => ("http:http", 80),
        scheme if *scheme == Scheme::HTTPS => ("http:https", 443),
        _ => return Err("scheme"),
    };
    let named = target.authority().map(|authority| plain_authority(authority.as_str(), default_port));
    let host = match host {
        // An empty Host stands for "no authority" (RFC 9110, 7.2).
        Some(host) if !host.is_empty() => {
            Some(host.to_str().ok().and_then(|host| plain_authority(host, default_port)))
        }
        _ => None,
    };
    let authority = match (named, host) {
        // RFC 9112, 3.2.2 lets the URI win. A handler may still look at Host, so two names for
        // one request are not shared.
        (Some(Some(named)), Some(Some(host))) if !named.eq_ignore_ascii_case(host) => return Err("host"),
        (Some(Some(named)), None | Some(Some(_))) => named,
        (None, Some(Some(host))) => host,
        // Absent, or one that does not parse.
        _ => return Err("host"),
    };
    // Host names are case-insensitive (RFC 9110, 4.2.3); almost always they come in lower case.
    // No early return, so that the bytes are compared many at once.
    let authority = if authority.bytes().fold(false, |any, byte| any | byte.is_ascii_uppercase()) {
        Cow::Owned(authority.to_ascii_lowercase())
    } else {
        Cow::Borrowed(authority)
    };
    let parts = [&*authority, path_and_query(target), path_and_query(uri)];
    // Where something between the router and here rewrote the path, perhaps by a header (a tenant, a
    // language), what the inner service sees must be in the key too.
    let count = if strips(target, uri) { 2 } else { 3 };
    Ok(CacheKey::from_texts(head, &parts[..count]))
}

/// The URI before nested routers took their prefix off.
#[cfg(feature = "axum")]
fn original<B>(request: &Request<B>) -> Option<&Uri> {
    request.extensions().get::<axum::extract::OriginalUri>().map(|original| &original.0)
}

#[cfg(not(feature = "axum"))]
fn original<B>(_: &Request<B>) -> Option<&Uri> {
    None
}

/// Whether `uri` is `target`, or all that nesting has left of it.
fn strips(target: &Uri, uri: &Uri) -> bool {
    std::ptr::eq(target, uri)
        || target.query() == uri.query() && (uri.path() == "/" || target.path().ends_with(uri.path()))
}

/// As it was sent: the origin may tell `%41` from `A` and `?` from nothing (RFC 9110, 4.2.3 permits
/// treating them alike, it does not promise that they are).
fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", |path| path.as_str())
}

/// `host[:port]` without the scheme's default port (RFC 9110, 4.2.3), or nothing if it is no
/// authority that can be a key.
///
/// User information is refused: it is a credential, and deprecated (RFC 9110, 4.2.4).
fn plain_authority(text: &str, default_port: u16) -> Option<&str> {
    let (host, port) = if text.starts_with('[') {
        // An IP literal holds colons of its own (RFC 3986, 3.2.2).
        let (host, port) = text.split_at(text.find(']')? + 1);
        let inner = &host[1..host.len() - 1];
        if inner.is_empty()
            || !inner.bytes().all(|byte| byte.is_ascii_alphanumeric() || b":.".contains(&byte))
        {
            return None;
        }
        (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
    } else {
        // RFC 3986, 3.2.2 `reg-name`; neither `@` nor a second colon is in it.
        match text.bytes().position(|byte| !REG_NAME[usize::from(byte)]) {
            Some(at) => (&text[..at], Some(text[at..].strip_prefix(':')?)),
            None => (text, None),
        }
    };
    if host.is_empty() {
        return None;
    }
    match port {
        None | Some("") => Some(host),
        Some(port) => {
            // `parse` would take a sign.
            let number =
                port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse::<u16>().ok())??;
            Some(if number == default_port { host } else { text })
        }
    }
}

/// A table, because every byte of every request's host is asked.
static REG_NAME: [bool; 256] = {
    let mut allowed = [false; 256];
    let mut byte = 0;
    while byte < allowed.len() {
        allowed[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut others: &[u8] = b"-._~%!$&'()*+,;=";
    while let [byte, rest @ ..] = others {
        allowed[*byte as usize] = true;
        others = rest;
    }
    allowed
};

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "request_tests.rs"]
mod tests;
