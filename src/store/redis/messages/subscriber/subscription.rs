//! The task that keeps the subscriptions: subscribes, listens, subscribes again.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{RedisError, RedisResult};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use super::vitals::Vitals;
use super::{InboxStatus, Recipient, Recipients, Subscriber};
use crate::observe::{log, warn_if};
use crate::store::StoreErrorKind;
use crate::store::redis::backoff::{Backoff, STABLE};
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

impl Subscriber {
    /// Opens the connection in the background, if it is not open.
    pub(in crate::store::redis::messages) fn open(self: &Arc<Self>) {
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
        let reader = MessageReader { subscriber: Arc::downgrade(self), number };
        let news = (self.commands.generations(), self.recipients.subscribe());
        // Outside the lock: a runtime that is being shut down drops the task inside `spawn`, and dropping the reader
        // takes the lock.
        let spawned = runtime.spawn(serve(reader, self.dial.clone(), news));
        let mut task = self.task();
        if task.number == number && !task.closed {
            task.handle = Some(spawned.abort_handle());
        } else {
            spawned.abort();
        }
    }
}

/// The task's reference to the subscriber. Weak: dropping the last store ends its task.
struct MessageReader {
    subscriber: Weak<Subscriber>,
    number: u64,
}

impl Drop for MessageReader {
    /// The task ended, with its runtime or by a panic: the next ACQUIRE starts another.
    fn drop(&mut self) {
        let Some(subscriber) = self.subscriber.upgrade() else { return };
        if subscriber.enter(self.number, InboxStatus::Shut, &subscriber.all()) {
            subscriber.vitals.lost();
            subscriber.task().handle = None;
            // Last, because from here on there may be another task.
            subscriber.running.store(false, Ordering::Release);
        }
    }
}

impl MessageReader {
    /// As [`Subscriber::enter`]. A background task for each node then asks the server which other waiters of locks have missed a
    /// message.
    fn enter(&self, status: InboxStatus, recipients: &[Arc<dyn Recipient>]) -> bool {
        let entered = self.subscriber.upgrade().is_some_and(|to| to.enter(self.number, status, recipients));
        if entered {
            recipients.iter().for_each(|recipient| recipient.look_for_losses(status));
        }
        entered
    }

    /// All recipients enter this status.
    fn enter_all(&self, status: InboxStatus) -> bool {
        self.subscriber.upgrade().is_some_and(|to| self.enter(status, &to.all()))
    }

    /// Records an event of the connection.
    fn note(&self, what: impl FnOnce(&Vitals)) {
        if let Some(subscriber) = self.subscriber.upgrade() {
            what(&subscriber.vitals);
        }
    }

    fn commands_have_to_wait(&self) -> bool {
        self.subscriber.upgrade().is_some_and(|subscriber| subscriber.commands.has_to_wait())
    }

    /// Has the commands' connection checked, because its server may be gone, too.
    fn suspect_commands(&self) {
        if let Some(subscriber) = self.subscriber.upgrade() {
            subscriber.commands.suspect();
        }
    }
}

/// Why the subscriptions failed or ended.
enum SubscriptionEnd {
    NotOpened(RedisError),
    Failed(RedisError),
    /// This user has no right to SUBSCRIBE.
    Refused(RedisError),
    /// The commands use a new connection, perhaps to another server.
    Moved,
    Dropped,
}

impl SubscriptionEnd {
    fn after(error: RedisError) -> Self {
        if judge(&error).0 == StoreErrorKind::Refused { Self::Refused(error) } else { Self::Failed(error) }
    }
}

/// Keeps the subscriptions while the subscriber exists. No strong reference lives across an await, or the connection of
/// dropped stores would outlive them.
async fn serve(
    reader: MessageReader,
    dial: Connector,
    (mut generations, mut recipients): (watch::Receiver<u64>, watch::Receiver<Recipients>),
) {
    let mut backoff = Backoff::new();
    // The reasons logged of the present outage.
    let mut told = OutageLog::default();
    loop {
        let mut confirmed_at = None;
        let end = subscribed(&reader, &dial, (&mut generations, &mut recipients), &mut confirmed_at).await;
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
        reader.note(Vitals::lost);
        if !reader.enter_all(status) {
            return;
        }
        if status == InboxStatus::Refused {
            let again_at = Instant::now() + REFUSED;
            loop {
                tokio::select! {
                    () = sleep_until(again_at) => break,
                    // A node that has joined waits for an answer.
                    changed = recipients.changed() => if changed.is_err() || !reader.enter_all(status) { return },
                }
            }
            continue;
        }
        backoff.pause().await;
        // Before the commands are connected, a subscription might be opened at another server and have to move at once.
        while reader.commands_have_to_wait() {
            if generations.changed().await.is_err() {
                return;
            }
        }
    }
}

