//! Stale responses (RFC 5861): they are served while they are loaded again, and in place of the origin's failures.

use std::time::Duration;

use tower::{Layer as _, ServiceExt as _};

use super::kit::{
    Down, Inner, all, ask, get, policy, replicas, replicas_with, request, respond, secs, send, send_many,
    settle, shop_with, whole,
};

/// The first call is answered with `Cache-Control: control`, all later ones with a new text, or with the status that `then` returns.
fn origin(control: &'static str, then: fn(usize) -> Option<u16>) -> Inner {
    Inner::with(move |n, _| match then(n) {
        None => Ok(respond(200, &[("cache-control", control)], whole(n.to_string()))),
        Some(0) => Err(Down("no route".into())),
        Some(status) => Ok(respond(status, &[], whole("sorry"))),
    })
}

fn always(_: usize) -> Option<u16> {
    None
}

#[tokio::test(start_paused = true)]
async fn stale_while_revalidate_answers_all_requests_at_once_and_asks_once() {
    let inner = origin("max-age=10, stale-while-revalidate=30", always);
    let shops = replicas(3, &inner);
    assert_eq!(ask(&shops[0], get("/")).await.text(), "1");
    tokio::time::sleep(secs(12)).await;
    let inner = inner.held();
    // The origin is held, so a client that waited for it would not be answered.
    for shop in &shops {
        for seen in all(send_many(shop, 10, "/")).await {
            assert_eq!((seen.text(), seen.remark().as_str()), ("1", "hit; ttl=-2"));
            assert_eq!(seen.header("age"), Some("12"));
        }
    }
    assert_eq!(inner.calls(), 2, "one background load in the fleet");
    inner.gate.open();
    settle().await;
    assert_eq!(ask(&shops[2], get("/")).await.text(), "2");
}

/// As with values, the next caller loads an expired response again.
#[tokio::test(start_paused = true)]
async fn a_response_that_was_expired_is_not_served_stale() {
    let inner =
        origin("max-age=10, stale-while-revalidate=30, stale-if-error=30", |n| (n > 2).then_some(503));
    let guard = super::kit::guard();
    let shop = guard.layer(inner.clone());
    let key = || stampede_guard::http::cache_key(&"http://shop.example/".parse().unwrap()).unwrap();
    ask(&shop, get("/")).await;
    guard.expire(key()).await.unwrap();
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
    guard.expire(key()).await.unwrap();
    assert_eq!(ask(&shop, get("/")).await.text(), "2", "it stands in for a load that fails");
    assert_eq!(inner.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn past_the_window_requests_wait_for_the_load() {
    let inner = origin("max-age=10, stale-while-revalidate=5", always);
    let shop = shop_with(&inner, policy());
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(16)).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
}

/// RFC 5861, 4: an error is 500, 502, 503, 504, an equivalent (a 408 to a request without a body), or no answer.
#[tokio::test(start_paused = true)]
async fn stale_if_error_stands_in_for_the_origins_failures_and_for_nothing_else() {
    for (failure, stands_in) in [
        (500, true),
        (502, true),
        (503, true),
        (504, true),
        (408, true),
        (0, true),
        (501, false),
        (404, false),
    ] {
        let inner = Inner::with(move |n, _| match (n, failure) {
            (1, _) => Ok(respond(200, &[("cache-control", "max-age=10, stale-if-error=60")], whole("old"))),
            (_, 0) => Err(Down("no route".into())),
            (_, status) => Ok(respond(status, &[], whole("sorry"))),
        });
        let shops = replicas_with(2, &inner, policy().back_off(secs(5)));
        ask(&shops[0], get("/")).await;
        tokio::time::sleep(secs(11)).await;
        let seen = ask(&shops[0], get("/")).await;
        let expected = if stands_in { (200, "old") } else { (failure, "sorry") };
        assert_eq!((seen.status, seen.text()), expected, "{failure}");
        if stands_in {
            assert_eq!(ask(&shops[1], get("/")).await.text(), "old");
            assert_eq!(inner.calls(), 2, "{failure}: the origin is left alone");
        }
    }
}

/// RFC 9110, 10.2.3: the whole fleet sends no request for the time in `Retry-After`, up to sixty times `back_off`.
#[tokio::test(start_paused = true)]
async fn a_failing_origin_says_for_how_long_it_is_left_alone() {
    for (retry_after, rests) in [("20", 20), ("1", 2), ("1000", 120), ("soon", 2)] {
        let inner = Inner::with(move |n, _| match n {
            1 => Ok(respond(200, &[("cache-control", "max-age=10, stale-if-error=600")], whole("old"))),
            _ => Ok(respond(503, &[("retry-after", retry_after)], whole("sorry"))),
        });
        let shops = replicas_with(2, &inner, policy().back_off(secs(2)));
        ask(&shops[0], get("/")).await;
        tokio::time::sleep(secs(11)).await;
        assert_eq!(ask(&shops[0], get("/")).await.text(), "old");
        tokio::time::sleep(secs(rests) - Duration::from_millis(500)).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), "old");
        assert_eq!(inner.calls(), 2, "{retry_after}: the origin is left alone");
        tokio::time::sleep(secs(1)).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), "old");
        assert_eq!(inner.calls(), 3, "{retry_after}: it is asked again");
    }
}

