//! The semaphores of a memory store. Plain data under one lock.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::expiring_map::later;
use super::mutexes::MutexStep;
use super::sweep::Sweep;
use crate::store::Token;
use crate::store::lock_store::{Change, Create, PermitFreed, PermitTaken, SemaphoreState, TakePermit};
use crate::store::wake::lock_waiters::LockHint;

#[derive(Default)]
pub(super) struct Semaphores {
    by_key: HashMap<Arc<str>, SemaphoreRecord>,
    sweep: Sweep,
}

struct SemaphoreRecord {
    created_with: u32,
    capacity: u32,
    idle_ttl: Duration,
    /// The holders of permits, ordered by the end of their leases and by token.
    holders: Vec<(Instant, Token)>,
    queue: VecDeque<(Token, Duration)>,
    until: Instant,
}

impl Semaphores {
    pub(super) fn take(
        &mut self,
        step: &mut MutexStep<'_>,
        key: &Arc<str>,
        ask: &TakePermit<'_>,
    ) -> PermitTaken {
        let (record, _) = self.created(step.now, key, ask.semaphore);
        let (_, slept_on) = record.sweep(step.now);
        let mut granted = record.renew(step.now, ask.token, ask.lease);
        granted |= record.serve(step, Some(ask.token));
        if !granted && record.available() > 0 {
            granted = true;
            record.grant(step.now, ask.token.clone(), ask.lease);
        }
        let place = (ask.token.clone(), ask.lease);
        if !granted && ask.queue && !record.queue.contains(&place) {
            record.queue.push_back(place);
        }
        record.finish(step, key, slept_on);
        PermitTaken {
            granted,
            available: record.available(),
            created_with: record.created_with,
            next_expiry: record.holders.first().map(|(end, _)| *end - step.now),
        }
    }

    pub(super) fn free(
        &mut self,
        step: &mut MutexStep<'_>,
        key: &Arc<str>,
        token: &Token,
        lease: Duration,
    ) -> PermitFreed {
        let Some(record) = self.existing(step.now, key) else {
            return PermitFreed { was_held: false, available: 0 };
        };
        let (_, slept_on) = record.sweep(step.now);
        let before = record.holders.len();
        record.holders.retain(|(_, holder)| holder != token);
        let was_held = record.holders.len() < before;
        if !was_held {
            record.queue.retain(|(queued, theirs)| queued != token || *theirs != lease);
        }
        record.serve(step, None);
        record.finish(step, key, slept_on);
        PermitFreed { was_held, available: record.available() }
    }

    pub(super) fn refresh(
        &mut self,
        step: &mut MutexStep<'_>,
        key: &Arc<str>,
        token: &Token,
        lease: Duration,
    ) -> bool {
        let Some(record) = self.existing(step.now, key) else { return false };
        let (_, slept_on) = record.sweep(step.now);
        let held = record.renew(step.now, token, lease);
        record.serve(step, None);
        record.finish(step, key, slept_on);
        held
    }

    pub(super) fn look(&mut self, now: Instant, key: &Arc<str>) -> Option<SemaphoreState> {
        let record = self.existing(now, key)?;
        Some(record.state(now, false, 0))
    }

    pub(super) fn change(
        &mut self,
        step: &mut MutexStep<'_>,
        key: &Arc<str>,
        change: Change,
    ) -> Option<SemaphoreState> {
        let (record, created) = match change {
            Change::Ensure(semaphore) => self.created(step.now, key, semaphore),
            Change::Add { permits, semaphore } => {
                let (record, created) = self.created(step.now, key, semaphore);
                record.capacity = record.capacity.saturating_add(permits);
                (record, created)
            }
            Change::Sweep => (self.existing(step.now, key)?, false),
            Change::Delete => {
                self.existing(step.now, key)?;
                let mut record = self.by_key.remove(key)?;
                let (recovered, _) = record.sweep(step.now);
                for (token, _) in &record.queue {
                    step.tell(token, LockHint::Closed);
                }
                return Some(record.state(step.now, false, recovered));
            }
        };
        let (recovered, slept_on) = record.sweep(step.now);
        record.serve(step, None);
        record.finish(step, key, slept_on);
        Some(record.state(step.now, created, recovered))
    }

