//! Registry of this process's waiters for locks and of its holders, and their messages by token: grants and others ([`LockHint`]).
//!
//! A waiter registers before its first take (invariant 4 of locks in [`store`](crate::store)), so it also receives
//! a grant that comes before the take's answer.
//!
//! Of all waiters for one lock in this process ([`WaitLine`]), only the first watches the clock ([`LockWaiter::watch`]):
//! one command per process and period, however many wait. They share the known end of the lock's time: what the first has
//! learned is used by the waiter that is first after it. The others watch the first and send nothing. The first's future may stop being
//! polled, so a waiter that finds the first silent replaces it. Waiters that poll the lock have their own timers and cannot become
//! the first: they are registered by token only, as holders are.

#[cfg(test)]
#[path = "../../tests/unit/store/lock_waiters_tests.rs"]
mod tests;

use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use crate::store::{LockName, Token};
use crate::sync::lock;

/// All registered waiters.
#[derive(Debug, Default)]
pub(crate) struct LockWaiters {
    registry: Mutex<WaiterMap>,
}

#[derive(Debug, Default)]
struct WaiterMap {
    /// How many waiters have registered so far.
    registered: u64,
    by_token: HashMap<Token, Arc<RegisteredLockWaiter>>,
    /// The waiters that are in a line, by the lock's key: neither holders nor waiters that poll.
    waiting: HashMap<Arc<str>, WaitLine>,
}

/// A registered waiter; dropping it ends the registration. Later messages do not reach it, and a grant that was not taken
/// is dropped with it: a waiter that leaves without knowing whether it has the lock must free it.
#[derive(Debug)]
pub(crate) struct LockWaiter {
    waiter: Arc<RegisteredLockWaiter>,
    grants: Arc<LockWaiters>,
}

impl LockWaiters {
    /// Registers a waiter behind the present waiters of its lock.
    pub(crate) fn register(self: &Arc<Self>, name: &LockName, token: &Token) -> LockWaiter {
        let mut registry = lock(&self.registry);
        registry.registered += 1;
        let waiter = Arc::new(RegisteredLockWaiter {
            number: registry.registered,
            key: Arc::clone(&name.key),
            token: token.clone(),
            notified: Mutex::default(),
            granted: AtomicBool::new(false),
            asked: AtomicU32::new(0),
            woken: Notify::new(),
        });
        registry.by_token.insert(token.clone(), Arc::clone(&waiter));
        registry.waiting.entry(Arc::clone(&name.key)).or_default().push(Arc::clone(&waiter));
        drop(registry);
        LockWaiter { waiter, grants: Arc::clone(self) }
    }

    /// Delivers a message to the waiter with this token; `None` if there is none.
    pub(crate) fn notify(&self, token: &Token, hint: LockHint) -> Option<Wake> {
        let waiter = Arc::clone(lock(&self.registry).by_token.get(token)?);
        {
            let mut notified = lock(&waiter.notified);
            match hint {
                LockHint::Granted { fence } => {
                    notified.granted = Some(fence);
                    waiter.granted.store(true, Ordering::Relaxed);
                }
                LockHint::Closed => notified.closed = true,
                LockHint::Broken => notified.broken = true,
            }
        }
        Some(Wake::and(waiter, None))
    }

    /// Notifies the first waiter in line for this lock to take again, if possible one that was not just granted it: the lock may
    /// be free, now or sooner than was known. That take serves the waiter that is next in the queue, so the others need not
    /// send one, unless the first is silent. `aside` is not notified: it holds the lock now.
    pub(crate) fn notify_missed(&self, key: &str, aside: Option<&Token>) -> Option<Wake> {
        lock(&self.registry).waiting.get_mut(key)?.miss(aside)
    }

    /// Notifies all holders, all waiters that poll, and the first waiter of each lock, that messages may have been lost. The first
    /// waiter's take is enough for the lock to be handed on; [`AbsentWaiters`] checks the other waiters.
    pub(crate) fn notify_firsts_missed(&self) {
        let (firsts, holders): (Vec<_>, Vec<_>) = {
            let mut registry = lock(&self.registry);
            let firsts = registry.waiting.values_mut().filter_map(WaitLine::miss_in_silence).collect();
            let waiting: HashSet<_> =
                registry.waiting.values().flat_map(WaitLine::all).map(|waiter| waiter.number).collect();
            let holders = registry.by_token.values().filter(|waiter| !waiting.contains(&waiter.number));
            (firsts, holders.cloned().collect())
        };
        for holder in holders {
            holder.notify(LockHints::mark_silent);
        }
        drop(firsts);
    }

