//! `CacheTerms`: a handler states lifetimes and recipients of its response without header text.

use std::time::Duration;

use http::Response;
use stampede_guard::http::{CacheTerms, HttpPolicy};

use super::kit::{
    Boxed, Feed, Inner, Req, Seen, Shop, ask, get, policy, replicas, replicas_with, request, respond, secs,
    send, sent, settle, shop, whole,
};

fn minute() -> CacheTerms {
    CacheTerms::fresh_for(secs(60))
}

fn with_terms(mut response: Response<Boxed>, terms: CacheTerms) -> Response<Boxed> {
    response.extensions_mut().insert(terms);
    response
}

/// Answers with the number of the call, these headers and these terms.
fn stating(headers: &'static [(&'static str, &'static str)], terms: CacheTerms) -> Inner {
    Inner::with(move |n, _| Ok(with_terms(respond(200, headers, whole(n.to_string())), terms)))
}

/// The body, the guard's remark and the `Cache-Control` of a response.
fn facts(seen: &Seen) -> (&str, String, Option<&str>) {
    (seen.text(), seen.remark(), seen.header("cache-control"))
}

async fn lines(shop: &Shop, request: Req) -> (String, String, Option<String>) {
    let seen = ask(shop, request).await;
    let (text, remark, line) = facts(&seen);
    (text.to_owned(), remark, line.map(str::to_owned))
}

#[tokio::test(start_paused = true)]
async fn stated_terms_count_in_each_process_and_clients_see_them() {
    let terms = minute().stale_while_revalidate(secs(30));
    let shops = replicas(2, &stating(&[], terms));
    let line = Some("max-age=60, stale-while-revalidate=30");
    let seen = ask(&shops[0], get("/")).await;
    assert_eq!(facts(&seen), ("1", "fwd=uri-miss; stored; ttl=60".to_owned(), line));
    tokio::time::sleep(secs(20)).await;
    for shop in &shops {
        let seen = ask(shop, get("/")).await;
        assert_eq!(facts(&seen), ("1", "hit; ttl=40".to_owned(), line));
    }
    tokio::time::sleep(secs(50)).await;
    let seen = ask(&shops[1], get("/")).await;
    assert_eq!(facts(&seen), ("1", "hit; ttl=-10".to_owned(), line), "stale, and loaded in the background");
    settle().await;
    assert_eq!(ask(&shops[0], get("/")).await.text(), "2");
}

