//! Registry of this process's waiters for locks, and their messages: grants and others, by token.
//!
//! A waiter registers before its first take (invariant 4 of [`locks`](crate::store::lock_store)), so a grant that arrives
//! before the take's answer is kept. Of all waiters for one lock in this process only the first watches the clock
//! ([`LockWaiter::watch`]): one command per process and period, however many wait. They share what is known of the lock's time:
//! what one waiter learns is used by the next first. The others watch the first and send nothing. The first's future may
//! not be polled, so a waiter that finds the first silent replaces it. Waiters that poll the lock have their own timers and
//! cannot become the first: they are registered by token only, as holders are.

#[cfg(feature = "redis")]
mod census;
mod line;
#[cfg(test)]
#[path = "../../../../tests/unit/store/lock_waiters_tests.rs"]
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
pub(crate) use line::ClockDuty;
use line::WaitLine;
use waiter::RegisteredLockWaiter;
pub(crate) use waiter::{LockHint, LockHints, Wake};

use crate::store::names::{LockName, Token};
use crate::sync::lock;

/// All registered waiters.
#[derive(Debug, Default)]
pub(crate) struct LockWaiters {
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    /// How many have registered.
    registered: u64,
    by_token: HashMap<Token, Arc<RegisteredLockWaiter>>,
    /// The waiters in line, by the lock's key.
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
    /// Registers a waiter behind those of its lock that are there already.
    pub(crate) fn register(self: &Arc<Self>, name: &LockName, token: &Token) -> LockWaiter {
        let mut registry = lock(&self.registry);
        registry.registered += 1;
        let waiter = Arc::new(RegisteredLockWaiter {
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
        LockWaiter { waiter, grants: Arc::clone(self) }
    }

    /// Delivers a message to the waiter with this token; `None` if there is none.
    pub(crate) fn tell(&self, token: &Token, tell: LockHint) -> Option<Wake> {
        let waiter = Arc::clone(lock(&self.registry).by_token.get(token)?);
        {
            let mut told = lock(&waiter.told);
            match tell {
                LockHint::Granted { fence } => {
                    told.granted = Some(fence);
                    waiter.granted.store(true, Ordering::Relaxed);
                }
                LockHint::Closed => told.closed = true,
                LockHint::Broken => told.broken = true,
            }
        }
        Some(Wake::and(waiter, None))
    }

    /// Tells the first waiter in line for this lock, except those that were just granted it, to take again: the lock may be
    /// free, now or sooner than was known. That take serves whichever waiter is next, so the others need not ask, unless
    /// the first is silent. `aside` is not told: it holds the lock now, and knows.
    pub(crate) fn tell_missed(&self, key: &str, aside: Option<&Token>) -> Option<Wake> {
        lock(&self.registry).waiting.get_mut(key)?.miss(aside)
    }

    /// Tells all holders, and the first waiter of each lock, that messages may have been lost. The first one's take is
    /// enough for the lock to go on; a [`Census`] checks the other waiters.
    #[cfg(feature = "redis")]
    pub(crate) fn tell_firsts_missed(&self) {
        let (firsts, holders): (Vec<_>, Vec<_>) = {
            let mut registry = lock(&self.registry);
            let firsts = registry.waiting.values_mut().filter_map(WaitLine::hear_nothing).collect();
            let waiting: HashSet<_> =
                registry.waiting.values().flat_map(WaitLine::all).map(|waiter| waiter.number).collect();
            let holders = registry.by_token.values().filter(|waiter| !waiting.contains(&waiter.number));
            (firsts, holders.cloned().collect())
        };
        for holder in holders {
            holder.tell(LockHints::hear_nothing);
        }
        drop(firsts);
    }

    /// Tells the same to the waiters and holders of one node, where several share a registry.
    #[cfg(feature = "testing")]
    pub(crate) fn tell_node_missed(&self, node: Uuid) {
        self.tell_each(RegisteredLockWaiter::of(node), LockHints::hear_nothing);
    }

    /// Tells the waiters and holders of this node that the store is closed.
    pub(crate) fn close(&self, node: Uuid) {
        self.tell_each(RegisteredLockWaiter::of(node), |told| told.closed = true);
    }

    fn tell_each(&self, whom: impl Fn(&RegisteredLockWaiter) -> bool, enter: impl Fn(&mut LockHints)) {
        let mut all: Vec<_> =
            lock(&self.registry).by_token.values().filter(|waiter| whom(waiter)).cloned().collect();
        // A map's order is random; without a fixed order a simulation could not be repeated.
        all.sort_unstable_by_key(|waiter| waiter.number);
        for waiter in all {
            waiter.tell(&enter);
        }
    }

    /// Whether there is a waiter or a holder with this token.
    pub(crate) fn is_registered(&self, token: &Token) -> bool {
        lock(&self.registry).by_token.contains_key(token)
    }

    /// Whether a take may have been sent with this token before. Records that one is sent now.
    #[cfg(feature = "redis")]
    pub(crate) fn asks_again(&self, token: &Token) -> bool {
        let registry = lock(&self.registry);
        registry.by_token.get(token).is_none_or(|waiter| {
            let asks = |asked: u32| Some((asked + 2) & !1);
            waiter.asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, asks).is_ok_and(|asked| asked > 0)
        })
    }

    /// The last take that was sent with this token was answered.
    #[cfg(feature = "redis")]
    pub(crate) fn is_answered(&self, token: &Token) {
        if let Some(waiter) = lock(&self.registry).by_token.get(token) {
            waiter.asked.fetch_or(1, Ordering::Relaxed);
        }
    }

    /// Whether there are waiters in line for the lock with this key.
    #[cfg(feature = "redis")]
    pub(crate) fn anyone_waits(&self, key: &str) -> bool {
        lock(&self.registry).waiting.contains_key(key)
    }
}

impl Registry {
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
    pub(crate) async fn told(&self) -> LockHints {
        loop {
            self.waiter.woken.notified().await;
            let told = std::mem::take(&mut *lock(&self.waiter.told));
            // Two messages may be taken by one look and leave a second wake-up.
            if told != LockHints::default() {
                return told;
            }
        }
    }

