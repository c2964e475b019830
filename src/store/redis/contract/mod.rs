//! The commands of [`Store`](crate::store::Store) on a Redis server: those about entries and leases are in [`entries`], those about
//! locks in [`locks`]; connections, tags, lists and volumes are here. Each step of a lock is one script.
//!
//! A tag's id is at `sg1:t:{tag}`, and the journal of a namespace's tags at `sg1:j:{namespace:}` (`journal.lua`).
//!
//! The registry and the log of a volume are at `sg1:n:{namespace:}` and `sg1:a:{namespace:}`, in one slot. RENEW is
//! `renew_member.lua`, ANNOUNCE `announce.lua`, and FORGET and LEAVE are `remove_member.lua`. On one server INVALIDATE and
//! FORGET TAG announce in their own scripts; in a cluster ANNOUNCE follows them. Messages go through the inbox.
//!
//! The keys of locks:
//!
//! | key | holds |
//! |---|---|
//! | `sg1:m:{tag}`, or a key with a prefix of the user's | the mutex: its holder's token |
//! | `sg1:mq:{tag}`, or `sg1:pq:{key}` | its queue: the token and the time to live of each waiter, in the order in which they came |
//! | `sg1:mf:{tag}`, or `sg1:pf:{key}` | the latest fence |
//! | `sg1:mx:{tag}`, or `sg1:px:{key}` | the holder's token and its last extension, if that is longer than the time in the token |
//! | `sg1:mr:{tag}`, or `sg1:pr:{key}`; `sg1:sr:{tag}` | in a cluster: the nodes in the queue that were notified after a holder's death, and whether each has sent a take since (`lock_roll.lua`) |
//! | `sg1:sh:{tag}` | the holders of a semaphore's permits, by the moment their leases end |
//! | `sg1:sq:{tag}` | its queue: the token and the lease of each waiter |
//! | `sg1:sm:{tag}` | layout, capacity at creation, added permits (of a load limit also fewer), idle time in ms |
//! | `sg1:sl:{tag}` | of a load limit: the state of its law, a hash |
//!
//! A mutex under a user's prefix uses other prefixes for its companion keys, because its key may equal
//! another mutex's tag.

use std::io::Write as _;
use std::sync::Weak;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use redis::{Cmd, RedisWrite as _, Value};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use crate::key::Key;
use crate::store::StoreError;
use crate::store::channels::ChannelListener;
use crate::store::protocol::{
    Announced, Announcement, Audience, ChangedName, LogPosition, LogRecord, Mark, Member, RegistryState,
    Renewal, Renewed, VolumeListener,
};
use crate::store::redis::connection::send::SendMode;
use crate::store::redis::inbox::acknowledgement;
use crate::store::redis::scripts::{changed_name, millis, push_id};
use crate::store::redis::subscriber::channel;
use crate::store::redis::{RedisStore, scripts};

pub(crate) use self::entries::Write;
#[cfg(any(test, fuzzing))]
pub(super) use self::entries::{AcquireReply, read_acquire, read_change};
use super::commands::{Commands, int, not_understood, refused};
use super::doctor;
use super::errors::bounded;
use super::scripts::push_key;
use crate::health::{Finding, Health};
use crate::store::protocol::*;
use crate::store::wake_leases::LeaseWatch;

