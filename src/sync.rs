//! The synchronization primitives of the in-process coalescing, in one place.
//!
//! `tests/models` compiles `flight/` and `store/wake/lease_waiters` with a scheduler's own primitives under this module's name, so
//! those files import primitives only from here.

use std::future::{Future, poll_fn};
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

pub(crate) use tokio::sync::Notify;

/// Locks and ignores poisoning: no user code runs under the locks
/// of this crate, and every update under them is complete before anything can panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets the tasks run that are ready now. Tokio's `yield_now` lets more tasks run, and meanwhile no other thread can steal this
/// task, though one of those tasks may keep this thread busy. So use `yield_now` only if no caller waits for this task.
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