/// A client that refuses stale responses receives the origin's own answer, and not the stand-in that other clients receive.
#[tokio::test(start_paused = true)]
async fn a_client_that_refuses_stale_responses_receives_no_stand_in() {
    let inner = origin("max-age=10, stale-if-error=60", |n| (n > 1).then_some(503));
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let inner = inner.held();
    let content: Vec<_> = shops.iter().map(|shop| send(shop, get("/"))).collect();
    settle().await;
    let strict = request("GET", "/", &[("cache-control", "no-cache")]);
    let insisting = send(&shops[1], strict);
    settle().await;
    inner.gate.open();
    for seen in all(content).await {
        assert_eq!(seen.text(), "1");
    }
    let seen = insisting.await.unwrap();
    assert_eq!((seen.status, seen.text()), (503, "sorry"));
}

/// If a client accepts nothing else, it receives the inner service's error itself.
#[tokio::test(start_paused = true)]
async fn a_client_that_refuses_stale_responses_receives_the_error_itself() {
    let inner = origin("max-age=10, stale-if-error=60", |n| (n > 1).then_some(0));
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let strict = || request("GET", "/", &[("cache-control", "no-cache")]);
    for shop in &shops {
        assert!(shop.clone().oneshot(strict()).await.is_err());
        assert_eq!(ask(shop, get("/")).await.text(), "1");
    }
}

