//! Failures: unchanged for the leader's client, a response for the waiters, and never stored.

use std::convert::Infallible;

use http::Response;
use http_body_util::BodyExt as _;
use stampede_guard::{MemoryStore, OnWaitTimeout, StampedeGuard};
use tower::{Layer as _, ServiceBuilder, ServiceExt as _};

use super::kit::{
    Down, Inner, all, ask, get, guard, policy, replicas, respond, secs, send_many, settle, shop_with, whole,
};

#[tokio::test(start_paused = true)]
async fn the_inner_services_error_is_untouched_for_the_leader_and_502_for_waiters() {
    let inner = Inner::with(|n, _| match n {
        1 => Err(Down("secret: no route".to_owned())),
        _ => Ok(respond(200, &[], whole(n.to_string()))),
    })
    .held();
    let shops = replicas(2, &inner);
    let leader = tokio::spawn(shops[0].clone().oneshot(get("/")));
    settle().await;
    let mut followers = send_many(&shops[0], 10, "/");
    followers.extend(send_many(&shops[1], 10, "/"));
    settle().await;
    assert_eq!(inner.calls(), 1);
    inner.gate.open();
    assert_eq!(leader.await.unwrap().unwrap_err(), Down("secret: no route".to_owned()));
    for seen in all(followers).await {
        assert_eq!((seen.status, seen.remark().as_str()), (502, "fwd=miss; detail=load-failed"));
        assert_eq!(seen.header("retry-after"), Some("1"));
        assert!(!seen.text().contains("secret"), "{}", seen.text());
    }
    assert_eq!(inner.calls(), 1, "no convoy of retries");
    assert_eq!(ask(&shops[0], get("/")).await.text(), "2", "the next wave tries anew");
}

/// C13
#[tokio::test(start_paused = true)]
async fn a_load_that_takes_longer_than_load_timeout_is_504_for_all() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = shop_with(&inner, policy().load_timeout(secs(5)));
    let started = tokio::time::Instant::now();
    let seen = all(send_many(&shop, 10, "/")).await;
    assert_eq!(started.elapsed().as_secs(), 5);
    for seen in seen {
        assert_eq!((seen.status, seen.remark().as_str()), (504, "fwd=miss; detail=timeout"));
        assert_eq!(seen.header("cache-control"), Some("no-store"));
        // A request with a cookie bypasses the guard and succeeds, so only this text shows the operator the difference.
        assert!(seen.text().contains("load_timeout"), "{}", seen.text());
    }
    settle().await;
    assert_eq!((inner.calls(), inner.loads.running()), (1, 0), "the load was ended");
    inner.gate.open();
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
}

/// C13
#[tokio::test(start_paused = true)]
async fn after_wait_timeout_waiters_load_once_per_process_or_get_504() {
    let store = MemoryStore::new();
    let inner = Inner::numbered(|_| ()).held_separately();
    let shop = |then| {
        let policy = policy().wait_timeout(secs(3), then).build().unwrap();
        StampedeGuard::new(store.clone()).with_policy(policy).layer(inner.clone())
    };
    let (leading, loading, failing) =
        (shop(OnWaitTimeout::Load), shop(OnWaitTimeout::Load), shop(OnWaitTimeout::Fail));
    let first = send_many(&leading, 1, "/");
    settle().await;
    inner.gate.open();
    let loaders = send_many(&loading, 10, "/");
    let failers = send_many(&failing, 10, "/");
    for seen in all(loaders).await {
        assert_eq!((seen.status, seen.text()), (200, "2"));
    }
    for seen in all(failers).await {
        assert_eq!((seen.status, seen.remark().as_str()), (504, "fwd=miss; detail=timeout"));
        assert!(seen.text().contains("wait_timeout"), "{}", seen.text());
    }
    assert_eq!(inner.calls(), 2);
    inner.open_first();
    assert_eq!(all(first).await[0].text(), "1");
    assert_eq!(ask(&failing, get("/")).await.text(), "1", "what was loaded under the lease is stored");
}

