//! A 304 with another validator than the request's condition (RFC 9111, 4.3.4) does not select the stored response.

use stampede_guard::http::HttpPolicy;

use super::kit::{
    Boxed, Inner, all, ask, get, policy, replicas_with, request, respond, secs, send_many, sent, settle,
    shop, shop_with, whole,
};

const CHANGED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

/// Answers with the call's number as text and tag. The second call is a validation, and gets a 304 with another tag,
/// as from an origin that compares dates only.
fn origin(control: &'static str) -> Inner {
    Inner::with(move |n, request| {
        let conditional = !sent(request, "if-none-match").is_empty();
        assert_eq!(conditional, n == 2, "call {n}");
        let tag = format!("\"{n}\"");
        let control = if n == 1 { control } else { "max-age=10" };
        let headers = [("etag", &*tag), ("last-modified", CHANGED), ("cache-control", control)];
        Ok(match conditional {
            true => respond(304, &headers, Boxed::default()),
            false => respond(200, &headers, whole(n.to_string())),
        })
    })
}

#[tokio::test(start_paused = true)]
async fn a_contradictory_304_is_an_error_once_and_then_the_whole_is_loaded() {
    let inner = origin("max-age=10");
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(12)).await;
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.status, seen.remark().as_str()), (502, "fwd=miss; detail=not-validated"));
    assert_eq!(ask(&shop, get("/")).await.text(), "3");
    let hit = ask(&shop, get("/")).await;
    assert_eq!((hit.text(), hit.remark().as_str()), ("3", "hit; ttl=10"));
}

/// Regression: each waiter sent its own request, so a validation that could not succeed became a stampede.
#[tokio::test(start_paused = true)]
async fn waiters_for_a_contradictory_304_share_one_load_of_the_whole() {
    for (control, first) in [("max-age=10", 502), ("max-age=10, stale-if-error=60", 200)] {
        let inner = origin(control);
        let shops = replicas_with(2, &inner, policy());
        ask(&shops[0], get("/")).await;
        tokio::time::sleep(secs(12)).await;
        inner.gate.close();
        let leader = super::kit::send(&shops[0], get("/"));
        settle().await;
        let waiting: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 10, "/")).collect();
        settle().await;
        assert_eq!(inner.calls(), 2, "one validation in the fleet");
        inner.gate.open();
        assert_eq!(leader.await.unwrap().status, first, "{control}");
        for seen in all(waiting).await {
            assert_eq!((seen.status, seen.text()), (200, "3"), "{control}: {}", seen.remark());
        }
        assert_eq!(inner.calls(), 3, "{control}");
    }
}

/// RFC 5861, 4: without a stand-in, the client would get a 502.
#[tokio::test(start_paused = true)]
async fn the_validated_response_stands_in_once_if_it_may() {
    for (control, asks_for, stands_in) in [
        ("max-age=10, stale-if-error=60", "", true),
        ("max-age=10, stale-if-error=60", "no-cache", false),
        ("max-age=10, stale-if-error=1", "", false),
        ("max-age=10, stale-if-error=60, must-revalidate", "", false),
    ] {
        let inner = origin(control);
        let shop = shop_with(&inner, policy().http(HttpPolicy::default()));
        ask(&shop, get("/")).await;
        tokio::time::sleep(secs(12)).await;
        let seen = ask(&shop, request("GET", "/", &[("cache-control", asks_for)])).await;
        if stands_in {
            assert_eq!((seen.status, seen.text(), seen.header("age")), (200, "1", Some("12")), "{control}");
            assert_eq!(seen.remark(), "fwd=stale; fwd-status=304; ttl=-2; detail=not-validated");
        } else {
            assert_eq!(seen.status, 502, "{control} {asks_for}");
        }
        assert_eq!(ask(&shop, get("/")).await.text(), "3", "what can not be validated is removed");
    }
}

