//! One call of the inner service per URI, for any number of clients, and never the same answer for two URIs.

use http::HeaderName;
use http::uri::Scheme;
use stampede_guard::http::{HttpPolicy, KeyParts};
use stampede_guard::{MemoryStore, OnOverload, StampedeGuard};
use tower::Layer as _;

use super::kit::{
    Inner, all, ask, get, policy, replicas, request, respond, send_many, settle, shop, shop_with, whole,
};

#[tokio::test(start_paused = true)]
async fn fifty_concurrent_gets_are_one_call() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = shop(&inner);
    let clients = send_many(&shop, 50, "/report?q=1");
    settle().await;
    assert_eq!(inner.calls(), 1);
    inner.gate.open();
    let seen = all(clients).await;
    assert_eq!(inner.calls(), 1);
    assert!(seen.iter().all(|seen| (seen.status, seen.text()) == (200, "1")));
    let mut remarks: Vec<_> = seen.iter().map(|seen| seen.remark()).collect();
    remarks.sort();
    assert_eq!(remarks[..49], vec!["fwd=miss; collapsed; ttl=60"; 49]);
    assert_eq!(remarks[49], "fwd=uri-miss; stored; ttl=60");
}

/// Regression: seven of eight requests were answered 503, although none of them waits for another.
#[tokio::test(start_paused = true)]
async fn max_waiters_turns_away_no_request_for_an_uncacheable_page() {
    let inner = Inner::with_headers(&[("cache-control", "no-store")]);
    let shop = shop_with(&inner, policy().max_waiters(1, OnOverload::Shed));
    assert_eq!(ask(&shop, get("/cart")).await.status, 200);
    inner.gate.close();
    let clients = send_many(&shop, 8, "/cart");
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.status == 200));
    assert_eq!(inner.calls(), 1 + 8);
}

/// The same on real threads, where two races are possible: when the next requests come, the marker of the first response may not be stored
/// yet, and a probe may end at the moment when they join it.
#[test]
fn max_waiters_turns_away_no_request_for_an_uncacheable_page_on_threads() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        for round in 0..200 {
            let inner = Inner::with_headers(&[("cache-control", "no-store")]);
            let shop = shop_with(&inner, policy().max_waiters(1, OnOverload::Shed));
            assert_eq!(ask(&shop, get("/cart")).await.status, 200);
            let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(8));
            let clients: Vec<_> = (0..8)
                .map(|_| {
                    let (shop, barrier) = (shop.clone(), std::sync::Arc::clone(&barrier));
                    tokio::spawn(async move {
                        barrier.wait().await;
                        ask(&shop, get("/cart")).await
                    })
                })
                .collect();
            let statuses: Vec<_> = all(clients).await.iter().map(|seen| seen.status).collect();
            assert_eq!(statuses, [200; 8], "round {round}");
            assert_eq!(inner.calls(), 1 + 8, "round {round}");
        }
    });
}

