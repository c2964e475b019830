//! Keyspace notifications: wake the waiters of a mutex when a foreign client has freed it.
//!
//! They are off on most servers; turning them on and receiving them takes additional rights, and a lost notification is
//! not repeated. So they are optional, and supplement the waiters' timers.
//!
//! A waiter requests announcements of its key, and starts a task if there is none. The task runs a session on a separate
//! connection, which is open only while there are waiters.

#[cfg(test)]
#[path = "../../../tests/unit/store/redis/keyspace_tests.rs"]
mod tests;

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::FutureExt as _;
use redis::{RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use crate::observe::log;
use crate::store::redis::commands::{Commands, not_understood};
use crate::store::redis::connection::connector::{Connector, Inbound, MessageSink};
use crate::store::redis::connection::send::SendMode;
use crate::store::redis::errors::{bounded, classify, io_error_of, reason, store_error};
use crate::store::wake_locks::LockWaiters;
use crate::store::{KeyspaceAnswer, StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;
use crate::task::{Backoff, EndedTask, OwnedTask, TaskOwner, TaskRef};

/// How long a server's refusal is remembered before the events are requested again: rights change seldom.
const REFUSED: Duration = Duration::from_secs(30);

/// The server's setting that selects the events that it announces.
const SETTING: &str = "notify-keyspace-events";

pub(crate) struct Keyspace {
    connector: Connector,
    commands: Commands,
    grants: Arc<LockWaiters>,
    state: Mutex<KeyspaceState>,
    task: OwnedTask,
    /// Wakes the session when there are keys to subscribe to.
    fresh_keys: Arc<Notify>,
    /// Signals every change that may concern a caller that waits in [`announce`](Self::announce).
    changes: watch::Sender<()>,
    /// Whether announcements that a waiter was promised may be missed at present.
    is_unreachable: AtomicBool,
}

#[derive(Default)]
struct KeyspaceState {
    keys: HashMap<Arc<str>, Announcements>,
    /// The keys that the session has not subscribed to yet.
    fresh: Vec<Arc<str>>,
    /// Why announcements are not available, if that is known.
    refused: Option<(&'static str, Instant)>,
}

/// The state of the announcements of one key.
#[derive(Clone, Copy, Default)]
struct Announcements {
    /// The server has confirmed the subscription on the present connection.
    confirmed: bool,
    /// A waiter was promised announcements, and relies on them.
    promised: bool,
}

impl Keyspace {
    pub(super) fn new(connector: Connector, commands: Commands, grants: Arc<LockWaiters>) -> Arc<Self> {
        Arc::new(Self {
            connector,
            commands,
            grants,
            state: Mutex::default(),
            task: OwnedTask::default(),
            fresh_keys: Arc::default(),
            changes: watch::Sender::new(()),
            is_unreachable: AtomicBool::new(false),
        })
    }

    /// Whether all promised announcements arrive.
    pub(crate) fn hears(&self) -> bool {
        !self.is_unreachable.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.task.close();
        self.changes.send_replace(());
    }

    /// Removes keys without waiters.
    fn prune(&self, state: &mut KeyspaceState) {
        state.keys.retain(|key, _| self.grants.anyone_waits(key));
        self.check_events(state);
    }

    fn check_events(&self, state: &KeyspaceState) {
        let is_unreachable =
            state.keys.values().any(|announcements| announcements.promised && !announcements.confirmed);
        self.is_unreachable.store(is_unreachable, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, KeyspaceState> {
        lock(&self.state)
    }
}

/// Turns on the events that are needed, in addition to those that are on already. Repeated on each connection,
/// because a restarted server has lost the setting.
async fn configure(commands: &Commands, within: Duration) -> StoreResult<()> {
    let answer =
        commands.send("", redis::cmd("CONFIG").arg("GET").arg(SETTING), within, SendMode::Once).await?;
    let settings: HashMap<String, String> = redis::from_redis_value(answer).map_err(|_| not_understood())?;
    let flags = settings.get(SETTING).ok_or_else(not_understood)?;
    if let Some(flags) = merged(flags) {
        match commands
            .send("", redis::cmd("CONFIG").arg("SET").arg(SETTING).arg(flags), within, SendMode::Once)
            .await?
        {
            Value::Okay => {}
            _ => return Err(not_understood()),
        }
    }
    Ok(())
}

/// Adds the flags that are needed: `K`eyspace channels, `g`eneric commands such as DEL, e`x`pired and
/// `e`victed keys. `None` if all are there already; `A` stands for all kinds of events.
pub(crate) fn merged(flags: &str) -> Option<String> {
    let there = |flag: char| flags.contains(flag) || (flag != 'K' && flags.contains('A'));
    let missing: String = "Kgxe".chars().filter(|&flag| !there(flag)).collect();
    (!missing.is_empty()).then(|| format!("{flags}{missing}"))
}

/// Whether this event means that the key was removed. The other events of a mutex's key come from its holder: `expire`,
/// which SET with a time to live sends too, and `persist`.
fn frees(event: &[u8]) -> bool {
    matches!(event, b"del" | b"expired" | b"evicted" | b"rename_from" | b"move_from" | b"unlink")
}

impl Keyspace {
    /// Requests announcements of `key` for as long as any waiter waits for it.
    pub(crate) async fn announce(
        self: &Arc<Self>,
        key: &Arc<str>,
        within: Duration,
    ) -> StoreResult<KeyspaceAnswer> {
        if self.commands.is_spread() {
            // A node of a cluster announces its own keys only, and only to its own subscribers; and keys move between nodes.
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
        self.commands.bounded(within, answered, StoreErrorKind::TimedOut).await
    }

    /// Returns the answer if it is known; otherwise requests it and returns `None`: the caller asks again at the next of `changes`.
    fn ask(self: &Arc<Self>, key: &Arc<str>) -> StoreResult<Option<KeyspaceAnswer>> {
        if self.task.is_closed() {
            return Err(StoreError::new(StoreErrorKind::Closed));
        }
        {
            let mut state = self.state();
            if let Some((why, since)) = state.refused
                && (self.task.is_running() || since.elapsed() < REFUSED)
            {
                return Ok(Some(KeyspaceAnswer::No { why }));
            }
            match state.keys.get_mut(key) {
                Some(announcements) if announcements.confirmed => {
                    announcements.promised = true;
                    return Ok(Some(KeyspaceAnswer::Yes));
                }
                Some(_) => {}
                None => {
                    state.keys.insert(Arc::clone(key), Announcements::default());
                    state.fresh.push(Arc::clone(key));
                    self.fresh_keys.notify_one();
                }
            }
        }
        // The state is not locked here: `start` calls this closure under the task's lock, and the closure locks the state.
        self.task.start(self, |task| {
            self.state().refused = None;
            let serving = serve(
                task,
                self.connector.clone(),
                self.commands.generations(),
                Arc::clone(&self.fresh_keys),
            );
            serving.map(drop)
        });
        Ok(None)
    }
}

/// How often the server is pinged and keys without waiters are removed.
const TICK: Duration = Duration::from_secs(1);

/// The connection is closed after more ticks than this without a key. Not at once, because waits on locks recur.
const IDLE_TICKS: u32 = 3;

/// How many channels one command subscribes to.
const AT_ONCE: usize = 128;

impl TaskOwner for Keyspace {
    fn owned_task(&self) -> &OwnedTask {
        &self.task
    }

    fn task_ended(&self, ended: EndedTask<'_>) {
        lose(self, &mut self.state());
        drop(ended);
    }
}

impl TaskRef<Keyspace> {
    /// Accesses the state; `None` if another task serves the keyspace now, or none.
    fn with_state<T>(&self, act: impl FnOnce(&Keyspace, &mut KeyspaceState) -> T) -> Option<T> {
        self.with(|keyspace| act(keyspace, &mut keyspace.state()))
    }

    /// Removes keys without waiters. Returns `None` if no key is left and this task must end: a later request starts another
    /// task.
    fn continues(&self) -> Option<()> {
        let ends = self.end_if(|keyspace| {
            let mut state = keyspace.state();
            keyspace.prune(&mut state);
            state.keys.is_empty()
        });
        if ends && let Some(keyspace) = self.owner() {
            // A pending request without a registered waiter has lost its key: wake it, so that it starts another task.
            keyspace.changes.send_replace(());
        }
        (!ends).then_some(())
    }

    /// Records that from now on the server announces these keys, and wakes the waiters that may have missed an earlier
    /// announcement.
    fn confirm(&self, keys: &[Arc<str>]) -> Option<()> {
        let again = self.with_state(|keyspace, state| {
            let mut again = Vec::new();
            for key in keys {
                if let Some(announcements) = state.keys.get_mut(key) {
                    announcements.confirmed = true;
                    again.extend(announcements.promised.then(|| Arc::clone(key)));
                }
            }
            keyspace.check_events(state);
            again
        })?;
        self.notify(&again)
    }

    /// Records that announcements are not available, and wakes the waiters that were promised them.
    fn refuse(&self, why: &'static str) -> Option<()> {
        let keys = self.with_state(|_, state| {
            state.refused = Some((why, Instant::now()));
            state.keys.retain(|_, announcements| announcements.promised);
            state.keys.keys().cloned().collect::<Vec<_>>()
        })?;
        self.notify(&keys)
    }

    /// Wakes the callers that wait for an answer, and the waiters for the locks with these keys.
    fn notify(&self, keys: &[Arc<str>]) -> Option<()> {
        let keyspace = self.owner()?;
        keyspace.changes.send_replace(());
        for key in keys {
            drop(keyspace.grants.notify_missed(key, None));
        }
        Some(())
    }

    fn deliver(&self, message: &redis::Msg, prefix: &str) -> Option<()> {
        let keyspace = self.owner()?;
        if let Some(key) = message.get_channel_name().strip_prefix(prefix)
            && frees(message.get_payload_bytes())
        {
            drop(keyspace.grants.notify_missed(key, None));
        }
        Some(())
    }
}

/// The connection was lost: all keys must be subscribed to again.
fn lose(keyspace: &Keyspace, state: &mut KeyspaceState) {
    for Announcements { confirmed, .. } in state.keys.values_mut() {
        *confirmed = false;
    }
    state.fresh = state.keys.keys().cloned().collect();
    keyspace.check_events(state);
}

/// Why a session failed or ended.
enum SessionEnd {
    Failed(StoreError),
    Refused(&'static str, StoreError),
    /// The commands use a new connection, perhaps to another server.
    Moved,
    /// No key has a waiter any more, or this task no longer serves the keyspace.
    Done,
}

impl From<RedisError> for SessionEnd {
    fn from(error: RedisError) -> Self {
        let kind = classify(&error).0;
        let why = store_error(kind, error);
        match kind {
            StoreErrorKind::Refused => Self::Refused("SUBSCRIBE to keyspace channels is refused", why),
            _ => Self::Failed(why),
        }
    }
}

/// Runs sessions while there are waiters.
async fn serve(
    reader: TaskRef<Keyspace>,
    connector: Connector,
    mut generations: watch::Receiver<u64>,
    fresh_keys: Arc<Notify>,
) -> Option<Infallible> {
    let mut backoff = Backoff::new();
    loop {
        let started = Instant::now();
        let Err(end) = session(&reader, &connector, &mut generations, &fresh_keys).await;
        backoff.connected_for(started.elapsed());
        reader.with_state(lose)?;
        match end {
            SessionEnd::Done => return None,
            SessionEnd::Moved => {}
            SessionEnd::Failed(why) => {
                tracing::debug!(target: log::REDIS, reason = %reason(&why), "no announcements of keys")
            }
            SessionEnd::Refused(what, why) => {
                tracing::debug!(target: log::REDIS, what, reason = %reason(&why), "no announcements of keys");
                reader.refuse(what)?;
                let until = Instant::now() + REFUSED;
                while Instant::now() < until {
                    sleep(TICK).await;
                    reader.continues()?;
                }
                reader.with_state(|_, state| state.refused = None)?;
            }
        }
        backoff.pause().await;
        reader.continues()?;
        // Before the connection for commands is open, a session might be opened at another server and have to move at
        // once.
        while reader.owner().is_some_and(|keyspace| keyspace.commands.has_to_wait()) {
            tokio::select! {
                changed = generations.changed() => changed.ok()?,
                () = sleep(TICK) => {}
            }
            reader.continues()?;
        }
    }
}

/// One session, from opening its connection to its end.
async fn session(
    reader: &TaskRef<Keyspace>,
    connector: &Connector,
    generations: &mut watch::Receiver<u64>,
    fresh_keys: &Notify,
) -> Result<Infallible, SessionEnd> {
    let mut generation = *generations.borrow_and_update();
    let commands = reader.owner().map(|keyspace| keyspace.commands.clone()).ok_or(SessionEnd::Done)?;
    configure(&commands, connector.answer).await.map_err(|why| match why.kind {
        StoreErrorKind::Refused => SessionEnd::Refused("CONFIG is refused", why),
        _ => SessionEnd::Failed(why),
    })?;
    drop(commands);
    let Inbound { sink, mut messages, mut login, .. } = connector.inbox().await?;
    // The prefix of the channels' names, which differs by database.
    let prefix = format!("__keyspace@{}__:", connector.db());
    let mut channels = KeyChannels { reader, sink, prefix, subscribed: HashSet::new(), idle: 0 };
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        channels.subscribe().await?;
        tokio::select! {
            message = messages.next() => {
                let message = message.ok_or_else(|| io_error_of(io::ErrorKind::BrokenPipe))?;
                reader.deliver(&message, &channels.prefix).ok_or(SessionEnd::Done)?;
            }
            () = fresh_keys.notified() => {}
            issue = connector.login.later_than(login) => {
                login = connector.log_in_for_messages(&mut channels.sink, login, &issue).await?;
            }
            _ = ticks.tick() => channels.tend().await?,
            changed = generations.changed() => {
                changed.map_err(|_| SessionEnd::Done)?;
                let latest = *generations.borrow_and_update();
                // As in the subscriber: a later connection for commands may lead to another server.
                if generation != 0 && latest != generation {
                    return Err(SessionEnd::Moved);
                }
                generation = latest;
            }
        }
    }
}

/// The channels that a session is subscribed to.
struct KeyChannels<'a> {
    reader: &'a TaskRef<Keyspace>,
    sink: MessageSink,
    prefix: String,
    subscribed: HashSet<Arc<str>>,
    /// How many ticks in a row have passed without a key.
    idle: u32,
}

impl KeyChannels<'_> {
    fn names(&self, keys: &[Arc<str>]) -> Vec<String> {
        keys.iter().map(|key| format!("{}{key}", self.prefix)).collect()
    }

    /// Subscribes to the channels of the keys that were requested meanwhile.
    async fn subscribe(&mut self) -> Result<(), SessionEnd> {
        let fresh = self.reader.with_state(|_, state| std::mem::take(&mut state.fresh));
        for keys in fresh.ok_or(SessionEnd::Done)?.chunks(AT_ONCE) {
            let names = self.names(keys);
            bounded(TICK, self.sink.subscribe(names)).await?;
            self.subscribed.extend(keys.iter().cloned());
            self.reader.confirm(keys).ok_or(SessionEnd::Done)?;
        }
        Ok(())
    }

    /// Pings the server, and leaves the channels of keys without waiters. Ends the session after more than `IDLE_TICKS` without a key.
    async fn tend(&mut self) -> Result<(), SessionEnd> {
        bounded(TICK, self.sink.ping()).await?;
        let abandoned = self.reader.with_state(|keyspace, state| {
            keyspace.prune(state);
            let is_abandoned = |key: &&Arc<str>| !state.keys.contains_key(*key);
            self.subscribed.iter().filter(is_abandoned).cloned().collect::<Vec<_>>()
        });
        for keys in abandoned.ok_or(SessionEnd::Done)?.chunks(AT_ONCE) {
            let names = self.names(keys);
            bounded(TICK, self.sink.unsubscribe(names)).await?;
            for key in keys {
                self.subscribed.remove(key);
            }
        }
        self.idle = if self.subscribed.is_empty() { self.idle + 1 } else { 0 };
        if self.idle > IDLE_TICKS {
            self.reader.continues().ok_or(SessionEnd::Done)?;
        }
        Ok(())
    }
}
