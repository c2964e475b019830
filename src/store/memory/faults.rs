//! Faults in a memory store that its clients do not cause: evictions, a flush, a failover to an older state, a clock
//! that jumps. For [`testing`](crate::testing).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use super::records::Volume;
use super::records::{ExpiringMap, KeyRecord, KeyRecords};
use super::{MemoryShared, MemoryStore, Notifier};
use crate::store::protocol::Token;
use crate::store::wake_locks::LockHint;
use crate::sync::lock;

/// A copy of one key's record.
pub(crate) struct KeySnapshot(Option<KeyRecord>);

impl MemoryShared {
    pub(super) fn notifier(&self) -> Option<Arc<dyn Notifier>> {
        self.faults.notifier.get().and_then(Weak::upgrade)
    }
}

impl MemoryStore {
    /// Sends messages to waiters through this notifier, unless there is one already.
    pub(crate) fn notify_through(&self, notifier: Weak<dyn Notifier>) {
        let _ = self.shared.faults.notifier.set(notifier);
    }

    /// The lease's holder and its remaining time.
    pub(crate) fn lease(&self, name: &str) -> Option<(Token, Duration)> {
        let now = Instant::now();
        let records = self.records();
        let (holder, until) = records.by_name.get(name)?.lease.as_ref()?;
        (*until > now).then(|| (holder.clone(), *until - now))
    }

    /// The stored bytes.
    #[cfg(test)]
    pub(crate) fn entry(&self, name: &str) -> Option<Bytes> {
        let now = Instant::now();
        let records = self.records();
        let (entry, at) = records.by_name.get(name)?.entry.as_ref()?;
        (at.0 > now).then(|| entry.clone())
    }

    /// Evicts the lease; returns whether there was one.
    pub(crate) fn evict_lease(&self, name: &str) -> bool {
        let mut records = self.records();
        let evicted = records.by_name.get_mut(name).and_then(|record| record.lease.take()).is_some();
        records.tidy(name);
        evicted
    }

    /// Evicts the entry; returns whether there was one.
    pub(crate) fn evict_entry(&self, name: &str) -> bool {
        let mut records = self.records();
        let was_there = records.by_name.get(name).is_some_and(|record| record.entry.is_some());
        records.forget_entry(name);
        was_there
    }

    /// Drops everything except locks.
    pub(crate) fn flush(&self) {
        let mut records = self.records();
        records.by_name.clear();
        records.by_expiry.clear();
        records.left_by_expiry.clear();
        records.bytes = 0;
        records.tags = ExpiringMap::default();
        records.lists = ExpiringMap::default();
        records.voided = ExpiringMap::default();
        drop(records);
        lock(&self.shared.volumes.by_name).clear();
    }

    /// A copy of the registry and the log of a volume.
    pub(crate) fn volume(&self, name: &str) -> Volume {
        lock(&self.shared.volumes.by_name).get(name).cloned().unwrap_or_default()
    }

    /// Restores a volume to the snapshot.
    pub(crate) fn restore_volume(&self, name: &str, snapshot: Volume) {
        lock(&self.shared.volumes.by_name).insert(name.into(), snapshot);
    }

    /// Evicts a volume's registry, or its log alone; returns whether there was one.
    pub(crate) fn evict_volume(&self, name: &str, registry: bool) -> bool {
        let mut volumes = lock(&self.shared.volumes.by_name);
        let Some(volume) = volumes.get_mut(name) else { return false };
        if registry { volume.registry.take().is_some() } else { !std::mem::take(&mut volume.log).is_empty() }
    }

    /// Changes one byte of the entry; returns false if there is no entry, or an empty one.
    pub(crate) fn spoil(&self, name: &str, at: usize) -> bool {
        let mut records = self.records();
        let entry = records.by_name.get_mut(name).and_then(|record| record.entry.as_mut());
        let Some((entry, _)) = entry.filter(|(entry, _)| !entry.is_empty()) else { return false };
        let mut spoilt = entry.to_vec();
        let at = at % spoilt.len();
        spoilt[at] ^= 0x55;
        *entry = Bytes::from(spoilt);
        true
    }

    /// The present time of the store's clock.
    #[cfg(test)]
    pub(crate) fn now(&self) -> u64 {
        self.shared.clock_at(Instant::now())
    }

    /// Moves the store's clock, which decides on freshness, and the expiries of entries, leases, queues and outcomes.
    pub(crate) fn step_clock(&self, by_ms: i64) {
        self.shared.faults.ahead_ms.fetch_add(by_ms, Ordering::Relaxed);
        self.records().step(by_ms);
    }

    /// Sends a message, whether it is true or not, to the waiter for a lock or the holder with this token.
    pub(crate) fn notify_lock(&self, token: &Token, hint: LockHint) {
        drop(self.shared.grants.notify(token, hint));
    }

    /// Notifies the first waiter for the lock with this key that it must take again.
    pub(crate) fn notify_lock_missed(&self, key: &str) {
        drop(self.shared.grants.notify_missed(key, None));
    }

    /// Notifies a node's lock waiters that they may have missed messages.
    pub(crate) fn notify_node_missed(&self, node: Uuid) {
        self.shared.grants.notify_node_missed(node);
    }

    pub(crate) fn snapshot(&self, name: &str) -> KeySnapshot {
        KeySnapshot(self.records().by_name.get(name).cloned())
    }

    /// Restores the key to the snapshot. Data that has expired meanwhile is dropped as usual.
    pub(crate) fn restore(&self, name: &str, snapshot: &KeySnapshot) {
        let mut records = self.records();
        records.forget_entry(name);
        records.forget_left(name);
        records.by_name.remove(name);
        let Some(mut record) = snapshot.0.clone() else { return };
        let (entry, left) = (record.entry.take(), record.ending.take());
        records.by_name.insert(name.into(), record);
        if let Some((entry, (until, _))) = entry {
            let at = records.next(until);
            records.put_entry(name, entry, at);
        }
        if let Some(mut left) = left {
            left.at = records.next(left.at.0);
            records.put_left(name, *left);
        }
        records.tidy(name);
    }
}

impl KeyRecords {
    fn step(&mut self, by_ms: i64) {
        let now = Instant::now();
        let by = Duration::from_millis(by_ms.unsigned_abs());
        // A later clock means less remaining time.
        let moved = |at: Instant| {
            if by_ms < 0 { at + by } else { at.checked_sub(by).unwrap_or(now).max(now) }
        };
        let Self { by_name, by_expiry, left_by_expiry, .. } = self;
        by_expiry.clear();
        left_by_expiry.clear();
        for (name, record) in by_name {
            if let Some((_, until)) = &mut record.lease {
                *until = moved(*until);
            }
            record.queue_until = record.queue_until.map(moved);
            if let Some(left) = &mut record.ending {
                left.at.0 = moved(left.at.0);
                left.replay_until = moved(left.replay_until);
                left_by_expiry.insert(left.at, name.clone());
            }
            if let Some((_, at)) = &mut record.entry {
                at.0 = moved(at.0);
                by_expiry.insert(*at, name.clone());
            }
        }
    }
}
