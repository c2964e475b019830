//! The contract of the fleet protocol with a store: one method per transition.
//!
//! Every command is one atomic step as seen by all nodes (notifying a long queue may take further steps after it). Every
//! mutation is conditional on the caller's [`Token`], or, for ACQUIRE and changes, on a latest moment; a change also on its
//! [number](AttemptNumber). So a step that runs late (its caller timed out, left, or was paused) changes only data that
//! belongs to its token, or that its own process has not changed since.
//!
//! The invariants, which other comments cite by number:
//!
//! 1. At most one token is the lease of a key at any moment.
//! 2. A value is stored only while the lease is the token it was loaded under.
//! 3. A waiter is registered ([`Store::watch`]) before it tries to acquire, and a refused acquire enqueues it in the same
//!    step: no wake-up falls between the refusal and the wait.
//! 4. A wake-up is a hint. Only the answer of the next `acquire` counts.
//! 5. Everything a node writes expires by itself.
//!
//! A lock is handed over *inside* the step that frees it, to the head of a queue; a waiter that cannot be reached is passed
//! over there. The invariants of locks, which other comments cite by number:
//!
//! 1. At most one token holds a mutex at any moment, at most `capacity` hold permits of a semaphore.
//! 2. While a token waits, no other token barges in: a free lock goes to the head of the queue.
//! 3. A take is idempotent for its token: a repeated take answers as if it had been sent once, and restarts the time
//!    to live.
//! 4. A waiter is registered ([`Store::await_grant`]) before its first take.
//! 5. A grant that no waiter received is returned by the node it was sent to.
//! 6. Everything expires by itself, except a mutex that was taken without a time to live.

pub(crate) mod backend;
pub(crate) mod channels;
#[cfg(feature = "testing")]
pub(crate) mod command;
#[cfg(test)]
#[path = "../../tests/contract/mod.rs"]
mod contract;
pub(crate) mod load_limit;
pub(crate) mod memory;
pub(crate) mod protocol;
#[cfg(feature = "redis")]
pub(crate) mod redis;
pub(crate) mod wake_leases;
pub(crate) mod wake_locks;

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

#[cfg(feature = "redis")]
use self::redis::Write;
use channels::ChannelListener;
#[cfg(feature = "testing")]
use command::{Command, CommandAnswer, EntryCommand, LockCommand};
use load_limit::{EndedLoad, LimitState};
use memory::MemoryNode;
pub(crate) use protocol::*;
use protocol::{Announced, Announcement, ChangedName, Member, Renewal, Renewed, VolumeListener};
pub(crate) use wake_leases::LeaseWatch;
use wake_locks::LockWaiter;

use crate::health::{Finding, Health};
use crate::key::Key;

/// The store of entries, leases, locks, tags, volumes and wake-ups, as one node sees it. Clones are the same node.
///
/// `within` is the deadline of one command, waiting for a connection included. A command that misses it may still run later.
///
/// # Cancel safety
///
/// Dropping a command's future abandons the answer, not the command.
#[derive(Clone)]
pub(crate) enum Store {
    Memory(Arc<MemoryNode>),
    #[cfg(feature = "redis")]
    Redis(Arc<self::redis::RedisStore>),
    /// A store behind a wire, on which commands may get lost.
    #[cfg(feature = "testing")]
    Command(Arc<dyn CommandLine>),
}

/// One node's end of a wire to another store.
#[cfg(feature = "testing")]
pub(crate) trait CommandLine: Send + Sync {
    /// The store at the other end, as the node would use it without the wire.
    fn far(&self) -> &Store;

    /// Sends a command, and waits for its answer. Nothing is sent before the future is polled.
    fn run(self: Arc<Self>, command: Command, within: Duration) -> StoreFuture<'static, CommandAnswer>;

    /// Waits until a command that is sent now would arrive, at most `within`.
    fn reaches(&self, within: Duration) -> StoreFuture<'_, ()>;

