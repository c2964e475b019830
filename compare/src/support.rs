//! The private `redis-server`, the processes that end with this one, and the counter of commands: those of the crate's own tests.

use std::time::Duration;

#[path = "../../tests/support/monitor.rs"]
pub(crate) mod monitor;
#[path = "../../tests/support/os.rs"]
pub(crate) mod os;
#[path = "../../tests/support/redis_server.rs"]
pub(crate) mod redis_server;
#[path = "../../tests/support/scratch.rs"]
pub(crate) mod scratch;

/// How long the harness waits for a replica or a server before it gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
