//! The effect of `close` and `shutdown` on waiting calls.

use super::*;
use crate::lock::{LockError, Wait};
use crate::{MemoryStore, StampedeGuard};

async fn ended<T>(waits: JoinHandle<Result<T, LockError>>) {
    settle().await;
    assert!(waits.is_finished(), "it was not notified");
    let refused = waits.await.expect("no panic").map(drop);
    assert!(matches!(refused, Err(LockError::Closed)), "{refused:?}");
}

/// A guard's connections outlive its locks, and so would positions in the queue.
#[tokio::test(start_paused = true)]
async fn closing_a_guards_locks_ends_their_waits_and_empties_the_queue() {
    let store = MemoryStore::new();
    let (guard, elsewhere) = (StampedeGuard::new(store.clone()), Locks::new(store));
    let mut holder = locked(&mutex(&elsewhere)).await;
    let permit = elsewhere.semaphore("gate", 1).build().expect("valid").acquire(Wait::Now).await;
    let locks = guard.locks();
    let (one, two) = (mutex(&locks), mutex(&locks));
    let gate = locks.semaphore("gate", 1).build().expect("valid");
    let one = waiting(async move { one.lock().await }).await;
    let two = waiting(async move { two.lock().await }).await;
    let three = waiting(async move { gate.acquire(Wait::Forever).await }).await;
    locks.close().await;
    ended(one).await;
    ended(two).await;
    ended(three).await;
    assert!(holder.unlock().await.expect("asks"));
    drop(permit);
    settle().await;
    assert!(!mutex(&elsewhere).is_locked().await.expect("asks"));
    let gate = elsewhere.semaphore("gate", 1).build().expect("valid");
    assert_eq!(gate.available_permits().await.expect("asks"), 1);
}

/// Closes the locks after a waiter was granted the mutex, and before it has read the grant.
async fn closed_while_granted(locks: &Locks, elsewhere: &Locks) {
    let mut holder = locked(&mutex(elsewhere)).await;
    let one = mutex(locks);
    let one = waiting(async move { one.lock().await }).await;
    assert!(holder.unlock().await.expect("asks"));
    locks.close().await;
    ended(one).await;
    assert!(!mutex(elsewhere).is_locked().await.expect("asks"));
}

#[tokio::test(start_paused = true)]
async fn a_grant_during_a_close_is_released() {
    let store = MemoryStore::new();
    let (guard, elsewhere) = (StampedeGuard::new(store.clone()), Locks::new(store));
    closed_while_granted(&guard.locks(), &elsewhere).await;
    assert!(mutex(&guard.locks()).try_lock().await.expect("the guard is not closed").is_some());
}

/// The connections end with the close, so a later release would be impossible.
#[tokio::test(start_paused = true)]
async fn a_grant_is_released_before_the_connections_end() {
    let store = MemoryStore::new();
    closed_while_granted(&Locks::new(store.clone()), &Locks::new(store)).await;
}

#[tokio::test(start_paused = true)]
async fn closing_ends_waits_on_a_memory_store() {
    let store = MemoryStore::new();
    let (locks, guard) = (Locks::new(store.clone()), StampedeGuard::new(store));
    let _holder = locked(&mutex(&guard.locks())).await;
    let (own, guards) = (mutex(&locks), mutex(&guard.locks()));
    let own = waiting(async move { own.lock().await }).await;
    let guards = waiting(async move { guards.lock().await }).await;
    locks.close().await;
    ended(own).await;
    assert!(!guards.is_finished(), "it is another's");
    guard.shutdown(ms(0)).await;
    ended(guards).await;
}

/// A waiter that stays in the queue would be granted the permit, and would block the waiters behind it for a
/// time to live.
#[tokio::test(start_paused = true)]
async fn a_waiter_at_a_shutdown_leaves_the_queue() {
    let store = MemoryStore::new();
    let (guard, elsewhere) = (StampedeGuard::new(store.clone()), Locks::new(store));
    let gate = |locks: &Locks| locks.semaphore("gate", 1).build().expect("valid");
    let _permit = gate(&elsewhere).acquire(Wait::Now).await;
    let waits = gate(&guard.locks());
    let waits = waiting(async move { waits.acquire(Wait::Forever).await }).await;
    assert_eq!(gate(&elsewhere).waiting().await.expect("asks"), 1);
    guard.shutdown(ms(1_000)).await;
    assert_eq!(gate(&elsewhere).waiting().await.expect("asks"), 0);
    ended(waits).await;
}