    /// Notifies the waiters and holders of one node that messages may have been lost, where several nodes share a registry.
    pub(crate) fn notify_node_missed(&self, node: Uuid) {
        self.notify_each(RegisteredLockWaiter::of(node), LockHints::mark_silent);
    }

    /// Notifies the waiters and holders of this node that the store is closed.
    pub(crate) fn close(&self, node: Uuid) {
        self.notify_each(RegisteredLockWaiter::of(node), |notified| notified.closed = true);
    }

    fn notify_each(&self, whom: impl Fn(&RegisteredLockWaiter) -> bool, enter: impl Fn(&mut LockHints)) {
        let mut all: Vec<_> =
            lock(&self.registry).by_token.values().filter(|waiter| whom(waiter)).cloned().collect();
        // A map's order is random; without a fixed order a simulation could not be repeated.
        all.sort_unstable_by_key(|waiter| waiter.number);
        for waiter in all {
            waiter.notify(&enter);
        }
    }

    /// Whether there is a waiter or a holder with this token.
    #[cfg(feature = "testing")]
    pub(crate) fn is_registered(&self, token: &Token) -> bool {
        lock(&self.registry).by_token.contains_key(token)
    }

    /// Records that a take is sent with this token now. Returns whether another may have been sent with it before.
    pub(crate) fn begin_take(&self, token: &Token) -> bool {
        let registry = lock(&self.registry);
        registry.by_token.get(token).is_none_or(|waiter| {
            let next = |takes: u32| Some((takes + 2) & !1);
            waiter.asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok_and(|takes| takes > 0)
        })
    }

    /// Records that the last take with this token was answered.
    pub(crate) fn record_answer(&self, token: &Token) {
        if let Some(waiter) = lock(&self.registry).by_token.get(token) {
            waiter.asked.fetch_or(1, Ordering::Relaxed);
        }
    }

    /// Whether there are waiters in line for the lock with this key.
    pub(crate) fn anyone_waits(&self, key: &str) -> bool {
        lock(&self.registry).waiting.contains_key(key)
    }
}

impl WaiterMap {
    /// Removes a waiter from its line; returns the waiters to wake.
    fn stop_waiting(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> Option<Wake> {
        let Entry::Occupied(mut line) = self.waiting.entry(Arc::clone(&waiter.key)) else { return None };
        let wake = line.get_mut().remove(waiter);
        if line.get().is_empty() {
            line.remove();
        }
        wake
    }
}

impl LockWaiter {
    /// Waits for messages and takes them, merged. One task at a time.
    ///
    /// # Cancel safety
    ///
    /// Safe: messages are taken at the moment this returns.
    pub(crate) async fn notified(&self) -> LockHints {
        loop {
            self.waiter.woken.notified().await;
            let notified = std::mem::take(&mut *lock(&self.waiter.notified));
            // Two messages may be taken at once, and the second wake-up then finds none.
            if notified != LockHints::default() {
                return notified;
            }
        }
    }

    /// Whether this is the first waiter in line for its lock in this process.
    pub(crate) fn is_first(&self) -> bool {
        self.in_line(|line| line.is_first(&self.waiter)).unwrap_or_default()
    }

    /// When this waiter must act by the clock, and how. It wants the lock for `ttl`. If it waited alone, it would send a take at `own`.
    pub(crate) fn watch(&self, own: Instant, ttl: Option<Duration>) -> ClockRole {
        let watched = self.in_line(|line| {
            line.hurry(ttl);
            line.watch(&self.waiter, own)
        });
        watched.map_or(ClockRole::Look(own), |(watch, _)| watch)
    }

    /// Records that the waiter sends a take now. Until the answer is due, the waiter does not count as silent.
    pub(crate) fn asks(&self) {
        drop(self.in_line(|line| line.ask(&self.waiter)));
    }

