//! A service whose traces and metrics are exported by OTLP. Start it twice, with two ports, and a receiver such as the OpenTelemetry
//! Collector or Jaeger:
//!
//! ```sh
//! export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 REDIS_URL=redis://127.0.0.1/
//! PORT=8001 cargo run -p stampede-guard-otlp &
//! PORT=8002 cargo run -p stampede-guard-otlp &
//! curl localhost:8001/reports/1 & curl localhost:8002/reports/1
//! ```
//!
//! The second request waits for the load of the first one, in another process: its span `stampede_guard.wait` has a link to the
//! span `stampede_guard.load` of that process. `SAMPLED=0.01` samples one request in a hundred, and each load.

use std::env;
use std::error::Error;
use std::time::Duration;

use axum::extract::{Path, Request};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use axum::{Router, serve};
use stampede_guard::{Backend, MemoryStore, Policy, StampedeGuard};
use stampede_guard_otlp::Telemetry;
use stampede_guard_otlp::links::LoadLinks;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{Instrument as _, info_span};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let sampled = env::var("SAMPLED").map_or(Ok(1.0), |part| part.parse())?;
    let telemetry = Telemetry::start(sampled)?;
    let log = tracing_subscriber::fmt::layer().with_filter(EnvFilter::new("info"));
    tracing_subscriber::registry().with(telemetry.layer()).with(log).init();

    let backend: Backend = match env::var("REDIS_URL") {
        Ok(url) => redis::Client::open(url)?.into(),
        Err(_) => MemoryStore::new().into(),
    };
    let policy = Policy::builder().name("reports").build()?;
    let guard = StampedeGuard::builder(backend).policy(policy).span_links(LoadLinks).build()?;
    let app = Router::new()
        .route("/reports/{id}", get(report))
        .layer(guard.clone())
        // Around the guard: a hit has a span, too.
        .layer(from_fn(traced));

    let listener =
        TcpListener::bind(("127.0.0.1", env::var("PORT").map_or(Ok(8001), |port| port.parse())?)).await?;
    println!("http://{}/reports/1", listener.local_addr()?);
    let mut ended = signal(SignalKind::terminate())?;
    let ending = async move {
        tokio::select! {
            _ = ended.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    serve(listener, app).with_graceful_shutdown(ending).await?;
    guard.shutdown(Duration::from_secs(5)).await;
    // The exporters wait for their last batch, which must not hold up this runtime.
    tokio::task::spawn_blocking(|| telemetry.shutdown().map_err(|error| error.to_string())).await??;
    Ok(())
}

async fn traced(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    next.run(request).instrument(info_span!("request", %method, path)).await
}

/// Takes as long as a report does.
async fn report(Path(id): Path<u32>) -> String {
    tokio::time::sleep(Duration::from_millis(500)).await;
    format!("report {id}\n")
}
