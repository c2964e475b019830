//! Once an unsafe method may have changed a resource, its stored response is not served any more (RFC 9111, 4.4).

use http::Method;
use stampede_guard::http::HttpPolicy;
use tower::ServiceExt as _;

use super::kit::{
    Boxed, Down, Inner, Shop, all, ask, get, policy, replicas, request, respond, secs, send, send_many,
    settle, shop, shop_with, whole,
};

/// Answers GETs with the number of calls so far, and all other methods with this status and these headers.
fn origin(status: u16, headers: &'static [(&'static str, &'static str)]) -> Inner {
    Inner::with(move |n, request| {
        Ok(match *request.method() {
            Method::GET => respond(200, &[], whole(n.to_string())),
            _ => respond(status, headers, Boxed::default()),
        })
    })
}

async fn is_stored(shop: &Shop, uri: &str) -> bool {
    let only = request("GET", uri, &[("cache-control", "only-if-cached")]);
    ask(shop, only).await.status == 200
}

/// A7
#[tokio::test(start_paused = true)]
async fn an_unsafe_method_invalidates_its_target_in_all_replicas() {
    for method in ["POST", "PUT", "PATCH", "DELETE", "MKCOL", "M-SEARCH", "FROBNICATE"] {
        for (status, invalidates) in [
            (200, true),
            (201, true),
            (204, true),
            (303, true),
            (304, true),
            (400, false),
            (404, false),
            (500, false),
        ] {
            let inner = origin(status, &[]);
            let shops = replicas(2, &inner);
            ask(&shops[0], get("/a")).await;
            ask(&shops[0], get("/b")).await;
            let seen = ask(&shops[1], request(method, "/a", &[("cookie", "a=b")])).await;
            assert_eq!((seen.status, seen.remark().as_str()), (status, "fwd=method"), "{method}");
            for shop in &shops {
                assert_eq!(!is_stored(shop, "/a").await, invalidates, "{method} {status}");
                assert!(is_stored(shop, "/b").await, "{method} {status}: nothing else");
            }
        }
    }
}

/// A7: RFC 9112, 3.2.2 says that the URI wins, but a handler may use `Host`. A GET with both is not shared. Regression: a PUT with both
/// invalidated neither resource.
#[tokio::test(start_paused = true)]
async fn an_unsafe_method_invalidates_the_resources_of_its_uri_and_of_its_host() {
    let all = ["http://a.example/p", "http://b.example/p", "http://c.example/p"];
    let cases: [(&str, &str, &[&str]); 4] = [
        ("http://a.example/p", "b.example", &all[..2]),
        ("http://user:secret@a.example/p", "a.example", &all[..1]),
        ("http://user@A.example:80/p", "b.example", &all[..2]),
        ("http://a.example/p", "b@example", &all[..1]),
    ];
    for (uri, host, invalidated) in cases {
        for status in [204, 500] {
            let inner = origin(status, &[("location", "/p")]);
            let shops = replicas(2, &inner);
            for uri in all {
                ask(&shops[0], get(uri)).await;
            }
            ask(&shops[1], request("PUT", uri, &[("host", host)])).await;
            for stored in all {
                let expected = status < 400 && invalidated.contains(&stored);
                assert_eq!(
                    !is_stored(&shops[0], stored).await,
                    expected,
                    "{uri}, {host}, {status}: {stored}"
                );
            }
        }
    }
}

/// A7
#[tokio::test(start_paused = true)]
async fn safe_methods_invalidate_nothing() {
    for method in ["OPTIONS", "TRACE", "PROPFIND", "QUERY", "HEAD"] {
        let inner = Inner::numbered(|_| ());
        let shop = shop(&inner);
        ask(&shop, get("/")).await;
        ask(&shop, request(method, "/", &[])).await;
        assert!(is_stored(&shop, "/").await, "{method}");
    }
}