/// The subscriptions of one connection, from its opening to its end.
async fn subscribed(
    reader: &MessageReader,
    dial: &Connector,
    (generations, recipients): (&mut watch::Receiver<u64>, &mut watch::Receiver<Recipients>),
    confirmed_at: &mut Option<Instant>,
) -> SubscriptionEnd {
    let mut generation = *generations.borrow_and_update();
    let Inbound { messages, at, login } = match dial.inbox().await {
        Ok(inbound) => inbound,
        Err(error) => return SubscriptionEnd::NotOpened(error),
    };
    let (sink, mut messages) = messages.split();
    let mut channels = Channels { reader, sink, subscribed: HashSet::new() };
    if let Err(error) = channels.follow(recipients).await {
        return SubscriptionEnd::after(error);
    }
    *confirmed_at = Some(Instant::now());
    reader.note(Vitals::heard);
    tracing::debug!(target: log::REDIS, "notifications arrive");
    let mut tending = std::pin::pin!(channels.tend(dial, login, recipients));
    loop {
        tokio::select! {
            message = messages.next() => match message {
                Some(message) => match reader.subscriber.upgrade() {
                    Some(subscriber) => {
                        if let Some(node) = message::node_of(message.get_channel_name()) {
                            subscriber.deliver(node, message.get_payload_bytes());
                        }
                    }
                    None => return SubscriptionEnd::Dropped,
                },
                None => return SubscriptionEnd::Failed(RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))),
            },
            error = &mut tending => return SubscriptionEnd::after(error),
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

/// The channels that a connection is subscribed to.
struct Channels<'a> {
    reader: &'a MessageReader,
    sink: MessageSink,
    subscribed: HashSet<Uuid>,
}

impl Channels<'_> {
    /// Subscribes to the channels of nodes that have joined, and leaves those of nodes that have ended.
    async fn follow(&mut self, recipients: &mut watch::Receiver<Recipients>) -> RedisResult<()> {
        let present = recipients.borrow_and_update().clone();
        let joined: Vec<_> = present.iter().filter(|(node, _)| !self.subscribed.contains(node)).collect();
        if !joined.is_empty() {
            let channels: Vec<_> = joined.iter().map(|(node, _)| message::channel(**node)).collect();
            bounded(PING, self.sink.subscribe(channels)).await?;
            let joined: Vec<_> = joined.iter().filter_map(|(_, recipient)| recipient.upgrade()).collect();
            self.reader.enter(InboxStatus::Confirmed, &joined);
        }
        let ended = self.subscribed.iter().filter(|node| !present.contains_key(node));
        let ended: Vec<_> = ended.map(|node| message::channel(*node)).collect();
        if !ended.is_empty() {
            bounded(PING, self.sink.unsubscribe(ended)).await?;
        }
        self.subscribed = present.into_keys().collect();
        Ok(())
    }

    /// Pings the server until a ping is not answered, logs the connection in with later credentials, and follows the nodes.
    async fn tend(
        mut self,
        dial: &Connector,
        mut login: u64,
        recipients: &mut watch::Receiver<Recipients>,
    ) -> RedisError {
        let mut ping_at = Instant::now() + PING;
        loop {
            let done = tokio::select! {
                () = sleep_until(ping_at) => {
                    self.reader.note(Vitals::asked);
                    let answered = bounded(PING, self.sink.ping()).await;
                    if answered.is_ok() {
                        self.reader.note(Vitals::answered);
                        ping_at = Instant::now() + PING;
                    }
                    answered.map(drop)
                }
                issue = dial.login.later_than(login) => {
                    dial.log_in_for_messages(&mut self.sink, login, &issue).await.map(|present| login = present)
                }
                Ok(()) = recipients.changed() => self.follow(recipients).await,
            };
            if let Err(error) = done {
                return error;
            }
        }
    }
}
