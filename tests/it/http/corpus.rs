//! Runs exchanges that a fuzzer has put into its corpus, and random ones.

use std::fs;

use proptest::prelude::*;

use super::fuzzed;

#[test]
fn everything_in_the_corpus_holds() {
    let corpus = crate::support::root().join("tests/corpus/exchange");
    let mut files: Vec<_> = fs::read_dir(corpus).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 20, "the corpus is there");
    for file in files {
        let text = fs::read(&file).unwrap();
        let held = std::panic::catch_unwind(|| fuzzed::run(&text));
        assert!(held.is_ok(), "{}", file.display());
    }
}

const REQUEST_LINES: &[&str] = &[
    "host: shop.example",
    "host: a, b",
    "authorization: x",
    "cookie: a=b",
    "x-api-key: k",
    "accept-language: de",
    "accept-language: en;q=0.5, de",
    "accept-encoding: gzip",
    "range: bytes=0-3",
    "range: bytes=-2",
    "range: bytes=3-",
    "range: bytes=99-",
    "range: bytes=5-2",
    "if-range: \"a\"",
    "if-none-match: \"a\"",
    "if-none-match: W/\"a\", \"b\"",
    "if-none-match: *",
    "if-modified-since: Sun, 06 Nov 1994 08:49:37 GMT",
    "cache-control: no-cache",
    "cache-control: max-age=0",
    "cache-control: only-if-cached",
    "cache-control: max-stale, min-fresh=4",
    "pragma: no-cache",
    "te: trailers",
];

const RESPONSE_LINES: &[&str] = &[
    "cache-control: max-age=60",
    "cache-control: public, s-maxage=60",
    "cache-control: private",
    "cache-control: private=\"set-cookie\", max-age=5",
    "cache-control: no-store",
    "cache-control: no-cache",
    "cache-control: no-cache=\"x\"",
    "cache-control: max-age=60, must-revalidate",
    "cache-control: max-age=0, stale-while-revalidate=60",
    "cache-control: max-age=60, stale-if-error=9",
    "cache-control: must-understand, no-store, max-age=60",
    "cache-control: max-age=\"60\", max-age=5",
    "cache-control: ,,=,\"",
    "cdn-cache-control: max-age=60",
    "cdn-cache-control: no-store",
    "cdn-cache-control: max-age=?1",
    "expires: 0",
    "expires: Sun, 06 Nov 2094 08:49:37 GMT",
    "age: 5",
    "age: 5, 5",
    "vary: accept-language",
    "vary: Accept-Encoding, x",
    "vary: *",
    "etag: \"a\"",
    "etag: W/\"a\"",
    "last-modified: Sun, 06 Nov 1994 08:49:37 GMT",
    "content-language: de",
    "content-length: 10",
    "content-length: 3",
    "content-range: bytes 0-9/10",
    "content-range: bytes 0-3/10",
    "content-range: bytes 3-12/*",
    "content-type: text/event-stream",
    "set-cookie: a=b",
    "connection: close, x",
    "x: 1",
    "pragma: no-cache",
    "location: /b",
    "content-location: /a",
];

fn lines(all: &'static [&'static str]) -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::sample::select(all), 0..5).prop_map(|lines| lines.join("\n") + "\n")
}

fn exchanges() -> impl Strategy<Value = String> {
    let methods = proptest::sample::select(&["GET", "GET", "GET", "HEAD", "POST", "DELETE"][..]);
    let statuses = proptest::sample::select(&[200, 200, 200, 206, 204, 301, 304, 404, 416, 500, 599][..]);
    let parts = (methods, lines(REQUEST_LINES), statuses, lines(RESPONSE_LINES));
    parts.prop_map(|(method, request, status, response)| {
        format!("{method} /a?b\nhost: shop.example\n{request}\n{status}\n{response}\n0123456789")
    })
}

proptest! {
    #[test]
    fn a_generated_exchange_passes(text in exchanges()) {
        fuzzed::run(text.as_bytes());
    }

    #[test]
    fn a_damaged_exchange_passes(text in exchanges(), at in 0usize..400, byte: u8) {
        let mut text = text.into_bytes();
        let length = text.len();
        text[at % length] = byte;
        fuzzed::run(&text);
    }

    #[test]
    fn any_bytes_hold(text in proptest::collection::vec(0u8.., 0..300)) {
        fuzzed::run(&text);
    }
}
