//! The circuit breaker of a connection: it decides when a connection that stays silent is dropped. While there is no connection,
//! commands fail at once.
//!
//! A single slow command does not mean that the connection is broken, and a connection that has died silently never reports it. So
//! time-outs are combined: after two deadlines without any answer to outstanding commands, the connection is dropped.
//!
//! [`BulkLimit`] is the longest argument that the server accepts (its setting `proto-max-bulk-len`). The server answers a longer argument
//! with an error, and closes the connection that all other commands share. So an argument that broke a connection is not sent
//! again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use redis::{Arg, Cmd, RedisError};
use tokio::time::Instant;

use crate::store::redis::errors::{TOO_LONG, io_error_of, store_error};
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;

pub(super) struct CircuitBreaker {
    created_at: Instant,
    limit: Duration,
    /// When the first of the commands that timed out in the present silence was sent, in milliseconds since `created_at`; 0 after an
    /// answer in time.
    since: AtomicU64,
    /// When the latest command timed out, in milliseconds since `created_at`.
    until: AtomicU64,
    /// Whether any command was answered since the last call of [`take_received`](Self::take_received).
    has_received: AtomicBool,
}

impl CircuitBreaker {
    pub(super) fn new(answer: Duration) -> Self {
        Self {
            created_at: Instant::now(),
            limit: silence_limit(answer),
            since: AtomicU64::new(0),
            until: AtomicU64::new(0),
            has_received: AtomicBool::new(false),
        }
    }

    /// Returns the time of sending if it matters later. A command with a deadline within the limit is answered in time or
    /// not at all. Most commands have such a deadline, and reading the clock for each of them would slow the hits.
    pub(super) fn begin(&self, within: Duration) -> Option<Instant> {
        (within > self.limit).then(Instant::now)
    }

