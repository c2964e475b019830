//! Requests of one user, or for more than the representation of a URI: each reaches the inner service, and leaves
//! nothing in the store.

use bytes::Bytes;
use http::HeaderName;
use http_body_util::Full;
use stampede_guard::http::HttpPolicy;

use super::kit::{
    Inner, Req, Shop, all, ask, get, policy, request, respond, send_many, settle, shop, shop_with, whole,
};

/// Sends a request from `make` before a response to a plain GET is stored, and after that. Each time the inner service answers it, and the
/// stored response does not change.
async fn passes(name: &str, remark: &str, make: impl Fn() -> Req) {
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    for n in ["1", "2", "3"] {
        let seen = ask(&shop, make()).await;
        assert_eq!((seen.text(), seen.remark().as_str()), (n, remark), "{name}");
        assert_eq!(seen.header("age"), None, "{name}");
    }
    assert_eq!(ask(&shop, get("/")).await.text(), "4", "{name} stored nothing");
    assert_eq!(ask(&shop, make()).await.text(), "5", "{name} receives nothing that is stored");
    assert_eq!(ask(&shop, get("/")).await.text(), "4", "{name} replaced nothing");
    assert_eq!(inner.calls(), 5, "{name}");
}

#[tokio::test(start_paused = true)]
async fn headers_of_one_user_one_part_or_one_connection_bypass() {
    let cases = [
        ("authorization", "Basic YTpi", "credentials"),
        ("proxy-authorization", "Basic YTpi", "credentials"),
        ("cookie", "session=1", "credentials"),
        ("x-api-key", "1", "credentials"),
        ("x-auth-token", "1", "credentials"),
        ("x-amz-security-token", "1", "credentials"),
        ("range", "lines=0-1", "range"),
        ("if-match", "*", "conditional"),
        ("if-unmodified-since", "Sun, 06 Nov 1994 08:49:37 GMT", "conditional"),
        ("expect", "100-continue", "expect"),
        ("cache-control", "no-store", "no-store"),
        ("cache-control", "max-age=0, No-Store", "no-store"),
        ("transfer-encoding", "chunked", "body"),
        ("content-length", "1", "body"),
        ("a-im", "feed", "unkeyed-header"),
        ("x-http-method-override", "DELETE", "unkeyed-header"),
        ("x-original-url", "/other", "unkeyed-header"),
        ("x-rewrite-url", "/other", "unkeyed-header"),
    ];
    for (name, value, reason) in cases {
        let remark = format!("fwd=bypass; detail={reason}");
        passes(name, &remark, || request("GET", "/", &[(name, value)])).await;
        // A credential header without a value counts, too.
        if reason == "credentials" {
            passes(name, &remark, || request("GET", "/", &[(name, "")])).await;
        }
    }
}

/// A13
#[tokio::test(start_paused = true)]
async fn an_upgrade_and_safe_methods_pass_and_change_nothing() {
    passes("upgrade", "", || request("GET", "/", &[("upgrade", "websocket"), ("connection", "upgrade")]))
        .await;
    for method in ["OPTIONS", "TRACE", "PROPFIND", "QUERY"] {
        passes(method, "fwd=method", || request(method, "/", &[])).await;
    }
}

/// B5
#[tokio::test(start_paused = true)]
async fn a_get_with_a_body_bypasses_and_the_body_arrives() {
    let fat = || request("GET", "/", &[]).map(|_| Full::new(Bytes::from_static(b"{}")));
    passes("body", "fwd=bypass; detail=body", fat).await;
    let inner = Inner::with(|_, request: &Req| {
        use http_body::Body as _;
        Ok(respond(200, &[], whole(format!("{:?}", request.body().size_hint().exact()))))
    });
    assert_eq!(ask(&shop(&inner), fat()).await.text(), "Some(2)");
}