/// A7: a `Location` invalidates only at the same origin. Otherwise one site could empty another site's cache.
#[tokio::test(start_paused = true)]
async fn locations_of_the_same_origin_are_invalidated_too() {
    let cases: [(&[_], &[&str]); 5] = [
        (&[("location", "/b")], &["http://shop.example/a", "http://shop.example/b"]),
        (&[("content-location", "b")], &["http://shop.example/a", "http://shop.example/b"]),
        (&[("location", "http://shop.example:80/b")], &["http://shop.example/a", "http://shop.example/b"]),
        (&[("location", "http://other.example/b")], &["http://shop.example/a"]),
        (&[("content-location", "https://shop.example/b")], &["http://shop.example/a"]),
    ];
    let all = [
        "http://shop.example/a",
        "http://shop.example/b",
        "http://other.example/b",
        "https://shop.example/b",
        "http://shop.example/c",
    ];
    for (headers, invalidated) in cases {
        for status in [201, 500] {
            let inner = origin(status, headers);
            let shop = shop(&inner);
            for uri in all {
                ask(&shop, get(uri)).await;
            }
            ask(&shop, request("POST", "/a", &[])).await;
            for uri in all {
                let expected = status < 400 && invalidated.contains(&uri);
                assert_eq!(!is_stored(&shop, uri).await, expected, "{headers:?} {status}: {uri}");
            }
        }
    }
}

/// A load that began before the unsafe method has ended may have read the state before the change.
#[tokio::test(start_paused = true)]
async fn a_load_during_an_unsafe_method_is_not_stored() {
    let inner = Inner::with(|n, request| {
        Ok(match *request.method() {
            Method::GET => respond(200, &[], whole(n.to_string())),
            _ => respond(204, &[], Boxed::default()),
        })
    })
    .held_separately();
    let shops = replicas(2, &inner);
    let early = send_many(&shops[0], 10, "/");
    settle().await;
    inner.gate.open();
    assert_eq!(ask(&shops[1], request("PUT", "/", &[])).await.status, 204);
    let late: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 10, "/")).collect();
    let late = all(late).await;
    assert!(late.iter().all(|seen| seen.text() == "3"), "later requests see the change");
    inner.open_first();
    assert!(all(early).await.iter().all(|seen| seen.text() == "1"));
    for shop in &shops {
        assert_eq!(ask(shop, get("/")).await.text(), "3");
    }
    assert_eq!(inner.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_method_in_another_case_is_another_method_and_unsafe() {
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    assert_eq!(ask(&shop, request("get", "/", &[])).await.text(), "2");
    assert!(!is_stored(&shop, "/").await);
}

#[tokio::test(start_paused = true)]
async fn each_unsafe_request_is_sent_without_waiting() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = shop_with(&inner, policy().http(HttpPolicy::strict()));
    let posts: Vec<_> = (0..10).map(|_| send(&shop, request("POST", "/", &[]))).collect();
    settle().await;
    assert_eq!(inner.loads.running(), 10);
    inner.gate.open();
    let mut numbers: Vec<_> =
        all(posts).await.iter().map(|seen| seen.text().parse::<u8>().unwrap()).collect();
    numbers.sort();
    assert_eq!(numbers, (1..=10).collect::<Vec<_>>());
}

/// In strict mode, the response to a POST may be stored for GETs, but no GET waits for the POST.
#[tokio::test(start_paused = true)]
async fn a_post_in_progress_or_abandoned_delays_no_get() {
    for abandoned in [false, true] {
        let inner = Inner::with_headers(&[("cache-control", "max-age=60")]).held();
        let shop = shop_with(&inner, policy().http(HttpPolicy::strict()));
        let post = send(&shop, request("POST", "/", &[]));
        settle().await;
        if abandoned {
            post.abort();
            settle().await;
        }
        let gets = send_many(&shop, 5, "/");
        settle().await;
        assert_eq!(inner.calls(), 2, "abandoned: {abandoned}");
        inner.gate.open();
        assert!(all(gets).await.iter().all(|seen| seen.text() == "2"));
    }
}

