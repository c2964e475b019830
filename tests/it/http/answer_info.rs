//! `AnswerInfo` in the extensions of a response says what the guard did. It is checked on each way to an answer.

use stampede_guard::http::HttpPolicy;
use stampede_guard::{AnswerInfo, Outcome};
use tower::ServiceExt as _;

use super::kit::{
    Down, Inner, Req, Shop, get, policy, replicas_with, request, respond, secs, settle, shop_with, whole,
};

async fn info(shop: &Shop, request: Req) -> Option<AnswerInfo> {
    shop.clone().oneshot(request).await.unwrap().extensions().get().copied()
}

/// Returns the outcome, the age and the remaining freshness of the response to this request, with the times in seconds.
async fn outcome_of(shop: &Shop, request: Req) -> (Outcome, u64, u64) {
    let info = info(shop, request).await.expect("an AnswerInfo");
    (info.outcome, info.age.as_secs(), info.fresh_for.as_secs())
}

fn telling() -> HttpPolicy {
    HttpPolicy::default().answer_info(true)
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_no_response_has_an_answer_info() {
    let shop = shop_with(&Inner::with_headers(&[("cache-control", "max-age=60")]), policy());
    for request in [get("/"), get("/"), request("POST", "/", &[])] {
        assert_eq!(info(&shop, request).await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn each_outcome_is_reported_with_its_times() {
    let inner =
        Inner::with_headers(&[("cache-control", "max-age=60, stale-while-revalidate=30"), ("etag", "\"1\"")]);
    let shop = shop_with(&inner, policy().http(telling()));
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Led, 0, 60));
    tokio::time::sleep(secs(10)).await;
    for hit in [
        get("/"),
        request("HEAD", "/", &[]),
        request("GET", "/", &[("if-none-match", "\"1\"")]),
        request("GET", "/", &[("range", "bytes=0-0")]),
    ] {
        assert_eq!(outcome_of(&shop, hit).await, (Outcome::Hit, 10, 50));
    }
    tokio::time::sleep(secs(60)).await;
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Stale, 70, 0));
    settle().await;
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Hit, 0, 59), "refreshed in the background");
    for passed in
        [request("GET", "/", &[("cookie", "a=b")]), request("POST", "/", &[]), request("HEAD", "/new", &[])]
    {
        assert_eq!(outcome_of(&shop, passed).await, (Outcome::Bypassed, 0, 0));
    }
    let only = request("GET", "/new", &[("cache-control", "only-if-cached")]);
    assert_eq!(outcome_of(&shop, only).await, (Outcome::Failed, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_outcome_of_a_waiter_is_coalesced() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=60")]).held();
    let shops = replicas_with(2, &inner, policy().http(telling()));
    let calls: Vec<_> = (0..6)
        .map(|n| {
            let shop = shops[n % 2].clone();
            tokio::spawn(async move { outcome_of(&shop, get("/")).await })
        })
        .collect();
    settle().await;
    inner.gate.open();
    let mut led = 0;
    for one in calls {
        match one.await.unwrap() {
            (Outcome::Led, 0, 60) => led += 1,
            other => assert_eq!(other, (Outcome::Coalesced, 0, 60)),
        }
    }
    assert_eq!(led, 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_of_a_failed_load_has_failed_and_a_response_for_one_client_is_not_fresh() {
    let inner = Inner::with(|_, _| Err(Down("closed".into()))).held();
    let shop = shop_with(&inner, policy().http(telling()));
    let leader = tokio::spawn(shop.clone().oneshot(get("/")));
    settle().await;
    let waiter = tokio::spawn({
        let shop = shop.clone();
        async move { outcome_of(&shop, get("/")).await }
    });
    settle().await;
    inner.gate.open();
    assert_eq!(leader.await.unwrap().unwrap_err(), Down("closed".into()));
    assert_eq!(waiter.await.unwrap(), (Outcome::Failed, 0, 0));

    let shop = shop_with(
        &Inner::with_headers(&[("cache-control", "private, max-age=60")]),
        policy().http(telling()),
    );
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Led, 0, 0));
}

/// A 304 from the origin makes the stored response fresh again, and the client whose request was validated counts as the leader of that
/// load.
#[tokio::test(start_paused = true)]
async fn a_validated_response_is_led_and_fresh() {
    let headers = [("cache-control", "max-age=60"), ("etag", "\"1\"")];
    let inner = Inner::in_turn([respond(200, &headers, whole("a")), respond(304, &headers, whole(""))]);
    let shop = shop_with(&inner, policy().http(telling()));
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Led, 0, 60));
    tokio::time::sleep(secs(61)).await;
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Led, 0, 60));
    assert_eq!(outcome_of(&shop, get("/")).await, (Outcome::Hit, 0, 60));
}

#[tokio::test(start_paused = true)]
async fn a_hit_from_memory_is_reported_as_such() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=60")]);
    let shop = shop_with(&inner, policy().http(telling()).local_for(secs(60)));
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        outcomes.push(outcome_of(&shop, get("/")).await);
        settle().await;
    }
    assert_eq!(outcomes.first(), Some(&(Outcome::Led, 0, 60)));
    assert_eq!(outcomes.last().map(|(outcome, ..)| *outcome), Some(Outcome::LocalHit), "{outcomes:?}");
}
