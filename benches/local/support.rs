//! Real servers, processes and networks: those files of the tests' support that the rows of this bench need.
#![allow(dead_code, reason = "each file is more than the rows use")]

#[path = "../../tests/support/monitor.rs"]
pub(crate) mod monitor;
#[path = "../../tests/support/os.rs"]
pub(crate) mod os;
#[path = "../../tests/support/processes.rs"]
pub(crate) mod processes;
#[path = "../../tests/support/proxy.rs"]
pub(crate) mod proxy;
#[path = "../../tests/support/redis_server.rs"]
pub(crate) mod redis_server;
#[path = "../../tests/support/scratch.rs"]
mod scratch;
#[path = "../../tests/support/zipf.rs"]
pub(crate) mod zipf;

/// How long the bench waits for something that must happen.
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(90);
