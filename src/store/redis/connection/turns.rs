//! The order in which callers continue if their replies arrive together.
//!
//! All replies that have arrived are read at once, and every caller that waits for one is woken. The callers run one after
//! the other, and their next commands are sent when the last of them has run: until then the server is idle, and after that
//! this process is. So half of the callers yield once. The next commands of the other half are then under way, and are
//! answered while the second half runs.

use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

/// With fewer waiting callers than this none yields: half of their next commands is not worth a separate write.
const FEW: usize = 16;

/// The state of one connection. It only orders callers: a count that another thread has just changed does no harm.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Callers that wait for a reply, or have not continued yet.
    waiting: AtomicUsize,
    /// Callers that have continued since the last one yielded.
    gone_on: AtomicUsize,
}

/// One caller that waits for a reply.
pub(super) struct Waiting<'a>(&'a Turns);

impl Turns {
    pub(super) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }
}

impl Waiting<'_> {
    /// The reply has arrived: returns, or first lets the other ready tasks run.
    pub(super) async fn go_on(self) {
        let Turns { waiting, gone_on } = self.0;
        let waiting = waiting.load(Ordering::Relaxed);
        if waiting >= FEW && gone_on.fetch_add(1, Ordering::Relaxed) >= waiting / 2 {
            behind_all_others().await;
            gone_on.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets the tasks run that are ready now. Tokio's `yield_now` lets more tasks run, and meanwhile no other thread can steal this
/// task, though one of those tasks may keep this thread busy. So use `yield_now` only if no caller waits for this task.
fn behind_all_others() -> impl Future<Output = ()> + Send {
    let mut is_behind = false;
    poll_fn(move |cx| {
        if std::mem::replace(&mut is_behind, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{mpsc, watch};
    use tokio::task::{JoinSet, yield_now};

    use super::*;

    /// Lets `callers` wait for replies that arrive together, and send again. Returns the sizes of the batches in which
    /// those are sent.
    async fn parts_of(callers: usize) -> Vec<usize> {
        let turns = Arc::new(Turns::default());
        let ((asks, mut asked), replies) = (mpsc::unbounded_channel(), watch::Sender::new(()));
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let (turns, asks, mut reply) = (Arc::clone(&turns), asks.clone(), replies.subscribe());
            tasks.spawn(async move {
                let waiting = turns.wait();
                reply.changed().await.expect("a reply");
                waiting.go_on().await;
                let _waits_again = turns.wait();
                asks.send(()).expect("the receiver lives");
                reply.changed().await.expect_err("this one is not answered");
            });
        }
        let sends = tokio::spawn(async move {
            let mut parts = Vec::new();
            while parts.iter().sum::<usize>() < callers {
                parts.push(asked.recv_many(&mut Vec::new(), callers).await);
            }
            parts
        });
        while turns.waiting.load(Ordering::Relaxed) < callers {
            yield_now().await;
        }
        replies.send_replace(());
        let parts = sends.await.expect("no panic");
        drop(replies);
        tasks.join_all().await;
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
        parts
    }

    #[tokio::test]
    async fn the_commands_of_the_first_half_are_sent_before_the_second_half_runs() {
        for half in [8, 9, 32, 500] {
            assert_eq!(parts_of(2 * half).await, [half, half]);
        }
    }

    #[tokio::test]
    async fn a_few_callers_continue_together() {
        for few in [1, 2, FEW - 1] {
            assert_eq!(parts_of(few).await, [few]);
        }
    }

    #[test]
    fn a_cancelled_caller_is_not_counted() {
        let turns = Turns::default();
        let waiting = turns.wait();
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 1);
        drop(waiting);
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
    }
}
