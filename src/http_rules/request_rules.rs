//! [`RequestRules`]: which requests are looked up, in a form that is fast to check for every request.

use std::fmt;
use std::sync::Arc;

use http::header::{COOKIE, HeaderMap, HeaderName};
use http::uri::Scheme;
use http::{Extensions, Uri};

use super::cookies::CookieNames;
use super::credentials::CREDENTIAL_HEADERS;
use super::personal::PersonalExtension;

/// Headers that change the meaning of a request without being part of the key ("unkeyed input"). If such a request
/// were cached, its response would replace the one for all others (cache poisoning).
///
/// - `A-IM` asks for a delta, not for the resource (RFC 3229, 10.5.3).
/// - The method overrides turn a GET into another method in many frameworks.
/// - `X-Original-URL` and `X-Rewrite-URL` replace the path in some (Symfony, IIS, Zend).
///
/// `Forwarded`, `X-Forwarded-Host` and `-Proto` are missing, because a reverse proxy writes them on every request:
/// they select a key (`forwarding.rs`). `X-Forwarded-For` is missing, because it differs from client to client: a
/// handler that depends on it names it in `Vary` (RFC 9110, 12.5.5), or the policy lists it as a credential.
pub(crate) const UNKEYED_HEADERS: [&str; 6] = [
    "a-im",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-url",
    "x-rewrite-url",
];

/// Whether the cache is shared or one user's (RFC 9111, 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheScope {
    Shared,
    Private,
}

/// Whether requests or responses with credentials or cookies take part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CredentialSharing {
    #[default]
    Never,
    /// If the response explicitly allows sharing.
    IfSaid,
    Freely,
}

impl CredentialSharing {
    pub(crate) fn wished(share: bool, now: Self) -> Self {
        match (share, now) {
            (false, _) => Self::Never,
            (true, Self::Never) => Self::IfSaid,
            (true, already) => already,
        }
    }
}

/// The parts of a request for the hook of [`HttpPolicy::key`](crate::http::HttpPolicy::key).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KeyParts<'a> {
    /// The URI as the layer received it.
    pub uri: &'a Uri,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// The request's extensions.
    pub extensions: &'a Extensions,
}

/// The policy's hook that extends the key.
#[derive(Clone)]
pub(crate) struct KeyHook(Arc<Hook>);

type Hook = dyn Fn(&KeyParts<'_>) -> Option<String> + Send + Sync;

impl KeyHook {
    pub(crate) fn new(hook: impl Fn(&KeyParts<'_>) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn call(&self, parts: &KeyParts<'_>) -> Option<String> {
        (self.0)(parts)
    }
}

impl fmt::Debug for KeyHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHook")
    }
}

impl PartialEq for KeyHook {
    /// Compares by identity: closures cannot be compared by behaviour.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// How keys begin: with the kind of entry, the kind of policy, and the scheme.
///
/// One kind of policy stores responses that another would refuse, and a hit is not judged again; so they share no
/// keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    pub(crate) http: &'static str,
    pub(crate) https: &'static str,
}

impl Heads {
    pub(crate) const DEFAULT: Self = Self { http: "http:http", https: "http:https" };
    pub(crate) const STRICT: Self = Self { http: "http:strict:http", https: "http:strict:https" };
    pub(crate) const PRIVATE: Self = Self { http: "http:private:http", https: "http:private:https" };
}

/// Which requests are looked up, and under which key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestRules {
    pub(crate) heads: Heads,
    /// The scheme of requests without one in their URI, as an HTTP/1 server receives them.
    pub(crate) scheme: Scheme,
    pub(crate) credentials: NameSet,
    /// Credentials that stay when the list is replaced, because each was explicitly named as one user's.
    pub(crate) added: Vec<HeaderName>,
    pub(crate) unkeyed: NameSet,
    /// The rule for requests with `Authorization`. With `Never`, `credentials` decides.
    pub(crate) authorization: CredentialSharing,
    /// The rule for requests with `Cookie`, likewise.
    pub(crate) cookie: CredentialSharing,
    /// Credentials are part of the key instead of a reason to bypass.
    pub(crate) keyed_by_credentials: bool,
    pub(crate) key: Option<KeyHook>,
    /// The authority of all keys, instead of that of each request. In lower case.
    pub(crate) authority: Option<String>,
    /// The cookies that matter; all cookies without a list.
    pub(crate) cookies: Option<CookieNames>,
    /// The report of the proxy on ordinary requests.
    pub(crate) report: Option<Vec<u8>>,
    /// Types of extensions that make a request bypass.
    pub(crate) personal: Vec<PersonalExtension>,
}

