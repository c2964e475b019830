//! Volume leases over a wire: the faults of commands strike RENEW, ANNOUNCE and the rest, and messages get lost, come late and come
//! twice.

use std::sync::{Arc, Weak};
use std::time::Duration;

use uuid::Uuid;

use super::WireStore;
use crate::key::Key;
use crate::store::volume::{Announced, Announcement, ChangedName, Member, Renewal, Renewed};
use crate::store::volume_store::{VolumeListener, VolumeStore};
use crate::store::{Reply, StoreHandle};
use crate::testing::volume_end::VolumeEnd;

/// The timeout of commands that take none.
const WITHIN: Duration = Duration::from_secs(1);

impl VolumeStore for WireStore {
    fn renew_membership<'a>(
        &'a self,
        volume: &'a Key,
        renewal: Renewal,
        within: Duration,
    ) -> Reply<'a, Renewed> {
        let (volume, server) = (volume.clone(), Arc::clone(&self.0.server));
        self.ask(true, within, move |node| async move {
            server.strike_volume(&volume);
            // A broken connection takes its marks with it.
            let session = server.session();
            let mark = renewal.mark.filter(|mark| mark.session == session);
            let mut renewed =
                node.volumes().renew_membership(&volume, Renewal { mark, ..renewal }, within).await?;
            renewed.newest.session = session;
            Ok(renewed)
        })
    }

    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        name: &'a ChangedName,
        within: Duration,
    ) -> Reply<'a, Announced> {
        let (announcement, name) = (announcement.clone(), name.clone());
        let server = Arc::clone(&self.0.server);
        self.ask(true, within, move |node: StoreHandle| async move {
            server.strike_volume(&announcement.volume);
            node.volumes().announce(&announcement, &name, within).await
        })
    }

    fn remove_member<'a>(&'a self, volume: &'a Key, member: Member, within: Duration) -> Reply<'a, ()> {
        let volume = volume.clone();
        self.ask(true, within, move |node: StoreHandle| async move {
            node.volumes().remove_member(&volume, member, within).await
        })
    }

    fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        tokio::spawn(self.ask(false, WITHIN, move |node: StoreHandle| async move {
            node.volumes().acknowledge(announcer, id);
            Ok(())
        }));
    }

    fn listen(&self, listener: Weak<dyn VolumeListener>) {
        let end = self.0.volume.get_or_init(|| Arc::new(VolumeEnd::of(&self.0, listener)));
        self.0.node.volumes().listen(Arc::downgrade(end));
    }

    fn until_heard(&self, within: Duration) -> Reply<'_, ()> {
        Box::pin(async move { self.0.reaches(within).await })
    }
}
