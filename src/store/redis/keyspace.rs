//! Keyspace notifications: wake the waiters of a mutex when a foreign client has freed it.
//!
//! They are off on most servers; turning them on and receiving them takes additional rights, and a lost one is
//! not repeated. So they are optional, and supplement the timers.
//!
//! A waiter requests announcements of its key, and starts a task if there is none. The task runs a session on a separate
//! connection, which is open only while there are waiters.

#[cfg(test)]
#[path = "../../../tests/unit/store/redis/keyspace_tests.rs"]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::observe::log;
use crate::store::redis::commands::{Commands, refused};
use crate::store::redis::connection::connector::{Connector, Inbound};
use crate::store::redis::errors::{bounded, classify, reason, store_error, unexpected};
use crate::store::wake_locks::LockWaiters;
use crate::store::{KeyspaceAnswer, StoreError, StoreErrorKind};
use crate::sync::lock;
use crate::task::{Backoff, EndedTask, OwnedTask, TaskOwner, TaskRef};

/// How long a refusal is remembered: rights change seldom.
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
    /// Sent at every change that may concern a waiting caller.
    changes: watch::Sender<()>,
    /// Whether promised announcements may be missed at present.
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

/// Adds the flags that are needed: `K`eyspace channels, `g`eneric commands such as DEL, e`x`pired and
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

impl Keyspace {
    /// Requests announcements of `key` for as long as any waiter waits for it.
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

    /// Returns the answer if it is known; otherwise requests it.
    fn ask(self: &Arc<Self>, key: &Arc<str>) -> Result<Option<KeyspaceAnswer>, StoreError> {
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
        // The lock of the state is free: the task takes it under its own.
        self.task.start(self, |task| {
            self.state().refused = None;
            serve(task, self.connector.clone(), self.commands.generations(), Arc::clone(&self.fresh_keys))
        });
        Ok(None)
    }
}

/// How often the server is pinged and keys without waiters are removed.
const TICK: Duration = Duration::from_secs(1);

