//! The connection for the messages of all nodes that share it: one subscription for each node, to its own channel.
//!
//! A background task subscribes, passes messages on, and subscribes again after a failure. The connection knows each node
//! as a [`Recipient`], which it notifies of changes of its status. [`Liveness`] records pings and received messages.

#[cfg(test)]
#[path = "../../../tests/unit/store/redis/subscriber_tests.rs"]
mod tests;

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use redis::{RedisError, RedisResult};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};
use uuid::Uuid;

use crate::health::LinkState;
use crate::observe::{log, warn_if};
use crate::store::protocol::read_id;
use crate::store::redis::commands::Commands;
use crate::store::redis::connection::connector::{Connector, Inbound, MessageSink};
use crate::store::redis::errors::{OutageLog, bounded, classify, io_error_of, reason, store_error};
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;
use crate::task::{Backoff, EndedTask, OwnedTask, STABLE, TaskOwner, TaskRef};

/// The channel of a node. The doctor uses a new UUID, whose channel belongs to no node.
pub(crate) fn channel(node: Uuid) -> String {
    format!("sg1:i:{}", node.simple())
}

/// The node that this channel belongs to.
fn node_of(channel: &str) -> Option<Uuid> {
    read_id(channel.strip_prefix("sg1:i:")?.as_bytes())
}

pub(crate) struct Subscriber {
    pub(super) connector: Connector,
    commands: Commands,
    /// The nodes that need messages.
    recipients: watch::Sender<Recipients>,
    task: OwnedTask,
    pub(super) liveness: Liveness,
}

/// The recipients, by the ids of their nodes.
type Recipients = HashMap<Uuid, Weak<dyn Recipient>>;

impl Subscriber {
    pub(super) fn new(connector: Connector, commands: Commands) -> Arc<Self> {
        Arc::new(Self {
            connector,
            commands,
            recipients: watch::Sender::default(),
            task: OwnedTask::default(),
            liveness: Liveness::default(),
        })
    }

    /// Adds a node, unless it has ended; then returns false. Its channel is subscribed to as soon as there is a connection.
    pub(super) fn take<R: Recipient + 'static>(&self, node: Uuid, recipient: &Arc<R>) -> bool {
        let (mut is_open, entry) = (false, Arc::downgrade(recipient));
        self.recipients.send_if_modified(|all| {
            is_open = !recipient.has_ended();
            is_open && all.insert(node, entry).is_none()
        });
        is_open
    }

    /// Removes a node that ends. The connection unsubscribes from its channel: a lease that was granted by a message there would find
    /// no waiter.
    pub(super) fn release(&self, node: Uuid, recipient: &impl Recipient) {
        self.recipients.send_if_modified(|all| {
            recipient.set(InboxStatus::Closed);
            all.remove(&node).is_some()
        });
    }

    /// Ends the connection.
    pub(crate) fn close(&self) {
        self.task.close();
        self.liveness.lost();
    }

    fn all(&self) -> Vec<Arc<dyn Recipient>> {
        self.recipients.borrow().values().filter_map(Weak::upgrade).collect()
    }

    /// Passes a message on to the node that has this channel.
    fn deliver(&self, node: Uuid, payload: &[u8]) {
        self.liveness.heard();
        let recipient = self.recipients.borrow().get(&node).and_then(Weak::upgrade);
        if let Some(recipient) = recipient {
            recipient.deliver(payload);
        }
    }

    /// The state of the connection for a node whose subscription is missing.
    pub(super) fn opening(&self) -> LinkState {
        match () {
            () if self.liveness.silent_for().is_some() => LinkState::Down,
            () if !self.task.is_running() => LinkState::Idle,
            () if self.commands.down().is_some() => LinkState::Down,
            () => LinkState::Connecting,
        }
    }
}

/// The part of a node that receives its messages.
pub(super) trait Recipient: Send + Sync {
    /// Changes the status, unless it is `Closed`, which is final. Returns whether it has changed.
    fn set(&self, status: InboxStatus) -> bool;

    /// Whether the status is `Closed`.
    fn has_ended(&self) -> bool;

    /// Handles a message.
    fn deliver(&self, payload: &[u8]);

    /// Handles that messages were lost or will be: wakes each waiter for a lease, and the holders and the first waiter of each lock.
    fn notify_missed(&self);

