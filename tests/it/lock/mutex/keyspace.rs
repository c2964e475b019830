//! `Waiting::Keyspace`: a waiter is also notified when another program changes the key. This needs more rights than any other way of
//! waiting.

use stampede_guard::lock::Waiting;

use super::*;
use crate::support::warnings::Warnings;

/// The server's event flags, sorted, because their order means nothing.
fn flags(server: &RedisServer) -> Vec<char> {
    let set: Vec<String> = server.run(&["CONFIG", "GET", "notify-keyspace-events"]);
    let mut flags: Vec<_> = set[1].chars().collect();
    flags.sort_unstable();
    flags
}

/// A server on which the minimal user has the further rights: for key events and for the prefix `lock:`.
fn server() -> RedisServer {
    let server = RedisServer::start();
    let more = ["+config|get", "+config|set", "&__keyspace@*", "~lock:*"];
    server.run::<()>(&[&["ACL", "SETUSER", "minimal"], &more[..]].concat());
    server
}

fn keyspace(locks: &Locks) -> Mutex {
    let builder = locks.mutex("m").prefix("lock:").wait(Waiting::Keyspace);
    builder.acquire_timeout(Duration::MAX).build().expect("valid")
}

/// Makes another program hold the lock, and starts a waiter that listens to key events.
async fn waits_for_theirs(server: &RedisServer, locks: &Locks) -> JoinHandle<Result<MutexGuard, LockError>> {
    server.run::<()>(&["SET", "lock:m", "theirs", "NX", "PX", "60000"]);
    let mutex = keyspace(locks);
    let waits = tokio::spawn(async move { mutex.lock().await });
    queued_for(server, "sg1:pq:{lock:m}", 1).await;
    eventually("it listens", SOON, async || {
        server.run::<Vec<String>>(&["PUBSUB", "CHANNELS", "__keyspace@*"]).len() == 1
    })
    .await;
    waits
}

/// S0.11, S0.13: DEL, UNLINK, RENAME, a script and an early expiry wake the waiter at once.
#[tokio::test]
async fn releases_by_other_programs_wake_waiters() {
    let server = server();
    let locks = node(&server).await;
    let ways: [&[&str]; 5] = [
        &["DEL", "lock:m"],
        &["UNLINK", "lock:m"],
        &["PEXPIRE", "lock:m", "1"],
        &["RENAME", "lock:m", "elsewhere"],
        &["EVAL", "return redis.call('DEL', KEYS[1])", "1", "lock:m"],
    ];
    for way in ways {
        let waits = waits_for_theirs(&server, &locks).await;
        server.run::<()>(way);
        let (mut guard, took) = granted(waits).await;
        assert!(took < AT_ONCE, "{way:?}: {took:?}");
        assert!(guard.unlock().await.expect("asks"), "{way:?}");
    }
}

/// If only our own clients use the mutex, it is granted in the queue's order, as without key events.
#[tokio::test]
async fn between_our_own_clients_the_mutex_is_granted_in_order() {
    let server = server();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut holder = locked(&keyspace(&one)).await;
    let mut waiters = Vec::new();
    for at in 0..6 {
        let mutex = keyspace(if at % 2 == 0 { &one } else { &other });
        waiters.push(tokio::spawn(async move { mutex.lock().await }));
        queued_for(&server, "sg1:pq:{lock:m}", at + 1).await;
    }
    assert!(holder.unlock().await.expect("asks"));
    for waiter in waiters {
        let (mut guard, took) = granted(waiter).await;
        assert!(took < AT_ONCE, "{took:?}");
        assert!(guard.unlock().await.expect("asks"));
    }
}

