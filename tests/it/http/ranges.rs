//! Parts of responses (RFC 9110, 14; RFC 9111, 3.3 and 3.4).

use stampede_guard::http::HttpPolicy;
use tower::ServiceExt as _;

use super::kit::{
    Down, Inner, Req, all, ask, get, policy, read, request, respond, secs, send, send_many, sent, settle,
    shop, shop_with, whole,
};

const WHOLE: &str = "0123456789";
const CHANGED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

fn part(range: &str) -> Req {
    request("GET", "/", &[("range", range)])
}

/// An origin of ten digits, whose tag is `tag`, and which answers requests for parts of them.
fn digits(tag: &'static str) -> Inner {
    Inner::with(move |_, request| {
        let lasting = ("cache-control", "max-age=60");
        let Some(range) = sent(request, "range").strip_prefix("bytes=") else {
            return Ok(respond(200, &[("etag", tag), lasting], whole(WHOLE)));
        };
        let (first, last) = range.split_once('-').unwrap();
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
        let range = format!("bytes {first}-{last}/10");
        Ok(respond(206, &[("etag", tag), lasting, ("content-range", &range)], whole(&WHOLE[first..=last])))
    })
}

#[tokio::test(start_paused = true)]
async fn a_stored_response_answers_for_each_of_its_parts() {
    let headers = [("etag", "\"a\""), ("last-modified", CHANGED), ("cache-control", "max-age=60")];
    let inner = Inner::with(move |_, _| Ok(respond(200, &headers, whole(WHOLE))));
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    let parts = [
        ("bytes=0-3", "0123", "bytes 0-3/10"),
        ("bytes=4-6", "456", "bytes 4-6/10"),
        ("bytes=9-9", "9", "bytes 9-9/10"),
        ("bytes=7-", "789", "bytes 7-9/10"),
        ("bytes=7-99", "789", "bytes 7-9/10"),
        ("bytes=-3", "789", "bytes 7-9/10"),
        ("bytes=-99", WHOLE, "bytes 0-9/10"),
        ("Bytes=0-0", "0", "bytes 0-0/10"),
    ];
    for (range, text, content_range) in parts {
        let seen = ask(&shop, part(range)).await;
        assert_eq!((seen.status, seen.text()), (206, text), "{range}");
        assert_eq!(seen.header("content-range"), Some(content_range), "{range}");
        assert_eq!(seen.header("content-length"), Some(text.len().to_string().as_str()), "{range}");
        assert_eq!((seen.header("etag"), seen.remark().as_str()), (Some("\"a\""), "hit; ttl=60"), "{range}");
    }
    for range in ["bytes=0-1,3-4", "bytes=3-1", "bytes=a-b"] {
        let seen = ask(&shop, part(range)).await;
        assert_eq!((seen.status, seen.text()), (200, WHOLE), "{range}: a server may ignore any");
    }
    for range in ["bytes=10-", "bytes=99-100", "bytes=-0"] {
        let seen = ask(&shop, part(range)).await;
        assert_eq!((seen.status, seen.text()), (416, ""), "{range}");
        assert_eq!(seen.header("content-range"), Some("bytes */10"), "{range}");
    }
    assert_eq!(inner.calls(), 1);
}

/// RFC 9110, 14.2 allows a server to ignore an invalid range. Such a request is treated as one for the whole (C9).
#[tokio::test(start_paused = true)]
async fn requests_with_an_invalid_range_coalesce_like_plain_requests() {
    let ranges = ["bytes=3-1", "bytes=a-b", "bytes=", "bytes", "bytes=0-1,x", "bytes=-", "bytes=0-1,5-4"];
    let inner = Inner::with(|n, request| {
        assert_eq!(sent(request, "range"), "", "the whole is requested from the origin");
        Ok(respond(200, &[], whole(n.to_string())))
    })
    .held();
    let shop = shop(&inner);
    let mut asking: Vec<_> = ranges.iter().map(|range| send(&shop, part(range))).collect();
    asking.push(send(&shop, get("/")));
    settle().await;
    inner.gate.open();
    for seen in all(asking).await {
        assert_eq!((seen.status, seen.text()), (200, "1"));
    }
    assert_eq!(inner.calls(), 1);
    for range in ranges {
        assert_eq!(ask(&shop, part(range)).await.remark(), "hit; ttl=60", "{range}");
    }
}

