//! Which request headers a response depends on, and which requests are alike by them (RFC 9111, 4.1).
//!
//! A resource has one list of names and under it a variant for each combination of values, known by its
//! [`Fingerprint`]. Values that mean the same are made the same: `normalize.rs` knows how.

use std::fmt;

use http::header::{self, HeaderMap, HeaderName};
use sha2::{Digest as _, Sha256};

use super::normalize::{Normal, preferred_language, selecting_value};

/// A response that depends on more headers is not stored: each name multiplies the variants.
pub(crate) const MOST_NAMES: usize = 8;

/// What a response depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Vary {
    /// On nothing but its URI.
    #[default]
    Nothing,
    /// On what no header tells (`*`), or on too many: no other request is alike.
    Any,
    Names(Names),
}

impl Vary {
    /// Reads all lines of the field as one list, and adds the names that the policy wants.
    pub(crate) fn of(response: &HeaderMap, vary_on: &[HeaderName]) -> Self {
        let mut names = Vec::new();
        for line in response.get_all(header::VARY) {
            for member in line.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
                if member.is_empty() {
                    continue;
                }
                // What can not be a header's name can not be compared: also `*`, which is a token.
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

    /// Whether it depends on none but these.
    pub(crate) fn is_within(&self, known: &Names) -> bool {
        match self {
            Self::Nothing => true,
            Self::Any => false,
            Self::Names(names) => names.0.iter().all(|name| known.0.contains(name)),
        }
    }

    /// And on `Accept-Encoding`, if the response is encoded: not everyone can read it. Servers of files that were compressed
    /// beforehand choose by that header and do not say so.
    pub(crate) fn and_on_coding(self, response: &HeaderMap) -> Self {
        let codings = response.get_all(header::CONTENT_ENCODING);
        let is_encoded = codings.iter().any(|line| {
            let mut codings = line.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
            codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"))
        });
        let mut names = match self {
            Self::Any => return self,
            _ if !is_encoded => return self,
            Self::Nothing => Vec::new(),
            Self::Names(names) => names.0,
        };
        names.push(header::ACCEPT_ENCODING);
        Names::new(names).map_or(Self::Nothing, Self::Names)
    }
}

/// Names that a response depends on: sorted, each once, at least one.
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

    /// As it is stored: the names with commas between them.
    pub(crate) fn to_text(&self) -> String {
        self.0.iter().map(HeaderName::as_str).collect::<Vec<_>>().join(",")
    }

    /// Reads what `to_text` wrote. Names out of order are no list of ours.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let names = text.split(',').map(|name| name.parse().ok()).collect::<Option<Vec<_>>>()?;
        // The response's own, those of the policy, and that of its coding.
        if names.len() > 2 * MOST_NAMES + 1 || names.iter().any(|name: &HeaderName| name.as_str() == "*") {
            return None;
        }
        Self::new(names).filter(|names| names.to_text() == text)
    }

    /// What this request's variant is known by.
    pub(crate) fn fingerprint(&self, request: &HeaderMap, normal: Normal) -> Fingerprint {
        self.fingerprint_without(None, request, normal)
    }

    fn fingerprint_without(
        &self,
        left_out: Option<&HeaderName>,
        request: &HeaderMap,
        normal: Normal,
    ) -> Fingerprint {
        let mut digest = Sha256::new();
        digest.update(b"vary-1");
        let mut field = |bytes: &[u8]| {
            // Lengths first, so that no two lists of values are the same bytes (B1).
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

/// Tells the variants of one resource apart. A digest, because what it is made from are clients' bytes,
/// and some are credentials (B11).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Fingerprint(pub(crate) [u8; 32]);

impl Fingerprint {
    /// Of bytes that are told apart as they are.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Enough to name a place by: 128 bits, in hex.
    pub(crate) fn half(&self) -> String {
        let mut text = self.to_string();
        text.truncate(32);
        text
    }

    /// Enough to count variants by.
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

/// A stored variant, as far as it takes to choose one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) fingerprint: Fingerprint,
    /// Of a response that depends on `Accept-Language` and has one `Content-Language`: what else it
    /// depends on, and the language, in lower case.
    pub(crate) language: Option<(Fingerprint, String)>,
}

impl Variant {
    /// The variant that the answer to this request is.
    pub(crate) fn of(names: &Names, request: &HeaderMap, response: &HeaderMap, normal: Normal) -> Self {
        let others = || names.fingerprint_without(Some(&header::ACCEPT_LANGUAGE), request, normal);
        let depends = names.0.contains(&header::ACCEPT_LANGUAGE);
        let language = depends.then(|| content_language(response)).flatten();
        Self {
            fingerprint: names.fingerprint(request, normal),
            language: language.map(|language| (others(), language)),
        }
    }

    /// Which of these a request may be answered with.
    ///
    /// The one with its own values; else, to the letter of the RFC only, one in the language that it
    /// prefers to all others: the mechanism by which an origin chooses is known there (RFC 9110, 12.5.4),
    /// and it has shown that it has this language.
    pub(crate) fn select(
        names: &Names,
        request: &HeaderMap,
        variants: &[Self],
        normal: Normal,
    ) -> Option<usize> {
        let own = names.fingerprint(request, normal);
        if let Some(at) = variants.iter().position(|variant| variant.fingerprint == own) {
            return Some(at);
        }
        if normal != Normal::ByTheLetter || variants.iter().all(|variant| variant.language.is_none()) {
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

/// Basic filtering (RFC 4647, 3.3.1), both in lower case: `de` takes `de-at`.
fn is_in_range(language: &str, range: &str) -> bool {
    language.strip_prefix(range).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/vary_tests.rs"]
mod tests;
