//! Those of one process who wait for one lock: which of them watches the clock for all, and who does so if that one is
//! silent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::waiter::{Waiter, Wake};
use crate::store::names::Token;
use crate::sync::lock;

/// How late the first may be at the most.
const PATIENCE: Duration = Duration::from_millis(400);
/// How late it may be at the least: on a busy machine that is not silence yet.
const LEAST_PATIENCE: Duration = Duration::from_millis(50);
/// How long it is given for an answer.
const ANSWER: Duration = Duration::from_millis(500);
/// Answers about one moment differ by what they took.
const ABOUT_THE_SAME: Duration = Duration::from_millis(10);

/// Those who wait for one lock.
#[derive(Debug)]
pub(crate) struct Line {
    /// In the order in which they came; the first watches the clock.
    waiters: VecDeque<Arc<Waiter>>,
    /// Those whose moment passed while they were the first. Each is the last again as soon as it does anything: nobody
    /// has to be patient with it twice.
    silent: Vec<Arc<Waiter>>,
    known: Option<Known>,
    /// By when the first looks.
    due: Option<Instant>,
    /// Until when it waits for an answer.
    answer: Option<Instant>,
    /// How late it may be: less where a time to live is short.
    patience: Duration,
    /// Until when others may sleep without a look at `due`.
    asleep: Option<Instant>,
}

/// Until when a lock is another's, as far as this process knows.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// When it was asked, or told.
    at: Instant,
    /// `None` for ever.
    ends: Option<Instant>,
    /// Whether it was only told that this is not so any more, and nobody has an answer yet.
    is_open: bool,
}

/// What a waiter has to do by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// It is the first: to look at this moment.
    Look(Instant),
    /// To see then whether the first was silent; never, where nobody knows until when that one may be.
    Stand(Option<Instant>),
}

impl Default for Line {
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

impl Line {
    pub(crate) fn push(&mut self, waiter: Arc<Waiter>) {
        self.waiters.push_back(waiter);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty() && self.silent.is_empty()
    }

    /// Those who wait; the first of them watches the clock, but where all were silent.
    #[cfg(feature = "redis")]
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Waiter>> {
        self.waiters.iter().chain(&self.silent)
    }

    pub(crate) fn is_first(&self, waiter: &Arc<Waiter>) -> bool {
        self.waiters.front().is_some_and(|first| Arc::ptr_eq(first, waiter))
    }

    /// It does something: it is not silent any more.
    pub(crate) fn hear(&mut self, waiter: &Arc<Waiter>) {
        if let Some(at) = self.silent.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            self.waiters.push_back(self.silent.remove(at));
        }
    }

    /// What this one has to do by the clock, whose own time ends then.
    pub(crate) fn watch(&mut self, waiter: &Arc<Waiter>, own: Instant) -> (Watch, Option<Wake>) {
        let now = Instant::now();
        if self.is_first(waiter) {
            let look = self.known.and_then(|known| known.ends).map_or(own, |ends| ends.min(own));
            self.answer = None;
            return (Watch::Look(look), self.expect(look.max(now)));
        }
        let until = self.due.map(|due| due + self.patience).filter(|&until| now < until);
        let until = until.or_else(|| self.silent_from());
        self.asleep = self.asleep.max(until);
        (Watch::Stand(until), None)
    }

    /// Whoever wants it for so long waits here.
    pub(crate) fn hurry(&mut self, ttl: Option<Duration>) {
        let patience = ttl.map_or(PATIENCE, |ttl| (ttl / 2).clamp(LEAST_PATIENCE, PATIENCE));
        self.patience = self.patience.min(patience);
    }

    /// This one asks. If it is the first, the others wait for what comes of that.
    pub(crate) fn ask(&mut self, waiter: &Arc<Waiter>) -> Option<Wake> {
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

    /// Whether this one has become the first because the first was silent; then it has to ask at once.
    pub(crate) fn stand_in(&mut self, waiter: &Arc<Waiter>) -> bool {
        let now = Instant::now();
        if self.is_first(waiter) || self.silent_from().is_none_or(|from| now < from) {
            return false;
        }
        let Some(at) = self.waiters.iter().position(|other| Arc::ptr_eq(other, waiter)) else { return false };
        self.silent.extend(self.waiters.pop_front());
        // The first has gone, so it is one place further in front.
        let Some(next) = self.waiters.remove(at - 1) else { return false };
        self.waiters.push_front(next);
        // Of all whose patience is over now, one is enough.
        (self.due, self.answer) = (Some(now), Some(now + ANSWER));
        true
    }

    /// The first is to look by then. Who has to know: those who sleep for longer than they may if it does not. They look
    /// at all that has changed by then, so they are woken once in a patience, however often that is.
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

    /// By the answer to what this one asked at that moment, the lock is not free before then. Who has to know: the first,
    /// which sleeps on what was known before.
    pub(crate) fn learn(
        &mut self,
        waiter: &Arc<Waiter>,
        asked: Instant,
        ends: Option<Instant>,
    ) -> Option<Wake> {
        let before = self.known;
        if before.is_some_and(|known| asked < known.at) {
            return None;
        }
        self.known = Some(Known { at: asked, ends, is_open: false });
        let (ends, then) = (ends?, before?.ends);
        if self.is_first(waiter) || then.is_some_and(|then| then <= ends + ABOUT_THE_SAME) {
            return None;
        }
        let first = Arc::clone(self.waiters.front()?);
        lock(&first.told).first = true;
        Some(Wake::and(first, self.expect(ends.max(Instant::now()))))
    }

    /// What was known may be so no more: see [`Grants::tell_missed`](super::Grants::tell_missed).
    pub(crate) fn miss(&mut self, aside: Option<&Token>) -> Option<Wake> {
        let mut others = self.waiters.iter().filter(|waiter| Some(&waiter.token) != aside);
        let without = others.clone().find(|waiter| !waiter.granted.load(Ordering::Relaxed));
        let first = Arc::clone(without.or_else(|| others.next())?);
        lock(&first.told).missed = true;
        let now = Instant::now();
        // Until somebody has an answer this is what the others know: who is told may leave without having asked.
        self.known = Some(Known { at: now, ends: Some(now), is_open: true });
        Some(Wake::and(first, self.expect(now)))
    }

    /// The same for all locks at once, since nothing was heard for a time.
    #[cfg(feature = "redis")]
    pub(crate) fn hear_nothing(&mut self) -> Option<Wake> {
        let wake = self.miss(None)?;
        if let Some(first) = wake.0.last() {
            lock(&first.told).unheard = true;
        }
        Some(wake)
    }

    /// Takes one out. Who has to know: whoever is the first then, if that has changed or there is something that nobody
    /// has asked yet.
    pub(crate) fn remove(&mut self, waiter: &Arc<Waiter>) -> Option<Wake> {
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
        // Until it says by itself when it looks.
        let due = self.known.and_then(|known| known.ends).map_or(now, |ends| ends.max(now));
        Some(Wake::and(first, self.expect(due)))
    }
}
