//! For how long nothing was heard on a connection, and what that says about it.
//!
//! One slow command is not the connection's fault, and a connection that has died in silence never says so. So time-outs
//! are counted together: two deadlines without a sign of life, with commands outstanding, and it is given up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::RedisError;
use tokio::time::Instant;

use crate::store::redis::errors::classify::store_error;
use crate::store::{StoreError, StoreErrorKind};

pub(super) struct Silence {
    born: Instant,
    /// Two deadlines of a command.
    limit: Duration,
    /// When the first of the commands that timed out was sent, in milliseconds since `born`; 0 after a sign of life.
    since: AtomicU64,
    /// When the latest of them was given up.
    until: AtomicU64,
    /// Whether anything was answered since the keeper has last asked.
    heard: AtomicBool,
}

impl Silence {
    pub(super) fn new(answer: Duration) -> Self {
        Self {
            born: Instant::now(),
            limit: answer.saturating_mul(2),
            since: AtomicU64::new(0),
            until: AtomicU64::new(0),
            heard: AtomicBool::new(false),
        }
    }

    /// For a new connection.
    pub(super) fn is_over(&self) {
        self.since.store(0, Ordering::Relaxed);
        self.until.store(0, Ordering::Relaxed);
    }

    /// Notes when a command is sent, where that will matter: one with so little time is answered in time or not at all.
    /// Most are, and reading the clock for each would cost the hits.
    pub(super) fn sends(&self, within: Duration) -> Option<Instant> {
        (within > self.limit).then(Instant::now)
    }

    /// A reply came to what was `sent`. In time it ends the silence; a patient command's that comes later says only that
    /// the server is too slow for all others. Written only when there was one: this is on the hit path.
    pub(super) fn answered(&self, sent: Option<Instant>) {
        if !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
        if self.since.load(Ordering::Relaxed) != 0 && sent.is_none_or(|sent| sent.elapsed() <= self.limit) {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// A command has `waited` in vain. Whether that is too much. What came before counts only if nothing has been asked
    /// for long in between: two lone slow commands are not the time between them.
    pub(super) fn timed_out(&self, waited: Duration) -> bool {
        let now = millis(self.born.elapsed()).max(1);
        let sent = now.saturating_sub(millis(waited)).max(1);
        let before = self.until.swap(now, Ordering::Relaxed);
        let apart = Duration::from_millis(sent.saturating_sub(before)) > self.limit;
        let since = match self.since.load(Ordering::Relaxed) {
            earlier if earlier != 0 && !apart => earlier,
            _ => {
                self.since.store(sent, Ordering::Relaxed);
                sent
            }
        };
        self.is_too_long(Duration::from_millis(now.saturating_sub(since)))
    }

    pub(super) fn is_too_long(&self, silence: Duration) -> bool {
        silence >= self.limit
    }

    /// Whether anything was answered since this was last asked.
    pub(super) fn take_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }
}

/// Why a server that says nothing is gone without.
pub(super) fn silent() -> StoreError {
    let silent = RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
    store_error(StoreErrorKind::Unavailable, silent)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const ANSWER: Duration = Duration::from_millis(50);

    /// A command that is given `within` and is not answered; whether the connection is given up.
    async fn in_vain(silence: &Silence, within: Duration) -> bool {
        advance(within).await;
        silence.timed_out(within)
    }

    /// One that is given a second, and answered after so long.
    async fn answered_after(silence: &Silence, took: Duration) {
        let sent = silence.sends(Duration::from_secs(1));
        advance(took).await;
        silence.answered(sent);
    }

    #[tokio::test(start_paused = true)]
    async fn two_deadlines_without_a_sign_of_life_are_the_end() {
        let silence = Silence::new(ANSWER);
        assert!(!in_vain(&silence, ANSWER).await);
        advance(ANSWER / 2).await;
        assert!(in_vain(&silence, ANSWER).await);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_in_time_ends_the_silence() {
        let silence = Silence::new(ANSWER);
        for _ in 0..10 {
            assert!(!in_vain(&silence, ANSWER).await);
            answered_after(&silence, ANSWER).await;
        }
    }

    /// Locks ask with a second of time. Their answers from a server that has become slower than the deadline of all
    /// others kept the connection, and each request paid the deadline.
    #[tokio::test(start_paused = true)]
    async fn a_patient_commands_late_answer_does_not_end_the_silence() {
        let silence = Silence::new(ANSWER);
        let sent = silence.sends(Duration::from_secs(1));
        assert!(!in_vain(&silence, ANSWER).await);
        advance(ANSWER + Duration::from_millis(1)).await;
        silence.answered(sent);
        assert!(in_vain(&silence, ANSWER).await);
        assert!(silence.take_heard(), "it is there, though slow");
    }

    /// Nothing was asked for an hour, and an hour of silence was read.
    #[tokio::test(start_paused = true)]
    async fn two_lone_slow_commands_are_not_the_time_between_them() {
        let silence = Silence::new(ANSWER);
        for _ in 0..3 {
            assert!(!in_vain(&silence, ANSWER).await);
            advance(Duration::from_secs(3600)).await;
        }
    }
}
