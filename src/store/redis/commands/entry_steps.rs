//! The steps on entries and leases, and those of a volume: ACQUIRE, INVALIDATE, INSERT (which stores without a lease), HAND
//! OVER, ANNOUNCE, RENEW of a node's membership, and WAKE REST, which continues a script that could not notify all waiters
//! of an ended lease in one call.
//!
//! ACQUIRE answers with an entry, an outcome, the lease, or a position in the queue.
//!
//! ACQUIRE, INVALIDATE, INSERT and FORGET TAG must not run late. A server that hangs runs the commands it was sent once it
//! continues, even if their clients have timed out: an insertion would overwrite newer entries, and an acquire would grant
//! the lease to a client that does not want it any more. So these commands carry the latest moment to run, by the clock of
//! the server that runs them. A command that runs after that moment changes nothing and is answered with the server's time,
//! because the clock may only have been set.
//!
//! INVALIDATE, INSERT and FORGET TAG are attempts at a change: unlike the commands of a lease holder, they carry no token
//! that proves that the change is still valid. So they must also not run after a later attempt of their node that voids
//! them.

use std::future::Future;
use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, RedisWrite as _, Value};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Commands, refused, run};
use crate::key::Key;
use crate::store::redis::errors::unexpected;
use crate::store::redis::scripts;
use crate::store::redis::scripts::{get_entry, millis, push_attempt, push_id, push_moment, push_seen};
use crate::store::volume::{
    Announced, Announcement, Audience, ChangedName, LogPosition, LogRecord, Mark, Member, RegistryState,
    Renewal, Renewed,
};
use crate::store::{Acquire, Acquired, HandedOver, Insert, LATEST, StoreError, StoreErrorKind, Token};

pub(crate) async fn acquire(
    commands: &Commands,
    key: &Key,
    ask: Acquire<'_>,
    within: Duration,
) -> Result<Acquired, StoreError> {
    let until = Instant::now() + within;
    let left = || until.saturating_duration_since(Instant::now());
    loop {
        let acquire = with_deadline(commands, left(), |last, left| attempt(commands, key, ask, last, left));
        match acquire.await? {
            AcquireReply::Acquired(acquired) => return Ok(acquired),
            AcquireReply::EntryIsThere => {}
        }
        match commands.read(key.name(), &get_entry(key.name()), left()).await? {
            Value::BulkString(entry) => return Ok(Acquired::Found(Bytes::from(entry))),
            // The entry was removed or replaced by foreign data; neither is an entry, so the lease is requested
            // again.
            Value::Nil => {}
            Value::ServerError(error) if error.code() == "WRONGTYPE" => {}
            Value::ServerError(error) => return Err(refused(error.into())),
            _ => return Err(refused(unexpected())),
        }
    }
}

/// The answer of `acquire.lua`.
pub(crate) enum AcquireReply {
    Acquired(Acquired),
    /// There is an entry that the caller has not seen, and it is so large that a script that returns it would block the
    /// server.
    EntryIsThere,
}

async fn attempt(
    commands: &Commands,
    key: &Key,
    ask: Acquire<'_>,
    last: Option<u64>,
    within: Duration,
) -> Result<Executed<AcquireReply>, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
        push_seen(cmd, ask.seen);
        cmd.arg(ask.behind.map_or("", Token::as_str)).arg(u8::from(ask.queue));
        push_moment(cmd, last);
    };
    // Sent once. If the connection breaks, the command may run late: sent again under the same token, it would bring back
    // a lease that an invalidation has ended meanwhile.
    let answer = run(commands, &scripts::ACQUIRE, key.name(), 288, args, within).await?;
    read_acquire(answer).ok_or_else(|| refused(unexpected()))
}

/// Parses the answer of `acquire.lua`.
pub(crate) fn read_acquire(answer: Value) -> Option<Executed<AcquireReply>> {
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
            return Some(Executed::TooLate(u64::try_from(server_clock).unwrap_or(0)));
        }
        (Value::Int(6), None, None) => return Some(Executed::InTime(AcquireReply::EntryIsThere)),
        _ => return None,
    };
    Some(Executed::InTime(AcquireReply::Acquired(acquired)))
}

