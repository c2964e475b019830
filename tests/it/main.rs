//! All integration tests, as one binary.
//!
//! One link step instead of thirty, and one copy of `tests/support`, which the store contract and the benches compile
//! as well. The binary is also the program of the fleet: tests with real processes run it again, see
//! `support::processes`.
//!
//! Works alike under `cargo test` (one process, tests as threads) and `cargo nextest run` (one process per test):
//! every test has its own Redis, and nothing is shared through globals.
#![allow(clippy::unwrap_used)] // In a test the panic is the report; texts stand where they add something.

mod adaptive_loads;
#[cfg(feature = "testing")]
mod asking;
mod audits;
mod bulkhead;
mod cancellation;
#[cfg(feature = "tls")]
mod certificates;
#[cfg(feature = "testing")]
mod chaos;
mod coalescing;
#[cfg(feature = "lz4")]
mod compression;
mod context;
#[cfg(all(feature = "cluster", feature = "sentinel", feature = "tls", feature = "http"))]
mod deployments_to_try;
mod drops;
mod errors;
#[cfg(all(feature = "redis", feature = "http"))]
mod examples;
mod expiries;
#[cfg(feature = "redis")]
mod fleet;
#[cfg(feature = "redis")]
mod harness;
#[cfg(any(feature = "redis", feature = "testing"))]
mod held_calls;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "inspector")]
mod inspector;
mod invalidation;
#[cfg(feature = "testing")]
mod late_attempts;
#[cfg(feature = "testing")]
mod late_replies;
#[cfg(feature = "testing")]
mod leases;
mod local;
#[cfg(feature = "redis")]
mod lock;
#[cfg(feature = "testing")]
mod look_ups;
#[cfg(feature = "testing")]
mod lost_grants;
mod many;
#[cfg(any(feature = "redis", feature = "testing"))]
mod many_keys;
mod many_permits;
#[cfg(feature = "macros")]
mod memoize_attribute;
#[cfg(feature = "macros")]
mod memoize_code;
#[cfg(all(feature = "redis", feature = "http"))]
mod memory;
#[cfg(feature = "metrics")]
mod metrics;
mod model;
mod outcomes;
mod panics;
#[cfg(feature = "redis")]
mod redis;
mod resting;
#[cfg(feature = "testing")]
mod runtimes;
#[cfg(feature = "redis")]
mod scripts;
mod shared_errors;
#[cfg(all(feature = "redis", feature = "axum"))]
mod shop;
#[cfg(feature = "testing")]
mod shutdown;
#[cfg(feature = "testing")]
mod slow_server;
#[cfg(feature = "redis")]
mod soak;
mod stale;
#[path = "../support/mod.rs"]
mod support;
mod tag_storms;
mod tags;
mod traces;
#[cfg(feature = "testing")]
mod unconfirmed;
mod unshareable;
mod unstorable;
mod warm;

use support::processes::Role;

/// Entry point of child processes. As a test it does nothing.
#[test]
fn child_entry() {
    support::processes::run_child(&roles());
}

/// The roles of child processes: each module with process tests contributes its own.
fn roles() -> Vec<Role> {
    let roles: &[&[Role]] = &[
        #[cfg(feature = "redis")]
        fleet::ROLES,
        #[cfg(feature = "redis")]
        harness::ROLES,
        #[cfg(feature = "redis")]
        local::fleet::ROLES,
        #[cfg(all(feature = "redis", feature = "http"))]
        memory::ROLES,
        #[cfg(feature = "redis")]
        lock::mutex::ROLES,
        #[cfg(feature = "redis")]
        lock::book::ROLES,
        #[cfg(feature = "redis")]
        lock::semaphore::ROLES,
        #[cfg(feature = "redis")]
        self::redis::ROLES,
        #[cfg(feature = "redis")]
        soak::ROLES,
        #[cfg(all(feature = "redis", feature = "http"))]
        http::ROLES,
    ];
    roles.concat()
}
