//! The request headers on which a response depends, and the requests that match by them (RFC 9111, 4.1).
//!
//! A resource has one list of names, and a variant for each combination of their values, identified by its
//! [`Fingerprint`]. `normalize.rs` maps values of equal meaning to one value.

use std::fmt;

use http::header::{self, HeaderMap, HeaderName};
use sha2::{Digest as _, Sha256};

use super::fields::is_encoded;
use super::normalize::{Normalization, preferred_language, selecting_value};

/// A response that depends on more headers is not stored, because each name multiplies the variants.
pub(crate) const MOST_NAMES: usize = 8;

/// The headers on which a response depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Vary {
    /// Only its URI.
    #[default]
    Nothing,
    /// Anything (`*`), or too many headers: no other request matches.
    Any,
    Names(Names),
}

impl Vary {
    /// Reads all lines of the field as one list, and adds the policy's names.
    pub(crate) fn of(response: &HeaderMap, vary_on: &[HeaderName]) -> Self {
        let mut names = Vec::new();
        for line in response.get_all(header::VARY) {
            for member in line.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
                if member.is_empty() {
                    continue;
                }
                // A member that is not a header name cannot be compared; nor can `*`, which is a valid token.
                match HeaderName::from_bytes(member) {
                    Ok(name) if member != b"*" => names.push(name),
                    _ => return Self::Any,
                }
            }
        }
        match Names::new(names) {
            Some(own) if own.0.len() > MOST_NAMES => Self::Any,
            own => {
                let own = own.map_or_else(Vec::new, |own| own.0);
                Names::new(own.into_iter().chain(vary_on.iter().cloned()).collect())
                    .map_or(Self::Nothing, Self::Names)
            }
        }
    }

    /// Whether it depends on none but the `known` headers.
    pub(crate) fn is_within(&self, known: &Names) -> bool {
        match self {
            Self::Nothing => true,
            Self::Any => false,
            Self::Names(names) => names.0.iter().all(|name| known.0.contains(name)),
        }
    }

    /// Adds `Accept-Encoding` if the response is encoded, because not every client can read it. Servers of
    /// precompressed files choose by that header without naming it in `Vary`.
    pub(crate) fn and_on_coding(self, response: &HeaderMap) -> Self {
        let mut names = match self {
            Self::Any => return self,
            _ if !is_encoded(response) => return self,
            Self::Nothing => Vec::new(),
            Self::Names(names) => names.0,
        };
        names.push(header::ACCEPT_ENCODING);
        Names::new(names).map_or(Self::Nothing, Self::Names)
    }
}

/// Header names on which a response depends: sorted, each once, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names(Vec<HeaderName>);

impl Names {
    fn new(mut names: Vec<HeaderName>) -> Option<Self> {
        names.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        names.dedup();
        (!names.is_empty()).then_some(Self(names))
    }

    pub(crate) fn as_slice(&self) -> &[HeaderName] {
        &self.0
    }

    /// The stored form: the names, separated by commas.
    pub(crate) fn to_text(&self) -> String {
        self.0.iter().map(HeaderName::as_str).collect::<Vec<_>>().join(",")
    }

    /// Reads the output of `to_text`. An unsorted list is not one.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let names = text.split(',').map(|name| name.parse().ok()).collect::<Option<Vec<_>>>()?;
        // The names of the response, of the policy, and of its coding.
        if names.len() > 2 * MOST_NAMES + 1 || names.iter().any(|name: &HeaderName| name.as_str() == "*") {
            return None;
        }
        Self::new(names).filter(|names| names.to_text() == text)
    }

    /// The identity of this request's variant.
    pub(crate) fn fingerprint(&self, request: &HeaderMap, normal: Normalization) -> Fingerprint {
        self.fingerprint_without(None, request, normal)
    }

    fn fingerprint_without(
        &self,
        left_out: Option<&HeaderName>,
        request: &HeaderMap,
        normal: Normalization,
    ) -> Fingerprint {
        let mut digest = Sha256::new();
        digest.update(b"vary-1");
        let mut field = |bytes: &[u8]| {
            // Lengths first, so that different lists of values have different bytes (B1).
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        for name in self.0.iter().filter(|name| Some(*name) != left_out) {
            field(name.as_str().as_bytes());
            // "If a header field is absent from a request, it can only match another request if it is
            // also absent there."
            match selecting_value(name, request, normal) {
                Some(value) => {
                    field(b"=");
                    field(&value);
                }
                None => field(b""),
            }
        }
        Fingerprint(digest.finalize().into())
    }
}

