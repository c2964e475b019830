//! The commands of [`Store`](crate::store::Store) on a Redis server. Each step of a lock is one script.
//!
//! A tag's id is at `sg1:t:{tag}`.
//!
//! The registry and the log of a volume are at `sg1:n:{namespace:}` and `sg1:a:{namespace:}`, in one slot. Their scripts are
//! `renew_member.lua`, `announce.lua` and `remove_member.lua`. On one server INVALIDATE and FORGET TAG announce in their own
//! scripts; in a cluster ANNOUNCE follows them. Messages go through the inbox.
//!
//! The keys of locks:
//!
//! | key | holds |
//! |---|---|
//! | `sg1:m:{tag}`, or a key with a prefix of the user's | the mutex: its holder's token |
//! | `sg1:mq:{tag}`, or `sg1:pq:{key}` | its queue: the token and the time to live of each waiter, in the order in which they came |
//! | `sg1:mf:{tag}`, or `sg1:pf:{key}` | the latest fence |
//! | `sg1:mx:{tag}`, or `sg1:px:{key}` | the holder's token and its last extension, if that is longer than the time in the token |
//! | `sg1:mr:{tag}`, or `sg1:pr:{key}`; `sg1:sr:{tag}` | in a cluster: the nodes in the queue that were notified after a holder's death, and whether each has sent a take since (`roll.lua`) |
//! | `sg1:sh:{tag}` | the holders of a semaphore's permits, by the moment their leases end |
//! | `sg1:sq:{tag}` | its queue: the token and the lease of each waiter |
//! | `sg1:sm:{tag}` | layout, capacity at creation, added permits (of a load limit also fewer), idle time in ms |
//! | `sg1:sl:{tag}` | of a load limit: the state of its law, a hash |
//!
//! A mutex under a user's prefix uses other prefixes for its companion keys, because its key may equal
//! another mutex's tag.

use std::future::Future;
use std::sync::Weak;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::commands::entry_steps::{
    Announcing, CommandAttempt, REST, acquire, announce, hand_over, renew_member, wake_rest,
};
use super::commands::lock_queue::{LeaveRole, find_lost};
use super::commands::lock_steps::{
    LockStep, TakeRemarks, end, mutex_holder, queue_entry, semaphore_state, yes,
};
use super::commands::{entry_steps, lock_steps, refused, run};
use super::errors::{bounded, unexpected};
use super::inbox::acknowledgement;
use super::scripts::{Script, get_entry, millis, push_attempt, push_id, push_key, push_outcome, push_seen};
use super::subscriber::channel;
use super::{RedisStore, doctor, scripts};
use crate::health::{Finding, Health};
use crate::key::Key;
use crate::store::load_limit::{EndedLoad, LimitState};
use crate::store::protocol::*;
use crate::store::volume::{Announced, Announcement, ChangedName, Member, Renewal, Renewed, VolumeListener};
use crate::store::wake_leases::LeaseWatch;
use crate::store::wake_locks::LockWaiter;

impl RedisStore {
    pub(crate) async fn look_up(&self, key: &Key, within: Duration) -> Result<Option<Bytes>, StoreError> {
        match self.commands.read(key.name(), &get_entry(key.name()), within).await? {
            Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
            Value::Nil => Ok(None),
            // Foreign data under our key: not an entry, and treated as an entry that cannot be decoded. (MGET, which reads
            // an entry with its tags, answers nil for it.)
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Some(Bytes::new())),
            _ => Err(refused(unexpected())),
        }
    }

    /// Runs a script whose answer says whether the token held the lease, and then notifies the waiters that the script has
    /// not notified.
    async fn run_as_holder(
        &self,
        script: &Script,
        key: &Key,
        token: &Token,
        (size, args): (usize, impl Fn(&mut Cmd) + Sync),
        within: Duration,
    ) -> Result<TokenCheck, StoreError> {
        let sent = Instant::now();
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str());
            args(cmd);
        };
        let done = match run(&self.commands, script, key.name(), size + 80, args, within).await? {
            Value::Int(done) => done,
            _ => return Err(refused(unexpected())),
        };
        if done > REST {
            let says = |cmd: &mut Cmd| {
                cmd.arg(format!("w{}", token.as_str()));
            };
            let left = within.saturating_sub(sent.elapsed());
            wake_rest(&self.commands, key.name(), token, says, left).await;
        }
        match done % REST {
            1 => Ok(TokenCheck::Held),
            0 => Ok(TokenCheck::Lost),
            2 => Ok(TokenCheck::ForeignData),
            _ => Err(refused(unexpected())),
        }
    }
}

