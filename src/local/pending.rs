//! The acknowledgements of this process's announcements.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use uuid::Uuid;

use crate::store::volume::Member;
use crate::sync::lock;

/// The announcements that wait for acknowledgements.
#[derive(Debug, Default)]
pub(super) struct PendingAnnouncements {
    by_id: Mutex<HashMap<Uuid, Arc<Acknowledgements>>>,
}

/// The nodes that have acknowledged an announcement, also before its answer has arrived.
#[derive(Debug, Default)]
pub(super) struct Acknowledgements {
    by: Mutex<HashSet<Uuid>>,
    more: Notify,
}

impl PendingAnnouncements {
    /// Collects the acknowledgements of this announcement, from before it is sent.
    pub(super) fn await_acknowledgements(&self, id: Uuid) {
        lock(&self.by_id).insert(id, Arc::default());
    }

    pub(super) fn of(&self, id: Uuid) -> Arc<Acknowledgements> {
        lock(&self.by_id).get(&id).cloned().unwrap_or_default()
    }

    pub(super) fn forget(&self, ids: &[Uuid]) {
        let mut by_id = lock(&self.by_id);
        for id in ids {
            by_id.remove(id);
        }
    }

    pub(super) fn acknowledged(&self, id: Uuid, by: Uuid) {
        let acknowledgements = lock(&self.by_id).get(&id).cloned();
        if let Some(acknowledgements) = acknowledgements {
            lock(&acknowledgements.by).insert(by);
            acknowledgements.more.notify_one();
        }
    }
}

impl Acknowledgements {
    /// The members that have not acknowledged.
    pub(super) fn silent(&self, members: &[Member]) -> Vec<Member> {
        let by = lock(&self.by);
        members.iter().copied().filter(|member| !by.contains(&member.node)).collect()
    }

    /// Waits for the next acknowledgement after this call.
    pub(super) fn more(&self) -> Notified<'_> {
        self.more.notified()
    }
}
