//! What a memory store holds, and when it forgets it. Plain data under one lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::tags::{Lists, TagIds};
use crate::store::Token;

#[derive(Default)]
pub(super) struct Records {
    pub(super) by_name: HashMap<Box<str>, Record>,
    /// Entries by expiry, for eviction and for clearing what has expired. The number tells apart
    /// what expires at one instant.
    pub(super) by_expiry: BTreeMap<(Instant, u64), Box<str>>,
    pub(super) bytes: usize,
    pub(super) serial: u64,
    pub(super) tags: TagIds,
    pub(super) lists: Lists,
}

#[derive(Default)]
#[cfg_attr(feature = "testing", derive(Clone))]
pub(super) struct Record {
    pub(super) entry: Option<(Bytes, (Instant, u64))>,
    pub(super) lease: Option<(Token, Instant)>,
    pub(super) queue: VecDeque<Token>,
    pub(super) ending: Option<Left>,
}

/// What a failed load left for its waiters.
#[cfg_attr(feature = "testing", derive(Clone))]
pub(super) struct Left {
    pub(super) by: Token,
    pub(super) outcome: Bytes,
    pub(super) until: Instant,
    pub(super) replay_until: Instant,
}

impl Records {
    /// Forgets what has expired.
    pub(super) fn sweep(&mut self, now: Instant) {
        while let Some(first) = self.by_expiry.first_entry() {
            if first.key().0 > now {
                return;
            }
            let name = first.remove();
            self.forget_entry(&name);
        }
    }

    pub(super) fn forget_entry(&mut self, name: &str) {
        let Some(record) = self.by_name.get_mut(name) else { return };
        if let Some((entry, at)) = record.entry.take() {
            self.bytes -= entry.len() + name.len();
            self.by_expiry.remove(&at);
        }
        self.tidy(name);
    }

    /// Drops a record that holds nothing.
    pub(super) fn tidy(&mut self, name: &str) {
        if self.by_name.get(name).is_some_and(Record::is_empty) {
            self.by_name.remove(name);
        }
    }

    pub(super) fn set_entry(&mut self, name: &str, entry: Bytes, keep: Duration, capacity: usize) {
        self.forget_entry(name);
        let size = entry.len() + name.len();
        if size > capacity {
            return;
        }
        while self.bytes + size > capacity {
            let Some((_, evicted)) = self.by_expiry.pop_first() else { break };
            self.forget_entry(&evicted);
        }
        self.serial += 1;
        let at = (Instant::now() + keep, self.serial);
        self.bytes += size;
        self.by_expiry.insert(at, name.into());
        self.by_name.entry(name.into()).or_default().entry = Some((entry, at));
    }

    /// The key's record, cleared of what has expired.
    pub(super) fn record(&mut self, name: &str) -> &mut Record {
        let now = Instant::now();
        self.sweep(now);
        let record = self.by_name.entry(name.into()).or_default();
        record.lease.take_if(|(_, until)| *until <= now);
        record.ending.take_if(|left| left.until <= now);
        record
    }

    /// Whether the lease is `token`'s; if so it is given up.
    pub(super) fn end_lease(&mut self, name: &str, token: &Token) -> bool {
        self.record(name).lease.take_if(|(holder, _)| holder == token).is_some()
    }
}

impl Record {
    pub(super) fn is_empty(&self) -> bool {
        let Self { entry, lease, queue, ending } = self;
        entry.is_none() && lease.is_none() && queue.is_empty() && ending.is_none()
    }
}