#[tokio::test(start_paused = true)]
async fn the_same_layer_twice_is_one_load() {
    let inner = Inner::numbered(|_| ()).held();
    let guard = guard();
    let shop = ServiceBuilder::new().layer(guard.clone()).layer(guard.clone()).service(inner.clone());
    let clients = send_many(&shop, 20, "/");
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| (seen.status, seen.text()) == (200, "1")));
    let hit = ask(&shop, get("/")).await;
    assert!(hit.text() == "1" && hit.remark().ends_with("hit; ttl=60"), "{}", hit.remark());
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn two_guards_on_one_store_around_each_other_are_one_load() {
    let (inner, store) = (Inner::numbered(|_| ()), MemoryStore::new());
    let guard = || StampedeGuard::new(store.clone()).with_policy(policy().build().unwrap());
    let shop = ServiceBuilder::new().layer(guard()).layer(guard()).service(inner.clone());
    let started = tokio::time::Instant::now();
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.status, seen.text(), inner.calls()), (200, "1", 1), "{}", seen.remark());
    assert!(started.elapsed() < secs(1), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn two_guards_on_separate_stores_around_each_other_work() {
    let inner = Inner::numbered(|_| ());
    let shop = ServiceBuilder::new().layer(guard()).layer(guard()).service(inner.clone());
    for _ in 0..2 {
        assert_eq!(ask(&shop, get("/")).await.text(), "1");
    }
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_shut_down_serves_all_requests_uncoordinated() {
    let inner = Inner::numbered(|_| ());
    let guard = guard();
    let shop = guard.layer(inner.clone());
    ask(&shop, get("/")).await;
    assert!(guard.shutdown(secs(1)).await.finished);
    let seen = ask(&shop, get("/")).await;
    assert_eq!((seen.text(), seen.remark().as_str()), ("2", "fwd=miss; detail=uncoordinated"));
    let head = ask(&shop, super::kit::request("HEAD", "/", &[])).await;
    assert_eq!((head.text(), head.remark().as_str()), ("3", "fwd=miss; detail=head"));
}

/// Regression: the error came as a 502, because the callback that hands it over was dropped on this path.
#[tokio::test(start_paused = true)]
async fn the_inner_services_error_is_untouched_without_coordination() {
    let inner = Inner::with(|_, _| Err(Down("no route".to_owned())));
    let guard = guard();
    let shop = guard.layer(inner.clone());
    assert!(guard.shutdown(secs(1)).await.finished);
    assert_eq!(shop.clone().oneshot(get("/")).await.unwrap_err(), Down("no route".to_owned()));
    assert_eq!(guard.stats().loads, 1);
}

/// C12
#[tokio::test(start_paused = true)]
async fn beyond_max_flights_requests_are_served_uncoordinated() {
    let inner = Inner::numbered(|_| ()).held();
    let guard = StampedeGuard::builder(MemoryStore::new()).max_flights(1).build().unwrap();
    let shop = guard.layer(inner.clone());
    let first = send_many(&shop, 5, "/a");
    settle().await;
    let second = send_many(&shop, 5, "/b");
    settle().await;
    assert_eq!(inner.loads.running(), 6);
    inner.gate.open();
    assert!(all(first).await.iter().all(|seen| seen.text() == "1"));
    assert!(all(second).await.iter().all(|seen| seen.remark() == "fwd=miss; detail=uncoordinated"));
}

#[tokio::test(start_paused = true)]
async fn the_leaders_request_reaches_the_inner_service_as_it_was() {
    let inner = Inner::with(|_, request| {
        assert_eq!(request.extensions().get::<u8>(), Some(&7));
        assert_eq!(request.version(), http::Version::HTTP_2);
        assert_eq!(request.uri(), "/a?b");
        assert_eq!((request.headers()["accept"].as_bytes(), request.headers().len()), (&b"text/html"[..], 2));
        Ok(respond(200, &[], whole("x")))
    });
    let mut request = super::kit::request("GET", "/a?b", &[("accept", "text/html")]);
    request.extensions_mut().insert(7u8);
    *request.version_mut() = http::Version::HTTP_2;
    assert_eq!(ask(&super::kit::shop(&inner), request).await.text(), "x");
}

/// S2.5
#[tokio::test(start_paused = true)]
async fn every_request_counts_once_by_its_outcome() {
    let inner = Inner::numbered(|_| ()).held();
    let guard = guard();
    let shop = guard.layer(inner.clone());
    let clients = send_many(&shop, 10, "/");
    settle().await;
    inner.gate.open();
    all(clients).await;
    ask(&shop, get("/")).await;
    ask(&shop, super::kit::request("POST", "/", &[])).await;
    let stats = guard.stats();
    assert_eq!((stats.led, stats.coalesced, stats.hits, stats.bypassed, stats.failed), (1, 9, 1, 1, 0));
    assert_eq!((stats.loads, stats.flights, stats.tasks), (1, 0, 0));
}

#[tokio::test]
async fn an_infallible_service_stays_infallible() {
    let inner = tower::service_fn(|_: super::kit::Req| async {
        Ok::<_, Infallible>(Response::new(whole("x").map_err(|down| down).boxed_unsync()))
    });
    let shop = guard().layer(inner);
    let result: Result<_, Infallible> = shop.oneshot(get("/")).await;
    let Ok(response) = result;
    assert_eq!(response.status(), 200);
}

#[cfg(feature = "redis")]
mod store_down {
    use stampede_guard::OnStoreDown;

    use super::super::kit::{Inner, ask, policy, request};
    use super::*;

    /// A port that nothing listens on.
    fn closed_port() -> redis::Client {
        let port = crate::support::redis_server::free_port();
        redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap()
    }

    #[tokio::test]
    async fn fail_closed_answers_503_with_retry_after_and_asks_the_inner_service_nothing() {
        let inner = Inner::numbered(|_| ());
        let policy = policy().on_store_down(OnStoreDown::FailClosed).build().unwrap();
        let shop = StampedeGuard::new(closed_port()).with_policy(policy).layer(inner.clone());
        for method in ["GET", "HEAD", "GET"] {
            let seen = ask(&shop, request(method, "/", &[])).await;
            assert_eq!((seen.status, seen.header("retry-after")), (503, Some("1")), "{method}");
            assert_eq!(seen.remark(), "fwd=miss; detail=store-down");
        }
        assert_eq!(inner.calls(), 0);
        assert_eq!(ask(&shop, request("POST", "/", &[])).await.text(), "1", "what bypasses needs no store");
    }

    #[tokio::test]
    async fn a_store_that_hangs_withholds_the_last_byte_no_longer_than_the_budget() {
        let server = crate::support::redis_server::RedisServer::start();
        let inner = Inner::numbered(|_| ()).held();
        let client = redis::Client::open(server.minimal_user()).unwrap();
        let budget = std::time::Duration::from_millis(400);
        let policy = policy().coordination_budget(budget).build().unwrap();
        let guard = StampedeGuard::new(client).with_policy(policy);
        crate::redis::connects(&guard).await;
        let shop = guard.layer(inner.clone());
        let clients = send_many(&shop, 5, "/");
        inner.loads.reach(1).await;
        server.pause();
        let started = std::time::Instant::now();
        inner.gate.open();
        assert!(all(clients).await.iter().all(|seen| (seen.status, seen.text()) == (200, "1")));
        assert!(started.elapsed() < budget * 5, "{:?}", started.elapsed());
        server.resume();
    }

    #[tokio::test]
    async fn a_client_does_not_receive_the_same_failure_twice() {
        let server = crate::support::redis_server::RedisServer::start();
        let inner = Inner::with(|n, _| match n {
            1 => Err(Down("no route".to_owned())),
            _ => Ok(respond(200, &[], whole(n.to_string()))),
        })
        .held();
        let policy = policy().coordination_budget(std::time::Duration::from_millis(400)).build().unwrap();
        let guard =
            StampedeGuard::new(redis::Client::open(server.minimal_user()).unwrap()).with_policy(policy);
        crate::redis::connects(&guard).await;
        let shop = guard.layer(inner.clone());
        let first = tokio::spawn(shop.clone().oneshot(get("/")));
        inner.loads.reach(1).await;
        // The store is slow to record the failure.
        server.pause();
        inner.gate.open();
        first.await.unwrap().expect_err("fails");
        let again = ask(&shop, get("/")).await;
        assert_eq!((again.status, again.text()), (200, "2"));
        server.resume();
    }

    #[tokio::test]
    async fn fail_open_serves_and_still_coalesces_within_the_process() {
        let inner = Inner::numbered(|_| ()).held();
        let guard = StampedeGuard::new(closed_port()).with_policy(policy().build().unwrap());
        let shop = guard.layer(inner.clone());
        let started = std::time::Instant::now();
        let clients = send_many(&shop, 20, "/");
        inner.loads.reach(1).await;
        assert!(started.elapsed() < secs(4), "{:?}", started.elapsed());
        // All callers are on the flight: a caller in a process with a flight joins it without a look-up.
        crate::support::probe::eventually("all have called", secs(5), async || guard.stats().flights == 1)
            .await;
        inner.gate.open();
        let seen = all(clients).await;
        assert!(seen.iter().all(|seen| seen.status == 200));
        assert_eq!(ask(&shop, request("HEAD", "/", &[])).await.status, 200);
    }
}
