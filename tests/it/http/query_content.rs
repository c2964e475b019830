//! The content of a QUERY (RFC 10008): what the guard reads of it, and what it passes on. ROWS.md names the section of each requirement.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited, StreamBody};
use stampede_guard::StampedeGuard;
use stampede_guard::http::HttpPolicy;
use tokio::sync::mpsc;
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::kit::{policy, read, request, secs, settle};
use super::query_method::{
    Frames, KIND, both, http, of_axum, origin, pair, passed, processes, query, query_of, send, streamed,
};
use crate::support::warnings::Warnings;

/// E4 (RFC 10008, 2.7): what the guard does for the key does not change the request.
#[tokio::test(start_paused = true)]
async fn content_up_to_the_limit_is_stored_and_longer_content_passes_whole() {
    let frames: [&[&str]; 4] =
        [&["01234567"], &["0123", "", "4567"], &["0", "1", "2", "3", "4567", ""], &[""]];
    for frames in frames {
        let seen = both(http, || query_of("/p", &[KIND], streamed(frames))).await;
        assert_eq!(seen[0].text(), format!("1 /p {}", frames.concat()));
        assert!(seen[1].remark().starts_with("hit"), "{frames:?}: {}", seen[1].remark());
    }
    let frames: [&[&str]; 4] =
        [&["012345678"], &["01234567", "8"], &["0123456", "", "7890", "1"], &["01234567", "", "8"]];
    for frames in frames {
        let seen = both(http, || query_of("/p", &[KIND], streamed(frames))).await;
        passed(&seen, "content-too-long", &frames.concat());
    }
    let headers = [KIND, ("content-length", "9")];
    passed(&both(http, || query_of("/p", &headers, "012345678")).await, "content-too-long", "012345678");
    passed(
        &both(http, || query_of("/p", &headers, streamed(&["012345678"]))).await,
        "content-too-long",
        "012345678",
    );
    let none = || http().query_content_limit(0);
    passed(&both(none, || query("a")).await, "content-too-long", "a");
    assert!(both(none, || query("")).await[1].remark().starts_with("hit"));
}

/// The default is 64 KiB.
#[tokio::test(start_paused = true)]
async fn the_limit_is_64_kib_by_default() {
    for (length, is_stored) in [(64 * 1024, true), (64 * 1024 + 1, false)] {
        let content = Bytes::from("a".repeat(length));
        let by_default = || HttpPolicy::default().query_method(true);
        let seen = both(by_default, || query_of("/p", &[KIND], Body::from(content.clone()))).await;
        assert_eq!(seen[1].remark().starts_with("hit"), is_stored, "{}", seen[1].remark());
        assert_eq!(seen[0].text().len(), length + "1 /p ".len());
    }
}

