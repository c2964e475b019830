//! The references to other resources in `Location` and `Content-Location` (RFC 9110, 10.2.2 and 8.7), and which of them an
//! unsafe method may invalidate.

use http::Uri;
use http::header::{HeaderMap, HeaderName};
use http::uri::{self, Parts};

use super::fields::single;
use super::key::{default_port, without_dots};

/// The URI to which a field refers, if the field occurs once, is valid, and has the same origin as the absolute
/// `base` (RFC 9110, 4.3.1: scheme, host and port).
pub(crate) fn of_same_origin(base: &Uri, headers: &HeaderMap, name: &HeaderName) -> Option<Uri> {
    let target = resolve(base, single(headers, name)?.to_str().ok()?)?;
    is_same_origin(base, &target).then_some(target)
}

fn is_same_origin(one: &Uri, other: &Uri) -> bool {
    let port = |uri: &Uri| uri.port_u16().or_else(|| uri.scheme().map(default_port));
    one.scheme() == other.scheme()
        && port(one) == port(other)
        && matches!((one.host(), other.host()), (Some(a), Some(b)) if a.eq_ignore_ascii_case(b))
}

/// Resolves a reference (RFC 3986, 5.2). The fragment is dropped, because it is not part of a key.
pub(crate) fn resolve(base: &Uri, reference: &str) -> Option<Uri> {
    let reference = reference.split('#').next().unwrap_or_default();
    if has_scheme(reference) {
        let uri: Uri = reference.parse().ok()?;
        // User information is not part of an origin, and no key contains it.
        return uri
            .authority()
            .filter(|_| uri.scheme().is_some())
            .is_some_and(|authority| !authority.as_str().contains('@'))
            .then_some(uri);
    }
    let mut parts = Parts::default();
    parts.scheme = Some(base.scheme()?.clone());
    let path = if let Some(rest) = reference.strip_prefix("//") {
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        parts.authority =
            Some(rest[..end].parse().ok().filter(|a: &uri::Authority| !a.as_str().contains('@'))?);
        rest[end..].to_owned()
    } else {
        parts.authority = Some(base.authority()?.clone());
        if reference.is_empty() {
            base.path_and_query()?.as_str().to_owned()
        } else if reference.starts_with('/') {
            reference.to_owned()
        } else if reference.starts_with('?') {
            format!("{}{reference}", base.path())
        } else {
            // RFC 3986, 5.2.3: the reference replaces everything after the last slash.
            format!("{}{reference}", &base.path()[..=base.path().rfind('/')?])
        }
    };
    parts.path_and_query = Some(without_dots(&path).parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// Whether the reference begins with a scheme (RFC 3986, 3.1). A colon after the first slash does not end a scheme.
fn has_scheme(reference: &str) -> bool {
    let Some((scheme, _)) = reference.split_once(':') else { return false };
    scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn references_resolve_as_in_the_rfc() {
        // RFC 3986, 5.4.1 and 5.4.2, without the examples of path parameters and of schemes other than http.
        let cases = [
            ("g", "http://a/b/c/g"),
            ("./g", "http://a/b/c/g"),
            ("g/", "http://a/b/c/g/"),
            ("/g", "http://a/g"),
            ("//g", "http://g/"),
            ("?y", "http://a/b/c/d;p?y"),
            ("g?y", "http://a/b/c/g?y"),
            ("#s", "http://a/b/c/d;p?q"),
            ("g#s", "http://a/b/c/g"),
            ("", "http://a/b/c/d;p?q"),
            (".", "http://a/b/c/"),
            ("./", "http://a/b/c/"),
            ("..", "http://a/b/"),
            ("../", "http://a/b/"),
            ("../g", "http://a/b/g"),
            ("../..", "http://a/"),
            ("../../g", "http://a/g"),
            ("../../../g", "http://a/g"),
            ("/./g", "http://a/g"),
            ("/../g", "http://a/g"),
            ("g.", "http://a/b/c/g."),
            ("..g", "http://a/b/c/..g"),
            ("./g/.", "http://a/b/c/g/"),
            ("g/../h", "http://a/b/c/h"),
            ("g?y/../x", "http://a/b/c/g?y/../x"),
            ("http://a/x", "http://a/x"),
            ("HTTPS://B:1/x?y#z", "https://B:1/x?y"),
            ("//g:1?y", "http://g:1/?y"),
            ("//g/x", "http://g/x"),
            // A scheme begins with an alphabetic character and contains no slash.
            ("1:2", "http://a/b/c/1:2"),
            ("g/h:i", "http://a/b/c/g/h:i"),
        ];
        let base = Uri::from_static("http://a/b/c/d;p?q");
        for (reference, expected) in cases {
            assert_eq!(resolve(&base, reference).unwrap(), expected, "RFC 3986, 5.2: {reference}");
        }
        for reference in
            ["http:", "http:g", "mailto:a@b", "a+b:c", "http://u@a/", "//u@a/", "a b", "http://a b/", "//"]
        {
            assert_eq!(resolve(&base, reference), None, "{reference}");
        }
    }

    #[test]
    fn only_references_of_the_same_origin_count() {
        let cases = [
            ("/x", Some("http://a.example/x")),
            ("http://A.Example:80/x", Some("http://A.Example:80/x")),
            ("https://a.example/x", None),
            ("http://a.example:81/x", None),
            ("http://b.example/x", None),
            ("//b.example/x", None),
            ("http://a.example@b.example/x", None),
        ];
        let secure = Uri::from_static("https://a.example/");
        for (other, same) in [("https://a.example:443/x", true), ("https://a.example:80/x", false)] {
            assert_eq!(is_same_origin(&secure, &Uri::from_static(other)), same, "RFC 9110, 4.3.1: {other}");
        }
        let base = Uri::from_static("http://a.example/");
        let name = http::header::LOCATION;
        for (reference, expected) in cases {
            let mut headers = HeaderMap::new();
            headers.append(&name, HeaderValue::from_str(reference).unwrap());
            let found = of_same_origin(&base, &headers, &name);
            assert_eq!(found, expected.map(Uri::from_static), "RFC 9111, 4.4; A7: {reference}");
            headers.append(&name, HeaderValue::from_str(reference).unwrap());
            assert_eq!(of_same_origin(&base, &headers, &name), None, "twice");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_reference_is_resolved_without_a_panic(reference in "[ -~]{0,40}") {
            let base = Uri::from_static("http://a/b/c/d?q");
            if let Some(uri) = resolve(&base, &reference) {
                proptest::prop_assert!(uri.authority().is_some());
            }
        }
    }
}
