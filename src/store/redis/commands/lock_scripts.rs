//! The steps that give a lock to a waiter. One call passes a bounded number of waiters that do not hear, because it blocks
//! the server; if there are more, it says so, and another call follows.
//!
//! Between two calls a mutex with a queue is free, or a permit is available, as after the death of a holder: the next step
//! by any process continues. So a process that dies there costs the waiters as much as one that dies before it frees the
//! lock.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::sleep;
use uuid::Uuid;

use super::Commands;
use super::call::refused;
use super::lock_replies::{
    TakeRemarks, ints, permit_freed, permit_taken, remaining, semaphore_state, taken, to_go_on, yes,
};
use super::lock_step::{LockStep, end, place, push_create};
use crate::store::lock_store::{
    Change, MutexTaken, Offer, PermitFreed, PermitTaken, SemaphoreState, Take, TakePermit, Taken,
};
use crate::store::names::LockName;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis};
use crate::store::{StoreError, StoreErrorKind, Token};

/// The nodes that did not hear, so that each call does not try them again.
#[derive(Debug, Default)]
pub(crate) struct UnreachableNodes(Vec<u8>);

impl UnreachableNodes {
    /// How many are remembered: more will hardly have died together, and each call carries them.
    const MOST: usize = 100;
    /// The length of a node's id in digits.
    const LEN: usize = 32;

    fn learn(&mut self, nodes: &[u8]) {
        self.0.extend_from_slice(nodes);
        let excess = self.0.len().saturating_sub(Self::MOST * Self::LEN);
        self.0.drain(..excess);
    }

    fn arg(&self, cmd: &mut Cmd) {
        if !self.0.is_empty() {
            cmd.arg(&self.0[..]);
        }
    }
}

/// One call: its answer, and the nodes it has discovered if another call must follow.
async fn call<T>(
    commands: &Commands,
    step: LockStep<'_>,
    args: impl Fn(&mut Cmd) + Sync,
    within: Duration,
    read: impl FnOnce(Value) -> Option<T>,
) -> Result<(T, Option<Vec<u8>>), StoreError> {
    let split = |answer| {
        let (answer, nodes) = to_go_on(answer);
        Some((read(answer)?, nodes))
    };
    step.run(commands, args, within, split).await
}

pub(crate) async fn take_mutex(
    commands: &Commands,
    name: &LockName,
    (ask, again): (Take<'_>, bool),
    within: Duration,
) -> Result<(MutexTaken, TakeRemarks), StoreError> {
    let (mut deaf, mut old, mut was_held) = (UnreachableNodes::default(), ask.instead, false);
    loop {
        let args = |cmd: &mut Cmd| {
            cmd.arg(ask.token.as_str()).arg(end(ask.ttl));
            let goes_on = old.is_some() || !deaf.0.is_empty();
            // The server parses each argument, so those that most takes do not need are left out.
            if !ask.queue || again || goes_on {
                cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
            }
            if goes_on {
                cmd.arg(old.map_or("", Token::as_str));
                deaf.arg(cmd);
            }
        };
        let (answer, nodes) = call(commands, LockStep::taking(name), args, within, Some).await?;
        let Some(nodes) = nodes else {
            let (taken, remarks) = repaired(commands, name, taken(answer), within).await?;
            return Ok((MutexTaken { was_held: was_held || taken.was_held, ..taken }, remarks));
        };
        if old.take().is_some() {
            let [_, held] = ints(answer).ok_or_else(|| refused(unexpected()))?;
            was_held = held == 1;
        }
        deaf.learn(&nodes);
    }
}

pub(crate) async fn free_mutex(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    ttl: Option<Duration>,
    within: Duration,
) -> Result<bool, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(end(ttl));
    };
    give_mutex(commands, LockStep::giving(&scripts::MUTEX_FREE, name), args, within).await
}

