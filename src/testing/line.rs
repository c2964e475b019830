//! [`WireStore`]: a guard's store, as the client's end of a wire.
//!
//! Commands about values, tags, lists, locks and volumes go over the wire, and the faults of commands strike all of them.
//! Of the faults in the store itself, only refusals strike commands about tags, lists and locks. A memory store's messages
//! to lock waiters get lost and are sent twice like other wake-ups, and lock waiters are notified to ask again without
//! need. Messages about a volume get lost, come late and come twice.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use super::command::{Command, CommandAnswer};
use super::wire::{VolumeEnd, Wire};
use crate::health::{Finding, Health};
use crate::key::Key;
use crate::store::lock_store::{
    KeyspaceAnswer, LockStore, MutexHolder, MutexTaken, PermitFreed, PermitTaken, SemaphoreChange,
    SemaphoreState, Take, TakePermit,
};
use crate::store::names::LockName;
use crate::store::tag_store::{ListMember, TagStore, TaggedLookUp};
use crate::store::volume::{Announced, Announcement, ChangedName, Member, Renewal, Renewed};
use crate::store::volume_store::{VolumeListener, VolumeStore};
use crate::store::wake::lock_waiters::LockWaiter;
use crate::store::{
    Acquire, Acquired, Examine, Fail, HandOver, HandedOver, Insert, LeaseWatch, Reply, Store, StoreError,
    StoreErrorKind, StoreHandle, Token, TokenCheck, volume,
};

/// One node's store: it sends its commands over a wire.
#[derive(Debug)]
pub(super) struct WireStore(pub(super) Arc<Wire>);

impl WireStore {
    fn send(&self, key: &Key, command: Command, within: Duration) -> Reply<'static, CommandAnswer> {
        let (wire, key) = (Arc::clone(&self.0), key.clone());
        #[cfg(test)]
        let witnessed = WitnessedCommand::of(&wire, &key);
        // Nothing is sent before the reply is polled, as on a connection.
        let reply = wire.exchange(within, move |wire| async move {
            wire.server.arrive(&wire.node, &key, command, within).await
        });
        #[cfg(test)]
        let reply = witnessed.watch(reply);
        Box::pin(reply)
    }
}

/// A command on its way, reported to the witness when it ends or is dropped.
#[cfg(test)]
struct WitnessedCommand {
    wire: Arc<Wire>,
    key: Key,
    /// When it was sent.
    sent: Option<Instant>,
    is_ok: bool,
}

#[cfg(test)]
impl WitnessedCommand {
    fn of(wire: &Arc<Wire>, key: &Key) -> Self {
        Self { wire: Arc::clone(wire), key: key.clone(), sent: None, is_ok: false }
    }

    async fn watch<T>(mut self, reply: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.sent = Some(Instant::now());
        let answer = reply.await;
        self.is_ok = answer.is_ok();
        answer
    }
}

#[cfg(test)]
impl Drop for WitnessedCommand {
    fn drop(&mut self) {
        if let (Some(sent), Some(witness)) = (self.sent, self.wire.server.witness()) {
            witness.answered(self.wire.node.node(), &self.key, sent.elapsed(), self.is_ok);
        }
    }
}

/// The error for an answer to another kind of command.
fn confused<T>() -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Refused))
}

impl Store for WireStore {
    fn node(&self) -> Uuid {
        self.0.node.node()
    }

    fn store_id(&self) -> u64 {
        self.0.node.store_id()
    }

    fn clock_at(&self, moment: Instant) -> u64 {
        self.0.node.clock_at(moment)
    }

    fn look_up<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, Option<Bytes>> {
        let reply = self.send(key, Command::LookUp, within);
        Box::pin(async move {
            if let CommandAnswer::Found(found) = reply.await? { Ok(found) } else { confused() }
        })
    }

