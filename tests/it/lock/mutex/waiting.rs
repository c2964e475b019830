//! A waiter is notified, and sends no commands while it waits.

use stampede_guard::lock::Waiting;

use super::*;
use crate::support::monitor::{Commands, Monitor};

/// The commands that were sent, without the pings and clock readings that depend on how long the test ran.
fn sent(monitor: Monitor<'_>) -> Commands {
    monitor.finish().without(["ping", "time"])
}

/// S1.8, S1.12: reading a handle's own state sends no command, and neither does a call that the handle refuses.
#[tokio::test]
async fn a_handles_own_state_costs_no_command() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = with(&locks, |builder| builder.ttl(ms(200)));
    let mut guard = locked(&a).await;
    eventually("it has expired", SOON, async || pttl(&server, a.key()) < 0).await;
    let monitor = Monitor::start(&server);
    assert!(a.is_held(), "until it is unlocked");
    for refused in [a.try_lock().await.map(drop), a.lock().await.map(drop)] {
        assert!(matches!(refused, Err(LockError::AlreadyAcquired)));
    }
    assert!(matches!(a.synchronize(async |_| ()).await, Err(LockError::AlreadyAcquired)));
    assert_eq!((guard.attempts(), guard.remaining()), (1, Some(Duration::ZERO)));
    let commands = sent(monitor);
    assert_eq!(commands.total, 0, "{commands:#?}");
    assert!(!guard.unlock().await.expect("asks"));
    let monitor = Monitor::start(&server);
    assert!(!guard.unlock().await.expect("asks"));
    assert_eq!(sent(monitor).total, 0, "it knows that it is over");
}

/// An uncontended lock takes one command to acquire, and one to release.
#[tokio::test]
async fn an_uncontended_lock_is_two_commands() {
    let server = RedisServer::start();
    let a = mutex(&node(&server).await);
    locked(&a).await.unlock().await.expect("asks");
    let monitor = Monitor::start(&server);
    for _ in 0..10 {
        locked(&a).await.unlock().await.expect("asks");
    }
    let commands = sent(monitor);
    assert_eq!((commands.total, commands.of("evalsha")), (20, 20), "{commands:#?}");
}

/// The first lock opens the subscription, and asks again once that is open. This does not count as a wake-up by the mutex.
#[tokio::test]
async fn the_first_subscription_is_no_retry() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let mut holder = locked(&mutex(&locks)).await;
    let before = scripts_run(&server);
    let late = with(&unconnected(&server.minimal_user()), |builder| builder.retries(1));
    let waits = tokio::spawn(async move { late.lock().await });
    eventually_eq("it has sent two requests", SOON, before + 2, async || scripts_run(&server)).await;
    assert!(holder.unlock().await.expect("asks"));
    let (mut guard, took) = granted(waits).await;
    assert!(took < AT_ONCE, "{took:?}");
    assert!(guard.unlock().await.expect("asks"));
}

/// S0.8, S5.16: while the holder keeps the mutex for a second, the waiter sends only one command. The server announces no key events, and
/// is not configured to.
#[tokio::test]
async fn a_waiter_sends_one_command_however_long_it_waits() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    warm(&one).await;
    let mut holder = locked(&mutex(&one)).await;
    let monitor = Monitor::start(&server);
    let next = waiter(&other);
    queued(&server, 1).await;
    tokio::time::sleep(ms(1_000)).await;
    assert!(holder.unlock().await.expect("asks"));
    let (next, took) = granted(next).await;
    let commands = sent(monitor);
    // If the subscription was renewed because the server stalled, the waiter has asked once more.
    let anew = commands.of("subscribe");
    let commands = commands.without(["subscribe"]);
    assert!(
        (2..=2 + anew).contains(&commands.total),
        "the TAKE of the one, the FREE of the other, {anew} made anew: {commands:#?}"
    );
    assert!(took < AT_ONCE, "{took:?}");
    assert!((1..=1 + anew).contains(&(next.attempts() as usize)), "{}", next.attempts());
    assert!(next.waited() >= ms(1_000), "{:?}", next.waited());
    let events: Vec<String> = server.run(&["CONFIG", "GET", "notify-keyspace-events"]);
    assert_eq!(events, ["notify-keyspace-events", ""]);
}

