//! The part of Tokio's `Notify` that the registry of waiters uses, on a model's locks.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::sync::{Mutex, lock};

/// At most one stored permit and one waiter.
#[derive(Debug, Default)]
pub(crate) struct Notify(Mutex<(bool, Option<Waker>)>);

pub(crate) struct Notified<'a>(&'a Notify);

impl Notify {
    pub(crate) fn new() -> Self {
        Self(Mutex::new((false, None)))
    }

    pub(crate) fn notify_one(&self) {
        let waker = {
            let mut state = lock(&self.0);
            state.0 = true;
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        Notified(self)
    }
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.0.0);
        if std::mem::take(&mut state.0) {
            return Poll::Ready(());
        }
        state.1 = Some(cx.waker().clone());
        Poll::Pending
    }
}
