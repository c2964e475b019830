//! The task that keeps the connection for announcements while there are waiters.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::RedisError;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::{Announcements, Keyspace, KeyspaceState, REFUSED, configure, frees};
use crate::observe::log;
use crate::store::redis::backoff::Backoff;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::connection::inbound::Inbound;
use crate::store::redis::errors::classify::{judge, reason, store_error};
use crate::store::redis::errors::reply::bounded;
use crate::store::{StoreError, StoreErrorKind};

/// How often the server is pinged and keys without waiters are forgotten.
const TICK: Duration = Duration::from_secs(1);

/// After how many ticks without a key the connection is closed. Not at once, because waits on locks recur.
const IDLE_TICKS: u32 = 3;

/// How many channels one command subscribes to.
const AT_ONCE: usize = 128;

/// The task's reference to its owner. Weak: dropping the store ends its task.
pub(crate) struct KeyspaceReader {
    keyspace: Weak<Keyspace>,
    number: u64,
}

impl Drop for KeyspaceReader {
    /// The task ended, with its work, its runtime or by a panic: the next request starts another.
    fn drop(&mut self) {
        self.with(|keyspace, state| {
            lose(keyspace, state);
            state.running = false;
            state.task = None;
        });
    }
}

impl KeyspaceReader {
    pub(crate) fn new(keyspace: &Arc<Keyspace>, number: u64) -> Self {
        Self { keyspace: Arc::downgrade(keyspace), number }
    }

    /// Accesses the state, if this task still serves it.
    fn with<T>(&self, act: impl FnOnce(&Keyspace, &mut KeyspaceState) -> T) -> Option<T> {
        let keyspace = self.keyspace.upgrade()?;
        let mut state = keyspace.state();
        (state.number == self.number && state.running && !state.closed).then(|| act(&keyspace, &mut state))
    }

    /// Forgets keys without waiters. True if none is left and this task must end: a later request starts
    /// another.
    fn is_done(&self) -> bool {
        let done = self.with(|keyspace, state| {
            keyspace.prune(state);
            state.running = !state.keys.is_empty();
            !state.running
        });
        let done = done.unwrap_or(true);
        if done && let Some(keyspace) = self.keyspace.upgrade() {
            // A request without a waiter was waiting for this task: it must start another.
            keyspace.changes.send_replace(());
        }
        done
    }

    /// Records that the server announces these keys, and wakes the waiters that may have missed an
    /// announcement.
    fn confirm(&self, keys: &[Arc<str>]) -> Option<()> {
        let again = self.with(|keyspace, state| {
            let mut again = Vec::new();
            for key in keys {
                if let Some(standing) = state.keys.get_mut(key) {
                    standing.confirmed = true;
                    again.extend(standing.promised.then_some(key));
                }
            }
            keyspace.judge_hearing(state);
            again
        })?;
        let keyspace = self.keyspace.upgrade()?;
        keyspace.changes.send_replace(());
        for key in again {
            drop(keyspace.grants.tell_missed(key, None));
        }
        Some(())
    }

    /// Records that announcements are not available, and wakes the waiters that were promised them.
    fn refuse(&self, why: &'static str) -> Option<()> {
        let keys = self.with(|_, state| {
            state.refused = Some((why, Instant::now()));
            state.keys.retain(|_, standing| standing.promised);
            state.keys.keys().cloned().collect::<Vec<_>>()
        })?;
        let keyspace = self.keyspace.upgrade()?;
        keyspace.changes.send_replace(());
        for key in keys {
            drop(keyspace.grants.tell_missed(&key, None));
        }
        Some(())
    }

    fn deliver(&self, message: &redis::Msg, prefix: &str) -> Option<()> {
        let keyspace = self.keyspace.upgrade()?;
        if let Some(key) = message.get_channel_name().strip_prefix(prefix)
            && frees(message.get_payload_bytes())
        {
            drop(keyspace.grants.tell_missed(key, None));
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
    keyspace.judge_hearing(state);
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

/// Keeps sessions while there are waiters. No strong reference lives across an await, except in
/// [`configure`], which has a bound.
pub(crate) async fn serve(
    reader: KeyspaceReader,
    dial: Connector,
    mut generations: watch::Receiver<u64>,
    asked: Arc<Notify>,
) {
    let mut backoff = Backoff::new();
    loop {
        let started = Instant::now();
        let end = session(&reader, &dial, &mut generations, &asked).await;
        backoff.lived(started.elapsed());
        if reader.with(lose).is_none() {
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
                if reader.with(|_, state| state.refused = None).is_none() {
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
        while reader.keyspace.upgrade().is_some_and(|keyspace| keyspace.commands.has_to_wait()) {
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
    reader: &KeyspaceReader,
    dial: &Connector,
    generations: &mut watch::Receiver<u64>,
    asked: &Notify,
) -> SessionEnd {
    let mut generation = *generations.borrow_and_update();
    let Some(commands) = reader.keyspace.upgrade().map(|keyspace| keyspace.commands.clone()) else {
        return SessionEnd::Done;
    };
    match configure(&commands, dial.answer).await {
        Ok(()) => drop(commands),
        Err(why) if why.kind == StoreErrorKind::Refused => {
            return SessionEnd::Refused("CONFIG is refused", why);
        }
        Err(why) => return SessionEnd::Failed(why),
    }
    let (mut sink, mut messages, mut login) = match dial.inbox().await {
        Ok(Inbound { messages, login, .. }) => {
            let (sink, messages) = messages.split();
            (sink, messages, login)
        }
        Err(error) => return failed(error),
    };
    // The prefix of the channels' names, which differs by database.
    let prefix = format!("__keyspace@{}__:", dial.db());
    let channels = |keys: &[Arc<str>]| keys.iter().map(|key| format!("{prefix}{key}")).collect::<Vec<_>>();
    let mut subscribed = HashSet::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut idle = 0;
    loop {
        let Some(fresh) = reader.with(|_, state| std::mem::take(&mut state.fresh)) else {
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
            () = asked.notified() => {}
            issue = dial.login.later_than(login) => {
                match dial.log_in_for_messages(&mut sink, login, &issue).await {
                    Ok(present) => login = present,
                    Err(error) => return failed(error),
                }
            }
            _ = ticks.tick() => {
                if let Err(error) = bounded(TICK, sink.ping()).await {
                    return failed(error);
                }
                let gone = reader.with(|keyspace, state| {
                    keyspace.prune(state);
                    subscribed.iter().filter(|key| !state.keys.contains_key(*key)).cloned().collect::<Vec<_>>()
                });
                let Some(gone) = gone else { return SessionEnd::Done };
                for keys in gone.chunks(AT_ONCE) {
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
    let kind = judge(&error).0;
    let why = store_error(kind, error);
    if kind == StoreErrorKind::Refused {
        return SessionEnd::Refused("SUBSCRIBE to keyspace channels is refused", why);
    }
    SessionEnd::Failed(why)
}
