//! The leader's client receives each byte as it arrives, except the end of the response. The end waits until the response is stored: it is
//! the byte that completes a known length or, without one, the end of the body itself.

use bytes::Bytes;
use http::{HeaderMap, Response, Version};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt as _, Empty, Full};
use stampede_guard::http::GuardedBody;
use tower::ServiceExt as _;

use super::kit::{
    Boxed, Feed, Inner, Shop, all, ask, get, policy, read, respond, secs, send_many, settle, shop, shop_with,
    whole,
};

async fn start(shop: &Shop) -> Response<GuardedBody> {
    shop.clone().oneshot(get("/")).await.unwrap()
}

/// All data that can be read now, without waiting.
async fn come(body: &mut GuardedBody) -> String {
    settle().await;
    let mut text = String::new();
    while let Some(Some(frame)) = futures_util::FutureExt::now_or_never(body.frame()) {
        text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
    }
    text
}

#[tokio::test(start_paused = true)]
async fn the_first_byte_reaches_the_leaders_client_long_before_the_last_and_waiters_get_the_whole() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[], body)]);
    let shop = shop(&inner);
    let mut response = start(&shop).await;
    assert_eq!(response.headers()["cache-status"], "stampede-guard; fwd=uri-miss; stored; ttl=60");
    let followers = send_many(&shop, 20, "/");
    assert_eq!(come(response.body_mut()).await, "");
    feed.data("one,");
    assert_eq!(come(response.body_mut()).await, "one,", "all of it: only the end says that no more comes");
    feed.data("two,");
    assert_eq!(come(response.body_mut()).await, "two,");
    assert!(followers.iter().all(|follower| !follower.is_finished()));
    drop(feed);
    assert_eq!(read(response).await.text(), "");
    for seen in all(followers).await {
        assert_eq!((seen.text(), seen.remark().as_str()), ("one,two,", "fwd=miss; collapsed; ttl=59"));
    }
    assert_eq!(ask(&shop, get("/")).await.text(), "one,two,");
    assert_eq!(inner.calls(), 1);
}

/// The body is lines of a log, or of JSON. A reader must receive each line when the guard does.
#[tokio::test(start_paused = true)]
async fn each_line_of_a_stream_without_a_length_comes_when_it_is_sent() {
    for media_type in ["application/json", "text/plain"] {
        let (feed, body) = Feed::new();
        let shop = shop(&Inner::in_turn([respond(200, &[("content-type", media_type)], body)]));
        let mut response = start(&shop).await;
        for line in ["{\"n\":1}\n", "{\"n\":2}\n", "\n"] {
            feed.data(line);
            assert_eq!(come(response.body_mut()).await, line, "{media_type}");
        }
        drop(feed);
        assert_eq!(read(response).await.text(), "");
        assert!(
            ask(&shop, get("/")).await.remark().starts_with("hit"),
            "{media_type}: stored before its end"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn with_a_content_length_only_the_byte_that_completes_it_is_withheld() {
    let (feed, body) = Feed::new();
    let shop = shop(&Inner::in_turn([respond(200, &[("content-length", "6")], body)]));
    let mut response = start(&shop).await;
    feed.data("abc");
    assert_eq!(come(response.body_mut()).await, "abc", "more is promised, so all of it");
    feed.data("def");
    assert_eq!(come(response.body_mut()).await, "de", "a client that has `f` has it all");
    drop(feed);
    assert_eq!(read(response).await.text(), "f");
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit"));
}

/// If head and body went out in two small writes, 40 ms would lie between them: Nagle's algorithm waits for a delayed acknowledgement.
#[tokio::test(start_paused = true)]
async fn a_complete_body_goes_out_with_its_head() {
    let shop = shop(&Inner::numbered(|_| ()));
    let mut response = start(&shop).await;
    let frame = futures_util::FutureExt::now_or_never(response.body_mut().frame());
    assert_eq!(frame.expect("no wait between them").unwrap().unwrap().into_data().unwrap(), "1");
    assert!(response.body().is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn the_request_after_a_whole_response_hits() {
    for size in [1, 2, 100, 10_000] {
        for chunks in [1, 2, 7] {
            let inner = Inner::with(move |_, _| {
                let frames = (0..chunks).map(move |_| Ok(Frame::data(Bytes::from(vec![b'x'; size]))));
                let body = http_body_util::StreamBody::new(futures_util::stream::iter(frames));
                Ok(Response::new(body.boxed_unsync()))
            });
            let shop = shop(&inner);
            let first = ask(&shop, get("/")).await;
            let second = ask(&shop, get("/")).await;
            assert_eq!((first.body.len(), second.body.len()), (size * chunks, size * chunks));
            assert_eq!((second.remark().as_str(), inner.calls()), ("hit; ttl=60", 1));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_in_the_middle_stops_nothing() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[], body)]);
    let shop = shop(&inner);
    let mut response = start(&shop).await;
    feed.data("abc");
    come(response.body_mut()).await;
    drop(response);
    let followers = send_many(&shop, 5, "/");
    settle().await;
    feed.data("def");
    settle().await;
    drop(feed);
    assert!(all(followers).await.iter().all(|seen| seen.text() == "abcdef"));
    // The age of the stored response counts from when its head was received (RFC 9111, 4.2.3).
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit; ttl="));
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_delays_no_other_client() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[], body)]);
    let shop = shop(&inner);
    let unread = start(&shop).await;
    let followers = send_many(&shop, 5, "/");
    for _ in 0..1000 {
        feed.data("0123456789");
    }
    drop(feed);
    assert!(all(followers).await.iter().all(|seen| seen.body.len() == 10_000));
    assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=60");
    assert_eq!(read(unread).await.body.len(), 10_000, "and later has it all");
}

#[tokio::test(start_paused = true)]
async fn an_empty_body_withholds_the_head_until_it_is_stored() {
    let empty = || -> [Boxed; 4] {
        [
            Boxed::default(),
            whole(""),
            Empty::new().map_err(|never| match never {}).boxed_unsync(),
            Full::default().map_err(|never| match never {}).boxed_unsync(),
        ]
    };
    for status in [200, 204, 404] {
        for body in empty() {
            let inner = Inner::in_turn([respond(status, &[], body)]);
            let shop = shop(&inner);
            let response = start(&shop).await;
            assert!(response.body().is_end_stream(), "the head is all there is");
            assert_eq!(response.status(), status);
            // The body is not read to its end, so the head alone must say that this is a hit.
            let hit = ask(&shop, get("/")).await;
            assert_eq!((hit.status, hit.text(), hit.remark().as_str()), (status, "", "hit; ttl=60"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_empty_body_of_unknown_length_is_stored_before_its_end() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[], body)]);
    let shop = shop(&inner);
    let mut response = start(&shop).await;
    assert_eq!(come(response.body_mut()).await, "");
    drop(feed);
    assert_eq!(read(response).await.text(), "");
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit; ttl="));
}

#[tokio::test(start_paused = true)]
async fn trailers_reach_the_leader_its_waiters_and_later_hits() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[("trailer", "x-sum")], body)]);
    let shop = shop(&inner);
    let followers = send_many(&shop, 3, "/");
    settle().await;
    feed.data("abc");
    feed.trailers("x-sum", "6");
    drop(feed);
    let mut seen = all(followers).await;
    seen.push(ask(&shop, get("/")).await);
    let expected = HeaderMap::from_iter([("x-sum".parse().unwrap(), "6".parse().unwrap())]);
    for seen in seen {
        assert_eq!((seen.text(), seen.header("trailer")), ("abc", Some("x-sum")));
        assert_eq!(seen.trailers.as_ref(), Some(&expected), "{}", seen.remark());
    }
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn trailers_of_an_empty_body_survive_too() {
    let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "0".parse().unwrap())]);
    let sent = trailers.clone();
    let inner = Inner::with(move |_, _| {
        let trailers = sent.clone();
        let body = Empty::new().with_trailers(async move { Some(Ok(trailers)) });
        Ok(respond(200, &[], body.map_err(|never| match never {}).boxed_unsync()))
    });
    let shop = shop(&inner);
    for remark in ["fwd=uri-miss; stored; ttl=60", "hit; ttl=60"] {
        let seen = ask(&shop, get("/")).await;
        assert_eq!(seen.remark(), remark);
        assert_eq!(seen.trailers.as_ref(), Some(&trailers), "{remark}");
    }
}

