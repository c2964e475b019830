//! The request headers on which a response depends, and which requests match by them (RFC 9111, 4.1).
//!
//! A resource has one list of names, and a variant for each combination of their values, identified by its
//! [`Fingerprint`]. [`selecting_value`] normalizes the values: it maps those of equal meaning to one value.
//!
//! Two requests match if one value becomes the other by adding or removing white space, combining lines, or by
//! equivalences in the field's definition. If values are matched too liberally, one client gets another's response;
//! so an unknown field is only normalized as a list, and a field that is free text or a credential is compared as
//! it is.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/vary_tests.rs"]
mod tests;

use std::fmt;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest as _, Sha256};

use super::fields::{self, codings, is_encoded, single, split_once};
use super::request_settings::CREDENTIAL_HEADERS;

/// The most headers that a response may name in `Vary`. A response that names more is not stored, because each name multiplies the
/// variants.
pub(crate) const MOST_NAMES: usize = 8;

/// The headers on which a response depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Vary {
    /// The response depends on no header.
    #[default]
    Nothing,
    /// The response depends on anything (`*`), or on too many headers: no other request matches.
    Any,
    Names(Names),
}

impl Vary {
    /// Reads all lines of the field as one list, and adds the policy's names.
    pub(crate) fn of(response: &HeaderMap, vary_on: &[HeaderName]) -> Self {
        let mut names = Vec::new();
        for line in response.get_all(header::VARY) {
            for member in fields::members(line.as_bytes()).filter(|member| !member.is_empty()) {
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

    /// Whether the response depends only on `known` headers.
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

    /// Reads the output of `to_text`; `None` for any other text, such as an unsorted list.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let names = text.split(',').map(|name| name.parse().ok()).collect::<Option<Vec<_>>>()?;
        // At most `MOST_NAMES` of the response, as many of the policy, and `Accept-Encoding`.
        if names.len() > 2 * MOST_NAMES + 1 || names.iter().any(|name: &HeaderName| name.as_str() == "*") {
            return None;
        }
        Self::new(names).filter(|names| names.to_text() == text)
    }

    /// The fingerprint of the variant that answers this request.
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
    /// The fingerprint of bytes that are compared as they are.
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

/// What a stored variant is selected by.
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
    /// This is the variant with the request's own values. If there is none, it is, in strict mode only, a variant in the
    /// language that the request prefers to all others: for languages the selection mechanism is known (RFC 9110, 12.5.4), and
    /// the stored variant proves that the origin has this language.
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
        if normal != Normalization::Exact || variants.iter().all(|variant| variant.language.is_none()) {
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
    let language = single(response, &header::CONTENT_LANGUAGE)?.to_str().ok()?.trim();
    let is_tag = !language.is_empty() && language.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    is_tag.then(|| language.to_ascii_lowercase())
}

/// Basic filtering (RFC 4647, 3.3.1), with both in lower case: `de` matches `de-at`.
fn is_in_range(language: &str, range: &str) -> bool {
    language.strip_prefix(range).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// The content codings that responses use, of which a request may name any; `x-gzip` and `x-compress` are old names
/// (RFC 9110, 8.4.1; RFC 7932, 8878 and 9842). Other names change no response and are left out, so that invented
/// codings make no variants.
const CODINGS: [&[u8]; 11] = [
    b"gzip",
    b"x-gzip",
    b"deflate",
    b"compress",
    b"x-compress",
    b"br",
    b"zstd",
    b"dcb",
    b"dcz",
    b"identity",
    b"*",
];

/// How far the values of selecting headers are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Normalization {
    /// Preferences are normalized as ordinary lists only, because many origins merely search them for
    /// `application/json`. A client with another spelling of equal meaning would otherwise choose the response for
    /// all clients with the origin's spelling.
    Careful,
    /// Case, order and spelling of preferences have no meaning (RFC 9110, 12.4 and 12.5).
    Exact,
}

/// The normalized value of a request header, over all of its lines; `None` if the header is absent.
fn selecting_value(name: &HeaderName, request: &HeaderMap, normal: Normalization) -> Option<Vec<u8>> {
    let lines = request.get_all(name);
    lines.iter().next()?;
    let mut value = Vec::new();
    match kind(name, normal) {
        ListKind::Exact => {
            for line in lines {
                value.extend_from_slice(line.as_bytes().trim_ascii());
                // No value contains a line feed, so two lines never look like one.
                value.push(b'\n');
            }
        }
        ListKind::List => {
            let all: Vec<_> = lines.iter().flat_map(|line| members(line.as_bytes())).collect();
            value = all.join(&b',');
        }
        ListKind::Weighted => {
            let mut all = weighted(lines.iter());
            if *name == header::ACCEPT_ENCODING {
                all.retain(Weighted::is_known_coding);
            }
            all.sort_by(|a, b| b.weight.cmp(&a.weight).then_with(|| a.text.cmp(&b.text)));
            for member in all {
                value.extend_from_slice(&member.text);
                value.extend_from_slice(&[b';', (member.weight >> 8) as u8, member.weight as u8, b',']);
            }
        }
    }
    Some(value)
}

/// Whether a line of `Accept-Encoding` names an unknown coding that contains a known one's name (`xgzip`): an
/// origin that merely searches for the known name would encode its response, and would not for other requests with
/// unknown codings.
pub(crate) fn may_be_misread(line: &HeaderValue) -> bool {
    // Called for every hit, so it allocates nothing.
    members(line.as_bytes()).any(|member| {
        let name = member.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
        let is = |text: &[u8], coding: &[u8]| text.eq_ignore_ascii_case(coding);
        let has = |coding: &[u8]| coding.len() > 1 && name.windows(coding.len()).any(|part| is(part, coding));
        !CODINGS.iter().any(|coding| is(name, coding)) && CODINGS.iter().any(|coding| has(coding))
    })
}

/// Whether the request names unknown codings, and the response has a coding that the request does not accept by a
/// known name. Requests with other unknown codings have the same normalized value, and could not read it.
pub(crate) fn is_encoded_by_chance(request: &HeaderMap, response: &HeaderMap) -> bool {
    let preferences = weighted(request.get_all(header::ACCEPT_ENCODING).iter());
    if preferences.iter().all(Weighted::is_known_coding) {
        return false;
    }
    let takes = |coding: &[u8]| {
        let named = |text: &[u8]| text.eq_ignore_ascii_case(coding) || text == b"*";
        preferences.iter().any(|member| member.is_known_coding() && member.weight > 0 && named(&member.text))
    };
    codings(response).any(|coding| !takes(coding))
}

/// The one language with the highest weight, in lower case; `None` if several have it.
fn preferred_language(request: &HeaderMap) -> Option<String> {
    let mut all = weighted(request.get_all(header::ACCEPT_LANGUAGE).iter());
    all.sort_by_key(|member| std::cmp::Reverse(member.weight));
    let (first, second) = (all.first()?, all.get(1));
    let alone = first.weight > 0 && second.is_none_or(|second| second.weight < first.weight);
    let is_range = first.text.iter().all(|&byte| byte.is_ascii_alphanumeric() || byte == b'-');
    (alone && is_range).then(|| String::from_utf8_lossy(&first.text).into_owned())
}

enum ListKind {
    /// Free text, or a credential: commas do not separate members, or a false match costs too much.
    Exact,
    /// An unknown field. Most fields are lists, in which white space around a comma has no meaning.
    List,
    /// A list of preferences with weights (RFC 9110, 12.4.2), in any case and order.
    Weighted,
}

fn kind(name: &HeaderName, normal: Normalization) -> ListKind {
    match name.as_str() {
        // An origin that does not recognize a coding answers unencoded, which every client can read.
        "accept-encoding" => ListKind::Weighted,
        "accept" | "accept-charset" | "accept-language" if normal == Normalization::Exact => {
            ListKind::Weighted
        }
        "from"
        | "host"
        | "if-modified-since"
        | "if-range"
        | "if-unmodified-since"
        | "origin"
        | "range"
        | "referer"
        | "user-agent" => ListKind::Exact,
        name if CREDENTIAL_HEADERS.contains(&name) => ListKind::Exact,
        _ => ListKind::List,
    }
}

/// The members of a list, each without surrounding white space. A comma inside a string does not separate members.
fn members(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest?;
        let (mut in_string, mut escaped) = (false, false);
        let end = line.iter().position(|&byte| {
            let ends = byte == b',' && !in_string;
            match byte {
                _ if escaped => escaped = false,
                b'"' => in_string = !in_string,
                b'\\' => escaped = in_string,
                _ => {}
            }
            ends
        });
        rest = end.map(|end| &line[end + 1..]);
        Some(line[..end.unwrap_or(line.len())].trim_ascii())
    })
}

struct Weighted {
    /// In lower case, without its weight and without white space around `;` and `=`.
    text: Vec<u8>,
    /// The weight in thousandths.
    weight: u16,
}

impl Weighted {
    fn is_known_coding(&self) -> bool {
        CODINGS.contains(&&*self.text)
    }
}

fn weighted<'a>(lines: impl Iterator<Item = &'a HeaderValue>) -> Vec<Weighted> {
    let members = lines.flat_map(|line| members(line.as_bytes()));
    // RFC 9110, 5.6.1.2: empty members are ignored.
    members.filter(|member| !member.is_empty()).map(weigh).collect()
}

