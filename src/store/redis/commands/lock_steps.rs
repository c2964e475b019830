//! The steps on locks. [`LockCalls`] calls the scripts for one lock; functions such as [`taken`] parse the scripts' answers.
//!
//! A script that grants a lock passes over a bounded number of waiters that receive no messages, because it blocks the
//! server. If there are more, its answer says so, and another call follows. Between two calls a mutex with a queue is free,
//! or a permit is available, as after the death of a holder: the next step by any process continues. So a process that dies
//! there costs the waiters as much as one that dies before it frees the lock.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::sleep;
use uuid::Uuid;

use super::{Commands, int};
use crate::store::load_limit::{EndedLoad, LimitState};
use crate::store::redis::scripts;
use crate::store::redis::scripts::{CallForm, Script, millis};
use crate::store::{
    LockName, MutexHolder, MutexTaken, PermitFreed, PermitTaken, SemaphoreState, StoreErrorKind, StoreResult,
    Taken, Token,
};

/// The nodes that did not receive a message in this step, so that its later calls do not notify them again.
#[derive(Debug, Default)]
pub(crate) struct UnreachableNodes(Vec<u8>);

impl UnreachableNodes {
    /// How many nodes are remembered: more will hardly have died together, and each call sends them all.
    const MOST: usize = 100;
    /// The length of a node's id in digits.
    const LEN: usize = 32;

    pub(crate) fn learn(&mut self, nodes: &[u8]) {
        self.0.extend_from_slice(nodes);
        let excess = self.0.len().saturating_sub(Self::MOST * Self::LEN);
        self.0.drain(..excess);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn push(&self, cmd: &mut Cmd) {
        if !self.is_empty() {
            cmd.arg(&self.0[..]);
        }
    }
}

/// The script calls for one lock, each of which may take `within`.
#[derive(Clone, Copy)]
pub(crate) struct LockCalls<'a> {
    pub(crate) commands: &'a Commands,
    pub(crate) name: &'a LockName,
    pub(crate) within: Duration,
}

