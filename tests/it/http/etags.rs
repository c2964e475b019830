//! `HttpPolicy::etag`: a stored response without an `ETag` has one, by a digest of its body.

use http::Response;
use stampede_guard::http::HttpPolicy;

use super::kit::{
    Boxed, Feed, Inner, Req, Shop, all, ask, get, policy, replicas, replicas_with, request, respond, secs,
    send, sent, settle, whole,
};

const CHANGED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

fn tagging(inner: &Inner) -> Vec<Shop> {
    replicas_with(2, inner, policy().http(HttpPolicy::default().etag(true)))
}

fn body(text: &'static str) -> Inner {
    Inner::with(move |_, _| Ok(respond(200, &[("cache-control", "max-age=60")], whole(text))))
}

/// A GET by a client that has the representation with this tag.
fn having(tag: &str) -> Req {
    request("GET", "/", &[("if-none-match", tag)])
}

/// The `ETag` of the response to this request.
async fn tag(shop: &Shop, request: Req) -> Option<String> {
    ask(shop, request).await.header("etag").map(str::to_owned)
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_no_response_has_a_tag_of_the_guard() {
    for shop in replicas(2, &body("text")) {
        assert_eq!(tag(&shop, get("/")).await, None);
        assert_eq!(ask(&shop, having("*")).await.status, 304, "RFC 9110, 13.1.2");
    }
}

#[tokio::test(start_paused = true)]
async fn the_tag_is_the_same_in_each_process_and_answers_conditions_from_memory() {
    let inner = body("text");
    let shops = tagging(&inner);
    let led = tag(&shops[0], get("/")).await.expect("its body was whole with its head");
    assert!(led.starts_with("W/\"") && led.len() == "W/\"\"".len() + 32, "{led}");
    for shop in &shops {
        assert_eq!(tag(shop, get("/")).await.as_ref(), Some(&led));
        assert_eq!(tag(shop, request("HEAD", "/", &[])).await.as_ref(), Some(&led));
        for condition in [led.clone(), format!("\"other\", {led}"), led.trim_start_matches("W/").to_owned()] {
            let seen = ask(shop, having(&condition)).await;
            assert_eq!((seen.status, seen.header("etag"), seen.text()), (304, Some(&*led), ""));
            assert_eq!(seen.remark(), "hit; ttl=60");
        }
        assert_eq!(ask(shop, having("\"other\"")).await.text(), "text");
        let part = request("GET", "/", &[("range", "bytes=0-0"), ("if-range", &led)]);
        assert_eq!(ask(shop, part).await.text(), "text", "RFC 9110, 13.1.5: a weak tag serves no part");
    }
    assert_eq!(inner.calls(), 1);
}

/// The load after the freshness returns the same body twice, and then another one.
#[tokio::test(start_paused = true)]
async fn the_tag_is_that_of_the_content_whatever_load_returned_it() {
    let lasting = [("cache-control", "max-age=60")];
    let inner = Inner::in_turn(["same", "same", "new"].map(|text| respond(200, &lasting, whole(text))));
    let shops = tagging(&inner);
    let first = tag(&shops[0], get("/")).await.unwrap();
    tokio::time::sleep(secs(61)).await;
    let led = ask(&shops[1], having(&first)).await;
    assert_eq!((led.status, led.remark()), (304, "fwd=stale; stored; ttl=60".to_owned()));
    assert_eq!(ask(&shops[0], having(&first)).await.status, 304);
    tokio::time::sleep(secs(61)).await;
    let led = ask(&shops[1], having(&first)).await;
    assert_eq!((led.status, led.text()), (200, "new"));
    assert_ne!(led.header("etag"), Some(&*first));
    assert_eq!(tag(&shops[0], get("/")).await.as_deref(), led.header("etag"));
}

#[tokio::test(start_paused = true)]
async fn the_clients_of_a_streamed_load_get_no_tag_and_later_ones_do() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[("cache-control", "max-age=60")], body)]);
    let shops = tagging(&inner);
    let leader = send(&shops[0], get("/"));
    settle().await;
    feed.data("text");
    settle().await;
    drop(feed);
    assert_eq!(all(vec![leader]).await[0].header("etag"), None);
    let stored = tag(&shops[0], get("/")).await.expect("the stored body is whole");
    assert_eq!(tag(&shops[1], get("/")).await, Some(stored));
}

