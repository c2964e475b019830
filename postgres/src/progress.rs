//! [`Progress`]: how far the log was read, in this process and, by messages, in the fleet.
//!
//! A process that waits for a position asks the reader, and the reader answers once it has passed it. Nothing is sent while none waits.
//!
//! | message | to | content |
//! |---|---|---|
//! | question | the slot's channel | the asker's channel (32 digits), a position |
//! | answer | the asker's channel | a position that the reader has passed |
//!
//! A message is a hint that may be lost, and its channel is open to all that may write to the store: an asker repeats its question until
//! its patience ends, and then loads for itself.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stampede_guard::__members::{self, Channel, Listening};
use stampede_guard::{Error, StampedeGuard};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant, timeout_at};

use crate::metrics::{Metrics, WITHIN};
use crate::position::{LogPosition, ServerId};
use crate::session::unix_micros;

/// How long one message may take.
const PATIENCE: Duration = Duration::from_millis(500);
/// After this time a question that was not answered is asked again: its reader may have been replaced.
const AGAIN: Duration = Duration::from_millis(250);
/// After this time a question is asked again that no process has received.
const UNHEARD: Duration = Duration::from_millis(50);
/// The most questions that a reader remembers.
const MOST_QUESTIONS: usize = 10_000;

/// How far a process knows that the log was read.
pub(crate) struct Progress {
    guard: StampedeGuard,
    /// On which readers are asked.
    questions: Channel,
    /// On which this process is answered.
    answers: Channel,
    /// Set once this process has waited for a position.
    listening: OnceCell<Listening>,
    shared: Arc<Shared>,
    pub(crate) metrics: Metrics,
}

#[derive(Default)]
struct Shared {
    /// The latest position that is known to be passed.
    passed: watch::Sender<LogPosition>,
    /// The questions that this process will answer as the reader.
    open: Mutex<HashSet<(Channel, LogPosition)>>,
    /// Transactions by [`WITHIN`].
    commits: [AtomicU64; WITHIN.len()],
}

/// What a process has read as the reader; see [`PostgresLog::stats`](crate::PostgresLog::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogStats {
    /// Transactions that were final within 10 ms of their commit: no process served what was there before.
    pub within_10_ms: u64,
    /// Those that took longer, and at most 100 ms.
    pub within_100_ms: u64,
    /// Those that took longer, and at most 2 s.
    pub within_2_s: u64,
    /// Those that took longer.
    pub later: u64,
    /// The latest position that this process knows to be passed.
    pub passed: LogPosition,
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, HashSet<(Channel, LogPosition)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, position: LogPosition) {
        self.passed.send_replace(position);
    }
}

impl Progress {
    pub(crate) fn new(guard: &StampedeGuard, slot: &str) -> Self {
        let questions = Channel::named(guard, &format!("log {slot}"));
        Self {
            guard: guard.clone(),
            questions,
            answers: Channel::new(),
            listening: OnceCell::new(),
            shared: Arc::default(),
            metrics: Metrics::new(slot),
        }
    }

    /// Called by the reader when everything before `position` is invalidated. `committed`: when the transactions were committed.
    pub(crate) fn reached(&self, position: Option<LogPosition>, committed: &[i64]) {
        let now = unix_micros();
        for at in committed {
            let took = Duration::from_micros(now.saturating_sub(*at).try_into().unwrap_or_default());
            let at = WITHIN.iter().position(|(_, most)| took <= *most).unwrap_or(WITHIN.len() - 1);
            self.shared.commits[at].fetch_add(1, Ordering::Relaxed);
            self.metrics.is_final(WITHIN[at].0, took);
        }
        let Some(position) = position else { return };
        self.shared.pass(position);
        let mut answered = HashSet::new();
        self.shared.open().retain(|(asker, wanted)| {
            let is_passed = position.has_passed(*wanted);
            if is_passed {
                answered.insert(*asker);
            }
            !is_passed
        });
        for asker in answered {
            answer(&self.guard, asker, position);
        }
    }

    /// Whether a position of a later timeline of the same system is known to be passed.
    pub(crate) fn is_older(&self, server: ServerId) -> bool {
        let known = self.shared.passed.borrow().server();
        known.system == server.system && known.timeline > server.timeline
    }

    /// Answers questions as the reader, until the value is dropped.
    pub(crate) async fn answer_questions(&self) -> Result<Listening, Error> {
        let (shared, guard) = (Arc::downgrade(&self.shared), self.guard.clone());
        let listener = move |message: &[u8]| {
            let (Some(shared), Some((asker, wanted))) = (shared.upgrade(), parse_question(message)) else {
                return;
            };
            // Under the lock: a position that is reached after this look finds the question.
            let mut open = shared.open();
            let passed = *shared.passed.borrow();
            if passed.has_passed(wanted) {
                return answer(&guard, asker, passed);
            }
            if open.len() < MOST_QUESTIONS {
                open.insert((asker, wanted));
            }
        };
        self.shared.open().clear();
        __members::listen(&self.guard, self.questions, PATIENCE, listener).await
    }

    /// Waits until the log was read up to this position. Returns whether it was, `within` this time.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub(crate) async fn wait_for(&self, wanted: LogPosition, within: Duration) -> bool {
        let mut passed = self.shared.passed.subscribe();
        if passed.borrow().has_passed(wanted) {
            return true;
        }
        let until = Instant::now() + within;
        let listening = self.listening.get_or_try_init(|| self.listen(PATIENCE.min(within)));
        if !matches!(timeout_at(until, listening).await, Ok(Ok(_))) {
            return false;
        }
        loop {
            let question = format!("{}{wanted}", self.answers);
            let left = until.saturating_duration_since(Instant::now()).min(PATIENCE);
            let heard = __members::send(&self.guard, self.questions, question.as_bytes(), left).await;
            let again = if heard.is_ok_and(|processes| processes > 0) { AGAIN } else { UNHEARD };
            let next = until.min(Instant::now() + again);
            if timeout_at(next, passed.wait_for(|passed| passed.has_passed(wanted))).await.is_ok() {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
        }
    }

    /// Listens to answers from now on.
    async fn listen(&self, within: Duration) -> Result<Listening, Error> {
        let shared = Arc::downgrade(&self.shared);
        let listener = move |message: &[u8]| {
            if let (Some(shared), Some(position)) = (shared.upgrade(), parse_position(message)) {
                shared.pass(position);
            }
        };
        __members::listen(&self.guard, self.answers, within, listener).await
    }

    pub(crate) fn stats(&self) -> LogStats {
        let [within_10_ms, within_100_ms, within_2_s, later] =
            self.shared.commits.each_ref().map(|count| count.load(Ordering::Relaxed));
        LogStats { within_10_ms, within_100_ms, within_2_s, later, passed: *self.shared.passed.borrow() }
    }
}

fn answer(guard: &StampedeGuard, asker: Channel, position: LogPosition) {
    let Ok(runtime) = Handle::try_current() else { return };
    let guard = guard.clone();
    // The asker asks again if the message is lost.
    runtime.spawn(
        async move { __members::send(&guard, asker, position.to_string().as_bytes(), PATIENCE).await },
    );
}

fn parse_question(message: &[u8]) -> Option<(Channel, LogPosition)> {
    let (asker, position) = message.split_at_checked(32)?;
    Some((Channel::parse(asker)?, parse_position(position)?))
}

fn parse_position(message: &[u8]) -> Option<LogPosition> {
    std::str::from_utf8(message).ok()?.parse().ok()
}
