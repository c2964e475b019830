use http_body_util::{BodyExt, Empty, Full, StreamBody};

use super::*;

fn trailers() -> HeaderMap {
    HeaderMap::from_iter([(http::header::ETAG, "\"a\"".parse().unwrap())])
}

#[tokio::test]
async fn a_stored_body_is_one_shared_frame_of_known_size() {
    let bytes = Bytes::from(vec![1, 2, 3]);
    let mut body = GuardedBody::stored(bytes.clone(), None);
    assert_eq!(body.size_hint().exact(), Some(3));
    assert!(!body.is_end_stream());
    let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!((frame.as_ptr(), frame.len()), (bytes.as_ptr(), 3));
    assert!(body.is_end_stream());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn stored_trailers_come_last_and_leave_the_size_open() {
    let body = GuardedBody::stored(Bytes::from_static(b"abc"), Some(Box::new(trailers())));
    assert_eq!((body.size_hint().exact(), body.size_hint().lower()), (None, 3));
    let collected = body.collect().await.unwrap();
    assert_eq!(collected.trailers(), Some(&trailers()));
    assert_eq!(collected.to_bytes(), "abc");
    let mut only_trailers = GuardedBody::stored(Bytes::new(), Some(Box::new(trailers())));
    assert!(!only_trailers.is_end_stream());
    assert!(only_trailers.frame().await.unwrap().unwrap().is_trailers());
    assert!(only_trailers.is_end_stream());
}

#[tokio::test]
async fn a_passed_body_has_the_frames_sizes_and_errors_of_the_inner_body() {
    let body = GuardedBody::passed(Box::pin(Full::new(Bytes::from_static(b"abc"))));
    assert_eq!(body.size_hint().exact(), Some(3));
    assert_eq!(body.collect().await.unwrap().to_bytes(), "abc");
    assert!(GuardedBody::passed(Box::pin(Empty::<Bytes>::new())).is_end_stream());
    // The data has another type than `Bytes`, and the error must keep its original type.
    let frames = [Ok(Frame::data(&b"ab"[..])), Err(std::io::Error::other("disconnected"))];
    let mut body = GuardedBody::passed(Box::pin(StreamBody::new(futures_util::stream::iter(frames))));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "ab");
    assert!(body.frame().await.unwrap().unwrap_err().is::<std::io::Error>());
}

#[tokio::test]
async fn a_streaming_body_counts_down_and_ends_with_its_last_piece() {
    let (sender, mut body) = GuardedBody::streaming(SizeHint::with_exact(5), None);
    sender.data(Bytes::from_static(b"ab"));
    sender.data(Bytes::new());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "ab");
    assert_eq!(body.size_hint().exact(), Some(3));
    sender.last(Bytes::from_static(b"cde"), None);
    assert!(!body.is_end_stream());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "cde");
    assert!(body.is_end_stream(), "known without another poll");
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_stream_with_a_dying_load_ends_in_an_error() {
    let (sender, mut body) = GuardedBody::streaming(SizeHint::new(), None);
    sender.data(Bytes::from_static(b"ab"));
    drop(sender);
    assert!(body.frame().await.unwrap().is_ok());
    assert!(body.frame().await.unwrap().unwrap_err().is::<CutOff>());
    assert!(body.frame().await.is_none(), "once");
}

#[tokio::test]
async fn the_rest_is_polled_by_the_client() {
    let (sender, body) = GuardedBody::streaming(SizeHint::new(), None);
    sender.data(Bytes::from_static(b"ab"));
    sender.rest(Box::pin(Full::new(Bytes::from_static(b"cd"))));
    assert_eq!(body.collect().await.unwrap().to_bytes(), "abcd");
}

#[test]
fn a_guarded_body_is_unpin_send_and_sync_whatever_the_inner_body_is() {
    fn assert<T: Unpin + Send + Sync>() {}
    assert::<GuardedBody>();
    assert::<StreamSender>();
}

#[test]
fn debug_never_shows_content() {
    let body = GuardedBody::stored(Bytes::from_static(b"secret"), Some(Box::new(trailers())));
    assert_eq!(format!("{body:?}"), "Stored { bytes: 6, trailers: 1 }");
    assert!(GuardedBody::default().is_end_stream());
}
