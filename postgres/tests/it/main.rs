//! The tests with real Postgres servers, real Redis servers and real processes.
//!
//! One binary, which is also the program of the child processes: see `support::processes`.
#![allow(clippy::unwrap_used)] // In a test the panic is the report.

mod bank;
mod doctor;
mod guide;
mod harness;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "metrics")]
mod operations;
mod reader;
mod sql;
mod sqlx;
mod stopped_readers;
mod support;
mod transactions;

use support::processes::Role;

/// Entry point of child processes. As a test it does nothing.
#[test]
fn child_entry() {
    support::processes::run_child(&roles());
}

/// The roles of child processes: each module with process tests contributes its own.
fn roles() -> Vec<Role> {
    let mut roles = [harness::ROLES, reader::ROLES, stopped_readers::ROLES].concat();
    #[cfg(feature = "metrics")]
    roles.extend(operations::ROLES);
    roles
}
