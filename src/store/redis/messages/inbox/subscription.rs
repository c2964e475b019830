//! The task that keeps the inbox's subscription: subscribes, listens, subscribes again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::RedisError;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::vitals::Vitals;
use super::{Inbox, InboxStatus};
use crate::observe::{log, warn_if};
use crate::store::StoreErrorKind;
use crate::store::redis::backoff::{Backoff, STABLE};
use crate::store::redis::commands::lock_losses::look_for_losses;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::connection::inbound::{Inbound, MessageSink};
use crate::store::redis::errors::classify::{judge, reason, store_error};
use crate::store::redis::errors::outage_log::OutageLog;
use crate::store::redis::errors::reply::bounded;
use crate::store::redis::messages::message;

/// How often the server is pinged, and how long its answer may take. A connection that only receives gives no sign when
/// it dies.
const PING: Duration = Duration::from_secs(1);

/// How often a refused subscription is tried again: rights change seldom.
const REFUSED: Duration = Duration::from_secs(30);

impl Inbox {
    /// Opens the inbox in the background, if it is not open.
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
        let reader = InboxReader { inbox: Arc::downgrade(self), number };
        let generations = self.commands.generations();
        let channel = message::channel(self.node());
        // Outside the lock: a runtime that is being shut down drops the task inside `spawn`, and dropping the reader
        // takes the lock.
        let spawned = runtime.spawn(serve(reader, self.dial.clone(), generations, channel));
        let mut task = self.task();
        if task.number == number && !task.closed {
            task.handle = Some(spawned.abort_handle());
        } else {
            spawned.abort();
        }
    }
}

/// The task's reference to the inbox. Weak: dropping the store ends its task.
struct InboxReader {
    inbox: Weak<Inbox>,
    number: u64,
}

impl Drop for InboxReader {
    /// The task ended, with its runtime or by a panic: the next ACQUIRE starts another.
    fn drop(&mut self) {
        let Some(inbox) = self.inbox.upgrade() else { return };
        if inbox.enter(self.number, InboxStatus::Shut) {
            inbox.task().handle = None;
            // Last, because from here on there may be another task.
            inbox.running.store(false, Ordering::Release);
        }
    }
}

impl InboxReader {
    /// As [`Inbox::enter`]. A background task then asks the server which other waiters of locks have missed a message.
    fn enter(&self, status: InboxStatus) -> bool {
        let entered = self.inbox.upgrade().filter(|inbox| inbox.enter(self.number, status));
        let Some(inbox) = entered else { return false };
        let asked = (inbox.commands.clone(), inbox.node(), inbox.dial.answer);
        tokio::spawn(look_for_losses(asked, Arc::clone(&inbox.grants), status != InboxStatus::Shut));
        true
    }

    /// Records an event of the connection.
    fn note(&self, what: impl FnOnce(&Vitals)) {
        if let Some(inbox) = self.inbox.upgrade() {
            what(&inbox.vitals);
        }
    }

    fn commands_are_down(&self) -> bool {
        self.inbox.upgrade().is_some_and(|inbox| inbox.commands.down().is_some())
    }

    /// Has the commands' connection checked, because its server may be gone, too.
    fn suspect_commands(&self) {
        if let Some(inbox) = self.inbox.upgrade() {
            inbox.commands.suspect();
        }
    }
}

/// Why a subscription failed or ended.
enum SubscriptionEnd {
    NotOpened(RedisError),
    Failed(RedisError),
    /// This user has no right to SUBSCRIBE.
    Refused(RedisError),
    /// The commands use a new connection, perhaps to another server.
    Moved,
    Dropped,
}