#[tokio::test(start_paused = true)]
async fn fifty_gets_at_four_replicas_are_one_call() {
    let inner = Inner::numbered(|_| ()).held();
    let replicas = replicas(4, &inner);
    let clients: Vec<_> = replicas.iter().flat_map(|shop| send_many(shop, 50, "/report")).collect();
    settle().await;
    inner.gate.open();
    assert!(all(clients).await.iter().all(|seen| seen.text() == "1"));
    assert_eq!(inner.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_second_get_is_a_hit_without_a_call() {
    let inner = Inner::with_headers(&[("etag", "\"a\""), ("x-two", "1"), ("x-two", "2")]);
    let shop = shop(&inner);
    let first = ask(&shop, get("/")).await;
    let second = ask(&shop, get("/")).await;
    assert_eq!((inner.calls(), second.text()), (1, "1"));
    assert_eq!(
        (first.remark().as_str(), second.remark().as_str()),
        ("fwd=uri-miss; stored; ttl=60", "hit; ttl=60")
    );
    assert_eq!(first.header("age"), None, "straight from the origin");
    assert_eq!((second.header("age"), second.header("etag")), (Some("0"), Some("\"a\"")));
    assert_eq!(second.headers.get_all("x-two").iter().collect::<Vec<_>>(), ["1", "2"]);
}

/// B9
#[tokio::test(start_paused = true)]
async fn different_uris_are_different_resources_byte_for_byte() {
    let uris = [
        "/",
        "/?",
        "/a",
        "/A",
        "/a/",
        "/a//",
        "/a?",
        "/a?b",
        "/a?B",
        "/a?b=",
        "/a?b&",
        "/%61",
        "/a%2Fb",
        "/a%2fb",
        "/a/b",
        "/a?b?c",
        "/a?x=1&y=2",
        "/a?y=2&x=1",
        "/a;b",
        "/a?b#c",
    ];
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    for round in 0..2 {
        for (n, uri) in uris.iter().enumerate() {
            // A fragment is not sent, so the last URI is `/a?b` again.
            let number = if *uri == "/a?b#c" { 8 } else { n + 1 };
            assert_eq!(ask(&shop, get(uri)).await.text(), number.to_string(), "{uri}, round {round}");
        }
    }
    assert_eq!(inner.calls(), uris.len() - 1);
}

/// B2
#[tokio::test(start_paused = true)]
async fn hosts_are_different_resources_whatever_their_case_or_default_port() {
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    let hosts = [
        ("a.example", "1"),
        ("b.example", "2"),
        ("A.Example", "1"),
        ("a.example:8080", "3"),
        ("a.example:443", "4"),
        ("[::1]", "5"),
        ("a.example.", "6"),
    ];
    for (host, number) in hosts {
        assert_eq!(ask(&shop, request("GET", "/", &[("host", host)])).await.text(), number, "{host}");
    }
    // A request in absolute form is for the same resource, with or without a `Host`.
    assert_eq!(ask(&shop, get("http://a.example/")).await.text(), "1");
    assert_eq!(ask(&shop, request("GET", "http://a.example/", &[("host", "A.EXAMPLE")])).await.text(), "1");
    assert_eq!(ask(&shop, get("https://a.example/")).await.text(), "7");
    assert_eq!(inner.calls(), 7);
}

/// B3
#[tokio::test(start_paused = true)]
async fn the_scheme_is_the_uris_else_the_policys() {
    let (inner, store) = (Inner::numbered(|_| ()), MemoryStore::new());
    let with = |scheme| {
        let policy = policy().http(HttpPolicy::default().scheme(scheme)).build().unwrap();
        StampedeGuard::new(store.clone()).with_policy(policy).layer(inner.clone())
    };
    let (plain, secure) = (with(Scheme::HTTP), with(Scheme::HTTPS));
    assert_eq!(ask(&plain, get("/")).await.text(), "1");
    assert_eq!(ask(&secure, get("/")).await.text(), "2");
    assert_eq!(ask(&secure, get("http://shop.example/")).await.text(), "1");
    assert_eq!(ask(&plain, get("https://shop.example/")).await.text(), "2");
    assert_eq!(inner.calls(), 2);
}

/// B12
#[tokio::test(start_paused = true)]
async fn namespaces_and_keys_of_loaders_do_not_meet() {
    let (inner, store) = (Inner::numbered(|_| ()), MemoryStore::new());
    let guard = |name: &str| StampedeGuard::builder(store.clone()).namespace(name).build().unwrap();
    assert_eq!(ask(&guard("a").layer(inner.clone()), get("/")).await.text(), "1");
    assert_eq!(ask(&guard("b").layer(inner.clone()), get("/")).await.text(), "2");
    // A loader with the key of a response receives no response, and the value that it stores is never used as one.
    let key = || stampede_guard::http::cache_key(&"http://shop.example/x".parse().unwrap()).unwrap();
    let both = guard("a");
    let number: u8 = both.get_or_load(key(), || async { Ok::<_, String>(7) }).await.unwrap();
    assert_eq!(number, 7);
    assert_eq!(ask(&both.layer(inner.clone()), get("/x")).await.text(), "3");
}

#[tokio::test(start_paused = true)]
async fn an_invalidated_uri_is_loaded_again_also_during_a_load() {
    let inner = Inner::numbered(|_| ()).held();
    let guard = super::kit::guard();
    let shop = guard.layer(inner.clone());
    let first = send_many(&shop, 5, "/");
    settle().await;
    let key = stampede_guard::http::cache_key(&"http://shop.example/".parse().unwrap()).unwrap();
    guard.invalidate(key.clone()).await.unwrap();
    let second = send_many(&shop, 5, "/");
    settle().await;
    inner.gate.open();
    assert!(all(first).await.iter().all(|seen| seen.text() == "1"));
    assert!(all(second).await.iter().all(|seen| seen.text() == "2"));
    assert_eq!(ask(&shop, get("/")).await.text(), "2", "the older load was not stored");
    guard.invalidate(key).await.unwrap();
    assert_eq!(ask(&shop, get("/")).await.text(), "3");
}

#[tokio::test(start_paused = true)]
async fn a_get_without_clients_is_still_stored_once() {
    // All clients leave before the head has come.
    let inner = Inner::with(|n, _| Ok(respond(200, &[], whole(n.to_string())))).held();
    let shop = shop(&inner);
    let clients = send_many(&shop, 10, "/");
    settle().await;
    for one in &clients {
        one.abort();
    }
    settle().await;
    inner.gate.open();
    settle().await;
    assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=59");
    assert_eq!(inner.calls(), 1);
}

/// Regression: a key that was made without the guard's policy was a different key, so its invalidation succeeded and removed nothing.
#[tokio::test(start_paused = true)]
async fn a_guard_names_the_key_that_its_policy_stores_under() {
    let tenant = |parts: &KeyParts<'_>| parts.headers.get("x-tenant")?.to_str().ok().map(str::to_owned);
    let policies = [
        policy(),
        policy().http(HttpPolicy::default().scheme(Scheme::HTTPS)),
        policy().http(HttpPolicy::default().key(tenant)),
        policy().http(HttpPolicy::private()),
        policy().http(HttpPolicy::private().credential_header(HeaderName::from_static("x-tenant"))),
    ];
    for (at, policy) in policies.into_iter().enumerate() {
        let inner = Inner::numbered(|_| ());
        let guard = StampedeGuard::in_memory().with_policy(policy.build().unwrap());
        let shop = guard.layer(inner.clone());
        let [a, b] = ["a", "b"]
            .map(|tenant| move || request("GET", "/", &[("x-tenant", tenant), ("host", "shop.example")]));
        for _ in 0..2 {
            assert_eq!(ask(&shop, a()).await.text(), "1", "{at}");
        }
        let other = ask(&shop, b()).await.text().to_owned();
        guard.invalidate(guard.http_key(&a()).unwrap()).await.unwrap();
        let again = ask(&shop, a()).await.text().to_owned();
        assert_eq!(again, (inner.calls()).to_string(), "{at}: it was removed");
        let stays = if other == "1" { again } else { other };
        assert_eq!(ask(&shop, b()).await.text(), stays, "{at}: and no other was");
    }
    let guard = StampedeGuard::in_memory();
    assert_eq!(guard.http_key(&request("GET", "/", &[("cookie", "a=b"), ("host", "shop.example")])), None);
}