/// Each connection has its own version (RFC 9110, 2.5), and the stored response came over another connection.
#[tokio::test(start_paused = true)]
async fn the_http_version_of_another_connection_is_not_stored() {
    for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2, Version::HTTP_3] {
        let inner = Inner::with(move |_, _| {
            let mut response = respond(200, &[("content-length", "3")], whole("abc"));
            *response.version_mut() = version;
            Ok(response)
        });
        let shop = shop(&inner);
        assert_eq!(ask(&shop, get("/")).await.version, version);
        let hit = ask(&shop, get("/")).await;
        assert_eq!((hit.version, hit.remark().as_str()), (Version::HTTP_11, "hit; ttl=60"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_passed_response_streams_untouched() {
    let (feed, body) = Feed::new();
    let shop = shop(&Inner::in_turn([respond(200, &[], body)]));
    let mut response = shop.clone().oneshot(super::kit::request("POST", "/", &[])).await.unwrap();
    feed.data("abc");
    assert_eq!(come(response.body_mut()).await, "abc", "not a byte is withheld");
    feed.trailers("x-sum", "6");
    drop(feed);
    let rest = read(response).await;
    assert!(rest.trailers.is_some());
    assert_eq!(rest.header("cache-status"), Some("stampede-guard; fwd=method"));
}

#[tokio::test(start_paused = true)]
async fn a_hit_shares_the_stored_bytes_and_knows_its_size() {
    let shop = shop(&Inner::numbered(|_| ()));
    ask(&shop, get("/")).await;
    let hit = start(&shop).await;
    assert_eq!(hit.body().size_hint().exact(), Some(1));
    assert!(!hit.body().is_end_stream());
}

/// Regression: trailers that came before a slow end of the body were lost.
#[tokio::test(start_paused = true)]
async fn trailers_before_a_slow_end_reach_the_client() {
    let (feed, body) = Feed::new();
    let shop = shop_with(&Inner::in_turn([respond(200, &[], body)]), policy().load_timeout(secs(2)));
    let response = {
        let shop = shop.clone();
        tokio::spawn(async move { shop.oneshot(get("/")).await.unwrap() })
    };
    settle().await;
    feed.data("abc");
    feed.trailers("x-checksum", "7");
    tokio::time::sleep(secs(3)).await;
    drop(feed);
    let body = response.await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.trailers().map(|trailers| trailers["x-checksum"].clone()), Some("7".parse().unwrap()));
}
