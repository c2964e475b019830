//! `CDN-Cache-Control`: directives for caches that work for the origin, such as this one (RFC 9213).
//!
//! Unlike `Cache-Control` it is a structured field (RFC 8941): a field that does not parse, or in which a directive
//! has a value of the wrong type, is ignored as a whole.

use std::collections::HashMap;
use std::convert::Infallible;

use http::header::HeaderMap;
use sfv::visitor::{
    DictionaryVisitor, EntryVisitor, Ignored, InnerListVisitor, ItemVisitor, ParameterVisitor,
};
use sfv::{BareItemFromInput, KeyRef, Parser};

use super::cache_control::{CacheControl, DirectiveScope, LONGEST_SECONDS};

pub(crate) const CDN_CACHE_CONTROL: &str = "cdn-cache-control";

/// The directives of the field, if it is there, valid and not empty (RFC 9213, 2.1).
pub(crate) fn targeted(headers: &HeaderMap) -> Option<CacheControl> {
    let mut lines = headers.get_all(CDN_CACHE_CONTROL).iter();
    // A field on several lines is one dictionary (RFC 8941, 4.2).
    let mut all = lines.next()?.as_bytes().to_vec();
    for line in lines {
        all.extend_from_slice(b", ");
        all.extend_from_slice(line.as_bytes());
    }
    let mut members = MemberValues::default();
    Parser::new(&all).parse_dictionary_with_visitor(&mut members).ok()?;
    members.directives().filter(|_| !members.0.is_empty())
}

/// A member's value, as far as directives have one.
#[derive(Debug, Default)]
enum MemberValue {
    Flag(bool),
    Integer(i64),
    Text(String),
    #[default]
    Other,
}

/// The members by name; the last one of a name counts (RFC 8941, 4.2.2). Parameters have no meaning (RFC 9213,
/// 2.1).
#[derive(Debug, Default)]
struct MemberValues(HashMap<String, MemberValue>);

impl MemberValues {
    fn directives(&self) -> Option<CacheControl> {
        let mut all = CacheControl::default();
        for (name, value) in &self.0 {
            match name.as_str() {
                "max-age" => all.max_age = Some(value.seconds()?),
                "s-maxage" => {
                    all.s_maxage = Some(value.seconds()?);
                    all.says_shared = true;
                }
                "stale-while-revalidate" => all.stale_while_revalidate = Some(value.seconds()?),
                "stale-if-error" => all.stale_if_error = Some(value.seconds()?),
                "no-store" => all.no_store = value.flag()?,
                "no-cache" => all.no_cache = value.fields()?,
                "private" => all.private = value.fields()?,
                "must-revalidate" => {
                    all.must_revalidate = value.flag()?;
                    all.says_shared |= all.must_revalidate;
                }
                "proxy-revalidate" => all.proxy_revalidate = value.flag()?,
                "must-understand" => all.must_understand = value.flag()?,
                "public" => {
                    all.public = value.flag()?;
                    all.says_shared |= all.public;
                }
                "immutable" => all.immutable = !matches!(value, MemberValue::Flag(false)),
                // RFC 9213, 2.2: extensions are ignored, whatever their value.
                _ => {}
            }
        }
        Some(all)
    }
}

impl MemberValue {
    /// A negative number counts as 0: stale (RFC 9111, 4.2.1).
    fn seconds(&self) -> Option<u64> {
        match self {
            Self::Integer(seconds) => Some(u64::try_from(*seconds).unwrap_or(0).min(LONGEST_SECONDS)),
            _ => None,
        }
    }

    fn flag(&self) -> Option<bool> {
        if let Self::Flag(flag) = self { Some(*flag) } else { None }
    }

    fn fields(&self) -> Option<DirectiveScope> {
        match self {
            Self::Flag(false) => Some(DirectiveScope::Absent),
            Self::Flag(true) => Some(DirectiveScope::Whole),
            Self::Text(list) => Some(
                DirectiveScope::names(list.as_bytes()).map_or(DirectiveScope::Whole, DirectiveScope::Listed),
            ),
            Self::Integer(_) | Self::Other => None,
        }
    }
}

impl<'de> DictionaryVisitor<'de> for &mut MemberValues {
    type Out = ();
    type Error = Infallible;

    fn entry(&mut self, key: &'de KeyRef) -> Result<impl EntryVisitor<'de>, Infallible> {
        let value = self.0.entry(key.as_str().to_owned()).or_default();
        *value = MemberValue::Other;
        Ok(MemberVisitor(value))
    }

    fn finish(self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Fills in the value of a member; an inner list stays `Other`.
struct MemberVisitor<'a>(&'a mut MemberValue);

impl<'de> EntryVisitor<'de> for MemberVisitor<'_> {
    type Error = Infallible;

    fn item(self) -> Result<impl ItemVisitor<'de>, Infallible> {
        Ok(self)
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'de>, Infallible> {
        Ok(Ignored)
    }
}

impl<'de> ItemVisitor<'de> for MemberVisitor<'_> {
    type Out = ();
    type Error = Infallible;

    fn bare_item(
        self,
        item: BareItemFromInput<'de>,
    ) -> Result<impl ParameterVisitor<'de, Out = ()>, Infallible> {
        *self.0 = match item {
            BareItemFromInput::Boolean(flag) => MemberValue::Flag(flag),
            BareItemFromInput::Integer(number) => MemberValue::Integer(number.into()),
            BareItemFromInput::String(text) => MemberValue::Text(text.as_str().to_owned()),
            BareItemFromInput::Token(token) => MemberValue::Text(token.as_str().to_owned()),
            _ => MemberValue::Other,
        };
        Ok(Ignored)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
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
