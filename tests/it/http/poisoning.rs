//! Malicious requests: the response to one of them is not served to the next request (cache poisoning), and one user's
//! response is not stored because its URI looks public (cache deception).

use axum::Router;
use bytes::Bytes;
use http_body_util::Full;
use stampede_guard::http::HttpPolicy;

use super::kit::{Inner, Req, ask, get, guard, policy, request, respond, sent, shop, shop_with, whole};
use super::sockets::{raw, serve};

/// A handler that reflects its input: its text contains the marker, wherever in the request the marker is.
fn reflecting(vary: Option<&'static str>) -> Inner {
    Inner::with(move |_, request| {
        let planted =
            request.headers().values().any(|value| value.as_bytes().windows(4).any(|part| part == b"evil"));
        let planted = planted || request.uri().to_string().contains("evil");
        let headers: Vec<_> = vary.map(|names| ("vary", names)).into_iter().collect();
        Ok(respond(200, &headers, whole(if planted { "evil" } else { "clean" })))
    })
}

/// B4, B6: headers that are not in the key, and that change the answer of many frameworks.
#[tokio::test(start_paused = true)]
async fn the_response_to_an_unkeyed_header_reaches_no_other_request() {
    let headers = [
        "x-http-method-override",
        "x-http-method",
        "x-method-override",
        "x-original-url",
        "x-rewrite-url",
        "a-im",
        "cookie",
        "authorization",
        "x-api-key",
    ];
    for name in headers {
        let shop = shop(&reflecting(None));
        let poison = || request("GET", "/", &[(name, "evil.example")]);
        assert_eq!(ask(&shop, poison()).await.text(), "evil", "{name}");
        assert_eq!(ask(&shop, get("/")).await.text(), "clean", "B4: {name}");
        assert_eq!(ask(&shop, poison()).await.text(), "evil", "and gets what it requested: {name}");
        assert_eq!(ask(&shop, get("/")).await.text(), "clean", "B4: {name}");
    }
}

/// B4: proxies report a host, port, scheme or prefix in these headers. Each report selects its own variant, also without a `Vary`.
#[tokio::test(start_paused = true)]
async fn an_invented_report_of_a_proxy_poisons_no_other_request() {
    let names =
        ["host", "port", "prefix", "proto", "scheme", "ssl"].map(|name| format!("x-forwarded-{name}"));
    let values = names.iter().map(|name| (name.as_str(), "evil.example"));
    for (name, value) in values.chain([("forwarded", "host=evil.example")]) {
        for http in [HttpPolicy::default(), HttpPolicy::strict(), HttpPolicy::private()] {
            let shop = shop_with(&reflecting(None), policy().http(http));
            for _ in 0..2 {
                assert_eq!(ask(&shop, request("GET", "/", &[(name, value)])).await.text(), "evil", "{name}");
                assert_eq!(ask(&shop, get("/")).await.text(), "clean", "B4: {name}");
            }
        }
    }
}

/// B4: other forwarding headers have to be named by the handler's `Vary`, or by the policy.
#[tokio::test(start_paused = true)]
async fn the_response_to_a_forwarding_header_is_for_equal_requests_only() {
    let headers = [
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-forwarded-prefix",
        "x-forwarded-port",
        "x-host",
        "x-forwarded-server",
        "forwarded",
        "origin",
        "user-agent",
        "accept",
    ];
    for name in headers {
        let varying = shop(&reflecting(Some(name)));
        let http = HttpPolicy::default().vary_on(name.parse().unwrap());
        let configured = shop_with(&reflecting(None), policy().http(http));
        for shop in [varying, configured] {
            for _ in 0..2 {
                let poison = request("GET", "/", &[(name, "evil.example")]);
                assert_eq!(ask(&shop, poison).await.text(), "evil", "{name}");
                assert_eq!(ask(&shop, get("/")).await.text(), "clean", "B4: {name}");
            }
        }
    }
}

