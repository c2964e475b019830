//! Messages to all nodes that listen on a channel, beside the messages to one node.
//!
//! A message is a hint, as all messages are: it may be lost, and a listener must expect messages that this crate has not sent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use uuid::Uuid;

use crate::sync::lock;

/// The receiver of the messages of channels.
pub(crate) trait ChannelListener: Send + Sync {
    /// Handles a message. Must not block.
    fn received(&self, message: &[u8]);
}

/// The listeners of one channel.
#[derive(Default)]
pub(crate) struct Listeners(Mutex<Vec<Weak<dyn ChannelListener>>>);

impl Listeners {
    /// Adds a listener, unless it is there already.
    pub(crate) fn add(&self, listener: Weak<dyn ChannelListener>) {
        let mut all = lock(&self.0);
        all.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&listener));
        all.push(listener);
    }

    /// Passes a message on. Returns how many listeners have received it.
    pub(crate) fn deliver(&self, message: &[u8]) -> u64 {
        // Collected, because a listener is called without the lock.
        let all: Vec<Arc<_>> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for listener in &all {
            listener.received(message);
        }
        all.len() as u64
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.0).iter().all(|listener| listener.strong_count() == 0)
    }
}

/// The channels of a store in memory.
#[derive(Default)]
pub(crate) struct MemoryChannels(Mutex<HashMap<Uuid, Arc<Listeners>>>);

impl MemoryChannels {
    pub(crate) fn listen(&self, channel: Uuid, listener: Weak<dyn ChannelListener>) {
        let mut channels = lock(&self.0);
        channels.retain(|_, listeners| !listeners.is_empty());
        channels.entry(channel).or_default().add(listener);
    }

    /// Delivers a message. Returns how many listeners have received it.
    pub(crate) fn send(&self, channel: Uuid, message: &[u8]) -> u64 {
        let listeners = lock(&self.0).get(&channel).cloned();
        listeners.map_or(0, |listeners| listeners.deliver(message))
    }
}