    fn acquire<'a>(&'a self, key: &'a Key, ask: Acquire<'a>, within: Duration) -> Reply<'a, Acquired> {
        let Acquire { token, lease, seen, behind, queue } = ask;
        let (token, seen, behind) = (token.clone(), seen.cloned(), behind.cloned());
        let reply = self.send(key, Command::Acquire { token, lease, seen, behind, queue }, within);
        Box::pin(async move {
            if let CommandAnswer::Acquired(acquired) = reply.await? { Ok(acquired) } else { confused() }
        })
    }

    fn renew<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck> {
        checked(self.send(key, Command::Renew { token: token.clone(), lease }, within))
    }

    fn commit<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        entry: Bytes,
        keep: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck> {
        checked(self.send(key, Command::Commit { token: token.clone(), entry, keep }, within))
    }

    fn fail<'a>(&'a self, key: &'a Key, fail: Fail<'a>, within: Duration) -> Reply<'a, TokenCheck> {
        let Fail { token, outcome, keep, replay, older, seen } = fail;
        let (token, seen) = (token.clone(), seen.cloned());
        checked(self.send(key, Command::Fail { token, outcome, keep, replay, older, seen }, within))
    }

    fn hand_over<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        how: HandOver,
        within: Duration,
    ) -> Reply<'a, HandedOver> {
        let reply = self.send(key, Command::HandOver { token: token.clone(), how }, within);
        Box::pin(async move {
            if let CommandAnswer::HandedOver(done) = reply.await? { Ok(done) } else { confused() }
        })
    }

    fn release<'a>(&'a self, key: &'a Key, token: &'a Token, within: Duration) -> Reply<'a, TokenCheck> {
        checked(self.send(key, Command::Release { token: token.clone() }, within))
    }

    fn invalidate<'a>(
        &'a self,
        key: &'a Key,
        insert: Option<Insert>,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, Announced> {
        let announcement = announcement.clone();
        let reply = self.send(key, Command::Invalidate { insert, announcement }, within);
        Box::pin(async move {
            if let CommandAnswer::Announced(announced) = reply.await? { Ok(announced) } else { confused() }
        })
    }

    fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        self.0.watch(key, token)
    }

    fn hints_arrive(&self) -> bool {
        self.0.hints_arrive()
    }

    fn connect(&self, within: Duration) -> Reply<'_, ()> {
        Box::pin(async move {
            self.0.reaches(within).await?;
            self.0.node.connect(within).await
        })
    }

    fn probe<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            self.0.reaches(within).await?;
            self.0.node.probe(key, within).await
        })
    }

    fn reach<'a>(&'a self, name: &'a str, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            self.0.reaches(within).await?;
            self.0.node.reach(name, within).await
        })
    }

    fn is_down(&self, name: &str) -> bool {
        self.0.node.is_down(name)
    }

    fn close(&self) {
        self.0.close();
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn examine(&self, ask: Examine) -> Pin<Box<dyn Future<Output = Vec<Finding>> + Send + '_>> {
        let found = self.0.examine();
        Box::pin(async move {
            let mut findings = self.0.node.examine(ask).await;
            findings.extend(found);
            findings
        })
    }
}

fn checked<'a>(reply: Reply<'static, CommandAnswer>) -> Reply<'a, TokenCheck> {
    Box::pin(
        async move { if let CommandAnswer::Checked(check) = reply.await? { Ok(check) } else { confused() } },
    )
}

/// The timeout of commands that take none.
const WITHIN: Duration = Duration::from_secs(1);

impl WireStore {
    fn ask<T, A, F>(&self, writes: bool, within: Duration, act: A) -> Reply<'static, T>
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
            return Box::pin(WitnessedCommand::of(&self.0, about).watch(reply));
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
        let (owned, tags) = (keys.to_vec(), tags.to_vec());
        let act =
            move |node: StoreHandle| async move { node.tags().look_up_tagged(&owned, &tags, within).await };
        self.ask_about(keys.first(), false, within, act)
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        let owned = tags.to_vec();
        let act = move |node: StoreHandle| async move { node.tags().present_ids(&owned, within).await };
        self.ask_about(tags.first(), false, within, act)
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>> {
        let owned = tags.to_vec();
        let act = move |node: StoreHandle| async move { node.tags().tag_ids(&owned, life, within).await };
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
            let announced = node.tags().forget_tag(&tag, &announcement, within).await;
            #[cfg(test)]
            if let Some(witness) = wire.server.witness()
                && announced.is_ok()
            {
                witness.tag_changed(node.node());
            }
            announced
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
        let Take { ttl, queue, .. } = ask;
        self.ask_of(name, true, within, move |node, name| async move {
            let ask = Take { token: &token, ttl, queue, instead: instead.as_ref() };
            node.locks().take_mutex(&name, ask, within).await
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
        change: SemaphoreChange,
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

impl VolumeStore for WireStore {
    fn renew_membership<'a>(
        &'a self,
        volume: &'a Key,
        renewal: Renewal,
        within: Duration,
    ) -> Reply<'a, Renewed> {
        let (volume, server) = (volume.clone(), Arc::clone(&self.0.server));
        self.ask(true, within, move |node| async move {
            server.strike_volume(&volume);
            // A broken connection takes its marks with it.
            let session = server.session();
            let mark = renewal.mark.filter(|mark| mark.session == session);
            let mut renewed =
                node.volumes().renew_membership(&volume, Renewal { mark, ..renewal }, within).await?;
            renewed.newest.session = session;
            Ok(renewed)
        })
    }

    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        name: &'a ChangedName,
        within: Duration,
    ) -> Reply<'a, Announced> {
        let (announcement, name) = (announcement.clone(), name.clone());
        let server = Arc::clone(&self.0.server);
        self.ask(true, within, move |node: StoreHandle| async move {
            server.strike_volume(&announcement.volume);
            node.volumes().announce(&announcement, &name, within).await
        })
    }

    fn remove_member<'a>(&'a self, volume: &'a Key, member: Member, within: Duration) -> Reply<'a, ()> {
        let volume = volume.clone();
        self.ask(true, within, move |node: StoreHandle| async move {
            node.volumes().remove_member(&volume, member, within).await
        })
    }

    fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        tokio::spawn(self.ask(false, WITHIN, move |node: StoreHandle| async move {
            node.volumes().acknowledge(announcer, id);
            Ok(())
        }));
    }

    fn listen(&self, listener: Weak<dyn VolumeListener>) {
        let end = self.0.volume.get_or_init(|| Arc::new(VolumeEnd::of(&self.0, listener)));
        self.0.node.volumes().listen(Arc::downgrade(end));
    }

    fn until_received(&self, within: Duration) -> Reply<'_, ()> {
        Box::pin(async move { self.0.reaches(within).await })
    }
}
