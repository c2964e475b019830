//! What a process asks for its waiters once messages may have been lost: one question for all of a lock, not one for each.
//!
//! Invariant: a waiter that is not the first of its lock in this process has a place in the queue since the subscription was
//! confirmed, or asks. A place that is found then is not passed over any more, because its node is heard of; and a grant
//! before that takes its waiter out of the queue, so it is not found.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::sleep;
use uuid::Uuid;

use super::Commands;
use super::lock_replies::mutex_holder;
use super::lock_step::Step;
use crate::store::redis::scripts;
use crate::store::wake::lock_waiters::{Census, Grants};
use crate::store::{StoreError, Token};

/// So many are told to ask at once, and so long is the pause behind them: ten thousand questions at one moment would hold
/// the server up for all.
const TOLD_AT_ONCE: usize = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// What a server is asked while it may be about to be away.
const TRIES: u32 = 3;
const RETRY: Duration = Duration::from_millis(100);

/// What is asked when there is no subscription any more, or when that is settled again: confirmed, or refused for good.
pub(crate) async fn look_for_losses(
    (commands, node, within): (Commands, Uuid, Duration),
    grants: Arc<Grants>,
    is_settled: bool,
) {
    if is_settled {
        find_lost(commands, grants.censuses(), node, within).await;
    } else {
        find_granted(commands, grants, within).await;
    }
}

/// Has those waiters ask that have no place any more. The subscription was confirmed before, or is refused for good.
pub(crate) async fn find_lost(commands: Commands, censuses: Vec<Census>, node: Uuid, within: Duration) {
    for mut census in censuses {
        for _ in 0..TRIES {
            if census.is_empty() || find(&commands, &mut census, node, within).await.is_ok() {
                break;
            }
            sleep(RETRY).await;
        }
        for some in census.absent().chunks(TOLD_AT_ONCE) {
            for absent in some {
                absent.tell();
            }
            if some.len() == TOLD_AT_ONCE {
                sleep(PAUSE).await;
            }
        }
    }
}

/// Takes those out that have a place.
async fn find(
    commands: &Commands,
    census: &mut Census,
    node: Uuid,
    within: Duration,
) -> Result<(), StoreError> {
    let (node, name) = (node.simple().to_string(), census.name.clone());
    for from in (0..).step_by(1_000) {
        let args = |cmd: &mut Cmd| {
            cmd.arg(&node).arg(from);
        };
        let (more, tokens) =
            Step::queueing(&scripts::WAITING, &name).run(commands, args, within, waiting).await?;
        tokens.iter().for_each(|token| census.found(token));
        if !more {
            break;
        }
    }
    Ok(())
}

/// Whether there is more, and the waiters that were found.
fn waiting(answer: Value) -> Option<(bool, Vec<Token>)> {
    let Value::Array(parts) = answer else { return None };
    let mut parts = parts.into_iter();
    let Some(Value::Int(more)) = parts.next() else { return None };
    let token = |part| if let Value::BulkString(token) = part { Token::parse(&token) } else { None };
    Some((more == 1, parts.filter_map(token).collect()))
}

/// While there is no subscription, only the first of a lock's waiters asks. A mutex may have been granted to another one just
/// before, unheard, and may have no end; so its holder is looked at.
async fn find_granted(commands: Commands, grants: Arc<Grants>, within: Duration) {
    for census in grants.censuses() {
        if census.is_empty() || census.name.is_semaphore() {
            continue;
        }
        let look = Step::alone(&scripts::MUTEX_LOOK, &census.name);
        if let Ok(Some(holder)) = look.run(&commands, |_| {}, within, mutex_holder).await
            && let Some(token) = Token::parse(&holder.token)
        {
            census.tell(&token);
        }
    }
}