impl RedisStore {
    pub(crate) fn node(&self) -> Uuid {
        self.inbox.node()
    }

    pub(crate) fn store_id(&self) -> u64 {
        self.connections.store_id
    }

    pub(crate) fn clock_at(&self, moment: Instant) -> u64 {
        self.commands.clock_at(moment)
    }

    pub(crate) fn is_spread(&self) -> bool {
        self.commands.is_spread()
    }

    pub(crate) async fn acquire(
        &self,
        key: &Key,
        ask: Acquire<'_>,
        within: Duration,
    ) -> Result<Acquired, StoreError> {
        self.inbox.open();
        acquire(&self.commands, key, ask, within).await
    }

    pub(crate) async fn renew(
        &self,
        key: &Key,
        token: &Token,
        lease: Duration,
        within: Duration,
    ) -> Result<TokenCheck, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(millis(lease));
        };
        self.run_as_holder(&scripts::RENEW, key, token, (16, args), within).await
    }

    pub(crate) async fn commit(
        &self,
        key: &Key,
        token: &Token,
        entry: Bytes,
        keep: Duration,
        within: Duration,
    ) -> Result<TokenCheck, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(&entry[..]).arg(millis(keep));
        };
        self.run_as_holder(&scripts::COMMIT, key, token, (entry.len() + 16, args), within).await
    }

    pub(crate) async fn fail(
        &self,
        key: &Key,
        fail: Fail<'_>,
        within: Duration,
    ) -> Result<TokenCheck, StoreError> {
        let (marker, older) = match &fail.older {
            OlderEntry::Stays => (&[][..], "0".to_owned()),
            OlderEntry::Ends => (&[][..], "-".to_owned()),
            OlderEntry::Marked(marker, life) => (&marker[..], millis(*life).to_string()),
        };
        let args = |cmd: &mut Cmd| {
            push_outcome(cmd, fail.token.as_str(), &fail.outcome, fail.keep, fail.replay);
            cmd.arg(marker).arg(&older);
            push_seen(cmd, fail.seen);
        };
        let size = fail.outcome.len() + marker.len() + 176;
        self.run_as_holder(&scripts::FAIL, key, fail.token, (size, args), within).await
    }

    pub(crate) async fn hand_over(
        &self,
        key: &Key,
        token: &Token,
        how: HandOver,
        within: Duration,
    ) -> Result<HandedOver, StoreError> {
        let HandOver { lease, hops, is_leaving } = how;
        hand_over(&self.commands, key.name(), token, Some(lease), (hops, is_leaving), within).await
    }

    pub(crate) async fn release(
        &self,
        key: &Key,
        token: &Token,
        within: Duration,
    ) -> Result<TokenCheck, StoreError> {
        self.run_as_holder(&scripts::RELEASE, key, token, (0, |_: &mut Cmd| {}), within).await
    }

    pub(crate) async fn invalidate(
        &self,
        key: &Key,
        insert: Option<Insert>,
        announcement: &Announcement,
        within: Duration,
    ) -> Result<Announced, StoreError> {
        let change =
            |attempt, left| entry_steps::invalidate(&self.commands, key, insert.as_ref(), attempt, left);
        self.changing(announcement, within, change).await
    }

    pub(crate) fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        self.watches.register(key.name(), token)
    }

    pub(crate) fn hints_arrive(&self) -> bool {
        self.inbox.hears()
    }

    pub(crate) async fn connect(&self, within: Duration) -> Result<(), StoreError> {
        self.inbox.open();
        let both = async {
            self.commands.until_up().await?;
            self.inbox.settled().await;
            Ok(())
        };
        timeout(within, both).await.unwrap_or_else(|_| {
            let why = self.commands.down();
            Err(why.unwrap_or_else(|| StoreError::new(StoreErrorKind::TimedOut)))
        })
    }

    pub(crate) async fn probe(&self, key: &Key, within: Duration) -> Result<(), StoreError> {
        // A command that stays unanswered for longer than two deadlines would cost the connection.
        match within.min(self.command_timeout()) {
            Duration::ZERO => Ok(()),
            within => doctor::probe(&self.commands, key.name(), within).await,
        }
    }

    pub(crate) async fn reach(&self, name: &str, within: Duration) -> Result<(), StoreError> {
        // Does not wait for the inbox: a caller that only sends commands needs no messages.
        timeout(within, self.commands.reach(name)).await.unwrap_or_else(|_| {
            let why = self.commands.down();
            Err(why.unwrap_or_else(|| StoreError::new(StoreErrorKind::Unavailable)))
        })
    }

    pub(crate) fn server_of(&self, name: &str) -> NamedServer {
        self.commands.server_of(name)
    }

    pub(crate) fn suspect(&self) {
        self.commands.suspect();
    }

    pub(crate) fn is_down(&self, name: &str) -> bool {
        self.commands.is_down(name)
    }

    pub(crate) fn health(&self) -> Health {
        let (commands, breaker, reason) = self.commands.link();
        Health {
            topology: self.connections.topology,
            commands,
            inbox: self.inbox.link(),
            breaker,
            reason,
            clock: self.commands.clock(),
            silent_for: self.inbox.silent_for(),
            inbox_lag: self.inbox.lag(),
            outages: self.connections.connector.outages.begun(),
            credential_failures: self.connections.connector.login.failures(),
            local: None,
        }
    }

    pub(crate) fn longest_entry(&self) -> usize {
        self.commands.longest_argument()
    }

    pub(crate) fn went_without(&self) {
        self.connections.connector.outages.load();
    }

    pub(crate) async fn examine(&self, ask: Examine) -> Vec<Finding> {
        doctor::examine(self, ask).await
    }
}

