//! The request directives of `Cache-Control` (RFC 9111, 5.2.1).

use stampede_guard::http::HttpPolicy;

use super::kit::{
    Inner, Req, all, ask, get, policy, replicas, request, secs, send, send_many, settle, shop, shop_with,
};

fn with(control: &str) -> Req {
    request("GET", "/", &[("cache-control", control)])
}

/// A11: clients that force loads cause only one load at a time, and other clients are served from the store meanwhile.
#[tokio::test(start_paused = true)]
async fn no_cache_joins_one_load_and_readers_are_served_meanwhile() {
    let inner = Inner::numbered(|_| ());
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    inner.gate.close();
    let insisting: Vec<_> =
        (0..20).map(|n| send(&shops[n % 2], with(["no-cache", "max-age=0, no-cache"][n / 2 % 2]))).collect();
    settle().await;
    assert_eq!(inner.calls(), 2, "one load in the fleet");
    for shop in &shops {
        let started = tokio::time::Instant::now();
        for seen in all(send_many(shop, 10, "/")).await {
            assert_eq!((seen.text(), seen.remark().as_str()), ("1", "hit; ttl=59"));
        }
        assert!(started.elapsed() < secs(1), "A11: readers do not wait");
    }
    inner.gate.open();
    for seen in all(insisting).await {
        assert_eq!(seen.text(), "2", "what was loaded since its request");
    }
    for shop in &shops {
        assert_eq!(ask(shop, get("/")).await.text(), "2");
    }
    assert_eq!(inner.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_insisting_client_gets_a_load_that_began_after_its_request() {
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    for n in ["1", "2", "3"] {
        let seen = ask(&shop, with("no-cache")).await;
        let fwd = if n == "1" { "uri-miss" } else { "request" };
        assert_eq!((seen.text(), seen.remark()), (n, format!("fwd={fwd}; stored; ttl=60")));
    }
    assert_eq!(ask(&shop, get("/")).await.text(), "3");
    // Without `Cache-Control`, `Pragma` counts (RFC 9111, 5.4).
    assert_eq!(ask(&shop, request("GET", "/", &[("pragma", "no-cache")])).await.text(), "4");
    let both = request("GET", "/", &[("pragma", "no-cache"), ("cache-control", "max-age=60")]);
    assert_eq!(ask(&shop, both).await.text(), "4");
}

/// The look-up fails, so the guard does not see that the client refuses the stored response. The client's request is loaded without the
/// store, even if the store is back a moment later.
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn an_insisting_client_receives_no_stored_response_after_a_failed_look_up() {
    use stampede_guard::StampedeGuard;
    use stampede_guard::testing::{ChaosStore, Fault};

    for (control, remark) in
        [("no-cache", "2"), ("max-age=0", "2"), ("min-fresh=3600", "2"), ("max-stale", "1")]
    {
        let (inner, chaos) = (Inner::numbered(|_| ()), ChaosStore::new(1));
        let shop: super::kit::Shop = tower::Layer::layer(&StampedeGuard::new(chaos.clone()), inner.clone());
        ask(&shop, get("/")).await;
        tokio::time::sleep(secs(1)).await;
        chaos.once(Fault::ErrorBefore);
        assert_eq!(ask(&shop, with(control)).await.text(), remark, "{control}");
        assert_eq!(chaos.struck(Fault::ErrorBefore), 1);
    }
}

/// A11
#[tokio::test(start_paused = true)]
async fn the_policy_can_ignore_insisting_clients() {
    let inner = Inner::numbered(|_| ());
    let http = HttpPolicy::default().ignore_request_no_cache(true);
    let shop = shop_with(&inner, policy().http(http));
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(10)).await;
    for insisting in ["no-cache", "max-age=0", "max-age=5", "min-fresh=3600"] {
        assert_eq!(ask(&shop, with(insisting)).await.remark(), "hit; ttl=50", "{insisting}");
    }
    assert_eq!(ask(&shop, request("GET", "/", &[("pragma", "no-cache")])).await.text(), "1");
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_limits_age_and_staleness() {
    // For each case: the age of the stored response, the request, and whether the request accepts the response, which is fresh for 30 s.
    let cases = [
        (10, "max-age=10", true),
        (11, "max-age=10", false),
        (1, "max-age=0", false),
        (10, "min-fresh=20", true),
        (11, "min-fresh=20", false),
        (35, "", false),
        (35, "max-stale", true),
        (35, "max-stale=5", true),
        (36, "max-stale=5", false),
        (35, "max-stale=10, max-age=20", false),
        (35, "max-stale=10, no-cache", false),
    ];
    for (age, control, content) in cases {
        // This response is stored for longer than it is fresh, because it can be validated.
        let inner = Inner::with_headers(&[("cache-control", "max-age=30"), ("etag", "\"a\"")]);
        let shop = shop(&inner);
        ask(&shop, get("/")).await;
        tokio::time::sleep(secs(age)).await;
        let request = if control.is_empty() { get("/") } else { with(control) };
        let seen = ask(&shop, request).await;
        assert_eq!(seen.text(), if content { "1" } else { "2" }, "{control} at {age}");
        assert_eq!(inner.calls(), if content { 1 } else { 2 }, "{control} at {age}");
    }
    let inner = Inner::with_headers(&[("cache-control", "max-age=30, must-revalidate"), ("etag", "\"a\"")]);
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(35)).await;
    assert_eq!(ask(&shop, with("max-stale")).await.text(), "2", "RFC 9111, 5.2.2.2");
}

#[tokio::test(start_paused = true)]
async fn a_request_for_a_younger_response_delays_no_other_client() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=60")]);
    let shops = replicas(2, &inner);
    ask(&shops[0], get("/")).await;
    tokio::time::sleep(secs(30)).await;
    inner.gate.close();
    let younger: Vec<_> = (0..10).map(|n| send(&shops[n % 2], with("max-age=20"))).collect();
    settle().await;
    assert_eq!(inner.calls(), 2);
    for shop in &shops {
        assert!(all(send_many(shop, 5, "/")).await.iter().all(|seen| seen.text() == "1"));
        assert_eq!(ask(shop, with("max-age=40")).await.text(), "1", "old enough for this one");
    }
    inner.gate.open();
    assert!(all(younger).await.iter().all(|seen| seen.text() == "2"));
    assert_eq!(inner.calls(), 2);
}

