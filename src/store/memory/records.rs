//! The data of a memory store, and when it is dropped. Plain data under one lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::expiring_map::{ExpiringMap, later};
use super::sweep::Sweep;
use crate::store::tag_store::ListMember;
use crate::store::{Fail, Token};

/// The maps' overhead per entry or outcome, beside its bytes and its two copies of the name: a slot of the map at its
/// emptiest, and one of the order of expiry. Measured:
/// `memory::a_store_full_of_small_values_takes_no_more_than_its_capacity`.
pub(super) const AROUND: usize = 480;

/// The bytes of an entry or an outcome with its overhead.
pub(super) fn cost(name: &str, bytes: &Bytes) -> usize {
    bytes.len() + 2 * name.len() + AROUND
}

/// When a value expires. The number distinguishes values that expire at the same instant.
pub(super) type ExpiryIndex = (Instant, u64);

#[derive(Default)]
pub(super) struct KeyRecords {
    pub(super) by_name: HashMap<Box<str>, KeyRecord>,
    /// Entries by expiry, for eviction and for dropping expired ones.
    pub(super) by_expiry: BTreeMap<ExpiryIndex, Box<str>>,
    /// Outcomes of failed loads by expiry.
    pub(super) left_by_expiry: BTreeMap<ExpiryIndex, Box<str>>,
    /// The bytes of entries and outcomes, with their overhead.
    pub(super) bytes: usize,
    serial: u64,
    /// At which number of records the map is next swept, for expired leases and queues of keys that are not used again.
    looked_through: Sweep,
    /// The ids of tags.
    pub(super) tags: ExpiringMap<u64>,
    pub(super) lists: ExpiringMap<Vec<ListMember>>,
    /// By name and node, the number of the latest attempt that voids earlier ones.
    pub(super) voided: ExpiringMap<u64>,
}

#[derive(Clone, Default)]
pub(super) struct KeyRecord {
    pub(super) entry: Option<(Bytes, ExpiryIndex)>,
    pub(super) lease: Option<(Token, Instant)>,
    pub(super) queue: VecDeque<Token>,
    pub(super) queue_until: Option<Instant>,
    /// Boxed, because few records have one.
    pub(super) ending: Option<Box<FailedLoad>>,
}

/// What a failed load left for its waiters.
#[derive(Clone)]
pub(super) struct FailedLoad {
    pub(super) by: Token,
    pub(super) outcome: Bytes,
    pub(super) at: ExpiryIndex,
    pub(super) replay_until: Instant,
}

impl KeyRecords {
    /// Drops the entries and outcomes that have expired.
    pub(super) fn sweep(&mut self, now: Instant) {
        while let Some(name) = expired(&mut self.by_expiry, now) {
            self.forget_entry(&name);
        }
        while let Some(name) = expired(&mut self.left_by_expiry, now) {
            self.forget_left(&name);
        }
    }

    pub(super) fn forget_entry(&mut self, name: &str) {
        let Some(record) = self.by_name.get_mut(name) else { return };
        if let Some((entry, at)) = record.entry.take() {
            self.bytes -= cost(name, &entry);
            self.by_expiry.remove(&at);
        }
        self.tidy(name);
    }

    pub(super) fn forget_left(&mut self, name: &str) {
        let Some(record) = self.by_name.get_mut(name) else { return };
        if let Some(left) = record.ending.take() {
            self.bytes -= cost(name, &left.outcome);
            self.left_by_expiry.remove(&left.at);
        }
        self.tidy(name);
    }

    /// Drops an empty record.
    pub(super) fn tidy(&mut self, name: &str) {
        if self.by_name.get(name).is_some_and(KeyRecord::is_empty) {
            self.by_name.remove(name);
        }
    }

    pub(super) fn set_entry(&mut self, name: &str, entry: Bytes, keep: Duration, capacity: usize) {
        self.forget_entry(name);
        if self.make_room(cost(name, &entry), capacity) {
            let at = self.next(Instant::now() + keep);
            self.put_entry(name, entry, at);
        }
    }

    pub(super) fn put_entry(&mut self, name: &str, entry: Bytes, at: ExpiryIndex) {
        self.bytes += cost(name, &entry);
        self.by_expiry.insert(at, name.into());
        self.by_name.entry(name.into()).or_default().entry = Some((entry, at));
    }

