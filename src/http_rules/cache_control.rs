//! `Cache-Control` and `CDN-Cache-Control`, parsed so that a doubtful value never makes a response more shareable (RFC
//! 9111, 5.2).
//!
//! `CDN-Cache-Control` has directives for caches that work for the origin, such as this one (RFC 9213). Unlike
//! `Cache-Control` it is a structured field (RFC 8941): a field that does not parse, or in which a directive has a value
//! of the wrong type, is ignored as a whole.

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/cache_control_tests.rs"]
mod tests;

use std::collections::HashMap;
use std::convert::Infallible;

use http::header::HeaderMap;
use http::{HeaderName, HeaderValue};
use sfv::visitor::{DictionaryVisitor, EntryVisitor, Ignored, InnerListVisitor, ItemVisitor};
use sfv::{BareItem, BareItemFromInput, KeyRef, Parser};

use super::fields::{members, number, split_once};

/// The maximum of a number of seconds (RFC 9111, 1.2.2: "either 2147483648 or the greatest positive integer it can
/// conveniently represent").
pub(crate) const LONGEST_SECONDS: u64 = 1 << 31;

/// A directive that may list the fields to which it applies (RFC 9111, 5.2.2.4 and 5.2.2.7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum DirectiveScope {
    #[default]
    Absent,
    /// The directive applies to the whole response.
    Whole,
    /// The directive applies to these fields only, of which there is at least one.
    Listed(Vec<HeaderName>),
}

impl DirectiveScope {
    pub(crate) fn is_present(&self) -> bool {
        *self != Self::Absent
    }

    /// The fields that must not be reused, if the directive applies to listed fields only.
    pub(crate) fn listed(&self) -> &[HeaderName] {
        if let Self::Listed(names) = self { names } else { &[] }
    }

    /// Adds one more occurrence of the directive: with the field names that it lists, or `None` if it applies to the whole response.
    fn add(&mut self, names: Option<Vec<HeaderName>>) {
        match (&mut *self, names) {
            (Self::Listed(known), Some(names)) => known.extend(names),
            (Self::Absent, Some(names)) => *self = Self::Listed(names),
            _ => *self = Self::Whole,
        }
    }

    /// The names in a list; `None` if the list is empty, or a member is not a header name.
    fn names(list: &[u8]) -> Option<Vec<HeaderName>> {
        let names: Vec<_> = members(list)
            .filter(|name| !name.is_empty())
            .map(|name| HeaderName::from_bytes(name).ok())
            .collect::<Option<_>>()?;
        (!names.is_empty()).then_some(names)
    }
}

/// A response's directives for caches; all others are ignored (RFC 9111, 5.2.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheControl {
    pub(crate) no_store: bool,
    pub(crate) no_cache: DirectiveScope,
    pub(crate) private: DirectiveScope,
    pub(crate) public: bool,
    pub(crate) must_revalidate: bool,
    pub(crate) proxy_revalidate: bool,
    pub(crate) must_understand: bool,
    pub(crate) immutable: bool,
    /// In seconds. An argument that is not a number counts as 0, so the response is stale (RFC 9111, 4.2.1).
    pub(crate) max_age: Option<u64>,
    /// In seconds, read like `max_age`.
    pub(crate) s_maxage: Option<u64>,
    /// In seconds, read like `max_age` (RFC 5861, 3).
    pub(crate) stale_while_revalidate: Option<u64>,
    /// In seconds, read like `max_age` (RFC 5861, 4).
    pub(crate) stale_if_error: Option<u64>,
    /// Whether the response explicitly allows shared caches to reuse it: `public`, `s-maxage` or `must-revalidate`,
    /// spelled exactly as in the grammar (RFC 9111, 3.5).
    pub(crate) says_shared: bool,
}