impl Default for RequestRules {
    fn default() -> Self {
        Self {
            heads: Heads::DEFAULT,
            scheme: Scheme::HTTP,
            credentials: CREDENTIAL_HEADERS.map(HeaderName::from_static).into_iter().collect(),
            added: Vec::new(),
            unkeyed: UNKEYED_HEADERS.map(HeaderName::from_static).into_iter().collect(),
            authorization: CredentialSharing::Never,
            cookie: CredentialSharing::Never,
            keyed_by_credentials: false,
            key: None,
            authority: None,
            cookies: None,
            report: None,
            personal: Vec::new(),
        }
    }
}

impl RequestRules {
    pub(crate) fn add_credential(&mut self, name: HeaderName) {
        if !self.added.contains(&name) {
            self.added.push(name.clone());
        }
        self.credentials.add(name);
    }

    /// Whether the request has a cookie that matters.
    pub(crate) fn has_own_cookies(&self, headers: &HeaderMap) -> bool {
        let mut lines = headers.get_all(COOKIE).iter();
        lines.any(|line| self.cookies.as_ref().is_none_or(|cookies| cookies.any_in(line)))
    }

    /// Whether the request has this credential.
    pub(crate) fn has(&self, name: &HeaderName, headers: &HeaderMap) -> bool {
        if *name == COOKIE { self.has_own_cookies(headers) } else { headers.contains_key(name) }
    }

    pub(crate) fn replace_credentials(&mut self, names: impl IntoIterator<Item = HeaderName>) {
        self.credentials = names.into_iter().collect();
        for name in &self.added {
            self.credentials.add(name.clone());
        }
    }
}

/// A few header names, checked against every header of every request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NameSet {
    pub(crate) names: Vec<HeaderName>,
    /// A Bloom filter of the names, at which most headers are rejected.
    bits: u128,
}

impl NameSet {
    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        self.bits & bit(name) != 0 && self.names.contains(name)
    }
}

impl NameSet {
    pub(crate) fn add(&mut self, name: HeaderName) {
        if !self.contains(&name) {
            self.bits |= bit(&name);
            self.names.push(name);
        }
    }
}

impl FromIterator<HeaderName> for NameSet {
    fn from_iter<I: IntoIterator<Item = HeaderName>>(names: I) -> Self {
        let names: Vec<_> = names.into_iter().collect();
        let bits = names.iter().fold(0, |bits, name| bits | bit(name));
        Self { names, bits }
    }
}

/// One of 128 bits, by the length and the outer letters of a name. The length alone would reject too few: some
/// listed name has almost every length.
fn bit(name: &HeaderName) -> u128 {
    let bytes = name.as_str().as_bytes();
    let letter = |at: Option<&u8>| at.copied().map_or(0, usize::from);
    1 << ((bytes.len() + 31 * letter(bytes.first()) + 7 * letter(bytes.last())) % 128)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_lists_are_valid_names_and_found() {
        let rules = RequestRules::default();
        for name in CREDENTIAL_HEADERS {
            assert!(rules.credentials.contains(&HeaderName::from_static(name)), "{name}");
        }
        for name in UNKEYED_HEADERS {
            assert!(rules.unkeyed.contains(&HeaderName::from_static(name)), "{name}");
        }
    }

    #[test]
    fn a_name_of_a_listed_length_is_not_taken_for_a_listed_name() {
        let set: NameSet = [HeaderName::from_static("cookie")].into_iter().collect();
        assert!(set.contains(&http::header::COOKIE));
        assert!(!set.contains(&http::header::ACCEPT));
        assert!(!set.contains(&http::header::EXPECT));
        assert!(!NameSet::default().contains(&http::header::COOKIE));
    }
}
