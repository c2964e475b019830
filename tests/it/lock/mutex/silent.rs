//! A waiter whose future is not polled delays the other waiters of its process by its TTL and a moment.

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;

use super::*;

const TTL: Duration = Duration::from_secs(1);
/// The delay that a silent waiter adds to its TTL.
const MOMENT: Duration = Duration::from_millis(500);

fn short_mutex(locks: &Locks) -> Mutex {
    with(locks, |builder| builder.ttl(TTL).acquire_timeout(Duration::MAX))
}

fn waits(locks: &Locks) -> JoinHandle<Result<MutexGuard, LockError>> {
    let mutex = short_mutex(locks);
    tokio::spawn(async move { mutex.lock().await })
}

/// As in a `select!` loop that is busy in another branch, some futures are not polled.
#[tokio::test]
async fn unpolled_futures_do_not_starve_the_next_waiter() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let mut holder = locked(&with(&locks, |builder| builder.ttl(LONG))).await;
    let mut silent: Vec<BoxFuture<'_, _>> = Vec::new();
    for waiters in 1..=2 {
        let mutex = short_mutex(&locks);
        silent.push(Box::pin(async move { mutex.lock().await }));
        tokio::select! {
            _ = &mut silent[waiters - 1] => panic!("it has to wait"),
            () = queued(&server, waiters) => {}
        }
    }
    let next = waits(&locks);
    queued(&server, 3).await;
    assert!(holder.unlock().await.expect("asks"));
    let (mut next, took) = granted(next).await;
    assert!(took <= 2 * (TTL + MOMENT) + A_MOMENT, "{took:?}");
    assert!(next.unlock().await.expect("asks"));
    // When they are polled again, each has its turn.
    for silent in silent {
        let mut guard = silent.await.expect("free, or about to be");
        assert!(guard.unlock().await.expect("asks"));
    }
}

/// As with a runtime per core, waiters belong to different threads, one of which is busy.
#[tokio::test]
async fn a_busy_thread_does_not_starve_waiters_of_other_threads() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let mut holder = locked(&short_mutex(&locks)).await;
    let (busy, gets_busy) = oneshot::channel();
    let (is_busy, got_busy) = oneshot::channel();
    let (free, gets_free) = std::sync::mpsc::channel::<()>();
    let mutex = short_mutex(&locks);
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            let waits = tokio::spawn(async move { mutex.lock().await });
            gets_busy.await.expect("sent");
            is_busy.send(()).expect("listening");
            gets_free.recv().expect("sent");
            waits.await.expect("joined").expect("its turn comes").unlock().await
        })
    });
    queued(&server, 1).await;
    busy.send(()).expect("listening");
    got_busy.await.expect("sent");
    let next = waits(&locks);
    // The holder's TTL may have ended by now. Then the next waiter has sent its take, or is about to.
    let _ = holder.unlock().await.expect("asks");
    let (mut next, took) = granted(next).await;
    assert!(took <= TTL + MOMENT + A_MOMENT, "{took:?}");
    let _ = next.unlock().await.expect("asks");
    free.send(()).expect("listening");
    let joined = tokio::task::spawn_blocking(move || thread.join().expect("joined")).await;
    let _ = joined.expect("joined").expect("asks");
}
