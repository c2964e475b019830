//! The lock toolkit on a Redis server: one script per step.
//!
//! | key | holds |
//! |---|---|
//! | `sg1:m:{tag}`, or a key with a prefix of the user's | the mutex: its holder's token |
//! | `sg1:mq:{tag}`, or `sg1:pq:{key}` | its queue: of each who waits the token and the time to live, first come first |
//! | `sg1:mf:{tag}`, or `sg1:pf:{key}` | the latest fence |
//! | `sg1:sh:{tag}` | the holders of a semaphore's permits, by the moment their leases end |
//! | `sg1:sq:{tag}` | its queue: of each who waits the token and the lease |
//! | `sg1:sm:{tag}` | layout, what it was created with, what was added, its idle time in ms |
//!
//! A mutex under a user's prefix has companions of other names, because its key may read like the tag of
//! another mutex.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, Value};
use tokio::time::sleep;

use super::RedisStore;
use super::call::{refused, run_call};
use super::client::unexpected;
use super::scripts::{self, By, Script, millis};
use super::topology::Commands;
use crate::store::grants::Await;
use crate::store::locks::{
    Announced, Change, Create, LockName, LockStore, MutexHolder, MutexTaken, PermitFreed, PermitTaken,
    SemaphoreState, Take, TakePermit, Taken,
};
use crate::store::{Reply, StoreError, StoreErrorKind, Token};

/// A script for one lock.
struct Step<'a> {
    script: &'a Script,
    name: &'a LockName,
    /// What the names of its keys begin with, after its own.
    parts: &'a [&'a str],
}

impl<'a> Step<'a> {
    /// A step that gives the mutex away, and needs all its keys for that.
    fn giving(script: &'a Script, name: &'a LockName) -> Self {
        let prefixed = name.key == name.tag;
        let parts = if prefixed { &["sg1:pq", "sg1:pf"] } else { &["sg1:mq", "sg1:mf"] };
        Self { script, name, parts }
    }

    /// A step that may tell those who wait.
    fn telling(script: &'a Script, name: &'a LockName) -> Self {
        let Self { parts, .. } = Self::giving(script, name);
        Self { script, name, parts: &parts[..1] }
    }

    /// A step that stays with the mutex's own key.
    fn alone(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &[] }
    }

    fn semaphore(script: &'a Script, name: &'a LockName) -> Self {
        Self { script, name, parts: &["sg1:sq", "sg1:sm"] }
    }

    async fn run<T>(
        self,
        commands: &Commands,
        args: impl Fn(&mut Cmd) + Sync,
        within: Duration,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<T, StoreError> {
        let call = |by: By| {
            let mut cmd = self.script.call_on(by, self.name, self.parts, 256);
            args(&mut cmd);
            cmd
        };
        let answer = run_call(commands, &self.name.key, call, within).await?;
        read(answer).ok_or_else(|| refused(unexpected()))
    }
}

impl LockStore for RedisStore {
    fn take_mutex<'a>(
        &'a self,
        name: &'a LockName,
        ask: Take<'a>,
        within: Duration,
    ) -> Reply<'a, MutexTaken> {
        Box::pin(async move {
            self.inbox.open();
            let again = self.grants.asks_again(ask.token);
            let args = |cmd: &mut Cmd| {
                cmd.arg(ask.token.as_str()).arg(end(ask.ttl)).arg(u8::from(ask.queue)).arg(u8::from(again));
                if let Some(old) = ask.instead {
                    cmd.arg(old.as_str());
                }
            };
            Step::giving(&scripts::MUTEX_TAKE, name).run(&self.commands, args, within, taken).await
        })
    }

    fn free_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        Box::pin(free_mutex(&self.commands, name, token, ttl, within))
    }

    fn extend_mutex<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Reply<'a, bool> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(token.as_str()).arg(end(ttl));
            };
            Step::telling(&scripts::MUTEX_EXTEND, name).run(&self.commands, args, within, yes).await
        })
    }

    fn look_at_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Option<MutexHolder>> {
        Box::pin(Step::alone(&scripts::MUTEX_LOOK, name).run(&self.commands, |_| {}, within, mutex_holder))
    }

    fn break_mutex<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, bool> {
        Box::pin(Step::giving(&scripts::MUTEX_BREAK, name).run(&self.commands, |_| {}, within, yes))
    }

    fn take_permit<'a>(
        &'a self,
        name: &'a LockName,
        ask: TakePermit<'a>,
        within: Duration,
    ) -> Reply<'a, PermitTaken> {
        Box::pin(async move {
            self.inbox.open();
            let again = self.grants.asks_again(ask.token);
            let args = |cmd: &mut Cmd| {
                cmd.arg(ask.token.as_str()).arg(millis(ask.lease));
                cmd.arg(u8::from(ask.queue)).arg(u8::from(again));
                push_create(cmd, ask.semaphore);
            };
            Step::semaphore(&scripts::SEMAPHORE_TAKE, name)
                .run(&self.commands, args, within, permit_taken)
                .await
        })
    }

    fn free_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, PermitFreed> {
        Box::pin(free_permit(&self.commands, name, token, lease, within))
    }

    fn refresh_permit<'a>(
        &'a self,
        name: &'a LockName,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, bool> {
        Box::pin(async move {
            let args = |cmd: &mut Cmd| {
                cmd.arg(token.as_str()).arg(millis(lease));
            };
            Step::semaphore(&scripts::SEMAPHORE_REFRESH, name).run(&self.commands, args, within, yes).await
        })
    }

    fn look_at_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        let look = Step::semaphore(&scripts::SEMAPHORE_LOOK, name);
        Box::pin(look.run(&self.commands, |_| {}, within, semaphore_state))
    }

    fn change_semaphore<'a>(
        &'a self,
        name: &'a LockName,
        change: Change,
        within: Duration,
    ) -> Reply<'a, Option<SemaphoreState>> {
        Box::pin(async move {
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
            Step::semaphore(&scripts::SEMAPHORE_CHANGE, name)
                .run(&self.commands, args, within, semaphore_state)
                .await
        })
    }

    fn await_grant(&self, name: &LockName, token: &Token) -> Await {
        self.grants.register(name, token)
    }

    fn grants_arrive(&self) -> bool {
        self.inbox.hears() && self.keyspace.hears()
    }

    fn grants_are_claims(&self) -> bool {
        self.commands.is_spread()
    }

    fn announce<'a>(&'a self, name: &'a LockName, within: Duration) -> Reply<'a, Announced> {
        Box::pin(self.keyspace.announce(&name.key, within))
    }
}

