//! The synchronization primitives of the in-process coalescing.
//!
//! `tests/models` compiles `flight/` and `store/wake_leases.rs` with a scheduler's own primitives under this module's name, so
//! those files import primitives only from here.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use tokio::sync::Notify;

/// Locks and ignores poisoning: no user code runs under the locks of this crate, and every update under them is complete before
/// anything can panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], for a reader of a `RwLock`.
pub(crate) fn read<T: ?Sized>(shared: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    shared.read().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], for a writer of a `RwLock`.
pub(crate) fn write<T: ?Sized>(shared: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    shared.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `is_so`, which is checked at once and after each notification of all waiters.
pub(crate) async fn until(changed: &Notify, is_so: impl Fn() -> bool) {
    loop {
        let notified = changed.notified();
        tokio::pin!(notified);
        // Registered before the check; otherwise a notification between the two would be missed.
        notified.as_mut().enable();
        if is_so() {
            return;
        }
        notified.await;
    }
}