/// Lifetime of a mark that is never removed. Each step before the removal may take at most a fraction of it.
const MARK: Duration = Duration::from_secs(4);

impl RedisStore {
    pub(crate) async fn look_up_tagged(
        &self,
        keys: &[Key],
        tags: &[Key],
        within: Duration,
    ) -> Result<TaggedLookUp, StoreError> {
        let mut values = self.mget(keys, tags, within).await?;
        let ids = values.split_off(keys.len()).into_iter().map(id).collect();
        let entries = values.into_iter().map(|value| match value {
            Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
            Value::Nil => Ok(None),
            _ => Err(refused(unexpected())),
        });
        Ok((entries.collect::<Result<_, _>>()?, ids))
    }

    pub(crate) async fn present_ids(
        &self,
        tags: &[Key],
        within: Duration,
    ) -> Result<Vec<Option<u64>>, StoreError> {
        Ok(self.mget(&[], tags, within).await?.into_iter().map(id).collect())
    }

    pub(crate) async fn tag_ids(
        &self,
        tags: &[Key],
        life: Duration,
        within: Duration,
    ) -> Result<Vec<u64>, StoreError> {
        // One script each, because tags need not share a slot; all are sent at once.
        try_join_all(tags.iter().map(move |tag| self.tag_id(tag, life, within))).await
    }

    pub(crate) async fn forget_tag(
        &self,
        tag: &Key,
        announcement: &Announcement,
        within: Duration,
    ) -> Result<Announced, StoreError> {
        self.changing(announcement, within, |attempt, left| self.forget_id(tag, attempt, left)).await
    }

