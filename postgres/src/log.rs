//! The reader: what happens between a commit and the moment at which no process serves what was there before.
//!
//! The invariants, for each slot:
//!
//! 1. *A position is confirmed to the server only after everything that was committed before it is invalidated*: the store has acknowledged
//!    it, and no process serves an older copy. So whatever dies, the slot's next reader begins before the first commit that may be missed.
//! 2. *A transaction is invalidated only once loads can see it.* Its commit is in the log before other transactions see it, for as long as
//!    the server waits for a synchronous standby. A load in between would store the older value after the invalidation.
//! 3. *Commits are invalidated in the order of the log.* Those that arrive while others are being invalidated are joined into one
//!    invalidation, which begins after the last of them.
//! 4. *A process reports a position only after it has itself invalidated everything before it*, on the timeline that it reports. So a report
//!    is true for ever, also one of a reader that was replaced long ago.
//! 5. *Nothing depends on there being one reader.* The mutex saves the others their attempts, and the server lets one connection read a slot.
//!    Two that read at once would each invalidate all that they confirm.
//! 6. *What was committed before a slot is in no log*, so a slot is made with a first message that invalidates everything
//!    (`gate::Gate::make_slot`). A slot that the server has lost is made anew. A position is reported only if that message is before it.

use std::time::Duration;

use stampede_guard::lock::{LockError, Mutex};
use stampede_guard::{ErrorKind as GuardErrorKind, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::error::{ErrorKind, LogError};
use crate::names::Names;
use crate::position::{LogPosition, ServerId};
use crate::progress::Progress;

/// After this time an invalidation that is not acknowledged is given up, and read again.
const ACKNOWLEDGED: Duration = Duration::from_secs(4);
/// The most transactions, and names, that are joined into one invalidation; the last transaction may have more names.
const MOST_JOINED: usize = 1_000;

/// After this time a failure that lasts is logged again.
const LOG_AGAIN: Duration = Duration::from_secs(60);

/// The pause after a failure, or an invalidation that was not acknowledged; it doubles up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A step of the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogStep {
    /// What a transaction has changed.
    pub(crate) names: Names,
    /// The transaction, if it has changed anything that is named.
    pub(crate) xid: Option<u32>,
    /// All commits before this LSN were in this step or an earlier one.
    pub(crate) end: Option<u64>,
    /// When the transaction was committed, by this process's clock, in microseconds.
    pub(crate) committed: Option<i64>,
}

/// How much log a server keeps for a slot, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptLog {
    pub(crate) lag: u64,
    /// How much more before the slot is lost; `None` if there is no bound.
    pub(crate) left: Option<u64>,
}

/// A connection on which a log arrives.
pub(crate) trait Session: Send {
    /// The position at this LSN; `None` if what was committed before the slot may not be invalidated yet.
    fn position(&self, end: u64) -> Option<LogPosition>;

    /// The next step. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = Result<LogStep, LogError>> + Send;

    fn server(&self) -> ServerId;

    /// What the server keeps for the slot, if that was looked at since the last call.
    fn kept(&mut self) -> Option<KeptLog>;

    /// Waits until all that reads now sees these transactions.
    fn until_visible(&mut self, xids: &[u32]) -> impl Future<Output = Result<(), LogError>> + Send;

    /// Lets the server forget what is before this LSN.
    fn confirm(&mut self, end: u64);

    /// Ends the connection, after the last confirmation.
    fn close(self) -> impl Future<Output = ()> + Send;
}

/// A log that may be read.
pub(crate) trait Log: Send + Sync {
    type Session: Session;

    /// Connects, and begins where the last reader has confirmed.
    fn open(&self) -> impl Future<Output = Result<Self::Session, LogError>> + Send;
}

/// Reads a log whenever no other process does.
pub(crate) struct Reader<L> {
    pub(crate) guard: StampedeGuard,
    pub(crate) mutex: Mutex,
    /// Those of the servers that may have the log. The first that can be opened is read.
    pub(crate) logs: Vec<L>,
    pub(crate) progress: Progress,
}