mod entries;
mod locks;

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

    pub(crate) fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        self.watches.register(key.name(), token)
    }

    pub(crate) async fn connect(&self, within: Duration) -> StoreResult<()> {
        self.inbox.open();
        let both = async {
            self.commands.until_up().await?;
            self.inbox.settled().await;
            Ok(())
        };
        self.commands.bounded(within, both, StoreErrorKind::TimedOut).await
    }

    pub(crate) async fn until_received(&self, within: Duration) -> StoreResult<()> {
        self.inbox.open();
        if within.is_zero() {
            return Ok(());
        }
        let settled = timeout(within, self.inbox.settled()).await;
        settled.map_err(|_| StoreError::new(StoreErrorKind::TimedOut))
    }

    pub(crate) async fn probe(&self, key: &Key, within: Duration) -> StoreResult<()> {
        // A command that stays unanswered for longer than two deadlines would cost the connection.
        match within.min(self.command_timeout()) {
            Duration::ZERO => Ok(()),
            within => doctor::probe(&self.commands, key.name(), within).await,
        }
    }

    pub(crate) async fn reach(&self, name: &str, within: Duration) -> StoreResult<()> {
        // Does not wait for the inbox: a caller that only sends commands needs no messages.
        self.commands.bounded(within, self.commands.reach(name), StoreErrorKind::Unavailable).await
    }

    pub(crate) fn health(&self) -> Health {
        let (commands, breaker, reason) = self.commands.link();
        Health {
            topology: self.connections.topology,
            commands,
            open_connections: self.commands.open(),
            inbox: self.inbox.link(),
            breaker,
            reason,
            clock: self.commands.clock(),
            silent_for: self.connections.subscriber.liveness.silent_for(),
            inbox_lag: self.connections.subscriber.liveness.lag(),
            outages: self.connections.connector.outages.begun(),
            credential_failures: self.connections.connector.login.failures(),
            local: None,
        }
    }

    pub(crate) fn went_without(&self) {
        self.connections.connector.outages.load();
    }

    pub(crate) async fn examine(&self, ask: Examine) -> Vec<Finding> {
        doctor::examine(self, ask).await
    }
}

/// The lifetime of the mark of [`RedisStore::replicated`], in case it is never removed. Each step before the removal may take at most
/// a fraction of it.
const MARK: Duration = Duration::from_secs(4);

impl RedisStore {
    pub(crate) async fn look_up_tagged(
        &self,
        keys: &[Key],
        tags: &[Key],
        within: Duration,
    ) -> StoreResult<TaggedLookUp> {
        let mut values = self.mget(keys, tags, within).await?;
        let ids = values.split_off(keys.len()).into_iter().map(tag_state).collect();
        let entries = values.into_iter().map(|value| match value {
            Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
            Value::Nil => Ok(None),
            _ => Err(not_understood()),
        });
        Ok((entries.collect::<Result<_, _>>()?, ids))
    }

    pub(crate) async fn present_tags(
        &self,
        tags: &[Key],
        within: Duration,
    ) -> StoreResult<Vec<Option<TagState>>> {
        Ok(self.mget(&[], tags, within).await?.into_iter().map(tag_state).collect())
    }

    pub(crate) async fn tag_ids(
        &self,
        tags: &[Key],
        life: Duration,
        within: Duration,
    ) -> StoreResult<Vec<u64>> {
        // One script each, because tags need not share a slot; all are sent at once.
        try_join_all(tags.iter().map(move |tag| self.tag_id(tag, life, within))).await
    }

    pub(crate) async fn enter_load(
        &self,
        journal: &Key,
        load: Uuid,
        life: Duration,
        within: Duration,
    ) -> StoreResult<()> {
        let args = |cmd: &mut Cmd| {
            push_id(cmd, load);
            cmd.arg(millis(life));
        };
        self.commands.run(&scripts::ENTER_LOAD, journal.name(), (48, args), within, int).await?;
        Ok(())
    }

    pub(crate) async fn no_tag_since(
        &self,
        journal: &Key,
        load: Uuid,
        tags: &[Key],
        within: Duration,
    ) -> StoreResult<bool> {
        let names: usize = tags.iter().map(|tag| tag.name().len() + 1).sum();
        let mut cmd = Cmd::with_capacity(tags.len() + 3, journal.name().len() + names + 48);
        cmd.arg("ZMSCORE");
        push_key(&mut cmd, b'j', journal.name());
        cmd.arg(format!("l{}", load.simple()));
        for tag in tags {
            cmd.arg(format!("t{}", tag.name()));
        }
        match self.commands.send(journal.name(), &cmd, within, SendMode::Repeat).await? {
            Value::Array(numbers) => {
                // A score is a text in RESP2, and a double in RESP3.
                let mut numbers =
                    numbers.into_iter().map(|number| redis::from_redis_value::<f64>(number).ok());
                let began = numbers.next().flatten();
                Ok(began.is_some_and(|began| numbers.all(|number| number < Some(began))))
            }
            // Foreign data: no load has entered it.
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(false),
            Value::ServerError(error) => Err(refused(error.into())),
            _ => Err(not_understood()),
        }
    }

