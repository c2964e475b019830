//! Waiters of locks and what they are told: grants, by token.
//!
//! A waiter registers before its first take (invariant 4 of [`locks`](crate::store::lock_store)), so a grant that
//! comes before the take's own answer is kept. Of all waiters of one lock in this process only the first
//! watches the clock ([`Await::watch`]): one command per process and period, however many wait. Until when, is known
//! to all of them together: what one has learnt, or was told, holds for whoever is the first later. The others watch the
//! first, and send nothing: its future may be one that nobody polls, and whoever finds it silent is the first instead.
//! Those who poll have clocks of their own and are no candidates: they are registered by token only, as holders are.

#[cfg(feature = "redis")]
mod census;
mod line;
#[cfg(test)]
mod tests;
mod waiter;

use std::collections::HashMap;
#[cfg(feature = "redis")]
use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

#[cfg(feature = "redis")]
pub(crate) use census::Census;
use line::Line;
pub(crate) use line::Watch;
use waiter::Waiter;
pub(crate) use waiter::{Tell, Told, Wake};

use crate::store::names::{LockName, Token};
use crate::sync::lock;

/// All registered waiters.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    /// How many have registered.
    registered: u64,
    by_token: HashMap<Token, Arc<Waiter>>,
    /// Those who wait to be told, by the lock's key.
    waiting: HashMap<Arc<str>, Line>,
}

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
        let mut registry = lock(&self.registry);
        registry.registered += 1;
        let waiter = Arc::new(Waiter {
            number: registry.registered,
            key: Arc::clone(&name.key),
            token: token.clone(),
            told: Mutex::default(),
            granted: AtomicBool::new(false),
            asked: AtomicU32::new(0),
            woken: Notify::new(),
        });
        registry.by_token.insert(token.clone(), Arc::clone(&waiter));
        registry.waiting.entry(Arc::clone(&name.key)).or_default().push(Arc::clone(&waiter));
        drop(registry);
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
        Some(Wake::and(waiter, None))
    }

    /// Tells the first of those who wait for the lock with this key to take again, those aside who were just granted it: it
    /// may be free, or be so sooner than was said. What that one takes goes to whoever's turn it is, so the others need not
    /// ask, but where that one is silent. `aside` has it now, and knows.
    pub(crate) fn tell_missed(&self, key: &str, aside: Option<&Token>) -> Option<Wake> {
        lock(&self.registry).waiting.get_mut(key)?.miss(aside)
    }

    /// Tells holders, and the first of those who wait for each lock, that things said to them may have been lost. What the first
    /// asks is enough to go on; the store is asked about the others by [`Census`].
    #[cfg(feature = "redis")]
    pub(crate) fn tell_firsts_missed(&self) {
        let (firsts, holders): (Vec<_>, Vec<_>) = {
            let mut registry = lock(&self.registry);
            let firsts = registry.waiting.values_mut().filter_map(Line::hear_nothing).collect();
            let waiting: HashSet<_> =
                registry.waiting.values().flat_map(Line::all).map(|waiter| waiter.number).collect();
            let holders = registry.by_token.values().filter(|waiter| !waiting.contains(&waiter.number));
            (firsts, holders.cloned().collect())
        };
        for holder in holders {
            holder.tell(Told::hear_nothing);
        }
        drop(firsts);
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
        let mut all: Vec<_> =
            lock(&self.registry).by_token.values().filter(|waiter| whom(waiter)).cloned().collect();
        // A map has an order of its own each time; the same run must be the same again.
        all.sort_unstable_by_key(|waiter| waiter.number);
        for waiter in all {
            waiter.tell(&enter);
        }
    }

    /// Whether there is a waiter or a holder with this token.
    pub(crate) fn is_registered(&self, token: &Token) -> bool {
        lock(&self.registry).by_token.contains_key(token)
    }

    /// Whether something may have been asked with this token before; it is, from now on.
    #[cfg(feature = "redis")]
    pub(crate) fn asks_again(&self, token: &Token) -> bool {
        let registry = lock(&self.registry);
        registry.by_token.get(token).is_none_or(|waiter| {
            let asks = |asked: u32| Some((asked + 2) & !1);
            waiter.asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, asks).is_ok_and(|asked| asked > 0)
        })
    }

    /// What was asked last with this token was answered.
    #[cfg(feature = "redis")]
    pub(crate) fn is_answered(&self, token: &Token) {
        if let Some(waiter) = lock(&self.registry).by_token.get(token) {
            waiter.asked.fetch_or(1, Ordering::Relaxed);
        }
    }

    /// Whether anybody waits for the lock with this key.
    #[cfg(feature = "redis")]
    pub(crate) fn anyone_waits(&self, key: &str) -> bool {
        lock(&self.registry).waiting.contains_key(key)
    }
}

impl Registry {
    /// Takes a waiter out of those who wait; who has to know.
    fn stop_waiting(&mut self, waiter: &Arc<Waiter>) -> Option<Wake> {
        let Entry::Occupied(mut line) = self.waiting.entry(Arc::clone(&waiter.key)) else { return None };
        let wake = line.get_mut().remove(waiter);
        if line.get().is_empty() {
            line.remove();
        }
        wake
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
        self.in_line(|line| line.is_first(&self.waiter)).unwrap_or_default()
    }

    /// What this waiter, who wants it for `ttl`, has to do by the clock; `own` is when it would look by itself.
    pub(crate) fn watch(&self, own: Instant, ttl: Option<Duration>) -> Watch {
        let watched = self.in_line(|line| {
            line.hurry(ttl);
            line.watch(&self.waiter, own)
        });
        watched.map_or(Watch::Look(own), |(watch, _)| watch)
    }

    /// It asks now. An answer may take as long as one who watches may be silent.
    pub(crate) fn asks(&self) {
        drop(self.in_line(|line| line.ask(&self.waiter)));
    }

    /// Whether this waiter has become the first because that one was silent; then it has to ask at once.
    pub(crate) fn stands_in(&self) -> bool {
        self.in_line(|line| line.stand_in(&self.waiter)).unwrap_or_default()
    }

    /// A take that was sent at this moment was answered: the lock is another's until then. A grant before that has come to
    /// nothing.
    pub(crate) fn is_busy(&self, asked: Instant, ends: Option<Instant>) {
        self.waiter.granted.store(false, Ordering::Relaxed);
        self.learn(asked, ends);
    }

    /// By the answer to a take that was sent at this moment, the lock is not free before then.
    pub(crate) fn learn(&self, asked: Instant, ends: Option<Instant>) {
        drop(self.in_line(|line| line.learn(&self.waiter, asked, ends)));
    }

    /// Whoever does anything is not silent any more. Who is woken by it is so when this is over.
    fn in_line<T>(&self, act: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let mut registry = lock(&self.grants.registry);
        let line = registry.waiting.get_mut(&self.waiter.key)?;
        line.hear(&self.waiter);
        Some(act(line))
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
