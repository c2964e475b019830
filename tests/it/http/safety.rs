//! Promise 8: a response that is marked as one user's reaches no other client, not even one that waits for it.

use http::Response;
use stampede_guard::http::{DoNotStore, HttpPolicy};

use super::kit::{
    Boxed, Inner, Seen, Shop, all, ask, get, policy, replicas, replicas_with, respond, send_many, settle,
    shop, shop_with, whole,
};

/// One request leads while 20 others wait, in its process and in another one. Each receives an answer of its own, and once the first answer
/// has come, none waits for another.
async fn is_nobody_elses(rule: &str, inner: Inner) {
    is_nobody_elses_by(HttpPolicy::default(), rule, inner).await;
}

async fn is_nobody_elses_by(http: HttpPolicy, rule: &str, inner: Inner) {
    let inner = inner.held_separately();
    let replicas = replicas_with(2, &inner, policy().http(http));
    let mut clients = send_many(&replicas[0], 11, "/");
    settle().await;
    clients.extend(send_many(&replicas[1], 10, "/"));
    settle().await;
    assert_eq!(inner.calls(), 1, "{rule}: one leads, the others wait");
    inner.open_first();
    settle().await;
    assert_eq!(inner.loads.running(), 20, "{rule}: all load at once");
    inner.gate.open();
    let seen = all(clients).await;
    let mut numbers: Vec<_> = seen.iter().map(|seen| seen.text().parse::<usize>().unwrap()).collect();
    numbers.sort();
    assert_eq!(numbers, (1..=21).collect::<Vec<_>>(), "{rule}: each its own answer");
    let own = format!("fwd=uri-miss; detail={rule}");
    for seen in seen {
        let expected = if seen.text() == "1" { &own } else { "fwd=miss; detail=uncoordinated" };
        assert_eq!(seen.remark(), expected);
    }
    // Nothing was stored: the next request receives another new answer.
    assert_eq!(ask(&replicas[0], get("/")).await.text(), "22", "{rule}");
    assert_eq!(ask(&replicas[1], get("/")).await.text(), "23", "{rule}");
}

/// A3, A4, A6
#[tokio::test(start_paused = true)]
async fn a_private_answer_reaches_no_waiter() {
    let cases = [
        ("set-cookie", "session=1", "set-cookie"),
        ("cache-control", "private", "private"),
        ("cache-control", "max-age=60, private=\"x\"", "private"),
        ("cache-control", "no-store", "no-store"),
        ("cache-control", "no-cache", "no-cache"),
        ("vary", "*", "vary"),
    ];
    for (name, value, rule) in cases {
        is_nobody_elses(rule, Inner::with_headers(&[(name, value)])).await;
    }
}

/// RFC 9111, 5.2.2.2 and 5.2.2.4: both directives require a validation before the response answers another request, and without a validator
/// that is impossible. Regression: the first one was sent to waiters, unlike the second.
#[tokio::test(start_paused = true)]
async fn a_response_that_must_but_can_not_be_validated_is_its_own_clients_only() {
    for (control, rule) in [
        ("no-cache", "no-cache"),
        ("max-age=0, must-revalidate", "must-revalidate"),
        ("public, max-age=0, must-revalidate", "must-revalidate"),
        ("max-age=0, proxy-revalidate", "must-revalidate"),
    ] {
        for http in [HttpPolicy::default(), HttpPolicy::strict()] {
            let inner = Inner::numbered(move |response| {
                response.headers_mut().insert("cache-control", control.parse().unwrap());
            });
            is_nobody_elses_by(http, rule, inner).await;
        }
    }
    // In strict mode, `s-maxage` requires a validation, too (RFC 9111, 5.2.2.10).
    let inner = Inner::with_headers(&[("cache-control", "s-maxage=0")]);
    is_nobody_elses_by(HttpPolicy::strict(), "must-revalidate", inner).await;
}