    /// Queries in a background task which other waiters of locks have missed a message. `status` has just changed.
    fn find_lost_messages(&self, status: InboxStatus);
}

/// Whether a node's messages arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InboxStatus {
    /// There is no subscription at present.
    Shut,
    /// The subscription was confirmed, and every ping since then was answered in time.
    Confirmed,
    /// The server does not allow this user to subscribe.
    Refused,
    /// The node has ended.
    Closed,
}

/// How often the server is pinged, and how long its answer may take. A connection that only receives gives no sign when
/// it dies.
const PING: Duration = Duration::from_secs(1);

/// How often a refused subscription is retried: rights change seldom.
const REFUSED: Duration = Duration::from_secs(30);

impl Subscriber {
    /// Opens the connection in the background, if it is not open.
    pub(super) fn open(self: &Arc<Self>) {
        if !self.task.is_running() {
            self.task.start(self, |task| {
                let changes = (self.commands.generations(), self.recipients.subscribe());
                serve(task, self.connector.clone(), changes).map(drop)
            });
        }
    }
}

impl TaskOwner for Subscriber {
    fn owned_task(&self) -> &OwnedTask {
        &self.task
    }

    fn task_ended(&self, ended: EndedTask<'_>) {
        let all = self.all();
        for recipient in changed(&all, InboxStatus::Shut) {
            recipient.notify_missed();
        }
        self.liveness.lost();
        drop(ended);
    }
}

/// Changes the status of these recipients; returns those whose status has changed. They must be notified after that, because a
/// woken waiter checks whether hints arrive.
fn changed(recipients: &[Arc<dyn Recipient>], status: InboxStatus) -> Vec<&Arc<dyn Recipient>> {
    recipients.iter().filter(|recipient| recipient.set(status)).collect()
}

impl TaskRef<Subscriber> {
    /// Changes the status of these recipients, unless the connection is closed or has another task. A background task for each
    /// node then queries which other waiters of locks have missed a message.
    fn enter(&self, status: InboxStatus, recipients: &[Arc<dyn Recipient>]) -> Option<()> {
        for recipient in self.with(|_| changed(recipients, status))? {
            recipient.notify_missed();
        }
        for recipient in recipients {
            recipient.find_lost_messages(status);
        }
        Some(())
    }

    /// Changes the status of all recipients.
    fn enter_all(&self, status: InboxStatus) -> Option<()> {
        self.enter(status, &self.owner()?.all())
    }

    fn with_owner<T>(&self, act: impl FnOnce(&Subscriber) -> T) -> Option<T> {
        self.owner().map(|subscriber| act(&subscriber))
    }
}

/// Why the subscriptions of one connection failed or ended.
enum SubscriptionEnd {
    NotOpened(RedisError),
    Failed(RedisError),
    /// This user has no right to SUBSCRIBE.
    Refused(RedisError),
    /// The commands use a new connection, perhaps to another server.
    Moved,
    Dropped,
}

impl From<RedisError> for SubscriptionEnd {
    fn from(error: RedisError) -> Self {
        if classify(&error).0 == StoreErrorKind::Refused { Self::Refused(error) } else { Self::Failed(error) }
    }
}

impl SubscriptionEnd {
    /// The status of the nodes after this end, and the reason to log; `None` if there is no subscriber any more.
    fn status(self, connector: &Connector) -> Option<(InboxStatus, Option<StoreError>)> {
        Some(match self {
            Self::Dropped => return None,
            Self::Moved => (InboxStatus::Shut, None),
            Self::NotOpened(error) => (InboxStatus::Shut, Some(connector.failure(error))),
            Self::Failed(error) => (InboxStatus::Shut, Some(store_error(StoreErrorKind::Unavailable, error))),
            Self::Refused(error) => (InboxStatus::Refused, Some(store_error(StoreErrorKind::Refused, error))),
        })
    }
}