/// S0.8: a waiter is woken within 20 ms of the release. The median of 100 releases counts, compared with a plain command, because the
/// machine also runs other tests.
#[tokio::test]
async fn a_waiter_is_woken_at_once() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let (mut took, mut round_trips) = (Vec::new(), Vec::new());
    for _ in 0..100 {
        let mut holder = locked(&mutex(&one)).await;
        let next = waiter(&other);
        queued(&server, 1).await;
        holder.unlock().await.expect("asks");
        let (mut next, after) = granted(next).await;
        took.push(after);
        next.unlock().await.expect("asks");
        let since = Instant::now();
        assert!(!mutex(&other).is_locked().await.expect("asks"));
        round_trips.push(since.elapsed());
    }
    took.sort();
    round_trips.sort();
    println!("median {:?}, p99 {:?}; of a question {:?}", took[50], took[99], round_trips[50]);
    assert!(took[50] <= ms(20).max(5 * round_trips[50]), "{took:?}, and {round_trips:?}");
    assert!(took[99] < AT_ONCE, "{took:?}");
}

/// S0.18: it would be a flaw to wake all waiters at each release. 200 waiters wait in four processes; the one that is granted the mutex
/// sends nothing.
#[tokio::test]
async fn one_release_wakes_one_waiter() {
    let server = RedisServer::start();
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(node(&server).await);
    }
    warm(&nodes[0]).await;
    let mut holder = locked(&mutex(&nodes[0])).await;
    let waiters: Vec<_> = (0..200).map(|at| waiter(&nodes[at % 4])).collect();
    queued(&server, 200).await;
    let monitor = Monitor::start(&server);
    assert!(holder.unlock().await.expect("asks"));
    queued(&server, 199).await;
    eventually("one has it", SOON, async || waiters.iter().any(JoinHandle::is_finished)).await;
    let commands = sent(monitor);
    assert!(commands.total <= 4 + 1, "{commands:#?}");
    assert_eq!(waiters.iter().filter(|waiter| waiter.is_finished()).count(), 1);
}

/// S0.23: an extension does not make waiters ask. They ask once, when the TTL that they knew of ends. This also holds where the server
/// announces all key events.
#[tokio::test]
async fn extensions_do_not_wake_waiters() {
    let lanes = [Waiting::Notify, Waiting::Keyspace].map(|waiting| async move {
        let server = RedisServer::start();
        server.run::<()>(&["ACL", "SETUSER", "minimal", "+config|get", "+config|set", "&__keyspace@*"]);
        let (one, other) = (node(&server).await, node(&server).await);
        warm(&one).await;
        let holder = locked(&with(&one, |builder| builder.ttl(ms(3_000)))).await;
        let waits = with(&other, |builder| builder.wait(waiting));
        let next = tokio::spawn(async move { waits.lock().await });
        queued(&server, 1).await;
        let (monitor, started, mut extensions) = (Monitor::start(&server), Instant::now(), 0);
        while started.elapsed() < ms(3_300) {
            assert!(holder.extend(ms(3_000)).await.expect("asks"));
            extensions += 1;
            tokio::time::sleep(ms(20)).await;
        }
        let commands = sent(monitor);
        // There is one look per 3 s, and the looks with which each way of waiting begins.
        let looks = commands.total - extensions;
        assert!(looks <= 8, "{waiting:?}: {extensions} extensions, {looks} looks: {commands:#?}");
        assert!(extensions > 3, "{extensions}");
        assert!(holder.extend(LONG).await.expect("asks"));
        drop(holder);
        assert!(granted(next).await.1 < AT_ONCE, "it is released");
    });
    futures_util::future::join_all(lanes).await;
}

/// S5.7: redis-mutex's defaults: wait for a second, poll each 100 ms, hold for ten seconds. A busy mutex is an error
/// from `lock`, and `None` from `try_lock`.
#[tokio::test]
async fn a_mutex_can_be_configured_like_redis_mutex() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let set = |builder: MutexBuilder| {
        builder.ttl(Duration::from_secs(10)).acquire_timeout(ms(1_000)).retry_interval(ms(100)).jitter(0.0)
    };
    let (a, b) = (with(&one, set), with(&other, set));
    let guard = locked(&a).await;
    assert!((5_000..=10_000).contains(&pttl(&server, a.key())));
    let started = Instant::now();
    let error = b.lock().await.expect_err("busy");
    // On a busy machine, where pauses are longer, there are fewer than ten attempts.
    assert!(matches!(error, LockError::AcquireTimeout { attempts: 2..=12, .. }), "{error:?}");
    assert!((ms(1_000)..ms(1_000) + AT_ONCE).contains(&started.elapsed()), "{:?}", started.elapsed());
    assert!(b.try_lock().await.expect("asks").is_none());
    assert!(guard.is_owned().await.expect("asks"));
    assert!(b.force_unlock().await.expect("asks"));
    assert!(b.try_lock().await.expect("asks").is_some());
}
