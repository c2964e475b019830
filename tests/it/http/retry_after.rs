//! `HttpPolicy::retry_after`: after a 503 with `Retry-After` no process loads the resource before that time.

use std::time::Duration;

use stampede_guard::Policy;
use stampede_guard::http::{HttpPolicy, RateLimitScope};

use super::kit::{
    Inner, Seen, Shop, all, ask, get, policy, replicas, replicas_with, request, respond, secs, send_many,
    settle, whole,
};

fn holding(inner: &Inner) -> Vec<Shop> {
    replicas_with(2, inner, policy().http(HttpPolicy::default().retry_after(secs(60))))
}

/// Answers 503 with this `Retry-After` to the first call, and then 200.
fn failing_once(after: &'static str) -> Inner {
    Inner::with(move |n, _| {
        Ok(match n {
            1 => respond(503, &[("retry-after", after)], whole("down")),
            _ => respond(200, &[("cache-control", "max-age=60")], whole("up")),
        })
    })
}

fn facts(seen: &Seen) -> (u16, Option<&str>, String) {
    (seen.status, seen.header("retry-after"), seen.remark())
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_the_next_request_loads() {
    let inner = failing_once("10");
    let shops = replicas(2, &inner);
    assert_eq!(ask(&shops[0], get("/")).await.status, 503);
    assert_eq!(ask(&shops[1], get("/")).await.text(), "up");
}

#[tokio::test(start_paused = true)]
async fn no_process_loads_before_the_time_and_clients_see_it_counted_down() {
    let inner = failing_once("10");
    let shops = holding(&inner);
    let seen = ask(&shops[0], get("/")).await;
    assert_eq!(facts(&seen), (503, Some("10"), "fwd=uri-miss; detail=not-stored".to_owned()));
    tokio::time::sleep(Duration::from_millis(3_200)).await;
    for shop in &shops {
        // A client that insists on a load gets none.
        for request in [get("/"), request("GET", "/", &[("cache-control", "no-cache")])] {
            let seen = ask(shop, request).await;
            assert_eq!(facts(&seen), (503, Some("7"), "fwd=uri-miss; detail=retry-after".to_owned()));
        }
    }
    let clients = all(shops.iter().flat_map(|shop| send_many(shop, 20, "/")).collect()).await;
    assert!(clients.iter().all(|seen| (seen.status, seen.header("retry-after")) == (503, Some("7"))));
    assert_eq!(ask(&shops[1], get("/other")).await.text(), "up", "another resource");
    assert_eq!(inner.calls(), 2);
    tokio::time::sleep(secs(7)).await;
    assert_eq!(ask(&shops[1], get("/")).await.text(), "up");
}

#[tokio::test(start_paused = true)]
async fn the_setting_bounds_the_time() {
    for (after, left) in [("3600", "60"), ("60", "60"), ("5", "5")] {
        let inner = failing_once(after);
        let shops = holding(&inner);
        ask(&shops[0], get("/")).await;
        assert_eq!(ask(&shops[1], get("/")).await.header("retry-after"), Some(left), "{after}");
    }
    for after in ["0", "soon", "-1"] {
        let inner = failing_once(after);
        let shops = holding(&inner);
        ask(&shops[0], get("/")).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), "up", "{after}");
    }
}

/// The time is no response: an entry within its stale window is served in place of the origin that asks for a pause.
#[tokio::test(start_paused = true)]
async fn a_stale_response_stands_in_meanwhile() {
    let control = [("cache-control", "max-age=10, stale-if-error=600")];
    let inner = Inner::with(move |n, _| {
        Ok(match n {
            1 => respond(200, &control, whole("old")),
            2 => respond(503, &[("retry-after", "50")], whole("down")),
            _ => respond(200, &control, whole("new")),
        })
    });
    let shops = holding(&inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(11)).await;
    for _ in 0..5 {
        for shop in &shops {
            assert_eq!(ask(shop, get("/")).await.text(), "old");
        }
        tokio::time::sleep(secs(9)).await;
    }
    assert_eq!(inner.calls(), 2);
    // The client that refuses anything stored is answered by the time, not by the origin.
    let seen = ask(&shops[1], request("GET", "/", &[("cache-control", "no-cache")])).await;
    assert_eq!((seen.status, inner.calls()), (503, 2), "{}", seen.remark());
    tokio::time::sleep(secs(10)).await;
    assert_eq!(ask(&shops[0], get("/")).await.text(), "new");
}

