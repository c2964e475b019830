//! Extensions of responses are values in memory: only the client of the leading request receives them.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router, middleware};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use stampede_guard::StampedeGuard;
use tower::ServiceExt as _;

/// The details of an error, for a layer that writes them for clients.
#[derive(Clone)]
struct Problem(&'static str);

fn shop() -> Router {
    Router::new().route("/", get(|| async { (StatusCode::NOT_FOUND, Extension(Problem("no such report"))) }))
}

async fn in_json(response: Response) -> Response {
    let Some(Problem(text)) = response.extensions().get().cloned() else { return response };
    (response.status(), [("content-type", "application/problem+json")], format!("{{\"title\":\"{text}\"}}"))
        .into_response()
}

/// Two requests, one after the other: the first leads, the second hits.
async fn texts(app: Router) -> [String; 2] {
    let mut texts = [String::new(), String::new()];
    for text in &mut texts {
        let request = Request::get("/").header("host", "shop.example").body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        *text = String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().into()).unwrap();
    }
    texts
}

/// Without the layer order below, the first client gets a 404 in JSON and the next one a bare 404.
#[tokio::test]
async fn a_layer_that_reads_response_extensions_works_for_hits_only_inside_the_guard() {
    const JSON: &str = r#"{"title":"no such report"}"#;
    let inside = shop().layer(middleware::map_response(in_json)).layer(StampedeGuard::in_memory());
    assert_eq!(texts(inside).await, [JSON, JSON]);
    let outside = shop().layer(StampedeGuard::in_memory()).layer(middleware::map_response(in_json));
    assert_eq!(texts(outside).await, [JSON, ""], "a hit has no extensions");
}
