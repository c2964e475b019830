//! The mutexes and semaphores of a memory store. Plain data under one lock.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::records::{Sweep, later};
use crate::store::load_limit::{EndedLoad, LimitState, LoadLimit};
use crate::store::protocol::*;
use crate::store::wake_locks::{LockHint, LockWaiters, Notification, Wake};

/// How long a queue lasts if the mutex has no time to live under its holder, or a waiter wants it without one.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Default)]
pub(super) struct Mutexes {
    by_key: HashMap<Arc<str>, MutexRecord>,
    sweep: Sweep,
    /// The latest fence of any mutex. A number that grows across all mutexes also grows for each of them.
    fence: u64,
}

#[derive(Default)]
struct MutexRecord {
    holder: Option<MutexOwner>,
    queue: VecDeque<QueuePosition>,
    queue_until: Option<Instant>,
}

struct QueuePosition {
    token: Token,
    ttl: Option<Duration>,
}

struct MutexOwner {
    token: Token,
    fence: u64,
    until: Option<Instant>,
}

/// One step at one moment, and the waiters that it has notified, which are woken when the step is dropped.
pub(super) struct LockStep<'a> {
    /// The lock's key.
    pub(super) key: &'a Arc<str>,
    pub(super) now: Instant,
    /// The store's clock in microseconds: the least value of a new fence.
    pub(super) now_us: u64,
    pub(super) grants: &'a LockWaiters,
    /// Notifies the waiter with this token; returns whether there is one, and its wake-up.
    pub(super) notify: &'a dyn Fn(&Token, LockHint) -> Notification,
    pub(super) wakes: Vec<Wake>,
}

impl LockStep<'_> {
    /// Notifies the waiter with this token; returns whether there is one.
    fn notify(&mut self, token: &Token, hint: LockHint) -> bool {
        let (is_received, wake) = (self.notify)(token, hint);
        self.wakes.extend(wake);
        is_received
    }

    /// Notifies the waiters for the step's lock, except its present holder `aside`, that the lock's time ends sooner than they know.
    fn notify_sooner(&mut self, aside: Option<&Token>) {
        self.wakes.extend(self.grants.notify_missed(self.key, aside));
    }
}

impl Mutexes {
    pub(super) fn take(&mut self, step: &mut LockStep<'_>, ask: &Take<'_>) -> MutexTaken {
        let now = step.now;
        let (record, fence) = self.record(step);
        let has_it = record.holder.as_ref().is_some_and(|holder| holder.token == *ask.token);
        let before = ask.instead.filter(|_| !has_it).and_then(|old| record.leave(old, ask.ttl));
        let was_held = before.is_some();
        if record.holder.is_none() {
            record.pass_on(step, fence, before, Some(ask.token));
        }
        let is_free = record.holder.is_none();
        let holder = record.holder.get_or_insert_with(|| {
            let token = ask.token.clone();
            MutexOwner { token, fence: next(fence, step), until: None }
        });
        if holder.token == *ask.token {
            holder.until = end(now, ask.ttl);
            let granted = holder.fence;
            if is_free && holder.until.is_some() && !record.queue.is_empty() {
                // This token was the head of the queue. The waiters behind it may still sleep until the end of a
                // holder that has vanished.
                step.notify_sooner(Some(ask.token));
            }
            return MutexTaken { taken: Taken::Granted { fence: granted }, was_held };
        }
        let remaining = holder.until.map(|until| until - now);
        if ask.queue {
            if !record.queue.iter().any(|position| position.is(ask.token, ask.ttl)) {
                record.queue.push_back(QueuePosition { token: ask.token.clone(), ttl: ask.ttl });
            }
            record.keep_queue(now, ask.ttl, remaining);
        }
        MutexTaken { taken: Taken::Busy { remaining }, was_held }
    }

    /// Frees the mutex or gives up the token's position in the queue; returns whether the token held the mutex.
    pub(super) fn free(&mut self, step: &mut LockStep<'_>, token: &Token, ttl: Option<Duration>) -> bool {
        let (record, fence) = self.record(step);
        let before = record.leave(token, ttl);
        let held = before.is_some();
        if record.holder.is_none() {
            record.pass_on(step, fence, before, None);
        }
        self.tidy(step);
        held
    }