    /// The semaphore, created if there is none, and whether it was created.
    fn created(&mut self, now: Instant, key: &Arc<str>, semaphore: Create) -> (&mut SemaphoreRecord, bool) {
        if self.sweep.is_due(self.by_key.len()) {
            self.by_key.retain(|_, record| record.until > now);
            self.sweep.done(self.by_key.len());
        }
        let created = self.existing(now, key).is_none();
        let record = self.by_key.entry(Arc::clone(key)).or_insert_with(|| SemaphoreRecord {
            created_with: semaphore.capacity,
            capacity: semaphore.capacity,
            idle_ttl: semaphore.idle_ttl,
            holders: Vec::new(),
            queue: VecDeque::new(),
            until: now,
        });
        (record, created)
    }

    fn existing(&mut self, now: Instant, key: &Arc<str>) -> Option<&mut SemaphoreRecord> {
        if self.by_key.get(key)?.until <= now {
            self.by_key.remove(key);
        }
        self.by_key.get_mut(key)
    }
}

impl SemaphoreRecord {
    fn available(&self) -> u32 {
        self.capacity.saturating_sub(count(self.holders.len()))
    }

    /// Removes the permits whose leases have ended. Returns how many there were, and until when the waiters
    /// sleep; `None` if there are no waiters.
    fn sweep(&mut self, now: Instant) -> (u32, Option<Instant>) {
        let first = self.holders.first().map_or_else(|| later(now, Duration::MAX), |(end, _)| *end);
        let ended = self.holders.partition_point(|(end, _)| *end <= now);
        self.holders.drain(..ended);
        (count(ended), (!self.queue.is_empty()).then_some(first))
    }

    /// Restarts a permit's lease; returns whether the token has one.
    fn renew(&mut self, now: Instant, token: &Token, lease: Duration) -> bool {
        let at = self.holders.iter().position(|(_, holder)| holder == token);
        if let Some(at) = at {
            let (_, token) = self.holders.remove(at);
            self.grant(now, token, lease);
        }
        at.is_some()
    }

    fn grant(&mut self, now: Instant, token: Token, lease: Duration) {
        let holder = (later(now, lease), token);
        let at = self
            .holders
            .partition_point(|(end, token)| (end, token.as_str()) < (&holder.0, holder.1.as_str()));
        self.holders.insert(at, holder);
    }

    /// Gives the available permits to the waiters in the queue that can be reached, in its order. `own` is the
    /// calling token: it gets no message. Returns whether it got a permit.
    fn serve(&mut self, step: &mut MutexStep<'_>, own: Option<&Token>) -> bool {
        let mut reached = false;
        while self.available() > 0
            && let Some((token, lease)) = self.queue.pop_front()
        {
            let is_own = Some(&token) == own;
            reached |= is_own;
            if is_own || step.tell(&token, LockHint::Granted { fence: 0 }) {
                self.grant(step.now, token, lease);
            }
        }
        reached
    }

    /// Ends a step: tells the waiters if a lease ends sooner than they sleep; keeps the semaphore for its idle
    /// time, and for as long as its leases last.
    fn finish(&mut self, step: &mut MutexStep<'_>, key: &str, slept_on: Option<Instant>) {
        let now = step.now;
        if let (Some(then), Some((first, _))) = (slept_on, self.holders.first())
            && *first < then
            && !self.queue.is_empty()
        {
            step.tell_sooner(key, None);
        }
        let longest = self.holders.last().map_or(Duration::ZERO, |(end, _)| *end - now);
        let needed = longest.saturating_mul(2) + Duration::from_secs(1);
        let keep = if longest.is_zero() { self.idle_ttl } else { self.idle_ttl.max(needed) };
        self.until = later(now, keep);
    }

    fn state(&self, now: Instant, created: bool, recovered: u32) -> SemaphoreState {
        let live = self.holders.iter().filter(|(end, _)| *end > now);
        let holders: Vec<_> = live.map(|(end, token)| (token.clone(), *end - now)).collect();
        SemaphoreState {
            created_with: self.created_with,
            capacity: self.capacity,
            available: self.capacity.saturating_sub(count(holders.len())),
            waiting: count(self.queue.len()),
            holders,
            created,
            recovered,
        }
    }
}

fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