/// After how many ticks without a key the connection is closed. Not at once, because waits on locks recur.
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
    /// Accesses the state, if this task still serves it.
    fn with_state<T>(&self, act: impl FnOnce(&Keyspace, &mut KeyspaceState) -> T) -> Option<T> {
        self.with(|keyspace| act(keyspace, &mut keyspace.state()))
    }

    /// Removes keys without waiters. Returns true if no key is left and this task must end: a later request starts another
    /// task.
    fn is_done(&self) -> bool {
        let done = self.end_if(|keyspace| {
            let mut state = keyspace.state();
            keyspace.prune(&mut state);
            state.keys.is_empty()
        });
        if done && let Some(keyspace) = self.owner() {
            // A pending request without a registered waiter has lost its key: wake it, so that it starts another task.
            keyspace.changes.send_replace(());
        }
        done
    }

    /// Records that the server announces these keys, and wakes the waiters that may have missed an
    /// announcement.
    fn confirm(&self, keys: &[Arc<str>]) -> Option<()> {
        let again = self.with_state(|keyspace, state| {
            let mut again = Vec::new();
            for key in keys {
                if let Some(announcements) = state.keys.get_mut(key) {
                    announcements.confirmed = true;
                    again.extend(announcements.promised.then_some(key));
                }
            }
            keyspace.check_events(state);
            again
        })?;
        let keyspace = self.owner()?;
        keyspace.changes.send_replace(());
        for key in again {
            drop(keyspace.grants.notify_missed(key, None));
        }
        Some(())
    }

    /// Records that announcements are not available, and wakes the waiters that were promised them.
    fn refuse(&self, why: &'static str) -> Option<()> {
        let keys = self.with_state(|_, state| {
            state.refused = Some((why, Instant::now()));
            state.keys.retain(|_, announcements| announcements.promised);
            state.keys.keys().cloned().collect::<Vec<_>>()
        })?;
        let keyspace = self.owner()?;
        keyspace.changes.send_replace(());
        for key in keys {
            drop(keyspace.grants.notify_missed(&key, None));
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
    /// No key has a waiter any more.
    Done,
}

/// Runs sessions while there are waiters.
async fn serve(
    reader: TaskRef<Keyspace>,
    connector: Connector,
    mut generations: watch::Receiver<u64>,
    fresh_keys: Arc<Notify>,
) {
    let mut backoff = Backoff::new();
    loop {
        let started = Instant::now();
        let end = session(&reader, &connector, &mut generations, &fresh_keys).await;
        backoff.connected_for(started.elapsed());
        if reader.with_state(lose).is_none() {
            return;
        }
        match end {
            SessionEnd::Done => return,
            SessionEnd::Moved => {}
            SessionEnd::Failed(why) => {
                tracing::debug!(target: log::REDIS, reason = %reason(&why), "no announcements of keys")
            }
            SessionEnd::Refused(what, why) => {
                tracing::debug!(target: log::REDIS, what, reason = %reason(&why), "no announcements of keys");
                if reader.refuse(what).is_none() {
                    return;
                }
                let until = Instant::now() + REFUSED;
                while Instant::now() < until {
                    sleep(TICK).await;
                    if reader.is_done() {
                        return;
                    }
                }
                if reader.with_state(|_, state| state.refused = None).is_none() {
                    return;
                }
            }
        }
        backoff.pause().await;
        if reader.is_done() {
            return;
        }
        // Before the commands are connected, a session might be opened at another server and have to move at
        // once.
        while reader.owner().is_some_and(|keyspace| keyspace.commands.has_to_wait()) {
            tokio::select! {
                changed = generations.changed() => if changed.is_err() { return },
                () = sleep(TICK) => {}
            }
            if reader.is_done() {
                return;
            }
        }
    }
}

/// One session, from opening its connection to its end.
async fn session(
    reader: &TaskRef<Keyspace>,
    connector: &Connector,
    generations: &mut watch::Receiver<u64>,
    fresh_keys: &Notify,
) -> SessionEnd {
    let mut generation = *generations.borrow_and_update();
    let Some(commands) = reader.owner().map(|keyspace| keyspace.commands.clone()) else {
        return SessionEnd::Done;
    };
    match configure(&commands, connector.answer).await {
        Ok(()) => drop(commands),
        Err(why) if why.kind == StoreErrorKind::Refused => {
            return SessionEnd::Refused("CONFIG is refused", why);
        }
        Err(why) => return SessionEnd::Failed(why),
    }
    let (mut sink, mut messages, mut login) = match connector.inbox().await {
        Ok(Inbound { messages, login, .. }) => {
            let (sink, messages) = messages.split();
            (sink, messages, login)
        }
        Err(error) => return failed(error),
    };
    // The prefix of the channels' names, which differs by database.
    let prefix = format!("__keyspace@{}__:", connector.db());
    let channels = |keys: &[Arc<str>]| keys.iter().map(|key| format!("{prefix}{key}")).collect::<Vec<_>>();
    let mut subscribed = HashSet::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut idle = 0;
    loop {
        let Some(fresh) = reader.with_state(|_, state| std::mem::take(&mut state.fresh)) else {
            return SessionEnd::Done;
        };
        for keys in fresh.chunks(AT_ONCE) {
            if let Err(error) = bounded(TICK, sink.subscribe(channels(keys))).await {
                return failed(error);
            }
            subscribed.extend(keys.iter().cloned());
            if reader.confirm(keys).is_none() {
                return SessionEnd::Done;
            }
        }
        tokio::select! {
            message = messages.next() => match message {
                Some(message) => if reader.deliver(&message, &prefix).is_none() { return SessionEnd::Done },
                None => return failed(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
            },
            () = fresh_keys.notified() => {}
            issue = connector.login.later_than(login) => {
                match connector.log_in_for_messages(&mut sink, login, &issue).await {
                    Ok(present) => login = present,
                    Err(error) => return failed(error),
                }
            }
            _ = ticks.tick() => {
                if let Err(error) = bounded(TICK, sink.ping()).await {
                    return failed(error);
                }
                let abandoned = reader.with_state(|keyspace, state| {
                    keyspace.prune(state);
                    subscribed.iter().filter(|key| !state.keys.contains_key(*key)).cloned().collect::<Vec<_>>()
                });
                let Some(abandoned) = abandoned else { return SessionEnd::Done };
                for keys in abandoned.chunks(AT_ONCE) {
                    if let Err(error) = bounded(TICK, sink.unsubscribe(channels(keys))).await {
                        return failed(error);
                    }
                    for key in keys {
                        subscribed.remove(key);
                    }
                }
                idle = if subscribed.is_empty() { idle + 1 } else { 0 };
                if idle > IDLE_TICKS && reader.is_done() {
                    return SessionEnd::Done;
                }
            }
            changed = generations.changed() => {
                let latest = *generations.borrow_and_update();
                if changed.is_err() {
                    return SessionEnd::Done;
                }
                // As in the inbox: a later connection for commands may lead to another server.
                if generation != 0 && latest != generation {
                    return SessionEnd::Moved;
                }
                generation = latest;
            }
        }
    }
}

fn failed(error: RedisError) -> SessionEnd {
    let kind = classify(&error).0;
    let why = store_error(kind, error);
    if kind == StoreErrorKind::Refused {
        return SessionEnd::Refused("SUBSCRIBE to keyspace channels is refused", why);
    }
    SessionEnd::Failed(why)
}
