//! What the inbox records about its connection.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// When the inbox was asked and heard from, in microseconds since `born`; 0 for never.
pub(crate) struct Vitals {
    born: Instant,
    heard_at: AtomicU64,
    /// When the ping was sent that is not answered yet.
    asked_at: AtomicU64,
    /// How long the latest answer took, in microseconds plus one; 0 before the first.
    lag: AtomicU64,
}

impl Vitals {
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            heard_at: AtomicU64::new(0),
            asked_at: AtomicU64::new(0),
            lag: AtomicU64::new(0),
        }
    }

    /// The server has sent a message or an answer.
    pub(crate) fn heard(&self) {
        self.heard_at.store(self.now(), Ordering::Relaxed);
    }

    /// A ping was sent.
    pub(crate) fn asked(&self) {
        self.asked_at.store(self.now(), Ordering::Relaxed);
    }

    /// The ping was answered.
    pub(crate) fn answered(&self) {
        let asked_at = self.asked_at.swap(0, Ordering::Relaxed);
        // 0: the ping was given up meanwhile.
        if asked_at != 0 {
            let took = self.now().saturating_sub(asked_at);
            self.lag.store(took.saturating_add(1), Ordering::Relaxed);
        }
        self.heard();
    }

    /// The connection was lost or replaced: its values are reset.
    pub(crate) fn lost(&self) {
        self.asked_at.store(0, Ordering::Relaxed);
        self.lag.store(0, Ordering::Relaxed);
    }

    pub(crate) fn lag(&self) -> Option<Duration> {
        let latest = self.lag.load(Ordering::Relaxed).checked_sub(1);
        let under_way = match self.asked_at.load(Ordering::Relaxed) {
            0 => None,
            asked_at => Some(self.now().saturating_sub(asked_at)),
        };
        latest.max(under_way).map(Duration::from_micros)
    }

    pub(crate) fn last_heard(&self) -> Option<Duration> {
        let heard_at = self.heard_at.load(Ordering::Relaxed);
        (heard_at != 0).then(|| Duration::from_micros(self.now().saturating_sub(heard_at)))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_lag_is_that_of_the_latest_answer_or_of_a_pending_ping_if_longer() {
        let (vitals, ms) = (Vitals::new(), Duration::from_millis);
        let pass = async |time| tokio::time::advance(time).await;
        pass(ms(1)).await;
        assert_eq!((vitals.lag(), vitals.last_heard()), (None, None));
        vitals.heard();
        vitals.asked();
        pass(ms(5)).await;
        assert_eq!((vitals.lag(), vitals.last_heard()), (Some(ms(5)), Some(ms(5))));
        vitals.answered();
        pass(ms(100)).await;
        assert_eq!((vitals.lag(), vitals.last_heard()), (Some(ms(5)), Some(ms(100))));
        vitals.asked();
        pass(ms(3)).await;
        assert_eq!(vitals.lag(), Some(ms(5)));
        pass(ms(3)).await;
        assert_eq!(vitals.lag(), Some(ms(6)));
        vitals.lost();
        assert_eq!(vitals.lag(), None);
        vitals.answered();
        assert_eq!(vitals.lag(), None, "it came too late");
        vitals.asked();
        vitals.answered();
        assert_eq!(vitals.lag(), Some(Duration::ZERO));
    }
}
