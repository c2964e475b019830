//! The commands of volumes: RENEW of a node's membership, ANNOUNCE, FORGET and LEAVE of a member; and the messages of members.

use std::io::Write as _;
use std::sync::Weak;
use std::time::Duration;

use redis::{Cmd, RedisWrite as _, Value};
use tokio::runtime::Handle;
use uuid::Uuid;

use crate::key::Key;
use crate::store::StoreError;
use crate::store::redis::RedisStore;
use crate::store::redis::connection::send::SendMode;
use crate::store::redis::inbox::acknowledgement;
use crate::store::redis::scripts;
use crate::store::redis::scripts::{changed_name, millis, push_id, read_id};
use crate::store::redis::subscriber::channel;
use crate::store::volume::{
    Announced, Announcement, Audience, ChangedName, LogPosition, LogRecord, Mark, Member, RegistryState,
    Renewal, Renewed, VolumeListener,
};

impl RedisStore {
    pub(crate) async fn renew_membership(
        &self,
        volume: &Key,
        renewal: Renewal,
        within: Duration,
    ) -> Result<Renewed, StoreError> {
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
    ) -> Result<(), StoreError> {
        let args = |cmd: &mut Cmd| {
            push_id(cmd, member.node);
            cmd.arg(member.stamp);
        };
        let read = |answer| matches!(answer, Value::Int(_)).then_some(());
        self.commands.run(&scripts::REMOVE_MEMBER, volume.name(), (64, args), within, read).await
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
            let _ = commands.send(&channel, &cmd, within, SendMode::Once).await;
        });
    }

    pub(crate) fn listen(&self, listener: Weak<dyn VolumeListener>) {
        self.inbox.listen(listener);
    }
}

/// The approximate size of the arguments of [`push_announcing`].
pub(super) const ANNOUNCING_SIZE: usize = 224;

/// Adds an announcement as `announcing.lua` reads it: the last arguments of a script.
pub(super) fn push_announcing(cmd: &mut Cmd, announcement: &Announcement, announcer: Uuid) {
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
pub(super) fn read_audience(text: &[u8], id: Uuid) -> Option<Audience> {
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
pub(crate) fn read_renew_member(
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