    /// Whether this is the first waiter for its lock in this process.
    pub(crate) fn is_first(&self) -> bool {
        self.in_line(|line| line.is_first(&self.waiter)).unwrap_or_default()
    }

    /// What this waiter, which wants the lock for `ttl`, must do by the clock; it would ask by itself at `own`.
    pub(crate) fn watch(&self, own: Instant, ttl: Option<Duration>) -> ClockDuty {
        let watched = self.in_line(|line| {
            line.hurry(ttl);
            line.watch(&self.waiter, own)
        });
        watched.map_or(ClockDuty::Look(own), |(watch, _)| watch)
    }

    /// The waiter asks now. Until its answer is due it does not count as silent.
    pub(crate) fn asks(&self) {
        drop(self.in_line(|line| line.ask(&self.waiter)));
    }

    /// Makes this waiter the first if the first was silent; true if it did, and then it must ask at once.
    pub(crate) fn stands_in(&self) -> bool {
        self.in_line(|line| line.stand_in(&self.waiter)).unwrap_or_default()
    }

    /// A take that was sent at `asked` was answered: another token holds the lock until `ends`. An earlier grant is void.
    pub(crate) fn is_busy(&self, asked: Instant, ends: Option<Instant>) {
        self.waiter.granted.store(false, Ordering::Relaxed);
        self.learn(asked, ends);
    }

    /// By the answer to a take that was sent at `asked`, the lock is not free before `ends`.
    pub(crate) fn learn(&self, asked: Instant, ends: Option<Instant>) {
        drop(self.in_line(|line| line.learn(&self.waiter, asked, ends)));
    }

    /// Runs `act` on this waiter's line; the waiter is not silent any more. A `Wake` in the result must be dropped after
    /// this returns.
    fn in_line<T>(&self, act: impl FnOnce(&mut WaitLine) -> T) -> Option<T> {
        let mut registry = lock(&self.grants.registry);
        let line = registry.waiting.get_mut(&self.waiter.key)?;
        line.hear(&self.waiter);
        Some(act(line))
    }

    /// Leaves the line, so that the next waiter is the first, but stays registered: for holders, which want to be told
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