    /// Records a reply to a command that was sent at `sent`. A reply within the limit ends the silence; a later reply to a
    /// command with a long deadline only shows that the server is too slow for all other commands. Writes only if a value
    /// changes: this is on the hit path.
    pub(super) fn record_answer(&self, sent: Option<Instant>) {
        if !self.has_received.load(Ordering::Relaxed) {
            self.has_received.store(true, Ordering::Relaxed);
        }
        if self.since.load(Ordering::Relaxed) != 0 && sent.is_none_or(|sent| sent.elapsed() <= self.limit) {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// Records a command that timed out after `waited`; returns whether the silence is too long. Earlier time-outs count
    /// only if there was no long gap without outstanding commands: the time between two single slow commands is not silence.
    pub(super) fn record_timeout(&self, waited: Duration) -> bool {
        let now = millis(self.created_at.elapsed()).max(1);
        let sent = now.saturating_sub(millis(waited)).max(1);
        let before = self.until.swap(now, Ordering::Relaxed);
        let has_gap = Duration::from_millis(sent.saturating_sub(before)) > self.limit;
        let since = match self.since.load(Ordering::Relaxed) {
            earlier if earlier != 0 && !has_gap => earlier,
            _ => {
                self.since.store(sent, Ordering::Relaxed);
                sent
            }
        };
        Duration::from_millis(now.saturating_sub(since)) >= self.limit
    }

    /// Whether any command was answered since the last call.
    pub(super) fn take_received(&self) -> bool {
        self.has_received.swap(false, Ordering::Relaxed)
    }
}

/// How long the server may be silent: twice the deadline of a command.
pub(super) fn silence_limit(answer: Duration) -> Duration {
    answer.saturating_mul(2)
}

/// The error for commands to a server that stays silent.
pub(super) fn silent() -> StoreError {
    store_error(StoreErrorKind::Unavailable, io_error_of(std::io::ErrorKind::TimedOut))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// How long a limit is remembered that the server has reported, by its setting or by an error: an operator may raise it.
const REMEMBERED: Duration = Duration::from_secs(600);

/// How long a limit is remembered if a connection broke under an argument of that size without an answer: the server may
/// have ended for another reason.
const SUSPECTED: Duration = Duration::from_secs(10);

/// The lowest limit that a server can be set to. A shorter argument breaks no connection.
const LOWEST: usize = 1024 * 1024;

#[derive(Debug)]
pub(super) struct BulkLimit {
    /// The length of the longest argument that may be sent; `usize::MAX` while no limit is known. Atomic, because each command reads it.
    most: AtomicUsize,
    ends_at: Mutex<Option<Instant>>,
    /// Whether a connection broke under a long argument since the server's limit was last queried.
    is_unread: AtomicBool,
}

impl Default for BulkLimit {
    fn default() -> Self {
        Self {
            most: AtomicUsize::new(usize::MAX),
            ends_at: Mutex::default(),
            is_unread: AtomicBool::new(false),
        }
    }
}

impl BulkLimit {
    /// The length of the longest argument that may be sent.
    pub(super) fn most(&self) -> usize {
        let most = self.most.load(Ordering::Relaxed);
        if most != usize::MAX && lock(&self.ends_at).is_some_and(|end| end <= Instant::now()) {
            self.most.store(usize::MAX, Ordering::Relaxed);
            return usize::MAX;
        }
        most
    }

    /// Returns an error for a command that exceeds the limit.
    pub(super) fn check(&self, cmd: &Cmd) -> StoreResult<()> {
        let most = self.most();
        if most == usize::MAX || longest(cmd) <= most {
            return Ok(());
        }
        let why = (redis::ErrorKind::Client, TOO_LONG, format!("the limit is {most} bytes"));
        Err(store_error(StoreErrorKind::Refused, RedisError::from(why)))
    }

    /// Records that a connection broke under this command; `is_named`: the server has reported its length as the reason.
    pub(super) fn broken_by(&self, cmd: &Cmd, is_named: bool) {
        let length = longest(cmd);
        if length <= LOWEST && !is_named {
            return;
        }
        self.set(length.saturating_sub(1).min(self.most()), if is_named { REMEMBERED } else { SUSPECTED });
        self.is_unread.store(true, Ordering::Relaxed);
    }

    /// Whether the server's limit must be queried. Later calls return false until a connection breaks under a long argument again.
    pub(super) fn take_unread(&self) -> bool {
        self.is_unread.swap(false, Ordering::Relaxed)
    }

    /// Records the limit that the server has reported.
    pub(super) fn read(&self, most: usize) {
        self.set(most, REMEMBERED);
    }

    fn set(&self, most: usize, remembered: Duration) {
        *lock(&self.ends_at) = Some(Instant::now() + remembered);
        self.most.store(most, Ordering::Relaxed);
    }
}

/// The length of the longest argument.
fn longest(cmd: &Cmd) -> usize {
    let length = |arg: Arg<&[u8]>| if let Arg::Simple(arg) = arg { arg.len() } else { 0 };
    cmd.args_iter().map(length).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const ANSWER: Duration = Duration::from_millis(50);

    /// Sends a command with the deadline `within` that is not answered; returns whether the connection is dropped.
    async fn in_vain(breaker: &CircuitBreaker, within: Duration) -> bool {
        advance(within).await;
        breaker.record_timeout(within)
    }

    /// Sends a command with a deadline of a second that is answered after `took`.
    async fn answered_after(breaker: &CircuitBreaker, took: Duration) {
        let sent = breaker.begin(Duration::from_secs(1));
        advance(took).await;
        breaker.record_answer(sent);
    }

    #[tokio::test(start_paused = true)]
    async fn two_deadlines_of_silence_end_the_connection() {
        let breaker = CircuitBreaker::new(ANSWER);
        assert!(!in_vain(&breaker, ANSWER).await);
        advance(ANSWER / 2).await;
        assert!(in_vain(&breaker, ANSWER).await);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_in_time_ends_the_silence() {
        let breaker = CircuitBreaker::new(ANSWER);
        for _ in 0..10 {
            assert!(!in_vain(&breaker, ANSWER).await);
            answered_after(&breaker, ANSWER).await;
        }
    }

    /// Regression: locks use a deadline of a second. A server had become slower than the deadline of all other commands. Its
    /// late answers to locks prevented the drop of the connection, and each request waited for its whole deadline.
    #[tokio::test(start_paused = true)]
    async fn a_late_answer_to_a_command_with_a_long_deadline_does_not_end_the_silence() {
        let breaker = CircuitBreaker::new(ANSWER);
        let sent = breaker.begin(Duration::from_secs(1));
        assert!(!in_vain(&breaker, ANSWER).await);
        advance(ANSWER + Duration::from_millis(1)).await;
        breaker.record_answer(sent);
        assert!(in_vain(&breaker, ANSWER).await);
        assert!(breaker.take_received(), "it is there, though slow");
    }

    /// Regression: an hour in which no command was sent was counted as an hour in which the server did not answer.
    #[tokio::test(start_paused = true)]
    async fn the_time_between_two_slow_commands_is_not_silence() {
        let breaker = CircuitBreaker::new(ANSWER);
        for _ in 0..3 {
            assert!(!in_vain(&breaker, ANSWER).await);
            advance(Duration::from_secs(3600)).await;
        }
    }
}

#[cfg(test)]
mod bulk_limit_tests {
    use tokio::time::advance;

    use super::*;

    fn set(length: usize) -> Cmd {
        redis::cmd("SET").arg("k").arg(vec![0_u8; length]).to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn an_argument_that_broke_a_connection_is_not_sent_for_a_while() {
        for (is_named, remembered) in [(true, REMEMBERED), (false, SUSPECTED)] {
            let limit = BulkLimit::default();
            limit.check(&set(3 * LOWEST)).expect("nothing is known");
            limit.broken_by(&set(2 * LOWEST), is_named);
            assert!(limit.take_unread() && !limit.take_unread());
            limit.check(&set(2 * LOWEST)).expect_err("it broke a connection");
            limit.check(&set(2 * LOWEST - 1)).expect("it is shorter");
            advance(remembered).await;
            limit.check(&set(3 * LOWEST)).expect("the limit may have been raised");
        }
    }

    /// A connection also breaks for other reasons, under commands of any kind: a short argument must not become the limit.
    #[tokio::test(start_paused = true)]
    async fn a_short_command_is_not_suspected() {
        let limit = BulkLimit::default();
        limit.broken_by(&set(LOWEST), false);
        assert!(!limit.take_unread());
        limit.check(&set(3 * LOWEST)).expect("nothing is known");
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_that_the_server_names_counts() {
        let limit = BulkLimit::default();
        limit.broken_by(&set(2 * LOWEST), false);
        limit.read(512 * LOWEST);
        limit.check(&set(2 * LOWEST)).expect("the server takes it");
    }
}
