//! The waiters of one process for one lock: which of them watches the clock for all, and which replaces it if it is
//! silent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::waiter::{RegisteredLockWaiter, Wake};
use crate::store::names::Token;
use crate::sync::lock;

/// The longest time by which the first waiter may be late.
const PATIENCE: Duration = Duration::from_millis(400);
/// The shortest: on a busy machine a shorter delay does not mean silence.
const LEAST_PATIENCE: Duration = Duration::from_millis(50);
/// How long the first waiter may take to get an answer.
const ANSWER: Duration = Duration::from_millis(500);
/// Answers about the same moment differ by their round trips.
const ABOUT_THE_SAME: Duration = Duration::from_millis(10);

/// The waiters of one process for one lock.
#[derive(Debug)]
pub(crate) struct WaitLine {
    /// In the order of their registration; the first watches the clock.
    waiters: VecDeque<Arc<RegisteredLockWaiter>>,
    /// Waiters that were replaced as the first because they were silent. Each goes to the end of the line as soon as it
    /// does anything, so its patience is spent once.
    silent: Vec<Arc<RegisteredLockWaiter>>,
    known: Option<KnownHolder>,
    /// When the first asks at the latest.
    due: Option<Instant>,
    /// Until when the first may wait for an answer.
    answer: Option<Instant>,
    /// How late the first may be: less if a time to live is short.
    patience: Duration,
    /// Until when other waiters may sleep without checking `due`.
    asleep: Option<Instant>,
}

/// Until when another token holds the lock, as far as this process knows.
#[derive(Clone, Copy, Debug)]
struct KnownHolder {
    /// When the question was sent, or the message arrived.
    at: Instant,
    /// `None`: for ever.
    ends: Option<Instant>,
    /// The process was only told that this has changed, and no waiter has an answer yet.
    is_open: bool,
}

