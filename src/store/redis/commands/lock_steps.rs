//! The steps on locks. A [`LockStep`] is one script call for one lock, with the keys that it needs; functions such as
//! [`taken`] parse the answers.
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

use super::Commands;
use crate::store::load_limit::{EndedLoad, LimitState};
use crate::store::redis::scripts;
use crate::store::redis::scripts::{CallForm, Script, millis};
use crate::store::{
    LockName, MutexHolder, MutexTaken, PermitFreed, PermitTaken, SemaphoreState, StoreErrorKind, StoreResult,
    Taken, Token,
};

/// The nodes that did not receive a message, so that later calls do not notify them again.
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

pub(crate) async fn free_mutex(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    ttl: Option<Duration>,
    within: Duration,
) -> StoreResult<bool> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(end(ttl));
    };
    let (was_held, more) = LockStep::freeing(name).run_part(commands, args, within, yes).await?;
    finish_freeing(commands, name, more, within, yes).await?;
    Ok(was_held)
}

pub(crate) async fn free_permit(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    lease: Duration,
    within: Duration,
) -> StoreResult<PermitFreed> {
    end_load(commands, name, token, (lease, None), within).await.map(|(freed, _)| freed)
}

/// FREE of a permit, and of a load limit with the load that held it.
pub(crate) async fn end_load(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    (lease, load): (Duration, Option<EndedLoad>),
    within: Duration,
) -> StoreResult<(PermitFreed, Option<LimitState>)> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(queue_entry(token, millis(lease)));
        if let Some(EndedLoad { end, bounds }) = load {
            cmd.arg(end.text()).arg(bounds.least).arg(bounds.most);
        }
    };
    let step = if load.is_some() { LockStep::ending_load(name) } else { LockStep::freeing(name) };
    let ((freed, limit), more) = step.run_part(commands, args, within, load_ended).await?;
    let last = finish_freeing(commands, name, more, within, permit_freed).await?;
    Ok((PermitFreed { available: last.unwrap_or(freed).available, ..freed }, limit))
}

/// FREE of a lock of either kind.
pub(crate) async fn free(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    ttl: Option<Duration>,
    within: Duration,
) -> StoreResult<()> {
    match name.is_semaphore() {
        true => free_permit(commands, name, token, ttl.unwrap_or_default(), within).await.map(drop),
        false => free_mutex(commands, name, token, ttl, within).await.map(drop),
    }
}

/// Hands a lock to the rest of its queue, if there is `more`. Returns the last answer of FREE, if it was called.
pub(crate) async fn finish_freeing<T>(
    commands: &Commands,
    name: &LockName,
    mut more: Option<Vec<u8>>,
    within: Duration,
    read: impl Fn(Value) -> Option<T>,
) -> StoreResult<Option<T>> {
    // A token that holds nothing.
    let (mut unreachable, none, mut last) = (UnreachableNodes::default(), Token::mint(Uuid::new_v4()), None);
    while let Some(nodes) = more {
        unreachable.learn(&nodes);
        let args = |cmd: &mut Cmd| {
            cmd.arg(none.as_str()).arg("");
            unreachable.push(cmd);
        };
        let freed;
        (freed, more) = LockStep::freeing(name).run_part(commands, args, within, &read).await?;
        last = Some(freed);
    }
    Ok(last)
}

/// Frees a lock that was granted to a waiter that has left. Otherwise the lock is lost until it expires, and some mutexes
/// never expire; so this retries several times.
pub(crate) async fn give_back(commands: Commands, name: LockName, token: Token, within: Duration) {
    const PAUSES: [u64; 6] = [50, 200, 1_000, 3_000, 10_000, 0];
    for pause in PAUSES {
        // A grant removes the waiter from the queue, so the time to live, which is part of its queue entry, is not needed.
        match free(&commands, &name, &token, None, within).await.map_err(|error| error.kind) {
            Ok(()) | Err(StoreErrorKind::Closed | StoreErrorKind::Refused) => return,
            Err(_) => sleep(Duration::from_millis(pause)).await,
        }
    }
}

/// One script call for one lock.
pub(crate) struct LockStep<'a> {
    pub(crate) script: &'a Script,
    pub(crate) name: &'a LockName,
    /// The prefixes of the keys that follow the lock's own key.
    parts: &'a [&'a str],
    /// In a cluster, the prefix of one more key, after those of `parts`: the roll of the waiters' nodes (`lock_roll.lua`).
    spread_part: Option<&'a str>,
}