/// Maintains the subscriptions while the subscriber exists.
async fn serve(
    reader: TaskRef<Subscriber>,
    connector: Connector,
    (mut generations, mut recipients): (watch::Receiver<u64>, watch::Receiver<Recipients>),
) -> Option<Infallible> {
    let mut backoff = Backoff::new();
    let mut outage_log = OutageLog::default();
    loop {
        let mut confirmed_at = None;
        let Err(end) =
            subscribed(&reader, &connector, (&mut generations, &mut recipients), &mut confirmed_at).await;
        let connected_for = confirmed_at.map_or(Duration::ZERO, |at: Instant| at.elapsed());
        backoff.connected_for(connected_for);
        if connected_for >= STABLE {
            outage_log.forget();
        }
        let (status, why) = end.status(&connector)?;
        if let Some(why) = why {
            let is_news = outage_log.is_news(&why);
            warn_if!(log::REDIS, is_news, reason = %reason(&why), "no notifications; waits end by their timers");
            // The server of the commands' connection may be down, too.
            reader.with_owner(|subscriber| subscriber.commands.suspect());
        }
        reader.with_owner(|subscriber| subscriber.liveness.lost());
        reader.enter_all(status)?;
        if status == InboxStatus::Refused {
            let again_at = Instant::now() + REFUSED;
            // A node that has just joined waits for its status.
            while let Ok(changed) = timeout_at(again_at, recipients.changed()).await {
                changed.ok()?;
                reader.enter_all(status)?;
            }
            continue;
        }
        backoff.pause().await;
        // Before the connection for commands is open, a subscription might be opened at another server and have to move at once.
        while reader.with_owner(|subscriber| subscriber.commands.has_to_wait()) == Some(true) {
            generations.changed().await.ok()?;
        }
    }
}

/// The subscriptions of one connection, from its opening to its end.
async fn subscribed(
    reader: &TaskRef<Subscriber>,
    connector: &Connector,
    (generations, recipients): (&mut watch::Receiver<u64>, &mut watch::Receiver<Recipients>),
    confirmed_at: &mut Option<Instant>,
) -> Result<Infallible, SubscriptionEnd> {
    let mut generation = *generations.borrow_and_update();
    let inbound = connector.inbox().await.map_err(SubscriptionEnd::NotOpened)?;
    let Inbound { sink, mut messages, at, login } = inbound;
    let mut channels = Channels { reader, sink, subscribed: HashSet::new() };
    channels.follow(recipients).await?;
    *confirmed_at = Some(Instant::now());
    reader.with_owner(|subscriber| subscriber.liveness.heard());
    tracing::debug!(target: log::REDIS, "notifications arrive");
    let mut tending = std::pin::pin!(channels.tend(connector, login, recipients));
    loop {
        tokio::select! {
            message = messages.next() => {
                let message = message.ok_or_else(|| SubscriptionEnd::Failed(io_error_of(io::ErrorKind::BrokenPipe)))?;
                let subscriber = reader.owner().ok_or(SubscriptionEnd::Dropped)?;
                if let Some(node) = node_of(message.get_channel_name()) {
                    subscriber.deliver(node, message.get_payload_bytes());
                }
            }
            error = &mut tending => return Err(error.into()),
            changed = generations.changed() => {
                let latest = *generations.borrow_and_update();
                changed.map_err(|_| SubscriptionEnd::Dropped)?;
                if connector.has_left(at.as_deref(), generation, latest) {
                    return Err(SubscriptionEnd::Moved);
                }
                generation = latest;
            }
        }
    }
}

/// The channels that a connection is subscribed to.
struct Channels<'a> {
    reader: &'a TaskRef<Subscriber>,
    sink: MessageSink,
    subscribed: HashSet<Uuid>,
}