/// The digest is of the stored bytes, and of the fields that tell representations apart.
#[tokio::test(start_paused = true)]
async fn each_representation_has_a_tag_of_its_own_which_is_strong_if_it_is_coded() {
    let inner = Inner::with(|_, request| {
        let vary = ("vary", "accept-encoding, accept");
        let lasting = ("cache-control", "max-age=60");
        let kind =
            ("content-type", if sent(request, "accept") == "text/css" { "text/css" } else { "text/plain" });
        Ok(match sent(request, "accept-encoding") {
            "gzip" => respond(200, &[vary, lasting, kind, ("content-encoding", "gzip")], whole("coded")),
            _ => respond(200, &[vary, lasting, kind], whole("text")),
        })
    });
    let shops = tagging(&inner);
    let of = |coding, accept| request("GET", "/", &[("accept-encoding", coding), ("accept", accept)]);
    let mut tags = Vec::new();
    for (coding, accept) in [("identity", "text/plain"), ("gzip", "text/plain"), ("identity", "text/css")] {
        let led = tag(&shops[0], of(coding, accept)).await.unwrap();
        assert_eq!(led.starts_with("W/"), coding == "identity", "{led}");
        assert_eq!(tag(&shops[1], of(coding, accept)).await.as_ref(), Some(&led));
        assert!(!tags.contains(&led), "{led}");
        tags.push(led);
    }
    let coded = tags[1].as_str();
    let fields = [("accept-encoding", "gzip"), ("accept", "text/plain"), ("range", "bytes=0-1")];
    let part = request("GET", "/", &[fields[0], fields[1], fields[2], ("if-range", coded)]);
    let seen = ask(&shops[1], part).await;
    assert_eq!((seen.status, seen.text(), seen.header("etag")), (206, "co", Some(coded)));
}

#[tokio::test(start_paused = true)]
async fn only_a_stored_200_without_a_tag_gets_one() {
    let cases: [(u16, &[_], Option<&str>); 6] = [
        (200, &[("etag", "\"own\"")], Some("\"own\"")),
        (404, &[], None),
        (301, &[("location", "/b")], None),
        (503, &[], None),
        (200, &[("cache-control", "private")], None),
        (200, &[("cache-control", "no-store")], None),
    ];
    for (status, headers, expected) in cases {
        let inner = Inner::with(move |_, _| Ok(respond(status, headers, whole("text"))));
        for shop in tagging(&inner) {
            for _ in 0..2 {
                assert_eq!(tag(&shop, get("/")).await.as_deref(), expected, "{status} {headers:?}");
            }
        }
    }
    let empty = tagging(&Inner::with(|_, _| Ok(respond(200, &[], Boxed::default()))));
    let led = tag(&empty[0], get("/")).await;
    assert!(led.is_some() && led == tag(&empty[1], get("/")).await, "an empty body has a tag, too");
}

/// An origin with tags would ignore the date beside a tag that it does not know (RFC 9110, 13.1.3), and load the whole each time.
#[tokio::test(start_paused = true)]
async fn the_inner_service_never_receives_the_guards_tag() {
    fn answer(n: usize, request: &Req) -> Response<Boxed> {
        let number = n.to_string();
        let headers = [("last-modified", CHANGED), ("cache-control", "max-age=10"), ("x-call", &number)];
        assert_eq!(sent(request, "if-none-match"), "");
        match sent(request, "if-modified-since") {
            CHANGED => respond(304, &headers, Boxed::default()),
            _ => respond(200, &headers, whole("text")),
        }
    }
    let shops = tagging(&Inner::with(|n, request| Ok(answer(n, request))));
    let first = tag(&shops[0], get("/")).await.unwrap();
    for call in ["2", "3"] {
        tokio::time::sleep(secs(11)).await;
        let seen = ask(&shops[1], get("/")).await;
        assert_eq!(seen.remark(), "fwd=stale; fwd-status=304; stored; ttl=10");
        assert_eq!((seen.header("x-call"), seen.header("etag")), (Some(call), Some(&*first)));
        let seen = ask(&shops[0], having(&first)).await;
        assert_eq!((seen.status, seen.header("x-call")), (304, Some(call)));
    }
    // A HEAD confirms the response by its date: the tag that only the guard knows does not contradict it.
    tokio::time::sleep(secs(11)).await;
    ask(&shops[0], request("HEAD", "/", &[])).await;
    let seen = ask(&shops[1], get("/")).await;
    assert_eq!((seen.header("x-call"), seen.header("etag")), (Some("4"), Some(&*first)));
}

/// Two processes on one server.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_tag_answers_conditions_on_redis() {
    let server = crate::support::redis_server::RedisServer::start();
    let inner = body("text");
    let [one, other] = super::kit::pair_on(&server, &inner, policy().http(HttpPolicy::default().etag(true)));
    let led = tag(&one, get("/")).await.unwrap();
    let seen = ask(&other, having(&led)).await;
    assert_eq!((seen.status, seen.header("etag")), (304, Some(&*led)));
    assert_eq!(inner.calls(), 1);
}
