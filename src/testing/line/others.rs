//! Tags, lists and locks over a wire. The faults of commands strike them too. Messages of a memory store to lock
//! waiters get lost and are sent twice like other wake-ups, and lock waiters are told to ask again without need. Of
//! the faults in the store itself, only refusals strike.

use std::sync::Arc;
use std::time::Duration;

use super::WireStore;
use crate::key::Key;
use crate::store::lock_store::{
    Change, KeyspaceAnswer, LockStore, MutexHolder, MutexTaken, Offer, PermitFreed, PermitTaken,
    SemaphoreState, Take, TakePermit,
};
use crate::store::names::LockName;
use crate::store::tag_store::{ListMember, TagStore, TaggedLookUp};
use crate::store::volume;
use crate::store::volume::Announcement;
use crate::store::wake::lock_waiters::LockWaiter;
use crate::store::{Reply, StoreError, StoreHandle, Token};

/// The timeout of commands that take none.
const WITHIN: Duration = Duration::from_secs(1);

impl WireStore {
    pub(super) fn ask<T, A, F>(&self, writes: bool, within: Duration, act: A) -> Reply<'static, T>
    where
        T: Send + 'static,
        A: FnOnce(StoreHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let wire = Arc::clone(&self.0);
        Box::pin(wire.exchange(within, move |wire| async move {
            wire.server.refuse(writes, writes)?;
            act(wire.node.clone()).await
        }))
    }

    /// The same, about a key or a tag, which is reported to a witness.
    fn ask_about<T, A, F>(
        &self,
        #[cfg_attr(not(test), expect(unused_variables, reason = "for witnesses, which only tests have"))]
        about: Option<&Key>,
        writes: bool,
        within: Duration,
        act: A,
    ) -> Reply<'static, T>
    where
        T: Send + 'static,
        A: FnOnce(StoreHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let reply = self.ask(writes, within, act);
        #[cfg(test)]
        if let Some(about) = about {
            return Box::pin(super::WitnessedCommand::of(&self.0, about).watch(reply));
        }
        reply
    }

    /// The same, about a lock.
    fn ask_of<T, A, F>(&self, name: &LockName, writes: bool, within: Duration, act: A) -> Reply<'static, T>
    where
        T: Send + 'static,
        A: FnOnce(StoreHandle, LockName) -> F + Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (wire, name) = (Arc::clone(&self.0), name.clone());
        self.ask(writes, within, move |node| async move {
            wire.server.forge_for_lock(&name.key);
            act(node, name).await
        })
    }
}

impl TagStore for WireStore {
    fn look_up_tagged<'a>(
        &'a self,
        keys: &'a [Key],
        tags: &'a [Key],
        within: Duration,
    ) -> Reply<'a, TaggedLookUp> {
        let (asked, tags) = (keys.to_vec(), tags.to_vec());
        let act =
            move |node: StoreHandle| async move { node.tags().look_up_tagged(&asked, &tags, within).await };
        self.ask_about(keys.first(), false, within, act)
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        let asked = tags.to_vec();
        let act = move |node: StoreHandle| async move { node.tags().present_ids(&asked, within).await };
        self.ask_about(tags.first(), false, within, act)
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>> {
        let asked = tags.to_vec();
        let act = move |node: StoreHandle| async move { node.tags().tag_ids(&asked, life, within).await };
        self.ask_about(tags.first(), true, within, act)
    }

    fn forget_tag<'a>(
        &'a self,
        tag: &'a Key,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, volume::Announced> {
        let (tag, announcement) = (tag.clone(), announcement.clone());
        #[cfg(test)]
        let wire = Arc::clone(&self.0);
        let act = move |node: StoreHandle| async move {
            let forgotten = node.tags().forget_tag(&tag, &announcement, within).await;
            #[cfg(test)]
            if let Some(witness) = wire.server.witness()
                && forgotten.is_ok()
            {
                witness.tag_changed(node.node());
            }
            forgotten
        };
        self.ask(true, within, act)
    }

    fn enlist<'a>(
        &'a self,
        list: &'a Key,
        member: ListMember,
        most: usize,
        life: Duration,
    ) -> Reply<'a, bool> {
        let list = list.clone();
        self.ask(true, WITHIN, move |node| async move { node.tags().enlist(&list, member, most, life).await })
    }

    fn replicated<'a>(&'a self, key: &'a Key, replicas: u32, within: Duration) -> Reply<'a, u32> {
        let key = key.clone();
        self.ask(
            false,
            within,
            move |node| async move { node.tags().replicated(&key, replicas, within).await },
        )
    }
}

impl LockStore for WireStore {
    fn take_mutex<'a>(
        &'a self,
        name: &'a LockName,
        ask: Take<'a>,
        within: Duration,
    ) -> Reply<'a, MutexTaken> {
        let (token, instead) = (ask.token.clone(), ask.instead.cloned());
        let Take { ttl, queue, barges, .. } = ask;
        self.ask_of(name, true, within, move |node, name| async move {
            let ask = Take { token: &token, ttl, queue, instead: instead.as_ref(), barges };
            node.locks().take_mutex(&name, ask, within).await
        })
    }

    fn offer_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        offer: Offer,
        within: Duration,
    ) -> Reply<'a, bool> {
        let token = token.clone();
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().offer_mutex(&name, &token, offer, within).await
        })
    }

    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        let token = token.clone();
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().free_mutex(&name, &token, ttl, within).await
        })
    }

    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        let token = token.clone();
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().extend_mutex(&name, &token, ttl, within).await
        })
    }

    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>> {
        self.ask_of(name, false, within, move |node, name| async move {
            node.locks().look_at_mutex(&name, within).await
        })
    }

    fn break_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, bool> {
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().break_mutex(&name, within).await
        })
    }

    fn take_permit<'a>(
        &'a self,
        name: &'a LockName,
        ask: TakePermit<'a>,
        within: Duration,
    ) -> Reply<'a, PermitTaken> {
        let token = ask.token.clone();
        let TakePermit { lease, semaphore, queue, .. } = ask;
        self.ask_of(name, true, within, move |node, name| async move {
            let ask = TakePermit { token: &token, lease, semaphore, queue };
            node.locks().take_permit(&name, ask, within).await
        })
    }

    fn free_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, PermitFreed> {
        let token = token.clone();
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().free_permit(&name, &token, lease, within).await
        })
    }

    fn refresh_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, bool> {
        let token = token.clone();
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().refresh_permit(&name, &token, lease, within).await
        })
    }

    fn look_at_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        self.ask_of(name, false, within, move |node, name| async move {
            node.locks().look_at_semaphore(&name, within).await
        })
    }

    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: Change,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        self.ask_of(name, true, within, move |node, name| async move {
            node.locks().change_semaphore(&name, change, within).await
        })
    }

    fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        self.0.node.locks().await_grant(name, token)
    }

    fn grants_arrive(&self) -> bool {
        self.0.hints_arrive() && self.0.node.locks().grants_arrive()
    }

    fn grants_are_claims(&self) -> bool {
        self.0.node.locks().grants_are_claims()
    }

    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, KeyspaceAnswer> {
        self.ask_of(name, false, within, move |node, name| async move {
            node.locks().announce(&name, within).await
        })
    }
}
