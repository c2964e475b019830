//! The registries and logs of a memory store's volumes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, Weak};
use std::time::Duration;

use uuid::Uuid;

use crate::store::volume::{
    Announcement, Audience, ChangedName, LogPosition, LogRecord, Mark, Member, ReceivedAnnouncement,
    RegistryState, Renewal, Renewed, VolumeListener,
};

/// How many announcements a log keeps.
const LOG_LENGTH: usize = 1_024;

/// All volumes of a memory store, and the listeners of its nodes.
#[derive(Default)]
pub(super) struct Volumes {
    pub(super) by_name: Mutex<HashMap<Box<str>, Volume>>,
    pub(super) listeners: Mutex<HashMap<Uuid, Weak<dyn VolumeListener>>>,
}

/// One volume: its registry and its log, each of which may be missing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Volume {
    pub(super) registry: Option<Registry>,
    pub(super) log: VecDeque<LogEntry>,
}

#[derive(Clone, Debug)]
pub(super) struct Registry {
    state: RegistryState,
    number: u64,
    /// In the order in which they joined, so that equal runs of a simulation notify them in equal orders.
    pub(super) members: Vec<Member>,
}

#[derive(Clone, Debug)]
pub(super) struct LogEntry {
    at: LogPosition,
    /// `None` for the base entry of a log that was made anew.
    record: Option<LogRecord>,
}

/// A random id, which a simulation with the same seed gets again.
fn random_id() -> Uuid {
    Uuid::from_u128(fastrand::u128(..))
}

impl Volume {
    /// The registry and the log, each created if it is missing. A new log has a base entry.
    fn ensure(
        &mut self,
        known_registry: Option<Uuid>,
        term: Duration,
    ) -> (&mut Registry, &mut VecDeque<LogEntry>) {
        if self.registry.is_none() {
            self.log.clear();
        }
        let new_registry = || {
            let state = RegistryState { registry_id: random_id(), is_mature: false, term };
            Registry { state, number: 0, members: Vec::new() }
        };
        let registry = self.registry.get_or_insert_with(new_registry);
        registry.state.is_mature |= known_registry == Some(registry.state.registry_id);
        if self.log.is_empty() {
            let at = LogPosition { number: registry.number, id: random_id() };
            self.log.push_back(LogEntry { at, record: None });
        }
        (registry, &mut self.log)
    }

    pub(super) fn renew(&mut self, node: Uuid, renewal: Renewal) -> Renewed {
        let (registry, log) = self.ensure(renewal.known_registry, renewal.term);
        match registry.members.iter_mut().find(|member| member.node == node) {
            Some(member) => member.stamp = renewal.stamp,
            None => registry.members.push(Member { node, stamp: renewal.stamp }),
        }
        registry.state.term = registry.state.term.max(renewal.term);
        let marked = renewal.mark.and_then(|mark| log.iter().position(|entry| entry.at == mark.at));
        let announced =
            marked.map(|at| log.range(at + 1..).filter_map(|entry| entry.record.clone()).collect());
        let at = log.back().map_or(LogPosition { number: 0, id: Uuid::nil() }, |newest| newest.at);
        let session = renewal.mark.map_or(0, |mark| mark.session);
        Renewed { registry: registry.state, announced, newest: Mark { at, session } }
    }

    pub(super) fn announce(
        &mut self,
        announcer: Uuid,
        announcement: &Announcement,
        name: &ChangedName,
    ) -> Option<(Audience, ReceivedAnnouncement)> {
        if self.registry.is_none() && !announcement.creates {
            return None;
        }
        let (registry, log) = self.ensure(announcement.known_registry, announcement.term);
        registry.number += 1;
        let at = LogPosition { number: registry.number, id: announcement.id };
        let before = log.back().map_or(Uuid::nil(), |newest| newest.at.id);
        let record = LogRecord { id: announcement.id, announcer, name: name.clone() };
        log.push_back(LogEntry { at, record: Some(record.clone()) });
        if log.len() > LOG_LENGTH {
            log.pop_front();
        }
        let members = registry.members.iter().filter(|member| member.node != announcer).copied().collect();
        let audience = Audience { registry: registry.state, at, before, members };
        Some((audience, ReceivedAnnouncement { number: at.number, before, record }))
    }
}
