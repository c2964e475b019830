//! How long a connection has been silent, and when it is given up.
//!
//! One slow command is not the connection's fault, and a connection that has died silently never reports it. So
//! time-outs are counted together: after two deadlines without any answer, with commands outstanding, the connection is
//! given up.

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
    /// When the first of the unanswered commands was sent, in milliseconds since `born`; 0 after an answer.
    since: AtomicU64,
    /// When the latest of them timed out.
    until: AtomicU64,
    /// Whether any command was answered since the keeper last called [`take_heard`](Self::take_heard).
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

    /// Resets the state for a new connection.
    pub(super) fn is_over(&self) {
        self.since.store(0, Ordering::Relaxed);
        self.until.store(0, Ordering::Relaxed);
    }

    /// Notes the time of sending if it will matter: a command with a deadline below the limit is answered in time or not
    /// at all. Most commands are like that, and reading the clock for each would slow the hits.
    pub(super) fn sends(&self, within: Duration) -> Option<Instant> {
        (within > self.limit).then(Instant::now)
    }

    /// Records a reply to a command sent at `sent`. A reply in time ends the silence; a later reply to a command with a
    /// long deadline only says that the server is too slow for all others. Writes only if there was silence: this is on
    /// the hit path.
    pub(super) fn answered(&self, sent: Option<Instant>) {
        if !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
        if self.since.load(Ordering::Relaxed) != 0 && sent.is_none_or(|sent| sent.elapsed() <= self.limit) {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// Records a command that timed out after `waited`; returns whether the silence is too long. Earlier time-outs count
    /// only if commands were outstanding without a long gap: the time between two single slow commands is not silence.
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

    /// Whether any command was answered since the last call.
    pub(super) fn take_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }
}

/// The error for commands to a server that stays silent.
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

    /// Sends a command with the deadline `within` that is not answered; returns whether the connection is given up.
    async fn in_vain(silence: &Silence, within: Duration) -> bool {
        advance(within).await;
        silence.timed_out(within)
    }

    /// Sends a command with a deadline of a second that is answered after `took`.
    async fn answered_after(silence: &Silence, took: Duration) {
        let sent = silence.sends(Duration::from_secs(1));
        advance(took).await;
        silence.answered(sent);
    }

    #[tokio::test(start_paused = true)]
    async fn two_deadlines_of_silence_end_the_connection() {
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

    /// Locks use a deadline of a second. Late answers to them from a server that had become slower than the deadline of
    /// all other commands kept the connection, and each request paid its deadline.
    #[tokio::test(start_paused = true)]
    async fn a_late_answer_to_a_command_with_a_long_deadline_does_not_end_the_silence() {
        let silence = Silence::new(ANSWER);
        let sent = silence.sends(Duration::from_secs(1));
        assert!(!in_vain(&silence, ANSWER).await);
        advance(ANSWER + Duration::from_millis(1)).await;
        silence.answered(sent);
        assert!(in_vain(&silence, ANSWER).await);
        assert!(silence.take_heard(), "it is there, though slow");
    }

    /// The hour without any command was counted as an hour of silence.
    #[tokio::test(start_paused = true)]
    async fn the_time_between_two_slow_commands_is_not_silence() {
        let silence = Silence::new(ANSWER);
        for _ in 0..3 {
            assert!(!in_vain(&silence, ANSWER).await);
            advance(Duration::from_secs(3600)).await;
        }
    }
}
