//! Waiters of locks and what they are told: grants, by token.
//!
//! A waiter registers before its first take (invariant 4 of [`locks`](super::locks)), so a grant that
//! comes before the take's own answer is kept. Of all waiters of one lock in this process only the first
//! watches the clock ([`Await::is_first`]): one command per process and period, however many wait. Those who poll have
//! clocks of their own and are no candidates: they are registered by token only, as holders are.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::Token;
use super::locks::LockName;
use crate::sync::lock;

/// What a waiter was told since it last looked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// The lock is this waiter's, with this fence (0 for a permit).
    pub(crate) granted: Option<u64>,
    /// The semaphore was deleted.
    pub(crate) closed: bool,
    /// The mutex was taken away by force.
    pub(crate) broken: bool,
    /// Something may have been missed, or has changed: take again.
    pub(crate) missed: bool,
    /// This waiter has become the first of its lock in this process. The one before it may have left with
    /// something to do.
    pub(crate) first: bool,
}

/// One thing a store tells one waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    Granted { fence: u64 },
    Closed,
    Broken,
}

/// All registered waiters.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    by_token: HashMap<Token, Arc<Waiter>>,
    /// Those who wait to be told, by the lock's key, in the order in which they came.
    waiting: HashMap<Arc<str>, VecDeque<Arc<Waiter>>>,
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
        registry.waiting.entry(Arc::clone(&name.key)).or_default().push_back(Arc::clone(&waiter));
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

    /// Tells the first of those who wait for the lock with this key to take again, those aside who were just
    /// granted it: it may be free, or be so
    /// sooner than was said. What that one takes goes to whoever's turn it is, so the others need not ask.
    pub(crate) fn tell_missed(&self, key: &str) -> Option<Wake> {
        let first = {
            let registry = lock(&self.registry);
            let waiting = registry.waiting.get(key)?;
            let without = waiting.iter().find(|waiter| !waiter.granted.load(Ordering::Relaxed));
            let first = without.or_else(|| waiting.front())?;
            // Under the registry's lock: who leaves takes what it was told along to the next one, and would miss what was
            // noted after that.
            lock(&first.told).missed = true;
            Arc::clone(first)
        };
        Some(Wake(first))
    }

    /// Tells everyone, holders too, that things said to them may have been lost.
    #[cfg(feature = "redis")]
    pub(crate) fn tell_all_missed(&self) {
        let all: Vec<_> = lock(&self.registry).by_token.values().cloned().collect();
        for waiter in all {
            waiter.tell(|told| told.missed = true);
        }
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
    /// Takes a waiter out of those who wait; the one that is first instead, if that has changed.
    fn stop_waiting(&mut self, waiter: &Arc<Waiter>) -> Option<Arc<Waiter>> {
        let Entry::Occupied(mut waiting) = self.waiting.entry(Arc::clone(&waiter.key)) else { return None };
        let at = waiting.get().iter().position(|other| Arc::ptr_eq(other, waiter))?;
        waiting.get_mut().remove(at);
        let first = waiting.get().front().cloned();
        if first.is_none() {
            waiting.remove();
        }
        first.filter(|_| at == 0)
    }
}

impl Waiter {
    fn tell(&self, enter: impl FnOnce(&mut Told)) {
        enter(&mut lock(&self.told));
        self.woken.notify_one();
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
        let first = registry.waiting.get(&self.waiter.key).and_then(VecDeque::front);
        first.is_some_and(|first| Arc::ptr_eq(first, &self.waiter))
    }