pub(crate) async fn offer_mutex(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    Offer { ttl, bound }: Offer,
    within: Duration,
) -> Result<bool, StoreError> {
    let bound = u64::try_from(bound.as_micros()).unwrap_or(u64::MAX).min(1 << 50);
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(end(ttl)).arg(bound);
    };
    give_mutex(commands, LockStep::offering(&scripts::MUTEX_OFFER, name), args, within).await
}

pub(crate) async fn break_mutex(
    commands: &Commands,
    name: &LockName,
    within: Duration,
) -> Result<bool, StoreError> {
    give_mutex(commands, LockStep::giving(&scripts::MUTEX_BREAK, name), |_| {}, within).await
}

/// Takes a mutex from its holder by this step, and passes it on. Returns whether there was a holder.
async fn give_mutex(
    commands: &Commands,
    step: LockStep<'_>,
    args: impl Fn(&mut Cmd) + Sync,
    within: Duration,
) -> Result<bool, StoreError> {
    let name = step.name;
    let (was_held, mut more) = call(commands, step, args, within, yes).await?;
    let (mut deaf, none) = (UnreachableNodes::default(), Token::mint(Uuid::new_v4()));
    while let Some(nodes) = more {
        deaf.learn(&nodes);
        let args = |cmd: &mut Cmd| {
            cmd.arg(none.as_str()).arg("");
            deaf.arg(cmd);
        };
        (_, more) = call(commands, LockStep::giving(&scripts::MUTEX_FREE, name), args, within, yes).await?;
    }
    Ok(was_held)
}

pub(crate) async fn take_permit(
    commands: &Commands,
    name: &LockName,
    (ask, again): (TakePermit<'_>, bool),
    within: Duration,
) -> Result<(PermitTaken, TakeRemarks), StoreError> {
    let mut deaf = UnreachableNodes::default();
    loop {
        let args = |cmd: &mut Cmd| {
            cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
            cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
            push_create(cmd, ask.semaphore);
            deaf.arg(cmd);
        };
        let step = LockStep::taking_permit(name);
        match call(commands, step, args, within, permit_taken).await? {
            (taken, None) => return Ok(taken),
            (_, Some(nodes)) => deaf.learn(&nodes),
        }
    }
}

pub(crate) async fn free_permit(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    lease: Duration,
    within: Duration,
) -> Result<PermitFreed, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(place(token, millis(lease)));
    };
    let step = LockStep::semaphore(&scripts::SEMAPHORE_FREE, name);
    let (freed, more) = call(commands, step, args, within, permit_freed).await?;
    let available = serve(commands, name, more, within).await?.unwrap_or(freed.available);
    Ok(PermitFreed { available, ..freed })
}

pub(crate) async fn refresh_permit(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    lease: Duration,
    within: Duration,
) -> Result<bool, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(millis(lease));
    };
    let step = LockStep::semaphore(&scripts::SEMAPHORE_REFRESH, name);
    let (is_held, more) = call(commands, step, args, within, yes).await?;
    serve(commands, name, more, within).await?;
    Ok(is_held)
}

/// Serves the rest of the queue, if there is `more`. Returns how many permits are available then.
async fn serve(
    commands: &Commands,
    name: &LockName,
    mut more: Option<Vec<u8>>,
    within: Duration,
) -> Result<Option<u32>, StoreError> {
    let (mut deaf, none, mut available) = (UnreachableNodes::default(), Token::mint(Uuid::new_v4()), None);
    while let Some(nodes) = more {
        deaf.learn(&nodes);
        let args = |cmd: &mut Cmd| {
            cmd.arg(none.as_str()).arg("");
            deaf.arg(cmd);
        };
        let step = LockStep::semaphore(&scripts::SEMAPHORE_FREE, name);
        let freed;
        (freed, more) = call(commands, step, args, within, permit_freed).await?;
        available = Some(freed.available);
    }
    Ok(available)
}

