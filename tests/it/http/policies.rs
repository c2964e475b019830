//! Different policies share one store and one namespace. A policy may have to refuse a stored response that another policy was allowed to
//! store.

use std::collections::HashSet;

use http::Method;
use stampede_guard::http::{HttpPolicy, cache_key};
use stampede_guard::{MemoryStore, StampedeGuard};
use tower::Layer as _;

use super::kit::{Inner, Req, Shop, ask, get, policy, request, respond, sent, whole};

const ALL: [fn() -> HttpPolicy; 3] = [HttpPolicy::default, HttpPolicy::strict, HttpPolicy::private];

fn guards() -> [StampedeGuard; 3] {
    let guard = StampedeGuard::new(MemoryStore::new());
    ALL.map(|http| guard.with_policy(policy().http(http()).build().unwrap()))
}

fn shops(inner: &Inner) -> [Shop; 3] {
    guards().map(|guard| guard.layer(inner.clone()))
}

/// Answers the `n`th call with the request's user and `n`.
fn personal(headers: &'static [(&'static str, &'static str)]) -> Inner {
    Inner::with(move |n, request| Ok(respond(200, headers, whole(format!("{}{n}", sent(request, "cookie"))))))
}

/// A2, A6
#[tokio::test]
async fn a_private_caches_response_reaches_no_other_user() {
    for field in [("cache-control", "private, max-age=60"), ("set-cookie", "id=1"), ("x-any", "1")] {
        let inner = Inner::with(move |n, _| Ok(respond(200, &[field], whole(n.to_string()))));
        let [default, strict, private] = shops(&inner);
        for _ in 0..2 {
            assert_eq!(ask(&private, get("/")).await.text(), "1", "{field:?}");
        }
        assert_eq!(ask(&default, get("/")).await.text(), "2", "{field:?}");
        assert_eq!(ask(&strict, get("/")).await.text(), "3", "{field:?}");
    }
}

/// A2, A3
#[tokio::test]
async fn a_response_stored_strictly_is_not_served_by_the_default_policy() {
    let inner = personal(&[("cache-control", "max-age=60"), ("set-cookie", "id=1")]);
    let [default, strict, private] = shops(&inner);
    let with_cookie = || -> Req { request("GET", "/", &[("cookie", "ann")]) };
    for _ in 0..2 {
        assert_eq!(ask(&strict, with_cookie()).await.text(), "ann1");
        assert_eq!(ask(&strict, get("/")).await.text(), "ann1", "RFC 9111, 7.3");
    }
    assert_eq!(ask(&default, get("/")).await.text(), "2");
    assert_eq!(ask(&private, get("/")).await.text(), "3");
}

#[tokio::test]
async fn each_policy_names_and_invalidates_its_own_keys() {
    for uri in ["http://shop.example/a", "https://shop.example/a"] {
        let inner = Inner::with(|n, request: &Req| {
            let headers = [("cache-control", "max-age=60"), ("location", "/b")];
            let headers = if request.method() == Method::GET { &headers[..1] } else { &headers[..] };
            Ok(respond(200, headers, whole(n.to_string())))
        });
        let other = uri.replace("/a", "/b");
        for guard in guards() {
            let shop = guard.layer(inner.clone());
            let keys = || [uri, &other].map(|uri| guard.http_key(&get(uri)).unwrap());
            for change in [request("PUT", uri, &[]), request("POST", uri, &[])] {
                for uri in [uri, &other] {
                    ask(&shop, get(uri)).await;
                }
                for key in keys() {
                    assert!(guard.contains(key.clone()).await.unwrap(), "{key}");
                }
                ask(&shop, change).await;
                for key in keys() {
                    assert!(!guard.contains(key.clone()).await.unwrap(), "{key}");
                }
            }
            ask(&shop, get(uri)).await;
        }
    }
    let uri: http::Uri = "http://shop.example/a".parse().unwrap();
    let keys = guards().map(|guard| guard.http_key(&get("/a")).unwrap());
    assert_eq!(keys[0], cache_key(&uri).unwrap(), "the default policy's");
    assert_eq!(HashSet::from(keys).len(), 3);
}
