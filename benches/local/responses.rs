//! The response that is stored: eight headers and 1 KiB.

use std::sync::LazyLock;
use std::time::SystemTime;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Request, Response, Uri};
use http_body_util::Full;

/// The body of every response.
const BODY: [u8; 1024] = [b'v'; 1024];

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_TYPE, "application/json"),
    (header::CACHE_CONTROL, "public, max-age=3600"),
    (header::ETAG, "\"33a64df551425fcc55e4d42a148795d9f25f89d4\""),
    (header::LAST_MODIFIED, "Tue, 15 Nov 1994 12:45:26 GMT"),
    (header::CONTENT_LANGUAGE, "en"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
];

/// How many headers a hit has: the eight stored ones, and the guard's `Cache-Status` and `Age`.
pub(crate) const HEADERS_OF_A_HIT: usize = 10;

/// The eight headers of the response.
pub(crate) fn headers() -> HeaderMap {
    // This is the current time, because a response that claims to be old is not stored.
    static DATE: LazyLock<HeaderValue> = LazyLock::new(|| {
        HeaderValue::try_from(httpdate::fmt_http_date(SystemTime::now())).expect("a date is printable")
    });
    let mut headers = HeaderMap::with_capacity(HEADERS.len() + 2);
    headers.insert(header::DATE, DATE.clone());
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(BODY.len()));
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
}

/// The same headers with values that are not static, as if the response came from elsewhere: cloning such a value counts a reference.
pub(crate) fn owned(headers: &HeaderMap) -> HeaderMap {
    let owned = |value: &HeaderValue| HeaderValue::from_bytes(value.as_bytes()).expect("it is one");
    headers.iter().map(|(name, value)| (name.clone(), owned(value))).collect()
}

pub(crate) fn body() -> Bytes {
    Bytes::from_static(&BODY)
}

pub(crate) fn response(headers: HeaderMap, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.headers_mut() = headers;
    response
}

/// A request for a URI that was parsed before, as a server has already done when it calls its services.
pub(crate) fn request(uri: &Uri) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    *request.uri_mut() = uri.clone();
    request.headers_mut().insert(header::HOST, HeaderValue::from_static("shop.example"));
    request
}