#[tokio::test(start_paused = true)]
async fn the_policys_windows_are_for_responses_that_say_nothing_and_forbid_nothing() {
    let stale = [
        ("max-age=10", true),
        ("max-age=10, stale-while-revalidate=0", false),
        ("max-age=10, must-revalidate", false),
        ("s-maxage=10", false),
    ];
    for (control, served) in stale {
        let inner = origin(control, always);
        let shop = shop_with(&inner, policy().stale_while_revalidate(secs(60)));
        ask(&shop, get("/")).await;
        tokio::time::sleep(secs(11)).await;
        let text = if served { "1" } else { "2" };
        assert_eq!(ask(&shop, get("/")).await.text(), text, "{control}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_policys_windows_may_be_shorter_than_a_second() {
    let half = std::time::Duration::from_millis(500);
    for (after, text) in [(10_400, "1"), (10_600, "2")] {
        let inner = origin("max-age=10", always);
        let shop = shop_with(&inner, policy().stale_while_revalidate(half));
        ask(&shop, get("/")).await;
        tokio::time::sleep(std::time::Duration::from_millis(after)).await;
        assert_eq!(ask(&shop, get("/")).await.text(), text, "after {after} ms");
    }
    // And when a load fails.
    for (after, status) in [(10_400, 200), (10_600, 503)] {
        let inner = origin("max-age=10", |n| (n > 1).then_some(503));
        let shop = shop_with(&inner, policy().stale_if_error(half));
        ask(&shop, get("/")).await;
        tokio::time::sleep(std::time::Duration::from_millis(after)).await;
        assert_eq!(ask(&shop, get("/")).await.status, status, "after {after} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_range_that_triggers_a_refresh_asks_for_the_whole() {
    let inner = Inner::with(|n, request| {
        assert!(!request.headers().contains_key("range"), "its answer is for everyone");
        let headers = [("cache-control", "max-age=10, stale-while-revalidate=30"), ("etag", "\"a\"")];
        Ok(respond(200, &headers, whole(format!("whole {n}"))))
    });
    let shop = shop_with(&inner, policy());
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let part = ask(&shop, super::kit::request("GET", "/", &[("range", "bytes=0-3")])).await;
    assert_eq!((part.status, part.text()), (206, "whol"));
    settle().await;
    assert_eq!(ask(&shop, get("/")).await.text(), "whole 2");
}

/// A response that was loaded for credentials is stored under the resource's lease, which an invalidation ends. Clients that come after the
/// invalidation must not receive the load from before it.
#[tokio::test(start_paused = true)]
async fn an_invalidation_overtakes_a_load_for_credentials() {
    use stampede_guard::http::{HttpPolicy, cache_key};
    let inner =
        Inner::with(|n, _| Ok(respond(200, &[("cache-control", "s-maxage=60")], whole(n.to_string()))));
    let inner = inner.held_separately();
    let http = HttpPolicy::default().share_authorized(true);
    let guard = super::kit::guard().with_policy(policy().http(http).build().unwrap());
    let shop = guard.layer(inner.clone());
    let send = || {
        let shop = shop.clone();
        let request = super::kit::request("GET", "/", &[("authorization", "ann")]);
        tokio::spawn(async move { ask(&shop, request).await })
    };
    let before = send();
    settle().await;
    guard.invalidate(cache_key(&"http://shop.example/".parse().unwrap()).unwrap()).await.unwrap();
    let after = send();
    settle().await;
    inner.open_first();
    settle().await;
    inner.gate.open();
    assert_eq!(before.await.unwrap().text(), "1");
    assert_eq!(after.await.unwrap().text(), "2", "its own");
    assert_eq!(ask(&shop, get("/")).await.text(), "3", "what was overtaken is not stored");
}

/// As with values, the stale window counts from the expiry, however long ago the response was stored. All clients receive the response, and
/// none loads alone.
#[tokio::test(start_paused = true)]
async fn a_response_that_is_expired_late_stands_in_for_all_clients() {
    for failure in [503, 0] {
        let inner = Inner::with(move |n, _| match (n, failure) {
            (1, _) => Ok(respond(200, &[("cache-control", "max-age=3600, stale-if-error=60")], whole("1"))),
            (_, 0) => Err(Down("no route".into())),
            _ => Ok(respond(failure, &[], whole("sorry"))),
        });
        let guard = super::kit::guard();
        let shop = guard.layer(inner.clone());
        ask(&shop, get("/")).await;
        tokio::time::sleep(secs(600)).await;
        guard
            .expire(stampede_guard::http::cache_key(&"http://shop.example/".parse().unwrap()).unwrap())
            .await
            .unwrap();
        for seen in all(send_many(&shop, 10, "/")).await {
            assert_eq!(seen.text(), "1", "{failure}: {}", seen.remark());
        }
        assert_eq!(inner.calls(), 2, "{failure}");
        let seen = ask(&shop, get("/")).await;
        assert_eq!((seen.text(), seen.remark().as_str()), ("1", "hit; ttl=-600"));
        assert_eq!(inner.calls(), 2, "{failure}: the origin rests");
    }
}
