//! The connection on which other nodes' scripts wake this one.
//!
//! It carries one subscription, to this node's own channel, for as long as the node lives; what is
//! said on it is a hint. Where it can not be had (the server refuses SUBSCRIBE, or is gone) all
//! waits end by their timers.

mod vitals;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures_util::StreamExt as _;
use redis::aio::{PubSubSink, PubSubStream};
use redis::{RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use vitals::Vitals;

use super::message::{self, Message};
use crate::observe::{log, warn_if};
use crate::store::redis::commands::Commands;
use crate::store::redis::commands::call::hand_over;
use crate::store::redis::commands::lock_losses::look_for_losses;
use crate::store::redis::connection::Told;
use crate::store::redis::connection::backoff::{Backoff, STABLE};
use crate::store::redis::connection::connector::{Dial, Inbound, bounded};
use crate::store::redis::errors::classify::{judge, reason, store_error};
use crate::store::redis::locks::give_back;
use crate::store::wake::lease_waiters::{Hint, Watches};
use crate::store::wake::lock_waiters::{Grants, Tell};
use crate::store::{StoreErrorKind, Token};

/// How often the server is asked whether it is still there, and how long it may take to answer. A
/// connection that brings only messages dies without a sign.
const PING: Duration = Duration::from_secs(1);

/// How often a refused subscription is tried again: rights do change, but seldom.
const REFUSED: Duration = Duration::from_secs(30);

pub(crate) struct Inbox {
    dial: Dial,
    /// Minted by the first use: a process that was forked before that is a node of its own.
    node: OnceLock<Uuid>,
    commands: Commands,
    watches: Arc<Watches>,
    grants: Arc<Grants>,
    task: Mutex<Task>,
    /// Whether there is a task; in front of the lock, because every ACQUIRE asks.
    running: AtomicBool,
    status: watch::Sender<Status>,
    vitals: Vitals,
}

#[derive(Default)]
struct Task {
    /// Counts tasks: one that was given up must not touch the state any more.
    number: u64,
    handle: Option<AbortHandle>,
    closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// No subscription, or not yet.
    Shut,
    /// The subscription was confirmed, and every ping answered in time since.
    Confirmed,
    /// The server does not allow it.
    Refused,
}

impl Inbox {
    pub(crate) fn new(
        dial: Dial,
        commands: Commands,
        watches: Arc<Watches>,
        grants: Arc<Grants>,
    ) -> Arc<Self> {
        Arc::new(Self {
            dial,
            node: OnceLock::new(),
            commands,
            watches,
            grants,
            task: Mutex::default(),
            running: AtomicBool::new(false),
            status: watch::Sender::new(Status::Shut),
            vitals: Vitals::new(),
        })
    }

    /// Which node's it is.
    pub(crate) fn node(&self) -> Uuid {
        *self.node.get_or_init(Uuid::new_v4)
    }

    /// Opens the inbox in the background, if nobody has.
    pub(crate) fn open(self: &Arc<Self>) {
        if self.running.load(Ordering::Acquire) {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        let number = {
            let mut task = self.task();
            if task.closed || self.running.swap(true, Ordering::AcqRel) {
                return;
            }
            task.number += 1;
            task.number
        };
        let reader = Reader { inbox: Arc::downgrade(self), number };
        let generations = self.commands.generations();
        let channel = message::channel(self.node());
        // Outside the lock: a runtime that is being shut down drops the task here, and the reader's drop takes the lock.
        let spawned = runtime.spawn(serve(reader, self.dial.clone(), generations, channel));
        let mut task = self.task();
        if task.number == number && !task.closed {
            task.handle = Some(spawned.abort_handle());
        } else {
            spawned.abort();
        }
    }

    /// Whether what other nodes say is heard at present.
    pub(crate) fn hears(&self) -> bool {
        *self.status.borrow() == Status::Confirmed
    }

    /// Waits until the subscription is confirmed, or refused for good.
    pub(crate) async fn settled(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| *status != Status::Shut).await;
    }

    pub(crate) fn close(&self) {
        let handle = {
            let mut task = self.task();
            task.closed = true;
            self.status.send_replace(Status::Shut);
            task.handle.take()
        };
        if let Some(handle) = handle {
            handle.abort();
        }
        self.vitals.lost();
        self.tell_missed();
    }

    fn tell_missed(&self) {
        self.watches.tell_all_missed();
        self.grants.tell_firsts_missed();
    }

    /// Changes the status, for the task `number`, and wakes each waiter for a lease and the first for each lock: hints were lost, or
    /// will be. False when that task has nothing left to serve.
    fn enter(&self, number: u64, status: Status) -> bool {
        let changed = {
            let task = self.task();
            if task.number != number || task.closed {
                return false;
            }
            self.status.send_if_modified(|before| std::mem::replace(before, status) != status)
        };
        // The status first: a waiter that is woken asks whether hints arrive.
        if changed {
            self.vitals.lost();
            self.tell_missed();
        }
        true
    }

    /// Passes a message on to who waits for it. Anything that is not one is ignored.
    fn deliver(self: &Arc<Self>, payload: &[u8]) {
        match message::parse(payload) {
            Some(Message::Hint(name, hint)) => {
                let heard = self.watches.tell(name, &hint);
                match hint {
                    // The waiter has left: its lease must not stay with nobody.
                    Hint::Granted { token, hops } if !heard && self.is_own(&token) => {
                        let (commands, name) = (self.commands.clone(), name.to_owned());
                        let within = self.dial.answer;
                        tokio::spawn(async move {
                            let _ = hand_over(&commands, &name, &token, None, (hops, false), within).await;
                        });
                    }
                    _ => {}
                }
            }
            Some(Message::Granted { token, fence, lock }) => {
                let heard = self.grants.tell(&token, Tell::Granted { fence }).is_some();
                // Invariant 5 of `locks`.
                if !heard && self.is_own(&token) {
                    tokio::spawn(give_back(self.commands.clone(), lock, token, self.dial.answer));
                }
            }
            Some(Message::Told(token, tell)) => drop(self.grants.tell(&token, tell)),
            Some(Message::Sooner(key)) => drop(self.grants.tell_missed(key, None)),
            None => {}
        }
    }

    /// Whether the token was minted by this node. Its channel can be written to by others than ours.
    fn is_own(&self, token: &Token) -> bool {
        token.node() == self.node().simple().to_string()
    }

    fn task(&self) -> MutexGuard<'_, Task> {
        // Nothing under this lock can fail half-way.
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        if let Some(handle) = self.task().handle.take() {
            handle.abort();
        }
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("status", &*self.status.borrow()).finish_non_exhaustive()
    }
}