impl CacheControl {
    /// Reads all lines of the field as one list (RFC 9110, 5.3).
    pub(crate) fn parse<'a>(lines: impl IntoIterator<Item = &'a HeaderValue>) -> Self {
        let mut all = Self::default();
        for line in lines {
            for_each_directive(line.as_bytes(), |directive| all.add(&directive));
        }
        all
    }

    /// Adds a directive. One occurrence of a flag is enough; if a directive with a number is repeated, the smallest number
    /// counts (RFC 9111, 4.2.1: "the most restrictive").
    fn add(&mut self, directive: &Directive<'_>) {
        // An argument that is not a number counts as 0, which makes the response stale.
        let number = directive.number();
        let seconds = number.unwrap_or(0);
        let is_plain_flag = directive.is_plain_flag();
        match directive {
            it if it.is("max-age") => smallest(&mut self.max_age, seconds),
            it if it.is("s-maxage") => {
                smallest(&mut self.s_maxage, seconds);
                self.says_shared |= number.is_some();
            }
            it if it.is("stale-while-revalidate") => smallest(&mut self.stale_while_revalidate, seconds),
            it if it.is("stale-if-error") => smallest(&mut self.stale_if_error, seconds),
            it if it.is("no-store") => self.no_store = true,
            it if it.is("no-cache") => self.no_cache.add(it.names()),
            it if it.is("private") => self.private.add(it.names()),
            it if it.is("must-revalidate") => {
                self.must_revalidate = true;
                self.says_shared |= is_plain_flag;
            }
            it if it.is("proxy-revalidate") => self.proxy_revalidate = true,
            it if it.is("must-understand") => self.must_understand |= is_plain_flag,
            it if it.is("public") => {
                self.public |= is_plain_flag;
                self.says_shared |= is_plain_flag;
            }
            // RFC 8246, 2: an argument has no meaning.
            it if it.is("immutable") => self.immutable |= it.exact,
            _ => {}
        }
    }
}

/// A request's directives for caches (RFC 9111, 5.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestDirectives {
    pub(crate) no_store: bool,
    pub(crate) no_cache: bool,
    pub(crate) only_if_cached: bool,
    /// In seconds. An argument that is not a number counts as 0, so only a response of age 0 is young enough.
    pub(crate) max_age: Option<u64>,
    /// In seconds; 0 without the directive. An argument that is not a number is ignored.
    pub(crate) min_fresh: u64,
    /// In seconds; without an argument, [`LONGEST_SECONDS`]. An argument that is not a number counts as 0.
    pub(crate) max_stale: Option<u64>,
}

impl RequestDirectives {
    /// Adds one header line. If a directive with a number, such as `max-age`, is repeated, the most restrictive number is used.
    pub(crate) fn add(&mut self, line: &HeaderValue) {
        for_each_directive(line.as_bytes(), |directive| {
            let number = directive.number();
            match &directive {
                it if it.is("no-cache") => self.no_cache = true,
                it if it.is("max-age") => smallest(&mut self.max_age, number.unwrap_or(0)),
                it if it.is("no-store") => self.no_store = true,
                it if it.is("only-if-cached") => self.only_if_cached = true,
                it if it.is("min-fresh") => self.min_fresh = self.min_fresh.max(number.unwrap_or(0)),
                it if it.is("max-stale") => {
                    let any = if it.is_plain_flag() { LONGEST_SECONDS } else { 0 };
                    smallest(&mut self.max_stale, number.unwrap_or(any));
                }
                _ => {}
            }
        });
    }
}

/// One directive of a `Cache-Control` line.
struct Directive<'a> {
    /// The name without surrounding white space.
    name: &'a [u8],
    argument: Option<&'a [u8]>,
    /// Whether the directive is separated and spelled exactly as in the grammar. An inexact directive counts if it restricts
    /// reuse, and is ignored if it permits reuse.
    exact: bool,
}

impl Directive<'_> {
    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name.as_bytes())
    }

    fn is_plain_flag(&self) -> bool {
        self.exact && self.argument.is_none()
    }

    /// The argument as seconds, if it is spelled exactly as in the grammar.
    fn number(&self) -> Option<u64> {
        delta_seconds(unquoted(self.argument.filter(|_| self.exact)?))
    }

    /// The fields to which the directive is limited, if its argument is spelled exactly as in the grammar.
    fn names(&self) -> Option<Vec<HeaderName>> {
        DirectiveScope::names(unquoted(self.argument.filter(|_| self.exact)?))
    }
}