    pub(crate) async fn enlist(
        &self,
        list: &Key,
        member: ListMember,
        most: usize,
        life: Duration,
        within: Duration,
    ) -> StoreResult<bool> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(&member[..]).arg(most).arg(millis(life));
        };
        let read = |answer| int(answer).map(|listed| listed == 1);
        self.commands.run(&scripts::ENLIST, list.name(), (48, args), within, read).await
    }

    pub(crate) async fn replicated(&self, key: &Key, replicas: u32, within: Duration) -> StoreResult<u32> {
        let until = Instant::now() + within;
        let left = || until.saturating_duration_since(Instant::now());
        let permit = timeout(within, self.replicating.acquire()).await;
        let Ok(Ok(_permit)) = permit else { return Err(StoreError::new(StoreErrorKind::TimedOut)) };
        // WAIT needs a separate connection: the server answers no other command on a connection that waits, so the guard
        // would take its shared connection for dead. The mark is written on the guard's connection. If the separate
        // connection finds the mark, both lead to the same server, which has the change. WAIT waits for the write that
        // removes the mark, and so for all writes before that.
        let mark = format!("sg1:w:{{{}}}:{:016x}", key.name(), fastrand::u64(..));
        let mut leave = Cmd::with_capacity(5, mark.len() + 24);
        leave.arg("SET").arg(&mark).arg("").arg("PX").arg(millis(MARK));
        match self
            .commands
            .send(key.name(), &leave, self.command_timeout().min(left()), SendMode::Once)
            .await?
        {
            Value::Okay => {}
            _ => return Err(not_understood()),
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

    /// Reads entries and tag ids at one moment; in a cluster, each at some moment after the call. In both cases a call
    /// after an acknowledged invalidation reads the tag's new id or none, neither of which matches an older entry. Foreign
    /// data counts as nil.
    async fn mget(&self, entries: &[Key], tags: &[Key], within: Duration) -> StoreResult<Vec<Value>> {
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
        let key = entries.first().or_else(|| tags.first()).map_or("", Key::name);
        match self.commands.send(key, &cmd, within, SendMode::Repeat).await? {
            Value::Array(values) if values.len() == entries.len() + tags.len() => Ok(values),
            _ => Err(not_understood()),
        }
    }

    async fn get_one(&self, kind: u8, name: &str, within: Duration) -> StoreResult<Value> {
        match self.commands.send(name, &scripts::get(kind, name), within, SendMode::Repeat).await? {
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Value::Nil),
            Value::ServerError(error) => Err(refused(error.into())),
            value => Ok(value),
        }
    }

    async fn tag_id(&self, tag: &Key, life: Duration, within: Duration) -> StoreResult<u64> {
        let fresh = fastrand::u64(..);
        let args = |cmd: &mut Cmd| {
            cmd.arg(fresh).arg(millis(life));
        };
        let read = |value| tag_state(value).map(|state| state.id());
        self.commands.run(&scripts::TAG, tag.name(), (48, args), within, read).await
    }
}

fn text_of(value: &Value) -> Option<&str> {
    if let Value::BulkString(text) = value { std::str::from_utf8(text).ok() } else { None }
}

/// Parses a tag as the store holds it, see `forget_tag.lua`; `None` for foreign data.
pub(super) fn tag_state(value: Value) -> Option<TagState> {
    let mut numbers = text_of(&value)?.split(':').map(str::parse::<u64>);
    let made_as = numbers.next()?.ok()?;
    match (numbers.next(), numbers.next(), numbers.next()) {
        (None, ..) => Some(TagState::new(made_as)),
        (Some(Ok(expiries)), Some(Ok(expired_at)), None) => Some(TagState { made_as, expiries, expired_at }),
        _ => None,
    }
}

