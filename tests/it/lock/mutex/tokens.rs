//! Each acquisition has a unique token, and only the server's clock decides the order.

use std::collections::HashSet;

use super::*;

/// S1.20
#[tokio::test(start_paused = true)]
async fn ten_thousand_acquisitions_have_ten_thousand_tokens() {
    let a = mutex(&Locks::in_memory());
    let (mut tokens, mut last) = (HashSet::new(), 0);
    for _ in 0..10_000 {
        let mut guard = a.try_lock().await.expect("asks").expect("free");
        assert!(guard.fence() > last, "{} follows {last}", guard.fence());
        last = guard.fence();
        // 128 bits of the token identify the node, and 128 bits identify the acquisition.
        assert_eq!(guard.token().len(), 65);
        assert!(tokens.insert(guard.token().to_owned()), "one handle had {} twice", guard.token());
        guard.unlock().await.expect("asks");
    }
}

/// S1.20, S0.7: two handles of one process are two owners, and so are two acquisitions by one handle.
#[tokio::test]
async fn the_key_holds_the_token_of_its_present_holder() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let (a, b) = (mutex(&locks), mutex(&locks));
    let mut tokens = HashSet::new();
    for handle in [&a, &b, &a] {
        let mut guard = locked(handle).await;
        assert_eq!(server.run::<String>(&["GET", a.key()]), guard.token());
        tokens.insert(guard.token().to_owned());
        assert!(guard.unlock().await.expect("asks"));
    }
    assert_eq!(tokens.len(), 3);
}

/// S1.21: waiters rely on the server's clock, and a holder on the monotonic clock. The toolkit reads no wall clock, so a wall clock that is
/// an hour off changes nothing.
#[test]
fn no_wall_clock_is_read() {
    fn no_clock_in(path: &std::path::Path) -> usize {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).expect("a folder of the sources");
            return entries.map(|entry| no_clock_in(&entry.expect("an entry").path())).sum();
        }
        let text = std::fs::read_to_string(path).expect("a source");
        for clock in ["SystemTime", "UNIX_EPOCH", "chrono", "OffsetDateTime"] {
            assert!(!text.contains(clock), "{} reads the wall clock: {clock}", path.display());
        }
        1
    }
    let sources = crate::support::root().join("src");
    let of_locks =
        ["lock", "store/protocol.rs", "store/wake_locks.rs", "store/redis/contract", "store/redis/commands"];
    let files: usize = of_locks.iter().map(|path| no_clock_in(&sources.join(path))).sum();
    assert!(files > 10);
}

/// S5.15: a server that has lost its data has lost its locks, so two clients may hold one. Fences grow beyond those from before the loss,
/// so a resource can refuse the writes of the older holder.
#[tokio::test]
async fn a_server_that_forgot_everything_still_gives_greater_fences() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut last = 0;
    for round in 0..3 {
        let first = locked(&with(&one, |builder| builder.ttl(LONG))).await;
        match round {
            0 => server.restart(),
            1 => server.flush_all(),
            _ => server.run::<()>(&["DEL", "sg1:m:{default:m}", "sg1:mf:{default:m}"]),
        }
        eventually("the other one reaches the server", SOON, async || other.connect().await.is_ok()).await;
        let mut second = locked(&mutex(&other)).await;
        assert!(first.fence() > last && second.fence() > first.fence(), "{first:?} {second:?}");
        last = second.fence();
        eventually("the first one reaches the server", SOON, async || one.connect().await.is_ok()).await;
        assert!(!first.is_owned().await.expect("asks"));
        assert!(second.unlock().await.expect("asks"));
    }
}

/// S1.2, S3.9: no key of a mutex stays for ever, not even that of its fence.
#[tokio::test]
async fn only_a_mutexs_fence_stays_for_a_day() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let mut guard = locked(&mutex(&locks)).await;
    let next = waiter(&locks);
    queued(&server, 1).await;
    guard.unlock().await.expect("asks");
    granted(next).await.0.unlock().await.expect("asks");
    assert_eq!(server.keys(), ["sg1:mf:{default:m}"]);
    assert!((1..=86_400_000).contains(&pttl(&server, "sg1:mf:{default:m}")));
}