/// Where the guard can make an empty body of the request's type, as for axum's, it sends the request again: no client
/// sees the origin's contradiction.
#[cfg(feature = "axum")]
#[tokio::test(start_paused = true)]
async fn a_request_of_axum_is_sent_again_without_the_guards_conditions() {
    use axum::body::Body;
    use http::Request;
    use http_body_util::Full;
    use tower::util::MapRequestLayer;
    use tower::{Layer as _, ServiceBuilder};

    let guard = |store: &stampede_guard::MemoryStore| {
        stampede_guard::StampedeGuard::new(store.clone()).with_policy(policy().build().unwrap())
    };
    // The third call has no conditions. It gets the whole response, or another contradiction.
    for (third, loads, first) in [(200, 3, 200), (304, 4, 502)] {
        let inner = Inner::with(move |n, request| {
            let (mine, ours) = (sent(request, "x-mine"), sent(request, "if-none-match"));
            assert_eq!((mine, ours), ("1", if n == 2 { "\"1\"" } else { "" }), "call {n}");
            assert_eq!(request.extensions().get::<u8>(), Some(&7));
            let tag = format!("\"{n}\"");
            let headers = [("etag", &*tag), ("cache-control", "max-age=10")];
            Ok(match n {
                2 => respond(304, &headers, Boxed::default()),
                3 if third == 304 => respond(304, &headers, Boxed::default()),
                _ => respond(200, &headers, whole(n.to_string())),
            })
        });
        let to_kit = MapRequestLayer::new(|request: Request<Body>| request.map(|_| Full::default()));
        let to_axum = MapRequestLayer::new(|request: super::kit::Req| request.map(|_| Body::empty()));
        let store = stampede_guard::MemoryStore::new();
        let shops = [(); 2].map(|()| {
            let guarded = guard(&store).layer(to_kit.layer(inner.clone()));
            ServiceBuilder::new().layer(to_axum.clone()).service(guarded)
        });
        let mine = || {
            let mut request = request("GET", "/", &[("x-mine", "1")]);
            request.extensions_mut().insert(7u8);
            request
        };
        ask(&shops[0], mine()).await;
        tokio::time::sleep(secs(12)).await;
        inner.gate.close();
        let leader = super::kit::send(&shops[0], mine());
        settle().await;
        let waiting: Vec<_> = (0..20).map(|n| super::kit::send(&shops[n % 2], mine())).collect();
        settle().await;
        inner.gate.open();
        let leader = leader.await.unwrap();
        assert_eq!(leader.status, first, "{}", leader.remark());
        if third == 200 {
            assert_eq!(leader.remark(), "fwd=stale; stored; ttl=10");
        }
        for seen in all(waiting).await {
            assert_eq!((seen.status, seen.text()), (200, loads.to_string().as_str()), "{}", seen.remark());
        }
        assert_eq!(inner.calls(), loads);
    }
}

/// Removing an entry under a load's own lease removes the lease as well.
#[cfg(feature = "redis")]
#[tokio::test]
async fn waiters_for_a_contradictory_304_share_one_load_on_redis_too() {
    use stampede_guard::StampedeGuard;
    use tower::Layer as _;

    use crate::support::probe::eventually;

    let server = crate::support::redis_server::RedisServer::start();
    let inner = origin("max-age=1");
    let mut shops = Vec::new();
    for _ in 0..2 {
        let patient = policy().coordination_budget(secs(8)).command_timeout(secs(2)).lease(secs(8));
        let client = redis::Client::open(server.minimal_user()).unwrap();
        let guard = StampedeGuard::new(client).with_policy(patient.build().unwrap());
        crate::redis::connects(&guard).await;
        shops.push((guard.layer(inner.clone()), guard));
    }
    ask(&shops[0].0, get("/")).await;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    inner.gate.close();
    let waiting: Vec<_> = shops.iter().flat_map(|(shop, _)| send_many(shop, 10, "/")).collect();
    inner.loads.reach(2).await;
    for (_, guard) in &shops {
        eventually("all have called", secs(10), async || guard.stats().flights == 1).await;
    }
    inner.gate.open();
    let mut answers: Vec<_> = all(waiting).await.iter().map(|seen| seen.status).collect();
    answers.sort_unstable();
    assert_eq!((answers.pop(), answers.iter().all(|status| *status == 200)), (Some(502), true));
    assert_eq!(inner.calls(), 3);
}
