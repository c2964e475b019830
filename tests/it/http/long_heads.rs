//! What a head costs grows with its length, and no faster: one client must not stop a server by a single header (C15).

use std::time::{Duration, Instant};

use http::{HeaderName, HeaderValue, Request};
use http_body_util::Full;
use stampede_guard::http::HttpPolicy;
use tower::ServiceExt as _;

use super::kit::{Inner, Shop, ask, get, policy, request, respond, shop_with, whole};

/// A server takes some hundred thousand bytes; at this length what grows with the square takes ten seconds here, and what
/// grows with the length some milliseconds.
const LENGTH: usize = 64 * 1024;
const LONG: Duration = Duration::from_secs(4);

/// What lists, strings and their escapes are made of.
const PATTERNS: [&str; 22] = [
    "a", " ", ",", "a,", ", a", "\"", "\"a\",", "\\", "\\\"", "\"\\\"", "\\\\\"", ";", "a;", "=", "a=",
    "a=\"", "a;q=0.5,", "W/", "W/\"", "0-0,", ":", "/.",
];
/// What stands around the number of a member in lists whose members all differ.
const NUMBERED: [(&str, &str); 5] = [("a", ""), ("a", "=1"), ("\"a", "\""), ("W/\"", "\""), ("a", ";q=0.5")];
/// What it may begin with, so that a reader gets to it.
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

/// Fields of these names, each with a long value, and what that is.
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
async fn no_request_takes_longer_than_its_head_is_long() {
    for (name, value, what) in fields(&OF_REQUESTS) {
        // It is stored, is compared with the next, has validators, and is about just this field.
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
async fn no_response_takes_longer_than_its_head_is_long() {
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
                // The head is enough: with a length that lies there is no whole body.
                shop.clone().oneshot(request(method, "/", &[])).await.unwrap();
                assert!(since.elapsed() < LONG, "{method}, {name}: {what}: {:?}", since.elapsed());
            }
        }
    }
}

/// C15
#[tokio::test]
async fn no_target_takes_longer_than_it_is_long() {
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
