//! The connection on which other nodes' scripts wake this one.
//!
//! It has one subscription, to this node's own channel, for as long as the node lives; every message
//! is a hint. Without the connection (the server refuses SUBSCRIBE, or is gone), all waits end by
//! their timers.

mod subscription;
#[cfg(test)]
mod tests;
mod vitals;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

use vitals::Vitals;

use super::message::{self, Message};
use crate::health::LinkState;
use crate::store::Token;
use crate::store::redis::commands::Commands;
use crate::store::redis::commands::lease_end::hand_over;
use crate::store::redis::commands::lock_scripts::give_back;
use crate::store::redis::connection::connector::Connector;
use crate::store::volume_store::VolumeListener;
use crate::store::wake::lease_waiters::{Hint, LeaseWaiters};
use crate::store::wake::lock_waiters::{LockHint, LockWaiters};

pub(crate) struct Inbox {
    dial: Connector,
    /// Minted at the first use: a process that was forked before that becomes a separate node.
    node: OnceLock<Uuid>,
    commands: Commands,
    watches: Arc<LeaseWaiters>,
    grants: Arc<LockWaiters>,
    /// The receiver of messages about this node's volume; empty for a node without one.
    volume: OnceLock<Weak<dyn VolumeListener>>,
    task: Mutex<InboxTask>,
    /// Whether there is a task; outside the lock, because every ACQUIRE checks it.
    running: AtomicBool,
    status: watch::Sender<InboxStatus>,
    vitals: Vitals,
}

#[derive(Default)]
struct InboxTask {
    /// Counts tasks: one that was replaced must not change the state any more.
    number: u64,
    handle: Option<AbortHandle>,
    closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InboxStatus {
    /// No subscription, or not yet.
    Shut,
    /// The subscription was confirmed, and every ping since then was answered in time.
    Confirmed,
    /// The server does not allow it.
    Refused,
}

impl Inbox {
    pub(crate) fn new(
        dial: Connector,
        commands: Commands,
        watches: Arc<LeaseWaiters>,
        grants: Arc<LockWaiters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            dial,
            node: OnceLock::new(),
            commands,
            watches,
            grants,
            volume: OnceLock::new(),
            task: Mutex::default(),
            running: AtomicBool::new(false),
            status: watch::Sender::new(InboxStatus::Shut),
            vitals: Vitals::new(),
        })
    }

    /// The id of the node that this inbox belongs to.
    pub(crate) fn node(&self) -> Uuid {
        *self.node.get_or_init(Uuid::new_v4)
    }

    /// Whether messages of other nodes arrive at present.
    pub(crate) fn hears(&self) -> bool {
        *self.status.borrow() == InboxStatus::Confirmed
    }

    /// Waits until the subscription is confirmed, or refused for good.
    pub(crate) async fn settled(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| *status != InboxStatus::Shut).await;
    }

    pub(crate) fn close(&self) {
        let handle = {
            let mut task = self.task();
            task.closed = true;
            self.status.send_replace(InboxStatus::Shut);
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
        if let Some(listener) = self.listener() {
            listener.missed();
        }
    }

    /// Sends messages about this node's volume to `listener`; the first stays.
    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        let _ = self.volume.set(listener);
    }

    fn listener(&self) -> Option<Arc<dyn VolumeListener>> {
        self.volume.get()?.upgrade()
    }

    /// Changes the status on behalf of task `number`, and wakes each waiter for a lease and the
    /// first waiter of each lock, because hints were lost or will be. False if that task was
    /// replaced or the inbox is closed.
    fn enter(&self, number: u64, status: InboxStatus) -> bool {
        let changed = {
            let task = self.task();
            if task.number != number || task.closed {
                return false;
            }
            self.status.send_if_modified(|before| std::mem::replace(before, status) != status)
        };
        // The status first: a woken waiter checks whether hints arrive.
        if changed {
            self.vitals.lost();
            self.tell_missed();
        }
        true
    }

    /// Passes a message on to its waiter. Anything else is ignored.
    fn deliver(self: &Arc<Self>, payload: &[u8]) {
        match message::parse(payload) {
            Some(Message::Hint(name, hint)) => {
                let heard = self.watches.tell(name, &hint);
                match hint {
                    // The waiter has left: pass its lease on, or it stays unused until it expires.
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
                let heard = self.grants.tell(&token, LockHint::Granted { fence }).is_some();
                // Invariant 5 of `locks`.
                if !heard && self.is_own(&token) {
                    tokio::spawn(give_back(self.commands.clone(), lock, token, self.dial.answer));
                }
            }
            Some(Message::Told(token, tell)) => drop(self.grants.tell(&token, tell)),
            Some(Message::Sooner(key)) => drop(self.grants.tell_missed(key, None)),
            Some(Message::Announced(heard)) => {
                if let Some(listener) = self.listener() {
                    listener.announced(&heard);
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

    /// The state of the subscription.
    pub(crate) fn link(&self) -> LinkState {
        if self.task().closed {
            return LinkState::Closed;
        }
        match *self.status.borrow() {
            InboxStatus::Confirmed => LinkState::Up,
            InboxStatus::Refused => LinkState::Refused,
            InboxStatus::Shut if self.last_heard().is_some() => LinkState::Down,
            InboxStatus::Shut if !self.running.load(Ordering::Acquire) => LinkState::Idle,
            InboxStatus::Shut if self.commands.down().is_some() => LinkState::Down,
            InboxStatus::Shut => LinkState::Connecting,
        }
    }

    /// How long ago a message or the answer to a ping arrived.
    pub(crate) fn last_heard(&self) -> Option<Duration> {
        self.vitals.last_heard()
    }

    /// How long the answer to the latest ping took, or how long the present ping has been waiting,
    /// if that is longer.
    pub(crate) fn lag(&self) -> Option<Duration> {
        self.vitals.lag()
    }

    /// Whether this node minted the token. Other clients may publish to this channel, too.
    fn is_own(&self, token: &Token) -> bool {
        token.node() == self.node().simple().to_string()
    }

    fn task(&self) -> MutexGuard<'_, InboxTask> {
        // No code under this lock can fail half-way.
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
