//! The authority in a key: the `Host`, one authority for all keys, and proxies' reports of the original request.

use stampede_guard::http::HttpPolicy;
use stampede_guard::{ErrorKind, StampedeGuard};
use tower::Layer as _;

use super::kit::{Inner, ask, get, policy, request, respond, sent, shop, shop_with, whole};

/// Answers with a link that contains the `Host` of the request.
fn linking() -> Inner {
    Inner::with(|_, request| Ok(respond(200, &[], whole(format!("http://{}/next", sent(request, "host"))))))
}

#[tokio::test(start_paused = true)]
async fn a_host_that_is_not_canonical_does_not_share_with_the_canonical_one() {
    for host in ["shop.example:80", "shop.example:00080", "shop.example:"] {
        let inner = linking();
        let shop = shop(&inner);
        let other = || request("GET", "/", &[("host", host)]);
        let seen = ask(&shop, other()).await;
        assert_eq!(
            (seen.text(), seen.remark().as_str()),
            (&*format!("http://{host}/next"), "fwd=bypass; detail=host")
        );
        assert_eq!(ask(&shop, get("/")).await.text(), "http://shop.example/next", "B4: {host}");
        assert_eq!(ask(&shop, other()).await.text(), format!("http://{host}/next"), "B4: {host}");
        // It is the same resource nevertheless.
        assert!(ask(&shop, get("/")).await.remark().starts_with("hit"));
        ask(&shop, request("POST", "/", &[("host", host)])).await;
        assert!(ask(&shop, get("/")).await.remark().starts_with("fwd=uri-miss"), "RFC 9110, 4.2.3: {host}");
    }
}

fn with_authority(inner: &Inner, http: HttpPolicy) -> (StampedeGuard, super::kit::Shop) {
    let guard = StampedeGuard::in_memory().with_policy(policy().http(http).build().unwrap());
    let shop = guard.layer(inner.clone());
    (guard, shop)
}

#[tokio::test(start_paused = true)]
async fn with_one_authority_replicas_on_three_ports_load_once_and_a_path_is_invalidated_without_a_request() {
    let inner = Inner::numbered(|_| ());
    let (guard, shop) = with_authority(&inner, HttpPolicy::default().authority("shop.example"));
    let at = |port: u16| request("GET", "/product/7?a", &[("host", &format!("10.0.0.1:{port}"))]);
    for port in [3000, 3001, 3002] {
        assert_eq!(ask(&shop, at(port)).await.text(), "1", "{port}");
    }
    guard.invalidate_path("/product/7?a").await.unwrap();
    assert_eq!(ask(&shop, at(3000)).await.text(), "2");
    // An unsafe method invalidates it under any `Host`, and so does the `Location` of its answer.
    ask(&shop, request("POST", "/product/7?a", &[("host", "admin.example")])).await;
    assert_eq!(ask(&shop, at(3001)).await.text(), "4");
    for path in ["", "product/7", "http://shop.example/product/7", "/a\nb", "/a#b", "*"] {
        let error = guard.invalidate_path(path).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey, "{path}");
        assert!(error.to_string().contains("/product/7"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_location_by_the_clients_name_of_the_service_is_invalidated_under_the_one_authority() {
    let inner = Inner::with(|n, request| {
        let mut response = respond(200, &[], whole(n.to_string()));
        if request.method() == "POST" {
            response.headers_mut().insert("location", "http://10.0.0.1:3000/made".parse().unwrap());
        }
        Ok(response)
    });
    let (_, shop) = with_authority(&inner, HttpPolicy::default().authority("shop.example"));
    let at = |method, path| request(method, path, &[("host", "10.0.0.1:3000")]);
    assert_eq!(ask(&shop, at("GET", "/made")).await.text(), "1");
    ask(&shop, at("POST", "/all")).await;
    assert_eq!(ask(&shop, at("GET", "/made")).await.text(), "3", "RFC 9111, 4.4");
}

#[tokio::test(start_paused = true)]
async fn a_path_can_not_be_invalidated_without_an_authority() {
    let (guard, _) = with_authority(&linking(), HttpPolicy::default());
    let error = guard.invalidate_path("/product/7").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
    assert!(error.to_string().contains("HttpPolicy::authority"), "{error}");
}

#[test]
fn an_invalid_authority_and_an_invalid_cookie_name_are_refused_by_name() {
    let refusal = |http| policy().http(http).build().unwrap_err().to_string();
    for authority in
        ["", "http://shop.example", "shop.example/", "a b", "shop.example:80", "shop.example:", "u@a", "a:b"]
    {
        let text = refusal(HttpPolicy::default().authority(authority));
        assert!(text.contains("authority is") && text.contains("shop.example:8080"), "{text}");
    }
    for authority in ["shop.example", "Shop.Example:8080", "[::1]", "127.0.0.1:3000"] {
        policy().http(HttpPolicy::default().authority(authority)).build().unwrap();
    }
    let text = refusal(HttpPolicy::default().cookies(["session", "a=b"]));
    assert!(text.contains("cookies names \"a=b\""), "{text}");
}

/// Headers by which common proxies report their client's identity, one of each kind.
#[tokio::test(start_paused = true)]
async fn the_user_headers_of_common_proxies_are_credentials() {
    let names = [
        "signature",
        "signature-input",
        "client-cert",
        "client-cert-chain",
        "x-forwarded-user",
        "x-forwarded-email",
        "x-forwarded-preferred-username",
        "x-forwarded-groups",
        "x-forwarded-access-token",
        "x-auth-request-user",
        "x-auth-request-email",
        "x-auth-request-groups",
        "cf-access-jwt-assertion",
        "cf-access-authenticated-user-email",
        "x-goog-iap-jwt-assertion",
        "x-goog-authenticated-user-email",
        "x-goog-authenticated-user-id",
        "x-amzn-oidc-data",
        "x-amzn-oidc-identity",
        "x-amzn-oidc-accesstoken",
        "x-ms-client-principal",
        "x-ms-client-principal-id",
        "x-ms-client-principal-name",
        "x-ms-token-aad-access-token",
        "x-forwarded-client-cert",
    ];
    for name in names {
        let inner = Inner::with(move |_, request| {
            Ok(respond(200, &[], whole(format!("for {}", sent(request, name)))))
        });
        let shop = shop(&inner);
        for user in ["alice", "bob"] {
            let seen = ask(&shop, request("GET", "/", &[(name, user)])).await;
            assert_eq!(seen.text(), format!("for {user}"), "A1: {name}");
            assert_eq!(seen.remark(), "fwd=bypass; detail=credentials", "{name}");
        }
        assert_eq!(ask(&shop, get("/")).await.text(), "for ", "A1: {name}");
    }
}

/// Regression: a request with two hosts invalidated nothing.
#[tokio::test(start_paused = true)]
async fn with_one_authority_an_unsafe_request_with_two_hosts_invalidates() {
    let inner = Inner::numbered(|_| ());
    let shop = shop_with(&inner, policy().http(HttpPolicy::default().authority("shop.example")));
    ask(&shop, get("/")).await;
    let change = request("POST", "/", &[("host", "a"), ("host", "b")]);
    assert_eq!(ask(&shop, change).await.status, 200);
    assert_eq!(ask(&shop, get("/")).await.text(), "3");
}