/// Keeps the subscription while the inbox exists. No strong reference lives across an await, or the connection of a
/// dropped store would outlive it.
async fn serve(reader: InboxReader, dial: Connector, mut generations: watch::Receiver<u64>, channel: String) {
    let mut backoff = Backoff::new();
    // The reasons logged of the present outage.
    let mut told = OutageLog::default();
    loop {
        let mut confirmed_at = None;
        let end = subscribed(&reader, &dial, &mut generations, &channel, &mut confirmed_at).await;
        let lived = confirmed_at.map_or(Duration::ZERO, |at: Instant| at.elapsed());
        backoff.lived(lived);
        if lived >= STABLE {
            told.forget();
        }
        let (status, why) = match end {
            SubscriptionEnd::Dropped => return,
            SubscriptionEnd::Moved => (InboxStatus::Shut, None),
            SubscriptionEnd::NotOpened(error) => (InboxStatus::Shut, Some(dial.failure(error))),
            SubscriptionEnd::Failed(error) => {
                (InboxStatus::Shut, Some(store_error(StoreErrorKind::Unavailable, error)))
            }
            SubscriptionEnd::Refused(error) => {
                (InboxStatus::Refused, Some(store_error(StoreErrorKind::Refused, error)))
            }
        };
        if let Some(why) = why {
            let is_news = told.is_news(&why);
            warn_if!(log::REDIS, is_news, reason = %reason(&why), "no notifications; waits end by their timers");
            reader.suspect_commands();
        }
        if !reader.enter(status) {
            return;
        }
        if status == InboxStatus::Refused {
            sleep(REFUSED).await;
            continue;
        }
        backoff.pause().await;
        // Before the commands are connected, a subscription might be opened at another server and have to move at once.
        while reader.commands_are_down() {
            if generations.changed().await.is_err() {
                return;
            }
        }
    }
}

/// One subscription, from opening the connection to its end.
async fn subscribed(
    reader: &InboxReader,
    dial: &Connector,
    generations: &mut watch::Receiver<u64>,
    channel: &str,
    confirmed_at: &mut Option<Instant>,
) -> SubscriptionEnd {
    let mut generation = *generations.borrow_and_update();
    let Inbound { messages, at, login } = match dial.inbox().await {
        Ok(inbound) => inbound,
        Err(error) => return SubscriptionEnd::NotOpened(error),
    };
    let (mut sink, mut messages) = messages.split();
    if let Err(error) = bounded(PING, sink.subscribe(channel)).await {
        let refused = judge(&error).0 == StoreErrorKind::Refused;
        return if refused { SubscriptionEnd::Refused(error) } else { SubscriptionEnd::Failed(error) };
    }
    if !reader.enter(InboxStatus::Confirmed) {
        return SubscriptionEnd::Dropped;
    }
    *confirmed_at = Some(Instant::now());
    reader.note(Vitals::heard);
    tracing::debug!(target: log::REDIS, "notifications arrive");
    let mut pings = std::pin::pin!(tend(sink, reader, dial, login));
    loop {
        tokio::select! {
            message = messages.next() => match message {
                Some(message) => match reader.inbox.upgrade() {
                    Some(inbox) => {
                        inbox.vitals.heard();
                        inbox.deliver(message.get_payload_bytes());
                    }
                    None => return SubscriptionEnd::Dropped,
                },
                None => return SubscriptionEnd::Failed(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
            },
            error = &mut pings => return SubscriptionEnd::Failed(error),
            changed = generations.changed() => {
                let latest = *generations.borrow_and_update();
                if changed.is_err() {
                    return SubscriptionEnd::Dropped;
                }
                if dial.has_left(at.as_deref(), generation, latest) {
                    return SubscriptionEnd::Moved;
                }
                generation = latest;
            }
        }
    }
}

/// Pings the server until a ping is not answered, and logs the connection in with later credentials.
async fn tend(mut sink: MessageSink, reader: &InboxReader, dial: &Connector, mut login: u64) -> RedisError {
    let mut ping_at = Instant::now() + PING;
    loop {
        tokio::select! {
            () = sleep_until(ping_at) => {
                reader.note(Vitals::asked);
                if let Err(error) = bounded(PING, sink.ping()).await {
                    return error;
                }
                reader.note(Vitals::answered);
                ping_at = Instant::now() + PING;
            }
            issue = dial.login.later_than(login) => {
                match dial.log_in_for_messages(&mut sink, login, &issue).await {
                    Ok(present) => login = present,
                    Err(error) => return error,
                }
            }
        }
    }
}
