//! Waiters of locks and what they are told: grants, by token.
//!
//! A waiter registers before its first take (invariant 4 of [`locks`](super::locks)), so a grant that
//! comes before the take's own answer is kept. Of all waiters of one lock in this process only the first
//! watches the clock ([`Await::watched`]): one command per process and period, however many wait. Until when, is known
//! to all of them together: what one has learnt, or was told, holds for whoever is the first later. Those who poll have
//! clocks of their own and are no candidates: they are registered by token only, as holders are.

#[cfg(test)]
mod tests;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::Token;
use super::locks::LockName;
use crate::sync::lock;

/// What a waiter was told since it last looked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// The lock is this waiter's, with this fence (0 for a permit).
    pub(crate) granted: Option<u64>,
    /// The semaphore was deleted, or the store closed.
    pub(crate) closed: bool,
    /// The mutex was taken away by force.
    pub(crate) broken: bool,
    /// Something may have been missed, or has changed: take again.
    pub(crate) missed: bool,
    /// That is because nothing was heard for a time.
    pub(crate) unheard: bool,
    /// This waiter has become the first of its lock in this process, or another has learnt that the time to watch is over
    /// sooner.
    pub(crate) first: bool,
}

impl Told {
    #[cfg(any(feature = "redis", feature = "testing"))]
    fn hear_nothing(&mut self) {
        (self.missed, self.unheard) = (true, true);
    }
}

/// One thing a store tells one waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    Granted { fence: u64 },
    Closed,
    Broken,
}

/// Answers about one moment differ by what they took.
const ABOUT_THE_SAME: Duration = Duration::from_millis(10);

/// All registered waiters.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    by_token: HashMap<Token, Arc<Waiter>>,
    /// Those who wait to be told, by the lock's key.
    waiting: HashMap<Arc<str>, Line>,
}

/// Those who wait for one lock.
#[derive(Debug, Default)]
struct Line {
    /// In the order in which they came.
    waiters: VecDeque<Arc<Waiter>>,
    known: Option<Known>,
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

#[derive(Debug)]
struct Waiter {
    key: Arc<str>,
    token: Token,
    told: Mutex<Told>,
    /// Whether it was told that the lock is its own, and has other things to do than to ask for it.
    granted: AtomicBool,
    /// Whether a command was sent for it that may have queued it.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "a memory store looks into its queue"))]
    asked: AtomicBool,
    woken: Notify,
}

/// Wakes a waiter when it is dropped. Entering what a waiter is told can thus be part of a step under a
/// store's own lock, and waking it, which runs somebody else's code, come after.
#[derive(Debug)]
#[must_use = "what was told is heard when this is dropped, which must not be under a lock"]
pub(crate) struct Wake(Arc<Waiter>);

/// A registered waiter; dropping it ends the registration. What is told later finds nobody, but a grant that
/// was told and not looked at goes with it: who leaves without knowing frees what it may have.
#[derive(Debug)]
pub(crate) struct Await {
    waiter: Arc<Waiter>,
    grants: Arc<Grants>,
}

impl Grants {
    /// Registers a waiter behind those of its lock that are there already.
    pub(crate) fn register(self: &Arc<Self>, name: &LockName, token: &Token) -> Await {
        let waiter = Arc::new(Waiter {
            key: Arc::clone(&name.key),
            token: token.clone(),
            told: Mutex::default(),
            granted: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            woken: Notify::new(),
        });
        let mut registry = lock(&self.registry);
        registry.by_token.insert(token.clone(), Arc::clone(&waiter));
        registry.waiting.entry(Arc::clone(&name.key)).or_default().waiters.push_back(Arc::clone(&waiter));
        Await { waiter, grants: Arc::clone(self) }
    }

    /// Tells the waiter with this token; `None` if there is none.
    pub(crate) fn tell(&self, token: &Token, tell: Tell) -> Option<Wake> {
        let waiter = Arc::clone(lock(&self.registry).by_token.get(token)?);
        {
            let mut told = lock(&waiter.told);
            match tell {
                Tell::Granted { fence } => {
                    told.granted = Some(fence);
                    waiter.granted.store(true, Ordering::Relaxed);
                }
                Tell::Closed => told.closed = true,
                Tell::Broken => told.broken = true,
            }
        }
        Some(Wake(waiter))
    }

    /// Tells the first of those who wait for the lock with this key to take again, those aside who were just granted it: it
    /// may be free, or be so sooner than was said. What that one takes goes to whoever's turn it is, so the others need not
    /// ask. `aside` has it now, and knows.
    pub(crate) fn tell_missed(&self, key: &str, aside: Option<&Token>) -> Option<Wake> {
        let first = {
            let mut registry = lock(&self.registry);
            let line = registry.waiting.get_mut(key)?;
            let mut others = line.waiters.iter().filter(|waiter| Some(&waiter.token) != aside);
            let without = others.clone().find(|waiter| !waiter.granted.load(Ordering::Relaxed));
            let first = without.or_else(|| others.next())?;
            lock(&first.told).missed = true;
            let now = Instant::now();
            // Until somebody has an answer this is what the others know: who is told may leave without having asked.
            line.known = Some(Known { at: now, ends: Some(now), is_open: true });
            Arc::clone(first)
        };
        Some(Wake(first))
    }

    /// Tells everyone, holders too, that things said to them may have been lost.
    #[cfg(feature = "redis")]
    pub(crate) fn tell_all_missed(&self) {
        self.tell_each(|_| true, Told::hear_nothing);
    }

    /// The same of one node, where several share a registry.
    #[cfg(feature = "testing")]
    pub(crate) fn tell_node_missed(&self, node: Uuid) {
        self.tell_each(Waiter::of(node), Told::hear_nothing);
    }