    pub(crate) async fn enlist(
        &self,
        list: &Key,
        member: ListMember,
        most: usize,
        life: Duration,
        within: Duration,
    ) -> Result<bool, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(&member[..]).arg(most).arg(millis(life));
        };
        match run(&self.commands, &scripts::ENLIST, list.name(), 48, args, within).await? {
            Value::Int(listed) => Ok(listed == 1),
            _ => Err(refused(unexpected())),
        }
    }

    pub(crate) async fn replicated(
        &self,
        key: &Key,
        replicas: u32,
        within: Duration,
    ) -> Result<u32, StoreError> {
        let until = Instant::now() + within;
        let left = || until.saturating_duration_since(Instant::now());
        let permit = timeout(within, self.replicating.acquire()).await;
        let Ok(Ok(_permit)) = permit else { return Err(StoreError::new(StoreErrorKind::TimedOut)) };
        // WAIT needs its own connection: the server answers no other command on a connection that waits, so the guard
        // would take its shared connection for dead. The mark is written on the guard's connection. If this connection
        // finds it, it leads to the server with the change. WAIT waits for the write that removes the mark, and so for
        // all writes before it.
        let mark = format!("sg1:w:{{{}}}:{:016x}", key.name(), fastrand::u64(..));
        let mut leave = Cmd::with_capacity(5, mark.len() + 24);
        leave.arg("SET").arg(&mark).arg("").arg("PX").arg(millis(MARK));
        match self.commands.send(key.name(), &leave, self.command_timeout().min(left())).await? {
            Value::Okay => {}
            _ => return Err(refused(unexpected())),
        }
        let connector = self.commands.connector(key.name());
        let connector = connector.ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable))?;
        let (mut connection, _) =
            bounded(left().min(MARK / 2), connector.commands()).await.map_err(refused)?;
        let mut remove = Cmd::with_capacity(2, mark.len() + 8);
        remove.arg("DEL").arg(&mark);
        let removed = bounded(left().min(MARK / 4), remove.query_async::<u32>(&mut connection)).await;
        if removed.map_err(refused)? == 0 {
            return Err(StoreError::new(StoreErrorKind::Unavailable));
        }
        let (left, mut wait) = (left(), Cmd::with_capacity(3, 32));
        // At least a millisecond: 0 means for ever.
        wait.arg("WAIT").arg(replicas).arg(millis(left));
        // The server answers at the latest after that time, and then the answer is under way for some time.
        let longest = left + self.command_timeout();
        bounded(longest, wait.query_async::<u32>(&mut connection)).await.map_err(refused)
    }
}

impl RedisStore {
    /// Reads entries and tag ids at one moment; in a cluster, each at some moment after the call. In either case a call
    /// after an acknowledged invalidation reads the tag's new id or none, and no older entry matches either. Foreign data
    /// counts as nil.
    async fn mget(&self, entries: &[Key], tags: &[Key], within: Duration) -> Result<Vec<Value>, StoreError> {
        if self.commands.is_spread() {
            // Key by key, not by slot: while a slot migrates, some of its keys may be on either node, and MGET is refused.
            let entries = entries.iter().map(|key| (b'e', key.name()));
            let all = entries.chain(tags.iter().map(|tag| (b't', tag.name())));
            return try_join_all(all.map(|(kind, name)| self.get_one(kind, name, within))).await;
        }
        let names: usize = entries.iter().chain(tags).map(|key| key.name().len() + 8).sum();
        let mut cmd = Cmd::with_capacity(entries.len() + tags.len() + 1, names + 16);
        cmd.arg("MGET");
        for entry in entries {
            push_key(&mut cmd, b'e', entry.name());
        }
        for tag in tags {
            push_key(&mut cmd, b't', tag.name());
        }
        match self.commands.read("", &cmd, within).await? {
            Value::Array(values) if values.len() == entries.len() + tags.len() => Ok(values),
            _ => Err(refused(unexpected())),
        }
    }

    async fn get_one(&self, kind: u8, name: &str, within: Duration) -> Result<Value, StoreError> {
        match self.commands.read(name, &scripts::get(kind, name), within).await? {
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Value::Nil),
            Value::ServerError(error) => Err(refused(error.into())),
            value => Ok(value),
        }
    }

    async fn forget_id(
        &self,
        tag: &Key,
        attempt: CommandAttempt<'_>,
        within: Duration,
    ) -> Result<Announced, StoreError> {
        let (script, size) = match attempt.announces {
            true => (&scripts::FORGET_TAG_AND_ANNOUNCE, Announcing::SIZE),
            false => (&scripts::FORGET_TAG, 0),
        };
        let made = attempt.made(&self.commands, within, |last, left| {
            let call = move |by| {
                let mut cmd = script.call_change(by, (tag.name(), attempt.node), attempt.volume(), size + 48);
                push_attempt(&mut cmd, attempt.announcement.attempt, last);
                if let Some(announcing) = attempt.announcing() {
                    announcing.push(&mut cmd);
                }
                cmd
            };
            self.commands.call(tag.name(), call, left)
        });
        made.await.map(|(_, announced)| announced)
    }

    async fn tag_id(&self, tag: &Key, life: Duration, within: Duration) -> Result<u64, StoreError> {
        let fresh = fastrand::u64(..);
        let args = |cmd: &mut Cmd| {
            cmd.arg(fresh).arg(millis(life));
        };
        let answer = run(&self.commands, &scripts::TAG, tag.name(), 48, args, within).await?;
        id(answer).ok_or_else(|| refused(unexpected()))
    }
}

