//! A future that is dropped at a set poll. The tests of flights and of the guard (`tests/it/drops`) use it too.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The point at which a future is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Drop {
    /// After its nth poll was pending, like a caller that leaves while it waits. Its requests are on their way.
    AtPoll(usize),
    /// After n polls, once it was woken and before it is polled again: a value that it received is lost with it.
    AtWake(usize),
}

/// Polls a future until the drop. Returns its output, or `None` if it was dropped first.
pub(crate) struct Dropped<F> {
    inner: Option<Pin<Box<F>>>,
    polls: usize,
    drop: Drop,
}

impl<F: Future> Future for Dropped<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Drop::AtWake(n) = self.drop
            && self.polls == n
        {
            self.inner = None;
            return Poll::Ready(None);
        }
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        if let Poll::Ready(output) = inner.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        self.polls += 1;
        if let Drop::AtPoll(n) = self.drop
            && self.polls == n
        {
            self.inner = None;
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

pub(crate) fn dropped<F: Future>(drop: Drop, future: F) -> Dropped<F> {
    Dropped { inner: Some(Box::pin(future)), polls: 0, drop }
}