    pub(super) fn extend(&mut self, step: &mut LockStep<'_>, token: &Token, ttl: Option<Duration>) -> bool {
        let until = end(step.now, ttl);
        let (record, _) = self.record(step);
        let holder = record.holder.as_mut().filter(|holder| holder.token == *token);
        let before = holder.map(|holder| std::mem::replace(&mut holder.until, until));
        let held = before.is_some();
        if before.is_some_and(|before| is_sooner(until, before)) && !record.queue.is_empty() {
            step.notify_sooner(None);
        }
        self.tidy(step);
        held
    }

    pub(super) fn look(&mut self, step: &LockStep<'_>) -> Option<MutexHolder> {
        let holder = self.record(step).0.holder.as_ref().map(|holder| MutexHolder {
            token: Bytes::copy_from_slice(holder.token.as_str().as_bytes()),
            remaining: holder.until.map(|until| until - step.now),
        });
        self.tidy(step);
        holder
    }

    /// Takes the mutex from its holder; returns whether there was one.
    pub(super) fn force(&mut self, step: &mut LockStep<'_>) -> bool {
        let (record, fence) = self.record(step);
        let holder = record.holder.take();
        if let Some(MutexOwner { token, .. }) = &holder {
            step.notify(token, LockHint::Broken);
        }
        let held = holder.is_some();
        if held {
            record.pass_on(step, fence, holder, None);
        }
        self.tidy(step);
        held
    }

    /// The mutex's record without its expired parts, created if there is none, and the latest fence of any mutex.
    fn record(&mut self, step: &LockStep<'_>) -> (&mut MutexRecord, &mut u64) {
        let now = step.now;
        if self.sweep.is_due(self.by_key.len()) {
            self.by_key.retain(|_, record| {
                record.expire(now);
                !record.is_empty()
            });
            self.sweep.done(self.by_key.len());
        }
        let record = self.by_key.entry(Arc::clone(step.key)).or_default();
        record.expire(now);
        (record, &mut self.fence)
    }

    /// Drops the mutex's record, if it is empty.
    fn tidy(&mut self, step: &LockStep<'_>) {
        if self.by_key.get(step.key).is_some_and(MutexRecord::is_empty) {
            self.by_key.remove(step.key);
        }
    }
}

impl QueuePosition {
    fn is(&self, token: &Token, ttl: Option<Duration>) -> bool {
        self.token == *token && self.ttl == ttl
    }
}

impl MutexRecord {
    /// Takes the mutex from this token and returns its record as the holder; `None` if it does not hold the mutex: then its
    /// position in the queue is given up.
    fn leave(&mut self, token: &Token, ttl: Option<Duration>) -> Option<MutexOwner> {
        let held = self.holder.take_if(|holder| holder.token == *token);
        if held.is_none() {
            self.queue.retain(|position| !position.is(token, ttl));
        }
        held
    }

    /// Hands a free mutex to the first waiter in the queue that can be reached. Stops at `own` and removes it from the
    /// queue: that token takes the mutex itself. `before` is the holder that this step has removed, if any.
    fn pass_on(
        &mut self,
        step: &mut LockStep<'_>,
        fence: &mut u64,
        before: Option<MutexOwner>,
        own: Option<&Token>,
    ) {
        while let Some(QueuePosition { token, ttl }) = self.queue.pop_front() {
            if Some(&token) == own {
                return;
            }
            let fence = next(fence, step);
            if step.notify(&token, LockHint::Granted { fence }) {
                let until = end(step.now, ttl);
                self.holder = Some(MutexOwner { token, fence, until });
                // The other waiters sleep until the previous holder's end.
                let slept_on = before.and_then(|before| before.until);
                if !self.queue.is_empty() && is_sooner(until, slept_on) {
                    step.notify_sooner(None);
                }
                return;
            }
        }
    }

    /// Keeps the queue for at least twice the longest time until a waiter takes again.
    fn keep_queue(&mut self, now: Instant, ttl: Option<Duration>, remaining: Option<Duration>) {
        let longest = ttl.zip(remaining).map(|(ttl, remaining)| ttl.max(remaining));
        let keep =
            longest.map_or(DAY, |longest| longest.saturating_mul(2).saturating_add(Duration::from_secs(1)));
        self.queue_until = self.queue_until.max(Some(later(now, keep)));
    }

