//! The connection for the messages of all nodes that share it: one subscription for each node, to its own channel.

mod recipient;
mod subscription;
#[cfg(test)]
mod tests;
mod vitals;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

pub(super) use recipient::{InboxStatus, Recipient};
use vitals::Vitals;

use crate::health::LinkState;
use crate::store::redis::commands::Commands;
use crate::store::redis::connection::connector::Connector;
use crate::sync::lock;

pub(crate) struct Subscriber {
    pub(super) dial: Connector,
    commands: Commands,
    /// Those that need messages. Changed under the lock on `task`.
    recipients: watch::Sender<Recipients>,
    task: Mutex<SubscriberTask>,
    /// Whether there is a task; outside the lock, because every ACQUIRE checks it.
    running: AtomicBool,
    pub(super) vitals: Vitals,
}

/// The recipients, by the ids of their nodes.
type Recipients = HashMap<Uuid, Weak<dyn Recipient>>;

#[derive(Default)]
struct SubscriberTask {
    /// Counts tasks: one that was replaced must not change the state any more.
    number: u64,
    handle: Option<AbortHandle>,
    closed: bool,
}

impl Subscriber {
    pub(crate) fn new(dial: Connector, commands: Commands) -> Arc<Self> {
        Arc::new(Self {
            dial,
            commands,
            recipients: watch::Sender::default(),
            task: Mutex::default(),
            running: AtomicBool::new(false),
            vitals: Vitals::new(),
        })
    }

    /// Takes a node in, unless it has ended; its channel is subscribed to as soon as there is a connection.
    pub(super) fn take<R: Recipient + 'static>(&self, node: Uuid, recipient: &Arc<R>) -> bool {
        let _lock = self.task();
        let is_open = !recipient.has_ended();
        if is_open {
            let recipient: Weak<R> = Arc::downgrade(recipient);
            self.recipients.send_if_modified(|all| all.insert(node, recipient).is_none());
        }
        is_open
    }

    /// Ends a node. The connection leaves its channel: a lease that is granted there would find no waiter.
    pub(super) fn release(&self, node: Uuid, recipient: &impl Recipient) {
        let _lock = self.task();
        recipient.set(InboxStatus::Closed);
        self.recipients.send_if_modified(|all| all.remove(&node).is_some());
    }

    /// Ends the connection.
    pub(crate) fn close(&self) {
        let handle = {
            let mut task = self.task();
            task.closed = true;
            task.handle.take()
        };
        if let Some(handle) = handle {
            handle.abort();
        }
        self.vitals.lost();
    }

    /// Changes the status of these recipients on behalf of task `number`. False if that task was replaced or the connection is closed.
    fn enter(&self, number: u64, status: InboxStatus, recipients: &[Arc<dyn Recipient>]) -> bool {
        let changed: Vec<_> = {
            let task = self.task();
            if task.number != number || task.closed {
                return false;
            }
            recipients.iter().filter(|recipient| recipient.set(status)).collect()
        };
        // The status first: a woken waiter checks whether hints arrive.
        for recipient in changed {
            recipient.tell_missed();
        }
        true
    }

    fn all(&self) -> Vec<Arc<dyn Recipient>> {
        self.recipients.borrow().values().filter_map(Weak::upgrade).collect()
    }

    /// Passes a message on to the node that has this channel.
    fn deliver(&self, node: Uuid, payload: &[u8]) {
        self.vitals.heard();
        let recipient = self.recipients.borrow().get(&node).and_then(Weak::upgrade);
        if let Some(recipient) = recipient {
            recipient.deliver(payload);
        }
    }

    /// The state of a connection without the subscription of a node that needs one.
    pub(super) fn opening(&self) -> LinkState {
        match () {
            () if self.vitals.last_heard().is_some() => LinkState::Down,
            () if !self.running.load(Ordering::Acquire) => LinkState::Idle,
            () if self.commands.down().is_some() => LinkState::Down,
            () => LinkState::Connecting,
        }
    }

    fn task(&self) -> MutexGuard<'_, SubscriberTask> {
        lock(&self.task)
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if let Some(handle) = self.task().handle.take() {
            handle.abort();
        }
    }
}

impl fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscriber").field("nodes", &self.recipients.borrow().len()).finish_non_exhaustive()
    }
}