/// RFC 6585, 3 to 6, and RFC 8470, 5.2. Regression: a layer gave every response a `Cache-Control`, so a limiter's 429 for one client was a
/// hit for the next client, at another replica.
#[tokio::test(start_paused = true)]
async fn statuses_that_no_cache_may_store_are_not_shared_whatever_their_lifetime() {
    for status in [425, 428, 429, 431, 511] {
        for control in ["max-age=60", "public, s-maxage=60, stale-if-error=60"] {
            for http in [HttpPolicy::default(), HttpPolicy::strict(), HttpPolicy::private()] {
                let lasting = [("cache-control", control)];
                let inner = Inner::with(move |n, _| Ok(respond(status, &lasting, whole(n.to_string()))));
                is_nobody_elses_by(http, "status", inner).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_marked_by_the_handler_reaches_no_waiter() {
    let marked = |response: &mut Response<Boxed>| {
        response.extensions_mut().insert(DoNotStore);
    };
    is_nobody_elses("do-not-store", Inner::numbered(marked)).await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_is_private_is_not_shared_either() {
    let inner = Inner::with(|n, _| Ok(respond(500, &[("set-cookie", "a=b")], whole(n.to_string()))));
    is_nobody_elses("set-cookie", inner).await;
}

/// A8
#[tokio::test(start_paused = true)]
async fn statuses_without_a_lifetime_parts_and_validations_are_not_shared() {
    for status in [201, 202, 206, 302, 303, 304, 307, 400, 401, 403, 405, 429] {
        let inner = Inner::with(move |n, _| Ok(respond(status, &[], whole(n.to_string()))));
        is_nobody_elses("status", inner).await;
    }
    for status in [206, 304] {
        let lasting = [("cache-control", "max-age=60")];
        let inner = Inner::with(move |n, _| Ok(respond(status, &lasting, whole(n.to_string()))));
        is_nobody_elses("status", inner).await;
    }
}

/// A limiter or a firewall refuses one request or one client. That says nothing about the resource, so later requests coalesce.
#[tokio::test(start_paused = true)]
async fn a_refusal_of_one_client_leaves_no_marker() {
    let about_the_request = [402, 406, 411, 412, 413, 415, 416, 417, 425, 426, 428];
    for status in [400, 401, 403, 407, 421, 429, 431, 511].into_iter().chain(about_the_request) {
        let inner = Inner::with(move |n, _| match n {
            1 => Ok(respond(status, &[], whole("not you"))),
            _ => Ok(respond(200, &[], whole(n.to_string()))),
        });
        let inner = inner.held_separately();
        let shops = replicas(2, &inner);
        let mut waiting = send_many(&shops[0], 6, "/");
        settle().await;
        waiting.extend(send_many(&shops[1], 5, "/"));
        settle().await;
        inner.open_first();
        settle().await;
        assert_eq!(inner.loads.running(), 10, "{status}: no waiter waits again");
        let later: Vec<_> = shops.iter().flat_map(|shop| send_many(shop, 10, "/")).collect();
        settle().await;
        assert_eq!(inner.loads.running(), 10 + 1, "{status}");
        inner.gate.open();
        assert_eq!(all(waiting).await.iter().filter(|seen| seen.status == status).count(), 1, "{status}");
        assert!(all(later).await.iter().all(|seen| seen.text() == "12"), "{status}");
        assert!(ask(&shops[0], get("/")).await.remark().starts_with("hit"), "{status}");
        assert_eq!(inner.calls(), 12, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_clients_own_response_keeps_everything() {
    let headers = [
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("cache-control", "private"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
    ];
    let inner = Inner::numbered(move |response| {
        for (name, value) in headers {
            response.headers_mut().append(name, value.parse().unwrap());
        }
        response.extensions_mut().insert(7u8);
    });
    let shop = shop(&inner);
    for n in 1..=3 {
        let response = tower::ServiceExt::oneshot(shop.clone(), get("/")).await.unwrap();
        assert_eq!(response.extensions().get::<u8>(), Some(&7));
        let seen = super::kit::read(response).await;
        assert_eq!(seen.text(), n.to_string());
        for (name, value) in headers {
            assert!(seen.headers.get_all(name).iter().any(|have| have == value), "{name}: {value}");
        }
    }
}

/// A10
#[tokio::test(start_paused = true)]
async fn a_stored_response_has_no_hop_by_hop_headers() {
    let headers = [
        ("connection", "x-hop, close"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("proxy-authenticate", "Basic"),
        ("x-end-to-end", "1"),
    ];
    let shop = shop(&Inner::with_headers(&headers));
    let own = ask(&shop, get("/")).await;
    assert_eq!(own.header("x-hop"), Some("1"));
    let hit = ask(&shop, get("/")).await;
    assert_eq!(hit.remark(), "hit; ttl=60");
    for name in ["connection", "x-hop", "keep-alive", "proxy-authenticate"] {
        assert_eq!(hit.header(name), None, "{name}");
    }
    assert_eq!(hit.header("x-end-to-end"), Some("1"));
}

/// A resource whose response is private in its first `n` calls.
fn private_until(n: usize) -> Inner {
    Inner::with(move |this, _| {
        let headers: &[_] = if this <= n { &[("cache-control", "private")] } else { &[] };
        Ok(respond(200, headers, whole(this.to_string())))
    })
}

#[tokio::test(start_paused = true)]
async fn a_marker_keeps_requests_from_queueing_for_ten_seconds() {
    let inner = private_until(1000);
    let shop: Shop = shop(&inner);
    ask(&shop, get("/")).await;
    for wave in 0..3 {
        inner.gate.close();
        let clients = send_many(&shop, 20, "/");
        settle().await;
        assert_eq!(inner.loads.running(), 20, "wave {wave}: none waits");
        inner.gate.open();
        all(clients).await;
        tokio::time::sleep(super::kit::secs(4)).await;
    }
    // Each wave renews the marker. Ten seconds after the last wave it has expired, and one request leads again.
    tokio::time::sleep(super::kit::secs(10)).await;
    inner.gate.close();
    let clients = send_many(&shop, 20, "/");
    settle().await;
    assert_eq!(inner.loads.running(), 1);
    inner.gate.open();
    all(clients).await;
    assert_eq!(inner.calls(), 1 + 3 * 20 + 20);
}

/// A stored response that may no longer be served does not prevent that a marker is stored.
#[tokio::test(start_paused = true)]
async fn a_marker_replaces_the_stored_response_of_a_resource_that_has_become_private() {
    let inner = Inner::with(|n, _| {
        let public = [("etag", "\"a\""), ("cache-control", "max-age=1")];
        let headers = if n == 1 { &public[..] } else { &[("cache-control", "private")] };
        Ok(respond(200, headers, whole(n.to_string())))
    });
    let shop: Shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(super::kit::secs(2)).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "2");
    inner.gate.close();
    let clients = send_many(&shop, 20, "/");
    settle().await;
    assert_eq!(inner.loads.running(), 20, "none waits");
    inner.gate.open();
    all(clients).await;
}

#[tokio::test(start_paused = true)]
async fn a_marked_resource_that_becomes_cacheable_is_cached_by_the_next_load() {
    let inner = private_until(3);
    let shop = shop(&inner);
    for n in 1..=3 {
        assert_eq!(ask(&shop, get("/")).await.remark(), "fwd=uri-miss; detail=private", "{n}");
    }
    let healed = ask(&shop, get("/")).await;
    assert_eq!((healed.text(), healed.remark().as_str()), ("4", "fwd=uri-miss; stored; ttl=60"));
    assert_eq!(ask(&shop, get("/")).await.remark(), "hit; ttl=60");
    assert_eq!(inner.calls(), 4);
}

#[tokio::test(start_paused = true)]
async fn one_of_many_requests_heals_a_marked_resource() {
    let inner = private_until(1);
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    inner.gate.close();
    let clients = send_many(&shop, 20, "/");
    settle().await;
    inner.gate.open();
    let remarks: Vec<_> = all(clients).await.iter().map(Seen::remark).collect();
    assert_eq!(remarks.iter().filter(|remark| *remark == "fwd=uri-miss; stored; ttl=60").count(), 1);
    assert_eq!(remarks.iter().filter(|remark| *remark == "fwd=miss; detail=uncoordinated").count(), 19);
    assert!(ask(&shop, get("/")).await.remark().starts_with("hit"));
    assert_eq!(inner.calls(), 21);
}

#[tokio::test(start_paused = true)]
async fn a_cacheable_resource_that_becomes_private_is_private_from_the_next_load_on() {
    let inner = Inner::with(|n, _| {
        let headers: &[_] = if n > 1 { &[("set-cookie", "a=b")] } else { &[] };
        Ok(respond(200, headers, whole(n.to_string())))
    });
    let shop = shop_with(&inner, policy().fresh_for(super::kit::secs(5)));
    assert_eq!(ask(&shop, get("/")).await.text(), "1");
    assert_eq!(ask(&shop, get("/")).await.text(), "1");
    tokio::time::sleep(super::kit::secs(5)).await;
    for n in ["2", "3", "4"] {
        let seen = ask(&shop, get("/")).await;
        assert_eq!((seen.text(), seen.header("set-cookie")), (n, Some("a=b")));
    }
}
