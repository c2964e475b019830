//! Programs in other languages that lock with `SET key token NX PX`, and release by comparing and deleting.

use super::*;

/// What such a program releases with.
const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

/// A server whose minimal user also has the keys that other programs lock with.
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

/// Theirs excludes ours: it is seen, not acquired, not released by our failing to, and acquired when it is over.
#[tokio::test]
async fn what_others_hold_is_busy() {
    let server = server();
    let locks = node(&server).await;
    let a = bare(&locks);
    assert_eq!(a.key(), "lock:m");
    // One of them is as long as a token of ours, and one is no text.
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
        // Not at the first try, if a place in the queue is just being given up.
        assert!(locked(&a).await.unlock().await.expect("asks"));
    }
}

/// Ours excludes theirs: their SET NX fails, their release deletes nothing, and after ours it succeeds.
#[tokio::test]
async fn what_is_ours_is_busy_to_others() {
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

/// A late unlock of ours deletes nothing of theirs, and neither does an extension create anything.
#[tokio::test]
async fn a_late_holder_of_ours_leaves_theirs_alone() {
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

/// Who waits for one of theirs gets it when its time is over; that it was deleted before, nobody says. Behind it the
/// queue is ours again.
#[tokio::test]
async fn who_waits_for_one_of_theirs_gets_it_when_its_time_is_over() {
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

/// One of theirs without an end (the flaw of SETNX and a crash before EXPIRE) does not hang anybody past his time:
/// it says so, is looked at each second, and can be ended by force.
#[tokio::test]
async fn one_of_theirs_without_an_end_is_busy_until_it_is_gone() {
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
