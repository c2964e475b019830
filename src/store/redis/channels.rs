//! Channels of [`Store::listen_to`](crate::store::Store::listen_to) on Redis: each is a subscription on the connection for messages, beside
//! those of the nodes, and its name has the same form, so that a user needs no other right.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use uuid::Uuid;

use super::subscriber::{InboxStatus, Recipient, Subscriber};
use crate::store::channels::{ChannelListener, Listeners};
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;

/// The channels that the nodes of one backend listen on.
pub(crate) struct ChannelHub {
    /// Identifies the connection: it receives each message once, whatever nodes share it.
    pub(crate) connection: Uuid,
    by_id: Mutex<HashMap<Uuid, Arc<SubscribedChannel>>>,
}

impl Default for ChannelHub {
    fn default() -> Self {
        Self { connection: Uuid::new_v4(), by_id: Mutex::default() }
    }
}

struct SubscribedChannel {
    listeners: Listeners,
    status: watch::Sender<InboxStatus>,
}

impl ChannelHub {
    /// See [`Store::listen_to`](crate::store::Store::listen_to).
    pub(crate) async fn listen_to(
        &self,
        id: Uuid,
        listener: Weak<dyn ChannelListener>,
        subscriber: &Arc<Subscriber>,
        within: Duration,
    ) -> StoreResult<()> {
        let channel = self.channel(id, listener, subscriber);
        subscriber.take(id, &channel);
        subscriber.open();
        let mut status = channel.status.subscribe();
        let settled = timeout(within, status.wait_for(|status| *status != InboxStatus::Shut)).await;
        match settled {
            Ok(Ok(status)) if *status == InboxStatus::Confirmed => Ok(()),
            Ok(_) => Err(StoreError::new(StoreErrorKind::Refused)),
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut)),
        }
    }

    /// The channel with this id, and this listener on it.
    fn channel(
        &self,
        id: Uuid,
        listener: Weak<dyn ChannelListener>,
        subscriber: &Subscriber,
    ) -> Arc<SubscribedChannel> {
        let mut channels = lock(&self.by_id);
        // Channels that have lost their last listener are left here, but for this one: its subscription serves the next listener.
        channels.retain(|other, channel| {
            let is_used = *other == id || !channel.listeners.is_empty();
            if !is_used {
                subscriber.release(*other, &**channel);
            }
            is_used
        });
        let new = || {
            let status = watch::Sender::new(InboxStatus::Shut);
            Arc::new(SubscribedChannel { listeners: Listeners::default(), status })
        };
        let channel = channels.entry(id).or_insert_with(new);
        channel.listeners.add(listener);
        Arc::clone(channel)
    }
}

impl Recipient for SubscribedChannel {
    fn set(&self, status: InboxStatus) -> bool {
        self.status.send_if_modified(|before| std::mem::replace(before, status) != status)
    }

    fn has_ended(&self) -> bool {
        false
    }

    fn deliver(&self, payload: &[u8]) {
        self.listeners.deliver(payload);
    }

    fn notify_missed(&self) {}

    fn find_lost_messages(&self, _: InboxStatus) {}
}