fn for_each_directive(line: &[u8], mut each: impl FnMut(Directive<'_>)) {
    let mut rest = line;
    let (mut after_semicolon, mut has_strings) = (false, true);
    while !rest.is_empty() {
        let end = directive_end(rest, &mut has_strings);
        // `private; max-age=60` is a common slip for a comma. The flag in it must be recognized; a number beside a
        // semicolon does not match the grammar, so it does not count as a number.
        let before_semicolon = rest.get(end) == Some(&b';');
        let text = rest[..end].trim_ascii();
        let (name, argument) =
            split_once(text, b'=').map_or((text, None), |(name, argument)| (name, Some(argument)));
        // A flag counts even with a space before its `=`; a number does not (RFC 9111, 5.2: the grammar has no
        // whitespace there).
        let exact = !after_semicolon && !before_semicolon && !name.ends_with(b" ") && !name.ends_with(b"\t");
        each(Directive { name: name.trim_ascii(), argument, exact });
        after_semicolon = before_semicolon;
        rest = rest.get(end + 1..).unwrap_or_default();
    }
}

/// The end of the first directive: a separator outside quotes, or the end of the text. `has_strings` becomes false
/// at the first quote without a closing one: no later quote has one either, because any unescaped quote would have
/// closed it.
fn directive_end(text: &[u8], has_strings: &mut bool) -> usize {
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match byte {
            b',' | b';' => return at,
            b'"' if *has_strings => match closing_quote(text, at + 1) {
                Some(closing) => at = closing,
                // An unclosed quote is an ordinary byte: as the start of a string it would hide the rest of the line,
                // including a `private`. Remembering this avoids scanning the line again for each later quote.
                None => *has_strings = false,
            },
            _ => {}
        }
        at += 1;
    }
    at
}

/// The index of the closing quote of a string, if the opening quote is just before `at` (RFC 9110, 5.6.4: `\` escapes one byte).
fn closing_quote(text: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match text.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// RFC 9111, 5.2 requires that the token and the quoted form of any argument are accepted.
fn unquoted(argument: &[u8]) -> &[u8] {
    argument.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\"")).unwrap_or(argument)
}

/// A number of seconds in digits only; a larger one counts as [`LONGEST_SECONDS`] (RFC 9111, 1.2.2).
pub(crate) fn delta_seconds(digits: &[u8]) -> Option<u64> {
    number(digits).map(|seconds| seconds.min(LONGEST_SECONDS))
}

fn smallest(slot: &mut Option<u64>, seconds: u64) {
    *slot = Some(slot.map_or(seconds, |known| known.min(seconds)));
}

pub(crate) const CDN_CACHE_CONTROL: &str = "cdn-cache-control";

/// The directives of `CDN-Cache-Control`, if that field is present, valid and not empty (RFC 9213, 2.1).
pub(crate) fn targeted(headers: &HeaderMap) -> Option<CacheControl> {
    let all = whole_field(headers, CDN_CACHE_CONTROL)?;
    let mut members = MemberValues::default();
    Parser::new(&all).parse_dictionary_with_visitor(&mut members).ok()?;
    members.directives().filter(|_| !members.0.is_empty())
}

/// The value of a structured field, which may be on several lines (RFC 8941, 4.2).
pub(super) fn whole_field(headers: &HeaderMap, name: &str) -> Option<Vec<u8>> {
    let mut lines = headers.get_all(name).iter();
    let mut all = lines.next()?.as_bytes().to_vec();
    for line in lines {
        all.extend_from_slice(b", ");
        all.extend_from_slice(line.as_bytes());
    }
    Some(all)
}

