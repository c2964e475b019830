//! The examples on a Redis that is missing or has restricted users, and what they print on one that works.

use crate::support::example::Example;
use crate::support::redis_server::{RedisServer, free_port};

/// The most likely mistake is an address without a server. Requests are answered even then, so the log is the only sign of it.
#[tokio::test]
async fn a_missing_server_is_reported_with_advice() {
    let url = format!("redis://127.0.0.1:{}/", free_port());
    let mut server = Example::start("axum_server", &[("REDIS_URL", &url), ("RUN_ONCE", "1")]);
    assert!(server.ended().await.success(), "{}", server.stderr());
    assert!(server.stderr().contains("no server listens there"), "{}", server.stderr());
}

/// Examples that are about the server say so in one line, and end.
#[tokio::test]
async fn an_example_that_needs_the_server_reports_the_failure_in_one_line() {
    let url = format!("redis://127.0.0.1:{}/", free_port());
    for name in ["quickstart", "lock"] {
        let mut example = Example::start(name, &[("REDIS_URL", &url)]);
        let status = example.ended().await;
        assert_eq!(status.code(), Some(1), "{name}: {}", example.stderr());
        let stderr = example.stderr();
        let last = stderr.lines().last().expect("a sentence");
        assert!(last.starts_with("The server of REDIS_URL can not be used ("), "{name}: {stderr}");
        for part in ["no server listens there: see that host and port are right", "or unset REDIS_URL"] {
            assert!(last.contains(part), "{name}: {last}");
        }
        assert!(!stderr.contains(" { "), "{name} prints a value of Rust: {stderr}");
    }
}

/// The doctor may run with the user of a service, as in a pipeline. That user has no right to `sg1:*` as a whole, so the doctor must not
/// need it.
#[tokio::test]
async fn the_doctor_runs_as_the_user_of_one_service() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetkeys", "~sg1:?:{shop:*", "~sg1:??:{shop:*"]);
    let url = server.minimal_user();
    let mut doctor = Example::start("doctor", &[("REDIS_URL", &url), ("NAMESPACE", "shop")]);
    let status = doctor.ended().await;
    doctor.printed("ok       namespace: `shop`");
    doctor.printed("ok       rights: ");
    assert!(status.success(), "{status}");
}

/// Runs an example on a new server until it ends.
async fn on_redis(name: &str) -> Example {
    let server = RedisServer::start();
    let mut example = Example::start(name, &[("REDIS_URL", &server.url())]);
    let status = example.ended().await;
    assert!(status.success(), "{name}: {status}: {}", example.stderr());
    example
}

/// The README's table: one load for all replicas, and few commands, by the server's own count.
#[tokio::test]
async fn the_quickstart_prints_one_load_and_few_commands_on_redis() {
    let quickstart = on_redis("quickstart").await;
    quickstart.printed("1000 requests at once for one cold key; 3 replicas that meet on Redis.");
    // In each row, the number of loads and the number of commands.
    let row = |name: &str| -> (usize, Option<usize>) {
        let row = quickstart.printed(name);
        let columns: Vec<_> = row.split_whitespace().collect();
        (columns[0].parse().expect("loads"), columns.last().expect("commands").parse().ok())
    };
    assert_eq!(row("without the guard "), (1_000, None));
    for (name, loads) in [("guarded, cold ", 1), ("guarded, again ", 0)] {
        let (led, commands) = row(name);
        assert_eq!(led, loads, "{name}");
        // A thousand requests need some commands, but far fewer than one each.
        assert!((1..=100).contains(&commands.expect("a number")), "{name}: {commands:?}");
    }
}

#[tokio::test]
async fn the_other_examples_print_their_results_on_redis() {
    let loader = on_redis("loader").await;
    loader.printed("3 loads, 2 calls spared one");
    let client = on_redis("rest_client").await;
    assert_eq!(client.lines_with("fwd=miss; collapsed"), 1);
    assert_eq!(client.lines_with("; hit"), 1);
    let lock = on_redis("lock").await;
    lock.printed("4 processes increment");
    lock.printed("  under a mutex: 400 of 400, 0 increments lost");
    let bulkhead = on_redis("bulkhead").await;
    bulkhead.printed(" max_concurrent_loads(4):  4 queries at once at most");
}

/// Two processes: hits from memory, an invalidation that reaches them, and one that waits for a paused process.
#[tokio::test]
async fn the_local_example_shows_hits_from_memory_and_invalidations_that_reach_them() {
    let local = on_redis("local").await;
    let hits = |name: &str| -> (u32, u32) {
        let row = local.printed(name);
        let columns: Vec<_> = row.split_whitespace().rev().take(2).collect();
        (columns[1].parse().expect("from Redis"), columns[0].parse().expect("from memory"))
    };
    assert_eq!(hits("get_or_load without copies "), (1_000, 0));
    for name in ["get_or_load with local_for ", "load().get_shared with local_for "] {
        let (redis, memory) = hits(name);
        // If a renewal is late on a busy machine, some reads go to Redis meanwhile.
        assert!(redis + memory == 1_000 && memory >= 500, "{name}: {redis} and {memory}");
    }
    for price in [449, 379] {
        local.printed(&format!("  A: the price is {price} now. "));
        local.printed(&format!("  B: {price}, loaded from the database "));
    }
    assert_eq!(local.lines_with("  B: 399"), 0);
    local.printed("  B is resumed (SIGCONT).");
    let counts = local.printed("A: local_hits=");
    assert!(!counts.ends_with(" local_waits=0"), "{counts}");
}
