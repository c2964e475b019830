//! Tags and lists in a memory store.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{MemoryNode, reply};
use crate::key::Key;
use crate::store::Reply;
use crate::store::tags::{Found, Member, TagStore};

/// The ids of tags, and until when they live.
#[derive(Default)]
pub(super) struct TagIds {
    by_name: HashMap<Box<str>, (u64, Instant)>,
}

/// Lists, and until when they live.
#[derive(Default)]
pub(super) struct Lists {
    by_name: HashMap<Box<str>, (Vec<Member>, Instant)>,
}

impl Lists {
    fn enlist(&mut self, list: &Key, member: Member, most: usize, life: Duration) -> bool {
        let now = Instant::now();
        self.by_name.retain(|_, (_, until)| *until > now);
        let Some((members, _)) = self.by_name.get_mut(list.name()) else {
            if most > 0 {
                self.by_name.insert(list.name().into(), (vec![member], now + life));
            }
            return most > 0;
        };
        let is_listed = members.contains(&member);
        if !is_listed && members.len() < most {
            members.push(member);
            return true;
        }
        is_listed
    }
}

impl TagIds {
    fn get(&self, tag: &Key) -> Option<u64> {
        self.by_name.get(tag.name()).filter(|(_, until)| *until > Instant::now()).map(|(id, _)| *id)
    }

    fn make(&mut self, tag: &Key, life: Duration) -> u64 {
        let now = Instant::now();
        self.by_name.retain(|_, (_, until)| *until > now);
        let (id, until) = self.by_name.entry(tag.name().into()).or_insert_with(|| (fastrand::u64(..), now));
        *until = (*until).max(now + life);
        *id
    }
}

#[cfg(feature = "testing")]
impl TagIds {
    pub(super) fn flush(&mut self) {
        self.by_name.clear();
    }
}

impl TagStore for MemoryNode {
    fn look_up_tagged<'a>(&'a self, key: &'a Key, tags: &'a [Key], _within: Duration) -> Reply<'a, Found> {
        let mut records = self.store.records();
        records.sweep(Instant::now());
        let entry = records.by_name.get(key.name()).and_then(|record| record.entry.as_ref());
        let entry = entry.map(|(entry, _)| entry.clone());
        reply((entry, tags.iter().map(|tag| records.tags.get(tag)).collect()))
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], _within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        let records = self.store.records();
        reply(tags.iter().map(|tag| records.tags.get(tag)).collect())
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, _within: Duration) -> Reply<'a, Vec<u64>> {
        let mut records = self.store.records();
        reply(tags.iter().map(|tag| records.tags.make(tag, life)).collect())
    }

    fn forget_tag<'a>(&'a self, tag: &'a Key, _within: Duration) -> Reply<'a, ()> {
        self.store.records().tags.by_name.remove(tag.name());
        reply(())
    }

    fn enlist<'a>(&'a self, list: &'a Key, member: Member, most: usize, life: Duration) -> Reply<'a, bool> {
        reply(self.store.records().lists.enlist(list, member, most, life))
    }

    /// There is nobody else to have it.
    fn replicated<'a>(&'a self, _key: &'a Key, replicas: u32, _within: Duration) -> Reply<'a, u32> {
        reply(replicas)
    }
}
