//! The commands about entries and leases: LOOK UP, ACQUIRE, RENEW, COMMIT, FAIL, HAND OVER, RELEASE; and the changes, INVALIDATE, INSERT and
//! FORGET TAG.
//!
//! ACQUIRE and the changes must not run late: see [`Deadline`]. The changes are numbered attempts: unlike the commands of a lease holder, they
//! carry no token that proves that the change is still valid. So they must also not run after a later attempt of their node that voids
//! them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::Instant;
use uuid::Uuid;

use super::{ANNOUNCING_SIZE, push_announcing, read_audience};
use crate::key::Key;
use crate::store::protocol::*;
use crate::store::protocol::{Announced, Announcement};
use crate::store::redis::RedisStore;
use crate::store::redis::commands::{Deadline, REST};
use crate::store::redis::commands::{int, not_understood, refused};
use crate::store::redis::connection::send::SendMode;
use crate::store::redis::errors::code_of;
use crate::store::redis::scripts;
use crate::store::redis::scripts::{
    CallForm, Script, get_entry, millis, push_attempt, push_number, push_outcome, push_seen,
};

impl RedisStore {
    pub(crate) async fn look_up(&self, key: &Key, within: Duration) -> StoreResult<Option<Bytes>> {
        match self.commands.send(key.name(), &get_entry(key.name()), within, SendMode::Repeat).await? {
            Value::BulkString(entry) => Ok(Some(Bytes::from(entry))),
            Value::Nil => Ok(None),
            // Foreign data under the entry's key: treated as an entry that cannot be decoded. (MGET, which reads an entry
            // with its tags, answers nil for foreign data.)
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(Some(Bytes::new())),
            _ => Err(not_understood()),
        }
    }

    pub(crate) async fn acquire(
        &self,
        key: &Key,
        ask: Acquire<'_>,
        within: Duration,
    ) -> StoreResult<Acquired> {
        self.inbox.open();
        let mut deadline = Deadline::new(&self.commands, within);
        loop {
            let (last, left) = deadline.next_call();
            let args = |cmd: &mut Cmd| {
                cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
                push_seen(cmd, ask.seen);
                cmd.arg(ask.behind.map_or("", Token::as_str)).arg(u8::from(ask.queue));
                push_number(cmd, last);
            };
            // Sent once. If the connection breaks, the command may still run, so it is not repeated: under the same token it could
            // bring back a lease that an invalidation has ended meanwhile.
            let answer = self.commands.run(&scripts::ACQUIRE, key.name(), (288, args), left, read_acquire);
            match answer.await? {
                AcquireReply::Acquired(acquired) => return Ok(acquired),
                AcquireReply::TooLate(server_clock) => {
                    deadline.was_late(server_clock)?;
                    continue;
                }
                AcquireReply::EntryIsThere => {}
            }
            let get = get_entry(key.name());
            match self.commands.send(key.name(), &get, deadline.left(), SendMode::Repeat).await? {
                Value::BulkString(entry) => return Ok(Acquired::Found(Bytes::from(entry))),
                // The entry was removed or replaced by foreign data; neither is an entry, so the lease is requested
                // again.
                Value::Nil => {}
                Value::ServerError(error) if error.code() == "WRONGTYPE" => {}
                Value::ServerError(error) => return Err(refused(error.into())),
                _ => return Err(not_understood()),
            }
            deadline = Deadline::new(&self.commands, deadline.left());
        }
    }

