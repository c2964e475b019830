//! The key of a request: its target URI, and the policy's additions.

use std::borrow::Cow;

use http::header::{self, HeaderMap, HeaderValue};
use http::uri::Scheme;
use http::{Request, Uri, Version};
use sha2::{Digest as _, Sha256};

use super::axum_nesting::{original, strips};
use super::normal_form::normal_form;
use super::reason::Rule;
use super::request_rules::{KeyParts, RequestRules};
use super::vary::Fingerprint;
use crate::key::CacheKey;

/// The key under which a guard with the default [`HttpPolicy`](crate::http::HttpPolicy) stores the response to a GET of `uri`,
/// for [`invalidate`](crate::StampedeGuard::invalidate). `None` unless the URI is absolute, with a plain `http` or `https`
/// authority.
///
/// Requests that a server receives have no scheme: their keys have the policy's
/// [`scheme`](crate::PolicyBuilder::scheme), `http` by default, and the client's `Host` as authority.
///
/// This ignores the policy. If a policy is [`private`](crate::http::HttpPolicy::private), is
/// [`strict`](crate::http::HttpPolicy::strict), or has a [`key`](crate::http::HttpPolicy::key) function, its
/// entries have other keys, and invalidating this key has no effect: use
/// [`StampedeGuard::http_key`](crate::StampedeGuard::http_key) there.
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
    /// There are credentials that belong in the key.
    pub(crate) credentials: bool,
}

impl<'a> KeyHeaders<'a> {
    /// For a request that is not looked up, whatever its other headers are.
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

/// The key of the resource that a request addresses, made by `join` from a head and texts, and whether the request writes its
/// target in another form than the normal one.
pub(crate) fn key_by<B, K>(
    request: &Request<B>,
    keyed: &KeyHeaders<'_>,
    rules: &RequestRules,
    join: impl FnOnce(&str, &[&str]) -> K,
) -> Result<(K, bool), Rule> {
    // A request line may consist of an authority, and servers accept that for any method (RFC 9112, 3.2.3). A
    // router sees no path in it, so its response is not that of `/`.
    let original = original(request);
    if [request.uri()].into_iter().chain(original).any(|uri| uri.path_and_query().is_none()) {
        return Err(Rule::Target);
    }
    let target = TargetUri::behind(original, request, keyed, rules)?;
    let added = match keyed.credentials || rules.key.is_some() {
        true => additions(request, keyed, rules)?,
        false => Vec::new(),
    };
    Ok((target.key_by(&added, join), target.is_other_form()))
}

/// The target of a request as the request writes it: its original URI, and the URI that the inner service sees.
pub(crate) fn sent_target<B>(request: &Request<B>) -> [&str; 2] {
    [original(request).unwrap_or_else(|| request.uri()), request.uri()].map(path_and_query)
}

/// Scheme, authority, path and query: the target URI (RFC 9110, 7.1), which is the primary key of a cache (RFC
/// 9111, 2). Paths are in normal form, so that a change reaches the resource however it writes the path.
pub(crate) struct TargetUri<'a> {
    /// The head of the key, which includes the scheme.
    head: &'static str,
    authority: Cow<'a, str>,
    path: Cow<'a, str>,
    /// The path that the inner service sees, if another layer has rewritten it.
    rewritten: Option<Cow<'a, str>>,
}

impl<'a> TargetUri<'a> {
    pub(crate) fn of<B>(
        request: &'a Request<B>,
        keyed: &KeyHeaders<'a>,
        rules: &'a RequestRules,
    ) -> Result<Self, Rule> {
        Self::behind(original(request), request, keyed, rules)
    }

    /// The target of a request that came with the `original` URI.
    fn behind<B>(
        original: Option<&'a Uri>,
        request: &'a Request<B>,
        keyed: &KeyHeaders<'a>,
        rules: &'a RequestRules,
    ) -> Result<Self, Rule> {
        let target = original.unwrap_or_else(|| request.uri());
        let (head, default_port) = scheme(target, rules).ok_or(Rule::Scheme)?;
        if let Some(authority) = &rules.authority {
            return Ok(Self::at(head, authority, target, request));
        }
        // A handler that builds URLs from the authority would write this spelling into a shared response. A request
        // that a client of this process makes has no `Host`, and its response serves no other client.
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
            // Absent, or invalid.
            _ => return Err(Rule::Host),
        };
        Ok(Self::at(head, authority, target, request))
    }

    /// The targets that an unsafe request may change, each once: that of its URI, which wins (RFC 9112, 3.2.2), and
    /// that of `Host`, by which a handler may go. User information does not distinguish resources.
    pub(crate) fn changed_by<B>(
        request: &'a Request<B>,
        keyed: &KeyHeaders<'a>,
        rules: &'a RequestRules,
    ) -> Vec<Self> {
        let target = original(request).unwrap_or_else(|| request.uri());
        let Some((head, default_port)) = scheme(target, rules) else { return Vec::new() };
        if let Some(authority) = &rules.authority {
            return vec![Self::at(head, authority, target, request)];
        }
        let named = target.authority().map(http::uri::Authority::as_str);
        let named = named.map(|named| named.rsplit_once('@').map_or(named, |(_, named)| named));
        let host = keyed.host.and_then(|host| host.to_str().ok());
        let plain = |text: Option<&'a str>| plain_authority(text?, default_port);
        let (named, host) = (plain(named), plain(host));
        let host = host.filter(|host| !named.is_some_and(|named| named.eq_ignore_ascii_case(host)));
        let all = named.into_iter().chain(host);
        all.map(|authority| Self::at(head, authority, target, request)).collect()
    }

    fn at<B>(head: &'static str, authority: &'a str, target: &'a Uri, request: &'a Request<B>) -> Self {
        // If a layer between the router and the guard rewrote the path, perhaps by a header (a tenant, a language),
        // the inner service's path must be in the key too.
        let rewritten = (!strips(target, request)).then(|| normal_form(path_and_query(request.uri())));
        Self { head, authority: lower_case(authority), path: normal_form(path_and_query(target)), rewritten }
    }

    /// Whether the request writes a path in another form than the normal one.
    fn is_other_form(&self) -> bool {
        [Some(&self.path), self.rewritten.as_ref()]
            .into_iter()
            .flatten()
            .any(|path| matches!(path, Cow::Owned(_)))
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

    /// The absolute URI.
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

/// The policy's additions to the key. No path begins like one of these, so they cannot be confused.
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
        let (uri, headers, extensions) = (request.uri(), request.headers(), request.extensions());
        let text = hook.call(&KeyParts { uri, headers, extensions }).ok_or(Rule::KeyHook)?;
        added.push(addition(&text));
    }
    Ok(added)
}

/// The addition of the policy's hook.
pub(crate) fn addition(text: &str) -> String {
    format!("key={text}")
}

/// As it was sent.
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
            // `parse` would accept a sign.
            let number =
                port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse::<u16>().ok())??;
            Some(if number == default_port { host } else { text })
        }
    }
}

/// A table, because every byte of every request's host is checked.
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