/// The response's own `Cache-Control` is for clients, and the terms are for the guard.
#[tokio::test(start_paused = true)]
async fn clients_see_the_handlers_own_cache_control_or_none_if_the_terms_are_hidden() {
    for (headers, terms, line) in [
        (&[("cache-control", "no-cache")][..], minute(), Some("no-cache")),
        (&[("cache-control", "no-store")], minute(), Some("no-store")),
        (&[("cache-control", "max-age=0, must-revalidate")], minute(), Some("max-age=0, must-revalidate")),
        (&[("cache-control", "max-age=3600")], minute().hide_from_clients(), Some("max-age=3600")),
        (&[], minute().hide_from_clients(), None),
    ] {
        let shops = replicas(2, &stating(headers, terms));
        for (shop, remark) in shops.iter().zip(["fwd=uri-miss; stored; ttl=60", "hit; ttl=60"]) {
            let seen = ask(shop, get("/")).await;
            assert_eq!(facts(&seen), ("1", remark.to_owned(), line), "{headers:?}");
        }
        tokio::time::sleep(secs(61)).await;
        assert_eq!(ask(&shops[1], get("/")).await.text(), "2", "{headers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn terms_share_no_response_of_one_client() {
    for (headers, terms, detail, line) in [
        (&[("set-cookie", "a=b")][..], minute(), "set-cookie", "private, max-age=60"),
        (&[], minute().for_one_user(), "private", "private, max-age=60"),
        (&[], CacheTerms::do_not_store(), "cache-terms", "no-store"),
        (&[("cache-control", "private")], minute(), "private", "private"),
    ] {
        let shops = replicas(2, &stating(headers, terms));
        for (n, shop) in shops.iter().enumerate() {
            let seen = ask(shop, get("/")).await;
            assert_eq!(seen.text(), (n + 1).to_string(), "{detail}: each client has a response of its own");
            assert_eq!(seen.header("cache-control"), Some(line), "{detail}");
            assert_eq!(seen.remark(), format!("fwd=uri-miss; detail={detail}"));
        }
    }
    // The request bypasses, and no cache on the way may give its response to others.
    let shop = shop(&stating(&[], minute()));
    let with_cookie = request("GET", "/", &[("cookie", "a=b")]);
    let (_, remark, line) = lines(&shop, with_cookie).await;
    assert_eq!(
        (remark.as_str(), line.as_deref()),
        ("fwd=bypass; detail=credentials", Some("private, max-age=60"))
    );
}

#[tokio::test(start_paused = true)]
async fn a_private_cache_stores_a_response_for_one_user_for_that_user() {
    let shops =
        replicas_with(2, &stating(&[], minute().for_one_user()), policy().http(HttpPolicy::private()));
    let of = |user| request("GET", "/", &[("authorization", user)]);
    for (user, n) in [("ann", "1"), ("bob", "2"), ("ann", "1"), ("bob", "2")] {
        for shop in &shops {
            let seen = ask(shop, of(user)).await;
            assert_eq!(
                (seen.text(), seen.header("cache-control")),
                (n, Some("private, max-age=60")),
                "{user}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_streamed_response_is_stored_by_its_terms() {
    let (feed, body) = Feed::new();
    let inner = Inner::in_turn([with_terms(respond(200, &[], body), minute())]);
    let shops = replicas(2, &inner);
    let clients = [send(&shops[0], get("/")), send(&shops[1], get("/"))];
    settle().await;
    feed.data("first ");
    settle().await;
    feed.data("second");
    drop(feed);
    for client in clients {
        let seen = client.await.unwrap();
        assert_eq!((seen.text(), seen.header("cache-control")), ("first second", Some("max-age=60")));
    }
    for shop in &shops {
        let seen = ask(shop, get("/")).await;
        assert_eq!(facts(&seen), ("first second", "hit; ttl=59".to_owned(), Some("max-age=60")));
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_shows_the_terms_and_updates_the_stored_ones() {
    let inner = Inner::with(|n, request| {
        let terms = CacheTerms::fresh_for(if *request.method() == "HEAD" { secs(300) } else { secs(60) });
        let body = if *request.method() == "HEAD" { Boxed::default() } else { whole("body") };
        let number = n.to_string();
        Ok(with_terms(respond(200, &[("etag", "\"a\""), ("x-call", &number)], body), terms))
    });
    let shop = shop(&inner);
    let head = || request("HEAD", "/", &[]);
    assert_eq!(ask(&shop, head()).await.header("cache-control"), Some("max-age=300"), "not stored");
    ask(&shop, get("/")).await;
    let (_, remark, line) = lines(&shop, head()).await;
    assert_eq!((remark.as_str(), line.as_deref()), ("hit; ttl=60", Some("max-age=60")));
    tokio::time::sleep(secs(61)).await;
    ask(&shop, head()).await;
    let seen = ask(&shop, get("/")).await;
    assert_eq!(facts(&seen), ("body", "hit; ttl=300".to_owned(), Some("max-age=300")), "RFC 9111, 4.3.5");
}

#[tokio::test(start_paused = true)]
async fn each_variant_has_its_terms() {
    let inner = Inner::with(|n, request| {
        let is_german = sent(request, "accept-language") == "de";
        let terms = CacheTerms::fresh_for(if is_german { secs(60) } else { secs(10) });
        Ok(with_terms(respond(200, &[("vary", "accept-language")], whole(n.to_string())), terms))
    });
    let shops = replicas(2, &inner);
    let language = |language| request("GET", "/", &[("accept-language", language)]);
    ask(&shops[0], language("de")).await;
    ask(&shops[0], language("en")).await;
    for (after, german, english) in [(0, "1", "2"), (20, "1", "3")] {
        tokio::time::sleep(secs(after)).await;
        assert_eq!(ask(&shops[1], language("de")).await.text(), german);
        assert_eq!(ask(&shops[1], language("en")).await.text(), english);
    }
}

/// The second call confirms the response without terms, the third one with others.
#[tokio::test(start_paused = true)]
async fn a_304_leaves_the_terms_as_they_are_or_replaces_them() {
    let headers = [("etag", "\"a\""), ("cache-control", "no-cache")];
    for is_hidden in [false, true] {
        let shown = move |terms: CacheTerms| if is_hidden { terms.hide_from_clients() } else { terms };
        let headers = if is_hidden { &headers[..1] } else { &headers[..] };
        let inner = Inner::in_turn([
            with_terms(respond(200, headers, whole("body")), shown(CacheTerms::fresh_for(secs(10)))),
            respond(304, &headers[..1], Boxed::default()),
            with_terms(respond(304, headers, Boxed::default()), shown(CacheTerms::fresh_for(secs(300)))),
        ]);
        let shops = replicas(2, &inner);
        let line = if is_hidden { None } else { Some("no-cache") };
        for (remark, ttl) in [
            ("fwd=uri-miss; stored; ttl=10", 10),
            ("fwd=stale; fwd-status=304; stored; ttl=10", 10),
            ("fwd=stale; fwd-status=304; stored; ttl=300", 300),
        ] {
            let seen = ask(&shops[0], get("/")).await;
            assert_eq!(facts(&seen), ("body", remark.to_owned(), line));
            let seen = ask(&shops[1], get("/")).await;
            assert_eq!(facts(&seen), ("body", format!("hit; ttl={ttl}"), line));
            tokio::time::sleep(secs(11)).await;
        }
    }
}

/// Around a client, which may reach a server that is down.
#[tokio::test(start_paused = true)]
async fn a_stated_window_stands_in_for_a_failure() {
    let inner = Inner::with(|n, _| {
        Ok(match n {
            1 => with_terms(
                respond(200, &[], whole("old")),
                CacheTerms::fresh_for(secs(10)).stale_if_error(secs(60)),
            ),
            _ => respond(503, &[], whole("down")),
        })
    });
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    tokio::time::sleep(secs(30)).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "old");
    tokio::time::sleep(secs(60)).await;
    assert_eq!(ask(&shop, get("/")).await.text(), "down");
}

#[cfg(feature = "axum")]
#[tokio::test(start_paused = true)]
async fn terms_are_a_part_of_a_response_of_axum() {
    use axum::response::Html;
    use axum::routing::get as handle;
    use http_body_util::BodyExt as _;
    use tower::ServiceExt as _;

    let report = || async { (minute(), Html("<p>a report")) };
    let app = axum::Router::<()>::new().route("/", handle(report)).layer(super::kit::guard());
    for remark in ["stampede-guard; fwd=uri-miss; stored; ttl=60", "stampede-guard; hit; ttl=60"] {
        let request = http::Request::get("/").header("host", "shop.example").body(axum::body::Body::empty());
        let response = app.clone().oneshot(request.unwrap()).await.unwrap();
        assert_eq!(response.headers()["cache-status"], remark);
        assert_eq!(response.headers()["cache-control"], "max-age=60");
        assert_eq!(response.headers()["content-type"], "text/html; charset=utf-8");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "<p>a report");
    }
}

/// Two processes on one server.
#[cfg(feature = "redis")]
#[tokio::test]
async fn stated_terms_count_in_each_process_on_redis() {
    let server = crate::support::redis_server::RedisServer::start();
    let short = CacheTerms::fresh_for(secs(3)).hide_from_clients();
    let headers = [("etag", "\"a\""), ("cache-control", "no-cache")];
    let inner = Inner::with(move |_, request| {
        Ok(match sent(request, "if-none-match") {
            "" => with_terms(respond(200, &headers, whole("body")), short),
            _ => respond(304, &headers, Boxed::default()),
        })
    });
    let shops = super::kit::pair_on(&server, &inner, policy());
    for calls in [1, 2] {
        for shop in &shops {
            let seen = ask(shop, get("/")).await;
            assert_eq!((seen.text(), seen.header("cache-control")), ("body", Some("no-cache")));
            assert_eq!(inner.calls(), calls, "{}", seen.remark());
        }
        tokio::time::sleep(Duration::from_millis(3_100)).await;
    }
}
