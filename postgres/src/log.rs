//! The reader: what happens between a commit and the moment at which no process serves what was there before.
//!
//! The invariants, for each slot:
//!
//! 1. *A position is confirmed to the server only after everything that was committed before it is invalidated*: the store has acknowledged
//!    it, and no process serves an older copy. So whatever dies, the slot's next reader begins before the first commit that may be missed.
//! 2. *Commits are invalidated in the order of the log.* Those that arrive while others are being invalidated are joined into one
//!    invalidation, which begins after the last of them.
//! 3. *A process reports a position only after it has itself invalidated everything before it*, on the timeline that it reports. So a report
//!    is true for ever, also one of a reader that was replaced long ago.
//! 4. *Nothing depends on there being one reader.* The mutex saves the others their attempts, and the server lets one connection read a slot.
//!    Two that read at once would each invalidate all that they confirm.
//! 5. *What was committed before a slot is in no log*, so a slot is made with a first message that invalidates everything
//!    (`session::make_slot`). A slot that the server has lost is made anew. A position is reported only if that message is before it.

use std::time::Duration;

use stampede_guard::{ErrorKind as GuardErrorKind, StampedeGuard};
use tokio::time::{Instant, sleep};

use crate::error::{ErrorKind, LogError};
use crate::names::Names;
use crate::position::LogPosition;
use crate::progress::Progress;

/// The most transactions that are joined into one invalidation.
const MOST_JOINED: usize = 1_000;

/// The pause after an invalidation that was not acknowledged; it doubles up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A step of the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogStep {
    /// What a transaction has changed.
    pub(crate) names: Names,
    /// All commits before this LSN were in this step or an earlier one.
    pub(crate) end: Option<u64>,
    /// When the transaction was committed, by this process's clock, in microseconds.
    pub(crate) committed: Option<i64>,
}

/// A connection on which a log arrives.
pub(crate) trait Session: Send {
    /// The position at this LSN; `None` if what was committed before the slot may not be invalidated yet.
    fn position(&self, end: u64) -> Option<LogPosition>;

    /// The next step. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = Result<LogStep, LogError>> + Send;

    /// Lets the server forget what is before this LSN.
    fn confirm(&mut self, end: u64);

    /// Ends the connection, after the last confirmation.
    fn close(self) -> impl Future<Output = ()> + Send;
}

/// Reads a log until it fails.
pub(crate) async fn read<S: Session>(
    session: &mut S,
    guard: &StampedeGuard,
    progress: &Progress,
) -> LogError {
    loop {
        if let Err(error) = read_once(session, guard, progress).await {
            return error;
        }
    }
}

async fn read_once<S: Session>(
    session: &mut S,
    guard: &StampedeGuard,
    progress: &Progress,
) -> Result<(), LogError> {
    let (mut names, mut end, mut committed) = (Names::default(), None, Vec::new());
    let mut step = session.next().await?;
    loop {
        names.add(step.names);
        end = step.end.or(end);
        committed.extend(step.committed);
        if committed.len() >= MOST_JOINED {
            break;
        }
        step = tokio::select! {
            biased;
            step = session.next() => step?,
            () = std::future::ready(()) => break,
        };
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

/// Invalidates the names, however long that takes.
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
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
