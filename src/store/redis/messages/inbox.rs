//! Receives the messages that the scripts of other nodes publish on one node's own channel.
//!
//! The subscription lasts as long as the node. Every message is only a hint: without the connection (the server refuses
//! SUBSCRIBE, or is down), all waits end by their timers.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::sync::watch;
use uuid::Uuid;

use super::message::{self, Message};
use super::subscriber::{InboxStatus, Recipient, Subscriber};
use crate::health::LinkState;
use crate::store::Token;
use crate::store::redis::commands::Commands;
use crate::store::redis::commands::entry_steps::hand_over;
use crate::store::redis::commands::lock_queue::find_lost_messages;
use crate::store::redis::commands::lock_steps::give_back;
use crate::store::volume::VolumeListener;
use crate::store::wake_leases::{Hint, LeaseWaiters};
use crate::store::wake_locks::{LockHint, LockWaiters};

pub(crate) struct Inbox {
    /// The connection.
    subscriber: Arc<Subscriber>,
    commands: Commands,
    /// Minted at the first use: a process that was forked before that becomes a separate node.
    node: OnceLock<Uuid>,
    watches: Arc<LeaseWaiters>,
    grants: Arc<LockWaiters>,
    /// The receiver of messages about this node's volume; empty for a node without one.
    volume: OnceLock<Weak<dyn VolumeListener>>,
    /// Whether the subscriber has this node; every ACQUIRE checks it.
    has_joined: AtomicBool,
    /// Changed under the subscriber's lock only.
    status: watch::Sender<InboxStatus>,
}

impl Inbox {
    pub(crate) fn new(
        subscriber: &Arc<Subscriber>,
        commands: Commands,
        watches: Arc<LeaseWaiters>,
        grants: Arc<LockWaiters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            subscriber: Arc::clone(subscriber),
            commands,
            node: OnceLock::new(),
            watches,
            grants,
            volume: OnceLock::new(),
            has_joined: AtomicBool::new(false),
            status: watch::Sender::new(InboxStatus::Shut),
        })
    }

    /// The id of the node that this inbox belongs to.
    pub(crate) fn node(&self) -> Uuid {
        *self.node.get_or_init(Uuid::new_v4)
    }

    /// Opens the connection in the background, if it is not open, and subscribes to this node's channel.
    pub(crate) fn open(self: &Arc<Self>) {
        if !self.has_joined.load(Ordering::Acquire) && self.subscriber.take(self.node(), self) {
            self.has_joined.store(true, Ordering::Release);
        }
        self.subscriber.open();
    }

    /// Whether messages of other nodes arrive at present.
    pub(crate) fn hears(&self) -> bool {
        self.status() == InboxStatus::Confirmed
    }

    fn status(&self) -> InboxStatus {
        *self.status.borrow()
    }

    /// Waits until the subscription is confirmed, or refused for good.
    pub(crate) async fn settled(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| !matches!(status, InboxStatus::Shut | InboxStatus::Closed)).await;
    }

    pub(crate) fn close(&self) {
        self.subscriber.release(self.node(), self);
        self.notify_missed();
    }

    /// Sends messages about this node's volume to `listener`. A later listener is ignored.
    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        let _ = self.volume.set(listener);
    }

    fn listener(&self) -> Option<Arc<dyn VolumeListener>> {
        self.volume.get()?.upgrade()
    }

    /// The state of the subscription.
    pub(crate) fn link(&self) -> LinkState {
        match self.status() {
            InboxStatus::Closed => LinkState::Closed,
            InboxStatus::Confirmed => LinkState::Up,
            InboxStatus::Refused => LinkState::Refused,
            InboxStatus::Shut => self.subscriber.opening(),
        }
    }

    /// How long ago a message or the answer to a ping arrived.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.subscriber.liveness.silent_for()
    }

    /// How long the answer to the latest ping took, or how long the present ping has been waiting,
    /// if that is longer.
    pub(crate) fn lag(&self) -> Option<Duration> {
        self.subscriber.liveness.lag()
    }

    /// Whether this node minted the token. Other clients may publish to this channel, too.
    fn is_own(&self, token: &Token) -> bool {
        token.node() == self.node().simple().to_string()
    }
}

impl Recipient for Inbox {
    fn set(&self, status: InboxStatus) -> bool {
        let set = |before: &mut InboxStatus| {
            *before != InboxStatus::Closed && std::mem::replace(before, status) != status
        };
        self.status.send_if_modified(set)
    }

    fn has_ended(&self) -> bool {
        self.status() == InboxStatus::Closed
    }

    /// Passes a message on to its waiter. Anything else is ignored.
    fn deliver(&self, payload: &[u8]) {
        match message::parse(payload) {
            Some(Message::Hint(name, hint)) => {
                let has_waiter = self.watches.notify(name, &hint);
                match hint {
                    // The waiter has left: pass its lease on, or it stays unused until it expires.
                    Hint::Granted { token, hops } if !has_waiter && self.is_own(&token) => {
                        let (commands, name) = (self.commands.clone(), name.to_owned());
                        let within = self.subscriber.connector.answer;
                        tokio::spawn(async move {
                            let _ = hand_over(&commands, &name, &token, None, (hops, false), within).await;
                        });
                    }
                    _ => {}
                }
            }
            Some(Message::Granted { token, fence, lock }) => {
                let has_waiter = self.grants.notify(&token, LockHint::Granted { fence }).is_some();
                // Invariant 5 of locks: no waiter received this grant, so this node gives it back.
                if !has_waiter && self.is_own(&token) {
                    tokio::spawn(give_back(
                        self.commands.clone(),
                        lock,
                        token,
                        self.subscriber.connector.answer,
                    ));
                }
            }
            Some(Message::LockNotified(token, notify)) => drop(self.grants.notify(&token, notify)),
            Some(Message::Sooner(key)) => drop(self.grants.notify_missed(key, None)),
            Some(Message::Announced(announcement)) => {
                if let Some(listener) = self.listener() {
                    listener.announced(&announcement);
                }
            }
            Some(Message::Acknowledged { id, by }) => {
                if let Some(listener) = self.listener() {
                    listener.acknowledged(id, by);
                }
            }
            None => {}
        }
    }

    fn notify_missed(&self) {
        self.watches.notify_all_missed();
        self.grants.notify_firsts_missed();
        if let Some(listener) = self.listener() {
            listener.missed();
        }
    }

    fn find_lost_messages(&self, status: InboxStatus) {
        let request = (self.commands.clone(), self.node(), self.subscriber.connector.answer);
        tokio::spawn(find_lost_messages(request, Arc::clone(&self.grants), status != InboxStatus::Shut));
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("status", &self.status()).finish_non_exhaustive()
    }
}
