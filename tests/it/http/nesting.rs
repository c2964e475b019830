//! The key of a request inside nested axum routers, which strip their prefix from the path.

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::Request;
use http_body_util::BodyExt as _;
use stampede_guard::StampedeGuard;
use tower::ServiceExt as _;

async fn text(app: &Router, uri: &str, header: Option<&'static str>) -> String {
    let mut request = Request::builder().uri(uri).header("host", "shop.example");
    if let Some(tenant) = header {
        request = request.header("x-tenant", tenant);
    }
    let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().into()).unwrap()
}

/// Two equal routers, nested at two paths.
fn twins() -> [Router; 2] {
    ["users", "orders"].map(|name| Router::new().route("/list", get(move || async move { name })))
}

#[tokio::test]
async fn around_the_outermost_router_nested_paths_are_different_keys() {
    let [users, orders] = twins();
    let app = Router::new().nest("/users", users).nest("/orders", orders).layer(StampedeGuard::in_memory());
    for _ in 0..2 {
        assert_eq!(text(&app, "/users/list", None).await, "users");
        assert_eq!(text(&app, "/orders/list", None).await, "orders");
    }
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn inside_nested_routers_the_key_is_the_original_uri_with_the_feature_axum() {
    let guard = StampedeGuard::in_memory();
    let [users, orders] = twins().map(|twin| twin.layer(guard.clone()));
    let deep = Router::new().nest("/v1", Router::new().nest("/orders", orders));
    let app = Router::new().nest("/users", users).nest("/api", deep);
    for _ in 0..2 {
        assert_eq!(text(&app, "/users/list", None).await, "users");
        assert_eq!(text(&app, "/api/v1/orders/list", None).await, "orders");
    }
    assert_eq!((guard.stats().loads, guard.stats().hits), (2, 2));
    // The key is the one that a client of the service would name.
    let uri = "http://shop.example/api/v1/orders/list".parse().unwrap();
    guard.invalidate(stampede_guard::http::cache_key(&uri).unwrap()).await.unwrap();
    text(&app, "/users/list", None).await;
    text(&app, "/api/v1/orders/list", None).await;
    assert_eq!((guard.stats().loads, guard.stats().hits), (3, 3));
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn a_rewritten_path_is_part_of_the_key_with_the_feature_axum() {
    let guard = StampedeGuard::in_memory();
    let inner = Router::new()
        .route(
            "/{tenant}/list",
            get(|axum::extract::Path(tenant): axum::extract::Path<String>| async { tenant }),
        )
        .layer(guard.clone());
    // A header names the tenant, and a layer writes it into the path.
    let rewrite = tower::util::MapRequestLayer::new(|mut request: Request<Body>| {
        let tenant = request.headers()["x-tenant"].to_str().unwrap();
        *request.uri_mut() = format!("/{tenant}/list").parse().unwrap();
        request
    });
    let app = Router::new().fallback_service(tower::Layer::layer(&rewrite, inner));
    for _ in 0..2 {
        assert_eq!(text(&app, "/list", Some("a")).await, "a");
        assert_eq!(text(&app, "/list", Some("b")).await, "b");
    }
    assert_eq!((guard.stats().loads, guard.stats().hits), (2, 2));
}

/// The header's path is not in the target, so the guard must not take the difference for a stripped prefix.
#[cfg(feature = "axum")]
#[tokio::test]
async fn a_path_shortened_by_a_header_is_not_taken_for_nesting_with_the_feature_axum() {
    let rewrite = tower::util::MapRequestLayer::new(|mut request: Request<Body>| {
        if let Some(path) = request.headers().get("x-tenant") {
            *request.uri_mut() = path.to_str().unwrap().parse().unwrap();
        }
        request
    });
    for nested in [false, true] {
        let guard = StampedeGuard::in_memory();
        let echo = Router::new().fallback(|uri: http::Uri| async move { uri.to_string() });
        let cut = tower::Layer::layer(&rewrite, echo.layer(guard.clone()));
        let (app, path) = match nested {
            false => (Router::new().fallback_service(cut), "/v2/items?a"),
            true => (Router::new().nest_service("/api", cut), "/api/v2/items?a"),
        };
        let seen = [None, Some("/items?a"), Some("/?a"), Some("/v2/items")];
        for _ in 0..2 {
            for header in seen {
                assert_eq!(text(&app, path, header).await, header.unwrap_or("/v2/items?a"), "{nested}");
            }
        }
        assert_eq!((guard.stats().loads, guard.stats().hits), (4, 4), "nested: {nested}");
    }
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn exactly_the_stripped_prefix_is_added_to_the_key_with_the_feature_axum() {
    fn leaf() -> Router {
        Router::new().route("/list", get(|| async { "list" }))
    }
    type Nest = fn(StampedeGuard) -> Router;
    let nests: [(&str, Nest); 10] = [
        ("/api/list", |guard| Router::new().nest("/api", leaf().layer(guard))),
        ("/api/list", |guard| Router::new().nest("/api/", leaf().layer(guard))),
        ("/api/list", |guard| Router::new().nest_service("/api", leaf().layer(guard))),
        ("/api", |guard| Router::new().nest("/api", Router::new().route("/", get(|| async {})).layer(guard))),
        ("/acme/list", |guard| Router::new().nest("/{tenant}", leaf().layer(guard))),
        ("/acme/v1/list?a=b", |guard| {
            Router::new().nest("/{tenant}", Router::new().nest("/v1", leaf().layer(guard)))
        }),
        ("/a/b/c/list", |guard| {
            Router::new().nest("/a/{b}", Router::new().nest_service("/c", leaf().layer(guard)))
        }),
        ("/api/nothing/here", |guard| {
            Router::new().nest("/api", leaf().fallback(|| async { "else" }).layer(guard))
        }),
        // The guard is outside the nested routers, or between two of them.
        ("/api/list", |guard| Router::new().nest("/api", leaf()).layer(guard)),
        ("/out/api/list", |guard| {
            Router::new().nest("/{out}", Router::new().nest("/api", leaf()).layer(guard))
        }),
    ];
    for (n, (path, nest)) in nests.into_iter().enumerate() {
        let guard = StampedeGuard::in_memory();
        let app = nest(guard.clone());
        for _ in 0..2 {
            text(&app, path, None).await;
        }
        assert_eq!((guard.stats().loads, guard.stats().hits), (1, 1), "{n}: {path}");
        let uri = format!("http://shop.example{path}").parse().unwrap();
        let key = stampede_guard::http::cache_key(&uri).unwrap();
        assert!(guard.contains(key).await.unwrap(), "{n}: {path}");
    }
}

/// As documented: without the feature, the guard belongs around the outermost router.
#[cfg(not(feature = "axum"))]
#[tokio::test]
async fn inside_nested_routers_the_key_is_the_stripped_path_without_the_feature_axum() {
    let guard = StampedeGuard::in_memory();
    let [users, orders] = twins().map(|twin| twin.layer(guard.clone()));
    let app = Router::new().nest("/users", users).nest("/orders", orders);
    assert_eq!(text(&app, "/users/list", None).await, "users");
    assert_eq!(text(&app, "/orders/list", None).await, "users");
    // With a namespace for each, the two guards are separate.
    let [users, orders] = twins();
    let named =
        |name: &str| StampedeGuard::builder(stampede_guard::MemoryStore::new()).namespace(name).build();
    let app = Router::new()
        .nest("/users", users.layer(named("users").unwrap()))
        .nest("/orders", orders.layer(named("orders").unwrap()));
    assert_eq!(text(&app, "/users/list", None).await, "users");
    assert_eq!(text(&app, "/orders/list", None).await, "orders");
}
