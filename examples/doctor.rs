//! What this deployment costs and lacks, and what to do about it.
//!
//! `REDIS_URL=redis://user:password@host/ cargo run --example doctor`; without it, in memory. Ends with 1 if a promise
//! does not hold there, so that a pipeline can ask before it deploys.

use std::error::Error;
use std::process::ExitCode;

use stampede_guard::StampedeGuard;

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let guard = match std::env::var("REDIS_URL") {
        Ok(url) => StampedeGuard::new(redis::Client::open(url)?),
        Err(_) => StampedeGuard::in_memory(),
    };
    // As in a service: the first request should not have to connect. That it failed is in the report.
    let _ = guard.connect().await;
    println!("{}\n", guard.health());
    let report = guard.doctor().await;
    print!("{report}");
    Ok(if report.is_healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