impl<L: Log> Reader<L> {
    /// Reads until the guard is shut down. Failures are logged and tried again.
    pub(crate) async fn run(&self) {
        let (mut pause, mut failures) = (PAUSE, FailureLog::default());
        loop {
            let (has_read, error) = self.read_as_holder().await;
            if error.is_closed() {
                return;
            }
            if has_read {
                (pause, failures) = (PAUSE, FailureLog::default());
            }
            failures.add(&error);
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits until this process is the reader, and reads until it fails. Also returns whether it has read.
    async fn read_as_holder(&self) -> (bool, LogError) {
        let mut held = loop {
            match self.mutex.lock().await {
                Ok(held) => break held,
                Err(LockError::AcquireTimeout { .. }) => {}
                Err(error) => return (false, LogError::new(ErrorKind::Mutex(error))),
            }
        };
        let (lost, mut has_read) = (held.lost(), false);
        let error = tokio::select! {
            () = lost => LogError::new(ErrorKind::NotReader),
            error = self.read(held.fence(), &mut has_read) => error,
        };
        // Another process may reach what this one did not.
        let _ = held.unlock().await;
        (has_read, error)
    }

    /// Reads the first log that can be opened. Sets `has_read` at the first confirmation.
    async fn read(&self, fence: u64, has_read: &mut bool) -> LogError {
        let mut failed = LogError::new(ErrorKind::Standby);
        for log in &self.logs {
            let mut session = match log.open().await {
                Ok(session) if self.progress.is_older(session.server()) => {
                    session.close().await;
                    failed = LogError::new(ErrorKind::OlderTimeline);
                    continue;
                }
                Ok(session) => session,
                // That a server is a standby says nothing about why its primary cannot be read.
                Err(error) if error.is_standby() => continue,
                Err(error) => {
                    failed = error;
                    continue;
                }
            };
            let error = self.read_session(&mut session, fence, has_read).await;
            session.close().await;
            return error;
        }
        failed
    }

    async fn read_session(&self, session: &mut L::Session, fence: u64, has_read: &mut bool) -> LogError {
        let Self { guard, progress, .. } = self;
        let _listening = match progress.answer_questions().await {
            Ok(listening) => listening,
            Err(error) => return LogError::new(ErrorKind::Unacknowledged(error)),
        };
        tracing::info!(fence, "this process reads the log");
        let _reading = progress.metrics.read();
        loop {
            match read_once(session, guard, progress).await {
                Ok(()) => *has_read = true,
                Err(error) => return error,
            }
        }
    }
}

/// Logs each failure once, and again when it lasts.
#[derive(Default)]
struct FailureLog {
    latest: Option<(String, Instant)>,
}

impl FailureLog {
    fn add(&mut self, error: &LogError) {
        let (text, now) = (error.to_string(), Instant::now());
        let is_news = self.latest.as_ref().is_none_or(|(known, at)| *known != text || now - *at >= LOG_AGAIN);
        if !is_news {
            return;
        }
        if error.is_transient() {
            tracing::info!(%error, "this process does not read the log");
        } else {
            tracing::error!(%error, "the log can not be read");
        }
        self.latest = Some((text, now));
    }
}

async fn read_once<S: Session>(
    session: &mut S,
    guard: &StampedeGuard,
    progress: &Progress,
) -> Result<(), LogError> {
    let (mut names, mut xids, mut end, mut committed) = (Names::default(), Vec::new(), None, Vec::new());
    let mut step = session.next().await?;
    if let Some(kept) = session.kept() {
        progress.metrics.keeps(kept.lag, kept.left);
    }
    loop {
        names.add(step.names);
        xids.extend(step.xid);
        end = step.end.or(end);
        committed.extend(step.committed);
        if committed.len() >= MOST_JOINED || names.len() >= MOST_JOINED {
            break;
        }
        step = tokio::select! {
            biased;
            step = session.next() => step?,
            () = std::future::ready(()) => break,
        };
    }
    if !xids.is_empty() {
        session.until_visible(&xids).await?;
    }
    if !names.is_empty() {
        invalidate(&names, guard).await?;
    }
    if let Some(end) = end {
        session.confirm(end);
        progress.reached(session.position(end), &committed);
    }
    Ok(())
}

/// Invalidates the names. What is not acknowledged in time is read again: a connection that confirms nothing would keep its server from
/// shutting down.
async fn invalidate(names: &Names, guard: &StampedeGuard) -> Result<(), LogError> {
    let (began, mut pause) = (Instant::now(), PAUSE);
    loop {
        let Err(error) = names.invalidate(guard).await else { return Ok(()) };
        if error.kind() == GuardErrorKind::Closed {
            return Err(LogError::new(ErrorKind::Closed));
        }
        tracing::warn!(
            %error, names = names.len(), for_s = began.elapsed().as_secs(),
            "commits are not invalidated yet; the log is not confirmed until they are"
        );
        if began.elapsed() >= ACKNOWLEDGED {
            return Err(LogError::new(ErrorKind::Unacknowledged(error)));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
#[path = "../tests/unit/simulation.rs"]
mod simulation;
