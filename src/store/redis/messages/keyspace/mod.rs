//! Keyspace notifications: tell the waiters of a mutex when a foreign client has freed it.
//!
//! They are off on most servers; turning them on and receiving them takes additional rights, and a lost one is
//! not repeated. So they are optional, and supplement the timers. They have a separate connection, which is
//! open only while a waiter has requested them.

mod announce;
mod session;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::Value;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::store::StoreError;
use crate::store::redis::commands::Commands;
use crate::store::redis::commands::call::refused;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::errors::reply::unexpected;
use crate::store::wake::lock_waiters::LockWaiters;
use crate::sync::lock;

/// How long a refusal is remembered: rights change seldom.
const REFUSED: Duration = Duration::from_secs(30);

/// The server's setting of which events it announces.
const SETTING: &str = "notify-keyspace-events";

pub(crate) struct Keyspace {
    dial: Connector,
    commands: Commands,
    grants: Arc<LockWaiters>,
    state: Mutex<KeyspaceState>,
    /// Tells the session that there are keys to subscribe to.
    asked: Arc<Notify>,
    /// Sent at every change that may concern a waiting caller.
    changes: watch::Sender<()>,
    /// Whether promised announcements may be missed at present.
    deaf: AtomicBool,
}

#[derive(Default)]
struct KeyspaceState {
    keys: HashMap<Arc<str>, Announcements>,
    /// The keys that the session has not subscribed to yet.
    fresh: Vec<Arc<str>>,
    /// Why announcements are not available, if that is known.
    refused: Option<(&'static str, Instant)>,
    /// Counts sessions' tasks: one that was replaced must not change the state any more.
    number: u64,
    running: bool,
    task: Option<AbortHandle>,
    closed: bool,
}

/// The state of the announcements of one key.
#[derive(Clone, Copy, Default)]
struct Announcements {
    /// The server has confirmed the subscription on the present connection.
    confirmed: bool,
    /// A waiter was told that announcements arrive.
    promised: bool,
}

impl Keyspace {
    pub(crate) fn new(dial: Connector, commands: Commands, grants: Arc<LockWaiters>) -> Arc<Self> {
        Arc::new(Self {
            dial,
            commands,
            grants,
            state: Mutex::default(),
            asked: Arc::default(),
            changes: watch::Sender::new(()),
            deaf: AtomicBool::new(false),
        })
    }

    /// Whether all promised announcements arrive.
    pub(crate) fn hears(&self) -> bool {
        !self.deaf.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        let task = {
            let mut state = self.state();
            state.closed = true;
            state.task.take()
        };
        if let Some(task) = task {
            task.abort();
        }
        self.changes.send_replace(());
    }

    /// Forgets keys without waiters.
    fn prune(&self, state: &mut KeyspaceState) {
        state.keys.retain(|key, _| self.grants.anyone_waits(key));
        self.judge_hearing(state);
    }

    fn judge_hearing(&self, state: &KeyspaceState) {
        let deaf = state.keys.values().any(|standing| standing.promised && !standing.confirmed);
        self.deaf.store(deaf, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, KeyspaceState> {
        lock(&self.state)
    }
}

impl Drop for Keyspace {
    fn drop(&mut self) {
        if let Some(task) = self.state().task.take() {
            task.abort();
        }
    }
}

impl fmt::Debug for Keyspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyspace").field("hears", &self.hears()).finish_non_exhaustive()
    }
}

/// Turns on the events that are needed, in addition to those that are on already. Repeated on each connection,
/// because a restarted server has lost the setting.
async fn configure(commands: &Commands, within: Duration) -> Result<(), StoreError> {
    let answer = commands.send("", redis::cmd("CONFIG").arg("GET").arg(SETTING), within).await?;
    let settings: HashMap<String, String> =
        redis::from_redis_value(answer).map_err(|_| refused(unexpected()))?;
    let flags = settings.get(SETTING).ok_or_else(|| refused(unexpected()))?;
    if let Some(flags) = merged(flags) {
        match commands.send("", redis::cmd("CONFIG").arg("SET").arg(SETTING).arg(flags), within).await? {
            Value::Okay => {}
            _ => return Err(refused(unexpected())),
        }
    }
    Ok(())
}

/// The flags with those that are needed: `K`eyspace channels, `g`eneric commands such as DEL, e`x`pired and
/// `e`victed keys. `None` if all are there already; `A` stands for all kinds of events.
pub(crate) fn merged(flags: &str) -> Option<String> {
    let there = |flag: char| flags.contains(flag) || (flag != 'K' && flags.contains('A'));
    let missing: String = "Kgxe".chars().filter(|&flag| !there(flag)).collect();
    (!missing.is_empty()).then(|| format!("{flags}{missing}"))
}

/// Whether the key was removed or replaced by this event. Other events come from the holder itself: `expire`,
/// which SET with a time to live sends too, and `persist`.
fn frees(event: &[u8]) -> bool {
    matches!(event, b"del" | b"expired" | b"evicted" | b"rename_from" | b"move_from" | b"unlink")
}
