//! Examines a deployment: the faults, their costs and the remedies.
//!
//! `REDIS_URL=redis://user:password@host/ NAMESPACE=shop cargo run --example doctor`; without a URL, in memory. The user
//! and the namespace are those of the service, because the doctor tests the rights of that user on that service's keys.
//! Ends with 1 if a promise does not hold there, so that a pipeline can check before it deploys. It examines the default
//! settings: a service with other settings calls `guard.doctor()` itself.

use std::error::Error;
use std::process::ExitCode;

use stampede_guard::{Backend, MemoryStore, StampedeGuard};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let store: Backend = match std::env::var("REDIS_URL") {
        Ok(url) => redis::Client::open(url)?.into(),
        Err(_) => MemoryStore::new().into(),
    };
    let guard = match std::env::var("NAMESPACE") {
        Ok(namespace) => StampedeGuard::builder(store).namespace(namespace).build()?,
        Err(_) => StampedeGuard::new(store),
    };
    // As in a service. If it fails, the report says so.
    let _ = guard.connect().await;
    println!("{}\n", guard.health());
    let report = guard.doctor().await;
    print!("{report}");
    Ok(if report.is_healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
