//! The order in which the callers of one thread continue after replies that arrived together.
//!
//! All these callers run before their next commands are written, so the server is idle until then, and the thread is idle after that. If
//! half of them let the others run first, the server answers one half while the other half runs. On several threads server and callers are
//! busy at the same time anyway (docs/decisions/013-wake-all.md).

use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

/// With fewer callers than this none lets others run first: half of their next commands is not worth a write of its own.
const FEW: usize = 16;

/// The callers of one connection.
#[derive(Debug, Default)]
pub(super) struct Pacing {
    /// How many callers wait for a reply, or have not continued yet.
    waiting: AtomicUsize,
    /// How many callers have continued since one of them let the others run first.
    continued: AtomicUsize,
}

/// A caller that waits for its reply.
pub(super) struct PacedCaller<'a>(&'a Pacing);

impl Pacing {
    pub(super) fn wait(&self) -> PacedCaller<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        PacedCaller(self)
    }
}

impl PacedCaller<'_> {
    /// Returns after the reply: at once, or after the tasks that are ready now.
    pub(super) async fn continue_in_turn(self) {
        let Pacing { waiting, continued } = self.0;
        let waiting = waiting.load(Ordering::Relaxed);
        if waiting < FEW || continued.fetch_add(1, Ordering::Relaxed) < waiting / 2 {
            return;
        }
        // Tokio's `yield_now` would also let the driver look for further replies first.
        let mut is_behind = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut is_behind, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        continued.store(0, Ordering::Relaxed);
    }
}

impl Drop for PacedCaller<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{mpsc, watch};
    use tokio::task::JoinSet;

    use super::*;

    /// This many callers get their replies together: the sizes of the batches in which they send their next commands.
    async fn batches_of(callers: usize) -> Vec<usize> {
        let (pacing, replies) = (Arc::new(Pacing::default()), watch::Sender::new(()));
        let (sends, mut sent) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let (pacing, sends, mut reply) = (Arc::clone(&pacing), sends.clone(), replies.subscribe());
            tasks.spawn(async move {
                let waits = pacing.wait();
                reply.changed().await.expect("a reply");
                waits.continue_in_turn().await;
                let _waits_again = pacing.wait();
                sends.send(()).expect("the receiver lives");
                let _ = reply.changed().await;
            });
        }
        // A task, as the driver of a connection is.
        let writer = tokio::spawn(async move {
            let mut batches = Vec::new();
            while batches.iter().sum::<usize>() < callers {
                batches.push(sent.recv_many(&mut Vec::new(), callers).await);
            }
            batches
        });
        while pacing.waiting.load(Ordering::Relaxed) < callers {
            tokio::task::yield_now().await;
        }
        replies.send_replace(());
        let batches = writer.await.expect("no panic");
        drop(replies);
        tasks.join_all().await;
        assert_eq!(pacing.waiting.load(Ordering::Relaxed), 0, "a caller that has left does not count");
        batches
    }

    #[tokio::test]
    async fn on_one_thread_half_of_many_callers_send_before_the_others_run() {
        for half in [8, 9, 32, 500] {
            assert_eq!(batches_of(2 * half).await, [half, half]);
        }
        for few in [1, 2, FEW - 1] {
            assert_eq!(batches_of(few).await, [few]);
        }
    }
}
