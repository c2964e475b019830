//! A holder that has died costs the waiters the rest of its TTL, in whatever way it died, and whatever happened to the messages, the queue
//! and the server's own expiry.

use stampede_guard::lock::Waiting;

use super::*;
use crate::support::processes::Fleet;

/// Sets the key that a dead holder has left.
fn left_behind(server: &RedisServer, ttl: Duration) {
    let token = format!("{}:{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    server.run::<()>(&["SET", "sg1:m:{default:m}", &token, "PX", &ttl.as_millis().to_string()]);
}

/// S0.11: a holder with a TTL of three seconds is killed by SIGKILL, with and without automatic renewal.
#[tokio::test]
async fn a_killed_holder_costs_its_time_to_live() {
    let lanes = ["lock 3000", "renewed 3000"].map(|command| async move {
        let server = RedisServer::start();
        let locks = node(&server).await;
        let fleet = Fleet::spawn(1, "mutex.holder", &Config { redis: server.minimal_user() });
        fleet.wait_ready().await;
        held_by(fleet.member(0), command).await;
        let next = waiter(&locks);
        queued(&server, 1).await;
        if command.starts_with("renewed") {
            tokio::time::sleep(ms(3_200)).await;
            assert!(!next.is_finished(), "it is renewed");
        }
        fleet.member(0).kill();
        let (next, took) = granted(next).await;
        assert!(took <= ms(3_000) + A_MOMENT, "{command}: {took:?}");
        assert!(next.is_owned().await.expect("asks"));
    });
    futures_util::future::join_all(lanes).await;
}

/// S0.12: it would be a flaw to wait for an `expired` event, which comes when the server gets to deleting the key: up to half a minute late
/// among other keys, and more than a minute late among 200,000. So a timer runs beside every wait.
#[tokio::test]
async fn a_server_full_of_other_keys_delays_nothing() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "+config|get", "+config|set", "&__keyspace@*"]);
    let fill = "for key = 1, 200000 do redis.call('SET', key, '', 'PX', 86400000 + key) end";
    server.run::<()>(&["EVAL", fill, "0"]);
    for waiting in [Waiting::Notify, Waiting::Keyspace] {
        let locks = node(&server).await;
        let waits = with(&locks, |builder| builder.wait(waiting));
        let started = Instant::now();
        left_behind(&server, ms(700));
        let next = tokio::spawn(async move { waits.lock().await });
        let (mut guard, _) = granted(next).await;
        let took = started.elapsed();
        assert!(took <= ms(700) + AT_ONCE, "{waiting:?}: {took:?}");
        assert!(took >= ms(600), "{waiting:?}: {took:?}");
        assert!(guard.unlock().await.expect("asks"));
    }
}

/// S0.13: it would be a flaw to wait for ever where the server announces nothing: FLUSHDB and FLUSHALL also delete the queue, SWAPDB and
/// RENAME move only the key, and eviction deletes the key as DEL does. Every waiter acquires the mutex, at the latest when the TTL that it
/// knew of ends.
#[tokio::test]
async fn waiters_acquire_whatever_happens_to_the_key() {
    let key = "sg1:m:{default:m}";
    let ways: [&[&str]; 6] = [
        &["FLUSHDB"],
        &["FLUSHALL"],
        &["SWAPDB", "0", "1"],
        &["RENAME", key, "elsewhere"],
        &["DEL", key],
        &["PEXPIRE", key, "1"],
    ];
    let lanes = ways.map(|way| async move {
        let server = RedisServer::start();
        let (one, other) = (node(&server).await, node(&server).await);
        left_behind(&server, ms(3_000));
        let visitors = [&one, &one, &other, &other].map(|locks| visitor(mutex(locks))).into();
        queued(&server, 4).await;
        let started = Instant::now();
        server.run::<()>(way);
        visited(visitors).await;
        let took = started.elapsed();
        // Each of the waiters may have to notice it by its own timer, which has jitter.
        assert!(took <= ms(3 * 3_000), "{way:?}: {took:?}");
    });
    futures_util::future::join_all(lanes).await;
}

/// The server restarts empty: the waiters outlive that, and acquire the mutex one after the other.
#[tokio::test]
async fn waiters_outlive_a_restart_of_the_server() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let mut holder = locked(&mutex(&one)).await;
    let visitors = [&one, &other, &other].map(|locks| visitor(mutex(locks))).into();
    queued(&server, 3).await;
    server.restart();
    let started = Instant::now();
    visited(visitors).await;
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    assert!(!holder.unlock().await.expect("asks"));
}

/// S0.7 with a real pause: a holder that was stopped for longer than its TTL notices its loss when it resumes, and its unlock leaves the
/// next holder's lock alone.
#[tokio::test]
async fn a_paused_holder_leaves_the_next_holder_alone() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for command in ["lock 500", "renewed 500"] {
        let fleet = Fleet::spawn(1, "mutex.holder", &Config { redis: server.minimal_user() });
        fleet.wait_ready().await;
        held_by(fleet.member(0), command).await;
        fleet.member(0).pause();
        let (mut next, took) = granted(waiter(&locks)).await;
        assert!(took <= ms(500) + AT_ONCE, "{took:?}");
        fleet.member(0).resume();
        fleet.member(0).send("unlock");
        assert_eq!(fleet.member(0).wait_event("unlocked").await, false, "{command}");
        assert!(next.is_owned().await.expect("asks"), "{command}");
        assert!(next.unlock().await.expect("asks"));
    }
}

/// S1.25: `expired` can be used instead of a timer around the work. It resolves before the server lets another client in, by at most 1 %
/// and some milliseconds.
#[tokio::test]
async fn a_holder_knows_when_its_time_is_over() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    for _ in 0..3 {
        let a = with(&locks, |builder| builder.ttl(ms(500)));
        let started = Instant::now();
        let mut guard = locked(&a).await;
        let next = waiter(&locks);
        guard.expired().await;
        let took = started.elapsed();
        assert!((ms(490)..ms(500) + AT_ONCE).contains(&took), "{took:?}");
        assert_eq!(guard.remaining(), Some(Duration::ZERO));
        granted(next).await.0.unlock().await.expect("asks");
        assert!(!guard.unlock().await.expect("asks"));
    }
}