    /// Makes this waiter the first of its lock in this process if the present first waiter was silent. Returns whether it has become
    /// the first; then it must send a TAKE at once.
    pub(crate) fn stands_in(&self) -> bool {
        self.in_line(|line| line.stand_in(&self.waiter)).unwrap_or_default()
    }

    /// Records the answer to a take that was sent at `sent_at`: another token holds the lock until `ends`, for ever if `None`. A
    /// grant that this waiter received earlier is void.
    pub(crate) fn is_busy(&self, sent_at: Instant, ends: Option<Instant>) {
        self.waiter.granted.store(false, Ordering::Relaxed);
        self.learn(sent_at, ends);
    }

    /// Records that the lock is not free before `ends`, never if `None`, by the answer to a take that was sent at `sent_at`.
    pub(crate) fn learn(&self, sent_at: Instant, ends: Option<Instant>) {
        drop(self.in_line(|line| line.learn(&self.waiter, sent_at, ends)));
    }

    /// Runs `act` on the line of this waiter's lock; the waiter is not silent any more. A `Wake` in the result must be dropped after
    /// this returns.
    fn in_line<T>(&self, act: impl FnOnce(&mut WaitLine) -> T) -> Option<T> {
        let mut registry = lock(&self.grants.registry);
        let line = registry.waiting.get_mut(&self.waiter.key)?;
        line.hear(&self.waiter);
        Some(act(line))
    }

    /// Leaves the line, so that the next waiter is the first, but stays registered: for holders, which must receive
    /// `broken`, and for waiters that poll.
    pub(crate) fn hold(&self) {
        let wake = lock(&self.grants.registry).stop_waiting(&self.waiter);
        drop(wake);
    }
}

impl Drop for LockWaiter {
    fn drop(&mut self) {
        {
            let mut registry = lock(&self.grants.registry);
            if let Entry::Occupied(waiter) = registry.by_token.entry(self.waiter.token.clone())
                && Arc::ptr_eq(waiter.get(), &self.waiter)
            {
                waiter.remove();
            }
        }
        self.hold();
    }
}

/// By how much the first waiter of a line may be late, at the most, before another waiter replaces it.
const PATIENCE: Duration = Duration::from_millis(400);
/// The least patience, for waiters that want the lock for a short time: on a busy machine a shorter delay does not mean that the
/// first waiter is silent.
const LEAST_PATIENCE: Duration = Duration::from_millis(50);
/// How long the first waiter may wait for the answer to a take before it counts as silent.
const ANSWER: Duration = Duration::from_millis(500);
/// Two answers that report the same end of the lock's time may differ by this, because of their round trips.
const ABOUT_THE_SAME: Duration = Duration::from_millis(10);

/// The waiters of one process for one lock.
#[derive(Debug)]
struct WaitLine {
    /// In the order of their registration; the first watches the clock.
    waiters: VecDeque<Arc<RegisteredLockWaiter>>,
    /// Waiters that were replaced as the first because they were silent. Each goes to the end of the line as soon as it
    /// does anything, so the others wait for it only once.
    silent: Vec<Arc<RegisteredLockWaiter>>,
    known: Option<KnownHolder>,
    /// The latest moment at which the first waiter sends its next take.
    due: Option<Instant>,
    /// Until when the first waiter may wait for the answer to its take.
    answer: Option<Instant>,
    /// By how much the first waiter may be late before another replaces it: less if a time to live is short.
    patience: Duration,
    /// The latest moment until which any of the other waiters may sleep without checking `due`.
    asleep: Option<Instant>,
}

/// Until when another token holds the lock, as far as this process knows.
#[derive(Clone, Copy, Debug)]
struct KnownHolder {
    /// When the take was sent, or the message arrived.
    at: Instant,
    /// `None`: for ever.
    ends: Option<Instant>,
    /// A message said that this has changed, and no waiter has received an answer to a take since.
    is_open: bool,
}

/// What a waiter must do by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClockRole {
    /// The waiter is the first: it sends a take at this moment.
    Look(Instant),
    /// The waiter checks at this moment whether the first was silent; `None` if it is not known when the first should send a take.
    Stand(Option<Instant>),
}

impl Default for WaitLine {
    fn default() -> Self {
        Self {
            waiters: VecDeque::new(),
            silent: Vec::new(),
            known: None,
            due: None,
            answer: None,
            patience: PATIENCE,
            asleep: None,
        }
    }
}

