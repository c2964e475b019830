//! Normalizes the values of headers that select variants (RFC 9111, 4.1).
//!
//! Two requests match if one value becomes the other by adding or removing white space, combining lines, or by
//! equivalences in the field's definition. If values are matched too liberally, one client gets another's response;
//! so an unknown field is only normalized as a list, and a field that is free text or a credential is compared as
//! it is.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::credentials::CREDENTIAL_HEADERS;

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

/// How far values are normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Normalization {
    /// Preferences are normalized as ordinary lists only, because many origins merely search them for
    /// `application/json`. A client with another spelling of equal meaning would otherwise choose the response for
    /// all clients with the origin's spelling.
    Careful,
    /// Case, order and spelling of preferences have no meaning (RFC 9110, 12.4 and 12.5).
    ByTheLetter,
}

/// The normalized value over all lines; `None` if the field is absent.
pub(crate) fn selecting_value(
    name: &HeaderName,
    request: &HeaderMap,
    normal: Normalization,
) -> Option<Vec<u8>> {
    let lines = request.get_all(name);
    lines.iter().next()?;
    let mut value = Vec::new();
    match kind(name, normal) {
        ListKind::Exact => {
            for line in lines {
                value.extend_from_slice(line.as_bytes().trim_ascii());
                // No value contains a line feed, so lines cannot be confused.
                value.push(b'\n');
            }
        }
        ListKind::List => {
            for (index, line) in lines.iter().enumerate() {
                for (at, member) in members(line.as_bytes()).enumerate() {
                    if index + at > 0 {
                        value.push(b',');
                    }
                    value.extend_from_slice(member);
                }
            }
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
    let asked = weighted(request.get_all(header::ACCEPT_ENCODING).iter());
    if asked.iter().all(Weighted::is_known_coding) {
        return false;
    }
    let takes = |coding: &[u8]| {
        let named = |text: &[u8]| text.eq_ignore_ascii_case(coding) || text == b"*";
        asked.iter().any(|member| member.is_known_coding() && member.weight > 0 && named(&member.text))
    };
    let codings = response.get_all(header::CONTENT_ENCODING).iter().flat_map(|line| members(line.as_bytes()));
    codings
        .filter(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"))
        .any(|coding| !takes(coding))
}

/// The language that a request prefers to all others, in lower case.
pub(crate) fn preferred_language(request: &HeaderMap) -> Option<String> {
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
        "accept" | "accept-charset" | "accept-language" if normal == Normalization::ByTheLetter => {
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
    /// Thousandths.
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
        let (name, argument) = match part.iter().position(|&byte| byte == b'=') {
            Some(at) => (part[..at].trim_ascii(), Some(part[at + 1..].trim_ascii())),
            None => (part.trim_ascii(), None),
        };
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

/// `0`, `0.25`, `1`, `1.000` (RFC 9110, 12.4.2).
fn thousandths(text: &[u8]) -> Option<u16> {
    let (whole, fraction) = match text.iter().position(|&byte| byte == b'.') {
        Some(at) => (&text[..at], &text[at + 1..]),
        None => (text, &[][..]),
    };
    let whole = match whole {
        b"0" => 0,
        b"1" => 1000,
        _ => return None,
    };
    if fraction.len() > 3 || !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let places = [100, 10, 1];
    let fraction: u16 =
        fraction.iter().zip(places).map(|(digit, place)| u16::from(digit - b'0') * place).sum();
    Some(whole + fraction).filter(|&weight| weight <= 1000)
}