    pub(crate) async fn renew(
        &self,
        key: &Key,
        token: &Token,
        lease: Duration,
        within: Duration,
    ) -> StoreResult<TokenCheck> {
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
    ) -> StoreResult<TokenCheck> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(&entry[..]).arg(millis(keep));
        };
        self.run_as_holder(&scripts::COMMIT, key, token, (entry.len() + 16, args), within).await
    }

    pub(crate) async fn fail(&self, key: &Key, fail: Fail<'_>, within: Duration) -> StoreResult<TokenCheck> {
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
    ) -> StoreResult<HandedOver> {
        let HandOver { lease, hops, is_leaving } = how;
        self.commands.hand_over(key.name(), token, Some(lease), (hops, is_leaving), within).await
    }

    pub(crate) async fn release(
        &self,
        key: &Key,
        token: &Token,
        within: Duration,
    ) -> StoreResult<TokenCheck> {
        self.run_as_holder(&scripts::RELEASE, key, token, (0, |_: &mut Cmd| {}), within).await
    }

    /// Makes a change and announces it in the same script call. If the volume may be on another server than the changed key, makes the
    /// change without the announcement, and answers [`Announced::Separately`].
    pub(crate) async fn change(
        &self,
        key: &Key,
        write: Write,
        announcement: &Announcement,
        within: Duration,
    ) -> StoreResult<Announced> {
        let began = Instant::now();
        let announces = !self.commands.is_spread() && !self.splits_keys.load(Ordering::Relaxed);
        // The token for the fence. Its node does not exist.
        let ended = Token::mint(Uuid::nil());
        let mut change =
            ChangeCall { name: key.name(), node: self.node(), write, announcement, announces, ended };
        let mut deadline = Deadline::new(&self.commands, within);
        let mut is_noted = !matches!(change.write, Write::Tag { .. });
        let (done, announced) = loop {
            if !change.announces && !is_noted {
                // Before the id is removed: a load that reads the next id must find this note.
                self.note_tag(&announcement.volume, key, deadline.left()).await?;
                is_noted = true;
            }
            let (last, left) = deadline.next_call();
            let read = |answer| read_change(answer, announcement.id);
            match self.commands.call(key.name(), |by| change.cmd(by, last), left, read).await {
                Ok((ChangeReply::Done(done, announced), _)) => break (done, announced),
                Ok((ChangeReply::TooLate(server_clock), _)) => deadline.was_late(server_clock)?,
                // The server is a node of a cluster, or a proxy in front of one. It has refused the call before the script
                // began.
                Err(error) if change.announces && code_of(&error) == Some("CROSSSLOT") => {
                    self.splits_keys.store(true, Ordering::Relaxed);
                    change.announces = false;
                    deadline = Deadline::new(&self.commands, within.saturating_sub(began.elapsed()));
                }
                Err(error) => return Err(error),
            }
        };
        if done == 0 {
            // A later attempt of this node has voided this one.
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        if done > REST {
            let left = within.saturating_sub(began.elapsed());
            self.commands.wake_rest(key.name(), &change.ended, "x", left).await;
        }
        Ok(if change.announces { announced } else { Announced::Separately })
    }

    async fn note_tag(&self, journal: &Key, tag: &Key, within: Duration) -> StoreResult<()> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(tag.name());
        };
        self.commands.run(&scripts::NOTE_TAG, journal.name(), (tag.name().len(), args), within, int).await?;
        Ok(())
    }

    /// Runs a script whose answer says whether the token held the lease, and then notifies the waiters that the script had
    /// no time to notify.
    async fn run_as_holder(
        &self,
        script: &Script,
        key: &Key,
        token: &Token,
        (size, args): (usize, impl Fn(&mut Cmd) + Sync),
        within: Duration,
    ) -> StoreResult<TokenCheck> {
        let sent = Instant::now();
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str());
            args(cmd);
        };
        let done = self.commands.run(script, key.name(), (size + 80, args), within, int).await?;
        if done > REST {
            let (message, left) = (format!("w{}", token.as_str()), within.saturating_sub(sent.elapsed()));
            self.commands.wake_rest(key.name(), token, &message, left).await;
        }
        match done % REST {
            1 => Ok(TokenCheck::Held),
            0 => Ok(TokenCheck::Lost),
            2 => Ok(TokenCheck::ForeignData),
            _ => Err(not_understood()),
        }
    }
}

/// What a change writes.
pub(crate) enum Write {
    /// Removes the value of a key, or replaces it.
    Value(Option<Insert>),
    /// Removes the id of a tag, or counts an expiry of the tag at this time, on the store's clock.
    Tag { expired_at: Option<u64> },
}

/// The call of a change's script.
struct ChangeCall<'a> {
    name: &'a str,
    node: Uuid,
    write: Write,
    announcement: &'a Announcement,
    /// Whether the script announces the change: it can if the volume is on the server of the changed key.
    announces: bool,
    /// The token in the fence, which the script puts behind the waiters that it leaves to WAKE REST.
    ended: Token,
}

