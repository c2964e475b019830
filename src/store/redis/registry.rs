//! The registry and the log of a volume on a Redis server: `sg1:n:{namespace:}` and `sg1:a:{namespace:}`, in one slot.
//!
//! The scripts are `renew_member.lua`, `announce.lua` and `remove_member.lua`. On one server INVALIDATE and FORGET TAG announce
//! in their own scripts; in a cluster ANNOUNCE follows them. Messages go through the inbox.

use std::sync::Weak;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::time::timeout;
use uuid::Uuid;

use super::RedisStore;
use super::commands::announce::{Announcing, announce};
use super::commands::call::{refused, run};
use super::commands::renew_member::renew_member;
use super::errors::reply::unexpected;
use super::messages::message;
use super::scripts::{self, push_id};
use crate::key::Key;
use crate::store::volume::{Announced, Announcement, ChangedName, Member, Renewal, Renewed};
use crate::store::volume_store::{VolumeListener, VolumeStore};
use crate::store::{Reply, Store as _, StoreError, StoreErrorKind};

impl VolumeStore for RedisStore {
    fn renew_membership<'a>(
        &'a self,
        volume: &'a Key,
        renewal: Renewal,
        within: Duration,
    ) -> Reply<'a, Renewed> {
        Box::pin(async move {
            self.inbox.open();
            renew_member(&self.commands, volume, self.node(), renewal, within).await
        })
    }

    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        name: &'a ChangedName,
        within: Duration,
    ) -> Reply<'a, Announced> {
        let announcing = Announcing { announcement, announcer: self.node() };
        Box::pin(announce(&self.commands, announcing, name, within))
    }

    fn remove_member<'a>(&'a self, volume: &'a Key, member: Member, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                push_id(cmd, member.node);
                cmd.arg(member.stamp);
            };
            match run(&self.commands, &scripts::REMOVE_MEMBER, volume.name(), 64, args, within).await? {
                Value::Int(_) => Ok(()),
                _ => Err(refused(unexpected())),
            }
        })
    }

    fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        // Without a runtime nothing can be sent; the announcer waits until this node's right has ended.
        let Ok(runtime) = Handle::try_current() else { return };
        let (commands, node, within) = (self.commands.clone(), self.node(), self.command_timeout());
        runtime.spawn(async move {
            let channel = message::channel(announcer);
            let mut cmd = Cmd::with_capacity(3, channel.len() + 80);
            cmd.arg("PUBLISH").arg(&channel).arg(message::acknowledgement(id, node));
            // In a cluster any node passes it on, so the channel may choose one.
            let _ = commands.send(&channel, &cmd, within).await;
        });
    }

    fn listen(&self, listener: Weak<dyn VolumeListener>) {
        self.inbox.listen(listener);
    }

    fn until_heard(&self, within: Duration) -> Reply<'_, ()> {
        Box::pin(async move {
            self.inbox.open();
            if within.is_zero() {
                return Ok(());
            }
            let settled = timeout(within, self.inbox.settled()).await;
            settled.map_err(|_| StoreError::new(StoreErrorKind::TimedOut))
        })
    }
}