impl<'a> LockStep<'a> {
    /// A take of a mutex; in a cluster with the roll of its waiters' nodes.
    pub(crate) fn taking(name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let spread_part = Some(if prefixed { "sg1:pr" } else { "sg1:mr" });
        Self { spread_part, ..Self::giving(&scripts::MUTEX_TAKE, name) }
    }

    /// A take of a permit; in a cluster with the roll of its waiters' nodes.
    pub(crate) fn taking_permit(name: &'a LockName) -> Self {
        Self { spread_part: Some("sg1:sr"), ..Self::semaphore(&scripts::SEMAPHORE_TAKE, name) }
    }

    /// A step that hands the mutex to a waiter, with all its keys.
    pub(crate) fn giving(script: &'a Script, name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:pf"] } else { &["sg1:mq", "sg1:mf"] };
        Self { script, name, parts, spread_part: None }
    }

    /// A step that restarts the holder's time: it may have to notify the waiters, and it records a time that is longer
    /// than the token says.
    pub(crate) fn extending(name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:px"] } else { &["sg1:mq", "sg1:mx"] };
        Self { script: &scripts::MUTEX_EXTEND, name, parts, spread_part: None }
    }

    pub(crate) fn repairing(name: &'a LockName) -> Self {
        let Self { parts, .. } = Self::extending(name);
        Self { script: &scripts::MUTEX_REPAIR, name, parts: &parts[1..], spread_part: None }
    }

    /// A step on the queue of any kind of lock.
    pub(crate) fn queueing(script: &'a Script, name: &'a LockName) -> Self {
        let Self { parts, .. } =
            if name.is_semaphore() { Self::semaphore(script, name) } else { Self::giving(script, name) };
        Self { script, name, parts: &parts[..1], spread_part: None }
    }

    /// FREE of a mutex or a permit.
    fn freeing(name: &'a LockName) -> Self {
        match name.is_semaphore() {
            true => Self::semaphore(&scripts::SEMAPHORE_FREE, name),
            false => Self::giving(&scripts::MUTEX_FREE, name),
        }
    }

    /// FREE of a permit of a load limit, with the key of the law's state.
    fn ending_load(name: &'a LockName) -> Self {
        Self { script: &scripts::LOAD_END, name, parts: &["sg1:sq", "sg1:sm", "sg1:sl"], spread_part: None }
    }

    /// A step with the mutex's own key alone.
    pub(crate) fn alone(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &[], spread_part: None }
    }

    pub(crate) fn semaphore(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &["sg1:sq", "sg1:sm"], spread_part: None }
    }

    pub(crate) async fn run<T>(
        self,
        commands: &Commands,
        args: impl Fn(&mut Cmd) + Sync,
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> StoreResult<T> {
        let call = |by: CallForm| {
            let mut cmd = self.script.call_on(by, self.name, self.parts, self.spread_part, 256);
            args(&mut cmd);
            cmd
        };
        commands.call(&self.name.key, call, within, read).await.map(|(answer, _)| answer)
    }

    /// Runs one call of a step that may need several. Also returns, if another call must follow, the unreachable nodes that this one has
    /// discovered.
    pub(crate) async fn run_part<T>(
        self,
        commands: &Commands,
        args: impl Fn(&mut Cmd) + Sync,
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> StoreResult<(T, Option<Vec<u8>>)> {
        let split = |answer| {
            let (answer, nodes) = to_go_on(answer);
            Some((read(answer)?, nodes))
        };
        self.run(commands, args, within, split).await
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

/// Converts the milliseconds of a script's answer; `None` for -1.
fn duration(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// What a take reports beside its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TakeRemarks {
    /// Whether the remaining time is longer than the holder's token says.
    pub(crate) is_doubtful: bool,
    /// Whether the token was in the queue before and has lost its position.
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

/// Parses the answer of REPAIR: the holder's remaining time.
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
    let ints: Option<Vec<i64>> =
        parts.into_iter().map(|part| if let Value::Int(int) = part { Some(int) } else { None }).collect();
    ints?.try_into().ok()
}

/// Splits an answer that requires another call into the answer proper and its last part, the unreachable nodes.
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