impl ChangeCall<'_> {
    /// The call, which may not run after `last`.
    fn cmd(&self, by: CallForm, last: Option<u64>) -> Cmd {
        let (script, size) = match (&self.write, self.announces) {
            (Write::Value(_), true) => (&scripts::INVALIDATE_AND_ANNOUNCE, 144 + ANNOUNCING_SIZE),
            (Write::Value(_), false) => (&scripts::INVALIDATE, 144),
            (Write::Tag { .. }, true) => (&scripts::FORGET_TAG_AND_ANNOUNCE, 48 + ANNOUNCING_SIZE),
            (Write::Tag { .. }, false) => (&scripts::FORGET_TAG, 48),
        };
        let insert = if let Write::Value(insert) = &self.write { insert.as_ref() } else { None };
        let over = insert.and_then(|insert| insert.over.as_deref()).unwrap_or_default();
        let size = size + insert.map_or(0, |insert| insert.entry.len() + over.len());
        let kinds: &[u8] = if matches!(self.write, Write::Tag { .. }) { b"jna" } else { b"na" };
        let volume = self.announces.then(|| (self.announcement.volume.name(), kinds));
        let mut cmd = script.call_change(by, (self.name, self.node), volume, size);
        push_attempt(&mut cmd, self.announcement.attempt, last);
        match &self.write {
            Write::Value(insert) => {
                cmd.arg(self.ended.as_str());
                match insert {
                    None => cmd.arg(0),
                    Some(Insert { entry, keep, .. }) => {
                        cmd.arg(1).arg(&entry[..]).arg(millis(*keep)).arg(over)
                    }
                };
            }
            Write::Tag { expired_at } => push_number(&mut cmd, *expired_at),
        }
        if self.announces {
            push_announcing(&mut cmd, self.announcement, self.node);
        }
        cmd
    }
}

/// The answer to a change.
pub(crate) enum ChangeReply {
    /// The result of its script, and the answer to the announcement.
    Done(i64, Announced),
    /// The change was not made, because its latest moment had passed: the server's clock showed this time.
    TooLate(u64),
}

/// Parses the answer to a change with an announcement of this id.
pub(crate) fn read_change(answer: Value, id: Uuid) -> Option<ChangeReply> {
    match answer {
        Value::Int(done) => Some(ChangeReply::Done(done, Announced::NoRegistry)),
        Value::Array(parts) => match &parts[..] {
            [Value::Int(server_clock)] => {
                Some(ChangeReply::TooLate(u64::try_from(*server_clock).unwrap_or(0)))
            }
            [Value::Int(done), Value::BulkString(text)] => {
                Some(ChangeReply::Done(*done, Announced::To(read_audience(text, id)?)))
            }
            _ => None,
        },
        _ => None,
    }
}

/// The answer of `acquire.lua`.
pub(crate) enum AcquireReply {
    Acquired(Acquired),
    /// There is an entry that the caller has not seen, and it is so large that a script that returns it would block the
    /// server.
    EntryIsThere,
    /// The ACQUIRE was not executed, because its latest moment had passed: the server's clock showed this time.
    TooLate(u64),
}

/// Parses the answer of `acquire.lua`.
pub(crate) fn read_acquire(answer: Value) -> Option<AcquireReply> {
    let Value::Array(parts) = answer else { return None };
    let mut parts = parts.into_iter();
    let acquired = match (parts.next()?, parts.next(), parts.next()) {
        (Value::Int(1), Some(Value::BulkString(entry)), None) => Acquired::Found(Bytes::from(entry)),
        (Value::Int(2), Some(Value::BulkString(outcome)), None) => Acquired::Ended(Bytes::from(outcome)),
        (Value::Int(3), None, None) => Acquired::Granted,
        (Value::Int(4), Some(Value::Int(remaining)), Some(Value::BulkString(holder))) => {
            let remaining = Duration::from_millis(u64::try_from(remaining).unwrap_or(0));
            Acquired::Held { remaining, holder: Token::parse(&holder)? }
        }
        (Value::Int(5), Some(Value::Int(server_clock)), None) => {
            return Some(AcquireReply::TooLate(u64::try_from(server_clock).unwrap_or(0)));
        }
        (Value::Int(6), None, None) => return Some(AcquireReply::EntryIsThere),
        _ => return None,
    };
    Some(AcquireReply::Acquired(acquired))
}
