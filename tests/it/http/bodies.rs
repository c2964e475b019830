//! Bodies that are too long, endless, too slow or broken: only their own client gets them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;

use super::kit::{
    Boxed, Down, Feed, Inner, Seen, all, ask, get, policy, read, replicas, respond, secs, send_many, settle,
    shop, shop_with, whole,
};

const CHUNK: usize = 1000;

/// A body of chunks that are always ready. It counts the chunks that were taken.
struct Chunks {
    left: usize,
    polled: Arc<AtomicUsize>,
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = Down;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Down>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        self.polled.fetch_add(1, Ordering::SeqCst);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(vec![b'x'; CHUNK])))))
    }
}

fn chunks(n: usize) -> (Boxed, Arc<AtomicUsize>) {
    let polled = Arc::<AtomicUsize>::default();
    (Chunks { left: n, polled: polled.clone() }.boxed_unsync(), polled)
}

#[tokio::test(start_paused = true)]
async fn over_max_body_the_client_polls_the_rest_itself_chunk_by_chunk() {
    let (body, polled) = chunks(100);
    let shop = shop_with(&Inner::in_turn([Response::new(body)]), policy().max_body(10 * CHUNK));
    let mut response = shop.clone().oneshot(get("/")).await.unwrap();
    settle().await;
    assert_eq!(polled.load(Ordering::SeqCst), 11, "up to the bound, and the chunk that showed it");
    let (mut read, mut frames) = (0, 0);
    while let Some(frame) = response.body_mut().frame().await {
        read += frame.unwrap().into_data().unwrap().len();
        frames += 1;
        settle().await;
        assert_eq!(polled.load(Ordering::SeqCst), frames.max(11), "as fast as the client reads, no faster");
    }
    assert_eq!((read, frames), (100 * CHUNK, 100));
}

#[tokio::test(start_paused = true)]
async fn over_max_body_nothing_is_stored_and_waiters_load_for_themselves() {
    let inner = Inner::with(|_, _| Ok(Response::new(chunks(100).0))).held();
    let shop = shop_with(&inner, policy().max_body(99 * CHUNK));
    let clients = send_many(&shop, 20, "/");
    settle().await;
    assert_eq!(inner.calls(), 1);
    inner.gate.open();
    for seen in all(clients).await {
        assert_eq!(seen.body.len(), 100 * CHUNK);
    }
    assert_eq!(inner.calls(), 20, "each its own");
    assert_eq!(ask(&shop, get("/")).await.body.len(), 100 * CHUNK);
    assert_eq!(inner.calls(), 21, "nothing stored");
    // A body of exactly `max_body` is not too long.
    let inner = Inner::with(|_, _| Ok(Response::new(chunks(100).0)));
    let shop = shop_with(&inner, policy().max_body(100 * CHUNK));
    ask(&shop, get("/")).await;
    assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=60");
}

/// Lets waiters wait for a response that its head shows to be unshareable: they go on at the head, before the leader's
/// body has even begun.
async fn is_decided_at_the_head(rule: &str, header: (&'static str, &'static str), method_body: bool) {
    let feeds = Arc::new(std::sync::Mutex::new(Vec::new()));
    let opened = feeds.clone();
    let inner = Inner::with(move |_, _| {
        let (feed, body) = Feed::new();
        opened.lock().unwrap().push(feed);
        Ok(respond(200, &[header], body))
    })
    .held();
    let shop = shop_with(&inner, policy().max_body(1000));
    let followers = send_many(&shop, 20, "/");
    settle().await;
    assert_eq!(inner.loads.running(), 1, "{rule}");
    inner.gate.open();
    settle().await;
    assert_eq!(inner.calls(), 20, "{rule}: none waits for the body");
    assert!(followers.iter().all(|follower| !follower.is_finished()));
    for feed in feeds.lock().unwrap().drain(..) {
        if method_body {
            feed.data("x");
        }
    }
    let remarks: Vec<_> = all(followers).await.iter().map(Seen::remark).collect();
    let led = format!("fwd=uri-miss; detail={rule}");
    assert!(remarks.contains(&led), "{remarks:?}");
}

#[tokio::test(start_paused = true)]
async fn event_streams_and_long_bodies_are_recognized_at_their_head() {
    is_decided_at_the_head("event-stream", ("content-type", "text/event-stream"), true).await;
    is_decided_at_the_head("event-stream", ("content-type", "application/x-ndjson"), true).await;
    is_decided_at_the_head("too-big", ("content-length", "1001"), true).await;
    is_decided_at_the_head("too-big", ("content-length", "99999999999"), false).await;
}

/// A list of records whose length is known is no feed, whatever its content type.
#[tokio::test(start_paused = true)]
async fn records_of_known_length_are_one_load_and_stored() {
    let inner = Inner::with_headers(&[("content-type", "application/x-ndjson"), ("etag", "\"1\"")]).held();
    let shop = shop(&inner);
    let clients = send_many(&shop, 10, "/");
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.text() == "1"));
    assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=60");
}