/// A7: a response from before the POST is invalid, whether or not the POST's own response is stored in its place.
#[tokio::test(start_paused = true)]
async fn a_post_with_the_representation_leaves_no_older_response() {
    let inner = Inner::with(|n, request| {
        let headers = [("cache-control", "max-age=60"), ("content-location", "http://shop.example/")];
        let headers = if request.method() == Method::POST { &headers[..] } else { &headers[..1] };
        Ok(respond(200, headers, whole(n.to_string())))
    });
    let shop = shop_with(&inner, policy().http(HttpPolicy::strict()));
    assert_eq!(ask(&shop, get("/")).await.text(), "1");
    assert_eq!(ask(&shop, request("POST", "/", &[])).await.text(), "2");
    assert_ne!(ask(&shop, get("/")).await.text(), "1");
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_store_that_hangs_delays_the_answer_no_longer_than_the_budget() {
    use std::time::{Duration, Instant};

    use stampede_guard::StampedeGuard;
    use tower::Layer as _;

    use crate::support::probe::eventually;
    use crate::support::redis_server::RedisServer;

    let (server, inner) = (RedisServer::start(), origin(204, &[("location", "/b")]));
    let budget = Duration::from_millis(400);
    let policy = policy().coordination_budget(budget).build().unwrap();
    let guard = StampedeGuard::new(redis::Client::open(server.minimal_user()).unwrap()).with_policy(policy);
    crate::redis::connects(&guard).await;
    let shop = guard.layer(inner.clone());
    ask(&shop, get("/a")).await;
    server.pause();
    let started = Instant::now();
    assert_eq!(ask(&shop, request("DELETE", "/a", &[])).await.status, 204);
    // The invalidation that goes on after the answer would take two seconds.
    assert!(started.elapsed() < Duration::from_millis(1_900), "{:?}", started.elapsed());
    server.resume();
    eventually("what goes on behind the answer ends", Duration::from_secs(10), async || {
        guard.stats().tasks == 0
    })
    .await;
}

/// A7. Regression: after a client hung up, or the connection to the origin broke, the whole fleet continued to serve the old
/// response, though the change may have been made.
#[tokio::test(start_paused = true)]
async fn an_unsafe_method_without_an_answer_invalidates_in_all_replicas() {
    for method in ["PUT", "POST", "DELETE"] {
        for (how, http) in ["left", "error", "panic"]
            .into_iter()
            .flat_map(|how| [(how, HttpPolicy::default()), (how, HttpPolicy::strict())])
        {
            let inner = Inner::with(move |n, request| match *request.method() {
                Method::GET => Ok(respond(200, &[("cache-control", "max-age=60")], whole(n.to_string()))),
                _ if how == "error" => Err(Down("reset".to_owned())),
                _ => panic!("scripted panic"),
            });
            let shops = super::kit::replicas_with(2, &inner, policy().http(http));
            for uri in ["/a", "/b"] {
                ask(&shops[0], get(uri)).await;
            }
            inner.gate.close();
            let change = tokio::spawn(shops[1].clone().oneshot(request(method, "/a", &[])));
            settle().await;
            assert!(is_stored(&shops[0], "/a").await, "it has not been answered yet");
            if how == "left" {
                change.abort();
            }
            inner.gate.open();
            if let Ok(answer) = change.await {
                assert!(answer.is_err());
                assert!(!is_stored(&shops[0], "/a").await, "removed before it is answered");
            }
            settle().await;
            for shop in &shops {
                assert!(!is_stored(shop, "/a").await, "{method} {how}");
                assert!(is_stored(shop, "/b").await, "{method} {how}: nothing else");
            }
        }
    }
}

/// A7. Regression: any client could force reloads, by sending a DELETE and hanging up before it is refused.
#[tokio::test(start_paused = true)]
async fn a_refused_change_of_a_client_that_hung_up_invalidates_nothing() {
    for (status, stays) in
        [(Some(401), true), (Some(405), true), (Some(204), false), (Some(302), false), (None, false)]
    {
        let inner = Inner::with(move |_, request| match *request.method() {
            Method::GET => Ok(respond(200, &[("cache-control", "max-age=60")], whole("text"))),
            _ => Ok(respond(status.unwrap_or(500), &[], whole(""))),
        });
        let shops = replicas(2, &inner);
        ask(&shops[0], get("/a")).await;
        inner.gate.close();
        let change = tokio::spawn(shops[1].clone().oneshot(request("DELETE", "/a", &[])));
        settle().await;
        change.abort();
        settle().await;
        assert!(is_stored(&shops[0], "/a").await, "it may be refused yet");
        match status {
            Some(_) => inner.gate.open(),
            None => tokio::time::sleep(secs(1)).await,
        }
        settle().await;
        assert_eq!(is_stored(&shops[0], "/a").await, stays, "{status:?}");
    }
}

/// The request is dropped with its runtime, or after the runtime: the store cannot be notified then, and nothing is logged.
#[test]
fn a_change_without_an_answer_outside_a_runtime_is_dropped_silently() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let inner = origin(204, &[]).held();
    let shop = shop(&inner);
    let mut change = Box::pin(shop.oneshot(request("PUT", "/", &[])));
    let one = runtime();
    one.block_on(async { assert!(futures_util::poll!(&mut change).is_pending()) });
    drop(one);
    assert_eq!(inner.calls(), 1);
    drop(change);

    let shop = super::kit::shop(&inner);
    let one = runtime();
    one.spawn(shop.oneshot(request("PUT", "/", &[])));
    one.block_on(tokio::task::yield_now());
    assert_eq!(inner.calls(), 2);
    drop(one);
}