/// The members of `CDN-Cache-Control` by name: of several members with one name the last counts (RFC 8941, 4.2.2).
/// Parameters have no meaning (RFC 9213, 2.1). A member that is an inner list is `None`.
#[derive(Debug, Default)]
struct MemberValues(HashMap<String, Option<BareItem>>);

impl MemberValues {
    fn directives(&self) -> Option<CacheControl> {
        let mut all = CacheControl::default();
        for (name, value) in &self.0 {
            let value = value.as_ref();
            match name.as_str() {
                "max-age" => all.max_age = Some(seconds(value)?),
                "s-maxage" => {
                    all.s_maxage = Some(seconds(value)?);
                    all.says_shared = true;
                }
                "stale-while-revalidate" => all.stale_while_revalidate = Some(seconds(value)?),
                "stale-if-error" => all.stale_if_error = Some(seconds(value)?),
                "no-store" => all.no_store = flag(value)?,
                "no-cache" => all.no_cache = fields(value)?,
                "private" => all.private = fields(value)?,
                "must-revalidate" => {
                    all.must_revalidate = flag(value)?;
                    all.says_shared |= all.must_revalidate;
                }
                "proxy-revalidate" => all.proxy_revalidate = flag(value)?,
                "must-understand" => all.must_understand = flag(value)?,
                "public" => {
                    all.public = flag(value)?;
                    all.says_shared |= all.public;
                }
                "immutable" => all.immutable = flag(value) != Some(false),
                // RFC 9213, 2.2: extensions are ignored, whatever their value.
                _ => {}
            }
        }
        Some(all)
    }
}

/// A member's value as seconds; `None` unless it is an integer. A negative number counts as 0: stale (RFC 9111, 4.2.1).
fn seconds(value: Option<&BareItem>) -> Option<u64> {
    let seconds = i64::from(value?.as_integer()?);
    Some(u64::try_from(seconds).unwrap_or(0).min(LONGEST_SECONDS))
}

fn flag(value: Option<&BareItem>) -> Option<bool> {
    value?.as_boolean()
}

fn fields(value: Option<&BareItem>) -> Option<DirectiveScope> {
    let list = match value? {
        BareItem::Boolean(false) => return Some(DirectiveScope::Absent),
        BareItem::Boolean(true) => return Some(DirectiveScope::Whole),
        BareItem::String(list) => list.as_str(),
        BareItem::Token(list) => list.as_str(),
        _ => return None,
    };
    Some(DirectiveScope::names(list.as_bytes()).map_or(DirectiveScope::Whole, DirectiveScope::Listed))
}

impl<'de> DictionaryVisitor<'de> for &mut MemberValues {
    type Out = ();
    type Error = Infallible;

