//! Finds the waiters that may have lost a message, with one question per lock instead of one per waiter.
//!
//! Invariant: a waiter that is not the first of its lock in this process either has a place in the queue after the
//! subscription was confirmed, or asks. A place that is found then is not passed over any more, because its node receives
//! messages; and a grant before that has removed the place, so it is not found.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::sleep;
use uuid::Uuid;

use super::Commands;
use super::lock_replies::mutex_holder;
use super::lock_step::LockStep;
use crate::store::redis::scripts;
use crate::store::wake::lock_waiters::{Census, LockWaiters};
use crate::store::{StoreError, Token};

/// How many waiters are told to ask at once, and the pause after them: ten thousand calls at one moment would block the
/// server.
const TOLD_AT_ONCE: usize = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// How often a question is tried, because the server may be failing at that moment.
const TRIES: u32 = 3;
const RETRY: Duration = Duration::from_millis(100);

/// Called when the subscription is lost, and when it is settled again: confirmed, or refused for good.
pub(crate) async fn look_for_losses(
    (commands, node, within): (Commands, Uuid, Duration),
    grants: Arc<LockWaiters>,
    is_settled: bool,
) {
    if is_settled {
        find_lost(commands, grants.censuses(), node, within).await;
    } else {
        find_granted(commands, grants, within).await;
    }
}

/// Tells the waiters without a place to ask. The subscription is confirmed, or refused for good.
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

/// Removes the waiters with a place from the census.
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
            LockStep::queueing(&scripts::WAITING, &name).run(commands, args, within, waiting).await?;
        tokens.iter().for_each(|token| census.found(token));
        if !more {
            break;
        }
    }
    Ok(())
}

/// Whether there are more places, and the waiters that were found.
fn waiting(answer: Value) -> Option<(bool, Vec<Token>)> {
    let Value::Array(parts) = answer else { return None };
    let mut parts = parts.into_iter();
    let Some(Value::Int(more)) = parts.next() else { return None };
    let token = |part| if let Value::BulkString(token) = part { Token::parse(&token) } else { None };
    Some((more == 1, parts.filter_map(token).collect()))
}

/// While there is no subscription, only the first waiter of a lock asks. A mutex may have been granted to another waiter
/// just before, whose message was lost, and may never expire; so this asks for its holder.
async fn find_granted(commands: Commands, grants: Arc<LockWaiters>, within: Duration) {
    for census in grants.censuses() {
        if census.is_empty() || census.name.is_semaphore() {
            continue;
        }
        let look = LockStep::alone(&scripts::MUTEX_LOOK, &census.name);
        if let Ok(Some(holder)) = look.run(&commands, |_| {}, within, mutex_holder).await
            && let Some(token) = Token::parse(&holder.token)
        {
            census.tell(&token);
        }
    }
}
