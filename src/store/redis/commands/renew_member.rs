//! RENEW of a node's membership in a volume.

use std::io::Write as _;
use std::time::Duration;

use redis::{RedisWrite as _, Value};
use uuid::Uuid;

use super::Commands;
use super::announce::{changed_name, push_fresh, read_id, registry_state};
use super::call::{refused, run_noting};
use crate::key::Key;
use crate::store::StoreError;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis, push_id};
use crate::store::volume::{LogPosition, LogRecord, Mark, Renewal, Renewed};

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
        push_fresh(&mut cmd, renewal.vouched);
        let mut arg = cmd.writer_for_next_arg();
        if let Some(Mark { at: LogPosition { number, id }, .. }) = renewal.mark {
            // Writes into a Vec, which does not fail.
            let _ = write!(arg, "{number:016}{}", id.simple());
        }
        drop(arg);
        cmd
    };
    let (answer, session) = run_noting(commands, volume.name(), call, within).await?;
    let mut renewed = read(answer, session).ok_or_else(|| refused(unexpected()))?;
    // A server that was replaced by one with fewer writes may have the mark's entry, and lack entries behind it that this node
    // has never been told. Their announcers have waited until this node's right had ended, so the node must drop everything
    // before it has a right again. The session is that of the connection on which this very answer came. A comparison before
    // sending would miss a connection that is replaced in between.
    if renewal.mark.is_some_and(|mark| mark.session != session) {
        renewed.announced = None;
    }
    Ok(renewed)
}

/// Parses the answer of `renew_member.lua`.
pub(crate) fn read(answer: Value, session: u64) -> Option<Renewed> {
    let Value::Array(parts) = answer else { return None };
    let [Value::BulkString(text), Value::Int(is_there), entries @ ..] = &parts[..] else { return None };
    let mut words = std::str::from_utf8(text).ok()?.split(' ');
    let registry = registry_state(&mut words)?;
    let number = words.next()?.parse().ok()?;
    let at = LogPosition { number, id: read_id(words.next()?.as_bytes())? };
    // An entry that can not be read may have named anything: the node drops everything.
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
