//! INVALIDATE, and INSERT, which is the one command that stores without a lease.
//!
//! So nothing of the caller's own has to be there for it, and one that is held back on the way would be stored over what
//! others have stored since. An insertion therefore has a last moment, by the clock of the server that runs it. One that
//! comes later changes nothing, and is answered with what that clock shows: it may only have been set.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::Instant;

use super::call::{refused, run};
use super::client::unexpected;
use super::scripts::{self, millis};
use super::topology::Commands;
use crate::key::Key;
use crate::store::{Insert, StoreError, StoreErrorKind};

/// How far the server's clock may be ahead of what is thought of it: it is read once a minute, and of a cluster's masters
/// that of one.
const GRACE: Duration = Duration::from_secs(1);

pub(super) async fn invalidate(
    commands: &Commands,
    key: &Key,
    insert: Option<Insert>,
    within: Duration,
) -> Result<(), StoreError> {
    let sent = Instant::now();
    // Where the clock can not be read here, the server may not read it either.
    let mut now = commands.known_clock_at(sent).filter(|_| insert.is_some());
    loop {
        let left = within.saturating_sub(sent.elapsed());
        let last = now.map(|now| now.saturating_add(millis(left.saturating_add(GRACE))));
        match attempt(commands, key, insert.as_ref(), last, left).await? {
            None => return Ok(()),
            Some(_) if sent.elapsed() >= within => return Err(StoreError::new(StoreErrorKind::TimedOut)),
            shown => now = shown,
        }
    }
}

/// What the server's clock shows, if it was too late.
async fn attempt(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    last: Option<u64>,
    within: Duration,
) -> Result<Option<u64>, StoreError> {
    let args = |cmd: &mut Cmd| {
        let Some(Insert { entry, keep, over }) = insert else {
            cmd.arg(0);
            return;
        };
        cmd.arg(1).arg(&entry[..]).arg(millis(*keep));
        match last {
            Some(last) => cmd.arg(last),
            None => cmd.arg(""),
        };
        if let Some(over) = over {
            cmd.arg(&over[..]);
        }
    };
    let length = |insert: &Insert| insert.entry.len() + insert.over.as_ref().map_or(0, Bytes::len);
    let size = insert.map_or(0, length) + 48;
    match run(commands, &scripts::INVALIDATE, key.name(), size, args, within).await? {
        Value::Array(shown) => match shown[..] {
            [Value::Int(shown)] => Ok(u64::try_from(shown).ok()),
            _ => Err(refused(unexpected())),
        },
        _ => Ok(None),
    }
}
