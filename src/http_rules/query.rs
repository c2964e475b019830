//! [`QueryRules`]: which parameters of a query are in the key, and in which order.
//!
//! The request of a load gets the query of its key. So no response depends on the value of a parameter that its key leaves
//! out, whatever the handler does with it: a link with `utm_source=<script>` changes no page that other clients receive.
//!
//! The rules only remove or move whole pieces of a query, the texts between its `&`. They decode the name of a piece to
//! compare it, and never encode anew. So a handler that splits queries otherwise, such as at `;`, sees no text that the key
//! does not have.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::iter;

use http::uri::PathAndQuery;
use http::{Request, Uri};

/// Names of the query parameters by which analytics, advertisements and newsletters follow a visitor, for
/// [`HttpPolicy::ignore_query`](crate::http::HttpPolicy::ignore_query). A later version of this crate may list further names.
///
/// Scripts in the browser read them, and seldom a handler. Remove from the list what a handler of yours reads.
///
/// # Examples
///
/// ```
/// use http::Request;
/// use stampede_guard::http::{HttpPolicy, TRACKING_PARAMETERS};
///
/// let own = TRACKING_PARAMETERS.iter().filter(|name| **name != "mkt_tok");
/// let policy = HttpPolicy::default().ignore_query(own);
/// let key = |uri: &str| Ok::<_, http::Error>(policy.cache_key(&Request::get(uri).body(())?));
/// assert_eq!(key("http://shop.example/?fbclid=IwAR0")?, key("http://shop.example/")?);
/// assert_ne!(key("http://shop.example/?mkt_tok=NDQ")?, key("http://shop.example/")?);
/// # Ok::<(), http::Error>(())
/// ```
pub const TRACKING_PARAMETERS: &[&str] = &[
    // Google: Analytics, Ads, Merchant Center.
    "utm_*",
    "gclid",
    "gclsrc",
    "dclid",
    "gbraid",
    "wbraid",
    "gad_source",
    "gad_campaignid",
    "srsltid",
    "_ga",
    "_gl",
    // Matomo, and its older name Piwik.
    "mtm_*",
    "matomo_*",
    "pk_campaign",
    "pk_cid",
    "pk_content",
    "pk_kwd",
    "pk_medium",
    "pk_source",
    // Social networks and other search engines.
    "fbclid",
    "igshid",
    "epik",
    "li_fat_id",
    "msclkid",
    "rdt_cid",
    "ttclid",
    "twclid",
    "yclid",
    "ysclid",
    "_openstat",
    // Newsletters: Mailchimp, HubSpot, Marketo, Klaviyo, Vero, Omeda.
    "mc_cid",
    "mc_eid",
    "hsa_*",
    "_hsenc",
    "_hsmi",
    "mkt_tok",
    "_kx",
    "vero_id",
    "oly_anon_id",
    "oly_enc_id",
    // Adobe Advertising.
    "ef_id",
    "s_kwcid",
];

/// Which parameters of a query are in the key, and in which order. Names are texts, of which a `*` at the end stands for any
/// end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueryRules {
    /// Parameters that are not in the key.
    pub(crate) ignored: Vec<String>,
    /// The only parameters that may be in the key; `None` if all may be.
    pub(crate) only: Option<Vec<String>>,
    /// Whether the parameters of the key are sorted by name.
    pub(crate) is_sorted: bool,
}

impl QueryRules {
    /// Why these rules are refused.
    pub(crate) fn refusal(&self) -> Option<String> {
        let lists =
            [("ignore_query", &*self.ignored), ("only_query", self.only.as_deref().unwrap_or_default())];
        lists.into_iter().find_map(|(setting, names)| {
            let name = names.iter().find(|name| !is_pattern(name))?;
            Some(format!(
                "{setting} names {name:?}: choose names of parameters as they are after percent-decoding, where only the last \
                 character may be a `*`, as \"gclid\" or \"utm_*\""
            ))
        })
    }