/// Neither a change nor the answer to one client is held back: both go to the inner service, as without the guard.
#[tokio::test(start_paused = true)]
async fn what_passes_the_guard_by_is_not_held_back() {
    let inner = failing_once("10");
    let shops = holding(&inner);
    ask(&shops[0], get("/")).await;
    for request in
        [request("POST", "/", &[]), request("HEAD", "/", &[]), request("GET", "/", &[("cookie", "a=b")])]
    {
        assert_eq!(ask(&shops[1], request).await.status, 200);
    }
    assert_eq!(ask(&shops[1], get("/")).await.status, 503);
}

/// One client's limit says nothing about the others.
#[tokio::test(start_paused = true)]
async fn a_429_holds_back_no_other_client() {
    let inner = Inner::with(|n, _| {
        Ok(match n {
            1 => respond(429, &[("retry-after", "10")], whole("slow down")),
            _ => respond(200, &[], whole("up")),
        })
    });
    let shops = holding(&inner);
    assert_eq!(ask(&shops[0], get("/")).await.status, 429);
    assert_eq!(ask(&shops[1], get("/")).await.text(), "up");
}

/// Replicas that share one account at an API: its 429 stops them all, for the resource or for the whole authority.
#[tokio::test(start_paused = true)]
async fn a_429_holds_back_the_fleet_where_its_scope_says_so() {
    for (scope, other_is_held) in [(RateLimitScope::Resource, false), (RateLimitScope::Authority, true)] {
        let inner = Inner::with(|n, _| {
            Ok(match n {
                1 => respond(429, &[("retry-after", "10")], whole("slow down")),
                _ => respond(200, &[("cache-control", "max-age=60")], whole("up")),
            })
        })
        .held();
        let http = HttpPolicy::default().retry_after(secs(60)).rate_limit_scope(scope);
        let shops = replicas_with(2, &inner, policy().http(http));
        let clients: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 20, "/")).collect();
        settle().await;
        inner.gate.open();
        for seen in all(clients).await {
            let (status, after, _) = facts(&seen);
            assert_eq!((status, after), (503, Some("10")), "{}", seen.remark());
        }
        assert_eq!(inner.calls(), 1, "the waiters send no request of their own");
        tokio::time::sleep(secs(4)).await;
        let seen = ask(&shops[1], get("/other")).await;
        assert_eq!((seen.status, seen.header("retry-after")).0 == 503, other_is_held, "{}", seen.remark());
        let elsewhere = request("GET", "/", &[("host", "other.example")]);
        assert_eq!(ask(&shops[1], elsewhere).await.text(), "up");
        let seen = ask(&shops[0], get("/")).await;
        assert_eq!(facts(&seen), (503, Some("6"), "fwd=uri-miss; detail=retry-after".to_owned()));
        tokio::time::sleep(secs(6)).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), "up");
    }
}

#[test]
fn a_scope_without_a_longest_pause_is_refused() {
    let http = HttpPolicy::private().rate_limit_scope(RateLimitScope::Authority);
    let refused = Policy::builder().http(http).build().expect_err("no effect");
    assert!(refused.to_string().contains("retry_after"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn waiters_of_the_failing_load_wait_for_no_other() {
    let inner = failing_once("10").held();
    let shops = holding(&inner);
    let clients: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 20, "/")).collect();
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.status == 503));
    assert_eq!(inner.calls(), 1);
}

/// Two processes on one server.
#[cfg(feature = "redis")]
#[tokio::test]
async fn loads_are_held_back_on_redis() {
    let server = crate::support::redis_server::RedisServer::start();
    let inner = failing_once("3");
    let http = HttpPolicy::default().retry_after(secs(60));
    let [one, other] = super::kit::pair_on(&server, &inner, policy().http(http));
    ask(&one, get("/")).await;
    let seen = ask(&other, get("/")).await;
    assert_eq!((seen.status, inner.calls()), (503, 1), "{}", seen.remark());
    assert_eq!(server.keys_without_ttl(), Vec::<String>::new());
    tokio::time::sleep(Duration::from_millis(3_200)).await;
    assert_eq!(ask(&other, get("/")).await.text(), "up");
}
