use tokio::sync::oneshot;

use super::*;
use crate::lock::{LockError, Scope, Wait};

#[tokio::test(start_paused = true)]
async fn one_handle_holds_the_mutex_and_no_other() {
    let locks = Locks::in_memory();
    let (a, b) = (mutex(&locks), mutex(&locks));
    assert!(!a.is_locked().await.expect("asks") && !a.is_held());

    let mut guard = a.try_lock().await.expect("asks").expect("free");
    assert!(a.is_held() && !b.is_held());
    assert!(a.is_locked().await.expect("asks") && b.is_locked().await.expect("asks"));
    assert!(guard.is_owned().await.expect("asks"));
    assert!(b.try_lock().await.expect("asks").is_none());

    assert!(guard.unlock().await.expect("asks"));
    assert!(!a.is_held() && !a.is_locked().await.expect("asks"));
    assert!(!guard.is_owned().await.expect("asks"));
    assert!(b.try_lock().await.expect("asks").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_second_unlock_is_false() {
    let a = mutex(&Locks::in_memory());
    let mut guard = locked(&a).await;
    assert!(guard.unlock().await.expect("asks"));
    assert!(!guard.unlock().await.expect("asks"));
    // A second unlock of the old guard does not release the next acquisition of the same handle either.
    let next = locked(&a).await;
    assert!(!guard.unlock().await.expect("asks"));
    drop(guard);
    settle().await;
    assert!(a.is_held() && next.is_owned().await.expect("asks"));
}

/// S1.12, S1.27: a handle is refused even while its first call is still waiting, and after its key has expired.
#[tokio::test(start_paused = true)]
async fn a_handle_that_holds_or_tries_is_refused_until_it_is_unlocked() {
    let locks = Locks::in_memory();
    let (a, b) = (with(&locks, |builder| builder.ttl(ms(100))), mutex(&locks));
    let mut guard = locked(&a).await;
    let refused = |result: Result<Option<MutexGuard>, LockError>| {
        assert!(matches!(result, Err(LockError::AlreadyAcquired)), "{result:?}");
    };
    refused(a.try_lock().await);
    pass(ms(150)).await;
    assert!(a.is_held() && !a.is_locked().await.expect("asks"));
    refused(a.try_lock().await);
    refused(a.lock().await.map(Some));
    assert!(matches!(a.synchronize(async |_| ()).await, Err(LockError::AlreadyAcquired)));
    assert!(!guard.unlock().await.expect("asks"), "it expired first");
    assert!(!a.is_held());
    drop(locked(&a).await);
    settle().await;

    let holder = locked(&b).await;
    let a = std::sync::Arc::new(a);
    let trying = waiting({
        let a = a.clone();
        async move { a.lock().await.map(drop) }
    })
    .await;
    refused(a.try_lock().await);
    assert!(!a.is_held());
    drop(holder);
    trying.await.expect("no panic").expect("handed over");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_unlocks_in_the_background() {
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    drop(locked(&a).await);
    assert!(!a.is_held());
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));
}

/// S5.14: outside a runtime an orderly release may be impossible, but the drop of a guard must not panic.
#[test]
fn a_guard_dropped_outside_a_runtime_does_not_panic() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    let (one, other) = (runtime.block_on(locked(&a)), runtime.block_on(locked(&with_name(&locks, "other"))));
    // The runtime of the acquisition still exists, and releases the mutex when it runs again.
    drop(one);
    assert!(runtime.block_on(async {
        settle().await;
        !a.is_locked().await.expect("asks")
    }));
    drop(runtime);
    drop(other);
}

fn with_name(locks: &Locks, name: &str) -> Mutex {
    Mutex::new(locks, name).expect("valid")
}

