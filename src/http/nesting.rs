//! What axum says of a request's way through its routers: the URI it came with, and what nesting took off that.

use http::{Request, Uri};

/// The URI before nested routers took their prefix off.
///
/// A handler that forwards its request to somewhere else leaves it there: of another origin it says nothing about where
/// the request goes now.
#[cfg(feature = "axum")]
pub(super) fn original<B>(request: &Request<B>) -> Option<&Uri> {
    let (uri, original) = (request.uri(), &request.extensions().get::<axum::extract::OriginalUri>()?.0);
    (original.scheme() == uri.scheme() && original.authority() == uri.authority()).then_some(original)
}

#[cfg(not(feature = "axum"))]
pub(super) fn original<B>(_: &Request<B>) -> Option<&Uri> {
    None
}

/// Whether what the inner service sees is this target, or what nesting has left of it.
pub(super) fn strips<B>(target: &Uri, request: &Request<B>) -> bool {
    let uri = request.uri();
    std::ptr::eq(target, uri)
        || target.query() == uri.query() && (uri.path() == "/" || target.path().ends_with(uri.path()))
}