pub(crate) async fn invalidate(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    attempt: CommandAttempt<'_>,
    within: Duration,
) -> Result<Announced, StoreError> {
    let sent = Instant::now();
    // The token for the fence. Its node does not exist.
    let ended = &Token::mint(Uuid::nil());
    let over = insert.and_then(|insert| insert.over.as_ref());
    let length = |insert: &Insert| insert.entry.len() + over.map_or(0, Bytes::len);
    let script = if attempt.announces { &scripts::INVALIDATE_AND_ANNOUNCE } else { &scripts::INVALIDATE };
    let size = insert.map_or(0, length) + 144 + if attempt.announces { Announcing::SIZE } else { 0 };
    let made = attempt.made(commands, within, |last, left| {
        let call = move |by| {
            let mut cmd = script.call_change(by, (key.name(), attempt.node), attempt.volume(), size);
            push_attempt(&mut cmd, attempt.announcement.attempt, last);
            cmd.arg(ended.as_str());
            match insert {
                None => drop(cmd.arg(0)),
                Some(Insert { entry, keep, .. }) => {
                    cmd.arg(1).arg(&entry[..]).arg(millis(*keep));
                    cmd.arg(over.map_or(&[][..], |over| &over[..]));
                }
            }
            if let Some(announcing) = attempt.announcing() {
                announcing.push(&mut cmd);
            }
            cmd
        };
        commands.call(key.name(), call, left)
    });
    let (done, announced) = made.await?;
    if done > REST {
        let says = |cmd: &mut Cmd| {
            cmd.arg("x");
        };
        let left = within.saturating_sub(sent.elapsed());
        wake_rest(commands, key.name(), ended, says, left).await;
    }
    Ok(announced)
}

/// A script that ends a lease adds this to its answer if it has notified only some of the waiters, so that [`wake_rest`]
/// must continue.
pub(crate) const REST: i64 = 10;

/// Notifies the remaining waiters of an ended lease, a bounded number per call. `ended` is the token in the fence behind
/// the last of them; `says` adds the message. Gives up after `within` or at an error: a waiter that is not notified
/// retries when the lease would have ended.
pub(crate) async fn wake_rest(
    commands: &Commands,
    name: &str,
    ended: &Token,
    says: impl Fn(&mut Cmd) + Sync,
    within: Duration,
) {
    let until = Instant::now() + within;
    let args = |cmd: &mut Cmd| {
        cmd.arg(ended.as_str());
        says(cmd);
    };
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match run(commands, &scripts::WAKE_REST, name, 160, args, left).await {
            Ok(Value::Int(done)) if done > REST => {}
            _ => return,
        }
    }
}

/// HAND OVER, repeated while the script requests it, because each call passes over a bounded number of waiters. With
/// `lease` `None`, for the grant of a waiter that has left, the lease retains its remaining time.
pub(crate) async fn hand_over(
    commands: &Commands,
    name: &str,
    token: &Token,
    lease: Option<Duration>,
    (hops, is_leaving): (u8, bool),
    within: Duration,
) -> Result<HandedOver, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str());
        match lease {
            Some(lease) => cmd.arg(millis(lease)),
            None => cmd.arg(""),
        };
        cmd.arg(hops).arg(u8::from(is_leaving));
    };
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match run(commands, &scripts::HAND_OVER, name, 96, args, left).await? {
            Value::Int(3) => {}
            Value::Int(2) => return Ok(HandedOver::ToWaiter),
            Value::Int(1) => return Ok(HandedOver::Freed),
            Value::Int(0) => return Ok(HandedOver::NotMine),
            _ => return Err(refused(unexpected())),
        }
    }
}

/// The result of one attempt to run a command that must not run late.
pub(crate) enum Executed<T> {
    InTime(T),
    /// It was not executed; the server's clock showed this time.
    TooLate(u64),
}

/// Runs `attempt` with its latest moment and its time-out, until it was in time.
pub(crate) async fn with_deadline<T, F>(
    commands: &Commands,
    within: Duration,
    attempt: impl Fn(Option<u64>, Duration) -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<Executed<T>, StoreError>>,
{
    let sent = Instant::now();
    // If the guard may not read the clock, the script may not either.
    let mut now = commands.known_clock_at(sent);
    loop {
        let left = within.saturating_sub(sent.elapsed());
        let last = now.map(|now| now.saturating_add(millis(left.saturating_add(LATEST))));
        match attempt(last, left).await? {
            Executed::InTime(done) => return Ok(done),
            Executed::TooLate(_) if sent.elapsed() >= within => {
                return Err(StoreError::new(StoreErrorKind::TimedOut));
            }
            Executed::TooLate(server_clock) => now = Some(server_clock),
        }
    }
}

/// An announcement with its announcer, as the last arguments of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Announcing<'a> {
    pub(crate) announcement: &'a Announcement,
    pub(crate) announcer: Uuid,
}

