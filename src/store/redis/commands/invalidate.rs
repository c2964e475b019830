//! INVALIDATE, and INSERT, which stores without a lease.

use std::time::Duration;

use bytes::Bytes;
use redis::Cmd;
use tokio::time::Instant;
use uuid::Uuid;

use super::Commands;
use super::announce::Announcing;
use super::call::run_call;
use super::change::Attempt;
use super::lease_end::{REST, wake_rest};
use crate::key::Key;
use crate::store::redis::scripts::{self, millis, push_attempt};
use crate::store::volume::Announced;
use crate::store::{Insert, StoreError, Token};

pub(crate) async fn invalidate(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    attempt: Attempt<'_>,
    within: Duration,
) -> Result<Announced, StoreError> {
    let sent = Instant::now();
    // The token for the fence, of no node.
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
        async move { run_call(commands, key.name(), call, left).await }
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
