//! `docs/operations.md`, `docs/metrics.md` and `docs/rolling-updates.md`.

use std::error::Error;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
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

#[test]
fn histograms_have_buckets() -> Result<(), Box<dyn Error>> {
    let mut exporter = PrometheusBuilder::new();
    for (name, bounds) in stampede_guard::metrics::BUCKETS {
        exporter = exporter.set_buckets_for_metric(Matcher::Full((*name).to_owned()), bounds)?;
    }

    let recorder = exporter.build_recorder();
    let page = recorder.handle();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let guard = StampedeGuard::in_memory();
            guard.get_or_load("key", || async { Ok::<_, std::io::Error>(1_u8) }).await.map(drop)
        })
    })?;
    let page = page.render();
    for line in [
        "# TYPE stampede_guard_load_seconds histogram",
        "stampede_guard_load_seconds_bucket{policy=\"default\",le=\"60\"} 1",
        "# HELP stampede_guard_loads_total Loads that were started, of every kind.",
        "stampede_guard_loads_total{policy=\"default\"} 1",
        "stampede_guard_leases_lost_total{policy=\"default\"} 0",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is missing:\n{page}");
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
