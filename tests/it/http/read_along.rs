//! If the length of a response is known, the waiters in the leader's process read it while it arrives.

use futures_util::FutureExt as _;
use http::Response;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use stampede_guard::http::GuardedBody;
use stampede_guard::{MemoryStore, StampedeGuard};
use tower::ServiceExt as _;

use super::kit::{
    Feed, Inner, Shop, all, ask, get, policy, read, replicas, request, respond, secs, send_many, settle,
    shop, whole,
};

/// All data that can be read now, without waiting.
async fn come(body: &mut GuardedBody) -> String {
    settle().await;
    let mut text = String::new();
    while let Some(Some(frame)) = body.frame().now_or_never() {
        text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
    }
    text
}

fn start(shop: &Shop) -> tokio::task::JoinHandle<Response<GuardedBody>> {
    let shop = shop.clone();
    tokio::spawn(async move { shop.oneshot(get("/")).await.unwrap() })
}

fn fed(headers: &[(&str, &str)]) -> (Feed, Inner) {
    let (feed, body) = Feed::new();
    (feed, Inner::in_turn([respond(200, headers, body)]))
}

#[tokio::test(start_paused = true)]
async fn waiters_read_arrived_bytes_and_the_last_byte_after_the_commit() {
    let (feed, inner) = fed(&[("content-length", "6"), ("x", "y")]);
    let replicas = replicas(2, &inner);
    let leader = start(&replicas[0]);
    settle().await;
    let elsewhere = send_many(&replicas[1], 5, "/");
    let early: Vec<_> = (0..3).map(|_| start(&replicas[0])).collect();
    settle().await;
    feed.data("abc");
    settle().await;
    let mut responses = vec![leader.await.unwrap()];
    for follower in early {
        responses.push(follower.await.unwrap());
    }
    feed.data("de");
    settle().await;
    // This request comes when a part of the response has arrived.
    responses.push(start(&replicas[0]).await.unwrap());
    for (number, response) in responses.iter_mut().enumerate() {
        // The leader's own response keeps the inner service's size hint.
        assert_eq!(response.body().size_hint().exact(), (number > 0).then_some(6), "{number}");
        assert_eq!(response.headers()["x"], "y");
        assert_eq!(come(response.body_mut()).await, "abcde", "{number}");
        let expected = if number == 0 { "fwd=uri-miss; stored" } else { "fwd=miss; collapsed" };
        let status = response.headers()["cache-status"].to_str().unwrap();
        assert!(status.contains(expected), "{number}: {status}");
    }
    assert!(elsewhere.iter().all(|follower| !follower.is_finished()), "other processes wait for the whole");
    feed.data("f");
    drop(feed);
    for response in responses {
        assert_eq!(read(response).await.text(), "f");
        // A client that has received the whole response can rely on a hit at its next request.
        assert!(ask(&replicas[0], get("/")).await.remark().starts_with("hit"));
    }
    assert!(all(elsewhere).await.iter().all(|seen| seen.text() == "abcdef"));
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_broken_body_is_an_error_to_all_its_readers() {
    let (feed, inner) = fed(&[("content-length", "6")]);
    let shop = shop(&inner);
    let leader = start(&shop);
    settle().await;
    let follower = start(&shop);
    settle().await;
    feed.data("abc");
    let (mut leader, mut follower) = (leader.await.unwrap(), follower.await.unwrap());
    assert_eq!(
        (come(leader.body_mut()).await, come(follower.body_mut()).await),
        ("abc".into(), "abc".into())
    );
    // The body ends before its length is reached.
    drop(feed);
    for response in [leader, follower] {
        assert!(response.into_body().collect().await.is_err(), "C6: never a part for the whole");
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_length_waiters_wait_for_the_whole() {
    let (feed, inner) = fed(&[]);
    let shop = shop(&inner);
    let leader = start(&shop);
    settle().await;
    let follower = start(&shop);
    feed.data("abc");
    settle().await;
    assert!(!follower.is_finished(), "it may grow over max_body, and then it is one client's own");
    drop(feed);
    assert_eq!(read(leader.await.unwrap()).await.text(), "abc");
    assert_eq!(read(follower.await.unwrap()).await.text(), "abc");
}

/// A response that takes longer than `load_timeout` is not stored, but all its readers receive the whole of it.
#[tokio::test(start_paused = true)]
async fn a_slow_body_is_buffered_to_its_end_for_all_its_readers() {
    let (feed, body) = Feed::new();
    let headers = [("content-length", "6")];
    let inner = Inner::in_turn([respond(200, &headers, body), respond(200, &headers, whole("secret"))]);
    let shop = shop(&inner);
    let readers: Vec<_> = (0..3).map(|_| start(&shop)).collect();
    settle().await;
    let mut readers: Vec<_> =
        futures_util::future::join_all(readers).await.into_iter().map(|reader| reader.unwrap()).collect();
    // Dropping the first reader does not stop the others.
    drop(readers.remove(0));
    let readers: Vec<_> = readers.into_iter().map(|reader| tokio::spawn(read(reader))).collect();
    for piece in ["ab", "cd", "ef"] {
        tokio::time::sleep(secs(20)).await;
        feed.data(piece);
    }
    drop(feed);
    for reader in readers {
        assert_eq!(reader.await.unwrap().text(), "abcdef");
    }
    assert_eq!(ask(&shop, get("/")).await.text(), "secret");
}

/// A response with more chunks than are buffered is not stored, but its readers receive the whole of it. Beyond that number small chunks
/// are merged, so that a body of single bytes does not take a hundred times its length.
#[tokio::test(start_paused = true)]
async fn a_body_of_countless_chunks_is_whole_for_all_its_readers() {
    let (feed, inner) = fed(&[("content-length", "100000")]);
    let shop = shop(&inner);
    let readers: Vec<_> = (0..3).map(|_| start(&shop)).collect();
    settle().await;
    let readers = futures_util::future::join_all(readers).await;
    for _ in 0..100_000 {
        feed.data("x");
    }
    drop(feed);
    // The leader's own client is the first in the list, and is read last.
    for reader in readers.into_iter().rev() {
        let (mut body, mut frames, mut length) = (reader.unwrap().into_body(), 0, 0);
        while let Some(frame) = body.frame().await {
            frames += 1;
            length += frame.expect("not cut off").into_data().unwrap().len();
        }
        assert_eq!(length, 100_000);
        assert!(frames < 66_000, "{frames}");
    }
    assert_eq!(inner.calls(), 1);
}

/// The body pauses. The leader's own client may wait for its next byte for longer than the others.
#[tokio::test(start_paused = true)]
async fn a_silent_body_is_whole_for_its_own_client() {
    for others in [0, 1] {
        let (feed, inner) = fed(&[("content-length", "6")]);
        let shop = shop(&inner);
        let own = start(&shop);
        settle().await;
        let others: Vec<_> = (0..others).map(|_| start(&shop)).collect();
        let own = tokio::spawn(read(own.await.unwrap()));
        let others = futures_util::future::join_all(others).await;
        for piece in ["ab", "cdef"] {
            tokio::time::sleep(secs(100)).await;
            feed.data(piece);
        }
        drop(feed);
        assert_eq!(own.await.unwrap().text(), "abcdef");
        for other in others {
            assert!(other.unwrap().into_body().collect().await.is_err());
        }
    }
}

/// A body is not buffered for ever, and not at all without a reader.
#[tokio::test(start_paused = true)]
async fn a_slow_body_ends_with_its_last_reader_or_its_silence() {
    for silent in [false, true] {
        let (feed, inner) = fed(&[("content-length", "6")]);
        let shop = shop(&inner);
        let readers: Vec<_> = (0..2).map(|_| start(&shop)).collect();
        settle().await;
        let readers = futures_util::future::join_all(readers).await;
        tokio::time::sleep(secs(40)).await;
        if silent {
            let mut body = readers.into_iter().next_back().unwrap().unwrap().into_body();
            tokio::time::sleep(secs(40)).await;
            assert!(body.frame().await.unwrap().is_err());
        } else {
            drop(readers);
            feed.data("a");
            settle().await;
        }
        assert!(feed.is_left(), "the inner body is dropped");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_for_another_variant_does_not_read_an_incomplete_body() {
    let (english, body) = Feed::new();
    let headers = [("content-length", "3"), ("vary", "accept-language")];
    let german = respond(200, &[("vary", "accept-language")], whole("de".to_owned()));
    let inner = Inner::in_turn([respond(200, &headers, body), german]);
    let shop = shop(&inner);
    let leader = start(&shop);
    settle().await;
    let other = {
        let shop = shop.clone();
        tokio::spawn(async move { ask(&shop, request("GET", "/", &[("accept-language", "de")])).await })
    };
    settle().await;
    english.data("a");
    settle().await;
    assert_eq!(other.await.unwrap().text(), "de", "it does not wait for a body that is not for it");
    english.data("bc");
    drop(english);
    assert_eq!(read(leader.await.unwrap()).await.text(), "abc");
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_or_is_slow_delays_no_other_client() {
    let (feed, inner) = fed(&[("content-length", "6")]);
    let shop = shop(&inner);
    let leader = start(&shop);
    settle().await;
    let (leaves, slow) = (start(&shop), start(&shop));
    settle().await;
    feed.data("abc");
    settle().await;
    drop(leaves.await.unwrap());
    let slow = slow.await.unwrap();
    feed.data("def");
    drop(feed);
    assert_eq!(read(leader.await.unwrap()).await.text(), "abcdef");
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit"));
    assert_eq!(read(slow).await.text(), "abcdef", "from memory");
}

/// The response may be invalidated by a tag before it is complete, and a later client must not receive it.
#[tokio::test(start_paused = true)]
async fn a_tagged_response_reaches_others_only_after_its_tags_were_checked() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([
        respond(200, &[("content-length", "3")], body),
        respond(200, &[("content-length", "3")], whole("new")),
    ]);
    let store = MemoryStore::new();
    let tagged = StampedeGuard::new(store.clone()).with_policy(policy().tags(["t"]).build().unwrap());
    let shop: Shop = tower::Layer::layer(&tagged, inner.clone());
    let leader = start(&shop);
    settle().await;
    feed.data("o");
    settle().await;
    let mut leading = leader.await.unwrap();
    StampedeGuard::new(store).invalidate_tag("t").await.unwrap();
    let later = send_many(&shop, 3, "/");
    settle().await;
    feed.data("ld");
    drop(feed);
    settle().await;
    assert_eq!(come(leading.body_mut()).await, "old");
    for seen in all(later).await {
        assert_eq!(seen.text(), "new");
    }
}
