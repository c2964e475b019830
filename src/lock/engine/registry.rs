//! [`LockRegistry`]: the state that all handles of one [`Locks`](crate::lock::Locks) share.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::Instant;

use crate::guard_state::GuardState;
use crate::store::lock_store::LockStore;
use crate::store::names::LockName;
use crate::store::{StoreError, StoreErrorKind, StoreHandle, Token};
use crate::tracker::{StoppableWaiters, Tracked, Tracker};

/// The state that all locks made from one [`Locks`](crate::lock::Locks) share.
pub(crate) struct LockRegistry {
    pub(crate) store: StoreHandle,
    /// Escaped, as it appears in key names.
    pub(crate) namespace: Box<str>,
    pub(crate) command_timeout: Duration,
    /// Releases that run in the background. Locks of a guard use the guard's own gauge: each `guard.locks()` and
    /// each permit to load makes a `LockRegistry`, and the guard's shutdown has to wait for the releases of all of them.
    pub(crate) background: Arc<Tracker>,
    pub(crate) waiters: StoppableWaiters,
    /// Whether the warning was logged that the server announces no key events.
    pub(crate) warned: AtomicBool,
    /// The guard that owns the connections, if any: it closes them. Without a guard, this closes them.
    guard: Option<Arc<GuardState>>,
}

impl LockRegistry {
    pub(crate) fn new(
        store: StoreHandle,
        namespace: Box<str>,
        command_timeout: Duration,
        guard: Option<Arc<GuardState>>,
    ) -> Self {
        let background = guard.as_ref().map(|guard| Arc::clone(&guard.background)).unwrap_or_default();
        Self {
            store,
            namespace,
            command_timeout,
            background,
            waiters: StoppableWaiters::default(),
            warned: AtomicBool::new(false),
            guard,
        }
    }

    /// The store's lock commands, until this is closed.
    pub(crate) fn locks(&self) -> Result<&dyn LockStore, StoreError> {
        match self.is_closed() {
            true => Err(StoreError::new(StoreErrorKind::Closed)),
            false => Ok(self.last_locks()),
        }
    }

    /// The store's lock commands for releases, allowed after closing too, as long as there are connections: a
    /// guard's connections outlive this.
    pub(crate) fn last_locks(&self) -> &dyn LockStore {
        &**self.store.locks()
    }

    /// The connections cannot tell: those of a guard outlive its locks, and a memory store has none.
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

    /// Counts a call that waits for a lock, until the answer is dropped.
    pub(crate) fn wait(&self) -> (Tracked, Option<Tracked>) {
        (self.waiters.enter(), self.guard.as_ref().map(|guard| guard.waiters.enter()))
    }

    /// Sends a command about this lock. If the connection is down, waits for it within the command's timeout,
    /// because a lock has nothing to fall back on. Does not repeat a command that was sent and not answered, which
    /// may have been executed.
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

    /// A new token for a lock that is wanted for `ttl`; `None` for ever.
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

impl Drop for LockRegistry {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for LockRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store: _, namespace, command_timeout, background: _, waiters: _, warned: _, guard } = self;
        f.debug_struct("Home")
            .field("namespace", namespace)
            .field("command_timeout", command_timeout)
            .field("of_guard", &guard.is_some())
            .finish_non_exhaustive()
    }
}
