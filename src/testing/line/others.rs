//! Tags, lists and locks over a wire. What strikes commands strikes these too, and what is said to waiters for locks gets
//! lost like other wake-ups; of what happens to the store itself, they know refusals.

use std::sync::Arc;
use std::time::Duration;

use super::Line;
use crate::key::Key;
use crate::store::grants::Await;
use crate::store::locks::{
    Announced, Change, LockName, LockStore, MutexHolder, MutexTaken, PermitFreed, PermitTaken,
    SemaphoreState, Take, TakePermit,
};
use crate::store::memory::MemoryNode;
use crate::store::tags::{Found, Member, TagStore};
use crate::store::{Reply, StoreError, Token};
use crate::testing::server::now;

/// On the far side there is nothing to wait for.
const NOW: Duration = Duration::ZERO;
/// The deadline of commands that have none of their own.
const WITHIN: Duration = Duration::from_secs(1);

impl Line {
    fn ask<T, F>(&self, writes: bool, within: Duration, act: F) -> Reply<'static, T>
    where
        T: Send + 'static,
        F: FnOnce(&MemoryNode) -> Result<T, StoreError> + Send + 'static,
    {
        let wire = Arc::clone(&self.0);
        Box::pin(wire.exchange(within, move |wire| {
            wire.server.refuse(writes, writes)?;
            act(&wire.node)
        }))
    }
}

impl TagStore for Line {
    fn look_up_tagged<'a>(&'a self, key: &'a Key, tags: &'a [Key], within: Duration) -> Reply<'a, Found> {
        let (key, tags) = (key.clone(), tags.to_vec());
        self.ask(false, within, move |node| now(node.look_up_tagged(&key, &tags, NOW)))
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        let tags = tags.to_vec();
        self.ask(false, within, move |node| now(node.present_ids(&tags, NOW)))
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>> {
        let tags = tags.to_vec();
        self.ask(true, within, move |node| now(node.tag_ids(&tags, life, NOW)))
    }

    fn forget_tag<'a>(&'a self, tag: &'a Key, within: Duration) -> Reply<'a, ()> {
        let tag = tag.clone();
        self.ask(true, within, move |node| now(node.forget_tag(&tag, NOW)))
    }

    fn enlist<'a>(&'a self, list: &'a Key, member: Member, most: usize, life: Duration) -> Reply<'a, bool> {
        let list = list.clone();
        self.ask(true, WITHIN, move |node| now(node.enlist(&list, member, most, life)))
    }

    fn replicated<'a>(&'a self, key: &'a Key, replicas: u32, within: Duration) -> Reply<'a, u32> {
        let key = key.clone();
        self.ask(false, within, move |node| now(node.replicated(&key, replicas, NOW)))
    }
}

impl LockStore for Line {
    fn take_mutex<'a>(
        &'a self,
        name: &'a LockName,
        ask: Take<'a>,
        within: Duration,
    ) -> Reply<'a, MutexTaken> {
        let (name, token, instead) = (name.clone(), ask.token.clone(), ask.instead.cloned());
        let Take { ttl, queue, .. } = ask;
        self.ask(true, within, move |node| {
            let ask = Take { token: &token, ttl, queue, instead: instead.as_ref() };
            now(node.take_mutex(&name, ask, NOW))
        })
    }

    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        let (name, token) = (name.clone(), token.clone());
        self.ask(true, within, move |node| now(node.free_mutex(&name, &token, ttl, NOW)))
    }

    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        let (name, token) = (name.clone(), token.clone());
        self.ask(true, within, move |node| now(node.extend_mutex(&name, &token, ttl, NOW)))
    }

    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>> {
        let name = name.clone();
        self.ask(false, within, move |node| now(node.look_at_mutex(&name, NOW)))
    }

    fn break_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, bool> {
        let name = name.clone();
        self.ask(true, within, move |node| now(node.break_mutex(&name, NOW)))
    }

    fn take_permit<'a>(
        &'a self,
        name: &'a LockName,
        ask: TakePermit<'a>,
        within: Duration,
    ) -> Reply<'a, PermitTaken> {
        let (name, token) = (name.clone(), ask.token.clone());
        let TakePermit { lease, semaphore, queue, .. } = ask;
        self.ask(true, within, move |node| {
            now(node.take_permit(&name, TakePermit { token: &token, lease, semaphore, queue }, NOW))
        })
    }

    fn free_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, PermitFreed> {
        let (name, token) = (name.clone(), token.clone());
        self.ask(true, within, move |node| now(node.free_permit(&name, &token, lease, NOW)))
    }

    fn refresh_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, bool> {
        let (name, token) = (name.clone(), token.clone());
        self.ask(true, within, move |node| now(node.refresh_permit(&name, &token, lease, NOW)))
    }

    fn look_at_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        let name = name.clone();
        self.ask(false, within, move |node| now(node.look_at_semaphore(&name, NOW)))
    }

    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: Change,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        let name = name.clone();
        self.ask(true, within, move |node| now(node.change_semaphore(&name, change, NOW)))
    }

    fn await_grant(&self, name: &LockName, token: &Token) -> Await {
        self.0.node.await_grant(name, token)
    }

    fn grants_arrive(&self) -> bool {
        self.0.hints_arrive()
    }

    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Announced> {
        let name = name.clone();
        self.ask(false, within, move |node| now(node.announce(&name, NOW)))
    }
}