    /// As [`Store::watch`].
    fn watch(self: Arc<Self>, key: &Key, token: &Token) -> LeaseWatch;

    /// As [`Store::hints_arrive`].
    fn hints_arrive(&self) -> bool;

    /// As [`Store::listen`].
    fn listen(self: Arc<Self>, listener: Weak<dyn VolumeListener>);

    /// As [`Store::close`].
    fn close(&self);

    /// As [`Store::health`].
    fn health(&self) -> Health;

    /// A finding about the wire.
    fn examine(&self) -> Option<Finding>;
}

/// The eventual answer to a command, in a box.
pub(crate) type StoreFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = StoreResult<T>> + Send + 'a>>;

/// The deadline of a command whose method has no `within`, on a store other than Redis.
const WITHIN: Duration = Duration::from_secs(1);

/// Evaluates the expression for the present kind of store. Without one for a `CommandLine`, calls the store behind its wire.
macro_rules! call {
    ($self:ident, $store:ident => $call:expr) => {
        call!($self, $store => $call, line => {
            let $store = line.far();
            $call
        })
    };
    ($self:ident, $store:ident => $call:expr, $line:ident => $on_line:expr) => {
        call!($self, $store => $call, $line => $on_line, $store => $call)
    };
    ($self:ident, $store:ident => $call:expr, $line:ident => $on_line:expr, $memory:pat => $in_memory:expr) => {
        match $self {
            Self::Memory($memory) => $in_memory,
            #[cfg(feature = "redis")]
            Self::Redis($store) => $call,
            #[cfg(feature = "testing")]
            Self::Command($line) => $on_line,
        }
    };
    ($self:ident, $on_redis:ident => $call:expr, $otherwise:expr) => {
        call!($self, $on_redis => $call, _line => $otherwise, _ => $otherwise)
    };
}

/// Tries to reach the server. A `CommandLine` first waits until its wire delivers commands, and then reaches the server of the store
/// behind it. A memory store is always reached.
macro_rules! reach {
    ($self:ident, $within:ident, $store:ident => $call:expr) => {
        call!(
            $self,
            $store => Box::pin($call).await,
            line => {
                line.reaches($within).await?;
                let $store = line.far();
                Box::pin($call).await
            },
            _ => Ok(())
        )
    };
}

