//! `synchronize`: the lock ends with the work, in whatever way the work ends.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;

use super::*;
use crate::support::gate::Gate;
use crate::support::probe::DropAt;

/// S0.5, S1.18, S1.19: it would be a flaw to return the result of the unlock instead of the value, or to keep the lock when the work fails.
/// The work receives the number of attempts, which is one, and its value is returned.
#[tokio::test]
async fn the_value_is_returned_and_the_mutex_unlocked() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = mutex(&locks);
    let done = a.synchronize(async |held| (held.attempts(), held.is_owned().await.expect("asks"), 42)).await;
    let done = done.expect("acquired");
    assert_eq!((done.value, done.attempts, done.still_held), ((1, true, 42), 1, true));
    free(&server, AT_ONCE).await;

    let failed = a.synchronize(async |_| Err::<u8, _>("no".to_owned())).await.expect("acquired");
    assert_eq!((failed.value, failed.still_held), (Err("no".to_owned()), true));
    free(&server, AT_ONCE).await;
}

/// S0.5, S1.19: the lock is removed at once, although it has a TTL of 60 s.
#[tokio::test]
async fn work_that_panics_unlocks() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let a = mutex(&locks);
    let work = a.synchronize(async |_| -> u8 { panic!("scripted") });
    assert!(AssertUnwindSafe(work).catch_unwind().await.is_err());
    assert!(!a.is_held());
    free(&server, AT_ONCE).await;
    drop(locked(&a).await);
}

/// S0.5: the call is dropped while the work runs, and at each await point before and after the work.
#[tokio::test]
async fn a_dropped_call_unlocks() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let (a, b) = (mutex(&locks), mutex(&node(&server).await));
    for n in 0.. {
        let work = async |_| tokio::task::yield_now().await;
        let done = DropAt::new(n, a.synchronize(work)).await;
        assert!(!a.is_held(), "dropped at poll {n}");
        let next = tokio::time::timeout(AT_ONCE, b.lock()).await;
        let mut next =
            next.unwrap_or_else(|_| panic!("dropped at poll {n}, it stays locked")).expect("acquired");
        assert!(next.unlock().await.expect("asks"));
        if done.is_some() {
            assert!(n >= 4, "{n} points are no matrix");
            break;
        }
    }
    free(&server, AT_ONCE).await;
}

/// S5.14: it would be a flaw to spawn the release on a runtime that may not exist. A drop panics neither on a thread without a runtime nor
/// after all runtimes have ended. If a runtime is left, the lock is released.
#[test]
fn a_guard_dropped_outside_a_runtime_does_not_panic() {
    let server = RedisServer::start();
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let first = runtime().expect("a runtime");
    let (locks, guard) = first.block_on(async {
        let locks = node(&server).await;
        let guard = locked(&mutex(&locks)).await;
        (locks, guard)
    });
    std::thread::spawn(move || drop(guard)).join().expect("no panic in a thread of its own");
    first.block_on(free(&server, AT_ONCE));

    let guard = first.block_on(locked(&mutex(&locks)));
    drop(first);
    drop(guard);
    assert!(pttl(&server, "sg1:m:{default:m}") > 0, "no runtime was there to release it");
    server.run::<()>(&["PEXPIRE", "sg1:m:{default:m}", "300"]);
    let second = runtime().expect("a runtime");
    second.block_on(async {
        // This lock expires, and its handles work in another runtime.
        connect(&locks).await;
        let mut guard = locked(&mutex(&locks)).await;
        assert!(guard.unlock().await.expect("asks"));
        free(&server, AT_ONCE).await;
    });
}

/// S5.14: after `close` has returned, all dropped guards are released.
#[tokio::test]
async fn closing_waits_for_dropped_guards() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let guards: Vec<_> = {
        let mut guards = Vec::new();
        for name in 0..50 {
            guards.push(locked(&locks.mutex(("door", name)).build().expect("valid")).await);
        }
        guards
    };
    drop(guards);
    locks.close().await;
    let mut keys = server.keys();
    keys.retain(|key| !key.starts_with("sg1:mf:"));
    assert_eq!(keys, Vec::<String>::new());
    assert!(matches!(mutex(&locks).try_lock().await, Err(LockError::Closed)));
    eventually_eq("its connections are closed", SOON, 0, async || server.client_count()).await;
}

/// An aborted task drops its work, and with the work the lock.
#[tokio::test]
async fn an_aborted_task_unlocks() {
    let server = RedisServer::start();
    let locks = node(&server).await;
    let (gate, running) = (Gate::closed(), Gate::closed());
    let task = tokio::spawn({
        let (a, gate, running) = (mutex(&locks), gate.clone(), running.clone());
        async move {
            let work = async |_| {
                running.open();
                gate.pass().await;
            };
            a.synchronize(work).await.map(drop)
        }
    });
    running.pass().await;
    let next = waiter(&node(&server).await);
    queued(&server, 1).await;
    task.abort();
    assert!(granted(next).await.1 < AT_ONCE);
}
