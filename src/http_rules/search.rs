//! [`SearchRule`]: which parts of a query do not affect the response, as `No-Vary-Search` says
//! (draft-ietf-httpbis-no-vary-search-05).
//!
//! Two queries are equivalent under a rule if their [canonical](SearchRule::canonical) queries are the same text (section 6). A
//! canonical query is `application/x-www-form-urlencoded`, with the parameters that affect the response only, in one encoding.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;

use http::header::HeaderMap;
use http::uri::PathAndQuery;
use http::{Request, Uri};
use sfv::visitor::{
    DictionaryVisitor, EntryVisitor, Ignored, InnerListVisitor, ItemVisitor, ParameterVisitor,
};
use sfv::{BareItem, BareItemFromInput, KeyRef, Parser};

use super::cache_control::whole_field;
use super::query::{decoded, original};

const NO_VARY_SEARCH: &str = "no-vary-search";

/// The longest field that is a rule, in bytes. A longer one has no effect, as an absent one, because each process keeps the rules of
/// many paths.
const LONGEST: usize = 1024;

/// A field of `No-Vary-Search` that makes some queries equivalent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SearchRule {
    /// The field's value.
    field: Vec<u8>,
    /// The parameters that do not affect the response or, with `is_except`, the only ones that do.
    names: Vec<String>,
    is_except: bool,
    ignores_order: bool,
}

impl SearchRule {
    /// The rule of a response; `None` if its field is absent, too long, malformed, or makes no queries equivalent.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        Self::parse(&whole_field(headers, NO_VARY_SEARCH)?)
    }

    /// The rule that a field with this value states (section 5.1).
    pub(crate) fn parse(field: &[u8]) -> Option<Self> {
        let mut members = NoVarySearch::default();
        if field.len() > LONGEST {
            return None;
        }
        Parser::new(field).parse_dictionary_with_visitor(&mut members).ok()?;
        let NoVarySearch { key_order, params, except } = members;
        let ignores_order = match key_order {
            SearchMember::Absent => false,
            SearchMember::Item(item) => item.as_boolean()?,
            SearchMember::List(_) => return None,
        };
        let (names, is_except) = match (params, except) {
            // By the steps of section 5.1 `key-order` alone would have no effect. By its examples, and section 6.1, it has one.
            (SearchMember::Absent, SearchMember::Absent) => (Vec::new(), false),
            (params, SearchMember::Absent) => (params.names()?, false),
            (SearchMember::Absent, except) => (except.names()?, true),
            _ => return None,
        };
        let has_effect = is_except || ignores_order || !names.is_empty();
        has_effect.then(|| Self { field: field.to_vec(), names, is_except, ignores_order })
    }

    /// The value of the field, from which [`parse`](Self::parse) makes the same rule.
    pub(crate) fn field(&self) -> &[u8] {
        &self.field
    }

    /// The query that stands for all that are equivalent to this one; empty if no parameter affects the response.
    fn canonical(&self, query: &str) -> String {
        let text = |text: &str| utf8(decoded(text).collect());
        // The parser of `application/x-www-form-urlencoded` (URL standard, 5.1).
        let pairs = query.split('&').filter(|piece| !piece.is_empty()).map(|piece| {
            let (name, value) = piece.split_once('=').unwrap_or((piece, ""));
            (text(name), text(value))
        });
        let mut pairs: Vec<_> =
            pairs.filter(|(name, _)| self.names.contains(name) == self.is_except).collect();
        if self.ignores_order {
            // Stable: the order of equal names has a meaning.
            pairs.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        let pairs = pairs.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value)));
        pairs.collect::<Vec<_>>().join("&")
    }

    /// Whether two URIs of one path have equivalent queries.
    fn is_same(&self, one: &Uri, other: &Uri) -> bool {
        let [one, other] = [one, other].map(|uri| self.canonical(uri.query().unwrap_or_default()));
        one == other
    }

    /// The URI with its canonical query; `None` if it has that query already, or would be too long.
    fn canonical_uri(&self, uri: &Uri) -> Option<Uri> {
        let sent = uri.query()?;
        let query = self.canonical(sent);
        // An empty query goes, with its `?`.
        if query == sent && !query.is_empty() {
            return None;
        }
        let path = if uri.path().is_empty() { "/" } else { uri.path() };
        let text = if query.is_empty() { Cow::Borrowed(path) } else { format!("{path}?{query}").into() };
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::try_from(&*text).ok()?);
        Uri::from_parts(parts).ok()
    }
}

/// A request that has the canonical query of its path's rule, and the URIs with which it was sent.
#[derive(Debug)]
pub(crate) struct RewrittenSearch {
    rule: Arc<SearchRule>,
    /// The request's URI, as it was sent and as it is now.
    uri: [Uri; 2],
    /// With the feature `axum`, the URI before nested routers removed their prefixes, likewise.
    original: Option<[Uri; 2]>,
}

