//! `docs/operations.md`.

use std::error::Error;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Router, routing::get};
use stampede_guard::StampedeGuard;

#[tokio::test]
async fn a_first_look() {
    let guard = StampedeGuard::in_memory();

    println!("{}", guard.health()); // sends no command
    println!("{}", guard.doctor().await); // queries the server; takes at most ten seconds

    assert!(guard.doctor().await.is_healthy());
}

async fn status(State(guard): State<StampedeGuard>) -> String {
    format!("{}\n{:#?}\n", guard.health(), guard.stats())
}

async fn doctor(State(guard): State<StampedeGuard>) -> (StatusCode, String) {
    let report = guard.doctor().await;
    let status = if report.is_healthy() { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
    (status, report.to_string())
}

fn for_operators(guard: StampedeGuard) -> Router {
    Router::new().route("/status", get(status)).route("/doctor", get(doctor)).with_state(guard)
}

#[tokio::test]
async fn operators_ask() -> Result<(), Box<dyn Error>> {
    use tower::ServiceExt as _;

    let guard = StampedeGuard::in_memory();
    for path in ["/status", "/doctor"] {
        let request = axum::http::Request::get(path).body(axum::body::Body::empty())?;
        assert_eq!(for_operators(guard.clone()).oneshot(request).await?.status(), 200);
    }
    Ok(())
}

#[tokio::test]
async fn a_process_ends() {
    let guard = StampedeGuard::in_memory();

    let ended = guard.shutdown(Duration::from_secs(5)).await;
    println!("{} leases handed over, {} abandoned", ended.handed_over, ended.abandoned);

    assert!(ended.finished);
}
