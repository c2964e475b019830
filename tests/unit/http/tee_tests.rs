use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::stream;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Full, StreamBody};
use tokio::sync::mpsc;

use super::*;
use crate::http::body::{CutOff, GuardedBody};

type Item = Result<Frame<Bytes>, std::io::Error>;

const PATIENCE: Duration = Duration::from_secs(30);

fn data(text: &'static str) -> Item {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

fn fields() -> HeaderMap {
    HeaderMap::from_iter([(http::header::ETAG, "\"a\"".parse().unwrap())])
}

/// A body that sends the frames that the test gives it, one after the other.
type Scripted = StreamBody<stream::BoxStream<'static, Item>>;

fn scripted() -> (mpsc::UnboundedSender<Item>, Scripted) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let frames = stream::unfold(receiver, |mut receiver: mpsc::UnboundedReceiver<Item>| async {
        receiver.recv().await.map(|item| (item, receiver))
    });
    (sender, StreamBody::new(Box::pin(frames)))
}

fn all_at_once(frames: Vec<Item>) -> Scripted {
    StreamBody::new(Box::pin(stream::iter(frames)))
}

fn streaming() -> (StreamSender, GuardedBody) {
    GuardedBody::streaming(Default::default(), None)
}

/// A deadline that is never reached.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// The bytes that the client can read now, without waiting.
fn readable(client: &mut GuardedBody) -> String {
    let mut text = Vec::new();
    while let Some(frame) = client.frame().now_or_never() {
        let Some(Ok(frame)) = frame else { break };
        text.extend_from_slice(&frame.into_data().unwrap());
    }
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn a_body_is_buffered_whole_and_the_client_gets_the_end_on_release() {
    let (sender, mut client) = streaming();
    let body = all_at_once(vec![data("ab"), data(""), data("cd"), Ok(Frame::trailers(fields()))]);
    let Teed::Whole { body, trailers, finish } =
        tee(Box::pin(body), 4, Some(4), later(), PATIENCE, sender).await
    else {
        panic!()
    };
    assert_eq!((&body[..], trailers), (&b"abcd"[..], Some(fields())));
    assert_eq!(readable(&mut client), "ab", "the last chunk waits");
    finish.release();
    let rest = client.collect().await.unwrap();
    assert_eq!(rest.trailers(), Some(&fields()));
    assert_eq!(rest.to_bytes(), "cd");
}

#[tokio::test]
async fn a_single_chunk_is_stored_without_a_copy() {
    let chunk = Bytes::from(vec![7; 100]);
    let (sender, mut client) = streaming();
    let teed = tee(Box::pin(Full::new(chunk.clone())), 100, None, later(), PATIENCE, sender).await;
    let Teed::Whole { body, finish, .. } = teed else { panic!() };
    assert_eq!(body.as_ptr(), chunk.as_ptr());
    assert_eq!(readable(&mut client), "");
    drop(finish);
    let sent = client.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(sent.as_ptr(), chunk.as_ptr(), "nor sent with one");
    assert!(client.is_end_stream());
}

#[tokio::test]
async fn a_slow_body_of_unknown_length_reaches_the_client_as_it_comes_but_for_its_end() {
    let (frames, body) = scripted();
    let (sender, mut client) = streaming();
    let mut teed = Box::pin(tee(Box::pin(body), 100, None, later(), PATIENCE, sender));
    for chunk in ["abc", "d", "ef"] {
        frames.send(data(chunk)).unwrap();
        assert!((&mut teed).now_or_never().is_none());
        assert_eq!(readable(&mut client), chunk, "only the end says that this is all of it");
    }
    frames.send(Ok(Frame::trailers(fields()))).unwrap();
    drop(frames);
    let Teed::Whole { body, finish, .. } = teed.await else { panic!() };
    assert_eq!(body, "abcdef");
    assert!(
        client.frame().now_or_never().is_none(),
        "the end waits for the release, and the trailers with it"
    );
    finish.release();
    let rest = client.collect().await.unwrap();
    assert_eq!(rest.trailers(), Some(&fields()));
    assert_eq!(rest.to_bytes(), "");
}

/// A server frames a body of exact size by that size, so its client knows the end even without a header.
#[tokio::test]
async fn the_byte_that_fills_the_size_of_a_body_waits() {
    let (frames, body) = scripted();
    let (sender, mut client) = streaming();
    let body = http_body_util::Limited::new(body, 5);
    assert_eq!(body.size_hint().upper(), Some(5));
    let mut teed = Box::pin(tee(Box::pin(body), 100, None, later(), PATIENCE, sender));
    for (chunk, seen) in [("abc", "abc"), ("de", "d")] {
        frames.send(data(chunk)).unwrap();
        assert!((&mut teed).now_or_never().is_none());
        assert_eq!(readable(&mut client), seen);
    }
    drop(frames);
    let Teed::Whole { finish, .. } = teed.await else { panic!() };
    assert_eq!(readable(&mut client), "");
    finish.release();
    assert_eq!(client.collect().await.unwrap().to_bytes(), "e");
}

#[tokio::test]
async fn with_a_known_length_only_the_very_last_byte_waits() {
    let (frames, body) = scripted();
    let (sender, mut client) = streaming();
    let mut teed = Box::pin(tee(Box::pin(body), 100, Some(5), later(), PATIENCE, sender));
    for (chunk, seen) in [("abc", "abc"), ("de", "d")] {
        frames.send(data(chunk)).unwrap();
        assert!((&mut teed).now_or_never().is_none());
        assert_eq!(readable(&mut client), seen);
    }
}

#[tokio::test]
async fn over_the_bound_the_client_polls_the_rest_itself() {
    let (frames, body) = scripted();
    let (sender, client) = streaming();
    for chunk in ["abc", "de", "fg"] {
        frames.send(data(chunk)).unwrap();
    }
    assert!(matches!(
        tee(Box::pin(body), 4, None, later(), PATIENCE, sender).await,
        Teed::TooBig { length: 5 }
    ));
    frames.send(data("hi")).unwrap();
    drop(frames);
    assert_eq!(client.collect().await.unwrap().to_bytes(), "abcdefghi");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_takes_too_long_is_handed_over_and_not_cut_off() {
    let (frames, body) = scripted();
    let (sender, client) = streaming();
    frames.send(data("abc")).unwrap();
    let until = Instant::now() + Duration::from_secs(1);
    assert!(matches!(tee(Box::pin(body), 100, None, until, PATIENCE, sender).await, Teed::TooSlow));
    assert_eq!(Instant::now(), until);
    frames.send(data("def")).unwrap();
    drop(frames);
    assert_eq!(client.collect().await.unwrap().to_bytes(), "abcdef");
}

#[tokio::test]
async fn a_body_of_exactly_the_bound_is_buffered() {
    for (length, whole) in [(3, true), (4, true), (5, false)] {
        let (sender, client) = streaming();
        let teed =
            tee(Box::pin(Full::new(Bytes::from(vec![0; length]))), 4, None, later(), PATIENCE, sender).await;
        assert_eq!(matches!(teed, Teed::Whole { .. }), whole, "{length}");
        drop(teed);
        assert_eq!(client.collect().await.unwrap().to_bytes().len(), length);
    }
}

#[tokio::test]
async fn a_body_of_countless_tiny_chunks_is_too_big() {
    let frames = stream::iter(
        (0..MOST_CHUNKS + 2).map(|_| Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"x")))),
    );
    let (sender, client) = streaming();
    assert!(matches!(
        tee(Box::pin(StreamBody::new(frames)), usize::MAX, None, later(), PATIENCE, sender).await,
        Teed::TooBig { .. }
    ));
    assert_eq!(client.collect().await.unwrap().to_bytes().len(), MOST_CHUNKS + 2);
}