#[tokio::test(start_paused = true)]
async fn if_range_gives_the_part_to_clients_with_the_same_representation() {
    let inner = digits("\"a\"");
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    for (tag, status, text) in [("\"a\"", 206, "0123"), ("\"b\"", 200, WHOLE), ("W/\"a\"", 200, WHOLE)] {
        let seen = ask(&shop, request("GET", "/", &[("range", "bytes=0-3"), ("if-range", tag)])).await;
        assert_eq!((seen.status, seen.text()), (status, text), "{tag}");
    }
    // A client that has the whole representation already is answered 304, not with a part.
    let has_it = [("range", "bytes=0-3"), ("if-none-match", "\"a\"")];
    assert_eq!(ask(&shop, request("GET", "/", &has_it)).await.status, 304);
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn parts_are_stored_and_joined_by_a_strong_validator() {
    let inner = digits("\"a\"");
    let shop = shop(&inner);
    let calls = |n: usize| assert_eq!(inner.calls(), n);
    let seen = ask(&shop, part("bytes=0-4")).await;
    assert_eq!((seen.status, seen.text()), (206, "01234"));
    // These parts lie within the stored part.
    for (range, text) in [("bytes=0-4", "01234"), ("bytes=1-2", "12"), ("bytes=4-4", "4")] {
        let seen = ask(&shop, part(range)).await;
        assert_eq!((seen.status, seen.text()), (206, text), "{range}");
        assert_eq!(seen.header("content-range"), Some(format!("bytes {}/10", &range[6..]).as_str()));
    }
    calls(1);
    // This part ends beyond the stored part.
    assert_eq!(ask(&shop, part("bytes=3-7")).await.text(), "34567");
    calls(2);
    assert_eq!(ask(&shop, part("bytes=0-7")).await.text(), "01234567", "out of both");
    calls(2);
    assert_eq!(ask(&shop, part("bytes=8-9")).await.text(), "89");
    calls(3);
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.status, seen.text(), seen.header("content-range")), (200, WHOLE, None));
    assert_eq!(ask(&shop, part("bytes=-2")).await.text(), "89");
    calls(3);
}

/// RFC 9111, 5.2.2.4: a joined response has no field that the newer part's `no-cache` withholds.
#[tokio::test(start_paused = true)]
async fn a_field_withheld_by_a_later_part_is_not_sent_with_the_whole() {
    let inner = Inner::with(|n, request| {
        let range = sent(request, "range").replace('=', " ") + "/10";
        let (control, name) = match n {
            1 => ("max-age=60", "x-user"),
            _ => ("max-age=60, no-cache=\"x-user\"", "x-other"),
        };
        let headers = [("etag", "\"a\""), ("cache-control", control), ("content-range", &range), (name, "7")];
        Ok(respond(206, &headers, whole(["01234", "56789"][n - 1])))
    });
    let shop = shop_with(&inner, policy().http(HttpPolicy::strict()));
    assert_eq!(ask(&shop, part("bytes=0-4")).await.header("x-user"), Some("7"));
    ask(&shop, part("bytes=5-9")).await;
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.text(), seen.header("x-user"), seen.header("x-other")), (WHOLE, None, Some("7")));
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn parts_of_a_weak_validator_are_never_put_together() {
    for tag in ["W/\"a\"", ""] {
        let inner = digits(tag);
        let shop = shop(&inner);
        ask(&shop, part("bytes=0-4")).await;
        ask(&shop, part("bytes=5-9")).await;
        assert_eq!(inner.calls(), 2, "{tag}");
        for range in ["bytes=3-6", "bytes=0-9"] {
            let seen = ask(&shop, part(range)).await;
            assert_eq!(seen.status, 206);
        }
        assert_eq!(inner.calls(), 4, "{tag}");
    }
}

