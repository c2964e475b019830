//! Waiting that also hears what other hands do to the key. It needs more rights than anything else here.

use stampede_guard::lock::Waiting;

use super::*;
use crate::support::warnings::Warnings;

/// What is set in the server, sorted, because the order means nothing.
fn flags(server: &RedisServer) -> Vec<char> {
    let set: Vec<String> = server.run(&["CONFIG", "GET", "notify-keyspace-events"]);
    let mut flags: Vec<_> = set[1].chars().collect();
    flags.sort_unstable();
    flags
}

/// A server with a user who has what this way of waiting needs beyond the minimal rights, and what a prefix does.
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

/// One that waits so for what another program holds.
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

/// S0.11, S0.13: a plain DEL, an UNLINK, a RENAME and a script wake at once, as does an expiry that came early.
#[tokio::test]
async fn what_other_hands_release_is_heard() {
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

/// Between our own it is as without: handed over, in order.
#[tokio::test]
async fn among_our_own_it_is_handed_over_as_ever() {
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

/// S0.15: the flaw of flags that overwrite other users' flags: what was set stays set. Of two nodes that add theirs at
/// once, neither takes anything away.
#[tokio::test]
async fn flags_that_others_have_set_stay_set() {
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

/// S0.15: the flaw of an error where the server's operator does not let anybody CONFIG: it is asked for again and
/// again instead, with one warning, and who wants to know beforehand is told.
#[tokio::test]
async fn where_config_is_refused_it_polls() {
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
            // One more than the attempts that it comes to: the first may have to tell the server the script.
            let asked = scripts_run(&server) + 4;
            eventually("it asks again and again", SOON, async || scripts_run(&server) >= asked).await;
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

/// Where it polls it has a clock of its own, and somebody else of its process watches the clock of the queue that it
/// entered before: the holder's end is noticed long before it would ask again.
#[tokio::test]
async fn where_it_polls_another_watches_the_queues_clock() {
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
    let told = waits(Waiting::Notify);
    queued_for(&server, "sg1:pq:{lock:m}", 2).await;
    for next in [polls, told] {
        let (mut guard, took) = granted(next).await;
        assert!(took < SOON, "{took:?}");
        assert!(guard.unlock().await.expect("asks"));
    }
}
