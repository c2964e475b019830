//! The code of `docs/keys.md`.

use std::error::Error;

use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{AppendHeaders, IntoResponse};
use axum::routing::{any, get};
use axum::{Extension, Router};
use http::{HeaderMap, Request, Response};
use stampede_guard::http::{DoNotStore, HttpPolicy, TRACKING_PARAMETERS, explain};
use stampede_guard::{CacheKey, MemoryStore, Policy, StampedeGuard};

use crate::requests::{self, send};

fn guarded(app: Router, http: HttpPolicy) -> Result<Router, stampede_guard::Error> {
    let policy = Policy::builder().http(http).build()?;
    Ok(app.layer(StampedeGuard::in_memory().with_policy(policy)))
}

#[test]
fn explain_returns_the_decision_and_its_rule() -> Result<(), Box<dyn Error>> {
    let request = Request::get("http://shop.example/basket").body(())?;
    let response = Response::builder().header("cache-control", "private").body(())?;
    let decision = explain(&request, &response, &HttpPolicy::default());
    assert_eq!(decision.to_string(), "not stored: private (RFC 9111, 5.2.2.7)");

    let (plain, policy) = (Response::new(()), HttpPolicy::default());
    assert_eq!(
        explain(&request, &plain, &policy).to_string(),
        "stored, fresh for as long as the policy says: default (PolicyBuilder::fresh_for)"
    );
    let with_a_cookie =
        Request::get("http://shop.example/basket").header("cookie", "session=7f3a").body(())?;
    let decision = explain(&with_a_cookie, &plain, &policy);
    assert_eq!(decision.to_string(), "not looked up: credentials (HttpPolicy::credential_headers)");
    Ok(())
}

