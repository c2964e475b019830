//! Volume leases in a memory store.

use std::sync::Weak;
use std::time::Duration;

use uuid::Uuid;

use super::{MemoryNode, reply};
use crate::key::Key;
use crate::store::Reply;
use crate::store::volume::{Announced, Announcement, ChangedName, Member, Renewal, Renewed};
use crate::store::volume_store::{VolumeListener, VolumeStore};

impl VolumeStore for MemoryNode {
    fn renew_membership<'a>(
        &'a self,
        volume: &'a Key,
        renewal: Renewal,
        _within: Duration,
    ) -> Reply<'a, Renewed> {
        reply(self.store.shared.volumes.renew(volume.name(), self.node, renewal))
    }

    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        name: &'a ChangedName,
        _within: Duration,
    ) -> Reply<'a, Announced> {
        reply(self.store.shared.volumes.announce(self.node, announcement, name))
    }

    fn remove_member<'a>(&'a self, volume: &'a Key, member: Member, _within: Duration) -> Reply<'a, ()> {
        self.store.shared.volumes.remove_member(volume.name(), member);
        reply(())
    }

    fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        self.store.shared.volumes.acknowledge(announcer, id, self.node);
    }

    fn listen(&self, listener: Weak<dyn VolumeListener>) {
        self.store.shared.volumes.listen(self.node, listener);
    }

    fn until_heard(&self, _within: Duration) -> Reply<'_, ()> {
        reply(())
    }
}
