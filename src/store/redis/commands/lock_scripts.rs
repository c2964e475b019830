//! The steps that give a lock to a waiter. A call passes a bounded number of waiters that do not hear, because it holds
//! the server up for all; where there are more, it says so, and is followed by another.
//!
//! Between two calls a mutex is free and has a queue, and a permit is available, as after the death of a holder:
//! whichever step comes next goes on, whoever sends it. So a process that dies there costs the waiters what one costs that
//! dies before it has freed the lock.

use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::sleep;
use uuid::Uuid;

use super::Commands;
use super::call::refused;
use super::lock_replies::{
    Remarks, ints, permit_freed, permit_taken, remaining, semaphore_state, taken, to_go_on, yes,
};
use super::lock_step::{Step, end, place, push_create};
use crate::store::lock_store::{
    Change, MutexTaken, Offer, PermitFreed, PermitTaken, SemaphoreState, Take, TakePermit, Taken,
};
use crate::store::names::LockName;
use crate::store::redis::errors::reply::unexpected;
use crate::store::redis::scripts::{self, millis};
use crate::store::{StoreError, StoreErrorKind, Token};

/// The nodes that were found not to hear, so that none of them is tried by each call.
#[derive(Debug, Default)]
pub(crate) struct Deaf(Vec<u8>);

impl Deaf {
    /// How many are remembered: more have hardly died together, and each call carries them.
    const MOST: usize = 100;
    /// 32 digits each.
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

/// One call: what it answers, and if it is to be followed by another, the nodes that it has found.
async fn call<T>(
    commands: &Commands,
    step: Step<'_>,
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
) -> Result<(MutexTaken, Remarks), StoreError> {
    let (mut deaf, mut old, mut was_held) = (Deaf::default(), ask.instead, false);
    loop {
        let args = |cmd: &mut Cmd| {
            cmd.arg(ask.token.as_str()).arg(end(ask.ttl));
            let goes_on = old.is_some() || !deaf.0.is_empty();
            // The server reads each argument, so what most takes ask is left unsaid.
            if !ask.queue || again || goes_on {
                cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
            }
            if goes_on {
                cmd.arg(old.map_or("", Token::as_str));
                deaf.arg(cmd);
            }
        };
        let (answer, nodes) = call(commands, Step::taking(name), args, within, Some).await?;
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
    give_mutex(commands, Step::giving(&scripts::MUTEX_FREE, name), args, within).await
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
    give_mutex(commands, Step::offering(&scripts::MUTEX_OFFER, name), args, within).await
}

pub(crate) async fn break_mutex(
    commands: &Commands,
    name: &LockName,
    within: Duration,
) -> Result<bool, StoreError> {
    give_mutex(commands, Step::giving(&scripts::MUTEX_BREAK, name), |_| {}, within).await
}

/// Takes a mutex from its holder by this step, and passes it on. Whether there was a holder.
async fn give_mutex(
    commands: &Commands,
    step: Step<'_>,
    args: impl Fn(&mut Cmd) + Sync,
    within: Duration,
) -> Result<bool, StoreError> {
    let name = step.name;
    let (was_held, mut more) = call(commands, step, args, within, yes).await?;
    let (mut deaf, none) = (Deaf::default(), Token::mint(Uuid::new_v4()));
    while let Some(nodes) = more {
        deaf.learn(&nodes);
        let args = |cmd: &mut Cmd| {
            cmd.arg(none.as_str()).arg("");
            deaf.arg(cmd);
        };
        (_, more) = call(commands, Step::giving(&scripts::MUTEX_FREE, name), args, within, yes).await?;
    }
    Ok(was_held)
}

pub(crate) async fn take_permit(
    commands: &Commands,
    name: &LockName,
    (ask, again): (TakePermit<'_>, bool),
    within: Duration,
) -> Result<(PermitTaken, Remarks), StoreError> {
    let mut deaf = Deaf::default();
    loop {
        let args = |cmd: &mut Cmd| {
            cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
            cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
            push_create(cmd, ask.semaphore);
            deaf.arg(cmd);
        };
        let step = Step::taking_permit(name);
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
    let step = Step::semaphore(&scripts::SEMAPHORE_FREE, name);
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
    let step = Step::semaphore(&scripts::SEMAPHORE_REFRESH, name);
    let (is_held, more) = call(commands, step, args, within, yes).await?;
    serve(commands, name, more, within).await?;
    Ok(is_held)
}

/// Serves the rest of the queue, if there is `more` of it. How many permits are available then.
async fn serve(
    commands: &Commands,
    name: &LockName,
    mut more: Option<Vec<u8>>,
    within: Duration,
) -> Result<Option<u32>, StoreError> {
    let (mut deaf, none, mut available) = (Deaf::default(), Token::mint(Uuid::new_v4()), None);
    while let Some(nodes) = more {
        deaf.learn(&nodes);
        let args = |cmd: &mut Cmd| {
            cmd.arg(none.as_str()).arg("");
            deaf.arg(cmd);
        };
        let step = Step::semaphore(&scripts::SEMAPHORE_FREE, name);
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
        let step = Step::semaphore(&scripts::SEMAPHORE_CHANGE, name);
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
            let look = Step::semaphore(&scripts::SEMAPHORE_LOOK, name);
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
) -> Result<(MutexTaken, Remarks), StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(ask.token.as_str()).arg(end(ask.ttl)).arg(u8::from(ask.queue)).arg(u8::from(again));
    };
    let step = if again { Step::offering } else { Step::giving };
    let answer = step(&scripts::MUTEX_BARGE, name).run(commands, args, within, Some).await?;
    repaired(commands, name, taken(answer), within).await
}

/// The answer to a take, once the mutex has no more time left than its holder has asked for. That is looked at by a step of
/// its own, because a holder may have asked for more than its token says, and hardly any take has to know.
pub(crate) async fn repaired(
    commands: &Commands,
    name: &LockName,
    answer: Option<(MutexTaken, Remarks)>,
    within: Duration,
) -> Result<(MutexTaken, Remarks), StoreError> {
    let (mut taken, remarks) = answer.ok_or_else(|| refused(unexpected()))?;
    if remarks.is_doubtful
        // Without an answer the waiter sleeps on the longer time; whichever asks next finds it too.
        && let Ok(remaining) = Step::repairing(name).run(commands, |_| {}, within, remaining).await
    {
        taken.taken = Taken::Busy { remaining };
    }
    Ok((taken, remarks))
}

/// Gives back what was granted to a waiter that has left. It would be missing until it expires, which some
/// mutexes never do; so this is tried for a while.
pub(crate) async fn give_back(commands: Commands, name: LockName, token: Token, within: Duration) {
    const PAUSES: [u64; 6] = [50, 200, 1_000, 3_000, 10_000, 0];
    for pause in PAUSES {
        // Who was granted it is in no queue any more, so the time to live, by which a place is found, is none.
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
