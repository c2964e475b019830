//! `MutexGuard::bump`: each waiter gets a turn, by one command; and there is only one holder even if the answer is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::support::monitor::Monitor;
use crate::support::proxy::{Mode, Proxy};

/// Three processes take turns. Each turn is one command, and has a greater fence than the one before.
#[tokio::test]
async fn bumping_holders_take_turns() {
    const TURNS: usize = 50;
    let server = RedisServer::start();
    let nodes = [node(&server).await, node(&server).await, node(&server).await];
    for locks in &nodes {
        warm(locks).await;
    }
    let mut holder = locked(&mutex(&nodes[0])).await;
    let (turn, fence) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let monitor = Monitor::start(&server);
    let mut workers = Vec::new();
    for (at, locks) in nodes.iter().enumerate() {
        let (mutex, turn, fence) = (mutex(locks), turn.clone(), fence.clone());
        workers.push(tokio::spawn(async move {
            let mut guard = locked(&mutex).await;
            for number in 0..TURNS {
                assert_eq!(turn.fetch_add(1, Ordering::Relaxed), number * 3 + at, "they take turns");
                let now = usize::try_from(guard.fence()).expect("64 bits");
                assert!(now > fence.swap(now, Ordering::Relaxed));
                assert_eq!(guard.attempts(), 1);
                if number + 1 < TURNS {
                    assert!(guard.bump().await.expect("asks"));
                }
            }
            assert!(guard.unlock().await.expect("asks"));
        }));
        queued(&server, at + 1).await;
    }
    assert!(holder.unlock().await.expect("asks"));
    for worker in workers {
        worker.await.expect("joined");
    }
    let sent = monitor.finish();
    // The commands are those of three locks that queue, of the holder's release, and one for each turn.
    assert_eq!(sent.of("evalsha"), 3 + 1 + 3 * TURNS, "{sent:#?}");
    free(&server, AT_ONCE).await;
}

/// S1.23 for a bump: the server grants the mutex to the next waiter, and the answer is lost with the connection. The
/// bump is sent again with the same tokens: it has one position in the queue, and is granted after the other waiter.
#[tokio::test]
async fn a_bump_with_a_lost_answer_has_one_position() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port()).await;
    let client = redis::Client::open(format!("redis://minimal:pw@127.0.0.1:{}/", proxy.port()));
    let builder = Locks::builder(client.expect("an address")).command_timeout(SOON);
    let locks = builder.build().expect("valid");
    connect(&locks).await;
    let other = node(&server).await;
    for locks in [&locks, &other] {
        warm(locks).await;
        // The server must also know the script of a bump.
        let mut guard = locked(&mutex(locks)).await;
        assert!(guard.bump().await.expect("asks") && guard.unlock().await.expect("asks"));
    }
    let mut guard = locked(&mutex(&locks)).await;
    let before = guard.fence();
    let next = waiter(&other);
    queued(&server, 1).await;
    proxy.set(Mode::NoReplies);
    let bumped = tokio::spawn(async move { (guard.bump().await, guard) });
    let (mut next, _) = granted(next).await;
    proxy.set(Mode::Reset);
    eventually("all of it is cut", SOON, async || server.client_count() <= 2).await;
    proxy.set(Mode::Pass);
    queued(&server, 1).await;
    assert!(next.is_owned().await.expect("asks") && next.unlock().await.expect("asks"));
    let (was_held, mut guard) = bumped.await.expect("joined");
    assert!(!was_held.expect("asks"), "the answer is lost");
    assert!(before < next.fence() && next.fence() < guard.fence());
    assert!(guard.is_owned().await.expect("asks") && guard.unlock().await.expect("asks"));
    free(&server, 2 * AT_ONCE).await;
}