#[tokio::test]
async fn all_bytes_of_a_body_that_breaks_come_well_before_its_error() {
    for (expected, seen, rest) in [(None, "abcd", ""), (Some(9), "abcd", ""), (Some(4), "abc", "d")] {
        let (sender, mut client) = streaming();
        let frames = vec![data("ab"), data("cd"), Err(std::io::Error::other("wire cut"))];
        let teed = tee(Box::pin(all_at_once(frames)), 100, expected, later(), PATIENCE, sender).await;
        let Teed::Broken { text, finish } = teed else { panic!() };
        assert_eq!(text, "wire cut");
        // These bytes come before the error: a server that receives an error drops the bytes that it has not written yet.
        assert_eq!(readable(&mut client), seen, "{expected:?}");
        // The error waits until the waiters were notified, because a retry of the client would otherwise join the failed load. The byte
        // that completes the length in the head waits for the same reason.
        assert!(client.frame().now_or_never().is_none());
        finish.release();
        assert_eq!(readable(&mut client), rest, "{expected:?}");
        assert!(client.frame().await.is_none(), "after the error itself");
    }
}

/// With the byte that completes it, a client has the whole length in the head, and may repeat its request while the load is still failing.
/// The bytes behind that byte wait with it.
#[tokio::test]
async fn bytes_beyond_the_promised_length_wait_with_the_byte_that_completes_it() {
    for frames in [vec!["abcd"], vec!["ab", "cd"], vec!["abc", "d"], vec!["a", "bcdef"]] {
        let (sender, mut client) = streaming();
        let body = all_at_once(frames.iter().map(|frame| data(frame)).collect());
        let teed = tee(Box::pin(body), 100, Some(3), later(), PATIENCE, sender).await;
        let Teed::Broken { finish, .. } = teed else { panic!() };
        assert_eq!(readable(&mut client), "ab", "{frames:?}");
        finish.release();
        assert!(readable(&mut client).starts_with('c'), "{frames:?}");
    }
}

