//! The guard is always ready, and makes a clone of the inner service ready where it calls it. So a waiting request
//! holds no capacity, and tower's own layers neither deadlock nor panic around or inside it.

use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::Response;
use tower::{BoxError, Layer as _, Service, ServiceBuilder, ServiceExt as _};

use super::kit::{
    Boxed, Down, Inner, Req, Seen, all, ask, get, guard, policy, request, respond, secs, send_many, settle,
    whole,
};

/// A service that becomes ready when `ready` opens, and panics if it is called before.
#[derive(Clone)]
struct Slow {
    inner: Inner,
    ready: Option<std::sync::Arc<std::sync::atomic::AtomicBool>>,
    may_call: bool,
}

impl Slow {
    fn never(inner: &Inner) -> Self {
        Self { inner: inner.clone(), ready: Some(Default::default()), may_call: false }
    }
}

impl Service<Req> for Slow {
    type Response = Response<Boxed>;
    type Error = Down;
    type Future = BoxFuture<'static, Result<Response<Boxed>, Down>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Down>> {
        match &self.ready {
            Some(ready) if !ready.load(std::sync::atomic::Ordering::SeqCst) => Poll::Pending,
            _ => {
                self.may_call = true;
                Poll::Ready(Ok(()))
            }
        }
    }

    fn call(&mut self, request: Req) -> Self::Future {
        assert!(std::mem::take(&mut self.may_call), "called without having been ready");
        self.inner.call(request).boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn the_guard_is_ready_while_the_inner_service_never_is() {
    let inner = Inner::numbered(|_| ());
    let mut shop = guard().layer(Slow::never(&inner));
    for _ in 0..3 {
        assert!(shop.ready().now_or_never().expect("at once").is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_never_ready_ends_its_load_by_load_timeout_and_leaves_hits_alone() {
    let inner = Inner::numbered(|_| ());
    let guard = guard().with_policy(policy().load_timeout(secs(5)).build().unwrap());
    let well = guard.layer(inner.clone());
    let ill = guard.layer(Slow::never(&inner));
    assert_eq!(ask(&well, get("/stored")).await.text(), "1");

    let started = tokio::time::Instant::now();
    let clients = send_many(&ill, 20, "/");
    settle().await;
    for _ in 0..10 {
        assert_eq!(ask(&ill, get("/stored")).await.text(), "1", "hits go on");
    }
    for seen in all(clients).await {
        assert_eq!((seen.status, seen.remark().as_str()), (504, "fwd=miss; detail=timeout"));
    }
    assert_eq!(started.elapsed().as_secs(), 5);
    assert_eq!(inner.calls(), 1);
    // A service that is not ready does not delay waiters for another process's load either.
    inner.gate.close();
    let leader = tokio::spawn({
        let well = well.clone();
        async move { ask(&well, get("/other")).await }
    });
    settle().await;
    let follower = super::kit::send_many(&ill, 5, "/other");
    settle().await;
    inner.gate.open();
    assert_eq!(leader.await.unwrap().text(), "2");
    assert!(all(follower).await.iter().all(|seen| seen.text() == "2"));
}

#[tokio::test(start_paused = true)]
async fn loads_outside_a_flight_are_bounded_by_load_timeout_too() {
    let inner = Inner::with(|n, _| Ok(respond(200, &[("cache-control", "private")], whole(n.to_string()))));
    let inner = inner.held_separately();
    let policy = policy().load_timeout(secs(5)).build().unwrap();
    let guard = guard().with_policy(policy);
    let shop = guard.layer(inner.clone());
    let clients = send_many(&shop, 20, "/");
    settle().await;
    let started = tokio::time::Instant::now();
    inner.open_first();
    settle().await;
    assert_eq!(inner.loads.running(), 19, "each for itself, and none is answered");
    let seen = all(clients).await;
    assert_eq!(seen.iter().filter(|seen| seen.status == 200).count(), 1);
    assert_eq!(seen.iter().filter(|seen| seen.status == 504).count(), 19);
    assert_eq!((started.elapsed().as_secs(), inner.loads.running()), (5, 0));
    let stats = guard.stats();
    assert_eq!((stats.led, stats.failed, stats.bypassed), (1, 19, 0), "each recorded once");
}

#[tokio::test(start_paused = true)]
async fn readiness_is_polled_on_the_clone_that_is_called() {
    let inner = Inner::numbered(|_| ());
    let service = Slow { inner: inner.clone(), ready: None, may_call: false };
    let shop = guard().layer(service);
    for uri in ["/a", "/b", "/a"] {
        assert_eq!(ask(&shop, get(uri)).await.status, 200);
    }
    assert_eq!(ask(&shop, request("POST", "/", &[])).await.text(), "3");
    assert_eq!(ask(&shop, request("HEAD", "/c", &[])).await.text(), "4");
}

/// A request that was never sent has not reached the origin, so the origin cannot have applied it.
#[tokio::test(start_paused = true)]
async fn an_unsafe_request_that_was_never_sent_invalidates_nothing() {
    let (inner, guard) = (Inner::numbered(|_| ()), guard());
    let (well, ill) = (guard.layer(inner.clone()), guard.layer(Slow::never(&inner)));
    ask(&well, get("/")).await;
    let change = tokio::spawn(ill.oneshot(request("PUT", "/", &[])));
    settle().await;
    change.abort();
    settle().await;
    assert_eq!(ask(&well, get("/")).await.remark().split(';').next(), Some("hit"));
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn over_a_limit_of_one_hits_misses_and_bypasses_mix_without_deadlock() {
    let inner = Inner::numbered(|_| ());
    let limited = ServiceBuilder::new().concurrency_limit(1).service(inner.clone());
    let shop = guard().layer(limited);
    assert_eq!(ask(&shop, get("/hot")).await.text(), "1");
    inner.gate.close();
    let slow = send_many(&shop, 20, "/cold");
    settle().await;
    assert_eq!(inner.loads.running(), 1);
    let other = send_many(&shop, 20, "/other");
    settle().await;
    for _ in 0..20 {
        assert_eq!(ask(&shop, get("/hot")).await.text(), "1", "a hit needs no permit");
    }
    let posts: Vec<_> =
        (0..5).map(|_| tokio::spawn(shop.clone().oneshot(request("POST", "/", &[])))).collect();
    settle().await;
    assert_eq!(inner.loads.running(), 1, "the limit holds");
    inner.gate.open();
    assert_eq!(all(slow).await.len() + all(other).await.len(), 40);
    for post in posts {
        assert_eq!(post.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!((inner.calls(), inner.loads.most_at_once()), (3 + 5, 1));
}

#[tokio::test(start_paused = true)]
async fn under_a_limit_of_one_a_dropped_request_gives_its_permit_back() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = ServiceBuilder::new().concurrency_limit(1).layer(guard()).service(inner.clone());
    let first = tokio::spawn(shop.clone().oneshot(get("/a")));
    settle().await;
    let second = send_many(&shop, 1, "/b");
    settle().await;
    assert_eq!(inner.calls(), 1);
    first.abort();
    settle().await;
    assert_eq!(inner.calls(), 2, "the second request came through while the first one's load goes on");
    inner.gate.open();
    assert_eq!(all(second).await[0].status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_buffer_inside_or_outside_works() {
    let inner = Inner::numbered(|_| ());
    let inside = ServiceBuilder::new().layer(guard()).buffer(2).concurrency_limit(1).service(inner.clone());
    let outside = ServiceBuilder::new().buffer(2).layer(guard()).service(inner.clone());
    inner.gate.close();
    let mut clients = Vec::new();
    for n in 0..8 {
        clients.extend(send_many(&inside, 10, &format!("/{n}")));
    }
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.status == 200));
    assert_eq!(inner.calls(), 8);
    for _ in 0..2 {
        assert_eq!(ask(&outside, get("/x")).await.text(), "9");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_buffer_is_its_own_error_for_the_leader_and_502_for_waiters() {
    let inner = Inner::with(|_, _| Ok(respond(200, &[], whole("never"))));
    let (buffer, worker) = tower::buffer::Buffer::pair(Slow::never(&inner), 1);
    let worker = tokio::spawn(worker);
    let shop = guard().layer(buffer);
    let leader = tokio::spawn(shop.clone().oneshot(get("/")));
    settle().await;
    let followers = send_many(&shop, 5, "/");
    settle().await;
    worker.abort();
    let error: BoxError = leader.await.unwrap().expect_err("closed");
    assert!(error.is::<tower::buffer::error::Closed>(), "{error}");
    for seen in all(followers).await {
        assert_eq!(seen.status, 502);
    }
}

#[tokio::test(start_paused = true)]
async fn load_shed_inside_sheds_loads_and_never_hits() {
    let inner = Inner::numbered(|_| ());
    let shedding = ServiceBuilder::new().load_shed().concurrency_limit(1).service(inner.clone());
    let shop = guard().layer(shedding);
    assert_eq!(ask(&shop, get("/hot")).await.text(), "1");
    inner.gate.close();
    let cold = send_many(&shop, 10, "/cold");
    settle().await;
    let error = shop.clone().oneshot(get("/other")).await.expect_err("shed");
    assert!(error.is::<tower::load_shed::error::Overloaded>(), "{error}");
    assert_eq!(ask(&shop, get("/hot")).await.text(), "1");
    inner.gate.open();
    assert!(all(cold).await.iter().all(|seen| seen.text() == "2"));
    assert_eq!(ask(&shop, get("/other")).await.text(), "3", "the failure was not stored");
}

#[tokio::test(start_paused = true)]
async fn load_shed_outside_never_sheds() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = ServiceBuilder::new().load_shed().layer(guard()).concurrency_limit(1).service(inner.clone());
    let clients = send_many(&shop, 20, "/");
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.text() == "1"));
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_is_the_leaders_error_and_502_for_waiters() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = ServiceBuilder::new().layer(guard()).timeout(secs(3)).service(inner.clone());
    let leader = tokio::spawn(shop.clone().oneshot(get("/")));
    settle().await;
    let followers = send_many(&shop, 5, "/");
    let error = leader.await.unwrap().expect_err("too slow");
    assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    let statuses: Vec<_> = all(followers).await.iter().map(|seen| seen.status).collect();
    assert_eq!(statuses, [502; 5]);
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_ends_the_waiting_and_not_the_load() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = ServiceBuilder::new().timeout(secs(3)).layer(guard()).service(inner.clone());
    let pending: Vec<_> = (0..5).map(|_| tokio::spawn(shop.clone().oneshot(get("/")))).collect();
    for one in pending {
        let error = one.await.unwrap().expect_err("too slow");
        assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    }
    assert_eq!(inner.loads.running(), 1);
    inner.gate.open();
    settle().await;
    let seen: Seen = ask(&shop, get("/")).await;
    assert!(seen.remark().starts_with("hit"), "{}", seen.remark());
    assert_eq!(inner.calls(), 1);
}

/// One request of each kind. The kinds reach the inner service in different ways.
fn of_each_kind() -> Vec<Req> {
    let with = |method, headers: &[_]| request(method, "/", headers);
    vec![
        with("GET", &[]),
        with("GET", &[("accept-language", "de")]),
        with("GET", &[("cache-control", "no-cache")]),
        with("GET", &[("range", "bytes=0-0")]),
        with("GET", &[("authorization", "a")]),
        with("GET", &[("x-api-key", "a")]),
        with("HEAD", &[("accept-language", "fr")]),
        with("POST", &[]),
    ]
}

#[tokio::test(start_paused = true)]
async fn over_a_limit_or_a_buffer_of_one_requests_of_each_kind_mix_without_deadlock() {
    let headers = [("vary", "accept-language"), ("etag", "\"a\""), ("cache-control", "max-age=5")];
    let inner = Inner::with_headers(&headers);
    let http = stampede_guard::http::HttpPolicy::default().share_authorized(true);
    let guard = guard().with_policy(policy().http(http).build().unwrap());
    let limited = guard.layer(ServiceBuilder::new().concurrency_limit(1).service(inner.clone()));
    let buffered = guard.layer(ServiceBuilder::new().buffer(1).concurrency_limit(1).service(inner.clone()));
    // In turn, nothing is stored, the response is fresh, and the response is stale.
    for _ in 0..3 {
        let mut pending = Vec::new();
        for _ in 0..5 {
            for request in of_each_kind() {
                pending.push(super::kit::send(&limited, request));
            }
            for request in of_each_kind() {
                pending.push(super::kit::send(&buffered, request));
            }
        }
        let answered = tokio::time::timeout(secs(1), all(pending)).await.expect("none waits for ever");
        assert!(answered.iter().all(|seen| matches!(seen.status, 200 | 206)));
        tokio::time::sleep(secs(3)).await;
    }
    assert!(inner.loads.most_at_once() <= 2, "one for each of both");
    assert_eq!(guard.stats().tasks, 0);
}

#[tokio::test(start_paused = true)]
async fn a_stale_response_stands_in_for_an_inner_service_that_is_slow_or_sheds() {
    let inner = Inner::with_headers(&[("etag", "\"a\""), ("cache-control", "max-age=5")]);
    let slow = guard().layer(ServiceBuilder::new().timeout(secs(3)).service(inner.clone()));
    let shedding = ServiceBuilder::new().load_shed().concurrency_limit(1).service(inner.clone());
    let busy = guard().layer(shedding);
    ask(&slow, get("/")).await;
    ask(&busy, get("/")).await;
    tokio::time::sleep(secs(6)).await;
    inner.gate.close();
    let stale = all(send_many(&slow, 5, "/")).await;
    assert!(stale.iter().all(|seen| (seen.status, seen.text()) == (200, "1")));
    let occupied = send_many(&busy, 1, "/other");
    settle().await;
    let stale = all(send_many(&busy, 5, "/")).await;
    assert!(stale.iter().all(|seen| (seen.status, seen.text()) == (200, "2")));
    inner.gate.open();
    all(occupied).await;
}
