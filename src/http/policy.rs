//! What of the HTTP rules can be set, in the form the rules read it.

use std::time::Duration;

use http::header::HeaderName;
use http::uri::Scheme;

/// Headers that make a request one user's: what is answered to it is not for others.
///
/// A shared cache may store such answers only when they say so (RFC 9111, 3.5, for
/// `Authorization`); for the others no standard exists, so the request is not cached at all.
pub(crate) const CREDENTIAL_HEADERS: [&str; 6] =
    ["authorization", "proxy-authorization", "cookie", "x-api-key", "x-auth-token", "x-amz-security-token"];

/// Headers that change what is asked without being part of the key ("unkeyed input"): cached, one
/// request with such a header would replace the answer for all others (cache poisoning).
///
/// - `A-IM` asks for a delta, not for the resource (RFC 3229, 10.5.3).
/// - The method overrides turn a GET into another method in many frameworks.
/// - `X-Original-URL` and `X-Rewrite-URL` replace the path in some (Symfony, IIS, Zend).
///
/// `X-Forwarded-*` and `Forwarded` are missing on purpose: a proxy in front writes them on every
/// request. A handler whose answer depends on them says so with `Vary` (RFC 9110, 12.5.5).
pub(crate) const UNKEYED_HEADERS: [&str; 6] = [
    "a-im",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-url",
    "x-rewrite-url",
];

/// Which requests are looked up, and under which key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestRules {
    /// Of requests whose URI has none: what an HTTP/1 server receives.
    pub(crate) scheme: Scheme,
    pub(crate) credentials: NameSet,
    pub(crate) unkeyed: NameSet,
}

impl Default for RequestRules {
    fn default() -> Self {
        Self {
            scheme: Scheme::HTTP,
            credentials: CREDENTIAL_HEADERS.map(HeaderName::from_static).into_iter().collect(),
            unkeyed: UNKEYED_HEADERS.map(HeaderName::from_static).into_iter().collect(),
        }
    }
}

/// Which responses are shared, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResponseRules {
    /// The lifetime of a response that names none.
    pub(crate) fresh_for: Duration,
    /// The longest body that is kept, in bytes.
    pub(crate) max_body: usize,
}

/// A few header names, asked about for every header of every request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NameSet {
    names: Vec<HeaderName>,
    /// Bit `n`: a name of length `n` (modulo 64) is among them. Most headers stop here.
    lengths: u64,
}

impl NameSet {
    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        self.lengths & length_bit(name) != 0 && self.names.contains(name)
    }
}

impl FromIterator<HeaderName> for NameSet {
    fn from_iter<I: IntoIterator<Item = HeaderName>>(names: I) -> Self {
        let names: Vec<_> = names.into_iter().collect();
        let lengths = names.iter().fold(0, |bits, name| bits | length_bit(name));
        Self { names, lengths }
    }
}

fn length_bit(name: &HeaderName) -> u64 {
    1 << (name.as_str().len() % 64)
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