/// The task's hold on the inbox. Weak: a store that is dropped takes its task along.
struct Reader {
    inbox: Weak<Inbox>,
    number: u64,
}

impl Drop for Reader {
    /// The task ended, with its runtime or by a panic: the next ACQUIRE starts over.
    fn drop(&mut self) {
        let Some(inbox) = self.inbox.upgrade() else { return };
        if inbox.enter(self.number, Status::Shut) {
            inbox.task().handle = None;
            // Last: from here on there may be another task.
            inbox.running.store(false, Ordering::Release);
        }
    }
}

impl Reader {
    /// As [`Inbox::enter`]. What the other waiters of locks have missed is asked of the server in the background.
    fn enter(&self, status: Status) -> bool {
        let entered = self.inbox.upgrade().filter(|inbox| inbox.enter(self.number, status));
        let Some(inbox) = entered else { return false };
        let asked = (inbox.commands.clone(), inbox.node(), inbox.dial.answer);
        tokio::spawn(look_for_losses(asked, Arc::clone(&inbox.grants), status != Status::Shut));
        true
    }

    /// Notes what the connection does.
    fn note(&self, what: impl FnOnce(&Vitals)) {
        if let Some(inbox) = self.inbox.upgrade() {
            what(&inbox.vitals);
        }
    }

    fn commands_are_down(&self) -> bool {
        self.inbox.upgrade().is_some_and(|inbox| inbox.commands.down().is_some())
    }

    /// The server of this connection may be gone, and with it the other connection to it.
    fn suspect_commands(&self) {
        if let Some(inbox) = self.inbox.upgrade() {
            inbox.commands.suspect();
        }
    }
}

