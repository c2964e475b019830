//! Waiters for leases in one node (or in several nodes that share a memory store), and the hints that wake them.
//!
//! A waiter registers before it tries to acquire (invariant 3 of [`store`](crate::store)), so it also receives a hint
//! that comes before the acquire's answer. Hints are merged: a waiter takes all hints since it last took some as one
//! [`Hints`].

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::store::Token;
use crate::sync::{Arc, Mutex, MutexGuard, Notify, lock};

/// The hints to a waiter since it last took them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hints {
    /// The lease of this holder has ended. The waiter's next ACQUIRE names it as `behind`, to get its outcome.
    pub(crate) finished: Option<Token>,
    /// Set if the lease was handed to this waiter. The number says how many loads have vanished one after another before this one.
    pub(crate) granted: Option<u8>,
    /// The key was invalidated.
    pub(crate) invalidated: bool,
    /// Hints may have been missed.
    pub(crate) missed: bool,
}

/// One message from a store to the waiters of a key.
#[derive(Clone, Debug)]
pub(crate) enum Hint {
    Finished(Option<Token>),
    Granted { token: Token, hops: u8 },
    Invalidated,
}

/// All registered waiters, by the key's name.
#[derive(Debug, Default)]
pub(crate) struct LeaseWaiters {
    by_name: Mutex<HashMap<Box<str>, Vec<Arc<LeaseWaiter>>>>,
}

#[derive(Debug)]
struct LeaseWaiter {
    token: Token,
    hints: Mutex<Hints>,
    woken: Notify,
}

/// A registered waiter; dropping it ends the registration.
#[derive(Debug)]
pub(crate) struct LeaseWatch {
    name: Box<str>,
    waiter: Arc<LeaseWaiter>,
    watches: Arc<LeaseWaiters>,
    /// A value that is dropped with the registration.
    #[cfg(feature = "testing")]
    companion: Option<Box<dyn std::any::Any + Send + Sync>>,
}

impl LeaseWaiters {
    pub(crate) fn register(self: &Arc<Self>, name: &str, token: &Token) -> LeaseWatch {
        let waiter =
            Arc::new(LeaseWaiter { token: token.clone(), hints: Mutex::default(), woken: Notify::new() });
        self.lock().entry(name.into()).or_default().push(Arc::clone(&waiter));
        LeaseWatch {
            name: name.into(),
            waiter,
            watches: Arc::clone(self),
            #[cfg(feature = "testing")]
            companion: None,
        }
    }

    /// Notifies the waiters of `name`. Returns false if there are none, or for a grant if none of them has the granted token.
    pub(crate) fn notify(&self, name: &str, hint: &Hint) -> bool {
        self.notify_where(name, hint, |_| true)
    }

    /// Notifies those waiters of `name` for whose token `accepts` returns true.
    fn notify_where(&self, name: &str, hint: &Hint, accepts: impl Fn(&Token) -> bool) -> bool {
        let notified: Vec<_> = match self.lock().get(name) {
            Some(waiters) => waiters
                .iter()
                .filter(|waiter| accepts(&waiter.token))
                .filter(|waiter| !matches!(hint, Hint::Granted { token, .. } if *token != waiter.token))
                // Under the lock: a waiter that leaves unregisters under it, and then takes its last hints. A
                // grant noted after that would reach no waiter, but the caller would count it as received.
                .inspect(|waiter| waiter.note(hint))
                .cloned()
                .collect(),
            None => Vec::new(),
        };
        // Woken outside the lock, because a waker is foreign code.
        for waiter in &notified {
            waiter.woken.notify_one();
        }
        !notified.is_empty()
    }

    /// Notifies every waiter that hints may have been lost, because a connection broke or was opened again.
    pub(crate) fn notify_all_missed(&self) {
        let mut all: Vec<_> =
            self.lock().iter().map(|(name, waiters)| (name.clone(), waiters.clone())).collect();
        // A map's order is random, and the waiter that is notified first sends its command first: without a fixed
        // order a simulation could not be repeated.
        all.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        for waiter in all.into_iter().flat_map(|(_, waiters)| waiters) {
            waiter.hints().missed = true;
            waiter.woken.notify_one();
        }
    }

    /// Whether there is a waiter for `name`.
    #[cfg(feature = "testing")]
    pub(crate) fn any(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Whether there is a waiter with this token.
    #[cfg(test)]
    pub(crate) fn has(&self, token: &Token) -> bool {
        self.lock().values().flatten().any(|waiter| waiter.token == *token)
    }

    /// Whether there is no waiter.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Vec<Arc<LeaseWaiter>>>> {
        // No user code runs under this lock, and no update can stop halfway.
        lock(&self.by_name)
    }
}

impl LeaseWaiter {
    fn hints(&self) -> MutexGuard<'_, Hints> {
        lock(&self.hints)
    }

    fn note(&self, hint: &Hint) {
        let mut hints = self.hints();
        match hint {
            Hint::Finished(token) => hints.finished = token.clone(),
            Hint::Granted { hops, .. } => hints.granted = Some(*hops),
            Hint::Invalidated => hints.invalidated = true,
        }
    }
}

impl LeaseWatch {
    /// Waits for the next hints and takes them.
    ///
    /// # Cancel safety
    ///
    /// Safe: hints are taken at the moment this returns.
    pub(crate) async fn hints(&self) -> Hints {
        self.waiter.woken.notified().await;
        std::mem::take(&mut *self.waiter.hints())
    }

    /// Ends the registration and returns the hints that were not taken. Later hints do not reach this waiter.
    pub(crate) fn close(mut self) -> Hints {
        self.unregister();
        std::mem::take(&mut *self.waiter.hints())
    }

    /// Drops `companion` together with the registration.
    #[cfg(feature = "testing")]
    pub(crate) fn with(mut self, companion: impl std::any::Any + Send + Sync) -> Self {
        self.companion = Some(Box::new(companion));
        self
    }

    fn unregister(&mut self) {
        if let Entry::Occupied(mut waiters) = self.watches.lock().entry(std::mem::take(&mut self.name)) {
            waiters.get_mut().retain(|waiter| !Arc::ptr_eq(waiter, &self.waiter));
            if waiters.get().is_empty() {
                waiters.remove();
            }
        }
    }
}

impl Drop for LeaseWatch {
    fn drop(&mut self) {
        self.unregister();
    }
}