/// A13
#[tokio::test(start_paused = true)]
async fn an_endless_event_stream_reaches_its_client_event_by_event() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[("content-type", "text/event-stream")], body)]);
    let shop = shop(&inner);
    let mut response = shop.clone().oneshot(get("/")).await.unwrap();
    for n in 0..10 {
        feed.data(&format!("data: {n}\n\n"));
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), format!("data: {n}\n\n"));
        tokio::time::sleep(secs(60)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_body_is_its_clients_error_a_502_for_waiters_and_not_stored() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([respond(200, &[], body), respond(200, &[], whole("well"))]);
    let shops = replicas(2, &inner);
    let mut response = shops[0].clone().oneshot(get("/")).await.unwrap();
    let mut followers = send_many(&shops[0], 10, "/");
    followers.extend(send_many(&shops[1], 10, "/"));
    settle().await;
    feed.data("abc");
    feed.fail("the disk has failed");
    let mut text = Vec::new();
    let error = loop {
        match response.body_mut().frame().await.expect("an error, not an end") {
            Ok(frame) => text.extend_from_slice(&frame.into_data().unwrap()),
            Err(error) => break error,
        }
    };
    assert_eq!(text, b"abc", "all that came, and then the error");
    assert_eq!(error.downcast_ref::<Down>(), Some(&Down("the disk has failed".to_owned())), "untouched");
    assert!(response.body_mut().frame().await.is_none());
    for seen in all(followers).await {
        assert_eq!((seen.status, seen.remark().as_str()), (502, "fwd=miss; detail=load-failed"));
        assert_eq!(seen.header("cache-control"), Some("no-store"));
        assert!(!seen.text().contains("disk"), "what failed is not shown to clients: {}", seen.text());
    }
    assert_eq!(inner.calls(), 1);
    assert_eq!(ask(&shops[1], get("/")).await.text(), "well");
}

#[tokio::test(start_paused = true)]
async fn a_body_of_another_length_than_its_head_says_is_never_stored() {
    for (length, text) in [("5", "abc"), ("2", "abc")] {
        let inner = Inner::with(move |_, _| {
            let frames = [Ok(Frame::data(Bytes::from_static(text.as_bytes())))];
            let body = http_body_util::StreamBody::new(futures_util::stream::iter(frames));
            Ok(respond(200, &[("content-length", length)], body.boxed_unsync()))
        });
        let shop = shop(&inner);
        for n in 1..=2 {
            let response = shop.clone().oneshot(get("/")).await.unwrap();
            assert!(response.into_body().collect().await.is_err(), "{length}");
            assert_eq!(inner.calls(), n, "{length}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_reaches_its_client_whole_and_waiters_load_for_themselves() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn(
        [respond(200, &[], body)].into_iter().chain((0..5).map(|_| respond(200, &[], whole("own")))),
    );
    let shop = shop_with(&inner, policy().load_timeout(secs(10)));
    let response = shop.clone().oneshot(get("/")).await.unwrap();
    let followers = send_many(&shop, 5, "/");
    let reading = tokio::spawn(read(response));
    for n in 0..30 {
        feed.data(&format!("{n},"));
        tokio::time::sleep(secs(1)).await;
    }
    drop(feed);
    let expected: String = (0..30).map(|n| format!("{n},")).collect();
    assert_eq!(reading.await.unwrap().text(), expected);
    for seen in all(followers).await {
        assert_eq!((seen.text(), seen.remark().as_str()), ("own", "fwd=miss; detail=uncoordinated"));
    }
    assert_eq!(inner.calls(), 6);
}

#[tokio::test(start_paused = true)]
async fn a_body_over_the_bound_is_dropped_once_its_client_has_left() {
    let (body, polled) = chunks(1_000_000);
    let shop = shop_with(&Inner::in_turn([Response::new(body)]), policy().max_body(CHUNK));
    let response = shop.clone().oneshot(get("/")).await.unwrap();
    drop(response);
    settle().await;
    assert_eq!(Arc::strong_count(&polled), 1, "the body is dropped");
    assert!(polled.load(Ordering::SeqCst) <= 2);
}

/// C6
#[tokio::test(start_paused = true)]
async fn oversized_headers_are_served_and_not_stored() {
    let inner = Inner::numbered(|response| {
        for n in 0..200 {
            response.headers_mut().append("x-many", n.to_string().parse().unwrap());
        }
    });
    let shop = shop(&inner);
    for n in ["1", "2"] {
        let seen = ask(&shop, get("/")).await;
        assert_eq!((seen.text(), seen.headers.get_all("x-many").iter().count()), (n, 200));
    }
}
