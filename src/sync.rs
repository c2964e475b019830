//! The locks that the in-process coalescing is built on, in one place.
//!
//! `tests/models` compiles `flight/` and `store/wake/lease_waiters` against schedulers' own locks under this module's name, so they name no other.

use std::future::{Future, poll_fn};
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

pub(crate) use tokio::sync::Notify;

/// Locks without caring whether a panic happened under the lock: no user code runs under the locks
/// of this crate, and every update under them is complete before anything can fail.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets those run who can already. Tokio's `yield_now` lets more of them, and meanwhile no other thread finds this task, though one
/// of those may keep this thread: that is for when nobody waits for it.
pub(crate) fn behind_all_others() -> impl Future<Output = ()> + Send {
    let mut is_behind = false;
    poll_fn(move |cx| {
        if std::mem::replace(&mut is_behind, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}
