//! The contract of volume leases with a store: a registry of the nodes that keep local copies, and a log of announcements.
//!
//! A *volume* is one namespace on one store. Its *registry* has a random id, a flag that says whether it is mature, the
//! number of the last announcement, and the members: each node with the stamp of its last RENEW. The *log* has the last
//! announcements. Where one of the two is missing (evicted, flushed, never made), the step that needs it makes it anew: a registry
//! with a new id that is not mature, a log whose base entry has a random id.
//!
//! docs/decisions/401-local-tier.md has the proof that relies on these steps, numbered.

use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use uuid::Uuid;

use super::Reply;
use super::volume::{Announced, Announcement, ChangedName, Member, ReceivedAnnouncement, Renewal, Renewed};
use crate::key::Key;

/// The receiver of a node's messages about its volume.
pub(crate) trait VolumeListener: fmt::Debug + Send + Sync {
    /// Drops the copies of the changed name, and then acknowledges.
    fn announced(&self, announcement: &ReceivedAnnouncement);

    /// A member has acknowledged an announcement of this node.
    fn acknowledged(&self, id: Uuid, by: Uuid);

    /// Messages may have been lost.
    fn missed(&self);
}

/// The registry and the log of a store's volumes. `within` and cancellation are as in [`Store`](super::Store).
pub(crate) trait VolumeStore: fmt::Debug + Send + Sync {
    /// RENEW: this node is a member, with this stamp, from now on. Answers what was announced after the mark, if the mark is of the
    /// present session and the log still has exactly that entry.
    fn renew_membership<'a>(
        &'a self,
        volume: &'a Key,
        renewal: Renewal,
        within: Duration,
    ) -> Reply<'a, Renewed>;

    /// ANNOUNCE: adds to the log, notifies all members but this node, and answers which they are.
    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        name: &'a ChangedName,
        within: Duration,
    ) -> Reply<'a, Announced>;

    /// FORGET and LEAVE: removes a member, if its stamp is still this one.
    fn remove_member<'a>(&'a self, volume: &'a Key, member: Member, within: Duration) -> Reply<'a, ()>;

    /// Notifies the announcer that this node has dropped its copies of the announced name. Does not wait; the message may be
    /// lost.
    fn acknowledge(&self, announcer: Uuid, id: Uuid);

    /// Sends this node's messages about its volume to `listener` from now on. A later listener is ignored.
    fn listen(&self, listener: Weak<dyn VolumeListener>);

    /// Opens the inbox, and waits until messages arrive, or until it is known that they will not; at most `within`.
    fn until_received(&self, within: Duration) -> Reply<'_, ()>;
}