/// Why a subscription came to nothing, or to its end.
enum End {
    NotOpened(RedisError),
    Failed(RedisError),
    /// SUBSCRIBE is not among this user's rights.
    Refused(RedisError),
    /// The commands go to another connection, perhaps to another server.
    Moved,
    Dropped,
}

/// Keeps the subscription for as long as there is an inbox. No strong reference lives across an
/// await, or the connection of a dropped store would outlive it.
async fn serve(reader: Reader, dial: Dial, mut generations: watch::Receiver<u64>, channel: String) {
    let mut backoff = Backoff::new();
    // Of the present outage.
    let mut told = Told::default();
    loop {
        let mut confirmed_at = None;
        let end = subscribed(&reader, &dial, &mut generations, &channel, &mut confirmed_at).await;
        let lived = confirmed_at.map_or(Duration::ZERO, |at: Instant| at.elapsed());
        backoff.lived(lived);
        if lived >= STABLE {
            told.forget();
        }
        let (status, why) = match end {
            End::Dropped => return,
            End::Moved => (Status::Shut, None),
            End::NotOpened(error) => (Status::Shut, Some(dial.failure(error))),
            End::Failed(error) => (Status::Shut, Some(store_error(StoreErrorKind::Unavailable, error))),
            End::Refused(error) => (Status::Refused, Some(store_error(StoreErrorKind::Refused, error))),
        };
        if let Some(why) = why {
            let is_news = told.is_news(&why);
            warn_if!(log::REDIS, is_news, reason = %reason(&why), "no notifications; waits end by their timers");
            reader.suspect_commands();
        }
        if !reader.enter(status) {
            return;
        }
        if status == Status::Refused {
            sleep(REFUSED).await;
            continue;
        }
        backoff.pause().await;
        // Opened before there are commands again, it would have to follow them at once.
        while reader.commands_are_down() {
            if generations.changed().await.is_err() {
                return;
            }
        }
    }
}

/// One subscription, from opening the connection to its end.
async fn subscribed(
    reader: &Reader,
    dial: &Dial,
    generations: &mut watch::Receiver<u64>,
    channel: &str,
    confirmed_at: &mut Option<Instant>,
) -> End {
    let mut generation = *generations.borrow_and_update();
    let Inbound { messages, at } = match dial.inbox().await {
        Ok(inbound) => inbound,
        Err(error) => return End::NotOpened(error),
    };
    let (mut sink, mut messages) = messages.split();
    if let Err(error) = bounded(PING, sink.subscribe(channel)).await {
        let refused = judge(&error).0 == StoreErrorKind::Refused;
        return if refused { End::Refused(error) } else { End::Failed(error) };
    }
    if !reader.enter(Status::Confirmed) {
        return End::Dropped;
    }
    *confirmed_at = Some(Instant::now());
    reader.note(Vitals::heard);
    tracing::debug!(target: log::REDIS, "notifications arrive");
    let mut pings = std::pin::pin!(ping(sink, reader));
    loop {
        tokio::select! {
            message = next(&mut messages) => match message {
                Some(message) => match reader.inbox.upgrade() {
                    Some(inbox) => {
                        inbox.vitals.heard();
                        inbox.deliver(message.get_payload_bytes());
                    }
                    None => return End::Dropped,
                },
                None => return End::Failed(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
            },
            error = &mut pings => return End::Failed(error),
            changed = generations.changed() => {
                let latest = *generations.borrow_and_update();
                if changed.is_err() {
                    return End::Dropped;
                }
                if dial.has_left(at.as_deref(), generation, latest) {
                    return End::Moved;
                }
                generation = latest;
            }
        }
    }
}

async fn next(messages: &mut PubSubStream) -> Option<redis::Msg> {
    messages.next().await
}

/// Asks for a sign of life again and again, until there is none.
async fn ping(mut sink: PubSubSink, reader: &Reader) -> RedisError {
    loop {
        sleep(PING).await;
        reader.note(Vitals::asked);
        if let Err(error) = bounded(PING, sink.ping::<Value>()).await {
            return error;
        }
        reader.note(Vitals::answered);
    }
}
