//! The tests with real Postgres servers, real Redis servers and real processes.
#![allow(clippy::unwrap_used)] // In a test the panic is the report.

#[test]
fn it_builds() {}
