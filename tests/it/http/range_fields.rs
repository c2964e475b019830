//! The fields of a part of a stored response, and the guard's own 416 (RFC 9110, 14 and 15.5.17; RFC 9530).

use super::kit::{Feed, Inner, Req, Seen, ask, get, request, respond, sent, shop, whole};

const WHOLE: &str = "0123456789";
const CHANGED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

fn part(range: &str) -> Req {
    request("GET", "/", &[("range", range)])
}

/// RFC 9530, 2, and RFC 1864: both digests are of one message's content, so a part that the guard cuts or joins has
/// neither. `Repr-Digest` (RFC 9530, 3) is of the whole, whichever part is sent.
#[tokio::test(start_paused = true)]
async fn digests_of_the_content_are_not_sent_with_other_content() {
    let digests = |seen: &Seen| {
        ["content-digest", "content-md5", "repr-digest"]
            .map(|name| seen.header(name).unwrap_or_default().to_owned())
    };
    const REPR: (&str, &str) = ("repr-digest", "of-the-whole");
    let inner = Inner::with(|_, request| {
        let common = [("etag", "\"a\""), ("cache-control", "max-age=60"), REPR];
        let range = sent(request, "range");
        let (first, last) = match range.strip_prefix("bytes=").and_then(|range| range.split_once('-')) {
            Some((first, last)) => (first.parse().unwrap(), last.parse().unwrap()),
            None => (0, 9),
        };
        let (part, content) = (format!("bytes {first}-{last}/10"), format!("of-{first}-{last}"));
        let own = [("content-digest", &*content), ("content-md5", &*content), ("content-range", &part)];
        let (status, own) = if range.is_empty() { (200, &own[..2]) } else { (206, &own[..]) };
        let headers: Vec<_> = common.iter().chain(own).copied().collect();
        Ok(respond(status, &headers, whole(&WHOLE[first..=last])))
    });
    let fields = |content: &str| [content.to_owned(), content.to_owned(), REPR.1.to_owned()];

    let cut = shop(&inner);
    assert_eq!(digests(&ask(&cut, get("/")).await), fields("of-0-9"), "the origin's own");
    assert_eq!(digests(&ask(&cut, get("/")).await), fields("of-0-9"), "the same content");
    assert_eq!(digests(&ask(&cut, part("bytes=0-3")).await), fields(""), "cut out of the whole");
    let has_it = request("GET", "/", &[("if-none-match", "\"a\"")]);
    assert_eq!(digests(&ask(&cut, has_it).await), fields(""), "a 304 has no content");
    assert_eq!(inner.calls(), 1);

    let parts = shop(&inner);
    for _ in 0..2 {
        assert_eq!(digests(&ask(&parts, part("bytes=0-4")).await), fields("of-0-4"), "as it came");
    }
    assert_eq!(digests(&ask(&parts, part("bytes=1-2")).await), fields(""), "narrowed");
    assert_eq!(digests(&ask(&parts, part("bytes=3-7")).await), fields("of-3-7"), "the origin's own");
    assert_eq!(digests(&ask(&parts, part("bytes=0-7")).await), fields(""), "joined");
    assert_eq!(digests(&ask(&parts, part("bytes=0-4")).await), fields(""), "narrowed, of what was joined");
    ask(&parts, part("bytes=8-9")).await;
    let seen = ask(&parts, get("/")).await;
    assert_eq!((seen.text(), digests(&seen)), (WHOLE, fields("")), "joined to the whole");
    assert_eq!(inner.calls(), 4);
}

/// A trailer may contain a digest too (RFC 9530, 2), and each of the joined parts has its own.
#[tokio::test(start_paused = true)]
async fn the_trailers_of_a_part_are_not_sent_with_joined_parts() {
    let inner = Inner::with(|n, request| {
        let range = sent(request, "range").replace('=', " ") + "/10";
        let headers = [("etag", "\"a\""), ("cache-control", "max-age=60"), ("content-range", &range)];
        let (feed, body) = Feed::new();
        feed.data(["01234", "56789"][n - 1]);
        feed.trailers("content-digest", ["of-0-4", "of-5-9"][n - 1]);
        Ok(respond(206, &headers, body))
    });
    let shop = shop(&inner);
    for range in ["bytes=0-4", "bytes=5-9"] {
        let seen = ask(&shop, part(range)).await;
        assert_eq!(seen.trailers.map(|trailers| trailers.len()), Some(1), "{range}: the origin's own");
    }
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.text(), &seen.trailers, inner.calls()), (WHOLE, &None, 2));
}

/// A browser hides a 416 without `Access-Control-Allow-Origin` from a script. Regression: a player saw a network error
/// instead.
#[tokio::test(start_paused = true)]
async fn the_guards_own_416_has_the_stored_fields_except_those_of_the_content() {
    let retained = [
        ("access-control-allow-origin", "*"),
        ("access-control-expose-headers", "content-range"),
        ("cross-origin-resource-policy", "cross-origin"),
        ("etag", "\"a\""),
        ("vary", "origin"),
        ("x-content-type-options", "nosniff"),
    ];
    let left_out = [
        ("cache-control", "max-age=60"),
        ("cdn-cache-control", "max-age=60"),
        ("expires", "Sun, 06 Nov 2094 08:49:37 GMT"),
        ("content-digest", "d"),
        ("content-encoding", "identity"),
        ("content-language", "de"),
        ("content-type", "video/mp4"),
        ("last-modified", CHANGED),
    ];
    let headers: Vec<_> = retained.into_iter().chain(left_out).collect();
    let inner = Inner::with(move |_, _| Ok(respond(200, &headers, whole(WHOLE))));
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    let seen = ask(&shop, part("bytes=10-")).await;
    assert_eq!((seen.status, seen.text(), seen.header("content-range")), (416, "", Some("bytes */10")));
    assert_eq!((seen.header("content-length"), seen.header("accept-ranges")), (Some("0"), Some("bytes")));
    for (name, value) in retained {
        assert_eq!(seen.header(name), Some(value), "{name}");
    }
    // With a lifetime, a cache on the way might store the 416 instead of the resource (RFC 9111, 3).
    for (name, _) in left_out {
        assert_eq!(seen.header(name), None, "{name}");
    }
    assert_eq!((seen.remark().as_str(), inner.calls()), ("hit; ttl=60", 1));
}