/// Longer content reaches the handler while it still comes.
#[tokio::test(start_paused = true)]
async fn a_handler_reads_long_content_as_it_comes() {
    let (seen, mut pieces) = mpsc::unbounded_channel();
    let inner = service_fn(move |request: Request<Body>| {
        let seen = seen.clone();
        async move {
            let mut body = request.into_body();
            while let Some(frame) = body.frame().await {
                let _ = seen.send(frame.unwrap().into_data().unwrap());
            }
            Ok::<_, Infallible>(Response::new(Body::empty()))
        }
    });
    let guard = StampedeGuard::in_memory().with_policy(policy().http(http()).build().unwrap());
    let (feed, body) = Frames::new();
    let answer = tokio::spawn(guard.layer(inner).oneshot(query_of("/p", &[KIND], body)));
    let feed = feed.data("0123").data("45678");
    for text in ["0123", "45678"] {
        assert_eq!(pieces.recv().await.unwrap(), text);
    }
    let feed = feed.data("9");
    assert_eq!(pieces.recv().await.unwrap(), "9");
    drop(feed);
    assert_eq!(answer.await.unwrap().unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_breaks_reaches_the_handler_with_its_bytes_and_its_error() {
    for frames in [&[][..], &["abc"], &["abc", "defgh"], &["abcdefgh", "i"]] {
        let request = || {
            let (feed, body) = Frames::new();
            frames.iter().fold(feed, |feed, text| feed.data(text)).fail();
            query_of("/p", &[KIND], body)
        };
        let seen = both(http, request).await;
        let detail = if frames.concat().len() > 8 { "content-too-long" } else { "content-broken" };
        passed(&seen, detail, &frames.concat());
        assert_eq!(seen[0].header("x-error"), Some("reset"));
    }
}

/// With an outer limit of the body's length, extractors of axum answer 413.
#[tokio::test(start_paused = true)]
async fn an_error_of_an_outer_limit_is_found_by_the_handler() {
    let inner = service_fn(|request: Request<Body>| async {
        let error = request.into_body().collect().await.expect_err("too long").into_inner();
        Ok::<_, Infallible>(Response::new(Body::from(error.is::<LengthLimitError>().to_string())))
    });
    let guard = StampedeGuard::in_memory().with_policy(policy().http(http()).build().unwrap());
    for content in ["012345678", "01234"] {
        let limited = Body::new(Limited::new(Body::from(content), 4));
        let seen = read(guard.layer(inner).oneshot(query_of("/p", &[KIND], limited)).await.unwrap()).await;
        assert_eq!(seen.text(), "true", "{content}");
    }
}

#[tokio::test(start_paused = true)]
async fn slow_content_reaches_the_handler_after_a_second() {
    let inner = origin();
    let [site, other] = pair(&inner, http);
    for (n, site) in [&site, &other].into_iter().enumerate() {
        let (feed, body) = Frames::new();
        let feed = feed.data("ab");
        let asked = tokio::time::Instant::now();
        let answer = send(site, query_of("/p", &[KIND], body));
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        drop(feed.data("cd"));
        let seen = answer.await.unwrap();
        assert_eq!(seen.remark(), "fwd=bypass; detail=content-slow");
        assert_eq!(seen.text(), format!("{} /p abcd", n + 1));
        assert!(asked.elapsed() < secs(2));
    }
    // What comes in time is stored.
    let (feed, body) = Frames::new();
    let answer = send(&site, query_of("/p", &[KIND], body));
    tokio::time::sleep(Duration::from_millis(900)).await;
    drop(feed.data("abcd"));
    assert!(answer.await.unwrap().remark().contains("stored"));
}

/// A body of frames that are always ready and always empty holds neither the request nor its thread.
#[tokio::test]
async fn a_body_of_endless_empty_frames_passes() {
    let inner = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let guard = StampedeGuard::in_memory().with_policy(policy().http(http()).build().unwrap());
    let empty_frames = futures_util::stream::repeat_with(|| Ok::<_, Infallible>(Frame::data(Bytes::new())));
    let request = query_of("/p", &[KIND], Body::new(StreamBody::new(empty_frames)));
    let endless = tokio::spawn(guard.layer(inner).oneshot(request));
    // On this runtime of one thread.
    assert!(read(guard.layer(inner).oneshot(query("a")).await.unwrap()).await.remark().contains("stored"));
    let passed = tokio::time::timeout(secs(10), endless).await.expect("in time").unwrap().unwrap();
    assert_eq!(passed.headers()["cache-status"], "stampede-guard; fwd=bypass; detail=content-slow");
}

/// A client that leaves while its content is read leaves nothing behind.
#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_during_its_content_begins_no_load() {
    let inner = origin();
    let [(guard, site), _] = processes(&inner, || policy().http(http()));
    let (feed, body) = Frames::new();
    let feed = feed.data("ab");
    let leaving = send(&site, query_of("/p", &[KIND], body));
    settle().await;
    leaving.abort();
    assert!(leaving.await.unwrap_err().is_cancelled());
    assert!(feed.0.is_closed());
    assert_eq!((inner.calls(), guard.stats().tasks), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn trailers_pass_with_their_content() {
    for frames in [&[][..], &["ab"], &["ab", "0123456789"]] {
        let request = || {
            let (feed, body) = Frames::new();
            drop(frames.iter().fold(feed, |feed, text| feed.data(text)).trailers("t"));
            query_of("/p", &[KIND], body)
        };
        let seen = both(http, request).await;
        let detail = if frames.len() > 1 { "content-too-long" } else { "content-trailers" };
        passed(&seen, detail, &frames.concat());
        assert_eq!(seen[0].header("x-trailers"), Some("t"));
    }
}

/// B14: a handler that believes the length would answer another question than the key says.
#[tokio::test(start_paused = true)]
async fn content_of_another_length_than_announced_passes() {
    let lies: [&[(&str, &str)]; 5] = [
        &[("content-length", "2")],
        &[("content-length", "4")],
        &[("content-length", "x")],
        &[("content-length", "3"), ("content-length", "4")],
        &[("content-length", "3"), ("transfer-encoding", "chunked")],
    ];
    for lie in lies {
        let headers: Vec<_> = lie.iter().copied().chain([KIND]).collect();
        for frames in [&["abc"][..], &["a", "bc"]] {
            passed(&both(http, || query_of("/p", &headers, streamed(frames))).await, "content-length", "abc");
        }
    }
    for truth in [("content-length", "3"), ("transfer-encoding", "chunked"), ("expect", "100-continue")] {
        let seen = both(http, || query_of("/p", &[KIND, truth], "abc")).await;
        assert!(seen[1].remark().starts_with("hit"), "{truth:?}");
    }
}

/// E1 (RFC 10008, 2): the server fails it.
#[tokio::test(start_paused = true)]
async fn a_query_without_a_content_type_passes_to_the_server_that_fails_it() {
    for headers in [&[][..], &[("content-type", "")], &[("content-encoding", "gzip")]] {
        passed(&both(http, || query_of("/p", headers, "abc")).await, "content-type", "abc");
    }
}

/// The guard makes no body of this type anew, so it does not read it.
#[tokio::test(start_paused = true)]
async fn a_query_with_another_type_of_body_passes() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let shop = super::kit::shop_with(&origin(), policy().http(http()));
    for n in 1..=2 {
        let request = request("QUERY", "/p", &[KIND]).map(|_| Full::from("abc"));
        let seen = super::kit::ask(&shop, request).await;
        assert_eq!((seen.text(), &*seen.remark()), (&*format!("{n} /p abc"), "fwd=bypass; detail=body-type"));
    }
}

mod on_sockets {
    use axum::Router;
    use axum::routing::any;
    use hyper_util::client::legacy::Client;
    use hyper_util::rt::TokioExecutor;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::super::sockets::serve;
    use super::*;
    use crate::support::probe::eventually;

    fn app(guard: &StampedeGuard) -> Router {
        let echo = |body: String| async move { body };
        Router::new().route("/p", any(echo)).layer(guard.clone())
    }

    fn guard() -> StampedeGuard {
        StampedeGuard::in_memory().with_policy(policy().http(http()).build().unwrap())
    }

    /// Both versions find the same response. With chunks over HTTP/1, and without a length over HTTP/2.
    #[tokio::test]
    async fn over_http1_and_http2_queries_are_stored() {
        let guard = guard();
        let addr = serve(app(&guard)).await;
        let builder = Client::builder(TokioExecutor::new());
        let clients = [builder.clone().http2_only(false).clone(), builder.clone().http2_only(true).clone()];
        let mut remarks = Vec::new();
        for builder in clients {
            let client = builder.build_http::<Body>();
            for body in [Body::from("abc"), streamed(&["ab", "c"]), streamed(&["abc", "defghi"])] {
                let request = Request::builder().method("QUERY").uri(format!("http://{addr}/p"));
                let request = request.header(KIND.0, KIND.1).body(body).unwrap();
                let seen = read(client.request(request).await.unwrap()).await;
                assert!(["abc", "abcdefghi"].contains(&seen.text()));
                remarks.push(seen.remark().split(';').next().unwrap().to_owned());
            }
        }
        assert_eq!(remarks, ["fwd=uri-miss", "hit", "fwd=bypass", "hit", "hit", "fwd=bypass"]);
        assert_eq!(guard.stats().loads, 1);
    }

    /// The trailers of a chunked request, on the wire.
    #[tokio::test]
    async fn trailers_on_the_wire_reach_the_handler() {
        let inner = of_axum(&origin());
        let app = Router::new().fallback_service(service_fn(move |request| {
            let inner = inner.clone();
            async move { Ok::<_, Infallible>(inner.oneshot(request).await.unwrap()) }
        }));
        let addr = serve(app.layer(guard())).await;
        let chunks = "3\r\nabc\r\n0\r\nx-last: t\r\n\r\n";
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let head = "QUERY /p HTTP/1.1\r\nHost: shop.example\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\nTrailer: x-last\r\nConnection: close\r\n\r\n";
        stream.write_all(format!("{head}{chunks}").as_bytes()).await.unwrap();
        let mut all = String::new();
        tokio::time::timeout(secs(10), stream.read_to_string(&mut all)).await.expect("an end").unwrap();
        assert!(all.contains("detail=content-trailers") && all.contains("x-trailers: t"), "{all}");
        assert!(all.ends_with("1 /p abc"), "{all}");
    }

    /// The server asks for the content when the guard reads it. A client that never sends it holds nothing for longer than a second.
    #[tokio::test]
    async fn a_client_that_expects_100_continue_sends_its_content_and_is_answered() {
        let guard = guard();
        let addr = serve(app(&guard)).await;
        let head = "QUERY /p HTTP/1.1\r\nHost: shop.example\r\nContent-Type: a/b\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n";
        let mut answers = Vec::new();
        for _ in 0..2 {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut interim = [0; 25];
            tokio::time::timeout(secs(10), stream.read_exact(&mut interim)).await.expect("a 100").unwrap();
            assert_eq!(std::str::from_utf8(&interim).unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
            stream.write_all(b"abc").await.unwrap();
            let mut all = String::new();
            tokio::time::timeout(secs(10), stream.read_to_string(&mut all)).await.expect("an end").unwrap();
            assert!(all.starts_with("HTTP/1.1 200 OK") && all.ends_with("abc"), "{all}");
            answers.push(all.contains("; hit;"));
        }
        assert_eq!((answers, guard.stats().loads), (vec![false, true], 1));
        let mut silent = TcpStream::connect(addr).await.unwrap();
        silent.write_all(head.as_bytes()).await.unwrap();
        eventually("it was passed on", secs(10), async || guard.stats().bypassed == 1).await;
    }
}
