//! A node's end of the messages about its volume: they get lost, come late and come twice.

use std::sync::{Arc, Weak};

use tokio::time::sleep;
use uuid::Uuid;

use super::wire::Wire;
use crate::store::volume::HeardAnnouncement;
use crate::store::volume_store::VolumeListener;

/// The node's end of the messages about its volume.
#[derive(Debug)]
pub(super) struct VolumeEnd {
    wire: Weak<Wire>,
    listener: Weak<dyn VolumeListener>,
}

impl VolumeEnd {
    pub(super) fn of(wire: &Arc<Wire>, listener: Weak<dyn VolumeListener>) -> Self {
        Self { wire: Arc::downgrade(wire), listener }
    }

    /// Delivers a message now, later, twice or never.
    fn deliver(&self, tell: impl Fn(&dyn VolumeListener) + Send + Sync + 'static) {
        let Some(wire) = self.wire.upgrade() else { return };
        let Some((after, again)) = wire.message_fate() else { return };
        let (listener, tell) = (self.listener.clone(), Arc::new(tell));
        for after in std::iter::once(after).chain(again) {
            let (listener, tell, wire) = (listener.clone(), Arc::clone(&tell), Arc::clone(&wire));
            tokio::spawn(async move {
                sleep(after).await;
                wire.condition.runs().await;
                if let Some(listener) = listener.upgrade() {
                    tell(&*listener);
                }
            });
        }
    }
}

impl VolumeListener for VolumeEnd {
    fn announced(&self, heard: &HeardAnnouncement) {
        let heard = heard.clone();
        self.deliver(move |listener| listener.announced(&heard));
    }

    fn acknowledged(&self, id: Uuid, by: Uuid) {
        self.deliver(move |listener| listener.acknowledged(id, by));
    }

    fn missed(&self) {
        if let Some(listener) = self.listener.upgrade() {
            listener.missed();
        }
    }
}
