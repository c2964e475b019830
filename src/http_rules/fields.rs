//! Header fields in general: which ones are stored, and the length in `Content-Length`.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http_body::SizeHint;

/// A `Content-Length` that is not a number, or several that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unsound;

/// The length in the head (RFC 9110, 8.6: a repeated value counts once).
pub(crate) fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Unsound> {
    let mut length = None;
    for line in headers.get_all(header::CONTENT_LENGTH) {
        for member in line.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
            // `parse` alone would accept a sign.
            let member = std::str::from_utf8(member)
                .ok()
                .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|text| text.parse::<u64>().ok())
                .ok_or(Unsound)?;
            if length.is_some_and(|known| known != member) {
                return Err(Unsound);
            }
            length = Some(member);
        }
    }
    Ok(length)
}

/// A lower bound of a body's length, from its header and its size hint.
pub(crate) fn least_length(told: Option<u64>, body: &SizeHint) -> u64 {
    body.lower().max(told.unwrap_or(0))
}

/// Replaces a repeated length by a single one (RFC 9110, 8.6). hyper sends no head with two lines of it.
pub(crate) fn say_length_once(headers: &mut HeaderMap) {
    let lines = headers.get_all(header::CONTENT_LENGTH).iter();
    let members: usize = lines.map(|line| line.as_bytes().split(|&byte| byte == b',').count()).sum();
    if members > 1
        && let Ok(Some(length)) = content_length(headers)
    {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
}

/// Whether the content has a coding (RFC 9110, 8.4).
pub(crate) fn is_encoded(headers: &HeaderMap) -> bool {
    headers.get_all(header::CONTENT_ENCODING).iter().any(|line| {
        let mut codings = line.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
        codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"))
    })
}

/// Digests of the content of one message (RFC 9530, 2; RFC 1864), not of the representation, as `Repr-Digest` is.
const CONTENT_DIGESTS: [&str; 2] = [CONTENT_DIGEST, "content-md5"];
pub(crate) const CONTENT_DIGEST: &str = "content-digest";

pub(crate) fn is_content_digest(name: &HeaderName) -> bool {
    CONTENT_DIGESTS.contains(&name.as_str())
}

/// For a head that gets other content than it came with.
pub(crate) fn remove_content_digests(headers: &mut HeaderMap) {
    for name in CONTENT_DIGESTS {
        headers.remove(name);
    }
}

/// Whether the field belongs to one connection or hop, so that it is never stored (RFC 9111, 3.1; RFC 9110, 7.6.1).
///
/// `Trailer` is no such field: it announces trailers, which are stored too, and an HTTP/1 server sends no trailers
/// without it.
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authentication-info"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Whether a field belongs to this connection only: by its name, or because `Connection` lists it.
pub(crate) fn is_of_this_hop(headers: &HeaderMap, name: &HeaderName) -> bool {
    let named = |line: &HeaderValue| contains_token(line.as_bytes(), name.as_str().as_bytes());
    is_hop_by_hop(name) || headers.get_all(header::CONNECTION).iter().any(named)
}

/// The headers that are stored, in order: none of one hop, none that `Connection` lists, and no `Age`, which is
/// stored as a number and grows.
pub(crate) fn storable(headers: &HeaderMap) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    headers.iter().filter(|(name, _)| **name != header::AGE && !is_of_this_hop(headers, name))
}

/// Whether a list has this member, in any case (RFC 9110, 5.6.1).
pub(crate) fn contains_token(list: &[u8], token: &[u8]) -> bool {
    list.split(|&byte| byte == b',').any(|member| member.trim_ascii().eq_ignore_ascii_case(token))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::Response;
    use http::response::Parts;

    use super::*;

    fn head(status: u16, headers: &[(&str, &str)]) -> Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0
    }

    #[test]
    fn headers_of_one_hop_are_not_stored_and_the_rest_keeps_its_order() {
        let head = head(
            200,
            &[
                ("content-type", "text/plain"),
                ("connection", "close, X-Hop"),
                ("x-hop", "1"),
                ("link", "<a>"),
                ("link", "<b>"),
                ("keep-alive", "timeout=5"),
                ("proxy-connection", "close"),
                ("proxy-authenticate", "Basic"),
                ("proxy-authorization", "Basic eA=="),
                ("transfer-encoding", "chunked"),
                ("te", "trailers"),
                ("upgrade", "h2c"),
                ("age", "5"),
                ("trailer", "x-sum"),
                ("cache-status", "cdn; hit"),
            ],
        );
        let kept: Vec<_> = storable(&head.headers)
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        assert_eq!(
            kept,
            [
                "content-type: text/plain",
                "link: <a>",
                "link: <b>",
                "trailer: x-sum",
                "cache-status: cdn; hit"
            ]
        );
    }

    #[test]
    fn a_repeated_length_is_merged() {
        let cases = [(&["5", "5"][..], &["5"][..]), (&["5, 05"], &["5"]), (&["05"], &["05"]), (&[], &[])];
        for (lines, once) in cases.into_iter().chain([(&["5", "6"][..], &["5", "6"][..])]) {
            let lines: Vec<_> = lines.iter().map(|line| ("content-length", *line)).collect();
            let mut headers = head(200, &lines).headers;
            say_length_once(&mut headers);
            assert_eq!(headers.get_all("content-length").iter().collect::<Vec<_>>(), once, "{lines:?}");
        }
    }

    #[test]
    fn a_length_is_one_number() {
        let length = |lines: &[&str]| {
            let headers: Vec<_> = lines.iter().map(|line| ("content-length", *line)).collect();
            content_length(&head(200, &headers).headers)
        };
        assert_eq!(length(&[]), Ok(None));
        assert_eq!(length(&["5"]), Ok(Some(5)));
        assert_eq!(length(&["5, 5", "5"]), Ok(Some(5)), "RFC 9110, 8.6");
        for lines in [&["5", "6"][..], &["5, 6"], &["+5"], &[""], &["5,"], &["18446744073709551616"]] {
            assert_eq!(length(lines), Err(Unsound), "B14: {lines:?}");
        }
    }
}
