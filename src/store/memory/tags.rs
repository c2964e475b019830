//! Tags and lists in a memory store.

use std::time::Duration;

use tokio::time::Instant;

use super::expiring_map::{AROUND, later};
use super::records::KeyRecords;
use super::{MemoryNode, reply};
use crate::key::Key;
use crate::store::Reply;
use crate::store::tag_store::{ListMember, TagStore, TaggedLookUp};
use crate::store::volume::{Announced, Announcement, ChangedName};

/// The fraction of the store that ids may use, and lists. Beyond it the least recently used are dropped, whatever their
/// lifetime: without its id a value is a miss, and without its list a resource may have more variants than its policy
/// allows.
const PART: usize = 4;

impl KeyRecords {
    fn id(&mut self, tag: &Key) -> Option<u64> {
        self.tags.get(tag.name()).copied()
    }

    fn make_id(&mut self, tag: &Key, life: Duration, capacity: usize) -> u64 {
        let until = later(Instant::now(), life);
        if let Some(id) = self.tags.get_until(tag.name(), until) {
            return *id;
        }
        let (id, bytes) = (fastrand::u64(..), 2 * tag.name().len() + size_of::<u64>() + AROUND);
        if self.tags.make_room(bytes, capacity / PART) && self.make_room(bytes, capacity) {
            self.tags.put(tag.name(), id, bytes, until);
        }
        id
    }

    fn enlist(
        &mut self,
        list: &Key,
        member: ListMember,
        most: usize,
        life: Duration,
        capacity: usize,
    ) -> bool {
        let name = list.name();
        let members = self.lists.get(name);
        let (is_new, length) = (members.is_none(), members.as_ref().map_or(0, |members| members.len()));
        if members.is_some_and(|members| members.contains(&member)) {
            return true;
        }
        let bytes = size_of::<ListMember>() + if is_new { 2 * name.len() + AROUND } else { 0 };
        let has_room =
            length < most && self.lists.make_room(bytes, capacity / PART) && self.make_room(bytes, capacity);
        if !has_room {
            return false;
        }
        // `make_room` may have dropped the list itself; then it starts anew.
        match self.lists.get(name) {
            Some(members) => {
                members.push(member);
                self.lists.grown(name, bytes);
            }
            None => {
                let bytes = size_of::<ListMember>() + 2 * name.len() + AROUND;
                self.lists.put(name, vec![member], bytes, later(Instant::now(), life));
            }
        }
        true
    }
}

impl TagStore for MemoryNode {
    fn look_up_tagged<'a>(
        &'a self,
        keys: &'a [Key],
        tags: &'a [Key],
        _within: Duration,
    ) -> Reply<'a, TaggedLookUp> {
        let mut records = self.store.records();
        records.sweep(Instant::now());
        let entry = |key: &Key| records.by_name.get(key.name()).and_then(|record| record.entry.as_ref());
        let entries = keys.iter().map(|key| entry(key).map(|(entry, _)| entry.clone())).collect();
        reply((entries, tags.iter().map(|tag| records.id(tag)).collect()))
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], _within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        let mut records = self.store.records();
        reply(tags.iter().map(|tag| records.id(tag)).collect())
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, _within: Duration) -> Reply<'a, Vec<u64>> {
        let (mut records, capacity) = (self.store.records(), self.store.shared.capacity);
        reply(tags.iter().map(|tag| records.make_id(tag, life, capacity)).collect())
    }

    fn forget_tag<'a>(
        &'a self,
        tag: &'a Key,
        announcement: &'a Announcement,
        _within: Duration,
    ) -> Reply<'a, Announced> {
        let (mut records, capacity) = (self.store.records(), self.store.shared.capacity);
        if let Err(voided) = records.attempts(tag.name(), self.node, announcement.attempt, capacity) {
            return Box::pin(std::future::ready(Err(voided)));
        }
        records.tags.remove(tag.name());
        drop(records);
        reply(self.store.shared.volumes.announce(self.node, announcement, &ChangedName::tag(tag)))
    }

    fn enlist<'a>(
        &'a self,
        list: &'a Key,
        member: ListMember,
        most: usize,
        life: Duration,
    ) -> Reply<'a, bool> {
        reply(self.store.records().enlist(list, member, most, life, self.store.shared.capacity))
    }

    /// There is no second copy to wait for.
    fn replicated<'a>(&'a self, _key: &'a Key, replicas: u32, _within: Duration) -> Reply<'a, u32> {
        reply(replicas)
    }
}
