//! If a handler panics, its own client receives no answer, and all other clients receive theirs.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;

use super::kit::{
    Down, Inner, Req, all, ask, get, guard, replicas, request, respond, send_many, settle, shop, whole,
};

#[tokio::test(start_paused = true)]
async fn a_panicking_handler_is_502_for_its_client_and_one_waiter_takes_over() {
    let inner = Inner::with(|n, _| {
        assert!(n > 1, "scripted panic");
        Ok(respond(200, &[], whole(n.to_string())))
    })
    .held();
    let shop = shop(&inner);
    let clients = send_many(&shop, 20, "/");
    settle().await;
    inner.gate.open();
    let seen = all(clients).await;
    let (ill, well): (Vec<_>, Vec<_>) = seen.iter().partition(|seen| seen.status != 200);
    assert_eq!((ill.len(), well.len()), (1, 19));
    assert_eq!((ill[0].status, ill[0].remark().as_str()), (502, "fwd=miss; detail=load-panicked"));
    assert!(!ill[0].text().contains("scripted"));
    assert!(well.iter().all(|seen| seen.text() == "2"));
    let mut remarks: Vec<_> = well.iter().map(|seen| seen.remark()).collect();
    remarks.sort();
    assert_eq!(remarks[18], "fwd=uri-miss; stored; ttl=60", "the one that took over led");
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_panic_without_local_waiters_hands_over_to_another_process() {
    let inner = Inner::with(|n, _| {
        assert!(n > 1, "scripted panic");
        Ok(respond(200, &[], whole(n.to_string())))
    })
    .held();
    let shops = replicas(2, &inner);
    let leader = send_many(&shops[0], 1, "/");
    settle().await;
    let others = send_many(&shops[1], 10, "/");
    settle().await;
    let started = tokio::time::Instant::now();
    inner.gate.open();
    assert_eq!(all(leader).await[0].status, 502);
    assert!(all(others).await.iter().all(|seen| seen.text() == "2"));
    assert!(started.elapsed().as_millis() < 500, "no lease was waited for: {:?}", started.elapsed());
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_always_panics_fails_the_wave_after_bounded_takeovers() {
    let inner = Inner::with(|_, _| panic!("scripted panic")).held();
    let shop = shop(&inner);
    let clients = send_many(&shop, 50, "/");
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.status == 502));
    assert_eq!(inner.calls(), 4, "the first and three takeovers");
}

/// A body that panics after its first bytes, at once or after a pause.
struct Mine {
    waits: bool,
    polled: usize,
}

impl Body for Mine {
    type Data = Bytes;
    type Error = Down;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Down>>> {
        self.polled += 1;
        match self.polled {
            1 => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"abc"))))),
            2 if self.waits => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            _ => panic!("scripted panic"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_panics_is_an_error_for_its_client_and_a_waiter_loads_again() {
    for waits in [false, true] {
        let inner = Inner::with(move |n, _| {
            Ok(match n {
                1 => http::Response::new(Mine { waits, polled: 0 }.boxed_unsync()),
                _ => respond(200, &[], whole(n.to_string())),
            })
        })
        .held();
        let shop = shop(&inner);
        let leader = tokio::spawn(shop.clone().oneshot(get("/")));
        settle().await;
        let followers = send_many(&shop, 10, "/");
        settle().await;
        inner.gate.open();
        let response = leader.await.unwrap().unwrap();
        if waits {
            let error = response.into_body().collect().await.expect_err("the head and a part were sent");
            assert!(error.to_string().contains("cut off"), "{error}");
        } else {
            assert_eq!(response.status(), 502, "nothing was sent yet");
        }
        assert!(all(followers).await.iter().all(|seen| seen.text() == "2"));
        assert_eq!(ask(&shop, get("/")).await.text(), "2");
        assert_eq!(inner.calls(), 2);
    }
}

/// A7: a service may panic in `call`, before there is a future to wait for.
#[tokio::test(start_paused = true)]
async fn an_unsafe_request_that_panics_in_its_call_invalidates_its_target() {
    let service = tower::service_fn(|request: Req| {
        assert!(request.method() == "GET", "scripted panic");
        std::future::ready(Ok::<_, Down>(respond(200, &[("cache-control", "max-age=60")], whole("text"))))
    });
    let shop = tower::Layer::layer(&guard(), service);
    ask(&shop, get("/")).await;
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit"));
    let change = tokio::spawn(shop.clone().oneshot(request("PUT", "/", &[])));
    assert!(change.await.is_err_and(|error| error.is_panic()));
    settle().await;
    assert!(!ask(&shop, get("/")).await.remark().starts_with("hit"));
}
