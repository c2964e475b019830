//! What the server announces of keys: who waits for a mutex hears that foreign hands have freed it.
//!
//! Announcements are off on most servers; to switch them on and to hear them takes rights of its own, and none
//! is ever repeated. This is for those who ask for it, beside their timers. It has a connection of its own,
//! open only while somebody waits in this way.

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
use crate::store::redis::connection::connector::Dial;
use crate::store::redis::errors::reply::unexpected;
use crate::store::wake::lock_waiters::Grants;
use crate::sync::lock;

/// How long a refusal stands: rights do change, but seldom.
const REFUSED: Duration = Duration::from_secs(30);

/// Where the server says what it announces.
const SETTING: &str = "notify-keyspace-events";

pub(crate) struct Keyspace {
    dial: Dial,
    commands: Commands,
    grants: Arc<Grants>,
    state: Mutex<State>,
    /// Tells the session that there are keys to subscribe to.
    asked: Arc<Notify>,
    /// Sent whenever the answer to those who ask may have changed.
    changes: watch::Sender<()>,
    /// Whether announcements that were promised may be missed at present.
    deaf: AtomicBool,
}

#[derive(Default)]
struct State {
    keys: HashMap<Arc<str>, Standing>,
    /// Those that the session has not subscribed to yet.
    fresh: Vec<Arc<str>>,
    /// Why announcements can not be had, as far as is known.
    refused: Option<(&'static str, Instant)>,
    /// Counts sessions' tasks: one that was given up must not touch the state any more.
    number: u64,
    running: bool,
    task: Option<AbortHandle>,
    closed: bool,
}

/// How it stands with the announcements of one key.
#[derive(Clone, Copy, Default)]
struct Standing {
    /// The server has confirmed them, on the present connection.
    confirmed: bool,
    /// Somebody was told that they come.
    promised: bool,
}

impl Keyspace {
    pub(crate) fn new(dial: Dial, commands: Commands, grants: Arc<Grants>) -> Arc<Self> {
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

    /// Whether what was promised is heard.
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

    /// Forgets keys that nobody waits for.
    fn prune(&self, state: &mut State) {
        state.keys.retain(|key, _| self.grants.anyone_waits(key));
        self.judge_hearing(state);
    }

    fn judge_hearing(&self, state: &State) {
        let deaf = state.keys.values().any(|standing| standing.promised && !standing.confirmed);
        self.deaf.store(deaf, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, State> {
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

/// Has the server announce what is listened for, beside whatever it announces to others. Again on each
/// connection, because a server that was restarted has forgotten it.
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

/// The flags with those that are needed: channels by `K`ey, `g`eneric commands such as DEL, e`x`pired and
/// `e`victed keys. `None` where they are there already; `A` stands for all kinds of events.
pub(crate) fn merged(flags: &str) -> Option<String> {
    let there = |flag: char| flags.contains(flag) || (flag != 'K' && flags.contains('A'));
    let missing: String = "Kgxe".chars().filter(|&flag| !there(flag)).collect();
    (!missing.is_empty()).then(|| format!("{flags}{missing}"))
}

/// Whether a key is gone, or another one, after this event. The others are about a holder's own doing:
/// `expire`, which SET with a time to live sends too, and `persist`.
fn frees(event: &[u8]) -> bool {
    matches!(event, b"del" | b"expired" | b"evicted" | b"rename_from" | b"move_from" | b"unlink")
}
