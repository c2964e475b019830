//! Other programs that lock with `SET key token NX PX`, and release by a compare-and-delete.

use super::*;

/// The script by which such a program releases its lock.
const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// A server on which the minimal user may also use the keys of other programs' locks.
fn server() -> RedisServer {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~lock:*"]);
    server
}

fn bare(locks: &Locks) -> Mutex {
    with(locks, |builder| builder.prefix("lock:").acquire_timeout(SOON))
}

fn foreign_lock(server: &RedisServer, token: &str, ttl_ms: u64) -> bool {
    let set: Option<String> = server.run(&["SET", "lock:m", token, "NX", "PX", &ttl_ms.to_string()]);
    set.is_some()
}

fn foreign_unlock(server: &RedisServer, token: &str) -> bool {
    server.run(&["EVAL", COMPARE_AND_DELETE, "1", "lock:m", token])
}

/// Another program's lock excludes ours: it is reported as held, a failed attempt does not release it, and after it has ended, the mutex
/// can be acquired.
#[tokio::test]
async fn another_programs_lock_is_busy() {
    let server = server();
    let locks = node(&server).await;
    let a = bare(&locks);
    assert_eq!(a.key(), "lock:m");
    // One of the other program's tokens is as long as ours, and one is empty.
    let long = "x".repeat(65);
    for token in ["theirs", &long, "1", ""] {
        assert!(foreign_lock(&server, token, 60_000));
        assert!(a.is_locked().await.expect("asks"));
        let left = a.remaining().await.expect("asks").expect("held");
        assert!(left > ms(50_000) && left <= LONG, "{left:?}");
        assert!(a.try_lock().await.expect("asks").is_none());
        let impatient = with(&locks, |builder| builder.prefix("lock:").acquire_timeout(ms(20)));
        assert!(matches!(refused(&impatient).await, LockError::AcquireTimeout { .. }));
        assert_eq!(server.run::<String>(&["GET", "lock:m"]), token);
        assert!(foreign_unlock(&server, token));
        // This may have to wait: the position that the failed attempt had in the queue may be given up only now.
        assert!(locked(&a).await.unlock().await.expect("asks"));
    }
}

/// Our lock excludes other programs: their SET NX fails, their release deletes nothing, and their SET NX succeeds
/// after our unlock.
#[tokio::test]
async fn our_lock_is_busy_to_other_programs() {
    let server = server();
    let a = bare(&node(&server).await);
    let mut guard = locked(&a).await;
    assert!((50_000..=60_000).contains(&pttl(&server, "lock:m")));
    assert!(!foreign_lock(&server, "theirs", 60_000));
    assert!(!foreign_unlock(&server, "theirs"));
    assert!(guard.is_owned().await.expect("asks"));
    assert!(guard.unlock().await.expect("asks"));
    assert!(foreign_lock(&server, "theirs", 60_000));
    assert!(!guard.is_owned().await.expect("asks"));
}

/// A late unlock of ours does not delete another program's lock, and a late extension creates nothing.
#[tokio::test]
async fn our_late_holder_leaves_another_programs_lock_alone() {
    let server = server();
    let locks = node(&server).await;
    let mut guard = locked(&with(&locks, |builder| builder.prefix("lock:").ttl(ms(100)))).await;
    eventually("it has expired", SOON, async || foreign_lock(&server, "theirs", 60_000)).await;
    assert!(!guard.extend(LONG).await.expect("asks"));
    assert!(!guard.unlock().await.expect("asks"));
    drop(guard);
    locks.close().await;
    assert_eq!(server.run::<String>(&["GET", "lock:m"]), "theirs");
    assert!(pttl(&server, "lock:m") > 50_000);
}

/// A waiter for another program's lock acquires it when that lock's TTL ends. If the lock is deleted earlier, no message is sent. Our
/// waiters behind it are notified as usual.
#[tokio::test]
async fn a_waiter_acquires_when_another_programs_lock_expires() {
    let server = server();
    let (one, other) = (node(&server).await, node(&server).await);
    for deletes in [false, true] {
        assert!(foreign_lock(&server, "theirs", 3_000));
        let started = Instant::now();
        let visitors = [&one, &other, &one].map(|locks| visitor(bare(locks))).into();
        queued_for(&server, "sg1:pq:{lock:m}", 3).await;
        if deletes {
            assert!(foreign_unlock(&server, "theirs"));
        }
        visited(visitors).await;
        assert!(started.elapsed() < ms(3_000) + AT_ONCE, "{:?}", started.elapsed());
    }
    free(&server, AT_ONCE).await;
}

/// Another program's lock has no TTL, which is the flaw of SETNX and a crash before EXPIRE. It blocks no caller for longer than its
/// timeout: it is reported, checked each second, and can be removed by `force_unlock`.
#[tokio::test]
async fn another_programs_lock_without_a_ttl_is_busy_until_removed() {
    let server = server();
    let locks = node(&server).await;
    server.run::<()>(&["SETNX", "lock:m", "theirs"]);
    let a = bare(&locks);
    assert_eq!(a.remaining().await.expect("asks"), Some(Duration::MAX));
    let impatient = with(&locks, |builder| builder.prefix("lock:").acquire_timeout(ms(200)));
    let started = Instant::now();
    let busy = refused(&impatient).await;
    assert!(matches!(busy, LockError::AcquireTimeout { .. }), "{busy:?}");
    assert!(started.elapsed() < ms(200) + AT_ONCE, "{:?}", started.elapsed());

    let next = tokio::spawn({
        let a = bare(&locks);
        async move { a.lock().await }
    });
    queued_for(&server, "sg1:pq:{lock:m}", 1).await;
    server.run::<()>(&["DEL", "lock:m"]);
    let (mut guard, took) = granted(next).await;
    assert!(took < ms(1_000) + A_MOMENT, "{took:?}");
    assert!(guard.unlock().await.expect("asks"));

    server.run::<()>(&["SETNX", "lock:m", "theirs"]);
    assert!(a.force_unlock().await.expect("asks"));
    assert!(a.try_lock().await.expect("asks").is_some());
}
