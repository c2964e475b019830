//! INVALIDATE, and INSERT. INSERT stores without a lease, so nothing proves that it is still wanted: it must not run
//! late.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::Instant;
use uuid::Uuid;

use super::Commands;
use super::announce::{self, Announcing};
use super::call::{refused, run_call};
use super::deadline::{Executed, with_deadline};
use super::lease_end::{REST, wake_rest};
use crate::key::Key;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis, push_moment};
use crate::store::volume::Announced;
use crate::store::{Insert, StoreError, Token};

/// With `announcing`, the same script announces the change: its volume must be at the server of `key`.
pub(crate) async fn invalidate(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    announcing: Option<Announcing<'_>>,
    within: Duration,
) -> Result<Announced, StoreError> {
    let attempt = |last, left| attempt(commands, key, insert, announcing, last, left);
    if insert.is_some() {
        return with_deadline(commands, within, attempt).await;
    }
    match attempt(None, within).await? {
        Executed::InTime(announced) => Ok(announced),
        Executed::TooLate(_) => Err(refused(unexpected())),
    }
}

async fn attempt(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    announcing: Option<Announcing<'_>>,
    last: Option<u64>,
    within: Duration,
) -> Result<Executed<Announced>, StoreError> {
    let sent = Instant::now();
    // The token for the fence, of no node.
    let ended = Token::mint(Uuid::nil());
    let over = insert.and_then(|insert| insert.over.as_ref());
    let length = |insert: &Insert| insert.entry.len() + over.map_or(0, Bytes::len);
    let size = insert.map_or(0, length) + 112 + announcing.map_or(0, |_| Announcing::SIZE);
    let call = |by| {
        let mut cmd = match announcing {
            None => scripts::INVALIDATE.call(by, key.name(), size),
            Some(announcing) => {
                let volume = announcing.announcement.volume.name();
                scripts::INVALIDATE_AND_ANNOUNCE.call_in(by, key.name(), Some(volume), size)
            }
        };
        cmd.arg(ended.as_str());
        match insert {
            None => drop(cmd.arg(0)),
            Some(Insert { entry, keep, .. }) => {
                cmd.arg(1).arg(&entry[..]).arg(millis(*keep));
                push_moment(&mut cmd, last);
                cmd.arg(over.map_or(&[][..], |over| &over[..]));
            }
        }
        if let Some(announcing) = announcing {
            announcing.push(&mut cmd);
        }
        cmd
    };
    let answer = run_call(commands, key.name(), call, within).await?;
    if let Value::Array(shown) = &answer
        && let [Value::Int(shown)] = shown[..]
    {
        return Ok(Executed::TooLate(u64::try_from(shown).unwrap_or(0)));
    }
    let id = announcing.map_or(Uuid::nil(), |announcing| announcing.announcement.id);
    let (done, announced) = announce::read(answer, id).ok_or_else(|| refused(unexpected()))?;
    if done > REST {
        let says = |cmd: &mut Cmd| {
            cmd.arg("x");
        };
        let left = within.saturating_sub(sent.elapsed());
        wake_rest(commands, key.name(), &ended, says, left).await;
    }
    Ok(Executed::InTime(if announcing.is_some() { announced } else { Announced::Separately }))
}