#[tokio::test]
async fn the_key_is_scheme_host_path_and_query() -> Result<(), Box<dyn Error>> {
    let guard = StampedeGuard::in_memory();
    let request = Request::get("/report/7?lang=en").header("host", "shop.example").body(())?;
    let key = guard.http_key(&request);
    assert_eq!(key.map(|key| key.to_string()).as_deref(), Some("http:http:shop.example:/report/7?lang=en"));

    let page = Router::new().route("/", get(|| async { "home" }));
    let exposed = guarded(page.clone(), HttpPolicy::default().expose_key(true))?;
    let seen = requests::get(&exposed, "/").await;
    assert!(seen.remark().ends_with(r#"; key="http:http:shop.example:/""#), "{}", seen.remark());

    // Three names of one service are three resources, unless the policy names one.
    let three = guarded(page.clone(), HttpPolicy::default())?;
    for host in ["shop.example", "10.0.0.1:8080", "10.0.0.1:8081"] {
        assert!(!send(&three, "GET", "/", &[("host", host)]).await.is_hit());
    }
    let http = HttpPolicy::default().authority("shop.example"); // one key, whatever `Host` says
    let one = guarded(page.clone(), http)?;
    requests::get(&one, "/").await;
    assert!(send(&one, "GET", "/", &[("host", "10.0.0.1:8081")]).await.is_hit());

    // The default port in `Host`.
    let seen = send(&three, "GET", "/", &[("host", "shop.example:80")]).await;
    assert_eq!(seen.remark(), "fwd=bypass; detail=host");
    Ok(())
}

#[tokio::test]
async fn only_the_listed_cookies_matter() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default().cookies(["session"]);
    let app = guarded(Router::new().route("/", get(|| async { "home" })), http)?;
    for cookies in ["_ga=GA1.2.3; theme=dark", ""] {
        send(&app, "GET", "/", &[("cookie", cookies)]).await;
    }
    assert!(send(&app, "GET", "/", &[("cookie", "_ga=GA1.9.9")]).await.is_hit());
    let own = send(&app, "GET", "/", &[("cookie", "_ga=GA1.2.3; session=7f3a")]).await;
    assert_eq!(own.remark(), "fwd=bypass; detail=credentials");
    Ok(())
}

/// The page of a product, with a link to itself.
async fn shoes(uri: Uri) -> String {
    format!("<a href=\"{uri}\">shoes</a>")
}

#[tokio::test]
async fn a_parameter_that_is_not_in_the_key_is_not_in_the_page() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default()
        .ignore_query(TRACKING_PARAMETERS) // utm_*, gclid, fbclid ..
        .ignore_query(["ref"])
        .sort_query(true); // `?size=42&color=red` and `?color=red&size=42` are one page
    let app = guarded(Router::new().route("/shoes", get(shoes)), http)?;
    let page = r#"<a href="/shoes?color=red&size=42">shoes</a>"#;
    let first = requests::get(&app, "/shoes?utm_source=%3Cscript%3E&size=42&color=red").await;
    assert_eq!(first.text(), page);
    assert!(first.remark().starts_with("fwd=uri-miss; stored; ttl="), "{}", first.remark());
    let second = requests::get(&app, "/shoes?color=red&size=42&fbclid=IwAR0&ref=7").await;
    assert_eq!((second.text(), second.is_hit()), (page, true));
    let own = send(&app, "GET", "/shoes?utm_source=mail", &[("authorization", "Bearer 7f3a")]).await;
    assert_eq!(own.text(), r#"<a href="/shoes?utm_source=mail">shoes</a>"#);

    let http = HttpPolicy::default().only_query(["size", "color"]);
    let app = guarded(Router::new().route("/shoes", get(shoes)), http)?;
    for n in 0..3 {
        let seen = requests::get(&app, &format!("/shoes?size=42&invented{n}=1")).await;
        assert_eq!((seen.text(), seen.is_hit()), (r#"<a href="/shoes?size=42">shoes</a>"#, n > 0));
    }
    Ok(())
}

/// The page of a product, which says that these parameters do not affect it.
async fn shoes_with_rule(uri: Uri) -> impl IntoResponse {
    let rule = HeaderValue::from_static(r#"key-order, params=("utm_source" "gclid")"#);
    ([(HeaderName::from_static("no-vary-search"), rule)], shoes(uri).await)
}

#[tokio::test]
async fn a_response_names_the_parameters_that_do_not_affect_it() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default().no_vary_search(true);
    let app = guarded(Router::new().route("/shoes", get(shoes_with_rule)), http)?;
    for (uri, seen, is_hit) in [
        ("/shoes?size=42&utm_source=mail", "/shoes?size=42&utm_source=mail", false),
        ("/shoes?size=42&utm_source=ad", "/shoes?size=42", false),
        ("/shoes?gclid=7&size=42", "/shoes?size=42", true),
    ] {
        let answer = requests::get(&app, uri).await;
        assert_eq!(answer.text(), format!("<a href=\"{seen}\">shoes</a>"));
        assert_eq!(answer.is_hit(), is_hit, "{uri}");
    }
    Ok(())
}

#[tokio::test]
async fn a_query_is_stored_by_its_content() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default().query_method(true); // off by default: a QUERY passes
    let contacts = |query: String| async move { if query.contains("WHERE") { "Ann" } else { "Ann, Bob" } };
    let app = guarded(Router::new().route("/contacts", any(contacts)), http)?;
    let query = async |content| {
        let headers = [("content-type", "application/sql")];
        requests::send_content(&app, "QUERY", "/contacts", &headers, content).await
    };
    for n in 0..2 {
        let all = query("SELECT name FROM contacts").await;
        assert_eq!((all.text(), all.is_hit()), ("Ann, Bob", n > 0));
        assert!(n > 0 || all.remark() == "fwd=uri-miss; stored; ttl=60", "{}", all.remark());
        let some = query("SELECT name FROM contacts WHERE id = 1").await;
        assert_eq!((some.text(), some.is_hit()), ("Ann", n > 0));
    }
    assert_eq!(send(&app, "PUT", "/contacts", &[]).await.remark(), "fwd=method");
    assert!(!query("SELECT name FROM contacts").await.is_hit());
    assert_eq!(send(&app, "QUERY", "/contacts", &[]).await.remark(), "fwd=bypass; detail=content-type");
    Ok(())
}

/// The price in the currency of the client's country, which a header names.
async fn price(headers: HeaderMap) -> impl IntoResponse {
    let country = headers.get("x-country").and_then(|value| value.to_str().ok()).unwrap_or("de");
    ([(header::VARY, "x-country")], format!("the price in {country}"))
}

/// A page that only this client may have.
async fn coupon() -> impl IntoResponse {
    (Extension(DoNotStore), "your coupon")
}

async fn account() -> impl IntoResponse {
    ([(header::CACHE_CONTROL, "private")], "your account")
}

#[tokio::test]
async fn a_response_says_what_it_depends_on() -> Result<(), Box<dyn Error>> {
    let app = Router::new()
        .route("/price", get(price))
        .route("/coupon", get(coupon))
        .route("/account", get(account));
    let app = guarded(app, HttpPolicy::default())?;
    for country in ["de", "fr", "de", "fr"] {
        let seen = send(&app, "GET", "/price", &[("x-country", country)]).await;
        assert_eq!(seen.text(), format!("the price in {country}"));
    }
    assert!(send(&app, "GET", "/price", &[("x-country", "fr")]).await.is_hit());
    for (path, detail) in [("/coupon", "do-not-store"), ("/account", "private")] {
        for _ in 0..2 {
            let seen = requests::get(&app, path).await;
            assert_eq!(seen.remark(), format!("fwd=uri-miss; detail={detail}"));
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_policy_says_it_for_all_responses() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default()
        .credential_header(HeaderName::from_static("x-tenant-user")) // a request with it bypasses
        .vary_on(header::ACCEPT_LANGUAGE) // as though every response named it in `Vary`
        .share_authorized(true) // a response with `public` or `s-maxage` is also for users with `Authorization`
        .ignore_request_no_cache(true); // a client's no-cache, max-age and min-fresh force no load
    let speak = async |headers: HeaderMap| {
        let language = headers.get("accept-language").and_then(|value| value.to_str().ok()).unwrap_or("en");
        ([(header::CACHE_CONTROL, "public, max-age=60")], language.to_owned())
    };
    let app = guarded(Router::new().route("/", get(speak)), http)?;
    let seen = send(&app, "GET", "/", &[("x-tenant-user", "ada")]).await;
    assert_eq!(seen.remark(), "fwd=bypass; detail=credentials");
    for language in ["de", "fr"] {
        assert_eq!(send(&app, "GET", "/", &[("accept-language", language)]).await.text(), language);
    }
    let seen = send(&app, "GET", "/", &[("accept-language", "de"), ("authorization", "Bearer 7f3a")]).await;
    assert!(seen.is_hit(), "{}", seen.remark());
    let seen = send(&app, "GET", "/", &[("accept-language", "de"), ("cache-control", "no-cache")]).await;
    assert!(seen.is_hit(), "{}", seen.remark());
    Ok(())
}

#[tokio::test]
async fn behind_a_proxy_the_report_is_named() -> Result<(), Box<dyn Error>> {
    let mut report = HeaderMap::new();
    report.insert("x-forwarded-proto", HeaderValue::from_static("https"));
    report.insert("x-forwarded-host", HeaderValue::from_static("shop.example"));
    let http = HttpPolicy::default()
        .scheme(http::uri::Scheme::HTTPS) // the proxy terminates TLS
        .behind_proxy(report); // what the proxy adds to every request
    let app = guarded(Router::new().route("/", get(|| async { "home" })), http.expose_key(true))?;
    let ordinary = [("x-forwarded-proto", "https"), ("x-forwarded-host", "shop.example")];
    let seen = send(&app, "GET", "/", &ordinary).await;
    assert!(seen.remark().ends_with(r#"key="http:https:shop.example:/""#), "{}", seen.remark());
    assert!(send(&app, "GET", "/", &ordinary).await.is_hit());
    let invented = [("x-forwarded-proto", "https"), ("x-forwarded-host", "evil.example")];
    assert!(!send(&app, "GET", "/", &invented).await.is_hit());
    assert!(send(&app, "GET", "/", &ordinary).await.is_hit());
    Ok(())
}

#[tokio::test]
async fn a_hook_extends_the_key() -> Result<(), Box<dyn Error>> {
    let http = HttpPolicy::default().key(|parts| {
        let tenant = parts.headers.get("x-tenant")?; // no tenant: the request bypasses
        tenant.to_str().ok().map(str::to_owned)
    });
    let app = guarded(Router::new().route("/", get(|| async { "home" })), http)?;
    for tenant in ["red", "blue"] {
        assert!(!send(&app, "GET", "/", &[("x-tenant", tenant)]).await.is_hit());
        assert!(send(&app, "GET", "/", &[("x-tenant", tenant)]).await.is_hit());
    }
    assert_eq!(requests::get(&app, "/").await.remark(), "fwd=bypass; detail=key");
    Ok(())
}

#[tokio::test]
async fn keys_of_loaders() -> Result<(), Box<dyn Error>> {
    assert_eq!(CacheKey::from(("user", 42)).to_string(), "user:42");
    assert_eq!(CacheKey::from(("user", 42)), CacheKey::from(("user", "42"))); // a part is what it displays as
    assert_ne!(CacheKey::from(("a", "b")), CacheKey::from("a:b")); // joined without ambiguity
    assert_eq!(CacheKey::from("two words").to_string(), "two%20words");

    // In Redis the service's name comes first: two services on one server share nothing.
    let store = MemoryStore::new();
    let shop = StampedeGuard::builder(store.clone()).namespace("shop").build()?;
    let blog = StampedeGuard::builder(store.clone()).namespace("blog").build()?;
    shop.insert(("user", 42), &"Ada").await?;
    assert_eq!(blog.get::<String>(("user", 42)).await?, None);
    Ok(())
}

/// Header lines.
type Lines = &'static [(&'static str, &'static str)];

/// The table of the page: request, response, `Cache-Status`.
#[tokio::test]
async fn the_table_of_requests_and_responses() -> Result<(), Box<dyn Error>> {
    const STORED: &str = "fwd=uri-miss; stored; ttl=";
    let cases: [(&str, Lines, u16, Lines, &str); 18] = [
        ("GET", &[], 200, &[], STORED),
        ("GET", &[], 200, &[("cache-control", "max-age=300")], STORED),
        ("GET", &[], 404, &[], STORED),
        ("GET", &[("authorization", "Bearer 7f3a")], 200, &[], "fwd=bypass; detail=credentials"),
        ("GET", &[("cookie", "_ga=1")], 200, &[], "fwd=bypass; detail=credentials"),
        ("GET", &[("cache-control", "no-store")], 200, &[], "fwd=bypass; detail=no-store"),
        ("GET", &[("content-length", "5")], 200, &[], "fwd=bypass; detail=body"),
        ("GET", &[("x-original-url", "/admin")], 200, &[], "fwd=bypass; detail=unkeyed-header"),
        ("POST", &[], 200, &[], "fwd=method"),
        ("HEAD", &[], 200, &[], "fwd=miss; detail=head"),
        ("GET", &[], 200, &[("set-cookie", "session=7f3a")], "fwd=uri-miss; detail=set-cookie"),
        ("GET", &[], 200, &[("cache-control", "private")], "fwd=uri-miss; detail=private"),
        ("GET", &[], 200, &[("cache-control", "no-store")], "fwd=uri-miss; detail=no-store"),
        ("GET", &[], 200, &[("vary", "*")], "fwd=uri-miss; detail=vary"),
        ("GET", &[], 500, &[], "fwd=uri-miss; detail=not-stored"),
        ("GET", &[], 302, &[], "fwd=uri-miss; detail=status"),
        ("GET", &[], 429, &[("cache-control", "max-age=60")], "fwd=uri-miss; detail=status"),
        ("GET", &[], 200, &[("content-type", "text/event-stream")], "fwd=uri-miss; detail=event-stream"),
    ];
    for (method, headers, status, answer, remark) in cases {
        let status = StatusCode::from_u16(status)?;
        let handler = move || async move {
            (
                status,
                AppendHeaders(answer.iter().map(|(name, value)| (*name, *value)).collect::<Vec<_>>()),
                "text",
            )
        };
        let app = Router::new().route("/", get(handler).post(handler));
        let app = guarded(app, HttpPolicy::default())?;
        let seen = send(&app, method, "/", headers).await;
        assert!(
            seen.remark().starts_with(remark),
            "{method} {headers:?} {status} {answer:?}: {}",
            seen.remark()
        );
    }
    Ok(())
}

fn page_key(id: u64, language: Option<&str>) -> CacheKey {
    match language {
        Some(language) => CacheKey::from(("page", id, language)),
        None => CacheKey::from(("page", id)),
    }
}

#[test]
fn a_part_that_may_be_missing_is_part_of_a_key() {
    let keys = [None, Some(""), Some("de"), Some("None"), Some("-")].map(|language| page_key(7, language));
    assert_eq!(
        keys[..3].iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["page:7", "page:7:", "page:7:de"]
    );
    let parts = [None, Some(""), Some("de"), Some("None")];
    let several = parts.iter().flat_map(|one| parts.iter().map(move |other| (one, other)));
    let several: Vec<_> = several
        .map(|(one, other)| CacheKey::from(("page", 7, format!("{one:?}"), format!("{other:?}"))))
        .collect();
    for all in [&keys[..], &several] {
        for (n, key) in all.iter().enumerate() {
            assert!(!all[..n].contains(key), "{key}");
        }
    }
}