pub(crate) async fn change_semaphore(
    commands: &Commands,
    name: &LockName,
    change: Change,
    within: Duration,
) -> Result<Option<SemaphoreState>, StoreError> {
    let args = |cmd: &mut Cmd| match change {
        Change::Ensure(semaphore) => push_create(cmd.arg("ensure"), semaphore),
        Change::Add { permits, semaphore } => {
            push_create(cmd.arg("add"), semaphore);
            cmd.arg(permits);
        }
        Change::Sweep => {
            cmd.arg("sweep");
        }
        Change::Delete => {
            cmd.arg("delete");
        }
    };
    let (mut told, mut was_created, mut recovered) = (0, false, 0);
    let state = loop {
        let step = LockStep::semaphore(&scripts::SEMAPHORE_CHANGE, name);
        let (answer, more) = call(commands, step, args, within, Some).await?;
        if more.is_none() {
            break semaphore_state(answer).ok_or_else(|| refused(unexpected()))?;
        }
        let [told_now, made, ended] = ints(answer).ok_or_else(|| refused(unexpected()))?;
        told += u32::try_from(told_now).unwrap_or(u32::MAX);
        recovered += u32::try_from(ended).unwrap_or(u32::MAX);
        if change != Change::Delete {
            was_created = made == 1;
            serve(commands, name, more, within).await?;
            let look = LockStep::semaphore(&scripts::SEMAPHORE_LOOK, name);
            break look.run(commands, |_| {}, within, semaphore_state).await?;
        }
    };
    Ok(state.map(|state| SemaphoreState {
        waiting: state.waiting.saturating_add(told),
        created: state.created || was_created,
        recovered: state.recovered.saturating_add(recovered),
        ..state
    }))
}

pub(crate) async fn barge(
    commands: &Commands,
    name: &LockName,
    (ask, again): (Take<'_>, bool),
    within: Duration,
) -> Result<(MutexTaken, TakeRemarks), StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(ask.token.as_str()).arg(end(ask.ttl)).arg(u8::from(ask.queue)).arg(u8::from(again));
    };
    let step = if again { LockStep::offering } else { LockStep::giving };
    let answer = step(&scripts::MUTEX_BARGE, name).run(commands, args, within, Some).await?;
    repaired(commands, name, taken(answer), within).await
}

/// The answer to a take, after REPAIR has limited the mutex's remaining time to what its holder has asked for. This is a
/// separate step, because a holder may have asked for more than its token says, and few takes need it.
pub(crate) async fn repaired(
    commands: &Commands,
    name: &LockName,
    answer: Option<(MutexTaken, TakeRemarks)>,
    within: Duration,
) -> Result<(MutexTaken, TakeRemarks), StoreError> {
    let (mut taken, remarks) = answer.ok_or_else(|| refused(unexpected()))?;
    if remarks.is_doubtful
        // Without an answer the waiter sleeps for the longer time; the next take finds the same.
        && let Ok(remaining) = LockStep::repairing(name).run(commands, |_| {}, within, remaining).await
    {
        taken.taken = Taken::Busy { remaining };
    }
    Ok((taken, remarks))
}

/// Gives back a lock that was granted to a waiter that has left. Otherwise it is lost until it expires, which some mutexes
/// never do; so this is tried several times.
pub(crate) async fn give_back(commands: Commands, name: LockName, token: Token, within: Duration) {
    const PAUSES: [u64; 6] = [50, 200, 1_000, 3_000, 10_000, 0];
    for pause in PAUSES {
        // A grant removes the waiter from the queue, so the time to live, which identifies a place, is not needed.
        let freed = if name.is_semaphore() {
            free_permit(&commands, &name, &token, Duration::ZERO, within).await.map(|_| ())
        } else {
            free_mutex(&commands, &name, &token, None, within).await.map(|_| ())
        };
        match freed.map_err(|error| error.kind) {
            Ok(()) | Err(StoreErrorKind::Closed | StoreErrorKind::Refused) => return,
            Err(_) => sleep(Duration::from_millis(pause)).await,
        }
    }
}
