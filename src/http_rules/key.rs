//! The key of a request: its target URI in normal form, and the policy's additions.
//!
//! With the feature `axum`, the target is the original URI of the request. axum reports it, the route that matched the
//! request, and the prefix that nesting removed.
//!
//! The normal form of a path and query (RFC 3986, 6.2.2) is one name for all spellings of a resource.

use std::borrow::Cow;

use http::header::{HeaderMap, HeaderValue};
use http::uri::Scheme;
use http::{Request, Uri, Version, header};
use sha2::{Digest as _, Sha256};

use self::nesting::is_nested;
pub(crate) use self::nesting::{matched_route, original};
use super::Rule;
use super::query::QueryRules;
use super::request_settings::{KeyParts, RequestRules};
use super::vary::Fingerprint;
use crate::key::CacheKey;

/// The key under which a guard with the default [`HttpPolicy`](crate::http::HttpPolicy) stores the response to a GET of
/// `uri`, for [`invalidate`](crate::StampedeGuard::invalidate). `None` unless the URI is absolute, with a plain `http`
/// or `https` authority.
///
/// Requests that a server receives have no scheme: their keys have the policy's
/// [`scheme`](crate::http::HttpPolicy::scheme), `http` by default, and the client's `Host` as authority.
///
/// This ignores the policy. If a policy is [`private`](crate::http::HttpPolicy::private), is
/// [`strict`](crate::http::HttpPolicy::strict), has a [`key`](crate::http::HttpPolicy::key) function, or
/// [ignores](crate::http::HttpPolicy::ignore_query) parameters of this URI, its entries have other keys, and
/// invalidating this key has no effect: use [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) there.
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
    key(&request, &KeyHeaders::default(), &RequestRules::default()).ok()
}

/// The parts of a request's headers that its key may need.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyHeaders<'a> {
    pub(crate) host: Option<&'a HeaderValue>,
    /// Whether the request has credentials that belong in the key.
    pub(crate) credentials: bool,
}

impl<'a> KeyHeaders<'a> {
    /// The parts of a request that is not looked up, whose other headers need no check. `None` if it has several `Host`
    /// fields and the policy names no authority.
    pub(crate) fn of(headers: &'a HeaderMap, rules: &RequestRules) -> Option<Self> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next();
        if hosts.next().is_some() && rules.authority.is_none() {
            return None;
        }
        let credentials =
            rules.keyed_by_credentials && rules.credentials.names.iter().any(|name| rules.has(name, headers));
        Some(Self { host, credentials })
    }
}

/// The key of the resource that a request addresses.
pub(crate) fn key<B>(
    request: &Request<B>,
    keyed: &KeyHeaders<'_>,
    rules: &RequestRules,
) -> Result<CacheKey, Rule> {
    key_by(request, keyed, rules, CacheKey::from_texts).map(|(key, _)| key)
}

/// The key of the resource that a request addresses, built by `join` from a head and texts, and whether the request
/// spells its target differently from the normal form.
pub(crate) fn key_by<B, K>(
    request: &Request<B>,
    keyed: &KeyHeaders<'_>,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<(K, bool), Rule> {
    // A request line may consist of an authority, and servers accept that for any method (RFC 9112, 3.2.3). A
    // router sees no path in it and may answer otherwise than for `/`, so such a request has no key.
    let original = original(request);
    if [request.uri()].into_iter().chain(original).any(|uri| uri.path_and_query().is_none()) {
        return Err(Rule::Target);
    }
    let target = TargetUri::of(original, request, keyed, rules)?;
    let added = match keyed.credentials || rules.key.is_some() {
        true => additions(request, keyed, rules)?,
        false => Vec::new(),
    };
    Ok((target.key_by(&added, join), target.other_form))
}

/// The target of a request in the request's own spelling: its original URI, and the URI that the inner service sees; both
/// with the query of the key.
pub(crate) fn sent_target<'a, B>(request: &'a Request<B>, rules: &RequestRules) -> [Cow<'a, str>; 2] {
    let query = rules.query.as_deref();
    [original(request).unwrap_or_else(|| request.uri()), request.uri()]
        .map(|uri| with_keyed_query(uri, query))
}