impl Announcing<'_> {
    /// The approximate size of the arguments.
    pub(crate) const SIZE: usize = 224;

    /// Adds the arguments as `announcing.lua` reads them.
    pub(crate) fn push(&self, cmd: &mut Cmd) {
        let Announcement { volume: _, id, attempt: _, creates, known_registry, term } = self.announcement;
        push_id(cmd, self.announcer);
        push_id(cmd, *id);
        push_fresh(cmd, *known_registry);
        cmd.arg(millis(*term)).arg(u8::from(*creates));
    }
}

/// Adds a random id, for a registry or a log that must be created anew, and the id of the registry that this node has
/// known for a term, or an empty argument.
pub(crate) fn push_fresh(cmd: &mut Cmd, known_registry: Option<Uuid>) {
    push_id(cmd, Uuid::from_u128(fastrand::u128(..)));
    match known_registry {
        Some(registry_id) => push_id(cmd, registry_id),
        None => drop(cmd.arg("")),
    }
}

pub(crate) async fn announce(
    commands: &Commands,
    announcing: Announcing<'_>,
    name: &ChangedName,
    within: Duration,
) -> Result<Announced, StoreError> {
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
        announcing.push(cmd);
    };
    let Announcement { volume, id, .. } = announcing.announcement;
    let size = changed.len() + Announcing::SIZE;
    match run(commands, &scripts::ANNOUNCE, volume.name(), size, args, within).await? {
        Value::Nil => Ok(Announced::NoRegistry),
        Value::BulkString(text) => {
            audience(&text, *id).map(Announced::To).ok_or_else(|| refused(unexpected()))
        }
        _ => Err(refused(unexpected())),
    }
}

/// Parses the answer of a script that announces its change with the id `id`: its own result, and the answer to the
/// announcement.
pub(crate) fn read_announce(answer: Value, id: Uuid) -> Option<(i64, Announced)> {
    match answer {
        Value::Int(done) => Some((done, Announced::NoRegistry)),
        Value::Array(parts) => match &parts[..] {
            [Value::Int(done), Value::BulkString(text)] => Some((*done, Announced::To(audience(text, id)?))),
            _ => None,
        },
        _ => None,
    }
}

