//! Waiters that leave the queue of a lock, alone or together; and the search for waiters that may have lost a message.
//!
//! To find an entry takes time in proportion to the queue's length, so thousands of waiters with the same deadline would
//! block the server for seconds. The first waiter leaves alone. The waiters that leave before its answer arrives are removed
//! together by one script call, up to two thousand; the next call removes those that came meanwhile. This needs no timer.
//!
//! The search for lost messages costs one query per lock instead of one per waiter. Invariant: a waiter that is not the
//! first of its lock in this process either has an entry in the queue after the subscription was confirmed, or retries its
//! take. The scripts do not pass over an entry that is found then, because its node receives messages; and a grant before
//! that has removed the entry, so it is not found.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::lock_steps::{LockCalls, mutex_holder};
use super::{Commands, int};
use crate::store::redis::scripts;
use crate::store::wake_locks::{AbsentWaiters, LockWaiters};
use crate::store::{LockName, StoreResult, Token};
use crate::sync::lock;

/// How many waiters leave in one call: their queue entries are its arguments.
const AT_ONCE: usize = 2_000;

/// By the key of each lock that a waiter is leaving: the other waiters that leave together with it.
#[derive(Default)]
pub(crate) struct LeaveBatches(Mutex<HashMap<Arc<str>, Vec<LeavingWaiter>>>);

struct LeavingWaiter {
    position: String,
    /// Notifies the waiter that its entry was removed from the queue; if this is dropped, the waiter must leave alone.
    removed: oneshot::Sender<()>,
}

/// The result of leaving together with others.
pub(crate) enum LeaveRole<'a> {
    /// This waiter is the first: it leaves alone, and then removes the others.
    First(LeaveJob<'a>),
    /// The first waiter's calls have removed this waiter's entry from the queue.
    Removed,
    /// Its entry was not removed within the time, or there was none: the waiter may hold the lock, so it must leave alone.
    Alone,
}

/// The first waiter's task: it removes the waiters that leave while it runs. If it is dropped before its end, each leaves alone.
pub(crate) struct LeaveJob<'a> {
    leaving: &'a LeaveBatches,
    key: Arc<str>,
    has_ended: bool,
}

impl LeaveBatches {
    /// Adds this queue entry to the batch of a waiter that is leaving the same lock already, if there is one.
    pub(crate) async fn join(&self, name: &LockName, position: String, within: Duration) -> LeaveRole<'_> {
        let removal = {
            let mut all = lock(&self.0);
            match all.get_mut(&name.key) {
                None => {
                    all.insert(Arc::clone(&name.key), Vec::new());
                    let key = Arc::clone(&name.key);
                    return LeaveRole::First(LeaveJob { leaving: self, key, has_ended: false });
                }
                Some(others) => {
                    let (removed, removal) = oneshot::channel();
                    others.push(LeavingWaiter { position, removed });
                    removal
                }
            }
        };
        if matches!(timeout(within, removal).await, Ok(Ok(()))) {
            LeaveRole::Removed
        } else {
            LeaveRole::Alone
        }
    }
}

impl LeaveJob<'_> {
    /// The waiters that have come since the last call; if there are none, the job has ended.
    fn next(&mut self) -> Vec<LeavingWaiter> {
        let mut all = lock(&self.leaving.0);
        let Some(others) = all.get_mut(&self.key) else { return Vec::new() };
        let rest = others.split_off(others.len().min(AT_ONCE));
        let next = std::mem::replace(others, rest);
        if next.is_empty() {
            all.remove(&self.key);
            self.has_ended = true;
        }
        next
    }

    /// Removes from the queue the waiters that have come since the last call; returns whether there were any.
    pub(crate) async fn remove_others(&mut self, calls: LockCalls<'_>) -> StoreResult<bool> {
        let mut leavers = self.next();
        let any = !leavers.is_empty();
        while !leavers.is_empty() {
            let args = |cmd: &mut Cmd| {
                for leaver in &leavers {
                    cmd.arg(&leaver.position);
                }
            };
            let (handled, mut removed) = calls.run(&scripts::LEAVE, args, read_leave).await?;
            removed.sort_unstable();
            let later = leavers.split_off(handled.clamp(1, leavers.len()));
            for (number, leaver) in leavers.into_iter().enumerate() {
                if removed.binary_search(&(number + 1)).is_ok() {
                    let _ = leaver.removed.send(());
                }
            }
            leavers = later;
        }
        Ok(any)
    }
}