    fn expire(&mut self, now: Instant) {
        self.holder.take_if(|holder| holder.until.is_some_and(|until| until <= now));
        if self.queue_until.is_some_and(|until| until <= now) {
            self.queue.clear();
        }
        if self.queue.is_empty() {
            self.queue_until = None;
        }
    }

    fn is_empty(&self) -> bool {
        let Self { holder, queue, queue_until: _ } = self;
        holder.is_none() && queue.is_empty()
    }
}

/// A fence that is greater than all earlier ones.
fn next(fence: &mut u64, step: &LockStep<'_>) -> u64 {
    *fence = step.now_us.max(*fence + 1);
    *fence
}

/// Whether `until` is before `than`; `None` stands for a moment that never comes.
fn is_sooner(until: Option<Instant>, than: Option<Instant>) -> bool {
    until.is_some_and(|until| than.is_none_or(|than| until < than))
}

/// When a time to live ends; `None` without one, or if the end is beyond what an `Instant` can represent.
fn end(now: Instant, ttl: Option<Duration>) -> Option<Instant> {
    now.checked_add(ttl?)
}

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
    /// The state of a load limit's control law, once a load has ended under it.
    load_limit: Option<LoadLimit>,
}

impl Semaphores {
    pub(super) fn take(&mut self, step: &mut LockStep<'_>, ask: &TakePermit<'_>) -> PermitTaken {
        let (record, _) = self.created(step, ask.semaphore);
        let (_, slept_on) = record.sweep(step.now);
        let mut granted = record.renew(step.now, ask.token, ask.lease);
        granted |= record.serve(step, Some(ask.token));
        if !granted && record.available() > 0 {
            granted = true;
            record.grant(step.now, ask.token.clone(), ask.lease);
        }
        let position = (ask.token.clone(), ask.lease);
        if !granted && ask.queue && !record.queue.contains(&position) {
            record.queue.push_back(position);
        }
        record.finish(step, slept_on);
        PermitTaken {
            granted,
            available: record.available(),
            created_with: record.created_with,
            next_expiry: record.holders.first().map(|(end, _)| *end - step.now),
        }
    }

    /// Frees a permit, or gives up the token's position in the queue. If the token held a permit of a load limit, also counts the load
    /// that has `ended`.
    pub(super) fn free(
        &mut self,
        step: &mut LockStep<'_>,
        token: &Token,
        lease: Duration,
        ended: Option<EndedLoad>,
    ) -> (PermitFreed, Option<LimitState>) {
        let Some(record) = self.existing(step) else {
            return (PermitFreed { was_held: false, available: 0 }, None);
        };
        let (_, slept_on) = record.sweep(step.now);
        let before = record.holders.len();
        record.holders.retain(|(_, holder)| holder != token);
        let was_held = record.holders.len() < before;
        if !was_held {
            record.queue.retain(|(queued, theirs)| queued != token || *theirs != lease);
        }
        // Before the freed permit goes to a waiter, because the limit may become lower.
        let limit = ended.filter(|_| was_held).map(|ended| record.end_load(step.now, token, ended));
        record.serve(step, None);
        record.finish(step, slept_on);
        (PermitFreed { was_held, available: record.available() }, limit)
    }

    pub(super) fn refresh(&mut self, step: &mut LockStep<'_>, token: &Token, lease: Duration) -> bool {
        let Some(record) = self.existing(step) else { return false };
        let (_, slept_on) = record.sweep(step.now);
        let held = record.renew(step.now, token, lease);
        record.serve(step, None);
        record.finish(step, slept_on);
        held
    }

    pub(super) fn look(&mut self, step: &LockStep<'_>) -> Option<SemaphoreState> {
        Some(self.existing(step)?.state(step.now, false, 0))
    }