impl WaitLine {
    fn push(&mut self, waiter: Arc<RegisteredLockWaiter>) {
        self.waiters.push_back(waiter);
    }

    fn is_empty(&self) -> bool {
        self.waiters.is_empty() && self.silent.is_empty()
    }

    /// All waiters; the first of them watches the clock, unless all are silent.
    fn all(&self) -> impl Iterator<Item = &Arc<RegisteredLockWaiter>> {
        self.waiters.iter().chain(&self.silent)
    }

    fn is_first(&self, waiter: &Arc<RegisteredLockWaiter>) -> bool {
        self.waiters.front().is_some_and(|first| Arc::ptr_eq(first, waiter))
    }

    /// The waiter has done something, so it is not silent any more: it goes to the end of the line.
    fn hear(&mut self, waiter: &Arc<RegisteredLockWaiter>) {
        if let Some(at) = self.silent.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            self.waiters.push_back(self.silent.remove(at));
        }
    }

    /// When `waiter` must act by the clock, and how. If it waited alone, it would send a take at `own`.
    fn watch(&mut self, waiter: &Arc<RegisteredLockWaiter>, own: Instant) -> (ClockRole, Option<Wake>) {
        let now = Instant::now();
        if self.is_first(waiter) {
            let look = self.known.and_then(|known| known.ends).map_or(own, |ends| ends.min(own));
            self.answer = None;
            return (ClockRole::Look(look), self.expect(look.max(now)));
        }
        let until = self.due.map(|due| due + self.patience).filter(|&until| now < until);
        let until = until.or_else(|| self.silent_from());
        self.asleep = self.asleep.max(until);
        (ClockRole::Stand(until), None)
    }

    /// Limits how late the first waiter may be before another replaces it: half of `ttl`, the time for which a waiter wants
    /// the lock, between `LEAST_PATIENCE` and `PATIENCE`. A shorter limit stays.
    fn hurry(&mut self, ttl: Option<Duration>) {
        let patience = ttl.map_or(PATIENCE, |ttl| (ttl / 2).clamp(LEAST_PATIENCE, PATIENCE));
        self.patience = self.patience.min(patience);
    }

    /// `waiter` sends a take now. If it is the first, the others wait for its answer.
    fn ask(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> Option<Wake> {
        if !self.is_first(waiter) {
            return None;
        }
        let now = Instant::now();
        self.answer = Some(now + ANSWER);
        self.expect(self.due.map_or(now, |due| due.min(now)))
    }

    /// The moment from which on the first waiter counts as silent; `None` if no take of it is expected.
    fn silent_from(&self) -> Option<Instant> {
        Some(self.due.max(self.answer)? + self.patience)
    }

    /// Makes `waiter` the first if the present first was silent. Returns whether it has become the first; then it must send a take at once.
    fn stand_in(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> bool {
        let now = Instant::now();
        if self.is_first(waiter) || self.silent_from().is_none_or(|from| now < from) {
            return false;
        }
        let Some(at) = self.waiters.iter().position(|other| Arc::ptr_eq(other, waiter)) else { return false };
        self.silent.extend(self.waiters.pop_front());
        // The index is one less, because the first was removed.
        let Some(next) = self.waiters.remove(at - 1) else { return false };
        self.waiters.push_front(next);
        // One replacement is enough for all waiters whose patience has ended.
        (self.due, self.answer) = (Some(now), Some(now + ANSWER));
        true
    }

    /// Sets the latest moment of the first waiter's next take. Returns the waiters to wake: all others, if they sleep for longer than
    /// they may if the first is silent. A small difference wakes none, so they are woken at most a few times per `patience`.
    fn expect(&mut self, due: Instant) -> Option<Wake> {
        self.due = Some(due);
        let until = due + self.patience;
        if self.asleep.is_none_or(|asleep| asleep <= until + self.patience / 4) {
            return None;
        }
        self.asleep = Some(until);
        let others: Vec<_> = self.waiters.iter().skip(1).cloned().collect();
        for other in &others {
            lock(&other.notified).role_changed = true;
        }
        Some(Wake(others))
    }

    /// As [`LockWaiter::learn`]. Returns the waiters to wake: the first, if it sleeps until the end that was known before, and that
    /// end is later than `ends`.
    fn learn(
        &mut self,
        waiter: &Arc<RegisteredLockWaiter>,
        sent_at: Instant,
        ends: Option<Instant>,
    ) -> Option<Wake> {
        let before = self.known;
        if before.is_some_and(|known| sent_at < known.at) {
            return None;
        }
        self.known = Some(KnownHolder { at: sent_at, ends, is_open: false });
        let (ends, then) = (ends?, before?.ends);
        if self.is_first(waiter) || then.is_some_and(|then| then <= ends + ABOUT_THE_SAME) {
            return None;
        }
        let first = Arc::clone(self.waiters.front()?);
        lock(&first.notified).role_changed = true;
        Some(Wake::and(first, self.expect(ends.max(Instant::now()))))
    }

    /// The lock may be free sooner than was known: see [`LockWaiters::notify_missed`].
    fn miss(&mut self, aside: Option<&Token>) -> Option<Wake> {
        let mut others = self.waiters.iter().filter(|waiter| Some(&waiter.token) != aside);
        let without = others.clone().find(|waiter| !waiter.granted.load(Ordering::Relaxed));
        let first = Arc::clone(without.or_else(|| others.next())?);
        lock(&first.notified).missed = true;
        let now = Instant::now();
        // The others use this until a waiter has an answer, because the notified waiter may leave without a take.
        self.known = Some(KnownHolder { at: now, ends: Some(now), is_open: true });
        Some(Wake::and(first, self.expect(now)))
    }

    /// As [`miss`](Self::miss); also marks the notified waiter's hint with the reason: no messages arrived for a time.
    fn miss_in_silence(&mut self) -> Option<Wake> {
        let wake = self.miss(None)?;
        if let Some(first) = wake.0.last() {
            lock(&first.notified).is_silent = true;
        }
        Some(wake)
    }

    /// Removes a waiter. Returns the waiters to wake: the first of the remaining ones, if the first was removed or no take was
    /// answered since the last message.
    fn remove(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> Option<Wake> {
        self.hear(waiter);
        let at = self.waiters.iter().position(|other| Arc::ptr_eq(other, waiter))?;
        self.waiters.remove(at);
        let first = Arc::clone(self.waiters.front()?);
        let is_open = self.known.is_some_and(|known| known.is_open);
        if at > 0 && !is_open {
            return None;
        }
        {
            let mut notified = lock(&first.notified);
            notified.role_changed |= at == 0;
            notified.missed |= is_open;
        }
        let now = Instant::now();
        self.answer = self.answer.filter(|_| at > 0);
        // This moment applies until the new first waiter calls `watch`.
        let due = self.known.and_then(|known| known.ends).map_or(now, |ends| ends.max(now));
        Some(Wake::and(first, self.expect(due)))
    }
}

/// The messages to a waiter since it last took them, merged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LockHints {
    /// This waiter holds the lock, with this fence (0 for a permit).
    pub(crate) granted: Option<u64>,
    /// The semaphore was deleted, or the store closed.
    pub(crate) closed: bool,
    /// The mutex was broken: taken away from its holder.
    pub(crate) broken: bool,
    /// A message may have been missed, or the lock's time has changed: take again.
    pub(crate) missed: bool,
    /// `missed` is set because no messages arrived for a time.
    pub(crate) is_silent: bool,
    /// The waiter must call `watch` again: it has become the first of its lock in this process, or it must act earlier than its
    /// [`ClockRole`] said.
    pub(crate) role_changed: bool,
}

impl LockHints {
    fn mark_silent(&mut self) {
        (self.missed, self.is_silent) = (true, true);
    }
}

/// One message from a store to one waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockHint {
    Granted { fence: u64 },
    Closed,
    Broken,
}

