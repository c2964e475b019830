//! Nested axum routers take their prefix off the path: what is then the key?

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

/// Two routers that are alike inside, at two places.
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
    // So the key is the one that a client of the service would name.
    let uri = "http://shop.example/api/v1/orders/list".parse().unwrap();
    guard.invalidate(stampede_guard::http::cache_key(&uri).unwrap()).await.unwrap();
    text(&app, "/users/list", None).await;
    text(&app, "/api/v1/orders/list", None).await;
    assert_eq!((guard.stats().loads, guard.stats().hits), (3, 3));
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn a_path_that_was_rewritten_on_the_way_is_part_of_the_key_with_the_feature_axum() {
    let guard = StampedeGuard::in_memory();
    let inner = Router::new()
        .route(
            "/{tenant}/list",
            get(|axum::extract::Path(tenant): axum::extract::Path<String>| async { tenant }),
        )
        .layer(guard.clone());
    // Which tenant's list it is says a header, by way of the path.
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

/// As the documentation says: without the feature, the guard belongs around the outermost router.
#[cfg(not(feature = "axum"))]
#[tokio::test]
async fn inside_nested_routers_the_key_is_the_stripped_path_without_the_feature_axum() {
    let guard = StampedeGuard::in_memory();
    let [users, orders] = twins().map(|twin| twin.layer(guard.clone()));
    let app = Router::new().nest("/users", users).nest("/orders", orders);
    assert_eq!(text(&app, "/users/list", None).await, "users");
    assert_eq!(text(&app, "/orders/list", None).await, "users");
    // With a namespace each they are apart.
    let [users, orders] = twins();
    let named =
        |name: &str| StampedeGuard::builder(stampede_guard::MemoryStore::new()).namespace(name).build();
    let app = Router::new()
        .nest("/users", users.layer(named("users").unwrap()))
        .nest("/orders", orders.layer(named("orders").unwrap()));
    assert_eq!(text(&app, "/users/list", None).await, "users");
    assert_eq!(text(&app, "/orders/list", None).await, "orders");
}
