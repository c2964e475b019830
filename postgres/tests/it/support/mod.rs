//! Helpers of these tests: a private Postgres, and what they share with the tests of the core crate, which is included by path.
#![allow(dead_code)] // Each combination of features compiles other tests, which use other helpers.

#[allow(unexpected_cfgs, reason = "the feature `axum` is one of the core crate")]
#[path = "../../../../tests/support/example.rs"]
pub(crate) mod example;
#[path = "../../../../tests/support/gate.rs"]
pub(crate) mod gate;
#[path = "../../../../tests/support/os.rs"]
pub(crate) mod os;
pub(crate) mod postgres_server;
#[allow(unexpected_cfgs, reason = "the feature `redis` is one of the core crate")]
#[path = "../../../../tests/support/probe.rs"]
pub(crate) mod probe;
#[path = "../../../../tests/support/processes.rs"]
pub(crate) mod processes;
#[path = "../../../../tests/support/proxy.rs"]
pub(crate) mod proxy;
#[path = "../../../../tests/support/redis_server.rs"]
pub(crate) mod redis_server;
#[path = "../../../../tests/support/scratch.rs"]
pub(crate) mod scratch;

/// How long a test waits for something that must happen before it fails; as in the tests of the core crate.
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(90);

/// The package whose examples are built.
pub(crate) fn root() -> &'static std::path::Path {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
}