#[tokio::test(start_paused = true)]
async fn parts_of_different_representations_are_never_put_together() {
    let inner = Inner::with(|n, request| {
        let (tag, text) = [("\"a\"", "a"), ("\"b\"", "b")][usize::from(n > 1)];
        let range = sent(request, "range").replace('=', " ") + "/10";
        let headers = [("etag", tag), ("cache-control", "max-age=60"), ("content-range", &range)];
        Ok(match sent(request, "range") {
            "" => respond(200, &headers[..2], whole(text.repeat(10))),
            _ => respond(206, &headers, whole(text.repeat(5))),
        })
    });
    let shop = shop(&inner);
    assert_eq!(ask(&shop, part("bytes=0-4")).await.text(), "aaaaa");
    assert_eq!(ask(&shop, part("bytes=5-9")).await.text(), "bbbbb");
    assert_eq!(ask(&shop, get("/")).await.text(), "b".repeat(10));
    assert_eq!(ask(&shop, part("bytes=0-4")).await.text(), "bbbbb");
    assert_eq!(inner.calls(), 3);
}

/// A5: variants in different languages may have the same `Last-Modified`, but it validates only parts of the same variant.
#[tokio::test(start_paused = true)]
async fn parts_of_different_variants_are_never_put_together() {
    let inner = Inner::with(|_, request| {
        let (language, range) =
            (sent(request, "accept-language"), sent(request, "range").replace('=', " ") + "/10");
        let headers = [
            ("vary", "accept-language"),
            ("last-modified", CHANGED),
            ("date", "Sun, 06 Nov 2094 08:49:37 GMT"),
            ("cache-control", "max-age=60"),
            ("content-range", &range),
        ];
        Ok(match sent(request, "range") {
            "" => respond(200, &headers[..4], whole(language.repeat(10))),
            _ => respond(206, &headers, whole(language.repeat(5))),
        })
    });
    let shop = shop(&inner);
    let ask = async |language: &str, range: &str| {
        let headers = [("accept-language", language), ("range", range)];
        let headers = if range.is_empty() { &headers[..1] } else { &headers };
        ask(&shop, request("GET", "/", headers)).await
    };
    for (language, range) in [("d", "bytes=0-4"), ("e", "bytes=5-9"), ("d", "bytes=0-4"), ("e", "bytes=5-9")]
    {
        let seen = ask(language, range).await;
        assert_eq!((seen.status, seen.text()), (206, language.repeat(5).as_str()), "A5: {language} {range}");
    }
    for language in ["d", "e"] {
        let seen = ask(language, "").await;
        assert_eq!((seen.status, seen.text()), (200, language.repeat(10).as_str()), "A5: {language}");
    }
}

/// A9
#[tokio::test(start_paused = true)]
async fn a_whole_is_never_answered_with_a_part() {
    let inner = digits("\"a\"");
    let shop = shop(&inner);
    ask(&shop, part("bytes=0-4")).await;
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.status, seen.text(), inner.calls()), (200, WHOLE, 2));
    assert_eq!(ask(&shop, part("bytes=5-9")).await.text(), "56789", "the whole has replaced the part");
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_head_is_not_answered_from_a_part_and_has_no_range() {
    let inner = digits("\"a\"");
    let shop = shop(&inner);
    ask(&shop, part("bytes=0-4")).await;
    let head = || request("HEAD", "/", &[("range", "bytes=0-3")]);
    assert_eq!(ask(&shop, request("HEAD", "/", &[])).await.remark(), "fwd=miss; detail=head");
    ask(&shop, get("/")).await;
    let seen = ask(&shop, head()).await;
    assert_eq!((seen.status, seen.text(), seen.header("content-length")), (200, "", Some("10")));
    assert_eq!(seen.header("content-range"), None, "RFC 9110, 14.2");
}

