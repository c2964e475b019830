//! How a task lets others run first.

use std::future::{Future, poll_fn};
use std::task::Poll;

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