/// Scheme, authority, path and query: the target URI (RFC 9110, 7.1), which is the primary key of a cache (RFC
/// 9111, 2). Paths are in normal form, so that an invalidation reaches the resource under any spelling of its path.
pub(crate) struct TargetUri<'a> {
    /// The head of the key, which includes the scheme.
    head: &'static str,
    authority: Cow<'a, str>,
    path: Cow<'a, str>,
    /// The path that the inner service sees, if another layer has rewritten it.
    rewritten: Option<Cow<'a, str>>,
    /// Whether the request spells one of its paths, or a query, differently from the normal form.
    other_form: bool,
}

impl<'a> TargetUri<'a> {
    /// The target of a request with this `original` URI.
    pub(crate) fn of<B>(
        original: Option<&'a Uri>,
        request: &'a Request<B>,
        keyed: &KeyHeaders<'a>,
        rules: &'a RequestRules,
    ) -> Result<Self, Rule> {
        let target = original.unwrap_or_else(|| request.uri());
        let (head, default_port) = scheme(target, rules).ok_or(Rule::Scheme)?;
        if let Some(authority) = &rules.authority {
            return Ok(Self::at(head, authority, target, request, rules));
        }
        // A handler that builds URLs from the authority would write a redundant port into a shared response, so a
        // received request with one is refused. A request that a client of this process sends has no `Host`, and its
        // response serves no other client.
        let is_received = keyed.host.is_some() || request.version() > Version::HTTP_11;
        let plain = |text: &'a str| {
            plain_authority(text, default_port).filter(|plain| !is_received || plain.len() == text.len())
        };
        let named = target.authority().map(|authority| plain(authority.as_str()));
        // An empty `Host` means "no authority" (RFC 9110, 7.2), which contradicts one in the URI.
        let host = keyed.host.map(|host| host.to_str().ok().and_then(plain));
        let authority = match (named, host) {
            // RFC 9112, 3.2.2 lets the URI win. A handler may still read `Host`, so a request with two authorities
            // is not shared.
            (Some(Some(named)), Some(Some(host))) if !named.eq_ignore_ascii_case(host) => {
                return Err(Rule::Host);
            }
            (Some(Some(named)), None | Some(Some(_))) => named,
            (None, Some(Some(host))) => host,
            // The authority is absent, or the URI or `Host` has an invalid one.
            _ => return Err(Rule::Host),
        };
        Ok(Self::at(head, authority, target, request, rules))
    }

    /// The targets that an unsafe request may change, each once: that of its URI, which wins (RFC 9112, 3.2.2), and
    /// that of `Host`, which a handler may use. User information does not distinguish resources.
    pub(crate) fn changed_by<B>(
        request: &'a Request<B>,
        keyed: &KeyHeaders<'a>,
        rules: &'a RequestRules,
    ) -> Vec<Self> {
        let target = original(request).unwrap_or_else(|| request.uri());
        let Some((head, default_port)) = scheme(target, rules) else { return Vec::new() };
        if let Some(authority) = &rules.authority {
            return vec![Self::at(head, authority, target, request, rules)];
        }
        let named = target.authority().map(http::uri::Authority::as_str);
        let named = named.map(|named| named.rsplit_once('@').map_or(named, |(_, named)| named));
        let host = keyed.host.and_then(|host| host.to_str().ok());
        let plain = |text: Option<&'a str>| plain_authority(text?, default_port);
        let (named, host) = (plain(named), plain(host));
        let host = host.filter(|host| !named.is_some_and(|named| named.eq_ignore_ascii_case(host)));
        let all = named.into_iter().chain(host);
        all.map(|authority| Self::at(head, authority, target, request, rules)).collect()
    }

    fn at<B>(
        head: &'static str,
        authority: &'a str,
        target: &'a Uri,
        request: &'a Request<B>,
        rules: &RequestRules,
    ) -> Self {
        let query = rules.query.as_deref();
        let (path, mut other_form) = keyed_form(target, query);
        // If a layer between the router and the guard rewrote the path, perhaps by a header (a tenant, a language),
        // the inner service's path must be in the key too.
        let rewritten = (!strips(target, request, query)).then(|| {
            let (path, is_other) = keyed_form(request.uri(), query);
            other_form |= is_other;
            path
        });
        Self { head, authority: lower_case(authority), path, rewritten, other_form }
    }

    pub(crate) fn key(&self, added: &[String]) -> CacheKey {
        self.key_by(added, CacheKey::from_texts)
    }

    fn key_by<K>(&self, added: &[String], join: impl FnOnce(&str, &[&str]) -> K) -> K {
        let parts = [&*self.authority, &*self.path, self.rewritten.as_deref().unwrap_or_default()];
        let parts = &parts[..2 + usize::from(self.rewritten.is_some())];
        if added.is_empty() {
            return join(self.head, parts);
        }
        let all: Vec<_> = parts.iter().copied().chain(added.iter().map(String::as_str)).collect();
        join(self.head, &all)
    }

    /// The target as an absolute URI, with its path in normal form.
    pub(crate) fn uri(&self) -> Option<Uri> {
        let scheme = if self.head.ends_with(":https") { "https" } else { "http" };
        Uri::builder().scheme(scheme).authority(&*self.authority).path_and_query(&*self.path).build().ok()
    }
}

