//! The time for a request grows linearly with the length of its head, so that one client cannot stop a server with a single header (C15).

use std::time::{Duration, Instant};

use http::{HeaderName, HeaderValue, Request};
use http_body_util::Full;
use stampede_guard::http::HttpPolicy;
use tower::ServiceExt as _;

use super::kit::{Inner, Shop, ask, get, policy, request, respond, shop_with, whole};

/// The length of a header value here. A server accepts some hundred thousand bytes. At this length a quadratic parser takes ten seconds on
/// this machine, and a linear one some milliseconds.
const LENGTH: usize = 64 * 1024;
const LONG: Duration = Duration::from_secs(4);

/// Patterns that are repeated to a long value: pieces of lists and strings, and their escapes.
const PATTERNS: [&str; 22] = [
    "a", " ", ",", "a,", ", a", "\"", "\"a\",", "\\", "\\\"", "\"\\\"", "\\\\\"", ";", "a;", "=", "a=",
    "a=\"", "a;q=0.5,", "W/", "W/\"", "0-0,", ":", "/.",
];
/// The text around the number of each member, for lists in which all members are different.
const NUMBERED: [(&str, &str); 5] = [("a", ""), ("a", "=1"), ("\"a", "\""), ("W/\"", "\""), ("a", ";q=0.5")];
/// Texts with which the value begins, so that it passes the first check of the header's parser.
fn beginnings(name: &str) -> &'static [&'static str] {
    match name {
        "cache-control" => &["", "\"", "max-age=\""],
        "range" => &["", "bytes="],
        _ => &["", "\""],
    }
}

const OF_REQUESTS: [&str; 17] = [
    "accept",
    "accept-encoding",
    "accept-language",
    "cache-control",
    "connection",
    "content-length",
    "host",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "origin",
    "pragma",
    "range",
    "te",
    "user-agent",
    "x-forwarded-host",
    "x-other",
];
const OF_RESPONSES: [&str; 17] = [
    "age",
    "cache-control",
    "cdn-cache-control",
    "connection",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "location",
    "pragma",
    "trailer",
    "vary",
];

/// For each of these names, headers with a long value, and a description of each.
fn fields(names: &[&'static str]) -> impl Iterator<Item = (HeaderName, HeaderValue, String)> {
    names.iter().flat_map(|&name| {
        let repeated = PATTERNS.into_iter().flat_map(move |pattern| {
            beginnings(name).iter().map(move |beginning| {
                let value = format!("{beginning}{}", pattern.repeat(LENGTH / pattern.len()));
                (value, format!("{beginning}, and {pattern} again and again"))
            })
        });
        let numbered = NUMBERED.into_iter().map(|(before, after)| {
            let members = (0..LENGTH / 8).map(|n| format!("{before}{n}{after}"));
            (members.collect::<Vec<_>>().join(", "), format!("{before}1{after}, {before}2{after} and so on"))
        });
        let values = repeated.chain(numbered);
        values.map(move |(value, what)| (HeaderName::from_static(name), value.parse().unwrap(), what))
    })
}

fn shops(inner: &Inner) -> [Shop; 3] {
    let careful = HttpPolicy::default().share_cookies(true).share_authorized(true);
    [careful, HttpPolicy::strict(), HttpPolicy::private()].map(|http| shop_with(inner, policy().http(http)))
}

/// C15
#[tokio::test]
async fn the_cost_of_a_request_is_linear_in_its_head() {
    for (name, value, what) in fields(&OF_REQUESTS) {
        // The response is stored, compared with the next request, has validators, and varies on just this field.
        let vary = name.to_string();
        let inner = Inner::with(move |_, _| {
            let head = [
                ("vary", vary.as_str()),
                ("etag", "\"e\""),
                ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT"),
                ("cache-control", "public, max-age=60"),
            ];
            Ok(respond(200, &head, whole("text")))
        });
        for shop in shops(&inner) {
            ask(&shop, get("/")).await;
            let mut request = get("/");
            request.headers_mut().insert(&name, value.clone());
            let since = Instant::now();
            ask(&shop, request).await;
            assert!(since.elapsed() < LONG, "{name}: {what}: {:?}", since.elapsed());
        }
    }
}

/// C15
#[tokio::test]
async fn the_cost_of_a_response_is_linear_in_its_head() {
    for (name, value, what) in fields(&OF_RESPONSES) {
        let inner = Inner::with({
            let name = name.clone();
            move |_, _| {
                let mut response = respond(200, &[("cache-control", "max-age=60")], whole("text"));
                response.headers_mut().insert(&name, value.clone());
                Ok(response)
            }
        });
        for shop in shops(&inner) {
            for method in ["GET", "HEAD", "PUT"] {
                let since = Instant::now();
                // Only the head matters. The body may be broken, because the header may state a wrong length.
                shop.clone().oneshot(request(method, "/", &[])).await.unwrap();
                assert!(since.elapsed() < LONG, "{method}, {name}: {what}: {:?}", since.elapsed());
            }
        }
    }
}

/// C15
#[tokio::test]
async fn the_cost_of_a_target_is_linear_in_its_length() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=60")]);
    let shops = shops(&inner);
    for pattern in ["/", "/.", "/..", "/a/..", "%41", "%", ":", "a", "?", "&a=", ";", "//"] {
        for beginning in ["/", "/?", "http://shop.example/"] {
            let uri = format!("{beginning}{}", pattern.repeat(LENGTH / 2 / pattern.len()));
            for (shop, method) in
                shops.iter().flat_map(|shop| ["GET", "GET", "PUT"].map(|method| (shop, method)))
            {
                let request = Request::builder().method(method).uri(&uri).header("host", "shop.example");
                let request = request.body(Full::default()).unwrap();
                let since = Instant::now();
                ask(shop, request).await;
                assert!(
                    since.elapsed() < LONG,
                    "{method} {beginning}, {pattern} again and again: {:?}",
                    since.elapsed()
                );
            }
        }
    }
}