/// B5, B14: bodies, and two contradicting lengths, as in request smuggling.
#[tokio::test(start_paused = true)]
async fn the_response_to_a_fat_or_smuggling_get_reaches_no_other_request() {
    let fat = |headers: &[(&str, &str)]| {
        request("GET", "/", headers).map(|_| Full::new(Bytes::from_static(b"evil")))
    };
    let requests: [Req; 5] = [
        fat(&[("x-note", "evil")]),
        fat(&[("x-note", "evil"), ("content-length", "4")]),
        request("GET", "/", &[("x-note", "evil"), ("transfer-encoding", "chunked")]),
        request("GET", "/", &[("x-note", "evil"), ("content-length", "4"), ("transfer-encoding", "chunked")]),
        request("GET", "/", &[("x-note", "evil"), ("content-length", "0"), ("content-length", "4")]),
    ];
    for poison in requests {
        let shop = shop(&reflecting(None));
        let case = format!("{:?}", poison.headers());
        let seen = ask(&shop, poison).await;
        assert_eq!((seen.text(), seen.remark().as_str()), ("evil", "fwd=bypass; detail=body"), "{case}");
        assert_eq!(ask(&shop, get("/")).await.text(), "clean", "B5, B14: {case}");
    }
}

/// A request line may name an authority only, and servers accept it with any method (RFC 9112, 3.2.3). A router finds
/// no route for it. Regression: that 404 was stored as the response of `/`.
#[tokio::test]
async fn the_response_to_a_target_without_a_path_reaches_no_other_request() {
    let app = Router::new().route("/", axum::routing::get(|| async { "home" })).layer(guard());
    let addr = serve(app).await;
    for cold in [true, false] {
        let poison = raw(addr, "GET shop.example HTTP/1.1", "Cache-Control: no-cache\r\n").await;
        assert!(poison.starts_with("http/1.1 404"), "cold: {cold}: {poison}");
        assert!(poison.contains("fwd=bypass; detail=target"), "cold: {cold}: {poison}");
        let page = raw(addr, "GET / HTTP/1.1", "").await;
        assert!(page.starts_with("http/1.1 200") && page.ends_with("home"), "cold: {cold}: {page}");
    }
}

/// B6: an override in the query is in the key, like the whole query.
#[tokio::test(start_paused = true)]
async fn an_override_in_the_query_is_another_resource() {
    let shop = shop(&reflecting(None));
    for uri in ["/?_method=evil", "/?a&_method=evil"] {
        assert_eq!(ask(&shop, get(uri)).await.text(), "evil");
    }
    for uri in ["/", "/?_method=", "/?a"] {
        assert_eq!(ask(&shop, get(uri)).await.text(), "clean", "B6: {uri}");
    }
}

/// B7: a path that looks like a file does not make a response public, and each spelling of a path is a separate resource.
#[tokio::test(start_paused = true)]
async fn a_users_response_with_a_file_like_path_stays_the_users() {
    let paths = [
        "/account",
        "/account/",
        "/account/x.css",
        "/account/x.js",
        "/account.css",
        "/account;x.css",
        "/account%2ex.css",
        "/account/%2e%2e/static/x.css",
        "/account/../static/x.css",
        "/account%00.css",
        "/account%0a.css",
        "/account\\x.css",
        "//account/x.css",
        "/account%3Fx.css",
        "/account%23x.css",
        "/account?x.css",
        "/static/..%2Faccount",
    ];
    for marked in
        [&[("cache-control", "private")][..], &[("set-cookie", "s=1")], &[("cache-control", "no-store")]]
    {
        let inner = Inner::with_headers(marked);
        let shop = shop(&inner);
        for uri in paths {
            let before = inner.calls();
            ask(&shop, request("GET", uri, &[("cookie", "s=1")])).await;
            ask(&shop, get(uri)).await;
            ask(&shop, get(uri)).await;
            assert_eq!(inner.calls() - before, 3, "B7: {uri} {marked:?}");
        }
    }
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    for round in 0..2 {
        for (n, uri) in paths.iter().enumerate() {
            assert_eq!(ask(&shop, get(uri)).await.text(), (n + 1).to_string(), "B7: {uri}, round {round}");
        }
    }
}

