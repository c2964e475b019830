//! INVALIDATE, and INSERT. INSERT stores without a lease, so nothing proves that it is still wanted: it must not run
//! late.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::Instant;
use uuid::Uuid;

use super::Commands;
use super::call::{refused, run};
use super::deadline::{Executed, with_deadline};
use super::lease_end::{REST, wake_rest};
use crate::key::Key;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis, push_moment};
use crate::store::{Insert, StoreError, Token};

pub(crate) async fn invalidate(
    commands: &Commands,
    key: &Key,
    insert: Option<Insert>,
    within: Duration,
) -> Result<(), StoreError> {
    match &insert {
        None => attempt(commands, key, None, None, within).await.map(drop),
        insert => {
            with_deadline(commands, within, |last, left| attempt(commands, key, insert.as_ref(), last, left))
                .await
        }
    }
}

async fn attempt(
    commands: &Commands,
    key: &Key,
    insert: Option<&Insert>,
    last: Option<u64>,
    within: Duration,
) -> Result<Executed<()>, StoreError> {
    let sent = Instant::now();
    // The token for the fence, of no node.
    let ended = Token::mint(Uuid::nil());
    let args = |cmd: &mut Cmd| {
        cmd.arg(ended.as_str());
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
    let size = insert.map_or(0, length) + 112;
    match run(commands, &scripts::INVALIDATE, key.name(), size, args, within).await? {
        Value::Array(shown) => match shown[..] {
            [Value::Int(shown)] => Ok(Executed::TooLate(u64::try_from(shown).unwrap_or(0))),
            _ => Err(refused(unexpected())),
        },
        Value::Int(done) => {
            if done > REST {
                let says = |cmd: &mut Cmd| {
                    cmd.arg("x");
                };
                let left = within.saturating_sub(sent.elapsed());
                wake_rest(commands, key.name(), &ended, says, left).await;
            }
            Ok(Executed::InTime(()))
        }
        _ => Err(refused(unexpected())),
    }
}
