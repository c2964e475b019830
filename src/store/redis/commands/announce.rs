//! ANNOUNCE, and what it has in common with the scripts that change something and announce that.

use std::io::Write as _;
use std::time::Duration;

use redis::{Cmd, RedisWrite as _, Value};
use uuid::Uuid;

use super::Commands;
use super::call::{refused, run};
use crate::store::StoreError;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis, push_id};
use crate::store::volume::{
    Announced, Announcement, Audience, ChangedName, LogPosition, Member, RegistryState,
};

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
        let Announcement { volume: _, id, attempt: _, creates, vouched, term } = self.announcement;
        push_id(cmd, self.announcer);
        push_id(cmd, *id);
        push_fresh(cmd, *vouched);
        cmd.arg(millis(*term)).arg(u8::from(*creates));
    }
}

/// Adds a random id, for a registry or a log that has to be made anew, and the birth that this node vouches for.
pub(crate) fn push_fresh(cmd: &mut Cmd, vouched: Option<Uuid>) {
    push_id(cmd, Uuid::from_u128(fastrand::u128(..)));
    match vouched {
        Some(birth) => push_id(cmd, birth),
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
pub(crate) fn read(answer: Value, id: Uuid) -> Option<(i64, Announced)> {
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

/// Parses birth, maturity and longest term.
pub(crate) fn registry_state<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<RegistryState> {
    let birth = read_id(words.next()?.as_bytes())?;
    let is_mature = words.next()? == "1";
    let term = Duration::from_millis(words.next()?.parse().ok()?);
    Some(RegistryState { birth, is_mature, term })
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