impl RedisStore {
    pub(crate) async fn renew_membership(
        &self,
        volume: &Key,
        renewal: Renewal,
        within: Duration,
    ) -> StoreResult<Renewed> {
        self.inbox.open();
        let call = |by| {
            let mut cmd = scripts::RENEW_MEMBER.call(by, volume.name(), 208);
            push_id(&mut cmd, self.node());
            cmd.arg(renewal.stamp).arg(millis(renewal.term));
            push_fresh(&mut cmd, renewal.known_registry);
            let mut arg = cmd.writer_for_next_arg();
            if let Some(Mark { at: LogPosition { number, id }, .. }) = renewal.mark {
                // Writes into a Vec, which does not fail.
                let _ = write!(arg, "{number:016}{}", id.simple());
            }
            drop(arg);
            cmd
        };
        let (renewed, session) = self.commands.call(volume.name(), call, within, read_renew_member).await?;
        let (registry, mut announced, at) = renewed;
        // A failover may have led to a server with fewer writes. It may have the mark's entry, and lack later entries that this
        // node never received. Their announcers waited until this node's right had ended, so the node must drop all its copies
        // before it has a right again. The session is that of the connection that delivered this answer: a comparison before
        // sending would miss a change of connection in between.
        if renewal.mark.is_some_and(|mark| mark.session != session) {
            announced = None;
        }
        Ok(Renewed { registry, announced, newest: Mark { at, session } })
    }

    pub(crate) async fn announce(
        &self,
        announcement: &Announcement,
        name: &ChangedName,
        within: Duration,
    ) -> StoreResult<Announced> {
        let (kind, changed) = match name {
            ChangedName::Value(name) => (b'e', name),
            ChangedName::Tag(name) => (b't', name),
        };
        let args = |cmd: &mut Cmd| {
            {
                let mut arg = cmd.writer_for_next_arg();
                // Writes into a Vec, which does not fail.
                let _ = arg.write_all(&[kind]);
                let _ = arg.write_all(changed.as_bytes());
            }
            push_announcing(cmd, announcement, self.node());
        };
        let Announcement { volume, id, .. } = announcement;
        let read = |answer| match answer {
            Value::Nil => Some(Announced::NoRegistry),
            Value::BulkString(text) => read_audience(&text, *id).map(Announced::To),
            _ => None,
        };
        let size = changed.len() + ANNOUNCING_SIZE;
        self.commands.run(&scripts::ANNOUNCE, volume.name(), (size, args), within, read).await
    }

    pub(crate) async fn remove_member(
        &self,
        volume: &Key,
        member: Member,
        within: Duration,
    ) -> StoreResult<()> {
        let args = |cmd: &mut Cmd| {
            push_id(cmd, member.node);
            cmd.arg(member.stamp);
        };
        let read = |answer| int(answer).map(drop);
        self.commands.run(&scripts::REMOVE_MEMBER, volume.name(), (64, args), within, read).await
    }

    pub(crate) fn acknowledge(&self, announcer: Uuid, id: Uuid) {
        // Without a runtime no command can be sent; the announcer waits until this node's right has ended.
        let Ok(runtime) = Handle::try_current() else { return };
        let (commands, node, within) = (self.commands.clone(), self.node(), self.command_timeout());
        runtime.spawn(async move {
            let _ = publish(&commands, announcer, acknowledgement(id, node).as_bytes(), within).await;
        });
    }

    pub(crate) async fn listen_to(
        &self,
        channel: Uuid,
        listener: Weak<dyn ChannelListener>,
        within: Duration,
    ) -> StoreResult<()> {
        let (channels, subscriber) = (&self.connections.channels, &self.connections.subscriber);
        channels.listen_to(channel, listener, subscriber, within).await
    }

    pub(crate) fn channel_connection(&self) -> (Uuid, i64) {
        (self.connections.channels.connection, self.connections.database)
    }