#[tokio::test]
async fn a_body_that_contradicts_its_head_is_broken() {
    for (expected, frames) in [
        (3, vec![data("ab")]),
        (3, vec![]),
        (1, vec![data("ab")]),
        (2, vec![data("ab"), data("c")]),
        (2, vec![data("a"), Ok(Frame::trailers(fields())), data("b")]),
        (2, vec![data("ab"), Ok(Frame::trailers(fields())), Ok(Frame::trailers(fields()))]),
    ] {
        let (sender, client) = streaming();
        let teed = tee(Box::pin(all_at_once(frames)), 100, Some(expected), later(), PATIENCE, sender).await;
        assert!(matches!(teed, Teed::Broken { .. }), "{expected}");
        drop(teed);
        assert!(client.collect().await.is_err(), "{expected}");
    }
}

#[tokio::test]
async fn an_empty_body_is_whole_and_its_end_waits_too() {
    let (sender, mut client) = streaming();
    let teed = tee(Box::pin(all_at_once(vec![])), 0, None, later(), PATIENCE, sender).await;
    let Teed::Whole { body, finish, .. } = teed else { panic!() };
    assert!(body.is_empty() && !client.is_end_stream());
    assert!(client.frame().now_or_never().is_none());
    finish.release();
    assert!(client.frame().await.is_none());
}

#[tokio::test]
async fn a_tee_that_is_cancelled_leaves_the_client_an_error() {
    let (frames, body) = scripted();
    let (sender, mut client) = streaming();
    let mut teed = Box::pin(tee(Box::pin(body), 100, None, later(), PATIENCE, sender));
    frames.send(data("ab")).unwrap();
    assert!((&mut teed).now_or_never().is_none());
    drop(teed);
    assert_eq!(client.frame().await.unwrap().unwrap().into_data().unwrap(), "ab");
    assert!(client.frame().await.unwrap().unwrap_err().is::<CutOff>());
}

/// Sets its flag when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_client_that_left_stops_no_load_until_it_is_too_big() {
    for (max_body, whole) in [(8, true), (4, false)] {
        let dropped = Arc::new(AtomicBool::new(false));
        let endless = Dropped(dropped.clone());
        let frames = stream::unfold((endless, 4), |(endless, left)| async move {
            let next: Item = data("ab");
            (left > 0).then_some((next, (endless, left - 1)))
        });
        let (sender, client) = streaming();
        drop(client);
        let teed =
            tee(Box::pin(StreamBody::new(Box::pin(frames))), max_body, None, later(), PATIENCE, sender).await;
        assert_eq!(matches!(&teed, Teed::Whole { body, .. } if body == "abababab"), whole);
        assert!(whole || dropped.load(Ordering::SeqCst), "the inner body is dropped at once");
    }
}

#[test]
fn the_head_is_the_end_of_an_empty_response() {
    let (empty, full) = (Full::new(Bytes::new()), Full::new(Bytes::from_static(b"x")));
    assert!(ends_with_head(StatusCode::OK, None, &empty));
    assert!(ends_with_head(StatusCode::OK, Some(0), &all_at_once(vec![])));
    assert!(ends_with_head(StatusCode::NO_CONTENT, None, &all_at_once(vec![])));
    assert!(!ends_with_head(StatusCode::OK, None, &all_at_once(vec![])), "not known yet");
    assert!(!ends_with_head(StatusCode::OK, Some(1), &full));
}