    /// The path and query that the key has for those of a request; borrowed if they are the same. A query without a
    /// parameter is removed with its `?`, so such a request has the key and the load of the path alone.
    pub(crate) fn keyed<'a>(&self, sent: &'a str) -> Cow<'a, str> {
        let Some((path, query)) = sent.split_once('?') else { return Cow::Borrowed(sent) };
        let pieces = || query.split('&');
        let is_in_order = || pieces().is_sorted_by(|one, other| by_name(one, other) != Ordering::Greater);
        // An absolute URI may have a query and no path, which is the path `/` (RFC 9110, 4.2.3).
        if !path.is_empty() && pieces().all(|piece| self.has(piece)) && (!self.is_sorted || is_in_order()) {
            return Cow::Borrowed(sent);
        }
        let mut parameters: Vec<&str> = pieces().filter(|piece| self.has(piece)).collect();
        if self.is_sorted {
            // Stable: the order of equal names has a meaning, as in `?tag=b&tag=a`.
            parameters.sort_by(|one, other| by_name(one, other));
        }
        let path = if path.is_empty() { "/" } else { path };
        Cow::Owned(match parameters.is_empty() {
            true => path.to_owned(),
            false => format!("{path}?{}", parameters.join("&")),
        })
    }

    /// Whether this piece of a query is in the key. An empty piece is no parameter.
    fn has(&self, piece: &str) -> bool {
        let is_in = |names: &[String]| names.iter().any(|pattern| matches(pattern, piece));
        !piece.is_empty() && !is_in(&self.ignored) && self.only.as_deref().is_none_or(is_in)
    }

    /// Whether two URIs have the same query in a key.
    pub(crate) fn is_same_query(&self, one: &Uri, other: &Uri) -> bool {
        fn query(keyed: &str) -> &str {
            keyed.split_once('?').map_or("", |(_, query)| query)
        }
        let [one, other] = [one, other].map(|uri| self.keyed(path_and_query(uri)));
        query(&one) == query(&other)
    }

    /// Whether the request has the query of its key: in its URI and, with the feature `axum`, in its original URI.
    pub(crate) fn is_keyed<B>(&self, request: &Request<B>) -> bool {
        let is_keyed = |uri: &Uri| matches!(self.keyed(path_and_query(uri)), Cow::Borrowed(_));
        is_keyed(request.uri()) && original::get(request.extensions()).is_none_or(is_keyed)
    }

    /// The request's URI and extensions with the query of its key; `None` if it has that query already.
    pub(crate) fn keyed_head<B>(&self, request: &Request<B>) -> Option<Request<()>> {
        if self.is_keyed(request) {
            return None;
        }
        let mut head = Request::new(());
        *head.uri_mut() = request.uri().clone();
        *head.extensions_mut() = request.extensions().clone();
        self.rewrite(&mut head);
        Some(head)
    }

    /// Gives a request the query of its key: in its URI and, with the feature `axum`, in its original URI, even if that is
    /// not the one in the key.
    pub(crate) fn rewrite(&self, request: &mut Request<()>) {
        if let Some(uri) = self.keyed_uri(request.uri()) {
            *request.uri_mut() = uri;
        }
        if let Some(uri) = original::get(request.extensions()).and_then(|uri| self.keyed_uri(uri)) {
            original::set(request.extensions_mut(), uri);
        }
    }

    /// The URI with the query of its key; `None` if it has that query already.
    fn keyed_uri(&self, uri: &Uri) -> Option<Uri> {
        let Cow::Owned(keyed) = self.keyed(path_and_query(uri)) else { return None };
        let mut parts = uri.clone().into_parts();
        // This cannot fail: pieces of a valid query make a valid query.
        parts.path_and_query = Some(PathAndQuery::try_from(keyed).ok()?);
        Uri::from_parts(parts).ok()
    }
}

/// Whether a text can be the name of a parameter, or the beginning of names. Characters that a decoded name hardly has, or
/// that end a name, are a mistake: of an encoded name, a whole parameter, or a whole query.
fn is_pattern(text: &str) -> bool {
    let name = text.strip_suffix('*').unwrap_or(text);
    !text.is_empty() && !name.contains(|c: char| "*&=#%?".contains(c) || c.is_control())
}

/// Whether the name of a piece is this one or, with a `*` at its end, begins like it.
fn matches(pattern: &str, piece: &str) -> bool {
    let (text, is_beginning) = pattern.strip_suffix('*').map_or((pattern, false), |text| (text, true));
    let mut name = name(piece);
    text.bytes().all(|byte| name.next() == Some(byte)) && (is_beginning || name.next().is_none())
}

fn by_name(one: &str, other: &str) -> Ordering {
    name(one).cmp(name(other))
}

/// The name of a piece of a query, decoded.
fn name(piece: &str) -> impl Iterator<Item = u8> + '_ {
    decoded(piece.split('=').next().unwrap_or_default())
}

/// A text decoded as forms are: a `+` is a space, and a `%` that begins no code is a `%`.
pub(super) fn decoded(text: &str) -> impl Iterator<Item = u8> + '_ {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut rest = text.as_bytes();
    iter::from_fn(move || {
        let (byte, after) = rest.split_first()?;
        rest = after;
        if let (b'%', [high, low, after @ ..]) = (byte, after)
            && let (Some(high), Some(low)) = (digit(*high), digit(*low))
        {
            rest = after;
            return Some(high << 4 | low);
        }
        Some(if *byte == b'+' { b' ' } else { *byte })
    })
}

/// The path and query of a URI; empty if it has neither, as an authority by itself.
fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("", PathAndQuery::as_str)
}

/// The URI before nested routers removed their prefixes, as axum reports it.
#[cfg(feature = "axum")]
pub(super) mod original {
    use axum::extract::OriginalUri;
    use http::{Extensions, Uri};

    pub(in crate::http_rules) fn get(extensions: &Extensions) -> Option<&Uri> {
        extensions.get::<OriginalUri>().map(|original| &original.0)
    }

    pub(in crate::http_rules) fn set(extensions: &mut Extensions, uri: Uri) {
        extensions.insert(OriginalUri(uri));
    }
}

/// Without axum, no router reports anything.
#[cfg(not(feature = "axum"))]
pub(super) mod original {
    use http::{Extensions, Uri};

    pub(in crate::http_rules) fn get(_: &Extensions) -> Option<&Uri> {
        None
    }

    pub(in crate::http_rules) fn set(_: &mut Extensions, _: Uri) {}
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
#[path = "../../tests/unit/http_rules/query_tests.rs"]
mod tests;