    pub(crate) async fn send_to(&self, to: Uuid, message: &[u8], within: Duration) -> StoreResult<u64> {
        let answer = publish(&self.commands, to, message, within).await?;
        int(answer).and_then(|count| count.try_into().ok()).ok_or_else(not_understood)
    }

    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        self.inbox.listen(listener);
    }
}

/// Publishes a message on a channel. In a cluster any node forwards it, so the channel's slot may select the node.
async fn publish(commands: &Commands, to: Uuid, message: &[u8], within: Duration) -> StoreResult<Value> {
    let channel = channel(to);
    let mut cmd = Cmd::with_capacity(3, channel.len() + message.len() + 16);
    cmd.arg("PUBLISH").arg(&channel).arg(message);
    commands.send(&channel, &cmd, within, SendMode::Once).await
}

/// The approximate size of the arguments of [`push_announcing`].
const ANNOUNCING_SIZE: usize = 224;

/// Adds an announcement as `announcing.lua` reads it: the last arguments of a script.
fn push_announcing(cmd: &mut Cmd, announcement: &Announcement, announcer: Uuid) {
    let Announcement { volume: _, id, attempt: _, creates, known_registry, term } = announcement;
    push_id(cmd, announcer);
    push_id(cmd, *id);
    push_fresh(cmd, *known_registry);
    cmd.arg(millis(*term)).arg(u8::from(*creates));
}

/// Adds a random id, for a registry or a log that must be created anew, and the id of the registry that this node has
/// known for a term, or an empty argument.
fn push_fresh(cmd: &mut Cmd, known_registry: Option<Uuid>) {
    push_id(cmd, Uuid::from_u128(fastrand::u128(..)));
    match known_registry {
        Some(registry_id) => push_id(cmd, registry_id),
        None => drop(cmd.arg("")),
    }
}

/// Parses the text of `announcing.lua`. The announcement has the id `id`.
fn read_audience(text: &[u8], id: Uuid) -> Option<Audience> {
    let mut words = std::str::from_utf8(text).ok()?.split(' ');
    let registry = registry_state(&mut words)?;
    let at = LogPosition { number: words.next()?.parse().ok()?, id };
    let before = read_id(words.next()?.as_bytes())?;
    let mut members = Vec::new();
    while let Some(node) = words.next() {
        members.push(Member { node: read_id(node.as_bytes())?, stamp: words.next()?.parse().ok()? });
    }
    Some(Audience { registry, at, before, members })
}

/// Parses a registry's id, maturity and longest term.
fn registry_state<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<RegistryState> {
    let registry_id = read_id(words.next()?.as_bytes())?;
    let is_mature = words.next()? == "1";
    let term = Duration::from_millis(words.next()?.parse().ok()?);
    Some(RegistryState { registry_id, is_mature, term })
}

/// Parses the answer of `renew_member.lua`: the registry, the announcements after the mark, and the newest entry of the log.
pub(super) fn read_renew_member(
    answer: Value,
) -> Option<(RegistryState, Option<Vec<LogRecord>>, LogPosition)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::BulkString(text), Value::Int(is_there), entries @ ..] = &parts[..] else { return None };
    let mut words = std::str::from_utf8(text).ok()?.split(' ');
    let registry = registry_state(&mut words)?;
    let number = words.next()?.parse().ok()?;
    let at = LogPosition { number, id: read_id(words.next()?.as_bytes())? };
    // An entry that cannot be parsed may have named any key: the node drops all its copies.
    let announced = (*is_there == 1).then(|| entries.iter().map(record).collect()).flatten();
    Some((registry, announced, at))
}

/// Parses an entry of the log.
fn record(entry: &Value) -> Option<LogRecord> {
    let Value::BulkString(entry) = entry else { return None };
    let (_number, rest) = entry.split_at_checked(16)?;
    let (id, rest) = rest.split_at_checked(32)?;
    let (announcer, name) = rest.split_at_checked(32)?;
    Some(LogRecord { id: read_id(id)?, announcer: read_id(announcer)?, name: changed_name(name)? })
}
