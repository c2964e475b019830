//! The lock toolkit on a Redis server.

use std::time::Duration;

use super::RedisStore;
use crate::store::grants::Await;
use crate::store::locks::{
    Announced, Change, LockName, LockStore, MutexHolder, PermitFreed, PermitTaken, SemaphoreState, Take,
    TakePermit, Taken,
};
use crate::store::{Reply, StoreError, StoreErrorKind, Token};

fn later<'a, T: Send + 'a>() -> Reply<'a, T> {
    Box::pin(std::future::ready(Err(StoreError::new(StoreErrorKind::Refused))))
}

impl LockStore for RedisStore {
    fn take_mutex<'a>(&'a self, _: &'a LockName, _: Take<'a>, _: Duration) -> Reply<'a, Taken> {
        later()
    }
    fn free_mutex<'a>(
        &'a self,
        _: &'a LockName,
        _: &'a Token,
        _: Option<Duration>,
        _: Duration,
    ) -> Reply<'a, bool> {
        later()
    }
    fn extend_mutex<'a>(
        &'a self,
        _: &'a LockName,
        _: &'a Token,
        _: Option<Duration>,
        _: Duration,
    ) -> Reply<'a, bool> {
        later()
    }
    fn look_at_mutex<'a>(&'a self, _: &'a LockName, _: Duration) -> Reply<'a, Option<MutexHolder>> {
        later()
    }
    fn break_mutex<'a>(&'a self, _: &'a LockName, _: Duration) -> Reply<'a, bool> {
        later()
    }
    fn take_permit<'a>(&'a self, _: &'a LockName, _: TakePermit<'a>, _: Duration) -> Reply<'a, PermitTaken> {
        later()
    }
    fn free_permit<'a>(
        &'a self,
        _: &'a LockName,
        _: &'a Token,
        _: Duration,
        _: Duration,
    ) -> Reply<'a, PermitFreed> {
        later()
    }
    fn refresh_permit<'a>(
        &'a self,
        _: &'a LockName,
        _: &'a Token,
        _: Duration,
        _: Duration,
    ) -> Reply<'a, bool> {
        later()
    }
    fn look_at_semaphore<'a>(&'a self, _: &'a LockName, _: Duration) -> Reply<'a, Option<SemaphoreState>> {
        later()
    }
    fn change_semaphore<'a>(
        &'a self,
        _: &'a LockName,
        _: Change,
        _: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        later()
    }
    fn await_grant(&self, name: &LockName, token: &Token) -> Await {
        self.grants.register(name, token)
    }
    fn grants_arrive(&self) -> bool {
        self.inbox.hears()
    }
    fn announce<'a>(&'a self, _: &'a LockName, _: Duration) -> Reply<'a, Announced> {
        later()
    }
}
