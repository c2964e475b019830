//! The locks that the in-process coalescing is built on, in one place.
//!
//! `tests/models` compiles `slot`, `seat`, `flight`, `look_up` and `store/watch` against schedulers' own locks under this
//! module's name, so they name no other.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use tokio::sync::Notify;

/// Locks without caring whether a panic happened under the lock: no user code runs under the locks
/// of this crate, and every update under them is complete before anything can fail.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
