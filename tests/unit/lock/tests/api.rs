//! Properties of the types on which users may rely: they can be shared, and awaited in a spawned task.

use super::*;
use crate::lock::*;

fn sent<T: Send + 'static>(_: T) {}

#[test]
fn every_type_is_send_and_sync() {
    fn shared<T: Send + Sync + Unpin + 'static>() {}
    shared::<Locks>();
    shared::<LocksBuilder>();
    shared::<Scope>();
    shared::<LockError>();
    shared::<Mutex>();
    shared::<MutexBuilder>();
    shared::<MutexOptions>();
    shared::<MutexGuard>();
    shared::<Held>();
    shared::<Synchronized<()>>();
    shared::<Waiting>();
    shared::<Semaphore>();
    shared::<SemaphoreBuilder>();
    shared::<Wait>();
    shared::<Permit>();
    shared::<PermitView>();
    shared::<Released>();
    shared::<Holder>();
}

/// Must only compile; it is never run.
#[expect(dead_code, reason = "what it shows is that it compiles")]
async fn every_future_can_be_spawned(
    locks: Locks,
    mutex: &'static Mutex,
    guard: &'static mut MutexGuard,
    semaphore: &'static Semaphore,
    permit: &'static mut Permit,
) {
    let (locks, held): (&'static Locks, Held) = (Box::leak(Box::new(locks)), Held::clone(guard));
    let held: &'static Held = Box::leak(Box::new(held));
    sent(locks.connect());
    sent(locks.close());
    sent(mutex.try_lock());
    sent(mutex.lock());
    sent(mutex.synchronize(|held| async move { held.fence() }));
    sent(mutex.is_locked());
    sent(mutex.remaining());
    sent(mutex.force_unlock());
    sent(mutex.check_keyspace());
    sent(held.is_owned());
    sent(held.ensure());
    sent(held.extend(ms(1)));
    sent(held.expired());
    sent(held.lost());
    sent(guard.unlock());
    sent(semaphore.acquire(Wait::Now));
    sent(semaphore.with_permit(Wait::Now, |permit| async move { permit.attempts() }));
    sent(semaphore.available_permits());
    sent(semaphore.capacity());
    sent(semaphore.holders());
    sent(semaphore.holds(""));
    sent(semaphore.waiting());
    sent(semaphore.exists());
    sent(semaphore.release_stale());
    sent(semaphore.add_permits(1));
    sent(semaphore.ensure_created());
    sent(semaphore.delete());
    sent(semaphore.signal(""));
    let view: &'static PermitView = Box::leak(Box::new(PermitView::clone(permit)));
    sent(view.is_held());
    sent(view.refresh());
    sent(view.expired());
    sent(view.lost());
    sent(permit.release());
}

#[test]
fn futures_are_small_enough_to_be_passed_around() {
    let locks = Locks::in_memory();
    let (mutex, gate) = (mutex(&locks), locks.semaphore("gate", 1).build().expect("valid"));
    let sizes = [std::mem::size_of_val(&mutex.lock()), std::mem::size_of_val(&gate.acquire(Wait::Now))];
    assert!(sizes.into_iter().all(|size| size <= 2048), "{sizes:?}");
}