/// The commands: each runs on a memory store at once; on Redis in a box, because the futures of its steps are large; on a `CommandLine`
/// as owned data, the [`Command`] behind the `=`.
macro_rules! commands {
    ($($(#[$doc:meta])* $method:ident($($arg:ident: $type:ty),*) -> $answer:ty = $command:expr;)*) => {
        #[cfg_attr(not(feature = "redis"), allow(unused_variables, reason = "a memory store answers at once"))]
        impl Store {$(
            $(#[$doc])*
            pub(crate) async fn $method(&self, $($arg: $type,)* within: Duration) -> StoreResult<$answer> {
                call!(
                    self,
                    store => Box::pin(store.$method($($arg,)* within)).await,
                    line => on_line!(line, within, $command),
                    node => node.$method($($arg),*)
                )
            }
        )*}
    };
}

/// The answer to a command that a `CommandLine` runs.
#[cfg(feature = "testing")]
macro_rules! on_line {
    ($line:ident, $within:ident, $command:expr) => {
        Arc::clone($line).run($command, $within).await?.try_into()
    };
}

commands! {
    /// ACQUIRE: answers the first that applies: an entry that is not `seen`; the outcome of the holder named in `behind`,
    /// or an outcome that is replayed to newcomers; the lease, if it is free or this token holds it already (its time restarts);
    /// else the present holder, with a position in the queue if `queue` is set.
    acquire(key: &Key, ask: Acquire<'_>) -> Acquired = Command::Entry(key.clone(), ask.into());

    /// RENEW: gives the lease `lease` from now, if it is still this token's.
    renew(key: &Key, token: &Token, lease: Duration) -> TokenCheck
        = Command::Entry(key.clone(), EntryCommand::Renew { token: token.clone(), lease });

    /// COMMIT: if the lease is this token's, stores `entry` for `keep`, frees the lease and wakes all waiters in the queue.
    commit(key: &Key, token: &Token, entry: Bytes, keep: Duration) -> TokenCheck
        = Command::Entry(key.clone(), EntryCommand::Commit { token: token.clone(), entry, keep });

    /// FAIL: if the lease is this token's, leaves the outcome for the waiters behind it, does with the older entry what
    /// [`OlderEntry`] says, frees the lease and wakes all waiters in the queue.
    fail(key: &Key, fail: Fail<'_>) -> TokenCheck = Command::Entry(key.clone(), fail.into());

    /// HAND OVER: if the lease is this token's, gives it to the first waiter in the queue that can be reached, and notifies
    /// that waiter. Frees the lease if no waiter can be reached.
    hand_over(key: &Key, token: &Token, how: HandOver) -> HandedOver
        = Command::Entry(key.clone(), EntryCommand::HandOver { token: token.clone(), how });

    /// RELEASE: if the lease is this token's, frees it and wakes all waiters in the queue; else gives up the token's
    /// position there, so that it is not handed the lease later. Also used after a commit whose answer was lost.
    release(key: &Key, token: &Token) -> TokenCheck
        = Command::Entry(key.clone(), EntryCommand::Release { token: token.clone() });

    /// LOOK UP of several entries with the present states of tags, all at one moment; `None` for a tag without an id.
    look_up_tagged(keys: &[Key], tags: &[Key]) -> TaggedLookUp = Command::LookUpTagged(keys.to_vec(), tags.to_vec());

    /// The present states of tags; `None` for a tag without an id.
    present_tags(tags: &[Key]) -> Vec<Option<TagState>> = Command::PresentTags(tags.to_vec());

    /// The ids of tags, created where missing. Each lives at least for `life` from now.
    tag_ids(tags: &[Key], life: Duration) -> Vec<u64> = Command::TagIds(tags.to_vec(), life);

    /// ENTER LOAD: notes in the journal of a volume's tags that the load begins. The journal lives for at least `life` from now.
    enter_load(journal: &Key, load: Uuid, life: Duration) -> () = Command::EnterLoad(journal.clone(), load, life);

    /// Whether the journal shows that none of these tags was invalidated since the load entered it. False if it does not show the load:
    /// the journal is another one.
    no_tag_since(journal: &Key, load: Uuid, tags: &[Key]) -> bool
        = Command::NoTagSince(journal.clone(), load, tags.to_vec());

    /// Waits, for `within` at most, until `replicas` replicas have this node's writes to `key`; answers how many have them then.
    replicated(key: &Key, replicas: u32) -> u32 = Command::Replicated(key.clone(), replicas);

    /// TAKE: gets the mutex, if it is free and no waiter is before this token, or if this token holds it already; else, if
    /// requested, a position in its queue. With `ask.instead`, does FREE of that token first, in the same step.
    take_mutex(name: &LockName, ask: Take<'_>) -> MutexTaken = Command::Lock(name.clone(), ask.into());

    /// FREE: gives up the token's position in the queue; if the token holds the mutex, or the mutex has no holder, hands it
    /// to the head of the queue. Answers whether the token held it. A position is identified by token and time to live, so
    /// `ttl` must be the one that the token was queued with.
    free_mutex(name: &LockName, token: &Token, ttl: Option<Duration>) -> bool
        = Command::Lock(name.clone(), LockCommand::FreeMutex(token.clone(), ttl));

    /// EXTEND: restarts the time to live, if this token still holds the mutex, and notifies the waiters if the new end is
    /// earlier. Answers whether the token held it.
    extend_mutex(name: &LockName, token: &Token, ttl: Option<Duration>) -> bool
        = Command::Lock(name.clone(), LockCommand::ExtendMutex(token.clone(), ttl));

    /// LOOK: answers the holder of the mutex, foreign holders included; `None` if it is free.
    look_at_mutex(name: &LockName) -> Option<MutexHolder> = Command::Lock(name.clone(), LockCommand::LookAtMutex);

    /// BREAK: takes the mutex from its holder, notifies that holder's node, and hands the mutex to the head of the queue.
    /// Answers whether it had a holder.
    break_mutex(name: &LockName) -> bool = Command::Lock(name.clone(), LockCommand::BreakMutex);

    /// TAKE of a permit: creates the semaphore if there is none; removes permits with an ended lease; serves the queue;
    /// then as [`take_mutex`](Self::take_mutex).
    take_permit(name: &LockName, ask: TakePermit<'_>) -> PermitTaken = Command::Lock(name.clone(), ask.into());

    /// FREE of a permit: as [`free_mutex`](Self::free_mutex), with the lease that the token was queued with.
    free_permit(name: &LockName, token: &Token, lease: Duration) -> PermitFreed
        = Command::Lock(name.clone(), LockCommand::FreePermit(token.clone(), lease));

    /// FREE of a permit of a load limit: also counts the load, which may change the limit ([`load_limit`]). Answers the limit; `None`
    /// if the token held no permit, and nothing was counted.
    end_load(name: &LockName, token: &Token, load: (Duration, EndedLoad)) -> (PermitFreed, Option<LimitState>)
        = Command::Lock(name.clone(), LockCommand::EndLoad(token.clone(), load));

    /// REFRESH: restarts the permit's lease, if it has not ended. Answers whether it was restarted.
    refresh_permit(name: &LockName, token: &Token, lease: Duration) -> bool
        = Command::Lock(name.clone(), LockCommand::RefreshPermit(token.clone(), lease));

    /// LOOK at a semaphore: changes nothing and creates nothing; `None` if there is none.
    look_at_semaphore(name: &LockName) -> Option<SemaphoreState>
        = Command::Lock(name.clone(), LockCommand::LookAtSemaphore);

    /// CHANGE of a semaphore, in one step. Answers the state after it, for [`SemaphoreChange::Delete`] the state before it; `None`
    /// if there is no semaphore to change.
    change_semaphore(name: &LockName, change: SemaphoreChange) -> Option<SemaphoreState>
        = Command::Lock(name.clone(), LockCommand::ChangeSemaphore(change));

    /// Has the server announce all changes of this mutex's key, by any client, for as long as a waiter for it is
    /// registered; the first waiter then receives `missed` at each deletion and expiry. A wait may rely on it for events
    /// after a take that was sent after the answer. Needs rights that a guard does not need otherwise; if it is not
    /// available, the answer says so.
    announce_key_changes(name: &LockName) -> KeyspaceAnswer
        = Command::Lock(name.clone(), LockCommand::AnnounceKeyChanges);

    /// RENEW: this node is a member, with this stamp, from now on. Answers the announcements after the mark, if the mark is of the
    /// present session and the log still has exactly the entry that the mark names.
    renew_membership(volume: &Key, renewal: Renewal) -> Renewed = Command::RenewMembership(volume.clone(), renewal);

    /// ANNOUNCE: adds the change of `name` to the log, notifies all members but this node, and answers which members these are.
    announce(announcement: &Announcement, name: &ChangedName) -> Announced
        = Command::Announce(announcement.clone(), name.clone());

    /// FORGET (of another member) and LEAVE (of this node): removes the member, if its stamp is still this one.
    remove_member(volume: &Key, member: Member) -> () = Command::RemoveMember(volume.clone(), member);
}

#[cfg_attr(not(feature = "redis"), allow(unused_variables, reason = "a memory store answers at once"))]
impl Store {
    /// The identity of this node: the first half of its tokens and the name of its inbox.
    pub(crate) fn node(&self) -> Uuid {
        call!(self, store => store.node())
    }

    /// Identifies the store: equal for nodes that share their keys.
    pub(crate) fn store_id(&self) -> u64 {
        call!(self, store => store.store_id())
    }

    /// The clock that decides on freshness for all nodes, at `moment`, in milliseconds.
    pub(crate) fn clock_at(&self, moment: Instant) -> u64 {
        call!(self, store => store.clock_at(moment))
    }

    /// The present time of the clock of [`clock_at`](Self::clock_at).
    pub(crate) fn now(&self) -> u64 {
        self.clock_at(Instant::now())
    }

    /// Whether an answer is ready at once, so that callers have no reads to share.
    pub(crate) fn answers_at_once(&self) -> bool {
        matches!(self, Self::Memory(_))
    }

    /// Whether keys are on several servers, which fail independently.
    pub(crate) fn is_spread(&self) -> bool {
        call!(self, store => store.commands.is_spread(), false)
    }

    /// LOOK UP: the stored bytes, if there are any. A hit sends only this command, so its future is not boxed: a box of
    /// some 1.6 KB would cost a tenth of a hit.
    pub(crate) async fn look_up(&self, key: &Key, within: Duration) -> StoreResult<Option<Bytes>> {
        call!(
            self,
            store => store.look_up(key, within).await,
            line => on_line!(line, within, Command::Entry(key.clone(), EntryCommand::LookUp)),
            node => node.look_up(key)
        )
    }

    /// INVALIDATE: removes entry, lease and outcome; notifies the lease's holder and all waiters in the queue. With an
    /// entry: the same, and stores it in the same step (INSERT). On one server the same step [announces](Self::announce) the change. An
    /// attempt that a later attempt has [voided](Attempts) changes nothing, and fails like an attempt that came too late.
    pub(crate) async fn invalidate(
        &self,
        key: &Key,
        insert: Option<Insert>,
        announcement: &Announcement,
        within: Duration,
    ) -> StoreResult<Announced> {
        call!(
            self,
            store => Box::pin(store.change(key, Write::Value(insert), announcement, within)).await,
            line => {
                let invalidate = EntryCommand::Invalidate { insert, announcement: announcement.clone() };
                on_line!(line, within, Command::Entry(key.clone(), invalidate))
            },
            node => node.invalidate(key, insert, announcement)
        )
    }

    /// Registers a waiter for hints about `key`, until the [`LeaseWatch`] is dropped. Invariant 3 requires this before the first
    /// `acquire`.
    pub(crate) fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        call!(self, store => store.watch(key, token), line => Arc::clone(line).watch(key, token))
    }

    /// Whether hints arrive at present. While hints may get lost, waits are shorter.
    pub(crate) fn hints_arrive(&self) -> bool {
        call!(self, store => store.inbox.hears(), line => line.hints_arrive(), _ => true)
    }

    /// Waits until commands can be sent, at most `within`; also opens the inbox, which is otherwise opened at its first
    /// use.
    pub(crate) async fn connect(&self, within: Duration) -> StoreResult<()> {
        reach!(self, within, store => store.connect(within))
    }

    /// Returns an error if the store lacks a command that loads need, or if this user has no right to it: a retry does not help
    /// until an operator changes the server. `key` must be an unused key.
    pub(crate) async fn probe(&self, key: &Key, within: Duration) -> StoreResult<()> {
        reach!(self, within, store => store.probe(key, within))
    }

    /// Waits until commands about the key of this name can be sent, at most `within`. Does not wait for the inbox.
    pub(crate) async fn reach(&self, name: &str, within: Duration) -> StoreResult<()> {
        reach!(self, within, store => store.reach(name, within))
    }

    /// Opens the inbox, and waits until messages can arrive, or until it is known that they will not; at most `within`.
    pub(crate) async fn until_received(&self, within: Duration) -> StoreResult<()> {
        call!(
            self,
            store => Box::pin(store.until_received(within)).await,
            line => line.reaches(within).await,
            _ => Ok(())
        )
    }

    /// Notes in the journal that a tag is invalidated, and then removes its id. On one server the same step announces the change. A
    /// [voided](Attempts) attempt changes nothing, as in [`invalidate`](Self::invalidate).
    pub(crate) async fn forget_tag(
        &self,
        tag: &Key,
        announcement: &Announcement,
        within: Duration,
    ) -> StoreResult<Announced> {
        self.change_tag(tag, None, announcement, within).await
    }

    /// As [`forget_tag`](Self::forget_tag), but the values of the tag stay valid: their freshness ended `at`, on the store's clock.
    pub(crate) async fn expire_tag(
        &self,
        tag: &Key,
        at: u64,
        announcement: &Announcement,
        within: Duration,
    ) -> StoreResult<Announced> {
        self.change_tag(tag, Some(at), announcement, within).await
    }

    async fn change_tag(
        &self,
        tag: &Key,
        expired_at: Option<u64>,
        announcement: &Announcement,
        within: Duration,
    ) -> StoreResult<Announced> {
        call!(
            self,
            store => Box::pin(store.change(tag, Write::Tag { expired_at }, announcement, within)).await,
            line => on_line!(line, within, Command::ForgetTag(tag.clone(), expired_at, announcement.clone())),
            node => node.forget_tag(tag, expired_at, announcement)
        )
    }

    /// Adds a member to a list with room for `most`; answers whether it is on the list. The list lives for `life`
    /// from its first member on.
    pub(crate) async fn enlist(
        &self,
        list: &Key,
        member: ListMember,
        most: usize,
        life: Duration,
    ) -> StoreResult<bool> {
        let within = call!(self, store => store.command_timeout(), WITHIN);
        call!(
            self,
            store => Box::pin(store.enlist(list, member, most, life, within)).await,
            line => on_line!(line, within, Command::Enlist(list.clone(), member, most, life)),
            node => node.enlist(list, member, most, life)
        )
    }

    /// LEAVE: gives up a waiter's position in the queue, and a grant that it may not have received. As
    /// [`free_permit`](Self::free_permit) or [`free_mutex`](Self::free_mutex), but waiters that leave at the same moment may
    /// share one command.
    pub(crate) async fn leave(&self, name: &LockName, leave: Leave<'_>, within: Duration) -> StoreResult<()> {
        #[cfg(feature = "redis")]
        if let Self::Redis(store) = self {
            return Box::pin(store.leave(name, leave, within)).await;
        }
        let Leave { token, ttl } = leave;
        match name.is_semaphore() {
            true => self.free_permit(name, token, ttl.unwrap_or_default(), within).await.map(drop),
            false => self.free_mutex(name, token, ttl, within).await.map(drop),
        }
    }

    /// Registers a waiter, in the order of calls, until the [`LockWaiter`] is dropped.
    pub(crate) fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        call!(self, store => store.await_grant(name, token))
    }

    /// Whether grants arrive at present. While grants may get lost, waits are shorter.
    pub(crate) fn grants_arrive(&self) -> bool {
        call!(
            self,
            store => store.grants_arrive(),
            line => line.hints_arrive() && line.far().grants_arrive(),
            _ => true
        )
    }

    /// Whether a waiter must confirm a grant by a take at once: a store that cannot know whether grants arrive lets each end
    /// soon unless it is confirmed.
    pub(crate) fn grants_are_claims(&self) -> bool {
        call!(self, store => store.commands.is_spread(), line => line.far().grants_are_claims(), _ => false)
    }

    /// Notifies the announcer that this node has dropped its copies of the announced name. Does not wait; the message may be
    /// lost.
    pub(crate) fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        call!(self, store => store.acknowledge(announcer, id), line => {
            tokio::spawn(Arc::clone(line).run(Command::Acknowledge(announcer, id), WITHIN));
        });
    }

    /// Sends this node's messages about its volume to `listener` from now on. A later listener is ignored.
    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        call!(self, store => store.listen(listener), line => Arc::clone(line).listen(listener));
    }

    /// The holder of the lease of a key, and the lease's remaining time; `None` if the lease is free.
    pub(crate) async fn look_at_lease(
        &self,
        key: &Key,
        within: Duration,
    ) -> StoreResult<Option<MutexHolder>> {
        call!(
            self,
            store => Box::pin(store.look_at_lease(key, within)).await,
            line => Box::pin(line.far().look_at_lease(key, within)).await,
            node => Ok(node.look_at_lease(key))
        )
    }

    /// Passes the messages of a channel on to `listener` from now on, until it is dropped. Waits until messages arrive, at most `within`; they
    /// may arrive later, too.
    pub(crate) async fn listen_to(
        &self,
        channel: Uuid,
        listener: Weak<dyn ChannelListener>,
        within: Duration,
    ) -> StoreResult<()> {
        call!(
            self,
            store => Box::pin(store.listen_to(channel, listener, within)).await,
            line => Box::pin(line.far().listen_to(channel, listener, within)).await,
            node => {
                node.listen_to(channel, listener);
                Ok(())
            }
        )
    }

    /// Identifies the connection on which this node listens to channels, and the number of its database, because channels are those of
    /// all databases of a server.
    pub(crate) fn channel_connection(&self) -> (Uuid, i64) {
        call!(self, store => store.channel_connection(), line => line.far().channel_connection(), node => (node.node(), 0))
    }

    /// Sends a message to the listeners of a channel. Answers how many connections, in a cluster of one node, receive it.
    pub(crate) async fn send_to(&self, channel: Uuid, message: &[u8], within: Duration) -> StoreResult<u64> {
        call!(
            self,
            store => Box::pin(store.send_to(channel, message, within)).await,
            line => Box::pin(line.far().send_to(channel, message, within)).await,
            node => Ok(node.send_to(channel, message))
        )
    }

    /// Whether commands about the key of this name fail at once at present, as far as is known without asking the server.
    pub(crate) fn is_down(&self, name: &str) -> bool {
        call!(self, store => store.commands.is_down(name), line => line.far().is_down(name), _ => false)
    }

    /// Has the connections checked and their round trips measured, because a caller has waited long for its turn to send.
    pub(crate) fn suspect(&self) {
        call!(self, store => store.commands.suspect(), ());
    }

    /// The server of this name, as far as is known.
    pub(crate) fn server_of(&self, name: &str) -> NamedServer {
        call!(self, store => store.commands.server_of(name), NamedServer::default())
    }

    /// The longest entry that the store takes; `usize::MAX` while no limit is known.
    pub(crate) fn longest_entry(&self) -> usize {
        call!(self, store => store.commands.longest_argument(), usize::MAX)
    }

    /// Counts a load that runs without the store, for the report at the end of the outage.
    pub(crate) fn went_without(&self) {
        call!(self, store => store.went_without(), ());
    }

    /// Ends background work and connections. Later commands fail at once.
    pub(crate) fn close(&self) {
        call!(self, store => store.close(), line => line.close());
    }

    /// The known state of the connections and the clock, without asking the server.
    pub(crate) fn health(&self) -> Health {
        call!(self, store => store.health(), line => line.health())
    }

    /// Examines the store itself, in bounded time, with the rights that this user has. A failure is a finding.
    pub(crate) async fn examine(&self, ask: Examine) -> Vec<Finding> {
        call!(
            self,
            store => Box::pin(store.examine(ask)).await,
            line => {
                let found = line.examine();
                let mut findings = Box::pin(line.far().examine(ask)).await;
                findings.extend(found);
                findings
            },
            _ => MemoryNode::examine()
        )
    }
}