/// RFC 9110, 13.1: with such conditions the origin decides whether it applies the method. Only a GET may be answered by the guard that the
/// client has the representation already.
#[tokio::test(start_paused = true)]
async fn a_conditional_post_has_the_origins_own_answer() {
    let conditions = [("if-none-match", "*"), ("if-modified-since", "Sun, 06 Nov 2094 08:49:37 GMT")];
    for http in [HttpPolicy::strict(), HttpPolicy::default()] {
        for condition in conditions {
            for control in ["no-store", "max-age=60"] {
                let inner = Inner::with(move |_, _| {
                    let headers = [("etag", "\"7\""), ("cache-control", control), ("content-location", "/")];
                    Ok(respond(200, &headers, whole("made")))
                });
                let shop = shop_with(&inner, policy().http(http.clone()));
                let seen = ask(&shop, request("POST", "/", &[condition])).await;
                assert_eq!((seen.status, seen.text()), (200, "made"), "{condition:?} {control}");
            }
        }
    }
}

/// A7: the change invalidates its target for all clients, even if the key hook makes the changing client bypass.
#[tokio::test(start_paused = true)]
async fn an_editor_that_bypasses_by_the_key_hook_invalidates_for_other_clients() {
    let http = HttpPolicy::default().key(|parts| match parts.headers.get("x-editor") {
        Some(_) => None,
        None => Some(String::new()),
    });
    let inner = origin(204, &[("location", "/b")]);
    let shop = shop_with(&inner, policy().http(http));
    for uri in ["/a", "/b", "/c"] {
        ask(&shop, get(uri)).await;
    }
    ask(&shop, request("PUT", "/a", &[("x-editor", "ann")])).await;
    for (uri, stays) in [("/a", false), ("/b", false), ("/c", true)] {
        assert_eq!(is_stored(&shop, uri).await, stays, "{uri}");
    }
}

/// A7
#[tokio::test(start_paused = true)]
async fn a_change_by_a_user_or_a_cohort_invalidates_for_clients_without_either() {
    let cohort = |parts: &stampede_guard::http::KeyParts<'_>| {
        let cohort = parts.headers.get("x-cohort").map(|cohort| cohort.to_str().unwrap());
        Some(cohort.unwrap_or_default().to_owned())
    };
    let inner = origin(204, &[("content-location", "/b")]);
    let shop = shop_with(&inner, policy().http(HttpPolicy::private().key(cohort)));
    let ann: &[_] = &[("authorization", "ann"), ("x-cohort", "one")];
    let readers =
        [ann, &ann[1..], &[], &[("authorization", "bob"), ("x-cohort", "one")], &[("x-cohort", "two")]];
    for uri in ["/a", "/b"] {
        for headers in readers {
            ask(&shop, request("GET", uri, headers)).await;
        }
    }
    ask(&shop, request("PUT", "/a", ann)).await;
    for uri in ["/a", "/b"] {
        for (n, headers) in readers.into_iter().enumerate() {
            let only: Vec<_> = headers.iter().copied().chain([("cache-control", "only-if-cached")]).collect();
            let is_stored = ask(&shop, request("GET", uri, &only)).await.status == 200;
            assert_eq!(is_stored, n >= 3, "{uri}: other users and cohorts are not known: {headers:?}");
        }
    }
}