impl Drop for LeaveJob<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let others = lock(&self.leaving.0).remove(&self.key);
            drop(others);
        }
    }
}

/// Parses the answer of LEAVE: how many entries were handled, and the numbers of those that were in the queue.
fn read_leave(answer: Value) -> Option<(usize, Vec<usize>)> {
    let Value::Array(parts) = answer else { return None };
    let mut numbers = parts.into_iter().map(|part| usize::try_from(int(part)?).ok());
    Some((numbers.next()??, numbers.collect::<Option<_>>()?))
}

/// How many waiters are notified at once, so that they retry, and the pause after them: ten thousand calls at one moment
/// would block the server.
const NOTIFIED_AT_ONCE: usize = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// How many times a query is sent at most, because the server may be failing at that moment.
const TRIES: u32 = 3;
const RETRY: Duration = Duration::from_millis(100);

/// Called when the subscription is lost, and when it is settled again: confirmed, or refused.
pub(crate) async fn find_lost_messages(
    (commands, node, within): (Commands, Uuid, Duration),
    grants: Arc<LockWaiters>,
    is_settled: bool,
) {
    if is_settled {
        find_lost(commands, grants.all_absent_waiters(), node, within).await;
    } else {
        find_granted(commands, grants, within).await;
    }
}

/// Notifies the waiters without an entry in the queue, so that they retry. To be called after the subscription was confirmed or
/// refused.
pub(crate) async fn find_lost(
    commands: Commands,
    all_absent_waiters: Vec<AbsentWaiters>,
    node: Uuid,
    within: Duration,
) {
    for mut absent_waiters in all_absent_waiters {
        for _ in 0..TRIES {
            if absent_waiters.is_empty() || find(&commands, &mut absent_waiters, node, within).await.is_ok() {
                break;
            }
            sleep(RETRY).await;
        }
        for some in absent_waiters.absent().chunks(NOTIFIED_AT_ONCE) {
            for absent in some {
                absent.notify();
            }
            if some.len() == NOTIFIED_AT_ONCE {
                sleep(PAUSE).await;
            }
        }
    }
}

/// Queries the lock's queue, and removes the waiters that have an entry there from `absent_waiters`.
async fn find(
    commands: &Commands,
    absent_waiters: &mut AbsentWaiters,
    node: Uuid,
    within: Duration,
) -> StoreResult<()> {
    let (node, name) = (node.simple().to_string(), absent_waiters.name.clone());
    let calls = LockCalls { commands, name: &name, within };
    for from in (0..).step_by(1_000) {
        let args = |cmd: &mut Cmd| {
            cmd.arg(&node).arg(from);
        };
        let (more, tokens) = calls.run(&scripts::WAITING, args, read_waiting).await?;
        tokens.iter().for_each(|token| absent_waiters.found(token));
        if !more {
            break;
        }
    }
    Ok(())
}

/// Parses the answer of WAITING: whether the queue has more entries, and the waiters of this node that were found.
fn read_waiting(answer: Value) -> Option<(bool, Vec<Token>)> {
    let Value::Array(parts) = answer else { return None };
    let mut parts = parts.into_iter();
    let Some(Value::Int(more)) = parts.next() else { return None };
    let token = |part| if let Value::BulkString(token) = part { Token::parse(&token) } else { None };
    Some((more == 1, parts.filter_map(token).collect()))
}

/// While there is no subscription, only the first waiter of a lock retries. A mutex may have been granted to another waiter
/// just before, and the message lost; the mutex may never expire. So this looks up each mutex's holder; if that is one of these
/// waiters, it is notified.
async fn find_granted(commands: Commands, grants: Arc<LockWaiters>, within: Duration) {
    for absent_waiters in grants.all_absent_waiters() {
        if absent_waiters.is_empty() || absent_waiters.name.is_semaphore() {
            continue;
        }
        let calls = LockCalls { commands: &commands, name: &absent_waiters.name, within };
        if let Ok(Some(holder)) = calls.run(&scripts::MUTEX_LOOK, |_| {}, mutex_holder).await
            && let Some(token) = Token::parse(&holder.token)
        {
            absent_waiters.notify(&token);
        }
    }
}