/// A4, A9: each request asks for a different part, so none can use the answer to another.
#[tokio::test(start_paused = true)]
async fn range_requests_on_a_cold_key_neither_wait_nor_are_waited_for() {
    let inner = digits("\"a\"").held();
    let shop = shop(&inner);
    let parts: Vec<_> = (0..10).map(|n| (n, send(&shop, part(&format!("bytes={n}-{n}"))))).collect();
    settle().await;
    assert_eq!(inner.loads.running(), 10);
    let plain = send_many(&shop, 10, "/");
    settle().await;
    let more: Vec<_> = (0..10).map(|n| (n, send(&shop, part(&format!("bytes={n}-{n}"))))).collect();
    settle().await;
    assert!(inner.loads.running() >= 20, "{} run: no part waits for the whole", inner.loads.running());
    inner.gate.open();
    for (n, seen) in parts.into_iter().chain(more) {
        let seen = seen.await.unwrap();
        assert_eq!((seen.status, seen.text()), (206, n.to_string().as_str()), "its own part");
    }
    for seen in all(plain).await {
        assert_eq!((seen.status, seen.text()), (200, WHOLE));
    }
    let calls = inner.calls();
    assert_eq!(calls, 21, "and all the others cost one load");
    assert_eq!(ask(&shop, get("/")).await.text(), WHOLE);
    assert_eq!(inner.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn a_part_with_a_wrong_content_range_is_not_stored() {
    let wrong = ["bytes 0-3/10", "bytes 4-2/10", "lines 0-4/10", "bytes 0-4/3", ""];
    for content_range in wrong {
        let inner = Inner::with(move |n, _| {
            let headers =
                [("etag", "\"a\""), ("cache-control", "max-age=60"), ("content-range", content_range)];
            let headers = if content_range.is_empty() { &headers[..2] } else { &headers };
            Ok(respond(206, headers, whole(format!("{n}1234"))))
        });
        let shop = shop_with(&inner, policy().http(HttpPolicy::default()));
        for n in 1..=3 {
            let seen = ask(&shop, part("bytes=0-4")).await;
            assert_eq!((seen.status, seen.text()), (206, format!("{n}1234").as_str()), "{content_range}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_about_a_range_is_not_stored_for_the_resource() {
    let inner = Inner::with(|n, request| {
        let ranged = !sent(request, "range").is_empty();
        let headers = [("cache-control", "max-age=60")];
        Ok(respond(if ranged { 416 } else { 200 }, &headers, whole(n.to_string())))
    });
    let shop = shop(&inner);
    assert_eq!(ask(&shop, part("bytes=5-9")).await.status, 416);
    assert_eq!(ask(&shop, part("bytes=5-9")).await.status, 416);
    let clients = send_many(&shop, 10, "/");
    assert!(all(clients).await.iter().all(|seen| (seen.status, seen.text()) == (200, "3")), "no marker");
    assert_eq!(inner.calls(), 3);
}

/// A4, A5: a part does not stand in for another variant either.
#[tokio::test(start_paused = true)]
async fn a_part_stands_in_for_no_whole() {
    for (language, failure) in [("d", 503), ("e", 503), ("d", 0), ("e", 0)] {
        let inner = Inner::with(move |n, _| {
            let control = "max-age=10, stale-if-error=60";
            let headers = [
                ("etag", "\"a\""),
                ("cache-control", control),
                ("vary", "accept-language"),
                ("content-range", "bytes 0-4/10"),
            ];
            match (n, failure) {
                (1, _) => Ok(respond(206, &headers, whole("01234"))),
                (_, 0) => Err(Down("no route".into())),
                (_, status) => Ok(respond(status, &[], whole("sorry"))),
            }
        });
        let shop = shop(&inner);
        let first = request("GET", "/", &[("accept-language", "d"), ("range", "bytes=0-4")]);
        ask(&shop, first).await;
        tokio::time::sleep(secs(12)).await;
        let seen = shop.clone().oneshot(request("GET", "/", &[("accept-language", language)])).await;
        match (seen, failure) {
            (Err(Down(text)), 0) => assert_eq!(text, "no route"),
            (Ok(seen), _) => {
                let seen = read(seen).await;
                assert_eq!((seen.status, seen.text()), (503, "sorry"), "{language}: what the origin said");
            }
            (seen, _) => panic!("{language}: {:?}", seen.map(|seen| seen.status())),
        }
    }
}

/// Each part is short enough to be stored, but all parts together are as long as the whole film, which is too long.
#[tokio::test(start_paused = true)]
async fn parts_are_joined_up_to_max_body() {
    let inner = digits("\"a\"");
    let shop = shop_with(&inner, policy().max_body(6));
    for (range, calls) in
        [("bytes=0-2", 1), ("bytes=3-5", 2), ("bytes=0-5", 2), ("bytes=6-8", 3), ("bytes=6-7", 3)]
    {
        let seen = ask(&shop, part(range)).await;
        assert_eq!((seen.status, inner.calls()), (206, calls), "{range}");
    }
    ask(&shop, part("bytes=0-2")).await;
    assert_eq!(inner.calls(), 4, "the newer part was stored, alone");
}
