//! The task that sends kept invalidations: one for all clones of a guard, as soon as the store can be reached.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::StampedeGuard;
use super::entries::LONGEST;
use crate::guard_state::GuardState;
use crate::guard_state::kept::KeptInvalidation;
use crate::store::{StoreError, StoreErrorKind};

/// How many are sent at once.
const AT_ONCE: usize = 64;

/// How long one wait for the store lasts. The task keeps a guard that was dropped for as long.
const REACHES: Duration = Duration::from_millis(500);

/// The pause after a round that has failed, and the longest one.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl StampedeGuard {
    /// Starts the task, if something is kept and there is no task.
    pub(super) fn send_kept_later(&self) {
        let Ok(runtime) = Handle::try_current() else { return };
        if self.state.kept.begin_to_send() {
            runtime.spawn(Resending { state: Arc::downgrade(&self.state), is_over: false }.run());
        }
    }
}

/// The task's reference to the guard. Weak: dropping the guard ends its task.
struct Resending {
    state: Weak<GuardState>,
    /// All are sent, and another task sends what is kept from now on; or the store is closed, and there is no other task.
    is_over: bool,
}

impl Drop for Resending {
    /// The task ended with its runtime: the next call that needs a key starts another.
    fn drop(&mut self) {
        if let Some(state) = self.state.upgrade()
            && !self.is_over
        {
            state.kept.sends_no_more();
        }
    }
}

impl Resending {
    async fn run(mut self) {
        let mut pause = PAUSE;
        loop {
            let Some(state) = self.state.upgrade() else { return };
            let mut kept = state.kept.to_send();
            // In a cluster each key may be on another server.
            let is_up = |kept: &&KeptInvalidation| !state.store.is_down(kept.target.key.name());
            let Some(first) = kept.iter().find(is_up).or_else(|| kept.first()) else {
                self.is_over = true;
                return;
            };
            // This waits for a reconnect, and ends with it.
            if let Err(error) = state.store.reach(first.target.key.name(), REACHES).await {
                self.is_over = error.kind == StoreErrorKind::Closed;
                if self.is_over {
                    return;
                }
                drop(state);
                sleep(PAUSE).await;
                continue;
            }
            if pause > PAUSE {
                // None was confirmed in the last round. One at a time finds out when that ends; not the same one each time.
                let one = kept.swap_remove(fastrand::usize(..kept.len()));
                kept = vec![one];
            }
            let all = kept.len();
            let sent = stream::iter(kept).map(|kept| send(&state, kept)).buffer_unordered(AT_ONCE);
            let sent: Vec<_> = sent.collect().await;
            self.is_over = sent.iter().flatten().any(|error| error.kind == StoreErrorKind::Closed);
            if self.is_over {
                return;
            }
            drop(state);
            match sent.iter().filter(|error| error.is_some()).count() {
                0 => pause = PAUSE,
                failed => {
                    pause = if failed == all { (pause * 2).min(LONGEST_PAUSE) } else { PAUSE };
                    sleep(pause).await;
                }
            }
        }
    }
}

/// Sends one of them, unless its server is known to be down. Returns why it is still kept.
async fn send(state: &Arc<GuardState>, kept: KeptInvalidation) -> Option<StoreError> {
    if state.store.is_down(kept.target.key.name()) {
        return Some(StoreError::new(StoreErrorKind::Unavailable));
    }
    let (state, policy) = (Arc::clone(state), Arc::clone(&kept.policy));
    let guard = StampedeGuard::with(state, policy);
    guard.send_kept(&kept, Instant::now() + LONGEST).await.err()
}