/// S0.5, S1.19: `synchronize` holds the lock exactly as long as the work runs.
#[tokio::test(start_paused = true)]
async fn synchronize_returns_the_value_and_unlocks() {
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    let done = a.synchronize(async |held| (a.is_held(), held.is_owned().await)).await.expect("free");
    assert!(done.value.0 && done.value.1.expect("asks"));
    assert_eq!((done.attempts, done.still_held), (1, true));
    assert!(!a.is_locked().await.expect("asks"));

    let failed = a.synchronize(async |_| Err::<(), _>("no")).await.expect("free");
    assert_eq!(failed.value, Err("no"));
    assert!(!a.is_locked().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn work_that_outlives_the_time_keeps_its_value_and_the_next_holders_lock() {
    let locks = Locks::in_memory();
    let (a, b) = (with(&locks, |builder| builder.ttl(ms(100))), mutex(&locks));
    let done = a
        .synchronize(async |_| {
            pass(ms(200)).await;
            locked(&b).await
        })
        .await
        .expect("free");
    assert!(!done.still_held && done.value.is_owned().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn work_that_panics_or_is_dropped_unlocks() {
    let locks = Locks::in_memory();
    let a = mutex(&locks);
    let b = a.clone();
    let panicked = tokio::spawn(async move { b.synchronize(async |_| panic!("on purpose")).await.map(drop) });
    assert!(panicked.await.expect_err("panics").is_panic());
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));

    let b = a.clone();
    let dropped =
        waiting(async move { b.synchronize(|_| std::future::pending::<()>()).await.map(drop) }).await;
    assert!(a.is_locked().await.expect("asks"));
    dropped.abort();
    settle().await;
    assert!(!a.is_locked().await.expect("asks"));
}

/// S2.11: `synchronize` returns the result of the work as its value, even if that is a `LockError`.
#[tokio::test(start_paused = true)]
async fn an_error_of_the_work_is_its_value() {
    let a = mutex(&Locks::in_memory());
    let mut calls = 0;
    let done = a
        .synchronize(async |_| {
            calls += 1;
            Err::<(), _>(LockError::TooManyAttempts { attempts: 1 })
        })
        .await
        .expect("free");
    assert!(matches!(done.value, Err(LockError::TooManyAttempts { attempts: 1 })));
    assert_eq!(calls, 1);
}

#[tokio::test(start_paused = true)]
async fn force_unlock_hands_it_on_and_notifies_the_holder() {
    let locks = Locks::in_memory();
    let (a, b, c) = (mutex(&locks), mutex(&locks), mutex(&locks));
    assert!(!c.force_unlock().await.expect("asks"));
    let mut guard = locked(&a).await;
    let (notify, notified) = oneshot::channel();
    let lost = guard.lost();
    tokio::spawn(async move {
        lost.await;
        let _ = notify.send(());
    });
    let next = waiting(async move { b.lock().await }).await;
    assert!(c.force_unlock().await.expect("asks"));
    let next = next.await.expect("no panic").expect("handed over");
    notified.await.expect("notified");
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
    assert!(!guard.extend(ms(1000)).await.expect("asks"));
    assert!(!guard.unlock().await.expect("asks"));
    assert!(next.is_owned().await.expect("asks"));
}

/// S5.3: any handle can read the remaining time, also that of a mutex without an expiry.
#[tokio::test(start_paused = true)]
async fn remaining_is_the_stores_answer_about_any_holder() {
    let locks = Locks::in_memory();
    let (a, b) = (with(&locks, |builder| builder.ttl(ms(1500))), mutex(&locks));
    assert_eq!(b.remaining().await.expect("asks"), None);
    let mut guard = locked(&a).await;
    pass(ms(100)).await;
    assert_eq!(b.remaining().await.expect("asks"), Some(ms(1400)));
    guard.unlock().await.expect("asks");
    let endless = with(&locks, MutexBuilder::non_expiring);
    let guard = locked(&endless).await;
    assert_eq!(b.remaining().await.expect("asks"), Some(Duration::MAX));
    assert_eq!(guard.remaining(), None);
    pass(Duration::from_secs(1_000_000)).await;
    assert!(guard.is_owned().await.expect("asks"));
}

/// S3.16, S1.20: the token is new and the fence greater after a release and after an expiry.
#[tokio::test(start_paused = true)]
async fn each_holder_has_a_new_token_and_a_greater_fence() {
    let locks = Locks::in_memory();
    let a = with(&locks, |builder| builder.ttl(ms(10)));
    let (mut fence, mut tokens) = (0, std::collections::HashSet::new());
    for round in 0..200 {
        let mut guard = locked(&a).await;
        assert!(guard.fence() > fence && tokens.insert(guard.token().to_owned()));
        fence = guard.fence();
        if round % 3 == 0 {
            pass(ms(20)).await;
        }
        guard.unlock().await.expect("asks");
    }
}

#[tokio::test(start_paused = true)]
async fn scopes_namespaces_and_kinds_do_not_exclude_each_other() {
    let store = crate::MemoryStore::new();
    let locks = Locks::new(store.clone());
    let other = Locks::builder(store).namespace("other").build().expect("valid");
    let names = [
        locks.mutex(Scope::new("a").local("x")),
        locks.mutex(Scope::new("a").local("y")),
        locks.mutex(Scope::new("a")),
        locks.mutex("a"),
        locks.mutex(Scope::new("a.b").local("c")),
        locks.mutex(Scope::new("a").local("b.c")),
        locks.mutex("a").prefix("lock:"),
        other.mutex("a"),
        locks.mutex("x:{y} \0"),
    ];
    let mut held = Vec::new();
    for name in names {
        let mutex = name.build().expect("valid");
        held.push(mutex.try_lock().await.expect("asks").expect("no other lock excludes it"));
    }
    let same = Scope::new("a").local("global");
    let same = locks.mutex(same).build().expect("valid");
    assert!(same.try_lock().await.expect("asks").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_guards_locks_are_in_its_namespace_and_outlive_it() {
    let store = crate::MemoryStore::new();
    let guard = crate::StampedeGuard::builder(store.clone()).namespace("shop").build().expect("valid");
    let locks = guard.locks();
    let twin = Locks::builder(store).namespace("shop").build().expect("valid");
    let held = locked(&mutex(&locks)).await;
    drop(guard);
    assert!(mutex(&twin).try_lock().await.expect("asks").is_none());
    drop(held);
    locks.close().await;
    assert!(mutex(&twin).try_lock().await.expect("asks").is_some(), "close has waited for the release");
    assert_eq!(mutex(&locks).key(), "sg1:m:{shop:door}");
    for closed in [mutex(&locks).try_lock().await.map(drop), mutex(&locks).is_locked().await.map(drop)] {
        assert!(matches!(closed, Err(LockError::Closed)), "{closed:?}");
    }
}

/// All handles on a guard's locks share one task for background releases, and the guard's shutdown waits for it: otherwise a lock without a
/// time to live would stay held.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_background_releases_of_the_guards_locks() {
    let store = crate::MemoryStore::new();
    let (guard, twin) = (crate::StampedeGuard::new(store.clone()), Locks::new(store));
    let door = with(&guard.locks(), MutexBuilder::non_expiring).lock().await.expect("free");
    let gate = guard.locks().semaphore("gate", 1).build().expect("valid");
    let permit = gate.acquire(Wait::Now).await.expect("asks").expect("free");
    drop((door, permit));
    let (took, shutdown) = timed(guard.shutdown(Duration::from_secs(60))).await;
    assert!(shutdown.finished && took == ms(0), "{took:?}");
    assert!(mutex(&twin).try_lock().await.expect("asks").is_some(), "the mutex was released");
    let gate = twin.semaphore("gate", 1).build().expect("valid");
    assert!(gate.acquire(Wait::Now).await.expect("asks").is_some(), "and the permit");
}