/// B2
#[tokio::test(start_paused = true)]
async fn a_request_without_one_plain_host_bypasses() {
    let hosts: [&[(&str, &str)]; 6] = [
        &[("host", "")],
        &[("host", "a.example"), ("host", "a.example")],
        &[("host", "user@a.example")],
        &[("host", "a.example/b")],
        &[("host", "a b")],
        &[("host", "a.example:99999")],
    ];
    for host in hosts {
        passes("host", "fwd=bypass; detail=host", || request("GET", "/", host)).await;
    }
    let absent = || {
        let mut request = get("/");
        request.headers_mut().clear();
        request
    };
    passes("no host", "fwd=bypass; detail=host", absent).await;
    let two_names = || request("GET", "http://a.example/", &[("host", "b.example")]);
    passes("two names", "fwd=bypass; detail=host", two_names).await;
    // A handler that builds links from this `Host` would build them for all clients.
    let no_name = || request("GET", "http://a.example/", &[("host", "")]);
    passes("a name and none", "fwd=bypass; detail=host", no_name).await;
}

#[tokio::test(start_paused = true)]
async fn bypassing_and_other_requests_do_not_wait_for_each_other() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = shop(&inner);
    let plain = send_many(&shop, 10, "/");
    settle().await;
    let own: Vec<_> = (0..10)
        .map(|_| {
            let shop = shop.clone();
            tokio::spawn(async move { ask(&shop, request("GET", "/", &[("cookie", "a=b")])).await })
        })
        .collect();
    settle().await;
    assert_eq!(inner.loads.running(), 11, "the one load and ten of their own");
    inner.gate.open();
    assert!(all(plain).await.iter().all(|seen| seen.text() == "1"));
    let mut numbers: Vec<_> = all(own).await.iter().map(|seen| seen.text().parse::<u8>().unwrap()).collect();
    numbers.sort();
    assert_eq!(numbers, (2..=11).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn the_list_of_credential_headers_can_be_replaced() {
    let inner = Inner::numbered(|_| ());
    let names = ["x-session", "X-Tenant"].map(|name| name.parse().unwrap());
    let shop: Shop = shop_with(&inner, policy().http(HttpPolicy::default().credential_headers(names)));
    for (n, name) in ["x-session", "x-tenant"].iter().enumerate() {
        let seen = ask(&shop, request("GET", "/", &[(name, "1")])).await;
        assert_eq!(seen.text(), (n + 1).to_string());
        assert_eq!(seen.remark(), "fwd=bypass; detail=credentials");
    }
    // The policy's list replaces the default list.
    assert_eq!(ask(&shop, request("GET", "/", &[("cookie", "a=b")])).await.text(), "3");
    assert_eq!(ask(&shop, request("GET", "/", &[("authorization", "a")])).await.text(), "3");
    let none = shop_with(&inner, policy().http(HttpPolicy::default().credential_headers([])));
    assert_eq!(ask(&none, request("GET", "/", &[("cookie", "a=b")])).await.text(), "4");
    assert_eq!(ask(&none, get("/")).await.text(), "4");
}

#[tokio::test(start_paused = true)]
async fn a_header_is_added_to_the_list_of_credential_headers() {
    let inner = Inner::numbered(|_| ());
    let http = HttpPolicy::default().credential_header("X-Forwarded-User".parse().unwrap());
    let shop: Shop = shop_with(&inner, policy().http(http));
    for (n, name) in ["x-forwarded-user", "cookie", "authorization", "x-api-key"].iter().enumerate() {
        let seen = ask(&shop, request("GET", "/", &[(name, "1")])).await;
        assert_eq!(seen.text(), (n + 1).to_string());
        assert_eq!(seen.remark(), "fwd=bypass; detail=credentials");
    }
}

/// Regression: a credential header that was set before the list was replaced got lost, and the answers were shared.
#[tokio::test(start_paused = true)]
async fn credential_headers_apply_in_any_order_of_setters() {
    fn name(name: &'static str) -> HeaderName {
        HeaderName::from_static(name)
    }
    let (user, strict) = ("x-forwarded-user", HttpPolicy::strict);
    let added = [
        strict().credential_header(name(user)),
        strict().credential_header(name(user)).credential_headers([name("x-session")]),
        strict().credential_headers([name("x-session")]).credential_header(name(user)),
        strict().credential_header(name(user)).credential_headers([]),
    ];
    for (at, http) in added.into_iter().enumerate() {
        let inner = Inner::numbered(|_| ());
        let shop: Shop = shop_with(&inner, policy().http(http));
        for (n, who) in ["1", "2"].into_iter().zip(["alice", "bob"]) {
            let seen = ask(&shop, request("GET", "/", &[(user, who)])).await;
            assert_eq!((seen.text(), seen.remark().as_str()), (n, "fwd=bypass; detail=credentials"), "{at}");
        }
    }
    let inner = Inner::numbered(|_| ());
    let replaced = HttpPolicy::default().credential_headers([name("x-session")]);
    let shop: Shop = shop_with(&inner, policy().http(replaced));
    let seen = ask(&shop, request("GET", "/", &[("x-session", "1")])).await;
    assert_eq!(seen.remark(), "fwd=bypass; detail=credentials");
    let seen = ask(&shop, request("GET", "/", &[("cookie", "a=b")])).await;
    assert_eq!(seen.remark(), "fwd=uri-miss; stored; ttl=60", "the list replaces the default one");
}

#[tokio::test(start_paused = true)]
async fn a_head_looks_up_and_a_miss_passes_without_a_lease() {
    let inner = Inner::numbered(|_| ()).held();
    let shop = shop(&inner);
    let heads: Vec<_> = (0..10)
        .map(|_| {
            let shop = shop.clone();
            tokio::spawn(async move { ask(&shop, request("HEAD", "/", &[])).await })
        })
        .collect();
    settle().await;
    assert_eq!(inner.loads.running(), 10, "a HEAD does not wait");
    let gets = send_many(&shop, 5, "/");
    settle().await;
    assert_eq!(inner.loads.running(), 11, "a GET does not wait for a HEAD");
    // A HEAD does not wait for a GET in progress either.
    let late = tokio::spawn({
        let shop = shop.clone();
        async move { ask(&shop, request("HEAD", "/", &[])).await }
    });
    settle().await;
    assert_eq!(inner.loads.running(), 12);
    inner.gate.open();
    for head in all(heads).await.iter().chain([&late.await.unwrap()]) {
        assert_eq!(head.remark(), "fwd=miss; detail=head");
    }
    assert!(all(gets).await.iter().all(|seen| seen.text() == "11"), "no HEAD filled the GET");
}

/// A7
#[tokio::test(start_paused = true)]
async fn a_head_alone_stores_nothing_and_a_stored_get_answers_it_without_its_body() {
    let inner = Inner::with_headers(&[("etag", "\"a\"")]);
    let shop = shop(&inner);
    let head = || request("HEAD", "/", &[]);
    assert_eq!(ask(&shop, head()).await.text(), "1");
    assert_eq!(ask(&shop, head()).await.text(), "2");
    assert_eq!(ask(&shop, get("/")).await.text(), "3");
    let hit = ask(&shop, head()).await;
    assert_eq!((hit.text(), hit.remark().as_str()), ("", "hit; ttl=60"));
    assert_eq!((hit.header("content-length"), hit.header("age")), (Some("1"), Some("0")));
    assert_eq!(hit.header("etag"), Some("\"a\""));
    assert_eq!(ask(&shop, get("/")).await.text(), "3", "with its body");
    assert_eq!(inner.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_head_of_a_stored_204_has_no_content_length() {
    let inner = Inner::with(|_, _| Ok(respond(204, &[], super::kit::Boxed::default())));
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    let head = ask(&shop, request("HEAD", "/", &[])).await;
    assert_eq!((head.status, head.remark().as_str()), (204, "hit; ttl=60"));
    assert_eq!(head.header("content-length"), None, "RFC 9110, 8.6");
}

#[tokio::test(start_paused = true)]
async fn a_head_with_credentials_or_a_question_for_the_origin_causes_no_look_up() {
    let inner = Inner::numbered(|_| ());
    let shop = shop(&inner);
    ask(&shop, get("/")).await;
    for (name, value) in [("cookie", "a=b"), ("if-match", "*"), ("range", "lines=0-0")] {
        let seen = ask(&shop, request("HEAD", "/", &[(name, value)])).await;
        assert!(seen.remark().starts_with("fwd=bypass"), "{name}: {}", seen.remark());
    }
    assert_eq!(inner.calls(), 4);
}
