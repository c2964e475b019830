//! A waiter that leaves gives up its position in the queue, and a grant that is on its way to it is passed on.

use redis::aio::MultiplexedConnection;

use super::*;
use crate::support::probe::DropAt;

/// Like [`queued`], but on an open connection: each of a thousand rounds asks a few times.
async fn queued_on(conn: &mut MultiplexedConnection, waiters: usize) {
    let reached = async {
        let mut length = redis::cmd("LLEN");
        length.arg("sg1:mq:{default:m}");
        while length.query_async::<usize>(conn).await.expect("LLEN") != waiters {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, reached).await.unwrap_or_else(|_| panic!("{waiters} should wait"));
}

/// A thousand times, a waiter with another one behind it is dropped at about the moment of the release that grants it the mutex. No grant
/// is lost: a lost one would block the mutex for a minute.
#[tokio::test]
async fn a_thousand_dropped_waiters_lose_no_grant() {
    const ROUNDS: usize = 1_000;
    let server = RedisServer::start();
    let (one, other, third) = (node(&server).await, node(&server).await, node(&server).await);
    let mut conn = plain_connection(&server.client()).await;
    let (mut granted_first, mut worst) = (0, Duration::ZERO);
    for round in 0..ROUNDS {
        let mut holder = locked(&mutex(&one)).await;
        let leaves = waiter(&other);
        queued_on(&mut conn, 1).await;
        let stays = waiter(&third);
        queued_on(&mut conn, 2).await;
        let started = Instant::now();
        let unlock = async { holder.unlock().await.expect("asks") };
        let leave = async {
            // The exchange takes about half a millisecond, mostly within a few yields of this thread, and several times as long on a busy
            // machine.
            for _ in 0..fastrand::usize(..30) << fastrand::u8(..4) {
                tokio::task::yield_now().await;
            }
            leaves.abort();
            // If the mutex was granted already, this drops its guard.
            leaves.await.is_ok_and(|granted| granted.is_ok())
        };
        let (unlocked, had_it) = tokio::join!(unlock, leave);
        assert!(unlocked);
        granted_first += usize::from(had_it);
        let (mut next, _) = granted(stays).await;
        worst = worst.max(started.elapsed());
        assert!(next.unlock().await.expect("asks"), "round {round}");
    }
    println!(
        "{granted_first} were dropped with the mutex in their hands; the next one waited {worst:?} at most"
    );
    assert!(worst < AT_ONCE, "{worst:?}");
    assert!((1..ROUNDS).contains(&granted_first), "{granted_first} of {ROUNDS}: no race");
    free(&server, AT_ONCE).await;
}

/// In each of three processes, some waiters wait without a limit, and as many give up at random. All of the former are served, and at the
/// end the mutex is free.
#[tokio::test]
async fn waiters_that_give_up_at_random_leave_the_others_alone() {
    const TIMES: usize = 40;
    let server = RedisServer::start();
    let (mut stay, mut leave) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let locks = node(&server).await;
        for _ in 0..5 {
            let patient = with(&locks, |builder| builder.acquire_timeout(Duration::MAX));
            stay.push(tokio::spawn(async move {
                for time in 0..TIMES {
                    let mut guard = locked(&patient).await;
                    tokio::task::yield_now().await;
                    if time % 2 == 0 {
                        assert!(guard.unlock().await.expect("asks"));
                    }
                }
            }));
            let impatient = mutex(&locks);
            leave.push(tokio::spawn(async move {
                let mut gave_up = 0;
                loop {
                    let patience = Duration::from_micros(fastrand::u64(..12_000));
                    match tokio::time::timeout(patience, impatient.lock()).await {
                        Ok(guard) => drop(guard.expect("acquired")),
                        Err(_) => gave_up += 1,
                    }
                    if gave_up >= TIMES {
                        return;
                    }
                }
            }));
        }
    }
    for task in stay.into_iter().chain(leave) {
        let ended = tokio::time::timeout(PATIENCE, task).await;
        ended.expect("they are served, though others leave").expect("acquired");
    }
    let last = tokio::time::timeout(AT_ONCE, mutex(&node(&server).await).lock()).await;
    let mut last = last.expect("a waiter that gave up left nothing").expect("acquired");
    assert!(last.unlock().await.expect("asks"));
    free(&server, AT_ONCE).await;
}

/// A waiter that leaves while the mutex is held gives up its position. Otherwise the position would be in the way of the next release, and
/// stay as long as the queue.
#[tokio::test]
async fn a_waiter_that_leaves_gives_up_its_position() {
    let server = RedisServer::start();
    let (one, other) = (node(&server).await, node(&server).await);
    let _holder = locked(&mutex(&one)).await;
    let impatient = with(&other, |builder| builder.acquire_timeout(ms(2_000)));
    let impatient = tokio::spawn(async move { impatient.lock().await.map(drop) });
    let leaves = waiter(&other);
    queued(&server, 2).await;
    assert!(matches!(impatient.await.expect("joined"), Err(LockError::AcquireTimeout { .. })));
    queued(&server, 1).await;
    leaves.abort();
    queued(&server, 0).await;
}

/// The drop matrix: an acquisition is dropped at each of its await points. The mutex is free, or held, or the node has not connected yet.
#[tokio::test]
async fn an_acquisition_dropped_at_any_await_point_loses_nothing() {
    for (busy, cold) in [(false, false), (true, false), (false, true), (true, true)] {
        let server = RedisServer::start();
        let (one, warm) = (node(&server).await, node(&server).await);
        for n in 0.. {
            let locks = if cold { unconnected(&server.minimal_user()) } else { warm.clone() };
            let mut holder = if busy { Some(locked(&mutex(&one)).await) } else { None };
            let dropped = mutex(&locks);
            let dropped = DropAt::new(n, dropped.lock());
            let unlock = async {
                if let Some(mut guard) = holder.take() {
                    tokio::time::sleep(ms(3)).await;
                    assert!(guard.unlock().await.expect("asks"));
                }
            };
            let (done, ()) = tokio::join!(dropped, unlock);
            let done = done.map(|guard| drop(guard.expect("acquired"))).is_some();
            let next = tokio::time::timeout(AT_ONCE, mutex(&one).lock()).await;
            let next = next
                .unwrap_or_else(|_| panic!("busy {busy}, cold {cold}: dropped at poll {n}, it stays locked"));
            assert!(next.expect("acquired").unlock().await.expect("asks"));
            if done {
                assert!(n >= 2, "{n} points are no matrix");
                break;
            }
        }
        free(&server, AT_ONCE).await;
    }
}

/// A mutex is dropped just before `StampedeGuard::shutdown`, which waits for its release: a mutex without a TTL would otherwise stay locked
/// for ever.
#[tokio::test]
async fn a_mutex_dropped_just_before_its_guards_shutdown_is_released() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.minimal_user()).expect("an address");
    let guard = stampede_guard::StampedeGuard::new(client);
    crate::redis::connects(&guard).await;
    let twin = node(&server).await;
    drop(locked(&with(&guard.locks(), MutexBuilder::non_expiring)).await);
    assert!(guard.shutdown(SOON).await.finished);
    assert!(mutex(&twin).try_lock().await.expect("asks").is_some());
}
