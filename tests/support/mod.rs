//! Helpers of all tests: a private Redis, a scripted origin, real processes, a hostile network, exact counts.
//!
//! Everything here is independent of the library under test, so that a broken library cannot hide behind its
//! own helpers; `harness.rs` tests this support itself.
//!
//! Everything in here talks through real sockets and pipes, so a test that uses it must not pause Tokio's clock: a
//! paused clock jumps to the next timer while the answer is still on the wire. Only `gate` and `probe` also work under
//! a paused clock.
#![allow(dead_code)] // Each combination of features compiles other tests, which use other helpers.

use std::path::Path;

#[cfg(feature = "cluster")]
pub(crate) mod cluster;
#[cfg(all(feature = "redis", feature = "http"))]
pub(crate) mod example;
pub(crate) mod gate;
#[cfg(feature = "redis")]
pub(crate) mod monitor;
pub(crate) mod origin;
pub(crate) mod os;
pub(crate) mod overload;
pub(crate) mod probe;
pub(crate) mod processes;
pub(crate) mod proxy;
#[cfg(feature = "redis")]
pub(crate) mod redis_server;
pub(crate) mod rounds;
pub(crate) mod rows;
#[cfg(feature = "redis")]
pub(crate) mod scratch;
#[cfg(feature = "sentinel")]
pub(crate) mod sentinels;
#[cfg(feature = "redis")]
pub(crate) mod tls_files;
#[cfg(feature = "redis")]
pub(crate) mod tokens;
pub(crate) mod warnings;
pub(crate) mod zipf;

/// The root of the repository. Three packages compile this file, so it looks for the folder with their common lock file.
pub(crate) fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("Cargo.lock").exists()).unwrap_or(package)
}

/// How long a test waits for something that must happen before it fails.
///
/// Generous, because only a failing test waits that long, and a loaded CI machine must not fail a correct one.
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(90);