/// The head of the key for the scheme of the URI, or of the policy, and that scheme's default port.
fn scheme(target: &Uri, rules: &RequestRules) -> Option<(&'static str, u16)> {
    match target.scheme().unwrap_or(&rules.scheme) {
        scheme if *scheme == Scheme::HTTP => Some((rules.heads.http, default_port(scheme))),
        scheme if *scheme == Scheme::HTTPS => Some((rules.heads.https, default_port(scheme))),
        _ => None,
    }
}

/// The port of an authority without a port (RFC 9110, 4.2.1 and 4.2.2).
pub(crate) fn default_port(scheme: &Scheme) -> u16 {
    if *scheme == Scheme::HTTPS { 443 } else { 80 }
}

/// Host names are case-insensitive (RFC 9110, 4.2.3); they are almost always in lower case.
fn lower_case(authority: &str) -> Cow<'_, str> {
    // No early return, so that the comparison is vectorized.
    if authority.bytes().fold(false, |any, byte| any | byte.is_ascii_uppercase()) {
        Cow::Owned(authority.to_ascii_lowercase())
    } else {
        Cow::Borrowed(authority)
    }
}

/// The policy's additions to the key. No path begins like one of them, so an addition is never mistaken for a path.
pub(crate) fn additions<B>(
    request: &Request<B>,
    keyed: &KeyHeaders<'_>,
    rules: &RequestRules,
) -> Result<Vec<String>, Rule> {
    let mut added = Vec::new();
    if keyed.credentials {
        // A digest, because keys are stored and credentials are secret.
        let mut digest = Sha256::new();
        for name in rules.credentials.names.iter().filter(|name| rules.has(name, request.headers())) {
            for value in request.headers().get_all(name) {
                for bytes in [name.as_str().as_bytes(), value.as_bytes()] {
                    digest.update((bytes.len() as u64).to_le_bytes());
                    digest.update(bytes);
                }
            }
        }
        added.push(format!("credentials={}", Fingerprint(digest.finalize().into())));
    }
    if let Some(hook) = &rules.key {
        // The hook sees the query of the key, so that it adds nothing that the key leaves out.
        let keyed_head = rules.query.as_ref().and_then(|query| query.keyed_head(request));
        let (uri, extensions) = match &keyed_head {
            Some(head) => (head.uri(), head.extensions()),
            None => (request.uri(), request.extensions()),
        };
        let text = hook.call(&KeyParts { uri, headers: request.headers(), extensions });
        let text = text.ok_or(Rule::KeyHook)?;
        added.push(addition(&text));
    }
    Ok(added)
}

/// The addition to the key for this result of the policy's hook.
pub(crate) fn addition(text: &str) -> String {
    format!("key={text}")
}

/// The path and query as sent; `/` if the URI has none.
fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", |path| path.as_str())
}