    /// Stops being one of those who wait, so that the next one is the first, but stays registered. For
    /// holders, who want to be told `broken`, and for those who poll.
    pub(crate) fn hold(&self) {
        let first = lock(&self.grants.registry).stop_waiting(&self.waiter);
        if let Some(first) = first {
            // Said to the first alone, and not looked at.
            let missed = lock(&self.waiter.told).missed;
            first.tell(|told| {
                told.first = true;
                told.missed |= missed;
            });
        }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;
    use uuid::Uuid;

    use super::*;

    fn three(name: &LockName) -> (Arc<Grants>, [Await; 3]) {
        let grants = Arc::new(Grants::default());
        let waiters = [(); 3].map(|()| grants.register(name, &Token::mint(Uuid::nil())));
        (grants, waiters)
    }

    async fn told(waiter: &Await) -> Option<Told> {
        timeout(Duration::from_millis(1), waiter.told()).await.ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_is_kept_until_its_waiter_looks() {
        let (grants, [one, two, _three]) = three(&LockName::mutex("a"));
        assert!(grants.tell(&two.waiter.token, Tell::Granted { fence: 7 }).is_some());
        assert_eq!(told(&one).await, None);
        assert_eq!(told(&two).await, Some(Told { granted: Some(7), ..Told::default() }));
        assert_eq!(told(&two).await, None, "it is taken once");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_told_to_nobody_is_known_to_be() {
        let (grants, [one, two, three]) = three(&LockName::mutex("a"));
        let (token, late) = (one.waiter.token.clone(), two.waiter.token.clone());
        drop(one);
        assert!(grants.tell(&token, Tell::Granted { fence: 1 }).is_none());
        assert!(grants.tell(&late, Tell::Granted { fence: 1 }).is_some());
        drop((two, three));
        assert!(grants.tell(&late, Tell::Broken).is_none());
        assert!(lock(&grants.registry).by_token.is_empty() && lock(&grants.registry).waiting.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_becomes_the_first_when_the_first_leaves_or_holds() {
        let (_grants, [one, two, three]) = three(&LockName::mutex("a"));
        assert!(one.is_first() && !two.is_first() && !three.is_first());
        drop(two);
        assert_eq!(told(&three).await, None, "it is still the second");
        one.hold();
        assert!(three.is_first() && !one.is_first());
        assert_eq!(told(&three).await, Some(Told { first: true, ..Told::default() }));
        drop(one);
        assert_eq!(told(&three).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn holders_are_told_what_concerns_them() {
        let (grants, [holder, waiter, _three]) = three(&LockName::mutex("a"));
        holder.hold();
        let _ = told(&waiter).await;
        let _ = grants.tell(&holder.waiter.token, Tell::Broken);
        assert!(told(&holder).await.is_some_and(|told| told.broken));
    }

    #[cfg(feature = "redis")]
    #[tokio::test(start_paused = true)]
    async fn one_of_those_who_wait_hears_that_a_key_is_free_and_all_of_a_loss() {
        let (grants, [holder, one, two]) = three(&LockName::mutex("a"));
        holder.hold();
        let _ = told(&one).await;
        drop(grants.tell_missed("sg1:m:{b}"));
        assert_eq!(told(&one).await, None);
        drop(grants.tell_missed("sg1:m:{a}"));
        assert_eq!((told(&holder).await, told(&two).await), (None, None));
        drop(one);
        let passed_on = Some(Told { first: true, missed: true, ..Told::default() });
        assert_eq!(told(&two).await, passed_on, "the first has left without looking");
        grants.tell_all_missed();
        assert!(told(&holder).await.is_some_and(|told| told.missed));
        assert!(told(&two).await.is_some_and(|told| told.missed));
        assert!(grants.anyone_waits("sg1:m:{a}"));
        drop(two);
        assert!(!grants.anyone_waits("sg1:m:{a}"), "a holder does not wait");
    }

    #[tokio::test(start_paused = true)]
    async fn a_mutex_and_a_semaphore_of_one_name_have_each_a_first() {
        let grants = Arc::new(Grants::default());
        let mutex = grants.register(&LockName::mutex("a"), &Token::mint(Uuid::nil()));
        let semaphore = grants.register(&LockName::semaphore("a"), &Token::mint(Uuid::nil()));
        assert!(mutex.is_first() && semaphore.is_first());
    }
}
