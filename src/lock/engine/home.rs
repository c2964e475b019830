//! What all handles of one [`Locks`](crate::lock::Locks) share.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::Instant;

use crate::guard_state::Node;
use crate::store::lock_store::LockStore;
use crate::store::names::LockName;
use crate::store::{NodeStore, StoreError, StoreErrorKind, Token};
use crate::tracker::{Gauge, Present, Waiters};

/// What all locks made from one [`Locks`] share.
pub(crate) struct Home {
    pub(crate) store: NodeStore,
    /// Escaped, as it stands in key names.
    pub(crate) namespace: Box<str>,
    pub(crate) command_timeout: Duration,
    /// Releases that nobody waits for. Of a guard it is the guard's own: there is a `Home` for each `guard.locks()` and
    /// each permit to load, and the guard's end has to wait for what all of them left behind.
    pub(crate) background: Arc<Gauge>,
    pub(crate) waiters: Waiters,
    /// Whether it was said that the server announces no key events.
    pub(crate) warned: AtomicBool,
    /// The guard whose connections these are. It closes them; without one, this does.
    guard: Option<Arc<Node>>,
}

impl Home {
    pub(crate) fn new(
        store: NodeStore,
        namespace: Box<str>,
        command_timeout: Duration,
        guard: Option<Arc<Node>>,
    ) -> Self {
        let background = guard.as_ref().map(|guard| Arc::clone(&guard.background)).unwrap_or_default();
        Self {
            store,
            namespace,
            command_timeout,
            background,
            waiters: Waiters::default(),
            warned: AtomicBool::new(false),
            guard,
        }
    }

    /// The store's half of the toolkit, until this is closed.
    pub(crate) fn locks(&self) -> Result<&dyn LockStore, StoreError> {
        match self.is_closed() {
            true => Err(StoreError::new(StoreErrorKind::Closed)),
            false => Ok(self.last_locks()),
        }
    }

    /// The same for what gives back, which is welcome as long as there are connections: a guard's outlive this.
    pub(crate) fn last_locks(&self) -> &dyn LockStore {
        &**self.store.locks()
    }

    /// A guard's connections outlive its locks, and a memory store has none; so this is not known by them.
    pub(crate) fn is_closed(&self) -> bool {
        self.waiters.are_sent_away() || self.guard.as_ref().is_some_and(|guard| guard.waiters.are_sent_away())
    }

    /// Resolves when this is closed, or the guard shuts down.
    pub(crate) async fn closed(&self) {
        let Some(guard) = &self.guard else { return self.waiters.sent_away().await };
        tokio::select! {
            biased;
            () = self.waiters.sent_away() => {}
            () = guard.waiters.sent_away() => {}
        }
    }

    /// Somebody waits for a lock, until the answer is dropped.
    pub(crate) fn wait(&self) -> (Present, Option<Present>) {
        (self.waiters.enter(), self.guard.as_ref().map(|guard| guard.waiters.enter()))
    }

    /// Sends a command about this lock, waiting within its timeout for a connection that is being made again: a lock has nothing to
    /// fall back on. Not for what was sent and not answered; that may have been done.
    pub(crate) async fn ask<T, F>(
        &self,
        name: &LockName,
        send: impl Fn(Duration) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let started = Instant::now();
        let answer = send(self.command_timeout).await;
        let Err(StoreError { kind: StoreErrorKind::Unavailable, .. }) = answer else { return answer };
        let left = || self.command_timeout.saturating_sub(started.elapsed());
        if left().is_zero() || self.store.reach(&name.key, left()).await.is_err() {
            return answer;
        }
        send(left()).await
    }

    /// A token of one that wants a lock for so long; `None` for ever.
    pub(crate) fn mint(&self, ttl: Option<Duration>) -> Token {
        let node = self.store.node();
        ttl.map_or_else(|| Token::mint(node), |ttl| Token::mint_for(node, ttl))
    }

    pub(crate) fn close(&self) {
        if self.guard.is_none() {
            self.store.close();
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store: _, namespace, command_timeout, background: _, waiters: _, warned: _, guard } = self;
        f.debug_struct("Home")
            .field("namespace", namespace)
            .field("command_timeout", command_timeout)
            .field("of_guard", &guard.is_some())
            .finish_non_exhaustive()
    }
}