/// `host[:port]` without the scheme's default port (RFC 9110, 4.2.3), or `None` if it is not an authority that can
/// be a key.
///
/// User information is refused: it is a credential, and deprecated (RFC 9110, 4.2.4).
pub(crate) fn plain_authority(text: &str, default_port: u16) -> Option<&str> {
    let (host, port) = if text.starts_with('[') {
        // An IP literal contains colons (RFC 3986, 3.2.2).
        let (host, port) = text.split_at(text.find(']')? + 1);
        let inner = &host[1..host.len() - 1];
        if inner.is_empty()
            || !inner.bytes().all(|byte| byte.is_ascii_alphanumeric() || b":.".contains(&byte))
        {
            return None;
        }
        (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
    } else {
        // RFC 3986, 3.2.2 `reg-name`: contains neither `@` nor a second colon.
        match text.bytes().position(|byte| ALLOWED[usize::from(byte)] & IN_HOST == 0) {
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
            // `parse` alone would accept a sign.
            let number =
                port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse::<u16>().ok())??;
            Some(if number == default_port { host } else { text })
        }
    }
}

/// The path and query of a URI, with the query of the key.
fn with_keyed_query<'a>(uri: &'a Uri, query: Option<&QueryRules>) -> Cow<'a, str> {
    let sent = path_and_query(uri);
    query.map_or(Cow::Borrowed(sent), |query| query.keyed(sent))
}

/// The path and query of the key in normal form, and whether the request spells them differently. Inlined, because each hit
/// computes it, mostly without rules.
#[inline]
fn keyed_form<'a>(uri: &'a Uri, query: Option<&QueryRules>) -> (Cow<'a, str>, bool) {
    if let Some(query) = query {
        return keyed_form_by(uri, query);
    }
    let normal = normal_form(path_and_query(uri));
    let is_other = matches!(normal, Cow::Owned(_));
    (normal, is_other)
}

/// As [`keyed_form`], with rules. What the key leaves out, and the order of sorted parameters, make no other form, because
/// the load does not see them.
#[inline(never)]
fn keyed_form_by<'a>(uri: &'a Uri, query: &QueryRules) -> (Cow<'a, str>, bool) {
    let keyed = query.keyed(path_and_query(uri));
    let normal = match normal_form(&keyed) {
        Cow::Owned(normal) => Some(normal),
        Cow::Borrowed(_) => None,
    };
    let is_other = normal.is_some();
    (normal.map_or(keyed, Cow::Owned), is_other)
}

/// Whether the inner service sees this target, either unchanged or without the prefixes that nested routers removed.
fn strips<B>(target: &Uri, request: &Request<B>, query: Option<&QueryRules>) -> bool {
    let uri = request.uri();
    if std::ptr::eq(target, uri) {
        return true;
    }
    let is_same_query =
        target.query() == uri.query() || query.is_some_and(|query| query.is_same_query(target, uri));
    is_same_query && (target.path() == uri.path() || is_nested(target.path(), request))
}

/// What axum reports about a request, in its extensions.
#[cfg(feature = "axum")]
mod nesting {
    use axum::extract::{MatchedPath, NestedPath, OriginalUri};
    use http::{Request, Uri};

    /// The URI before nested routers removed their prefixes.
    ///
    /// A handler that forwards its request to another origin leaves the extension on it. The extension then does not describe
    /// the new URI, so it is ignored.
    pub(crate) fn original<B>(request: &Request<B>) -> Option<&Uri> {
        let (uri, original) = (request.uri(), &request.extensions().get::<OriginalUri>()?.0);
        (original.scheme() == uri.scheme() && original.authority() == uri.authority()).then_some(original)
    }

    /// The route that matched the request: `/users/{id}`. A layer added by `Router::layer` or
    /// `Router::route_layer` runs after the match and sees it; a service around the whole router runs before the match.
    pub(crate) fn matched_route<B>(request: &Request<B>) -> Option<&str> {
        request.extensions().get::<MatchedPath>().map(MatchedPath::as_str)
    }

    /// Whether nesting has shortened this request's path from `path`. Any other rewrite may depend on a header.
    pub(super) fn is_nested<B>(path: &str, request: &Request<B>) -> bool {
        let nested = request.extensions().get::<NestedPath>();
        let left = nested.and_then(|prefix| without(path, prefix.as_str()));
        left.is_some_and(|left| match request.uri().path() {
            path if left.starts_with('/') => path == left,
            path => path.strip_prefix('/') == Some(left),
        })
    }

