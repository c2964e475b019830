//! Implements [`LockStore`] in memory. Each step runs under one lock, like a script on a server, and
//! wakes the waiters it has told after the lock is released.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::lock_table::LockTable;
use super::mutexes::MutexStep;
use super::{MemoryNode, reply};
use crate::store::lock_store::{
    Change, KeyspaceAnswer, LockStore, MutexHolder, MutexTaken, Offer, PermitFreed, PermitTaken,
    SemaphoreState, Take, TakePermit,
};
use crate::store::names::LockName;
use crate::store::wake::lock_waiters::LockWaiter;
use crate::store::{Reply, Store as _, StoreError, StoreErrorKind, Token};
use crate::sync::lock;

impl MemoryNode {
    /// Runs a step at once and returns its answer.
    fn step<'a, T: Send + 'a>(
        &self,
        act: impl FnOnce(&mut LockTable, &mut MutexStep<'_>) -> T,
    ) -> Reply<'a, T> {
        if self.closed.load(Ordering::Acquire) {
            return Box::pin(std::future::ready(Err(StoreError::new(StoreErrorKind::Closed))));
        }
        let shared = &self.store.shared;
        let now = Instant::now();
        let now_us = self.clock_at(now) * 1_000;
        let mut step =
            MutexStep { now, now_us, grants: &shared.grants, wakes: Vec::new(), meddling: &shared.meddling };
        reply(act(&mut lock(&shared.locks), &mut step))
    }
}

impl LockStore for MemoryNode {
    fn take_mutex<'a>(
        &'a self,
        name: &'a LockName,
        ask: Take<'a>,
        _within: Duration,
    ) -> Reply<'a, MutexTaken> {
        self.step(|locks, step| locks.mutexes.take(step, &name.key, &ask))
    }

    fn offer_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        offer: Offer,
        _within: Duration,
    ) -> Reply<'a, bool> {
        self.step(|locks, step| locks.mutexes.offer(step, &name.key, token, offer))
    }

    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        _within: Duration,
    ) -> Reply<'a, bool> {
        self.step(|locks, step| locks.mutexes.free(step, &name.key, token, ttl))
    }

    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        _within: Duration,
    ) -> Reply<'a, bool> {
        self.step(|locks, step| locks.mutexes.extend(step, &name.key, token, ttl))
    }

    fn look_at_mutex<'a>(&'a self, name: &'a LockName, _within: Duration) -> Reply<'a, Option<MutexHolder>> {
        self.step(|locks, step| {
            let (token, until) = locks.mutexes.look(step.now, &name.key)?;
            let token = Bytes::copy_from_slice(token.as_str().as_bytes());
            Some(MutexHolder { token, remaining: until.map(|until| until - step.now) })
        })
    }

    fn break_mutex<'a>(&'a self, name: &'a LockName, _within: Duration) -> Reply<'a, bool> {
        self.step(|locks, step| locks.mutexes.force(step, &name.key))
    }

    fn take_permit<'a>(
        &'a self,
        name: &'a LockName,
        ask: TakePermit<'a>,
        _within: Duration,
    ) -> Reply<'a, PermitTaken> {
        self.step(|locks, step| locks.semaphores.take(step, &name.key, &ask))
    }

    fn free_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        _within: Duration,
    ) -> Reply<'a, PermitFreed> {
        self.step(|locks, step| locks.semaphores.free(step, &name.key, token, lease))
    }

    fn refresh_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        _within: Duration,
    ) -> Reply<'a, bool> {
        self.step(|locks, step| locks.semaphores.refresh(step, &name.key, token, lease))
    }

    fn look_at_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        _within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        self.step(|locks, step| locks.semaphores.look(step.now, &name.key))
    }

    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: Change,
        _within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        self.step(|locks, step| locks.semaphores.change(step, &name.key, change))
    }

    fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        self.store.shared.grants.register(name, token)
    }

    fn grants_arrive(&self) -> bool {
        true
    }

    /// A mutex of this store changes only by this contract, which tells its waiters.
    fn announce<'a>(&'a self, _name: &'a LockName, _within: Duration) -> Reply<'a, KeyspaceAnswer> {
        reply(KeyspaceAnswer::Yes)
    }
}
