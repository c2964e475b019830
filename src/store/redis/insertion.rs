//! INVALIDATE, and INSERT, which is the one command that stores without a lease: nothing of the caller's own has to be
//! there for it, but it must not run late.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};

use super::call::{refused, run};
use super::client::unexpected;
use super::in_time::{Ran, in_time};
use super::scripts::{self, millis, push_moment};
use super::topology::Commands;
use crate::key::Key;
use crate::store::{Insert, StoreError};

pub(super) async fn invalidate(
    commands: &Commands,
    key: &Key,
    insert: Option<Insert>,
    within: Duration,
) -> Result<(), StoreError> {
    match &insert {
        None => attempt(commands, key, None, None, within).await.map(drop),
        insert => {
            in_time(commands, within, |last, left| attempt(commands, key, insert.as_ref(), last, left)).await
        }
    }
}

async fn attempt(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    last: Option<u64>,
    within: Duration,
) -> Result<Ran<()>, StoreError> {
    let args = |cmd: &mut Cmd| {
        let Some(Insert { entry, keep, over }) = insert else {
            cmd.arg(0);
            return;
        };
        cmd.arg(1).arg(&entry[..]).arg(millis(*keep));
        push_moment(cmd, last);
        if let Some(over) = over {
            cmd.arg(&over[..]);
        }
    };
    let length = |insert: &Insert| insert.entry.len() + insert.over.as_ref().map_or(0, Bytes::len);
    let size = insert.map_or(0, length) + 48;
    match run(commands, &scripts::INVALIDATE, key.name(), size, args, within).await? {
        Value::Array(shown) => match shown[..] {
            [Value::Int(shown)] => Ok(Ran::TooLate(u64::try_from(shown).unwrap_or(0))),
            _ => Err(refused(unexpected())),
        },
        _ => Ok(Ran::InTime(())),
    }
}