    /// The rest of a path after a prefix and one slash; `None` if the path has another prefix.
    fn without<'p>(path: &'p str, prefix: &str) -> Option<&'p str> {
        let mut left = path;
        for pattern in prefix.strip_suffix('/').unwrap_or(prefix).split('/').skip(1) {
            let rest = left.strip_prefix('/')?;
            let (segment, rest) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let is_capture = pattern.starts_with('{') && pattern.ends_with('}') && !pattern.starts_with("{{");
            if segment != pattern && !is_capture {
                return None;
            }
            left = rest;
        }
        Some(left.strip_prefix('/').unwrap_or(left))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_prefix_matches_whole_segments_and_a_capture_any_segment() {
            let cases = [
                ("/api/list", "/api", Some("list")),
                ("/api/list", "/api/", Some("list")),
                ("/api/a/b", "/api", Some("a/b")),
                ("/api", "/api", Some("")),
                ("/api/", "/api", Some("")),
                ("/api//list", "/api", Some("/list")),
                ("/acme/v1/list", "/{tenant}/v1", Some("list")),
                ("/acme/v1/list", "/{a}/{b}", Some("list")),
                ("/list", "/", Some("list")),
                ("/{a}/list", "/{{a}}", None),
                ("/apis/list", "/api", None),
                ("/api", "/api/v1", None),
                ("/v2/list", "/v1", None),
                ("*", "/api", None),
            ];
            for (path, prefix, left) in cases {
                assert_eq!(without(path, prefix), left, "{path} behind {prefix}");
            }
        }
    }
}

/// Without axum, no router reports anything.
#[cfg(not(feature = "axum"))]
mod nesting {
    use http::{Request, Uri};

    pub(crate) fn original<B>(_: &Request<B>) -> Option<&Uri> {
        None
    }

    pub(crate) fn matched_route<B>(_: &Request<B>) -> Option<&str> {
        None
    }

    pub(super) fn is_nested<B>(_: &str, _: &Request<B>) -> bool {
        false
    }
}

/// The normal form of a path and query; borrowed if the text is already in this form.
///
/// - A percent-encoded unreserved character is decoded, and the digits of other codes are in upper case.
/// - A character that no path or query may contain is percent-encoded, as clients do; so is a `%` that begins no code.
/// - The segments `.` and `..` are removed, and so is an empty query.
///
/// `%2F` and `/`, `/a/` and `/a`, and parameters in another order remain distinct, because origins treat them
/// differently.
pub(crate) fn normal_form(path_and_query: &str) -> Cow<'_, str> {
    let bytes = path_and_query.as_bytes();
    let (mut allowed, mut has_dot) = (PLAIN, false);
    for &byte in bytes {
        allowed &= ALLOWED[usize::from(byte)];
        has_dot |= byte == b'.';
    }
    let has_dot_segment = || has_dot && bytes.windows(2).any(|pair| pair == b"/.");
    if allowed != 0 && !path_and_query.ends_with('?') && !has_dot_segment() {
        return Cow::Borrowed(path_and_query);
    }
    let (path, query) = match path_and_query.split_once('?') {
        Some((path, query)) => (path, query),
        None => (path_and_query, ""),
    };
    let mut normal = without_dots(&encoded(path, IN_PATH));
    if !query.is_empty() {
        normal.push('?');
        normal.push_str(&encoded(query, IN_QUERY));
    }
    if normal == path_and_query { Cow::Borrowed(path_and_query) } else { Cow::Owned(normal) }
}