impl RewrittenSearch {
    /// Gives a request the canonical query: in its URI and, with the feature `axum`, in its original URI. `None` if it has that already.
    pub(crate) fn of(request: &mut Request<()>, rule: &Arc<SearchRule>) -> Option<Self> {
        let now = |uri: &Uri| rule.canonical_uri(uri).map(|now| [uri.clone(), now]);
        let same = |uri: &Uri| [uri.clone(), uri.clone()];
        let sent = original::get(request.extensions());
        let (uri, changed_original) = (now(request.uri()), sent.and_then(now));
        if uri.is_none() && changed_original.is_none() {
            return None;
        }
        let original = changed_original.or_else(|| sent.map(same));
        let rewritten =
            Self { rule: Arc::clone(rule), uri: uri.unwrap_or_else(|| same(request.uri())), original };
        rewritten.put(request, 1);
        Some(rewritten)
    }

    /// Gives the request its URIs as they were sent.
    pub(crate) fn restore(&self, request: &mut Request<()>) {
        self.put(request, 0);
    }

    fn put(&self, request: &mut Request<()>, which: usize) {
        request.uri_mut().clone_from(&self.uri[which]);
        if let Some(original) = &self.original {
            original::set(request.extensions_mut(), original[which].clone());
        }
    }

    /// Whether a response to the request as it is now also answers the request as it was sent: by its own field, their queries are
    /// equivalent (section 7).
    pub(crate) fn is_answered_by(&self, response: &HeaderMap) -> bool {
        let mut lines = response.get_all(NO_VARY_SEARCH).iter();
        if let (Some(line), None) = (lines.next(), lines.next())
            && line.as_bytes() == self.rule.field
        {
            return true;
        }
        let is_same = |own: &SearchRule, [sent, now]: &[Uri; 2]| own.is_same(sent, now);
        SearchRule::of(response).is_some_and(|own| {
            is_same(&own, &self.uri) && self.original.as_ref().is_none_or(|uris| is_same(&own, uris))
        })
    }
}

/// A member of the field.
#[derive(Debug, Default)]
enum SearchMember {
    #[default]
    Absent,
    Item(BareItem),
    /// An inner list; `None` stands for an item that is no string.
    List(Vec<Option<String>>),
}

impl SearchMember {
    /// The names in a list of strings (section 5.3); `None` for any other member.
    fn names(self) -> Option<Vec<String>> {
        let Self::List(items) = self else { return None };
        items.into_iter().map(|item| Some(utf8(decoded(&item?).collect()))).collect()
    }
}

/// The members that have a meaning. Others are ignored (section 4).
#[derive(Debug, Default)]
struct NoVarySearch {
    key_order: SearchMember,
    params: SearchMember,
    except: SearchMember,
}

impl<'de> DictionaryVisitor<'de> for &mut NoVarySearch {
    type Out = ();
    type Error = Infallible;

    fn entry(&mut self, key: &'de KeyRef) -> Result<impl EntryVisitor<'de>, Infallible> {
        let member = match key.as_str() {
            "key-order" => Some(&mut self.key_order),
            "params" => Some(&mut self.params),
            "except" => Some(&mut self.except),
            _ => None,
        };
        Ok(member.map(SearchMemberVisitor))
    }

    fn finish(self) -> Result<(), Infallible> {
        Ok(())
    }
}

struct SearchMemberVisitor<'a>(&'a mut SearchMember);

impl<'de> EntryVisitor<'de> for SearchMemberVisitor<'_> {
    type Error = Infallible;

    fn item(self) -> Result<impl ItemVisitor<'de>, Infallible> {
        Ok(|item: BareItemFromInput<'de>| {
            *self.0 = SearchMember::Item(item.into());
            Ok::<_, Infallible>(Ignored)
        })
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'de>, Infallible> {
        *self.0 = SearchMember::List(Vec::new());
        Ok(self)
    }
}

impl<'de> InnerListVisitor<'de> for SearchMemberVisitor<'_> {
    type Error = Infallible;

    fn item(&mut self) -> Result<impl ItemVisitor<'de>, Infallible> {
        Ok(|item: BareItemFromInput<'de>| {
            if let SearchMember::List(items) = &mut *self.0 {
                items.push(item.as_string().map(|text| text.as_str().to_owned()));
            }
            Ok::<_, Infallible>(Ignored)
        })
    }

    fn finish(self) -> Result<impl ParameterVisitor<'de>, Infallible> {
        Ok(Ignored)
    }
}

/// Bytes as UTF-8, in which U+FFFD stands for what is none ("UTF-8 decode without BOM" of the Encoding standard).
fn utf8(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// A text with all but the unreserved characters (RFC 3986, 2.3) as codes. A space is `%20`, which each decoder reads as one.
fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/search_tests.rs"]
mod tests;