/// S0.15: it would be a flaw to overwrite event flags that others have set. Such flags stay set, also when two nodes add theirs at once.
#[tokio::test]
async fn event_flags_that_others_have_set_stay_set() {
    for before in ["", "KEA", "AKE", "Elg", "Kx", "KEt", "xE"] {
        let server = server();
        server.run::<()>(&["CONFIG", "SET", "notify-keyspace-events", before]);
        let set = flags(&server);
        let (one, other) = (node(&server).await, node(&server).await);
        let (a, b) = (keyspace(&one), keyspace(&other));
        let (a, b) = tokio::join!(a.check_keyspace(), b.check_keyspace());
        a.expect("announced");
        b.expect("announced");
        let now = flags(&server);
        assert!(set.iter().all(|flag| now.contains(flag)), "{before:?} became {now:?}");
        let waits = waits_for_theirs(&server, &one).await;
        server.run::<()>(&["DEL", "lock:m"]);
        assert!(granted(waits).await.1 < AT_ONCE, "{before:?} became {now:?}, and says nothing");
    }
}

/// S0.15: it would be a flaw to fail where the operator does not permit CONFIG. The waiter polls instead, with one warning, and
/// `check_keyspace` reports the missing right beforehand.
#[tokio::test]
async fn without_the_right_to_config_waiters_poll() {
    let renamed = || RedisServer::with_args(["--rename-command", "CONFIG", ""]);
    for (server, minimal) in [(RedisServer::start(), true), (renamed(), false)] {
        server.run::<()>(&["ACL", "SETUSER", "minimal", "~lock:*"]);
        let warnings = Warnings::default();
        let _listening = warnings.listen();
        let locks = connected(&if minimal { server.minimal_user() } else { server.url() }).await;
        let refused = keyspace(&locks).check_keyspace().await;
        assert!(matches!(refused, Err(LockError::NotificationsUnavailable { .. })), "{refused:?}");
        for _ in 0..2 {
            server.run::<()>(&["SET", "lock:m", "theirs", "NX", "PX", "60000"]);
            let builder = locks.mutex("m").prefix("lock:").wait(Waiting::Keyspace).retry_interval(ms(20));
            let mutex = builder.acquire_timeout(Duration::MAX).build().expect("valid");
            let waits = tokio::spawn(async move { mutex.lock().await });
            // This is one script call more than attempts, because the server may not know the script at the first one.
            let enough = scripts_run(&server) + 4;
            eventually("it asks again and again", SOON, async || scripts_run(&server) >= enough).await;
            assert!(!waits.is_finished());
            server.run::<()>(&["DEL", "lock:m"]);
            let (mut guard, took) = granted(waits).await;
            assert!(took < AT_ONCE, "{took:?}");
            assert!(guard.attempts() >= 3, "{} attempts", guard.attempts());
            assert!(guard.unlock().await.expect("asks"));
        }
        assert_eq!(warnings.about("key events").len(), 1, "{:?}", warnings.about(""));
    }
}

/// A polling waiter acts by its own clock. Another waiter of its process, which entered the queue before, watches the queue's clock, so the
/// end of the holder's TTL is noticed long before the next poll.
#[tokio::test]
async fn another_waiter_watches_the_queues_clock_for_a_polling_one() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "~lock:*"]);
    let locks = node(&server).await;
    let waits = |waiting| {
        let builder = locks.mutex("m").prefix("lock:").wait(waiting).retry_interval(LONG);
        let mutex = builder.acquire_timeout(Duration::MAX).build().expect("valid");
        tokio::spawn(async move { mutex.lock().await })
    };
    server.run::<()>(&["SET", "lock:m", "theirs", "NX", "PX", "4000"]);
    let polls = waits(Waiting::Keyspace);
    queued_for(&server, "sg1:pq:{lock:m}", 1).await;
    let notified = waits(Waiting::Notify);
    queued_for(&server, "sg1:pq:{lock:m}", 2).await;
    for next in [polls, notified] {
        let (mut guard, took) = granted(next).await;
        assert!(took < SOON, "{took:?}");
        assert!(guard.unlock().await.expect("asks"));
    }
}
