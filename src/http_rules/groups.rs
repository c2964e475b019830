//! The fields of a response that contain tags: those of Cache Groups (RFC 9875), and those that a policy names.

use std::convert::Infallible;

use http::header::{HeaderMap, HeaderName};
use sfv::visitor::{EntryVisitor, ListVisitor};
use sfv::{BareItem, Parser};

use super::cache_control::{MemberVisitor, whole_field};

/// The groups that a response belongs to (RFC 9875, 2).
pub(crate) const CACHE_GROUPS: &str = "cache-groups";
/// The groups that a response to an unsafe method invalidates (RFC 9875, 3).
pub(crate) const CACHE_GROUP_INVALIDATION: &str = "cache-group-invalidation";

/// The response headers that contain tags.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TagHeaders {
    pub(crate) names: Vec<HeaderName>,
    /// Whether clients see them.
    pub(crate) passes: bool,
}

/// The strings in this field, without their parameters. None if the field is absent, or is no list of strings: a field that is malformed,
/// or has a member of another type, is ignored as a whole (RFC 9651, 4.2).
pub(crate) fn groups(headers: &HeaderMap, name: &str) -> Vec<String> {
    let mut members = GroupList::default();
    let Some(field) = whole_field(headers, name) else { return Vec::new() };
    if Parser::new(&field).parse_list_with_visitor(&mut members).is_err() {
        return Vec::new();
    }
    let strings = members.0.into_iter().map(|member| match member {
        Some(BareItem::String(group)) => Some(group.as_str().to_owned()),
        _ => None,
    });
    strings.collect::<Option<_>>().unwrap_or_default()
}

#[derive(Default)]
struct GroupList(Vec<Option<BareItem>>);

impl<'de> ListVisitor<'de> for &mut GroupList {
    type Out = ();
    type Error = Infallible;

    fn entry(&mut self) -> Result<impl EntryVisitor<'de>, Infallible> {
        self.0.push(None);
        // There is a last one: it was just added.
        let at = self.0.len() - 1;
        Ok(MemberVisitor(&mut self.0[at]))
    }

    fn finish(self) -> Result<(), Infallible> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn read(lines: &[&str]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CACHE_GROUPS, HeaderValue::from_str(line).unwrap());
        }
        groups(&headers, CACHE_GROUPS)
    }

    /// D2
    #[test]
    fn a_list_of_strings_is_read() {
        let cases: [(&[&str], &[&str]); 8] = [
            (&[r#""scripts""#], &["scripts"]),
            (&[r#""a", "B""#, r#""a b:c""#], &["a", "B", "a b:c"]),
            (&[r#""a";x=1;y, "b""#], &["a", "b"]),
            (&[r#""\"\\""#], &["\"\\"]),
            (&[r#""""#], &[""]),
            (&[], &[]),
            (&[""], &[]),
            (&["  "], &[]),
        ];
        for (lines, expected) in cases {
            assert_eq!(read(lines), expected, "{lines:?}");
        }
        let many: Vec<_> = (0..64).map(|n| format!("{n:032}")).collect();
        let line = many.iter().map(|group| format!("{group:?}")).collect::<Vec<_>>().join(", ");
        assert_eq!(read(&[&line]), many, "RFC 9875, 2: at least 32 groups of 32 characters");
    }

    /// D1
    #[test]
    fn a_field_that_is_no_list_of_strings_is_ignored() {
        for line in [
            "scripts",
            r#""a", token"#,
            r#""a", 1"#,
            r#"("a")"#,
            r#""a" "b""#,
            r#""a"#,
            r#""a","#,
            "\"\u{e9}\"",
            "?1",
            r#""a", :aGk=:"#,
        ] {
            assert_eq!(read(&[line]), Vec::<String>::new(), "{line}");
        }
    }
}
