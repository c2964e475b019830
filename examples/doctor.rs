//! What this deployment costs and lacks, and what to do about it.
//!
//! `REDIS_URL=redis://user:password@host/ NAMESPACE=shop cargo run --example doctor`; without a URL, in memory. The user
//! and the namespace are those of the service: it looks at what that user may do with that service's keys. Ends with 1
//! if a promise does not hold there, so that a pipeline can ask before it deploys. The settings that it compares with
//! are the defaults: a service with others calls `guard.doctor()` itself.

use std::error::Error;
use std::process::ExitCode;

use stampede_guard::{Backend, MemoryStore, StampedeGuard};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    // What keeps the guard from its server, and what to do about it, is a warning.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let store: Backend = match std::env::var("REDIS_URL") {
        Ok(url) => redis::Client::open(url)?.into(),
        Err(_) => MemoryStore::new().into(),
    };
    let guard = match std::env::var("NAMESPACE") {
        Ok(namespace) => StampedeGuard::builder(store).namespace(namespace).build()?,
        Err(_) => StampedeGuard::new(store),
    };
    // As in a service: the first request should not have to connect. That it failed is in the report.
    let _ = guard.connect().await;
    println!("{}\n", guard.health());
    let report = guard.doctor().await;
    print!("{report}");
    Ok(if report.is_healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
