//! What axum reports about a request: the route that matched it, its original URI, and the prefix that nesting removed.

use http::{Request, Uri};

/// The URI before nested routers removed their prefixes.
///
/// A handler that forwards its request to another origin leaves the extension in place, but the extension then says
/// nothing about the new URI.
#[cfg(feature = "axum")]
pub(crate) fn original<B>(request: &Request<B>) -> Option<&Uri> {
    let (uri, original) = (request.uri(), &request.extensions().get::<axum::extract::OriginalUri>()?.0);
    (original.scheme() == uri.scheme() && original.authority() == uri.authority()).then_some(original)
}

#[cfg(not(feature = "axum"))]
pub(crate) fn original<B>(_: &Request<B>) -> Option<&Uri> {
    None
}

/// The route that matched the request: `/users/{id}`. A layer sees it if it was put on the router by `Router::layer` or
/// `Router::route_layer`, which are called after the match; a service around the whole router does not.
#[cfg(feature = "axum")]
pub(crate) fn matched_route<B>(request: &Request<B>) -> Option<&str> {
    request.extensions().get::<axum::extract::MatchedPath>().map(axum::extract::MatchedPath::as_str)
}

/// No other router says so.
#[cfg(not(feature = "axum"))]
pub(crate) fn matched_route<B>(_: &Request<B>) -> Option<&str> {
    None
}

/// Whether the inner service sees this target, or the part of it that nesting left.
pub(crate) fn strips<B>(target: &Uri, request: &Request<B>) -> bool {
    let uri = request.uri();
    std::ptr::eq(target, uri)
        || target.query() == uri.query() && (target.path() == uri.path() || is_nested(target.path(), request))
}

/// Whether nesting has shortened this request's path from `path`. Any other rewrite may depend on a header.
#[cfg(feature = "axum")]
fn is_nested<B>(path: &str, request: &Request<B>) -> bool {
    let nested = request.extensions().get::<axum::extract::NestedPath>();
    let left = nested.and_then(|prefix| without(path, prefix.as_str()));
    left.is_some_and(|left| match request.uri().path() {
        path if left.starts_with('/') => path == left,
        path => path.strip_prefix('/') == Some(left),
    })
}

#[cfg(not(feature = "axum"))]
fn is_nested<B>(_: &str, _: &Request<B>) -> bool {
    false
}

/// The rest of a path after a prefix and one slash.
#[cfg(feature = "axum")]
fn without<'p>(path: &'p str, prefix: &str) -> Option<&'p str> {
    let mut left = path;
    for pattern in prefix.strip_suffix('/').unwrap_or(prefix).split('/').skip(1) {
        let rest = left.strip_prefix('/')?;
        let (segment, rest) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let is_capture = pattern.starts_with('{') && pattern.ends_with('}') && !pattern.starts_with("{{");
        if segment != pattern && !is_capture {
            return None;
        }
        left = rest;
    }
    Some(left.strip_prefix('/').unwrap_or(left))
}

#[cfg(all(test, feature = "axum"))]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_matches_whole_segments_and_a_capture_any_segment() {
        let cases = [
            ("/api/list", "/api", Some("list")),
            ("/api/list", "/api/", Some("list")),
            ("/api/a/b", "/api", Some("a/b")),
            ("/api", "/api", Some("")),
            ("/api/", "/api", Some("")),
            ("/api//list", "/api", Some("/list")),
            ("/acme/v1/list", "/{tenant}/v1", Some("list")),
            ("/acme/v1/list", "/{a}/{b}", Some("list")),
            ("/list", "/", Some("list")),
            ("/{a}/list", "/{{a}}", None),
            ("/apis/list", "/api", None),
            ("/api", "/api/v1", None),
            ("/v2/list", "/v1", None),
            ("*", "/api", None),
        ];
        for (path, prefix, left) in cases {
            assert_eq!(without(path, prefix), left, "{path} behind {prefix}");
        }
    }
}