/// Parses the text of `announcing.lua`. The announcement has the id `id`.
fn audience(text: &[u8], id: Uuid) -> Option<Audience> {
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
pub(crate) fn registry_state<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<RegistryState> {
    let registry_id = read_id(words.next()?.as_bytes())?;
    let is_mature = words.next()? == "1";
    let term = Duration::from_millis(words.next()?.parse().ok()?);
    Some(RegistryState { registry_id, is_mature, term })
}

/// Parses an id of 32 digits.
pub(crate) fn read_id(text: &[u8]) -> Option<Uuid> {
    Uuid::try_parse_ascii(text).ok().filter(|_| text.len() == 32)
}

/// Parses the last part of the log's entries and of messages: the kind and the name.
pub(crate) fn changed_name(text: &[u8]) -> Option<ChangedName> {
    let (kind, name) = text.split_first()?;
    let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?;
    match kind {
        b'e' => Some(ChangedName::Value(name.into())),
        b't' => Some(ChangedName::Tag(name.into())),
        _ => None,
    }
}

pub(crate) async fn renew_member(
    commands: &Commands,
    volume: &Key,
    node: Uuid,
    renewal: Renewal,
    within: Duration,
) -> Result<Renewed, StoreError> {
    let call = |by| {
        let mut cmd = scripts::RENEW_MEMBER.call(by, volume.name(), 208);
        push_id(&mut cmd, node);
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
    let (answer, session) = commands.call(volume.name(), call, within).await?;
    let mut renewed = read_renew_member(answer, session).ok_or_else(|| refused(unexpected()))?;
    // A failover may have led to a server with fewer writes. It may have the mark's entry, and lack later entries that this
    // node never received. Their announcers waited until this node's right had ended, so the node must drop all its copies
    // before it has a right again. The session is that of the connection that delivered this answer: a comparison before
    // sending would miss a change of connection in between.
    if renewal.mark.is_some_and(|mark| mark.session != session) {
        renewed.announced = None;
    }
    Ok(renewed)
}

/// Parses the answer of `renew_member.lua`.
pub(crate) fn read_renew_member(answer: Value, session: u64) -> Option<Renewed> {
    let Value::Array(parts) = answer else { return None };
    let [Value::BulkString(text), Value::Int(is_there), entries @ ..] = &parts[..] else { return None };
    let mut words = std::str::from_utf8(text).ok()?.split(' ');
    let registry = registry_state(&mut words)?;
    let number = words.next()?.parse().ok()?;
    let at = LogPosition { number, id: read_id(words.next()?.as_bytes())? };
    // An entry that cannot be parsed may have named any key: the node drops all its copies.
    let announced = (*is_there == 1).then(|| entries.iter().map(record).collect()).flatten();
    Some(Renewed { registry, announced, newest: Mark { at, session } })
}

/// Parses an entry of the log.
fn record(entry: &Value) -> Option<LogRecord> {
    let Value::BulkString(entry) = entry else { return None };
    let (_number, rest) = entry.split_at_checked(16)?;
    let (id, rest) = rest.split_at_checked(32)?;
    let (announcer, name) = rest.split_at_checked(32)?;
    Some(LogRecord { id: read_id(id)?, announcer: read_id(announcer)?, name: changed_name(name)? })
}

/// An attempt at a change, with its announcement if the change's script also announces it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandAttempt<'a> {
    pub(crate) announcement: &'a Announcement,
    pub(crate) node: Uuid,
    /// Whether the script announces the change: it can if the volume is on the server of the changed key.
    pub(crate) announces: bool,
}

impl<'a> CommandAttempt<'a> {
    pub(crate) fn announcing(&self) -> Option<Announcing<'a>> {
        self.announces.then_some(Announcing { announcement: self.announcement, announcer: self.node })
    }

    /// The name of the volume whose registry and log the script needs.
    pub(crate) fn volume(&self) -> Option<&'a str> {
        self.announces.then(|| self.announcement.volume.name())
    }

    /// Runs `call`, which takes its latest moment and its time-out, until it was in time. Returns the result of its script
    /// and the answer to the announcement.
    pub(crate) async fn made<F>(
        &self,
        commands: &Commands,
        within: Duration,
        call: impl Fn(Option<u64>, Duration) -> F,
    ) -> Result<(i64, Announced), StoreError>
    where
        F: Future<Output = Result<(Value, u64), StoreError>>,
    {
        let answer = with_deadline(commands, within, |last, left| {
            let call = call(last, left);
            async move {
                let (answer, _) = call.await?;
                if let Value::Array(server_clock) = &answer
                    && let [Value::Int(server_clock)] = server_clock[..]
                {
                    return Ok(Executed::TooLate(u64::try_from(server_clock).unwrap_or(0)));
                }
                Ok(Executed::InTime(answer))
            }
        });
        let (done, announced) =
            read_announce(answer.await?, self.announcement.id).ok_or_else(|| refused(unexpected()))?;
        if done == 0 {
            // A later attempt of this node has voided it.
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        Ok((done, if self.announces { announced } else { Announced::Separately }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use redis::Client;

    use super::*;
    use crate::store::redis::connection::Supervisor;
    use crate::store::redis::connection::connector::Connector;

    const WITHIN: Duration = Duration::from_secs(2);

    /// Runs attempts with these durations; `Some` is the time that the server's clock shows to an attempt that came too
    /// late. Returns the latest moment and time-out of each attempt.
    async fn with_retries(
        attempts: &[(Duration, Option<u64>)],
    ) -> (Result<(), StoreError>, Vec<(Option<u64>, Duration)>) {
        let client = Client::open("redis://127.0.0.1:1/").expect("an address");
        let commands = Supervisor::new(Connector::new(&client, WITHIN)).into();
        let calls = Mutex::new(Vec::new());
        let done = with_deadline(&commands, WITHIN, |last, left| {
            let mut calls = calls.lock().expect("one task");
            let (takes, server_clock) = attempts[calls.len()];
            calls.push((last, left));
            async move {
                tokio::time::sleep(takes).await;
                Ok(server_clock.map_or(Executed::InTime(()), Executed::TooLate))
            }
        });
        let done = done.await;
        (done, calls.into_inner().expect("one task"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_repeated_with_the_remaining_time_by_the_servers_clock() {
        let half = WITHIN / 2;
        let (done, calls) = with_retries(&[(half, Some(5_000)), (half, None)]).await;
        done.expect("in time");
        assert_eq!(calls, [(None, WITHIN), (Some(5_000 + millis(half + LATEST)), half)]);
    }

    /// It would be sent with no time left for the answer, and run: no client would know of the lease.
    #[tokio::test(start_paused = true)]
    async fn a_late_command_is_not_repeated_after_its_deadline() {
        let (done, calls) = with_retries(&[(WITHIN, Some(5_000)), (Duration::ZERO, None)]).await;
        assert_eq!(done.expect_err("too late").kind, StoreErrorKind::TimedOut);
        assert_eq!(calls.len(), 1);
    }
}
