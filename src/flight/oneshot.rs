//! A slot for one message to a future that may be dropped at any moment.
//!
//! [`Oneshot::offer`] gives the message back if the reader is gone. [`Oneshot::close`] returns a message that was
//! left and never read. So a message that must not be lost (a turn, a baton) can always be passed on.

use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, lock};

#[derive(Debug)]
pub(crate) struct Oneshot<M> {
    state: Mutex<OneshotState<M>>,
}

#[derive(Debug)]
struct OneshotState<M> {
    message: Option<M>,
    waker: Option<Waker>,
    closed: bool,
}

impl<M> Oneshot<M> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(OneshotState { message: None, waker: None, closed: false }) }
    }

    /// Leaves a message and wakes the reader; gives it back if the reader is gone or has one.
    pub(crate) fn offer(&self, message: M) -> Result<(), M> {
        let waker = {
            let mut state = lock(&self.state);
            if state.closed || state.message.is_some() {
                return Err(message);
            }
            state.message = Some(message);
            state.waker.take()
        };
        // Woken outside the lock, because a waker runs foreign code.
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Takes the message; after that the slot is closed.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>) -> Poll<M> {
        let mut state = lock(&self.state);
        if let Some(message) = state.message.take() {
            state.closed = true;
            return Poll::Ready(message);
        }
        let stale = match &state.waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            _ => state.waker.replace(cx.waker().clone()),
        };
        drop(state);
        drop(stale);
        Poll::Pending
    }

    /// Closes the slot for the reader; returns a message that was left and not read.
    pub(crate) fn close(&self) -> Option<M> {
        let mut state = lock(&self.state);
        state.closed = true;
        let (waker, message) = (state.waker.take(), state.message.take());
        drop(state);
        drop(waker);
        message
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}