fn weigh(member: &[u8]) -> Weighted {
    let mut weighted = Weighted { text: Vec::with_capacity(member.len()), weight: 1000 };
    // A quoted parameter could contain a semicolon, so such a member is compared as it is.
    if member.contains(&b'"') {
        weighted.text.extend_from_slice(member);
        return weighted;
    }
    for (index, part) in member.split(|&byte| byte == b';').enumerate() {
        let (name, argument) = split_once(part, b'=')
            .map_or((part, None), |(name, argument)| (name, Some(argument.trim_ascii())));
        let name = name.trim_ascii();
        if index > 0
            && name.eq_ignore_ascii_case(b"q")
            && let Some(weight) = argument.and_then(thousandths)
        {
            weighted.weight = weight;
            continue;
        }
        if index > 0 {
            weighted.text.push(b';');
        }
        weighted.text.extend(name.iter().map(u8::to_ascii_lowercase));
        if let Some(argument) = argument {
            weighted.text.push(b'=');
            weighted.text.extend_from_slice(argument);
        }
    }
    weighted
}

/// Reads a weight, such as `0`, `0.25` or `1.000` (RFC 9110, 12.4.2), in thousandths.
fn thousandths(text: &[u8]) -> Option<u16> {
    let (whole, fraction) = split_once(text, b'.').unwrap_or((text, &[]));
    let whole = match whole {
        b"0" => 0,
        b"1" => 1000,
        _ => return None,
    };
    if fraction.len() > 3 || !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let units = [100, 10, 1];
    let fraction: u16 = fraction.iter().zip(units).map(|(digit, unit)| u16::from(digit - b'0') * unit).sum();
    Some(whole + fraction).filter(|&weight| weight <= 1000)
}
