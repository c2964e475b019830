//! The code of `docs/inspector.md`.

use axum::Router;
use axum::routing::get;
use http::{Request, StatusCode};
use stampede_guard::{Error, StampedeGuard};
use tower::ServiceExt as _;

fn router(guard: StampedeGuard, token: &str) -> Result<Router, Error> {
    let inspector = guard.inspector().token(token).name("web-1").into_service()?;
    let app: Router = Router::new()
        .route("/report/{id}", get(|| async { "all is well" }))
        .layer(guard)
        // Outside the guard's layer, so that the page is not a cached response.
        .nest_service("/_cache", inspector);
    Ok(app)
}

#[tokio::test]
async fn the_page_and_its_api_are_mounted() {
    let app = router(StampedeGuard::in_memory(), "3f6c2d9ab1e74f05").expect("valid");
    for (path, token, status) in [
        ("/_cache", "", StatusCode::OK),
        ("/_cache/", "", StatusCode::OK),
        ("/_cache/api/fleet", "", StatusCode::UNAUTHORIZED),
        ("/_cache/api/fleet", "Bearer 3f6c2d9ab1e74f05", StatusCode::OK),
        ("/report/7", "", StatusCode::OK),
    ] {
        let request = Request::get(path).header("host", "shop.example").header("authorization", token);
        let request = request.body(axum::body::Body::empty()).expect("a request");
        let response = app.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), status, "{path}");
    }
}
