//! Who is admitted: without rights nothing is shown.

use super::*;

#[tokio::test]
async fn a_service_without_a_decision_about_access_is_an_error_that_says_what_to_do() {
    let guard = guard(&MemoryStore::new());
    for (inspector, words) in [
        (guard.inspector(), "set a token, or call unprotected()"),
        (guard.inspector().token("short"), "less than 16 characters"),
        (guard.inspector().token("a token with spaces"), "not printable ASCII"),
        (guard.inspector().token(TOKEN).name("n".repeat(65)), "choose a shorter one"),
    ] {
        let error = inspector.into_service().expect_err(words);
        assert!(error.to_string().contains(words), "{error}");
    }
    guard.inspector().unprotected().into_service().expect("valid");
}

#[tokio::test]
async fn without_the_token_each_path_shows_nothing() {
    let guard = guard(&MemoryStore::new());
    guard.insert("secret", &7).await.expect("stored");
    let service = serve(guard.inspector().allow_actions(true).show_values(true));
    let tokens = [
        "",
        "Bearer ",
        "Bearer 3f6c2d9ab1e74f0",
        "Bearer 3f6c2d9ab1e74f055",
        "Basic 3f6c2d9ab1e74f05",
        TOKEN,
    ];
    for path in ["/api/fleet", "/api/key?key=secret", "/api/doctor", "/api/act"] {
        for token in tokens {
            let request = Request::get(path).header("authorization", token).body(Full::default());
            let response = send(&service, request.expect("a request")).await;
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            let (status, body) = read(response).await;
            let text = String::from_utf8_lossy(&body).into_owned();
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{path} {token}");
            assert!(text.contains("Authorization: Bearer") && !text.contains("secret"), "{text}");
        }
    }
    let admitted = Request::get("/api/doctor").header("authorization", format!("bearer {TOKEN}"));
    assert_eq!(
        json(&service, admitted).await.0,
        StatusCode::OK,
        "the scheme is case-insensitive (RFC 9110, 11.1)"
    );
}

#[tokio::test]
async fn the_page_needs_no_token_and_shows_nothing_by_itself() {
    let guard = guard(&MemoryStore::new());
    let service = serve(guard.inspector());
    for path in ["/", "/?a"] {
        let response = send(&service, Request::get(path).body(Full::default()).expect("a request")).await;
        let policy = response.headers()["content-security-policy"].to_str().expect("text").to_owned();
        assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(response.headers()["cache-control"], "no-store");
        let (status, body) = read(response).await;
        assert_eq!(status, StatusCode::OK);
        assert!(body.len() < 150 * 1024, "{} bytes", body.len());
        let page = String::from_utf8(body.to_vec()).expect("text");
        assert!(
            !page.contains("http://") && !page.contains("https://") || page.contains("www.w3.org"),
            "no asset from elsewhere"
        );
    }
}

#[tokio::test]
async fn a_request_that_the_api_does_not_know_is_told_what_there_is() {
    let service = serve(guard(&MemoryStore::new()).inspector());
    let authorized = |method: &str, path: &str| {
        Request::builder().method(method).uri(path).header("authorization", format!("Bearer {TOKEN}"))
    };
    for (method, path, status, words) in [
        ("GET", "/api/other", StatusCode::NOT_FOUND, "api/fleet"),
        ("GET", "/_cache", StatusCode::NOT_FOUND, "nest_service removes a prefix"),
        ("POST", "/x/api/act", StatusCode::NOT_FOUND, "api/fleet"),
        ("POST", "/api/fleet", StatusCode::METHOD_NOT_ALLOWED, "use GET"),
        ("GET", "/api/act", StatusCode::METHOD_NOT_ALLOWED, "use POST"),
        ("DELETE", "/", StatusCode::METHOD_NOT_ALLOWED, "use GET"),
        ("POST", "/api/key", StatusCode::BAD_REQUEST, "either a key or a url"),
        ("PUT", "/api/key", StatusCode::METHOD_NOT_ALLOWED, "use GET"),
        ("GET", "/api/key", StatusCode::BAD_REQUEST, "either a key or a url"),
        ("GET", "/api/key?key=", StatusCode::BAD_REQUEST, "the key is empty"),
        ("GET", "/api/key?key=a&url=http://h/", StatusCode::BAD_REQUEST, "either a key or a url"),
        ("GET", "/api/key?keys=a", StatusCode::BAD_REQUEST, "parameters key, or url and header"),
        ("GET", "/api/key?url=/p", StatusCode::BAD_REQUEST, "the URL has no host"),
        ("GET", "/api/key?url=http://%20/", StatusCode::BAD_REQUEST, "this is no URL"),
        ("GET", "/api/key?url=http://h/&header=x", StatusCode::BAD_REQUEST, "Name: value"),
        ("GET", "/api/key?url=http://h/&header=a%00:x", StatusCode::BAD_REQUEST, "Name: value"),
    ] {
        let (found, answer) = json(&service, authorized(method, path)).await;
        assert_eq!(found, status, "{method} {path} {answer}");
        assert!(
            answer["error"].as_str().is_some_and(|text| text.contains(words)),
            "{method} {path}: {answer}"
        );
    }
}