    fn entry(&mut self, key: &'de KeyRef) -> Result<impl EntryVisitor<'de>, Infallible> {
        let value = self.0.entry(key.as_str().to_owned()).or_default();
        *value = None;
        Ok(MemberVisitor(value))
    }

    fn finish(self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Stores the value of one member, which stays `None` for an inner list.
pub(super) struct MemberVisitor<'a>(pub(super) &'a mut Option<BareItem>);

impl<'de> EntryVisitor<'de> for MemberVisitor<'_> {
    type Error = Infallible;

    fn item(self) -> Result<impl ItemVisitor<'de>, Infallible> {
        Ok(|item: BareItemFromInput<'de>| {
            *self.0 = Some(item.into());
            Ok::<_, Infallible>(Ignored)
        })
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'de>, Infallible> {
        Ok(Ignored)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod cdn_tests {
    use http::HeaderValue;

    use super::*;

    fn read(lines: &[&str]) -> Option<CacheControl> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CDN_CACHE_CONTROL, HeaderValue::from_str(line).unwrap());
        }
        targeted(&headers)
    }

    fn aged(seconds: u64) -> Option<CacheControl> {
        Some(CacheControl { max_age: Some(seconds), ..CacheControl::default() })
    }

    #[test]
    fn a_valid_dictionary_is_read() {
        let cases: [(&[&str], Option<CacheControl>); 19] = [
            (&["max-age=3600"], aged(3600)),
            (&["max-age=2147483648"], aged(LONGEST_SECONDS)),
            (&["max-age=99999999999"], aged(LONGEST_SECONDS)),
            (&["max-age=0"], aged(0)),
            (&["max-age=-1"], aged(0)),
            (&["foobar, max-age=3600"], aged(3600)),
            (&["max-age=3600, ext=\"a\", list=(1 2), bytes=:aGk=:"], aged(3600)),
            (&["max-age=3600;x=1"], aged(3600)),
            (&["max-age=1, max-age=3600"], aged(3600)),
            (&["max-age=1", "max-age=3600"], aged(3600)),
            (&["none"], Some(CacheControl::default())),
            (&["no-store"], Some(CacheControl { no_store: true, ..CacheControl::default() })),
            (&["no-store=?0"], Some(CacheControl::default())),
            (&["private"], Some(CacheControl { private: DirectiveScope::Whole, ..CacheControl::default() })),
            (&["no-cache=?0"], Some(CacheControl::default())),
            // RFC 8941, 4.2.2: the last member of a name counts, whatever the others are.
            (&["max-age=\"1\", max-age=3600"], aged(3600)),
            (&["public, public=?0"], Some(CacheControl::default())),
            (&["proxy-revalidate"], Some(CacheControl { proxy_revalidate: true, ..CacheControl::default() })),
            (&["must-understand"], Some(CacheControl { must_understand: true, ..CacheControl::default() })),
        ];
        for (lines, expected) in cases {
            assert_eq!(read(lines), expected, "RFC 9213, 2.1: {lines:?}");
        }
        let fields = DirectiveScope::Listed(vec!["a".parse().unwrap(), "b".parse().unwrap()]);
        assert_eq!(read(&["no-cache=\"a, b\""]).unwrap().no_cache, fields);
        assert_eq!(
            read(&["no-cache=a"]).unwrap().no_cache,
            DirectiveScope::Listed(vec!["a".parse().unwrap()])
        );
        for text in ["public", "s-maxage=1", "must-revalidate", "s-maxage=1, must-revalidate=?0, public=?0"] {
            assert!(read(&[text]).unwrap().says_shared, "RFC 9111, 3.5: {text}");
        }
        for text in ["public=?0", "must-revalidate=?0"] {
            assert!(!read(&[text]).unwrap().says_shared, "{text}");
        }
        assert_eq!(read(&["s-maxage=1"]).unwrap().s_maxage, Some(1));
        assert!(read(&["must-revalidate"]).unwrap().must_revalidate);
        assert!(read(&["immutable"]).unwrap().immutable && !read(&["immutable=?0"]).unwrap().immutable);
        let stale = read(&["max-age=1, stale-while-revalidate=2, stale-if-error=3"]).unwrap();
        assert_eq!((stale.stale_while_revalidate, stale.stale_if_error), (Some(2), Some(3)));
    }

    #[test]
    fn an_invalid_field_is_ignored_as_a_whole() {
        let cases: [&[&str]; 18] = [
            &[],
            &[""],
            &["  "],
            &["max-age=10000, &&&&&"],
            &["max-age=\"10000\""],
            &["max-age=10000", "&&&&&"],
            &["max-age=10.0"],
            &["max-age=ten"],
            &["max-age"],
            &["max-age=(1 2)"],
            &["max-age =100"],
            &["max-age= 100"],
            &["MaX-aGe=3600"],
            &["max-age=3600,"],
            &["max-age=1234567890123456"],
            &["no-store=1"],
            &["public=yes"],
            &["private=5"],
        ];
        for lines in cases {
            assert_eq!(read(lines), None, "RFC 9213, 2.1: {lines:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(line in proptest::collection::vec(0x20u8..0x7f, 0..64)) {
            let mut headers = HeaderMap::new();
            headers.append(CDN_CACHE_CONTROL, HeaderValue::from_bytes(&line).unwrap());
            targeted(&headers);
        }
    }
}