#[derive(Debug)]
struct RegisteredLockWaiter {
    /// This waiter's number in the order of registration.
    number: u64,
    key: Arc<str>,
    token: Token,
    notified: Mutex<LockHints>,
    /// Whether it was granted the lock, so that it need not be notified to take again.
    granted: AtomicBool,
    /// Twice the number of takes that were sent for it, each of which may have queued it, plus one if the last was
    /// answered.
    asked: AtomicU32,
    woken: Notify,
}

impl RegisteredLockWaiter {
    /// Selects the waiters of this node.
    fn of(node: Uuid) -> impl Fn(&Self) -> bool {
        let node = node.simple().to_string();
        move |waiter| waiter.token.node() == node
    }

    fn notify(&self, enter: impl FnOnce(&mut LockHints)) {
        enter(&mut lock(&self.notified));
        self.woken.notify_one();
    }
}

/// Whether the sender of a message believes that it was received, and the wake-up of its receiver.
pub(crate) type Notification = (bool, Option<Wake>);

/// Wakes waiters when it is dropped. A step under the store's lock returns it, and its caller drops it after the lock,
/// because waking runs foreign code.
#[derive(Debug)]
#[must_use = "what was told is heard when this is dropped, which must not be under a lock"]
pub(crate) struct Wake(Vec<Arc<RegisteredLockWaiter>>);

