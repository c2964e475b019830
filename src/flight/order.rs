//! The order of incoming callers and of questions to the store in this process. A clock cannot give it: two instants may be equal.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

/// How many questions this process has sent whose answers may be older than a caller accepts.
static QUESTIONS: AtomicU64 = AtomicU64::new(0);

/// When a caller came. Costs one read of a counter that only misses change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerOrder(u64);

/// When a question was sent to the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentAt {
    order: u64,
    pub(crate) at: Instant,
}

impl CallerOrder {
    pub(crate) fn now() -> Self {
        Self(QUESTIONS.load(Ordering::SeqCst))
    }

    /// Whether the caller came after the question was sent, so that it may know of a change that the answer does not include.
    pub(crate) fn is_after(self, question: SentAt) -> bool {
        self.0 >= question.order
    }
}

impl SentAt {
    pub(crate) fn now() -> Self {
        Self { order: QUESTIONS.fetch_add(1, Ordering::SeqCst) + 1, at: Instant::now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn callers_and_questions_at_one_instant_are_ordered() {
        let (before, question, after) = (CallerOrder::now(), SentAt::now(), CallerOrder::now());
        assert!(!before.is_after(question) && after.is_after(question));
        let next = SentAt::now();
        assert!(!after.is_after(next));
    }
}
