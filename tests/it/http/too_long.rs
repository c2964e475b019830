//! Bodies over `max_body` whose head does not say their length, as handlers make them: the server adds the length only outside of the
//! layer.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use stampede_guard::StampedeGuard;
use tower::Layer as _;

use super::kit::{Boxed, Down, Feed, Inner, Shop, all, ask, get, policy, secs, send_many, settle, whole};
use crate::support::warnings::Warnings;

const MOST: usize = 1000;

/// A body that knows a lower bound of its length, and no upper bound.
struct AtLeast(Boxed, u64);

impl Body for AtLeast {
    type Data = Bytes;
    type Error = Down;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Down>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        hint.set_lower(self.1);
        hint
    }
}

fn long(length: usize) -> Boxed {
    whole("x".repeat(length))
}

/// A body without a size hint, with all data ready.
fn unannounced(length: usize) -> Boxed {
    let (feed, body) = Feed::new();
    feed.data(&"x".repeat(length));
    body
}

fn guarded(inner: &Inner) -> (StampedeGuard, Shop) {
    let policy = policy().max_body(MOST).load_timeout(secs(10)).build().unwrap();
    let guard = StampedeGuard::in_memory().with_policy(policy);
    let shop = guard.layer(inner.clone());
    (guard, shop)
}

/// Regression: such a body was reported as stored and buffered, and then loaded by each waiter.
#[tokio::test(start_paused = true)]
async fn a_body_with_a_size_hint_over_max_body_is_decided_at_its_head() {
    let exact: fn() -> Boxed = || long(MOST + 1);
    let lower: fn() -> Boxed = || AtLeast(Feed::new().1, MOST as u64 + 1).boxed_unsync();
    for body in [exact, lower] {
        let inner = Inner::with(move |_, _| Ok(Response::new(body()))).held();
        let (_, shop) = guarded(&inner);
        let followers = send_many(&shop, 5, "/");
        settle().await;
        assert_eq!(inner.calls(), 1);
        inner.gate.open();
        settle().await;
        assert_eq!(inner.calls(), 5, "none waits for the body");
        let remarks: Vec<_> = all(followers).await.iter().map(|seen| seen.remark()).collect();
        assert!(remarks.iter().any(|remark| remark == "fwd=uri-miss; detail=too-big"), "{remarks:?}");
        assert!(!remarks.iter().any(|remark| remark.contains("stored")), "{remarks:?}");
    }
    // Exactly `max_body` is not too long, whatever the size hint.
    for body in [|| long(MOST), || AtLeast(long(MOST), MOST as u64).boxed_unsync()] {
        let (_, shop) = guarded(&Inner::with(move |_, _| Ok(Response::new(body()))));
        assert_eq!(ask(&shop, get("/")).await.remark(), "fwd=uri-miss; stored; ttl=60");
        assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=60");
    }
}

/// Its length is known before its head is sent, so the head must not say `stored`.
#[tokio::test(start_paused = true)]
async fn a_body_found_too_long_before_its_head_is_sent_is_not_reported_as_stored() {
    let (_, shop) = guarded(&Inner::with(|_, _| Ok(Response::new(unannounced(MOST + 1)))));
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.body.len(), seen.remark().as_str()), (MOST + 1, "fwd=uri-miss; detail=too-big"));
}

/// Regression: a hot route was no longer protected, and nothing said so.
#[tokio::test(start_paused = true)]
async fn bodies_that_are_too_long_are_recorded_and_warned_of_once_a_minute() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let inner = Inner::with(|n, _| {
        let mut response = Response::new(match n {
            1 => long(MOST + 1),
            2 => unannounced(MOST + 1),
            _ => whole("short"),
        });
        if n == 3 {
            response.headers_mut().insert("content-length", "1001".parse().unwrap());
        }
        if n == 5 {
            response.headers_mut().insert("cache-control", "no-store".parse().unwrap());
        }
        Ok(response)
    });
    let (guard, shop) = guarded(&inner);
    for n in 1..=3 {
        assert_eq!(guard.stats().unshareable, n - 1);
        let response = tower::ServiceExt::oneshot(shop.clone(), get(&format!("/secret/{n}"))).await.unwrap();
        // The third body is not as long as it says, which its client notices.
        let _ = response.into_body().collect().await;
        settle().await;
    }
    assert_eq!(guard.stats().unshareable, 3, "sized, unannounced, and by its header");
    let warned = warnings.about("longer than max_body");
    assert_eq!(warned.len(), 1, "{warnings:?}");
    assert!(warned[0].contains("Key(#") && warned[0].contains("1001 1000 "), "{warned:?}");
    assert!(!warned[0].contains("secret"), "{warned:?}");

    ask(&shop, get("/short")).await;
    ask(&shop, get("/not-shared-for-another-reason")).await;
    assert_eq!((inner.calls(), guard.stats().unshareable), (5, 3));
}

/// A body that is slow is not too long: a greater `max_body` would not help.
#[tokio::test(start_paused = true)]
async fn a_body_that_times_out_is_not_reported_as_too_long() {
    let (feed, body) = Feed::new();
    let (guard, shop) = guarded(&Inner::in_turn([Response::new(body)]));
    let response = tower::ServiceExt::oneshot(shop, get("/")).await.unwrap();
    tokio::time::sleep(secs(11)).await;
    drop(feed);
    response.into_body().collect().await.unwrap();
    assert_eq!(guard.stats().unshareable, 0);
}

/// Regression: it could not be read, each client received the origin's, and a marker replaced the other process's response.
#[cfg(feature = "lz4")]
#[tokio::test(start_paused = true)]
async fn a_body_over_max_body_that_another_process_has_stored_is_served() {
    let store = stampede_guard::MemoryStore::new();
    let inner = Inner::with(|_, _| Ok(Response::new(long(400_000))));
    let shops: [Shop; 2] = [policy().compress_from(MOST), policy().max_body(MOST)].map(|policy| {
        let policy = policy.build().unwrap();
        StampedeGuard::builder(store.clone()).policy(policy).build().unwrap().layer(inner.clone())
    });
    for _ in 0..3 {
        for shop in &shops {
            assert_eq!(ask(shop, get("/")).await.body.len(), 400_000);
        }
    }
    assert_eq!(inner.calls(), 1);
}