/// B8, B9: the guard sorts, strips, decodes and folds nothing: a miss is harmless, but another resource's answer does harm.
#[tokio::test(start_paused = true)]
async fn parameters_and_spellings_are_never_taken_for_each_other() {
    let uris = [
        "/?a=1&utm_content=evil",
        "/?a=1",
        "/?a=1&a=evil",
        "/?a=evil&a=1",
        "/?a=1;a=evil",
        "/?a=1;utm_content=x&a=evil",
        "/?A=1",
        "/?%61=1",
        "/?a=%31",
        "/?a=1&",
        "/?a=%2f",
        "/?a=%2F",
        "/?a=+",
        "/?a=%20",
    ];
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    for round in 0..2 {
        for (n, uri) in uris.iter().enumerate() {
            assert_eq!(
                ask(&shop, get(uri)).await.text(),
                (n + 1).to_string(),
                "B8, B9: {uri}, round {round}"
            );
        }
    }
}

/// B12: the tenant is part of the key. A request without a tenant has a key that no tenant has.
#[tokio::test(start_paused = true)]
async fn tenants_of_one_store_do_not_meet() {
    let inner =
        Inner::with(|n, request| Ok(respond(200, &[], whole(format!("{} {n}", sent(request, "x-tenant"))))));
    let http = HttpPolicy::default().key(|parts| {
        let tenant = parts.headers.get("x-tenant")?;
        tenant.to_str().ok().map(str::to_owned)
    });
    let shop = shop_with(&inner, policy().http(http));
    for _ in 0..2 {
        for tenant in ["a", "b", "a/b", "a\tb", "B"] {
            let seen = ask(&shop, request("GET", "/", &[("x-tenant", tenant)])).await;
            assert!(seen.text().starts_with(&format!("{tenant} ")), "B12: {}", seen.text());
        }
    }
    assert_eq!(inner.calls(), 5);
    // A query that looks like a tenant's name does not find that tenant's response either.
    let spelled = ask(&shop, request("GET", "/?x-tenant=a", &[("x-tenant", "b")])).await;
    assert_eq!(spelled.text(), "b 6");
    assert_eq!(ask(&shop, get("/")).await.remark(), "fwd=bypass; detail=key");
}

/// The fields that `Connection` names are only for the next hop (RFC 9110, 7.6.1): the key and `Vary` would use them, although an inner
/// service that is a proxy removes them.
#[tokio::test(start_paused = true)]
async fn fields_named_by_connection_select_no_response_of_others() {
    let inner = Inner::with(|_, request| {
        let named = |name: &str| {
            let lines = request.headers().get_all("connection").iter();
            let mut names = lines.flat_map(|line| line.to_str().unwrap().split(',')).map(str::trim);
            names.any(|one| one.eq_ignore_ascii_case(name))
        };
        let seen = |name| if named(name) { "none" } else { sent(request, name) };
        let text = format!("{} {} {}", seen("accept-language"), seen("x-tenant"), seen("host"));
        Ok(respond(200, &[("vary", "accept-language")], whole(text)))
    });
    let http = HttpPolicy::default().key(|parts| {
        let tenant = parts.headers.get("x-tenant")?;
        tenant.to_str().ok().map(str::to_owned)
    });
    let plain = [("host", "shop.example"), ("accept-language", "de"), ("x-tenant", "a")];
    for named in [&["Accept-Language"][..], &["keep-alive, x-tenant"], &["close", "HOST"]] {
        let shop = shop_with(&inner, policy().http(http.clone()));
        for _ in 0..2 {
            let poison = plain.into_iter().chain(named.iter().map(|names| ("connection", *names)));
            let seen = ask(&shop, request("GET", "/", &poison.collect::<Vec<_>>())).await;
            assert!(seen.text().contains("none"), "{named:?}: {}", seen.text());
            assert_eq!(seen.remark(), "fwd=bypass; detail=connection", "{named:?}");
            assert_eq!(
                ask(&shop, request("GET", "/", &plain)).await.text(),
                "de a shop.example",
                "{named:?}"
            );
        }
    }
}

/// A12: pages that reflect their request are usually error pages.
#[tokio::test(start_paused = true)]
async fn error_pages_are_not_stored_unless_they_say_so() {
    for status in [400, 403, 405, 414, 429, 431, 500, 501, 502, 503, 504] {
        let inner = Inner::with(move |n, _| Ok(respond(status, &[], whole(n.to_string()))));
        let shop = shop(&inner);
        for n in ["1", "2"] {
            assert_eq!(ask(&shop, get("/")).await.text(), n, "A12: {status}");
        }
    }
}