    pub(super) fn change(
        &mut self,
        step: &mut LockStep<'_>,
        change: SemaphoreChange,
    ) -> Option<SemaphoreState> {
        let (record, created) = match change {
            SemaphoreChange::Ensure(semaphore) => self.created(step, semaphore),
            SemaphoreChange::Add { permits, semaphore } => {
                let (record, created) = self.created(step, semaphore);
                record.capacity = record.capacity.saturating_add(permits);
                (record, created)
            }
            SemaphoreChange::Sweep => (self.existing(step)?, false),
            SemaphoreChange::Delete => {
                self.existing(step)?;
                let mut record = self.by_key.remove(step.key)?;
                let (recovered, _) = record.sweep(step.now);
                for (token, _) in &record.queue {
                    step.notify(token, LockHint::Closed);
                }
                return Some(record.state(step.now, false, recovered));
            }
        };
        let (recovered, slept_on) = record.sweep(step.now);
        record.serve(step, None);
        record.finish(step, slept_on);
        Some(record.state(step.now, created, recovered))
    }

    /// The semaphore, created if there is none, and whether it was created.
    fn created(&mut self, step: &LockStep<'_>, semaphore: Create) -> (&mut SemaphoreRecord, bool) {
        if self.sweep.is_due(self.by_key.len()) {
            self.by_key.retain(|_, record| record.until > step.now);
            self.sweep.done(self.by_key.len());
        }
        let created = self.existing(step).is_none();
        let record = self.by_key.entry(Arc::clone(step.key)).or_insert_with(|| SemaphoreRecord {
            created_with: semaphore.capacity,
            capacity: semaphore.capacity,
            idle_ttl: semaphore.idle_ttl,
            holders: Vec::new(),
            queue: VecDeque::new(),
            until: step.now,
            load_limit: None,
        });
        (record, created)
    }

    fn existing(&mut self, step: &LockStep<'_>) -> Option<&mut SemaphoreRecord> {
        if self.by_key.get(step.key)?.until <= step.now {
            self.by_key.remove(step.key);
        }
        self.by_key.get_mut(step.key)
    }
}

impl SemaphoreRecord {
    fn available(&self) -> u32 {
        self.capacity.saturating_sub(count(self.holders.len()))
    }

    /// Counts a load whose permit was given back, and sets the capacity to the law's new limit.
    fn end_load(&mut self, now: Instant, token: &Token, ended: EndedLoad) -> LimitState {
        let waits = !self.queue.is_empty();
        let idle = self.holders.is_empty() && !waits;
        let law = self.load_limit.get_or_insert_with(|| LoadLimit::new(self.capacity, now));
        let process = u8::from_str_radix(token.as_str().get(..2).unwrap_or_default(), 16).unwrap_or_default();
        let state = law.end_load(now, process, ended, (waits, idle));
        self.capacity = state.limit;
        state
    }

    /// Removes the permits whose leases have ended. Returns how many there were, and until when the waiters
    /// sleep (the end of the first lease); `None` if there are no waiters.
    fn sweep(&mut self, now: Instant) -> (u32, Option<Instant>) {
        let first = self.holders.first().map_or_else(|| later(now, Duration::MAX), |(end, _)| *end);
        let ended = self.holders.partition_point(|(end, _)| *end <= now);
        self.holders.drain(..ended);
        (count(ended), (!self.queue.is_empty()).then_some(first))
    }

    /// Restarts the lease of the token's permit; returns whether the token has a permit.
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

    /// Gives the available permits to the waiters that can be reached, in the order of the queue. `own` is the
    /// calling token: it gets no message. Returns whether `own` got a permit.
    fn serve(&mut self, step: &mut LockStep<'_>, own: Option<&Token>) -> bool {
        let mut reached = false;
        while self.available() > 0
            && let Some((token, lease)) = self.queue.pop_front()
        {
            let is_own = Some(&token) == own;
            reached |= is_own;
            if is_own || step.notify(&token, LockHint::Granted { fence: 0 }) {
                self.grant(step.now, token, lease);
            }
        }
        reached
    }

    /// Ends a step: notifies the waiters if a lease ends before they wake; keeps the semaphore for its idle
    /// time, or for twice the time until its last lease ends, if that is longer.
    fn finish(&mut self, step: &mut LockStep<'_>, slept_on: Option<Instant>) {
        let now = step.now;
        if let (Some(then), Some((first, _))) = (slept_on, self.holders.first())
            && *first < then
            && !self.queue.is_empty()
        {
            step.notify_sooner(None);
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

/// The locks that a memory store holds.
#[derive(Default)]
pub(super) struct LockTable {
    pub(super) mutexes: Mutexes,
    pub(super) semaphores: Semaphores,
}
