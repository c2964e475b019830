//! Tags on a Redis server: `sg1:t:{tag}` holds the tag's id.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use redis::{Cmd, Value};
use tokio::time::{Instant, timeout};

use super::RedisStore;
use super::commands::announce::Announcing;
use super::commands::call::{refused, run, run_call};
use super::commands::change::Attempt;
use super::errors::reply::{bounded, unexpected};
use super::scripts::{self, millis, push_attempt, push_key};
use crate::key::Key;
use crate::store::tag_store::{ListMember, TagStore, TaggedLookUp};
use crate::store::volume::{Announced, Announcement};
use crate::store::{Reply, StoreError, StoreErrorKind};

/// Lifetime of a mark that is never removed. Each step before the removal may take at most a fraction of it.
const MARK: Duration = Duration::from_secs(4);

impl TagStore for RedisStore {
    fn look_up_tagged<'a>(
        &'a self,
        keys: &'a [Key],
        tags: &'a [Key],
        within: Duration,
    ) -> Reply<'a, TaggedLookUp> {
        Box::pin(async move {
            let mut values = self.mget(keys, tags, within).await?;
            let ids = values.split_off(keys.len()).into_iter().map(id).collect();
            let entries = values.into_iter().map(|value| match value {
                Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
                Value::Nil => Ok(None),
                _ => Err(refused(unexpected())),
            });
            Ok((entries.collect::<Result<_, _>>()?, ids))
        })
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        Box::pin(async move { Ok(self.mget(&[], tags, within).await?.into_iter().map(id).collect()) })
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>> {
        // One script each, because tags need not share a slot; all are sent at once.
        Box::pin(try_join_all(tags.iter().map(move |tag| self.tag_id(tag, life, within))))
    }

    fn forget_tag<'a>(
        &'a self,
        tag: &'a Key,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, Announced> {
        Box::pin(self.changing(announcement, within, |attempt, left| self.forget_id(tag, attempt, left)))
    }

    fn enlist<'a>(
        &'a self,
        list: &'a Key,
        member: ListMember,
        most: usize,
        life: Duration,
    ) -> Reply<'a, bool> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(&member[..]).arg(most).arg(millis(life));
            };
            match run(&self.commands, &scripts::ENLIST, list.name(), 48, args, self.command_timeout()).await?
            {
                Value::Int(listed) => Ok(listed == 1),
                _ => Err(refused(unexpected())),
            }
        })
    }

    fn replicated<'a>(&'a self, key: &'a Key, replicas: u32, within: Duration) -> Reply<'a, u32> {
        Box::pin(async move {
            let until = Instant::now() + within;
            let left = || until.saturating_duration_since(Instant::now());
            let place = timeout(within, self.replicating.acquire()).await;
            let Ok(Ok(_place)) = place else { return Err(StoreError::new(StoreErrorKind::TimedOut)) };
            // WAIT needs a connection for itself: the server answers nothing else on a connection that waits, and the
            // guard's would be taken for dead. The mark is written on the guard's connection; finding it proves that this
            // connection leads to the server with the change. Removing the mark is the write that WAIT waits for, and so
            // for all writes before it.
            let mark = format!("sg1:w:{{{}}}:{:016x}", key.name(), fastrand::u64(..));
            let mut leave = Cmd::with_capacity(5, mark.len() + 24);
            leave.arg("SET").arg(&mark).arg("").arg("PX").arg(millis(MARK));
            match self.commands.send(key.name(), &leave, self.command_timeout().min(left())).await? {
                Value::Okay => {}
                _ => return Err(refused(unexpected())),
            }
            let dial = self.commands.dial(key.name());
            let dial = dial.ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable))?;
            let (mut connection, _) =
                bounded(left().min(MARK / 2), dial.commands()).await.map_err(refused)?;
            let mut remove = Cmd::with_capacity(2, mark.len() + 8);
            remove.arg("DEL").arg(&mark);
            let removed = bounded(left().min(MARK / 4), remove.query_async::<u32>(&mut connection)).await;
            if removed.map_err(refused)? == 0 {
                return Err(StoreError::new(StoreErrorKind::Unavailable));
            }
            let (left, mut wait) = (left(), Cmd::with_capacity(3, 32));
            // At least a millisecond: 0 means for ever.
            wait.arg("WAIT").arg(replicas).arg(millis(left));
            // The server answers at the latest when that time has passed, and the answer needs time to arrive.
            let longest = left + self.command_timeout();
            bounded(longest, wait.query_async::<u32>(&mut connection)).await.map_err(refused)
        })
    }
}

impl RedisStore {
    /// Reads entries and tag ids at one moment; in a cluster, each at some moment after the call. In either case a call
    /// that follows an acknowledged invalidation reads the tag's new id or none, and no entry matches it. Foreign data counts
    /// as nil.
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
        attempt: Attempt<'_>,
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
            run_call(&self.commands, tag.name(), call, left)
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

/// An id as it stands in the store; `None` for foreign data.
pub(super) fn id(value: Value) -> Option<u64> {
    match value {
        Value::BulkString(text) => std::str::from_utf8(&text).ok()?.parse().ok(),
        _ => None,
    }
}