/// What a waiter must do by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClockDuty {
    /// It is the first: ask at this moment.
    Look(Instant),
    /// Check at this moment whether the first was silent; `None` if the first has no moment to be measured by.
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
    pub(crate) fn push(&mut self, waiter: Arc<RegisteredLockWaiter>) {
        self.waiters.push_back(waiter);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty() && self.silent.is_empty()
    }

    /// All waiters; the first of them watches the clock, unless all are silent.
    #[cfg(feature = "redis")]
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<RegisteredLockWaiter>> {
        self.waiters.iter().chain(&self.silent)
    }

    pub(crate) fn is_first(&self, waiter: &Arc<RegisteredLockWaiter>) -> bool {
        self.waiters.front().is_some_and(|first| Arc::ptr_eq(first, waiter))
    }

    /// The waiter has done something: it is not silent any more.
    pub(crate) fn hear(&mut self, waiter: &Arc<RegisteredLockWaiter>) {
        if let Some(at) = self.silent.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            self.waiters.push_back(self.silent.remove(at));
        }
    }

    /// What `waiter` must do by the clock; it would ask by itself at `own`.
    pub(crate) fn watch(
        &mut self,
        waiter: &Arc<RegisteredLockWaiter>,
        own: Instant,
    ) -> (ClockDuty, Option<Wake>) {
        let now = Instant::now();
        if self.is_first(waiter) {
            let look = self.known.and_then(|known| known.ends).map_or(own, |ends| ends.min(own));
            self.answer = None;
            return (ClockDuty::Look(look), self.expect(look.max(now)));
        }
        let until = self.due.map(|due| due + self.patience).filter(|&until| now < until);
        let until = until.or_else(|| self.silent_from());
        self.asleep = self.asleep.max(until);
        (ClockDuty::Stand(until), None)
    }

    /// Limits how late the first waiter may be before another replaces it: half of `ttl`, the time for which a waiter wants the lock,
    /// between `LEAST_PATIENCE` and `PATIENCE`. A shorter limit stays.
    pub(crate) fn hurry(&mut self, ttl: Option<Duration>) {
        let patience = ttl.map_or(PATIENCE, |ttl| (ttl / 2).clamp(LEAST_PATIENCE, PATIENCE));
        self.patience = self.patience.min(patience);
    }

    /// `waiter` asks now. If it is the first, the others wait for its answer.
    pub(crate) fn ask(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> Option<Wake> {
        if !self.is_first(waiter) {
            return None;
        }
        let now = Instant::now();
        self.answer = Some(now + ANSWER);
        self.expect(self.due.map_or(now, |due| due.min(now)))
    }

    /// From when on the first counts as silent.
    fn silent_from(&self) -> Option<Instant> {
        Some(self.due.max(self.answer)? + self.patience)
    }

    /// Makes `waiter` the first if the first was silent; true if it did, and then `waiter` must ask at once.
    pub(crate) fn stand_in(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> bool {
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

    /// Sets when the first asks at the latest. Returns the waiters to wake: those that sleep for longer than they may if
    /// the first is silent. They then check everything that has changed, so they are woken at most once per patience.
    fn expect(&mut self, due: Instant) -> Option<Wake> {
        self.due = Some(due);
        let until = due + self.patience;
        if self.asleep.is_none_or(|asleep| asleep <= until + self.patience / 4) {
            return None;
        }
        self.asleep = Some(until);
        let others: Vec<_> = self.waiters.iter().skip(1).cloned().collect();
        for other in &others {
            lock(&other.told).first = true;
        }
        Some(Wake(others))
    }

    /// Records that by the answer to a question sent at `asked`, the lock is not free before `ends`. Returns the waiters
    /// to wake: the first, which sleeps on what was known before.
    pub(crate) fn learn(
        &mut self,
        waiter: &Arc<RegisteredLockWaiter>,
        asked: Instant,
        ends: Option<Instant>,
    ) -> Option<Wake> {
        let before = self.known;
        if before.is_some_and(|known| asked < known.at) {
            return None;
        }
        self.known = Some(KnownHolder { at: asked, ends, is_open: false });
        let (ends, then) = (ends?, before?.ends);
        if self.is_first(waiter) || then.is_some_and(|then| then <= ends + ABOUT_THE_SAME) {
            return None;
        }
        let first = Arc::clone(self.waiters.front()?);
        lock(&first.told).first = true;
        Some(Wake::and(first, self.expect(ends.max(Instant::now()))))
    }

    /// The lock may be free sooner than was known: see [`Grants::tell_missed`](super::Grants::tell_missed).
    pub(crate) fn miss(&mut self, aside: Option<&Token>) -> Option<Wake> {
        let mut others = self.waiters.iter().filter(|waiter| Some(&waiter.token) != aside);
        let without = others.clone().find(|waiter| !waiter.granted.load(Ordering::Relaxed));
        let first = Arc::clone(without.or_else(|| others.next())?);
        lock(&first.told).missed = true;
        let now = Instant::now();
        // The others go by this until a waiter has an answer, because the waiter that is told may leave without having
        // asked.
        self.known = Some(KnownHolder { at: now, ends: Some(now), is_open: true });
        Some(Wake::and(first, self.expect(now)))
    }

    /// As [`miss`](Self::miss), because no messages arrived for a time.
    #[cfg(feature = "redis")]
    pub(crate) fn hear_nothing(&mut self) -> Option<Wake> {
        let wake = self.miss(None)?;
        if let Some(first) = wake.0.last() {
            lock(&first.told).unheard = true;
        }
        Some(wake)
    }

    /// Removes a waiter. Returns the waiters to wake: the new first, if the first has changed or no waiter has asked
    /// since the last message.
    pub(crate) fn remove(&mut self, waiter: &Arc<RegisteredLockWaiter>) -> Option<Wake> {
        self.hear(waiter);
        let at = self.waiters.iter().position(|other| Arc::ptr_eq(other, waiter))?;
        self.waiters.remove(at);
        let first = Arc::clone(self.waiters.front()?);
        let is_open = self.known.is_some_and(|known| known.is_open);
        if at > 0 && !is_open {
            return None;
        }
        {
            let mut told = lock(&first.told);
            told.first |= at == 0;
            told.missed |= is_open;
        }
        let now = Instant::now();
        self.answer = self.answer.filter(|_| at > 0);
        // Until the new first sets its own moment.
        let due = self.known.and_then(|known| known.ends).map_or(now, |ends| ends.max(now));
        Some(Wake::and(first, self.expect(due)))
    }
}
