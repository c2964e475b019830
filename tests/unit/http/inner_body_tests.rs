use std::collections::VecDeque;
use std::future::poll_fn;

use axum::body::Body as AxumBody;
use http::HeaderMap;
use http_body_util::{BodyExt as _, Empty, Full, LengthLimitError, Limited, StreamBody};

use super::*;

type Polled = Result<Frame<Bytes>, BoxError>;

fn body(frames: Vec<Polled>) -> UpstreamBody {
    Box::pin(StreamBody::new(futures_util::stream::iter(frames)))
}

fn data(text: &'static str) -> Polled {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

fn trailers() -> Polled {
    Ok(Frame::trailers(HeaderMap::from_iter([(http::header::ETAG, http::HeaderValue::from_static("\"a\""))])))
}

/// Each frame as text.
async fn frames(mut body: UpstreamBody) -> VecDeque<String> {
    let mut all = VecDeque::new();
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_bytes(cx)).await {
        all.push_back(match frame {
            Ok(frame) if frame.is_data() => String::from_utf8(frame.into_data().unwrap().into()).unwrap(),
            Ok(frame) => format!("{:?}", frame.into_trailers().unwrap()),
            Err(error) => format!("error {error}"),
        });
    }
    all
}

#[tokio::test]
async fn a_resumed_body_is_the_part_that_was_read_and_then_the_rest() {
    let last: [fn() -> Option<Polled>; 4] =
        [|| None, || Some(data("b")), || Some(trailers()), || Some(Err("broken".into()))];
    for (at, last) in last.into_iter().enumerate() {
        for content in ["", "a"] {
            for rest in [Vec::new(), vec![data("c"), trailers()]] {
                let mut expected = VecDeque::new();
                expected.extend((!content.is_empty()).then(|| content.to_owned()));
                expected.extend(frames(body(last().into_iter().collect())).await);
                let rest_frames = rest.len();
                expected.extend(if rest_frames == 0 {
                    VecDeque::new()
                } else {
                    frames(body(vec![data("c"), trailers()])).await
                });
                let resumed =
                    || ResumedBody::new(Bytes::from_static(content.as_bytes()), last(), body(Vec::new()));
                assert!(!resumed().is_end_stream() || (content.is_empty() && last().is_none()));
                let resumed = ResumedBody::new(Bytes::from_static(content.as_bytes()), last(), body(rest));
                assert_eq!(frames(Box::pin(resumed)).await, expected, "{at}, {content:?}, {rest_frames}");
            }
        }
    }
}

#[test]
fn a_resumed_body_states_the_length_of_both_of_its_parts() {
    let whole = |text: &'static str| Box::pin(Full::new(Bytes::from_static(text.as_bytes()))) as UpstreamBody;
    let hint = |last, rest: UpstreamBody| {
        let size = ResumedBody::new(Bytes::from_static(b"ab"), last, rest).size_hint();
        (size.lower(), size.upper())
    };
    assert_eq!(hint(None, whole("cde")), (5, Some(5)));
    assert_eq!(hint(Some(data("c")), whole("de")), (5, Some(5)));
    assert_eq!(hint(None, body(vec![data("c")])), (2, None));
    assert_eq!(hint(Some(trailers()), whole("")), (2, None), "a body of a known length has no trailers");
    assert_eq!(hint(Some(Err("broken".into())), whole("")), (2, None));
    let ended = ResumedBody::new(Bytes::new(), None, Box::pin(Empty::<Bytes>::new()));
    assert!(ended.is_end_stream());
}

#[test]
fn bodies_of_axum_and_reqwest_are_made_and_no_others() {
    let whole = || RequestBody::Whole(Bytes::from_static(b"abc"));
    assert_eq!(http_body::Body::size_hint(&make_body::<AxumBody>(whole()).unwrap()).exact(), Some(3));
    assert!(make_body::<Full<Bytes>>(whole()).is_none() && make_body::<String>(whole()).is_none());
    assert!(
        read_as_upstream(AxumBody::from("abc")).is_some()
            && read_as_upstream(Full::new(Bytes::new())).is_none()
    );
    #[cfg(feature = "reqwest")]
    {
        // As a body of bytes, and no stream: a client can send it again.
        assert_eq!(make_body::<reqwest_body::Body>(whole()).unwrap().as_bytes(), Some(&b"abc"[..]));
        let resumed =
            RequestBody::Resumed(ResumedBody::new(Bytes::from_static(b"ab"), None, body(vec![data("c")])));
        assert_eq!(make_body::<reqwest_body::Body>(resumed).unwrap().as_bytes(), None);
    }
}

/// `Bytes` and `Json` of axum answer 413 by this error, and 400 by any other.
#[tokio::test]
async fn an_error_of_axums_body_is_wrapped_once() {
    let limited = AxumBody::new(Limited::new(AxumBody::from("abcdef"), 3));
    let resumed = ResumedBody::new(Bytes::new(), None, read_as_upstream(limited).unwrap());
    let error = make_body::<AxumBody>(RequestBody::Resumed(resumed)).unwrap().collect().await.unwrap_err();
    assert!(error.into_inner().is::<LengthLimitError>());
}