/// Distinguishes the variants of one resource. A digest, because its input is clients' bytes, some of them
/// credentials (B11).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Fingerprint(pub(crate) [u8; 32]);

impl Fingerprint {
    /// Of bytes that are compared as they are.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// 128 bits in hex, which is enough to name a key.
    pub(crate) fn half(&self) -> String {
        let mut text = self.to_string();
        text.truncate(32);
        text
    }

    /// 64 bits, which is enough to count variants.
    pub(crate) fn short(&self) -> [u8; 8] {
        self.0.first_chunk().copied().unwrap_or_default()
    }
}

impl fmt::Display for Fingerprint {
    /// In hex, as a part of a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// The data of a stored variant that selects it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) fingerprint: Fingerprint,
    /// For a response that depends on `Accept-Language` and has one `Content-Language`: the fingerprint of its
    /// other headers, and the language in lower case.
    pub(crate) language: Option<(Fingerprint, String)>,
}

impl Variant {
    /// The variant of the response to this request.
    pub(crate) fn of(
        names: &Names,
        request: &HeaderMap,
        response: &HeaderMap,
        normal: Normalization,
    ) -> Self {
        let others = || names.fingerprint_without(Some(&header::ACCEPT_LANGUAGE), request, normal);
        let depends = names.0.contains(&header::ACCEPT_LANGUAGE);
        let language = depends.then(|| content_language(response)).flatten();
        Self {
            fingerprint: names.fingerprint(request, normal),
            language: language.map(|language| (others(), language)),
        }
    }

    /// The index of the variant that may answer a request.
    ///
    /// The one with the request's own values. Otherwise, to the letter of the RFC only, one in the language that
    /// the request prefers to all others: there the origin's selection mechanism is known (RFC 9110, 12.5.4), and
    /// the stored variant proves that it has this language.
    pub(crate) fn select(
        names: &Names,
        request: &HeaderMap,
        variants: &[Self],
        normal: Normalization,
    ) -> Option<usize> {
        let own = names.fingerprint(request, normal);
        if let Some(at) = variants.iter().position(|variant| variant.fingerprint == own) {
            return Some(at);
        }
        if normal != Normalization::ByTheLetter || variants.iter().all(|variant| variant.language.is_none()) {
            return None;
        }
        let preferred = preferred_language(request)?;
        let others = names.fingerprint_without(Some(&header::ACCEPT_LANGUAGE), request, normal);
        variants.iter().position(|variant| {
            variant
                .language
                .as_ref()
                .is_some_and(|(theirs, language)| *theirs == others && is_in_range(language, &preferred))
        })
    }
}

/// The language of a response that has exactly one.
fn content_language(response: &HeaderMap) -> Option<String> {
    let mut lines = response.get_all(header::CONTENT_LANGUAGE).iter();
    let (line, None) = (lines.next()?, lines.next()) else { return None };
    let language = line.to_str().ok()?.trim();
    let is_tag = !language.is_empty() && language.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    is_tag.then(|| language.to_ascii_lowercase())
}

/// Basic filtering (RFC 4647, 3.3.1), with both in lower case: `de` matches `de-at`.
fn is_in_range(language: &str, range: &str) -> bool {
    language.strip_prefix(range).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/vary_tests.rs"]
mod tests;
