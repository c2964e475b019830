//! Releases in the background: of dropped holds, and of grants that may have been made without a message.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::target::LockTarget;
use crate::observe::log;
use crate::store::{StoreErrorKind, Token};

/// How long after the first release an unanswered TAKE may still be executed: the server may read the last commands
/// of a broken connection after those of its successor.
const STRAGGLER: Duration = Duration::from_millis(300);

/// Upper bound of the retries of one release, also if the lock does not expire or lasts longer.
const LONGEST: Duration = Duration::from_secs(3600);

/// One release.
pub(crate) struct Release<T> {
    pub(crate) target: Arc<T>,
    pub(crate) token: Token,
    /// Until when the store may hold the lock for this token: the release is retried until then. `None` for ever.
    pub(crate) until: Option<Instant>,
    /// Whether the token was never known to hold the lock: it may be in the queue.
    pub(crate) waits: bool,
    /// Whether a TAKE may still be executed.
    pub(crate) straggler: bool,
    /// The renewal task, stopped before the release.
    pub(crate) watchdog: Option<JoinHandle<()>>,
}

impl<T: LockTarget> Release<T> {
    /// Releases in the background: on the current runtime, else on `runtime`. If neither exists, or the one used is
    /// shut down, the lock expires by itself.
    pub(crate) fn later(self, runtime: Option<&Handle>) {
        let present = self.target.home().background.enter();
        let task = async move {
            self.run().await;
            drop(present);
        };
        match (Handle::try_current(), runtime) {
            (Ok(current), _) => drop(current.spawn(task)),
            (Err(_), Some(runtime)) => drop(runtime.spawn(task)),
            (Err(_), None) => {}
        }
    }

    async fn run(mut self) {
        let longest = Instant::now() + LONGEST;
        let expired = self.until.map_or(longest, |until| until.min(longest));
        stop(&mut self.watchdog, self.target.home().command_timeout).await;
        self.until_answered(expired).await;
        if self.straggler && Instant::now() + STRAGGLER < expired {
            sleep(STRAGGLER).await;
            self.until_answered(expired).await;
        }
    }

    /// Retries until the store has answered or the lock has expired by itself.
    async fn until_answered(&self, expired: Instant) {
        loop {
            let within = self.target.home().command_timeout;
            let released = if self.waits {
                self.target.leave(&self.token, within).await
            } else {
                self.target.free(&self.token, within).await.map(drop)
            };
            match released {
                Ok(()) => return,
                Err(error) if error.kind == StoreErrorKind::Closed || Instant::now() >= expired => {
                    tracing::debug!(target: log::LOCK, %error, "a lock was not released: it expires by itself");
                    return;
                }
                Err(_) => sleep(Duration::from_millis(fastrand::u64(20..100))).await,
            }
        }
    }
}

/// Stops the renewal task and returns when it has ended: a renewal must not be sent after the release. The wait is
/// bounded, because the task's runtime may stand still; a renewal that is sent later does no harm, because the
/// store compares its token.
pub(super) async fn stop(watchdog: &mut Option<JoinHandle<()>>, within: Duration) {
    if let Some(task) = watchdog {
        task.abort();
        let _ = timeout(within, task).await;
    }
    *watchdog = None;
}