impl LockCalls<'_> {
    pub(crate) async fn free_mutex(self, token: &Token, ttl: Option<Duration>) -> StoreResult<bool> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str()).arg(end(ttl));
        };
        Ok(self.run_and_hand_over(&scripts::MUTEX_FREE, args, yes).await?.0)
    }

    /// FREE of a permit; for a permit of a load limit, with the `load` that held it.
    pub(crate) async fn free_permit(
        self,
        token: &Token,
        lease: Duration,
        load: Option<EndedLoad>,
    ) -> StoreResult<(PermitFreed, Option<LimitState>)> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.as_str()).arg(queue_entry(token, millis(lease)));
            if let Some(EndedLoad { end, bounds }) = load {
                cmd.arg(end.text()).arg(bounds.least).arg(bounds.most);
            }
        };
        let script = if load.is_some() { &scripts::LOAD_END } else { &scripts::SEMAPHORE_FREE };
        let ((freed, limit), available) = self.run_and_hand_over(script, args, load_ended).await?;
        Ok((PermitFreed { available: available.unwrap_or(freed.available), ..freed }, limit))
    }

    /// FREE of a lock of either kind.
    pub(crate) async fn free(self, token: &Token, ttl: Option<Duration>) -> StoreResult<()> {
        match self.name.is_semaphore() {
            true => self.free_permit(token, ttl.unwrap_or_default(), None).await.map(drop),
            false => self.free_mutex(token, ttl).await.map(drop),
        }
    }

    /// Continues to hand the lock to its queue, until a call leaves nothing to do. `more` has the unreachable nodes that the step's own
    /// call has discovered; `None` if nothing is left. Returns how many permits are available after the last call, if there was one.
    pub(crate) async fn hand_over(self, mut more: Option<Vec<u8>>) -> StoreResult<Option<u32>> {
        // FREE of a token that holds nothing only hands the lock on.
        let none = Token::mint(Uuid::new_v4());
        let (mut unreachable, mut last) = (UnreachableNodes::default(), None);
        let is_semaphore = self.name.is_semaphore();
        let script = if is_semaphore { &scripts::SEMAPHORE_FREE } else { &scripts::MUTEX_FREE };
        let read = |answer| match is_semaphore {
            true => permit_freed(answer).map(|freed| freed.available),
            false => yes(answer).map(|_| 0),
        };
        while let Some(nodes) = more {
            unreachable.learn(&nodes);
            let args = |cmd: &mut Cmd| {
                cmd.arg(none.as_str()).arg("");
                unreachable.push(cmd);
            };
            let available;
            (available, more) = self.run_part(script, args, read).await?;
            last = Some(available);
        }
        Ok(last)
    }

    pub(crate) async fn run<T>(
        self,
        script: &Script,
        args: impl Fn(&mut Cmd) + Sync,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> StoreResult<T> {
        let call = |by: CallForm| {
            let mut cmd = script.call_on(by, self.name, 256);
            args(&mut cmd);
            cmd
        };
        self.commands.call(&self.name.key, call, self.within, read).await.map(|(answer, _)| answer)
    }

    /// Runs one call of a step that may need several. Also returns, if another call must follow, the unreachable nodes that this one has
    /// discovered.
    pub(crate) async fn run_part<T>(
        self,
        script: &Script,
        args: impl Fn(&mut Cmd) + Sync,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> StoreResult<(T, Option<Vec<u8>>)> {
        let split = |answer| {
            let (answer, nodes) = to_go_on(answer);
            Some((read(answer)?, nodes))
        };
        self.run(script, args, split).await
    }

    /// Runs a step that may leave the lock to be handed on, and then calls [`hand_over`](Self::hand_over). Also returns its result.
    pub(crate) async fn run_and_hand_over<T>(
        self,
        script: &Script,
        args: impl Fn(&mut Cmd) + Sync,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> StoreResult<(T, Option<u32>)> {
        let (answer, more) = self.run_part(script, args, read).await?;
        Ok((answer, self.hand_over(more).await?))
    }
}

/// Frees a lock that was granted to a waiter that has left. Without this no waiter could use the lock until it expires, and some
/// mutexes never expire; so this retries several times.
pub(crate) async fn give_back(commands: Commands, name: LockName, token: Token, within: Duration) {
    const PAUSES: [u64; 6] = [50, 200, 1_000, 3_000, 10_000, 0];
    let calls = LockCalls { commands: &commands, name: &name, within };
    for pause in PAUSES {
        // A grant removes the waiter from the queue, so the time to live, which is part of its queue entry, is not needed.
        match calls.free(&token, None).await.map_err(|error| error.kind) {
            Ok(()) | Err(StoreErrorKind::Closed | StoreErrorKind::Refused) => return,
            Err(_) => sleep(Duration::from_millis(pause)).await,
        }
    }
}

/// A mutex's time to live in milliseconds, 0 for none.
pub(crate) fn end(ttl: Option<Duration>) -> u64 {
    ttl.map_or(0, millis)
}

/// A waiter's entry in a queue.
pub(crate) fn queue_entry(token: &Token, ms: u64) -> String {
    format!("{}{ms}", token.as_str())
}

pub(crate) fn yes(answer: Value) -> Option<bool> {
    match answer {
        Value::Int(1) => Some(true),
        Value::Int(0) => Some(false),
        _ => None,
    }
}

/// Converts the milliseconds of a script's answer; `None` for a negative number, which stands for no end.
fn duration(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// What the answer to a TAKE reports beside its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TakeRemarks {
    /// Whether the remaining time is longer than the holder's token says.
    pub(crate) is_doubtful: bool,
    /// Whether the token was in the queue before and is not there any more.
    pub(crate) lost_position: bool,
}

pub(crate) fn taken(answer: Value) -> Option<(MutexTaken, TakeRemarks)> {
    let (number, was_held, remarks) = match answer {
        Value::Int(number) => (number, false, 0),
        Value::Array(parts) => match parts[..] {
            [Value::Int(number), Value::Int(was_held)] => (number, was_held == 1, 0),
            [Value::Int(number), Value::Int(was_held), Value::Int(remarks @ 1..=3)] => {
                (number, was_held == 1, remarks)
            }
            _ => return None,
        },
        _ => return None,
    };
    let taken = match number {
        1.. => Taken::Granted { fence: number.unsigned_abs() },
        0 => return None,
        _ => Taken::Busy { remaining: duration(-2 - number) },
    };
    let remarks = TakeRemarks { is_doubtful: remarks & 1 != 0, lost_position: remarks & 2 != 0 };
    Some((MutexTaken { taken, was_held }, remarks))
}

/// Parses the answer of REPAIR: the holder's remaining time, `Some(None)` if it has no end.
pub(crate) fn remaining(answer: Value) -> Option<Option<Duration>> {
    match answer {
        // There is no holder any more.
        Value::Int(-2) => Some(Some(Duration::ZERO)),
        Value::Int(ms) => Some(duration(ms)),
        _ => None,
    }
}

pub(crate) fn mutex_holder(answer: Value) -> Option<Option<MutexHolder>> {
    let parts = match answer {
        Value::Nil => return Some(None),
        Value::Array(parts) => parts,
        _ => return None,
    };
    match <[Value; 2]>::try_from(parts) {
        Ok([Value::BulkString(token), Value::Int(remaining)]) => {
            Some(Some(MutexHolder { token: Bytes::from(token), remaining: duration(remaining) }))
        }
        _ => None,
    }
}

pub(crate) fn permit_taken(answer: Value) -> Option<(PermitTaken, TakeRemarks)> {
    let [granted, available, created_with, next_expiry] = ints(answer)?;
    let taken = PermitTaken {
        granted: granted == 1,
        available: u32::try_from(available).ok()?,
        created_with: u32::try_from(created_with).ok()?,
        next_expiry: duration(next_expiry),
    };
    Some((taken, TakeRemarks { lost_position: granted == 2, ..TakeRemarks::default() }))
}

pub(crate) fn permit_freed(answer: Value) -> Option<PermitFreed> {
    let [was_held, available] = ints(answer)?;
    Some(PermitFreed { was_held: was_held == 1, available: u32::try_from(available).ok()? })
}

fn load_ended(answer: Value) -> Option<(PermitFreed, Option<LimitState>)> {
    let Value::Array(mut parts) = answer else { return None };
    let counted = parts.split_off(parts.len().min(2));
    let freed = permit_freed(Value::Array(parts))?;
    if counted.is_empty() {
        return Some((freed, None));
    }
    let [limit, processes, throughput, rises] = ints(Value::Array(counted))?;
    let limit = LimitState {
        limit: u32::try_from(limit).ok()?,
        processes: u32::try_from(processes).ok()?,
        throughput: u64::try_from(throughput).ok()?,
        rises: rises == 1,
    };
    Some((freed, Some(limit)))
}

pub(crate) fn semaphore_state(answer: Value) -> Option<Option<SemaphoreState>> {
    let mut parts = match answer {
        Value::Nil => return Some(None),
        Value::Array(parts) => parts.into_iter(),
        _ => return None,
    };
    let [created_with, capacity, waiting, created, recovered] =
        ints(Value::Array(parts.by_ref().take(5).collect()))?;
    let held = u32::try_from(parts.len() / 2).unwrap_or(u32::MAX);
    let mut holders = Vec::with_capacity(parts.len() / 2);
    while let Some(token) = parts.next() {
        let (Value::BulkString(token), Some(Value::Int(left))) = (token, parts.next()) else { return None };
        // A member that a foreign client has added counts as a permit, but has no token to be listed by.
        holders.extend(Token::parse(&token).zip(duration(left)));
    }
    let capacity = u32::try_from(capacity).ok()?;
    Some(Some(SemaphoreState {
        created_with: u32::try_from(created_with).ok()?,
        capacity,
        available: capacity.saturating_sub(held),
        waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
        holders,
        created: created == 1,
        recovered: u32::try_from(recovered).unwrap_or(u32::MAX),
    }))
}

/// Parses exactly `N` integers.
pub(crate) fn ints<const N: usize>(answer: Value) -> Option<[i64; N]> {
    let Value::Array(parts) = answer else { return None };
    parts.into_iter().map(int).collect::<Option<Vec<_>>>()?.try_into().ok()
}

/// Splits an answer that requires another call into the answer proper and its last part, the unreachable nodes; `None` if no other
/// call is required.
pub(crate) fn to_go_on(answer: Value) -> (Value, Option<Vec<u8>>) {
    let Value::Array(mut parts) = answer else { return (answer, None) };
    match parts.pop() {
        Some(Value::BulkString(nodes)) => match <[Value; 1]>::try_from(parts) {
            Ok([only]) => (only, Some(nodes)),
            Err(parts) => (Value::Array(parts), Some(nodes)),
        },
        last => {
            parts.extend(last);
            (Value::Array(parts), None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_no_script_returns_is_not_a_busy_mutex() {
        for answer in [Value::Int(0), Value::Array(vec![Value::Int(0), Value::Int(1)]), Value::Nil] {
            assert!(taken(answer).is_none());
        }
    }
}