async fn free_mutex(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    ttl: Option<Duration>,
    within: Duration,
) -> Result<bool, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(place(token, end(ttl)));
    };
    Step::giving(&scripts::MUTEX_FREE, name).run(commands, args, within, yes).await
}

async fn free_permit(
    commands: &Commands,
    name: &LockName,
    token: &Token,
    lease: Duration,
    within: Duration,
) -> Result<PermitFreed, StoreError> {
    let args = |cmd: &mut Cmd| {
        cmd.arg(token.as_str()).arg(place(token, millis(lease)));
    };
    Step::semaphore(&scripts::SEMAPHORE_FREE, name).run(commands, args, within, permit_freed).await
}

/// Gives back what was granted to a waiter that has left. It would be missing until it expires, which some
/// mutexes never do; so this is tried for a while.
pub(super) async fn give_back(commands: Commands, name: LockName, token: Token, within: Duration) {
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

/// A mutex's time to live in milliseconds, 0 for none.
fn end(ttl: Option<Duration>) -> u64 {
    ttl.map_or(0, millis)
}

/// A waiter as it stands in a queue.
fn place(token: &Token, ms: u64) -> String {
    format!("{}{ms}", token.as_str())
}

fn push_create(cmd: &mut Cmd, semaphore: Create) {
    cmd.arg(semaphore.capacity).arg(millis(semaphore.idle_ttl));
}

pub(super) fn yes(answer: Value) -> Option<bool> {
    match answer {
        Value::Int(1) => Some(true),
        Value::Int(0) => Some(false),
        _ => None,
    }
}

/// Milliseconds as a script answers them; `None` for -1.
fn duration(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

pub(super) fn taken(answer: Value) -> Option<MutexTaken> {
    let (number, was_held) = match answer {
        Value::Int(number) => (number, false),
        Value::Array(parts) => match parts[..] {
            [Value::Int(number), Value::Int(was_held)] => (number, was_held == 1),
            _ => return None,
        },
        _ => return None,
    };
    let taken = match number {
        1.. => Taken::Granted { fence: number.unsigned_abs() },
        0 => return None,
        _ => Taken::Busy { remaining: duration(-2 - number) },
    };
    Some(MutexTaken { taken, was_held })
}

pub(super) fn mutex_holder(answer: Value) -> Option<Option<MutexHolder>> {
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

pub(super) fn permit_taken(answer: Value) -> Option<PermitTaken> {
    let [granted, available, created_with, next_expiry] = ints(answer)?;
    Some(PermitTaken {
        granted: granted == 1,
        available: u32::try_from(available).ok()?,
        created_with: u32::try_from(created_with).ok()?,
        next_expiry: duration(next_expiry),
    })
}

pub(super) fn permit_freed(answer: Value) -> Option<PermitFreed> {
    let [was_held, available] = ints(answer)?;
    Some(PermitFreed { was_held: was_held == 1, available: u32::try_from(available).ok()? })
}

pub(super) fn semaphore_state(answer: Value) -> Option<Option<SemaphoreState>> {
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
        // What others have put there holds a permit too, but has no token to name it by.
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

/// So many integers.
fn ints<const N: usize>(answer: Value) -> Option<[i64; N]> {
    let Value::Array(parts) = answer else { return None };
    let ints: Option<Vec<i64>> =
        parts.into_iter().map(|part| if let Value::Int(int) = part { Some(int) } else { None }).collect();
    ints?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_script_answers_is_no_mutex_that_is_busy() {
        for answer in [Value::Int(0), Value::Array(vec![Value::Int(0), Value::Int(1)]), Value::Nil] {
            assert!(taken(answer).is_none());
        }
    }
}