/// A11
#[tokio::test(start_paused = true)]
async fn only_if_cached_never_loads() {
    let inner = Inner::with_headers(&[("cache-control", "max-age=30"), ("etag", "\"a\"")]);
    let shop = shop(&inner);
    let refused = async |control: &str| {
        let seen = ask(&shop, with(control)).await;
        assert_eq!(
            (seen.status, seen.remark().as_str()),
            (504, "fwd=miss; detail=only-if-cached"),
            "{control}"
        );
    };
    refused("only-if-cached").await;
    ask(&shop, get("/")).await;
    assert_eq!(ask(&shop, with("only-if-cached")).await.remark(), "hit; ttl=30");
    for more in ["no-cache", "min-fresh=31"] {
        refused(&format!("only-if-cached, {more}")).await;
    }
    tokio::time::sleep(secs(35)).await;
    refused("only-if-cached").await;
    assert_eq!(ask(&shop, with("only-if-cached, max-stale")).await.text(), "1");
    let head = request("HEAD", "/", &[("cache-control", "only-if-cached")]);
    assert_eq!(ask(&shop, head).await.status, 504);
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn only_if_cached_does_not_wait_for_a_load_either() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = shop(&inner);
    let clients = send_many(&shop, 3, "/");
    settle().await;
    let seen = ask(&shop, with("only-if-cached")).await;
    assert_eq!(seen.status, 504);
    inner.gate.open();
    assert_eq!(all(clients).await.len(), 3);
}
