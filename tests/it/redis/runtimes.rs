//! The connections of a guard are driven by the runtime that first uses the store. If that runtime ends, like that of a test or one of
//! several in a process, the runtime of the next caller takes over.

use tokio::runtime::Runtime;

use super::*;

/// A waiter that is not notified would sleep this long, or check the lease twice a second.
const LEASE: Duration = Duration::from_secs(120);

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Waits until both guards are connected and have open inboxes.
async fn are_connected(guards: &[StampedeGuard; 2]) {
    for guard in guards {
        connects(guard).await;
    }
    eventually("both hear", SOON, async || {
        guards.iter().all(|guard| {
            let health = guard.health();
            (health.commands, health.inbox) == (LinkState::Up, LinkState::Up)
        })
    })
    .await;
}

#[test]
fn the_next_callers_runtime_drives_the_connections_when_the_first_runtime_ends() {
    let server = RedisServer::start();
    let (first, next) = (runtime(), runtime());
    let guards = first.block_on(async {
        let guards = [local(&server, lease_of(LEASE)).await, local(&server, lease_of(LEASE)).await];
        share_a_load(&server, &guards).await;
        are_connected(&guards).await;
        guards
    });
    first.shutdown_timeout(SOON);
    next.block_on(async {
        for guard in &guards {
            connects(guard).await;
        }
        // The waiter opens the inbox again, and is notified as before.
        share_a_load_of(&server, &guards, "next", [3, 4]).await;
        are_connected(&guards).await;
        eventually_eq("the old subscriptions went with their runtime", SOON, 2, async || {
            server.pubsub_clients()
        })
        .await;
    });
}
