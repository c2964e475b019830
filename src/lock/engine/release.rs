//! Releases that nobody waits for: of what was dropped, and of what may have been granted unheard.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::target::Target;
use crate::observe::log;
use crate::store::{StoreErrorKind, Token};

/// When an unanswered TAKE is taken to have run, if it ever does: on a connection that broke, commands sent
/// before may be read after those of the next one.
const STRAGGLER: Duration = Duration::from_millis(300);

/// How long the release of something is tried at the most that does not expire, or not for longer than this.
const LONGEST: Duration = Duration::from_secs(3600);

/// What is to be released.
pub(crate) struct Release<T> {
    pub(crate) target: Arc<T>,
    pub(crate) token: Token,
    /// Until when the token may have it: the release is tried until then. `None` for ever.
    pub(crate) until: Option<Instant>,
    /// Whether it was never known to be held: it may wait in the queue.
    pub(crate) waits: bool,
    /// Whether a TAKE may still run.
    pub(crate) straggler: bool,
    /// What renews it until then.
    pub(crate) watchdog: Option<JoinHandle<()>>,
}

impl<T: Target> Release<T> {
    /// Releases it in the background of the runtime that this is called in, or else of `runtime`. Where there is
    /// none, or one that is shut down, it expires by itself.
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

    /// Tries until the store has answered, or it has expired by itself.
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

/// Ends a watchdog, and returns when it has ended: a renewal must not be sent after the release. Bounded, because
/// the runtime it lives in may stand still; then the token keeps its renewal from doing harm.
pub(super) async fn stop(watchdog: &mut Option<JoinHandle<()>>, within: Duration) {
    if let Some(task) = watchdog {
        task.abort();
        let _ = timeout(within, task).await;
    }
    *watchdog = None;
}
