//! Tags on a Redis server: `sg1:t:{tag}` holds the tag's id.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use redis::{Cmd, Value};
use tokio::time::{Instant, timeout};

use super::RedisStore;
use super::commands::call::{refused, run};
use super::scripts::{self, millis, push_key};
use crate::key::Key;
use crate::store::redis::errors::reply::{bounded, unexpected};
use crate::store::tag_store::{Found, Member, TagStore};
use crate::store::{Reply, StoreError, StoreErrorKind};

/// How long a mark stays that nobody removes; what comes before its removal takes a part of that each, at most.
const MARK: Duration = Duration::from_secs(4);

impl TagStore for RedisStore {
    fn look_up_tagged<'a>(&'a self, key: &'a Key, tags: &'a [Key], within: Duration) -> Reply<'a, Found> {
        Box::pin(async move {
            let mut values = self.mget(Some(key), tags, within).await?.into_iter();
            let entry = match values.next() {
                Some(Value::BulkString(entry)) => Some(Bytes::from(entry)),
                Some(Value::Nil) => None,
                _ => return Err(refused(unexpected())),
            };
            Ok((entry, values.map(id).collect()))
        })
    }

    fn present_ids<'a>(&'a self, tags: &'a [Key], within: Duration) -> Reply<'a, Vec<Option<u64>>> {
        Box::pin(async move { Ok(self.mget(None, tags, within).await?.into_iter().map(id).collect()) })
    }

    fn tag_ids<'a>(&'a self, tags: &'a [Key], life: Duration, within: Duration) -> Reply<'a, Vec<u64>> {
        // One script each, because tags need not share a slot; all of them are sent at once.
        Box::pin(try_join_all(tags.iter().map(move |tag| self.tag_id(tag, life, within))))
    }

    fn forget_tag<'a>(&'a self, tag: &'a Key, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            let mut cmd = Cmd::with_capacity(2, tag.name().len() + 16);
            cmd.arg("DEL");
            push_key(&mut cmd, b't', tag.name());
            match self.commands.send(tag.name(), &cmd, within).await? {
                Value::Int(_) => Ok(()),
                _ => Err(refused(unexpected())),
            }
        })
    }

    fn enlist<'a>(&'a self, list: &'a Key, member: Member, most: usize, life: Duration) -> Reply<'a, bool> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(&member[..]).arg(most).arg(millis(life));
            };
            match run(&self.commands, &scripts::ENLIST, list.name(), 48, args, self.command_timeout).await? {
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
            // On a connection of its own: the server answers nothing else on one that waits, and the guard's would be
            // taken for dead. That this one leads to the server that has the change, a mark proves which the guard's
            // leaves there; and its removal is the write that WAIT is for, and so for whatever was written before.
            let mark = format!("sg1:w:{{{}}}:{:016x}", key.name(), fastrand::u64(..));
            let mut leave = Cmd::with_capacity(5, mark.len() + 24);
            leave.arg("SET").arg(&mark).arg("").arg("PX").arg(millis(MARK));
            match self.commands.send(key.name(), &leave, self.command_timeout.min(left())).await? {
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
            // At least a millisecond: 0 would be for ever.
            wait.arg("WAIT").arg(replicas).arg(millis(left));
            // The server answers after that time at the latest, and its answer has to come here.
            let longest = left + self.command_timeout;
            bounded(longest, wait.query_async::<u32>(&mut connection)).await.map_err(refused)
        })
    }
}

impl RedisStore {
    /// An entry and ids, all as they are at one moment; of a cluster, each as it is at some moment after the call. Whoever
    /// calls after an invalidation was acknowledged finds the tag's new id or none in either case, and the entry is
    /// no value with it. Foreign data is answered as if there were nothing.
    async fn mget(
        &self,
        entry: Option<&Key>,
        tags: &[Key],
        within: Duration,
    ) -> Result<Vec<Value>, StoreError> {
        if self.commands.is_spread() {
            // Not by slot: of keys whose slot is on its way some may be here and some there, and MGET is refused.
            let entry = entry.into_iter().map(|key| (b'e', key.name()));
            let all = entry.chain(tags.iter().map(|tag| (b't', tag.name())));
            return try_join_all(all.map(|(kind, name)| self.get_one(kind, name, within))).await;
        }
        let names: usize = entry.iter().copied().chain(tags).map(|key| key.name().len() + 8).sum();
        let mut cmd = Cmd::with_capacity(tags.len() + 2, names + 16);
        cmd.arg("MGET");
        if let Some(entry) = entry {
            push_key(&mut cmd, b'e', entry.name());
        }
        for tag in tags {
            push_key(&mut cmd, b't', tag.name());
        }
        match self.commands.send("", &cmd, within).await? {
            Value::Array(values) => Ok(values),
            _ => Err(refused(unexpected())),
        }
    }

    async fn get_one(&self, kind: u8, name: &str, within: Duration) -> Result<Value, StoreError> {
        match self.commands.send(name, &scripts::get(kind, name), within).await? {
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Value::Nil),
            Value::ServerError(error) => Err(refused(error.into())),
            value => Ok(value),
        }
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

/// An id as it stands in the store; foreign data is none.
pub(super) fn id(value: Value) -> Option<u64> {
    match value {
        Value::BulkString(text) => std::str::from_utf8(&text).ok()?.parse().ok(),
        _ => None,
    }
}