impl Wake {
    fn and(waiter: Arc<RegisteredLockWaiter>, others: Option<Self>) -> Self {
        let mut wake = others.unwrap_or_else(|| Self(Vec::new()));
        wake.0.push(waiter);
        wake
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        for waiter in &self.0 {
            waiter.woken.notify_one();
        }
    }
}

/// The waiters of one lock in this process, except the first, that must be looked up in the lock's queue, because messages may have been
/// lost. The first waiter is notified to take again. Any other waiter that is found in the queue is removed from here and needs to do
/// nothing, because it will receive its grant. A waiter that is not in the queue was passed over, or its grant was lost, and it must
/// take again.
pub(crate) struct AbsentWaiters {
    pub(crate) name: LockName,
    waiters: HashMap<Token, Absent>,
}

/// A waiter that was not found in the queue, or not looked for yet.
pub(crate) struct Absent {
    waiter: Arc<RegisteredLockWaiter>,
    /// The waiter's counter of takes before the queue was read.
    takes: u32,
}

impl LockWaiters {
    /// The waiters of all locks that must be looked up in their queues.
    pub(crate) fn all_absent_waiters(&self) -> Vec<AbsentWaiters> {
        lock(&self.registry).waiting.iter().map(|(key, line)| AbsentWaiters::of(key, line)).collect()
    }

    /// The waiters of the lock with this key that must be looked up; `None` if there are none.
    pub(crate) fn absent_waiters(&self, key: &str) -> Option<AbsentWaiters> {
        let registry = lock(&self.registry);
        Some(AbsentWaiters::of(key, registry.waiting.get(key)?))
            .filter(|absent_waiters| !absent_waiters.is_empty())
    }
}

impl AbsentWaiters {
    fn of(key: &str, line: &WaitLine) -> Self {
        let absent = |waiter: &Arc<RegisteredLockWaiter>| {
            let takes = waiter.asked.load(Ordering::Relaxed);
            // A waiter that has not sent a take yet cannot have lost its position in the queue.
            (takes > 0).then(|| (waiter.token.clone(), Absent { waiter: Arc::clone(waiter), takes }))
        };
        Self { name: LockName::of_key(key), waiters: line.all().skip(1).filter_map(absent).collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Removes a waiter that is in the queue.
    pub(crate) fn found(&mut self, token: &Token) {
        self.waiters.remove(token);
    }

    /// Notifies the waiter with this token to take again, if it is one of these waiters.
    pub(crate) fn notify(&self, token: &Token) {
        if let Some(absent) = self.waiters.get(token) {
            absent.notify();
        }
    }

    /// The waiters that were not found, in the order of their registration.
    pub(crate) fn absent(self) -> Vec<Absent> {
        let mut absent: Vec<_> = self.waiters.into_values().collect();
        absent.sort_unstable_by_key(|absent| absent.waiter.number);
        absent
    }
}

impl Absent {
    /// Notifies the waiter to take again, unless its last take was answered before the queue was read and it has sent another since.
    pub(crate) fn notify(&self) {
        let waiter = &self.waiter;
        // If its last take was answered before the queue was read, the waiter is not in the queue: with a counter of 0, its next
        // take does not search the queue for it.
        let was_answered = self.takes % 2 == 1;
        if was_answered
            && waiter.asked.compare_exchange(self.takes, 0, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        waiter.notify(LockHints::mark_silent);
    }
}