/// Parses an id as the store holds it; `None` for foreign data.
pub(super) fn id(value: Value) -> Option<u64> {
    match value {
        Value::BulkString(text) => std::str::from_utf8(&text).ok()?.parse().ok(),
        _ => None,
    }
}

impl RedisStore {
    pub(crate) async fn renew_membership(
        &self,
        volume: &Key,
        renewal: Renewal,
        within: Duration,
    ) -> Result<Renewed, StoreError> {
        self.inbox.open();
        renew_member(&self.commands, volume, self.node(), renewal, within).await
    }

    pub(crate) async fn announce(
        &self,
        announcement: &Announcement,
        name: &ChangedName,
        within: Duration,
    ) -> Result<Announced, StoreError> {
        let announcing = Announcing { announcement, announcer: self.node() };
        announce(&self.commands, announcing, name, within).await
    }

    pub(crate) async fn remove_member(
        &self,
        volume: &Key,
        member: Member,
        within: Duration,
    ) -> Result<(), StoreError> {
        let args = |cmd: &mut Cmd| {
            push_id(cmd, member.node);
            cmd.arg(member.stamp);
        };
        match run(&self.commands, &scripts::REMOVE_MEMBER, volume.name(), 64, args, within).await? {
            Value::Int(_) => Ok(()),
            _ => Err(refused(unexpected())),
        }
    }

    pub(crate) fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        // Without a runtime no command can be sent; the announcer waits until this node's right has ended.
        let Ok(runtime) = Handle::try_current() else { return };
        let (commands, node, within) = (self.commands.clone(), self.node(), self.command_timeout());
        runtime.spawn(async move {
            let channel = channel(announcer);
            let mut cmd = Cmd::with_capacity(3, channel.len() + 80);
            cmd.arg("PUBLISH").arg(&channel).arg(acknowledgement(id, node));
            // In a cluster any node forwards the message, so the channel's slot may select the node.
            let _ = commands.send(&channel, &cmd, within).await;
        });
    }

    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        self.inbox.listen(listener);
    }

    pub(crate) async fn until_received(&self, within: Duration) -> Result<(), StoreError> {
        self.inbox.open();
        if within.is_zero() {
            return Ok(());
        }
        let settled = timeout(within, self.inbox.settled()).await;
        settled.map_err(|_| StoreError::new(StoreErrorKind::TimedOut))
    }
}

impl RedisStore {
    /// Handles the answer to a take. If the token had lost its position in the queue, the other waiters of this process
    /// may have lost theirs, too: the process was paused for so long that it was considered dead, or the data was lost.
    fn handle_take_answer(&self, name: &LockName, token: &Token, remarks: TakeRemarks) {
        self.grants.record_answer(token);
        // The waiters of a process without an inbox lose their positions again and again, so the search waits until the
        // inbox is up.
        if remarks.lost_position
            && self.inbox.hears()
            && let Some(absent_waiters) = self.grants.absent_waiters(&name.key)
        {
            let (commands, node) = (self.commands.clone(), self.inbox.node());
            tokio::spawn(find_lost(commands, vec![absent_waiters], node, self.command_timeout()));
        }
    }

    /// Runs a step that frees a lock. While this process receives no messages, the scripts pass over its waiters in the
    /// queue, and its first waiter retries twice a second. So if this process itself frees the lock, it notifies that waiter
    /// at once.
    async fn freeing<T>(
        &self,
        name: &LockName,
        step: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let freed = step.await;
        if !self.inbox.hears() {
            drop(self.grants.notify_missed(&name.key, None));
        }
        freed
    }

    /// LEAVE of one waiter in a command of its own.
    async fn leave_alone(
        &self,
        name: &LockName,
        Leave { token, ttl }: Leave<'_>,
        within: Duration,
    ) -> Result<(), StoreError> {
        match name.is_semaphore() {
            true => self.free_permit(name, token, ttl.unwrap_or_default(), within).await.map(drop),
            false => self.free_mutex(name, token, ttl, within).await.map(drop),
        }
    }
}

impl RedisStore {
    pub(crate) async fn take_mutex(
        &self,
        name: &LockName,
        ask: Take<'_>,
        within: Duration,
    ) -> Result<MutexTaken, StoreError> {
        self.inbox.open();
        let again = self.grants.begin_take(ask.token);
        let (taken, remarks) = lock_steps::take_mutex(&self.commands, name, (ask, again), within).await?;
        self.handle_take_answer(name, ask.token, remarks);
        Ok(taken)
    }

