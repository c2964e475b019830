//! Who goes on first of those whose replies come at once.
//!
//! All replies that have come are read at once, and whoever waits for one is woken. They run one after the other, and what
//! they ask next is sent when the last of them has run: until then the server is idle, and from then on this process is. So
//! half of them give way once. What the others ask is then on its way, and is answered while the second half runs.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sync::behind_all_others;

/// Half of fewer than so many is not worth a write of its own.
const FEW: usize = 16;

/// Of one connection. It only orders who runs: a count that another thread has just changed does no harm.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Who waits for a reply, or has not gone on yet.
    waiting: AtomicUsize,
    /// Who has gone on since somebody last gave way.
    gone_on: AtomicUsize,
}

/// One who waits for a reply.
pub(super) struct Waiting<'a>(&'a Turns);

impl Turns {
    pub(super) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }
}

impl Waiting<'_> {
    /// The reply is there: goes on, or lets those run first who can already.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{mpsc, watch};
    use tokio::task::{JoinSet, yield_now};

    use super::*;

    /// Has `callers` wait for replies that come at once, and ask again. In parts of how many that is sent.
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
                asks.send(()).expect("somebody sends");
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
    async fn what_the_first_half_asks_is_sent_before_the_second_half_runs() {
        for half in [8, 9, 32, 500] {
            assert_eq!(parts_of(2 * half).await, [half, half]);
        }
    }

    #[tokio::test]
    async fn a_few_go_on_together() {
        for few in [1, 2, FEW - 1] {
            assert_eq!(parts_of(few).await, [few]);
        }
    }

    #[test]
    fn who_leaves_waits_no_longer() {
        let turns = Turns::default();
        let waiting = turns.wait();
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 1);
        drop(waiting);
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
    }
}