/// Encodes the characters that this `component` of a URI may not contain, and decodes the unreserved ones.
fn encoded(text: &str, component: u8) -> String {
    const HEX: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
    let digit = |byte: Option<&u8>| {
        byte.and_then(|byte| char::from(*byte).to_digit(16)).and_then(|digit| u8::try_from(digit).ok())
    };
    let mut normal = String::with_capacity(text.len() + 16);
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let code = match (byte, digit(after.first()), digit(after.get(1))) {
            (b'%', Some(high), Some(low)) => Some(high << 4 | low),
            _ => None,
        };
        rest = if code.is_some() { &after[2..] } else { after };
        let byte = code.unwrap_or(*byte);
        // A character that was encoded keeps its code unless it is unreserved: `%2F` is not `/`.
        if ALLOWED[usize::from(byte)] & if code.is_some() { UNRESERVED } else { component } != 0 {
            normal.push(char::from(byte));
        } else {
            normal.extend(['%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
    normal
}

const UNRESERVED: u8 = 1;
const IN_PATH: u8 = 2;
const IN_QUERY: u8 = 4;
/// Needs no change anywhere in a text that is a path and its query.
const PLAIN: u8 = 8;
/// May occur in a host name. `%` is among these characters, because codes stay as they are there.
const IN_HOST: u8 = 16;
const EVERYWHERE: u8 = UNRESERVED | IN_PATH | IN_QUERY | PLAIN | IN_HOST;

/// The components of a URI in which each character needs no encoding (RFC 3986, 2.3, 3.2.2, 3.3 and 3.4). A table, because every byte of
/// every request's target is checked.
static ALLOWED: [u8; 256] = {
    let mut allowed = [0; 256];
    let mut byte = 0;
    while byte < allowed.len() {
        if (byte as u8).is_ascii_alphanumeric() {
            allowed[byte] = EVERYWHERE;
        }
        byte += 1;
    }
    let classes: [(&[u8], u8); 5] = [
        (b"-._~", EVERYWHERE),
        (b"!$&'()*+,;=", EVERYWHERE & !UNRESERVED),
        (b":@/", IN_PATH | IN_QUERY | PLAIN),
        (b"%", IN_HOST),
        (b"?", IN_QUERY | PLAIN),
    ];
    let mut class = 0;
    while class < classes.len() {
        let (mut bytes, components) = classes[class];
        while let [byte, rest @ ..] = bytes {
            allowed[*byte as usize] = components;
            bytes = rest;
        }
        class += 1;
    }
    allowed
};

/// Removes the segments `.` and `..` from the path of a resolved reference (RFC 3986, 5.2.4). The query stays. An empty
/// path becomes `/`.
pub(super) fn without_dots(path_and_query: &str) -> String {
    let end = path_and_query.find('?').unwrap_or(path_and_query.len());
    let (path, query) = path_and_query.split_at(end);
    let mut output: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    output.pop();
                }
                // A trailing dot segment leaves the folder itself.
                if is_last {
                    output.push("");
                }
            }
            _ => output.push(segment),
        }
    }
    format!("/{}{query}", output.join("/"))
}

#[cfg(test)]
mod normal_form_tests {
    use super::*;

    #[test]
    fn a_text_in_normal_form_is_borrowed() {
        for text in [
            "/",
            "*",
            "/a/b-c.d_e~f",
            "/a//b?x=1&y=/?",
            "/%2F",
            "/%C3%A9?q=%20",
            "/.well-known/x",
            "/a;v=1,2",
            "/a..b/..c",
        ] {
            assert!(matches!(normal_form(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn the_spellings_of_a_path_have_one_normal_form() {
        let cases = [
            ("/%70", "/p"),
            ("/product/%30", "/product/0"),
            ("/a%2Db", "/a-b"),
            ("/x%7Ey", "/x~y"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/100%", "/100%25"),
            ("/100%2", "/100%252"),
            ("/100%25", "/100%25"),
            ("/q\"uote", "/q%22uote"),
            ("/pipe|", "/pipe%7C"),
            ("/a b", "/a%20b"),
            ("/p?", "/p"),
            ("/p??", "/p??"),
            ("/p?a[]=%5b%41", "/p?a%5B%5D=%5BA"),
            ("/a%2fb", "/a%2Fb"),
            ("/a/./b/../c", "/a/c"),
            ("/a/%2E%2e/b", "/b"),
            ("/p?x=/../y", "/p?x=/../y"),
            ("/%", "/%25"),
        ];
        for (text, expected) in cases {
            assert_eq!(normal_form(text), expected, "{text}");
            assert!(matches!(normal_form(expected), Cow::Borrowed(_)), "{expected} is normal");
        }
    }
}
