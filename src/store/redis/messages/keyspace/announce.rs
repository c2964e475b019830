//! How a waiter requests announcements of a key, and starts the session for them.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::session::{KeyspaceReader, serve};
use super::{Announcements, Keyspace, REFUSED};
use crate::store::lock_store::KeyspaceAnswer;
use crate::store::{StoreError, StoreErrorKind};

impl Keyspace {
    /// Has `key` announced for as long as any waiter waits for it.
    pub(crate) async fn announce(
        self: &Arc<Self>,
        key: &Arc<str>,
        within: Duration,
    ) -> Result<KeyspaceAnswer, StoreError> {
        if self.commands.is_spread() {
            // A node announces its own keys to its own subscribers only, and keys move.
            return Ok(KeyspaceAnswer::No { why: "a cluster announces keys on their own nodes only" });
        }
        let mut changes = self.changes.subscribe();
        let answered = async {
            loop {
                changes.mark_unchanged();
                if let Some(answer) = self.ask(key)? {
                    return Ok(answer);
                }
                // Cannot fail: the sender lives in `self`.
                let _ = changes.changed().await;
            }
        };
        timeout(within, answered).await.unwrap_or_else(|_| {
            let why = self.commands.down();
            Err(why.unwrap_or_else(|| StoreError::new(StoreErrorKind::TimedOut)))
        })
    }

    /// The answer, if it is known; else requests it.
    fn ask(self: &Arc<Self>, key: &Arc<str>) -> Result<Option<KeyspaceAnswer>, StoreError> {
        {
            let mut state = self.state();
            if state.closed {
                return Err(StoreError::new(StoreErrorKind::Closed));
            }
            if let Some((why, since)) = state.refused
                && (state.running || since.elapsed() < REFUSED)
            {
                return Ok(Some(KeyspaceAnswer::No { why }));
            }
            match state.keys.get_mut(key) {
                Some(standing) if standing.confirmed => {
                    standing.promised = true;
                    return Ok(Some(KeyspaceAnswer::Yes));
                }
                Some(_) => {}
                None => {
                    state.keys.insert(Arc::clone(key), Announcements::default());
                    state.fresh.push(Arc::clone(key));
                    self.asked.notify_one();
                }
            }
        }
        self.open();
        Ok(None)
    }

    /// Starts a session in the background, if there is none.
    fn open(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let number = {
            let mut state = self.state();
            if state.closed || std::mem::replace(&mut state.running, true) {
                return;
            }
            state.refused = None;
            state.number += 1;
            state.number
        };
        let reader = KeyspaceReader::new(self, number);
        let generations = self.commands.generations();
        // Outside the lock: a runtime that is being shut down drops the task inside `spawn`, and dropping
        // the reader takes the lock.
        let task = runtime.spawn(serve(reader, self.dial.clone(), generations, Arc::clone(&self.asked)));
        let mut state = self.state();
        if state.number == number && !state.closed {
            state.task = Some(task.abort_handle());
        } else {
            task.abort();
        }
    }
}