    pub(crate) async fn free_mutex(
        &self,
        name: &LockName,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Result<bool, StoreError> {
        self.freeing(name, lock_steps::free_mutex(&self.commands, name, token, ttl, within)).await
    }

    pub(crate) async fn leave(
        &self,
        name: &LockName,
        leave: Leave<'_>,
        within: Duration,
    ) -> Result<(), StoreError> {
        let ms = if name.is_semaphore() { millis(leave.ttl.unwrap_or_default()) } else { end(leave.ttl) };
        let joined = self.leaving.join(name, queue_entry(leave.token, ms), within).await;
        if matches!(joined, LeaveRole::Removed) {
            return Ok(());
        }
        self.leave_alone(name, leave, within).await?;
        if let LeaveRole::First(mut job) = joined {
            while job.remove_others(&self.commands, name, within).await? {
                // One of the leaving waiters may have been the next for a lock without a holder: leaving again passes the
                // lock on.
                self.leave_alone(name, leave, within).await?;
            }
        }
        Ok(())
    }

    pub(crate) async fn extend_mutex(
        &self,
        name: &LockName,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Result<bool, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str()).arg(end(ttl));
        };
        LockStep::extending(name).run(&self.commands, args, within, yes).await
    }

    pub(crate) async fn look_at_mutex(
        &self,
        name: &LockName,
        within: Duration,
    ) -> Result<Option<MutexHolder>, StoreError> {
        LockStep::alone(&scripts::MUTEX_LOOK, name).run(&self.commands, |_| {}, within, mutex_holder).await
    }

    pub(crate) async fn break_mutex(&self, name: &LockName, within: Duration) -> Result<bool, StoreError> {
        lock_steps::break_mutex(&self.commands, name, within).await
    }

    pub(crate) async fn take_permit(
        &self,
        name: &LockName,
        ask: TakePermit<'_>,
        within: Duration,
    ) -> Result<PermitTaken, StoreError> {
        self.inbox.open();
        let again = self.grants.begin_take(ask.token);
        let (taken, remarks) = lock_steps::take_permit(&self.commands, name, (ask, again), within).await?;
        self.handle_take_answer(name, ask.token, remarks);
        Ok(taken)
    }

    pub(crate) async fn free_permit(
        &self,
        name: &LockName,
        token: &Token,
        lease: Duration,
        within: Duration,
    ) -> Result<PermitFreed, StoreError> {
        self.freeing(name, lock_steps::free_permit(&self.commands, name, token, lease, within)).await
    }

    pub(crate) async fn end_load(
        &self,
        name: &LockName,
        token: &Token,
        load: (Duration, EndedLoad),
        within: Duration,
    ) -> Result<(PermitFreed, Option<LimitState>), StoreError> {
        self.freeing(name, lock_steps::end_load(&self.commands, name, token, load, within)).await
    }

    pub(crate) async fn refresh_permit(
        &self,
        name: &LockName,
        token: &Token,
        lease: Duration,
        within: Duration,
    ) -> Result<bool, StoreError> {
        lock_steps::refresh_permit(&self.commands, name, token, lease, within).await
    }

    pub(crate) async fn look_at_semaphore(
        &self,
        name: &LockName,
        within: Duration,
    ) -> Result<Option<SemaphoreState>, StoreError> {
        let look = LockStep::semaphore(&scripts::SEMAPHORE_LOOK, name);
        look.run(&self.commands, |_| {}, within, semaphore_state).await
    }

    pub(crate) async fn change_semaphore(
        &self,
        name: &LockName,
        change: SemaphoreChange,
        within: Duration,
    ) -> Result<Option<SemaphoreState>, StoreError> {
        lock_steps::change_semaphore(&self.commands, name, change, within).await
    }

    pub(crate) fn await_grant(&self, name: &LockName, token: &Token) -> LockWaiter {
        self.grants.register(name, token)
    }

    pub(crate) fn grants_arrive(&self) -> bool {
        self.inbox.hears() && self.keyspace.hears()
    }

    pub(crate) async fn announce_key_changes(
        &self,
        name: &LockName,
        within: Duration,
    ) -> Result<KeyspaceAnswer, StoreError> {
        self.keyspace.announce(&name.key, within).await
    }
}