    /// Leaves the outcome of a failed load for its waiters.
    pub(super) fn set_left(&mut self, name: &str, fail: &Fail<'_>, capacity: usize) {
        self.forget_left(name);
        let (by, outcome) = (fail.token.clone(), fail.outcome.clone());
        if self.make_room(cost(name, &outcome), capacity) {
            let now = Instant::now();
            let at = self.next(now + fail.keep);
            self.put_left(name, FailedLoad { by, outcome, at, replay_until: now + fail.replay });
        }
    }

    pub(super) fn put_left(&mut self, name: &str, left: FailedLoad) {
        self.bytes += cost(name, &left.outcome);
        self.left_by_expiry.insert(left.at, name.into());
        self.by_name.entry(name.into()).or_default().ending = Some(Box::new(left));
    }

    /// Makes room for `size` bytes; false if they exceed the capacity. Entries go first: waiters whose outcome is gone
    /// all ask the origin at once. Ids and lists have their own bound, and go only for a value that is larger than the
    /// rest.
    pub(super) fn make_room(&mut self, size: usize, capacity: usize) -> bool {
        if size > capacity {
            return false;
        }
        while self.used() + size > capacity {
            if let Some((_, name)) = self.by_expiry.pop_first() {
                self.forget_entry(&name);
            } else if let Some((_, name)) = self.left_by_expiry.pop_first() {
                self.forget_left(&name);
            } else if !self.tags.drop_one() && !self.lists.drop_one() && !self.voided.drop_one() {
                break;
            }
        }
        true
    }

    pub(super) fn used(&self) -> usize {
        self.bytes + self.tags.bytes() + self.lists.bytes() + self.voided.bytes()
    }

    pub(super) fn next(&mut self, moment: Instant) -> ExpiryIndex {
        self.serial += 1;
        (moment, self.serial)
    }

    /// The key's record without what has expired.
    pub(super) fn record(&mut self, name: &str) -> &mut KeyRecord {
        let now = Instant::now();
        self.sweep(now);
        if self.looked_through.is_due(self.by_name.len()) {
            self.by_name.retain(|_, record| {
                record.expire(now);
                !record.is_empty()
            });
            self.looked_through.done(self.by_name.len());
        }
        let record = self.by_name.entry(name.into()).or_default();
        record.expire(now);
        record
    }

    /// Ends the lease if it is `token`'s; returns whether it was.
    pub(super) fn end_lease(&mut self, name: &str, token: &Token) -> bool {
        self.record(name).lease.take_if(|(holder, _)| holder == token).is_some()
    }
}

/// Removes and returns the first name that has expired.
fn expired(by_expiry: &mut BTreeMap<ExpiryIndex, Box<str>>, now: Instant) -> Option<Box<str>> {
    let first = by_expiry.first_entry()?;
    (first.key().0 <= now).then(|| first.remove())
}

impl KeyRecord {
    /// Adds the token to the queue once, and keeps the queue for twice the longest time that a waiter may sleep.
    pub(super) fn queue(&mut self, token: &Token, now: Instant, longest: Duration) {
        if !self.queue.contains(token) {
            self.queue.push_back(token.clone());
        }
        let keep = longest.saturating_mul(2).saturating_add(Duration::from_secs(1));
        self.queue_until = Some(later(now, keep));
    }

    /// Drops an expired lease or queue. Entry and outcome are dropped by [`KeyRecords::sweep`].
    fn expire(&mut self, now: Instant) {
        self.lease.take_if(|(_, until)| *until <= now);
        if self.queue_until.take_if(|until| *until <= now).is_some() {
            self.queue.clear();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        let Self { entry, lease, queue, queue_until: _, ending } = self;
        entry.is_none() && lease.is_none() && queue.is_empty() && ending.is_none()
    }

    #[cfg(test)]
    pub(super) fn bytes(&self, name: &str) -> usize {
        let entry = self.entry.as_ref().map(|(entry, _)| cost(name, entry));
        let left = self.ending.as_ref().map(|left| cost(name, &left.outcome));
        entry.unwrap_or_default() + left.unwrap_or_default()
    }
}