    /// Tells everyone of this node that there is nothing to wait for any more.
    pub(crate) fn close(&self, node: Uuid) {
        self.tell_each(Waiter::of(node), |told| told.closed = true);
    }

    fn tell_each(&self, whom: impl Fn(&Waiter) -> bool, enter: impl Fn(&mut Told)) {
        let all: Vec<_> =
            lock(&self.registry).by_token.values().filter(|waiter| whom(waiter)).cloned().collect();
        for waiter in all {
            waiter.tell(&enter);
        }
    }

    /// Whether there is a waiter or a holder with this token.
    #[cfg(feature = "testing")]
    pub(crate) fn is_registered(&self, token: &Token) -> bool {
        lock(&self.registry).by_token.contains_key(token)
    }

    /// Whether something may have been asked with this token before; it is, from now on.
    #[cfg(feature = "redis")]
    pub(crate) fn asks_again(&self, token: &Token) -> bool {
        let registry = lock(&self.registry);
        registry.by_token.get(token).is_none_or(|waiter| waiter.asked.swap(true, Ordering::Relaxed))
    }

    /// Whether anybody waits for the lock with this key.
    #[cfg(feature = "redis")]
    pub(crate) fn anyone_waits(&self, key: &str) -> bool {
        lock(&self.registry).waiting.contains_key(key)
    }
}

impl Registry {
    /// Takes a waiter out of those who wait. Who has to know: whoever is the first then, if that has changed or there is
    /// something that nobody has asked yet.
    fn stop_waiting(&mut self, waiter: &Arc<Waiter>) -> Option<Wake> {
        let Entry::Occupied(mut line) = self.waiting.entry(Arc::clone(&waiter.key)) else { return None };
        let at = line.get().waiters.iter().position(|other| Arc::ptr_eq(other, waiter))?;
        line.get_mut().waiters.remove(at);
        let Some(first) = line.get().waiters.front().cloned() else {
            line.remove();
            return None;
        };
        let is_open = line.get().known.is_some_and(|known| known.is_open);
        if at > 0 && !is_open {
            return None;
        }
        {
            let mut told = lock(&first.told);
            told.first |= at == 0;
            told.missed |= is_open;
        }
        Some(Wake(first))
    }
}

impl Waiter {
    /// Those of this node.
    fn of(node: Uuid) -> impl Fn(&Self) -> bool {
        let node = node.simple().to_string();
        move |waiter| waiter.token.node() == node
    }

    fn tell(&self, enter: impl FnOnce(&mut Told)) {
        enter(&mut lock(&self.told));
        self.woken.notify_one();
    }
}

impl Line {
    fn is_first(&self, waiter: &Arc<Waiter>) -> bool {
        self.waiters.front().is_some_and(|first| Arc::ptr_eq(first, waiter))
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        self.0.woken.notify_one();
    }
}

impl Await {
    /// Waits for the next thing told and takes it. One task at a time.
    ///
    /// # Cancel safety
    ///
    /// Safe: what was told is taken at the moment this returns.
    pub(crate) async fn told(&self) -> Told {
        loop {
            self.waiter.woken.notified().await;
            let told = std::mem::take(&mut *lock(&self.waiter.told));
            // Two things told may be taken by one look, and leave a second waking.
            if told != Told::default() {
                return told;
            }
        }
    }

    /// Whether this is the first of those who wait for the lock in this process.
    pub(crate) fn is_first(&self) -> bool {
        let registry = lock(&self.grants.registry);
        registry.waiting.get(&self.waiter.key).is_some_and(|line| line.is_first(&self.waiter))
    }

    /// Until when the lock is another's, `Some(None)` for ever, if it is this waiter who has to watch that.
    pub(crate) fn watched(&self) -> Option<Option<Instant>> {
        let registry = lock(&self.grants.registry);
        let line = registry.waiting.get(&self.waiter.key).filter(|line| line.is_first(&self.waiter))?;
        line.known.map(|known| known.ends)
    }

    /// A take that was sent at this moment was answered: the lock is another's until then. A grant before that has come to
    /// nothing.
    pub(crate) fn is_busy(&self, asked: Instant, ends: Option<Instant>) {
        self.waiter.granted.store(false, Ordering::Relaxed);
        self.learn(asked, ends);
    }

    /// By the answer to a take that was sent at this moment, the lock is not free before then.
    pub(crate) fn learn(&self, asked: Instant, ends: Option<Instant>) {
        let wake = {
            let mut registry = lock(&self.grants.registry);
            let Some(line) = registry.waiting.get_mut(&self.waiter.key) else { return };
            let before = line.known;
            if before.is_some_and(|known| asked < known.at) {
                return;
            }
            line.known = Some(Known { at: asked, ends, is_open: false });
            // The first sleeps on what was known before.
            let is_sooner = before.is_some_and(|known| {
                ends.is_some_and(|ends| known.ends.is_none_or(|then| ends + ABOUT_THE_SAME < then))
            });
            let first = line.waiters.front().filter(|first| is_sooner && !Arc::ptr_eq(first, &self.waiter));
            first.cloned().map(|first| {
                lock(&first.told).first = true;
                Wake(first)
            })
        };
        drop(wake);
    }

    /// Stops being one of those who wait, so that the next one is the first, but stays registered. For
    /// holders, who want to be told `broken`, and for those who poll.
    pub(crate) fn hold(&self) {
        let wake = lock(&self.grants.registry).stop_waiting(&self.waiter);
        drop(wake);
    }
}

impl Drop for Await {
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