impl Channels<'_> {
    /// Subscribes to the channels of nodes that have joined, and leaves those of nodes that have ended.
    async fn follow(&mut self, recipients: &mut watch::Receiver<Recipients>) -> RedisResult<()> {
        let present = recipients.borrow_and_update().clone();
        let joined: Vec<_> = present.iter().filter(|(node, _)| !self.subscribed.contains(node)).collect();
        if !joined.is_empty() {
            let channels: Vec<_> = joined.iter().map(|(node, _)| channel(**node)).collect();
            bounded(PING, self.sink.subscribe(channels)).await?;
            let joined: Vec<_> = joined.iter().filter_map(|(_, recipient)| recipient.upgrade()).collect();
            self.reader.enter(InboxStatus::Confirmed, &joined);
        }
        let ended = self.subscribed.iter().filter(|node| !present.contains_key(node));
        let ended: Vec<_> = ended.map(|node| channel(*node)).collect();
        if !ended.is_empty() {
            bounded(PING, self.sink.unsubscribe(ended)).await?;
        }
        self.subscribed = present.into_keys().collect();
        Ok(())
    }

    /// Pings the server until a ping is not answered, logs the connection in with later credentials, and follows the nodes.
    async fn tend(
        mut self,
        connector: &Connector,
        mut login: u64,
        recipients: &mut watch::Receiver<Recipients>,
    ) -> RedisError {
        let mut ping_at = Instant::now() + PING;
        loop {
            let done = tokio::select! {
                () = sleep_until(ping_at) => {
                    self.reader.with_owner(|subscriber| subscriber.liveness.ping_sent());
                    let answered = bounded(PING, self.sink.ping()).await;
                    if answered.is_ok() {
                        self.reader.with_owner(|subscriber| subscriber.liveness.answered());
                        ping_at = Instant::now() + PING;
                    }
                    answered.map(drop)
                }
                issue = connector.login.later_than(login) => {
                    connector.log_in_for_messages(&mut self.sink, login, &issue).await.map(|present| login = present)
                }
                Ok(()) = recipients.changed() => self.follow(recipients).await,
            };
            if let Err(error) = done {
                return error;
            }
        }
    }
}

/// When the connection last sent a ping and last received anything.
#[derive(Default)]
pub(crate) struct Liveness(Mutex<LivenessTimes>);

#[derive(Default)]
struct LivenessTimes {
    received_at: Option<Instant>,
    /// When the ping that is not answered yet was sent; `None` if each was answered.
    ping_sent_at: Option<Instant>,
    /// How long the answer to the latest answered ping took; `None` before the first on this connection.
    lag: Option<Duration>,
}

impl Liveness {
    /// The server has sent a message or an answer.
    fn heard(&self) {
        lock(&self.0).received_at = Some(Instant::now());
    }

    /// A ping was sent.
    fn ping_sent(&self) {
        lock(&self.0).ping_sent_at = Some(Instant::now());
    }

    /// The ping was answered.
    fn answered(&self) {
        let (mut times, now) = (lock(&self.0), Instant::now());
        // `None`: the connection was lost meanwhile.
        if let Some(sent_at) = times.ping_sent_at.take() {
            times.lag = Some(now.saturating_duration_since(sent_at));
        }
        times.received_at = Some(now);
    }

    /// The connection was lost or replaced: its pending ping and its lag are forgotten, but not when it last received something.
    fn lost(&self) {
        let mut times = lock(&self.0);
        (times.ping_sent_at, times.lag) = (None, None);
    }

    /// How long the answer to the latest ping took, or how long the present ping has been waiting, if that is longer.
    pub(crate) fn lag(&self) -> Option<Duration> {
        let times = lock(&self.0);
        times.lag.max(times.ping_sent_at.map(|sent_at| sent_at.elapsed()))
    }

    /// How long ago the latest message or answer arrived; `None` before the first.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        lock(&self.0).received_at.map(|at| at.elapsed())
    }
}

#[cfg(test)]
mod liveness_tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_lag_is_that_of_the_latest_answer_or_of_a_pending_ping_if_longer() {
        let (liveness, ms) = (Liveness::default(), Duration::from_millis);
        let pass = async |time| tokio::time::advance(time).await;
        pass(ms(1)).await;
        assert_eq!((liveness.lag(), liveness.silent_for()), (None, None));
        liveness.heard();
        liveness.ping_sent();
        pass(ms(5)).await;
        assert_eq!((liveness.lag(), liveness.silent_for()), (Some(ms(5)), Some(ms(5))));
        liveness.answered();
        pass(ms(100)).await;
        assert_eq!((liveness.lag(), liveness.silent_for()), (Some(ms(5)), Some(ms(100))));
        liveness.ping_sent();
        pass(ms(3)).await;
        assert_eq!(liveness.lag(), Some(ms(5)));
        pass(ms(3)).await;
        assert_eq!(liveness.lag(), Some(ms(6)));
        liveness.lost();
        assert_eq!(liveness.lag(), None);
        liveness.answered();
        assert_eq!(liveness.lag(), None, "it came too late");
        liveness.ping_sent();
        liveness.answered();
        assert_eq!(liveness.lag(), Some(Duration::ZERO));
    }
}
